"""The format of chunks that front ends of several engines share under a name, which has it on the wire.

An engine's blocks hold keys and values in an order of its own, which depends on its release and its processor. Under
`kvdepot.share_as`, an engine finds that order out and writes it into its model's name, `share:NAME FORMAT@kv-DIGEST`.
Other front ends read it in the server's status. So the format exists as long as the engine or a chunk does: it is
recorded with the chunks, and each registration brings it back. Invariant: layouts under a shared name have the
fingerprint of the format, so a front end that has misread it shares nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
from blake3 import blake3

from kvdepot.errors import ConfigError
from kvdepot.protocol.model_names import key_of_model, name_model
from kvdepot.protocol.status import MOST_NAME

if TYPE_CHECKING:
    import numpy.typing as npt

    Values: TypeAlias = npt.NDArray[np.unsignedinteger]

Axis: TypeAlias = tuple[tuple[int, int], ...]
"""Sizes and strides, in values, of the nested loops into which an axis falls, the innermost first."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class PartFormat(NamedTuple):
    """Where the keys, or the values, of a layer lie, from the layer's first value on."""

    start: int
    heads: Axis
    tokens: Axis
    dims: Axis


class BlockFormat(NamedTuple):
    """Where each key and value of an engine's block lies, in values from the block's first one.

    segment: values of a block in one of the layout's segments, all of which are equally large.
    """

    dtype: Literal["bfloat16", "float16", "float32"]
    segment: int
    layers: Axis
    keys: PartFormat
    values: PartFormat

    @property
    def geometry(self) -> tuple[str, int, int, int]:
        """The data type, and the numbers of layers, KV heads and dimensions of a head."""
        return self.dtype, _size(self.layers), _size(self.keys.heads), _size(self.keys.dims)

    @property
    def block_tokens(self) -> int:
        return _size(self.keys.tokens)

    @property
    def block_values(self) -> int:
        """The number of values of a block."""
        return 2 * self.block_tokens * math.prod(self.geometry[1:])

    @property
    def fingerprint(self) -> bytes:
        return blake3(b"kvdepot shared blocks 1" + msgspec.json.encode(self)).digest()

    def name(self, model: str) -> str:
        """The name on the wire of a model that `shared_name` has named. Raises ConfigError if it would be too long."""
        key = key_of_model(model)
        name = f"{model.removesuffix(key)} {msgspec.json.encode(self).decode()}{key}"
        if len(name) > MOST_NAME:  # a server's status would cut it
            raise refusal(f"its blocks take too many words to describe: {name}")
        return name

    def is_sound(self) -> bool:
        """Whether it describes keys and values of one shape, all within the block, and each loop within a segment or
        over segments."""
        axes = [self.layers, *self.keys[1:], *self.values[1:]]
        if self.segment < 1 or any(number < 1 for axis in axes for loop in axis for number in loop):
            return False
        for start, *axes in (self.keys, self.values):
            loops = [*self.layers, *itertools.chain(*axes)]
            inner = sum((size - 1) * stride for size, stride in loops if stride < self.segment)
            outer = sum((size - 1) * stride for size, stride in loops if stride >= self.segment)
            if (
                not 0 <= start <= start + inner + outer < self.block_values
                or start % self.segment + inner >= self.segment
            ):
                return False
            if any(stride % self.segment for _, stride in loops if stride >= self.segment):
                return False
        return [*map(_size, self.keys[1:])] == [*map(_size, self.values[1:])]

    def views(self, chunk: Values, blocks: int) -> Iterator[Values]:
        """The keys, then the values of each layer in a chunk of this many blocks.

        They have the loops of the heads, the blocks, and the loops of the tokens and dimensions as axes, in this order,
        outermost first: a tensor `[heads, tokens, dims]` can be viewed in this shape.
        """

        def place(at: int) -> int:
            """The place in the chunk of a place in the first block: a chunk has segment by segment of all blocks."""
            return at // self.segment * self.segment * blocks + at % self.segment

        for layer in _places(self.layers):
            for start, *axes in (self.keys, self.values):
                heads, tokens, dims = ([(size, place(stride)) for size, stride in reversed(axis)] for axis in axes)
                loops = [*heads, (blocks, self.segment), *tokens, *dims]
                yield np.lib.stride_tricks.as_strided(
                    chunk[place(start + int(layer)) :],
                    [size for size, _ in loops],
                    [stride * chunk.itemsize for _, stride in loops],
                )


def find_format(dtype: str, places: npt.NDArray[np.int64], starts: Sequence[int], segment: int) -> BlockFormat:
    """The format of blocks. Raises ConfigError if their order does not fall into loops.

    places: where the values of a layer lie, as `[keys and values, tokens, heads, dims]`, from its start on. starts: of
    each layer. segment: as in BlockFormat.
    """
    parts = []
    for place in places:
        start = place[0, 0, 0]
        along = place[:, 0, 0] - start, place[0, :, 0] - start, place[0, 0, :] - start
        tokens, heads, dims = along
        if not np.array_equal(place, start + tokens[:, None, None] + heads[:, None] + dims):
            raise refusal("the order of its values does not fall into loops over heads, tokens and dimensions")
        parts.append(PartFormat(int(start), _axis(heads), _axis(tokens), _axis(dims)))
    found = BlockFormat(dtype, segment, _axis(np.array(starts)), *parts)  # type: ignore[arg-type]
    if not found.is_sound():
        raise refusal(f"its blocks are not filled by keys and values alone: {found}")
    return found


def shared_name(name: str, facts: object) -> str:
    """The model's name of a format that is not known yet. facts: all that it depends on. Raises ConfigError."""
    check_name(name)
    return name_model(f"share:{name}", blake3(msgspec.json.encode([name, facts])).hexdigest())


def find_shared(models: Iterable[str], name: str) -> Iterator[tuple[str, BlockFormat]]:
    """The models, of those with these names on the wire, that are shared under a name, with their formats."""
    pattern = re.compile(rf"share:{re.escape(name)} (.+)@kv-[0-9a-f]+")
    for model, match in ((model, pattern.fullmatch(model)) for model in models):
        with contextlib.suppress(msgspec.MsgspecError):
            if match and (found := msgspec.json.decode(match[1], type=BlockFormat)).is_sound():
                yield model, found


def check_name(name: str) -> None:
    """Raise ConfigError for a name that cannot be shared under."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"share_as is {name!r:.80}: choose 1 to 64 letters, digits, dots, hyphens and underscores")


def refusal(why: str) -> ConfigError:
    """The error of an engine that cannot share."""
    return ConfigError(f"kvdepot.share_as is not possible here: {why}. Start this engine without it")


def _axis(places: npt.NDArray[np.int64]) -> Axis:
    """The loops that give these places, the first of which is 0. Raises ConfigError if none do."""
    loops = []
    while len(places) > 1:
        stride = int(places[1])
        differs = np.flatnonzero(places != stride * np.arange(len(places)))
        size = int(differs[0]) if len(differs) else len(places)
        inner, outer = places[:size], places[::size]
        if stride < 1 or len(places) % size or not np.array_equal(places.reshape(-1, size), outer[:, None] + inner):
            raise refusal("the order of its values does not fall into nested loops")
        loops.append((size, stride))
        places = outer
    return tuple(loops)


def _places(axis: Axis) -> npt.NDArray[np.int64]:
    """The reverse of `_axis`."""
    places = np.zeros(1, np.int64)
    for size, stride in axis:
        places = (stride * np.arange(size)[:, None] + places).reshape(-1)
    return places


def _size(axis: Axis) -> int:
    return math.prod(size for size, _ in axis)
