"""Compares blocks of an engine with the chunks that are stored, as numbers: how far are they apart?

Runs on the thread of the worker's lane. Two honest computations of one prompt differ by rounding, which grows from
layer to layer and depends on batch shapes, kernels and processors. So the answer is a relative difference, for which
the caller has a limit.

    number of a chunk   the largest of its parts; a part: one segment's numbers of one data type
    number of a part    the mean of its tiles, or a quarter of the mean in one of its blocks, if that is larger
    number of a tile    |stored - computed| / |computed|, Euclidean, of `_TILE` neighbouring values; at most `_MOST`
                        (of many tiles, one in `_EVERY`)

Keys may be a hundred times larger than values: a relative difference of a whole layer would not see the values. A mean
over small tiles does, and one tile near zero changes that mean little. A value that no rounding explains (not finite,
or `_ABSURD` times the largest of the other side) makes the part's number infinite.

In a mixture of experts, rounding decides between experts that are about as good, and all KV after such a token differs:
parts of the same prompt by up to 0.3, states by up to 0.6. Unrelated KV differs by more than 1. So with experts, a
part's number is the difference that nine in ten of its tiles exceed: near the beginning of a prompt, some tiles differ
by rounding alone. The number is infinite if `_RUN` neighbouring tiles have nothing in common.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from kvdepot.devices.blocks import ArenaBytes, BlockMemory, CopyPiece, Scratch
from kvdepot.memory.extents import Bytes, views
from kvdepot.protocol.layout import Layout

Bits: TypeAlias = Any
"""An array of numbers, as unsigned integers of the numbers' size."""
Floats: TypeAlias = npt.NDArray[np.float32]
Numbers: TypeAlias = npt.NDArray[np.float64]

_TILE = 64
_MOST = 2.0
"""The difference of vectors of equal length in opposite directions."""
_ABSURD = 16.0
_BLOCK_SHARE = 4
_EVERY = 5
"""The step between compared tiles of a long row; no divisor of the distances between keys, values or heads."""
_MANY = 512
_RUN, _UNRELATED = 32, 0.75
"""A number of neighbouring tiles, and the difference that three in four of them exceed if they are unrelated."""
_FLOOR = 1e-3
"""Tiles smaller than this, relative to the mean tile of their part, count as if they had this size."""
_BATCH = 1 << 19
"""Numbers that are compared at once. More would leave the processor's cache; fewer would be calls of Python's."""
_SLICE = 4 << 20
"""Bytes of blocks that are copied at once, so that they are compared while they are in that cache."""
_ALONE = 30 << 10
"""Numbers that torch converts at once, in the calling thread: from 32,768 on, it uses threads that the engine needs."""
_LARGE, _SMALL = 2.0**50, 2.0**-30
"""Squares of larger numbers may be infinite in float32, and those of tiles of a smaller mean size zero."""


class _Type(NamedTuple):
    """A data type of numbers. special: the bits of infinity, or of NaN if the type has no infinity; larger bits are
    NaN."""

    bits: type[np.unsignedinteger[Any]]
    special: int


_TYPES = {
    "float32": _Type(np.uint32, 0x7F800000),
    "float16": _Type(np.uint16, 0x7C00),
    "bfloat16": _Type(np.uint16, 0x7F80),
    "float8_e5m2": _Type(np.uint8, 0x7C),
    "float8_e4m3fn": _Type(np.uint8, 0x7F),
}


_kept = threading.local()


def _scratch(size: int) -> Scratch:
    """Scratch of at least `size` bytes. Each thread keeps its own: its pages would be zeroed anew for each chunk."""
    found: Scratch | None = getattr(_kept, "scratch", None)
    if found is None or len(found.bytes) < size:
        found = _kept.scratch = Scratch(np.empty(size, np.uint8))
    return found


class _Parts(NamedTuple):
    """Parts of equal size and type, one in each of `segments` adjacent segments. start: the first segment's first byte
    in a chunk of one block. size: bytes of a segment in a block. at, taken: a part's first byte in its segment, and its
    bytes."""

    numbers: str
    start: int
    size: int
    at: int
    taken: int
    segments: int = 1

    @property
    def bits(self) -> Any:
        """The unsigned type that holds a number's bits; uint8 if the bytes cannot be read as numbers."""
        bits = _TYPES[self.numbers].bits if self.numbers in _TYPES else np.uint8
        return bits if self.taken % np.dtype(bits).itemsize == 0 else np.uint8


def compare(
    blocks: BlockMemory, arena: ArenaBytes, pieces: Sequence[CopyPiece], has_experts: bool
) -> list[list[float]]:
    """The largest difference of each piece, whose extents hold a stored chunk, then that of each part in the order of
    bytes. NaN: of a part whose data type is unknown. [0.0]: the bytes are equal.

    Blocks while it copies and compares. Raises DeviceError.
    """
    parts, judge = list(_parts(blocks.layout)), _least if has_experts else _mean
    return [_compare(_Chunk(blocks, arena.bytes, piece), parts, judge) for piece in pieces]


def _compare(chunk: _Chunk, parts: Sequence[_Parts], judge: Callable[[Numbers], Numbers]) -> list[float]:
    ranges = chunk.ranges()
    differing = next((each for each in ranges if not chunk.read(*each).equals(parts)), None)
    if differing is None:
        return [0.0]
    tiles = [_Tiles(each, len(chunk.piece.block_ids)) for each in parts]
    for each in sorted(ranges, key=lambda each: each != differing):  # first the blocks that are in scratch already
        blocks = chunk.read(*each)
        for some in tiles:
            some.add(blocks)
    numbers = [number for some in tiles for number in some.numbers(judge)]
    return [max((number for number in numbers if not math.isnan(number)), default=math.nan), *numbers]


class _Chunk:
    """A stored chunk, and the same blocks as they were computed."""

    def __init__(self, blocks: BlockMemory, arena: Bytes, piece: CopyPiece) -> None:
        self.arena, self.piece = arena, piece
        self._blocks, self._last = blocks, _Blocks(self, 0, 0, np.empty(0, np.uint8))

    def ranges(self) -> list[tuple[int, int]]:
        count, some = len(self.piece.block_ids), max(1, _SLICE // self._blocks.layout.block_bytes)
        return [(first, min(first + some, count)) for first in range(0, count, some)]

    def read(self, first: int, end: int) -> _Blocks:
        """Copy the blocks `[first, end)` of the chunk into scratch, over the blocks that were there."""
        if (first, end) != (self._last.first, self._last.end):
            size = self._blocks.layout.block_bytes * (end - first)
            scratch = _scratch(size)
            self._blocks.move(scratch, [CopyPiece(((0, size),), self.piece.block_ids[first:end])], is_store=True)
            self._last = _Blocks(self, first, end, scratch.bytes)
        return self._last


@dataclass
class _Blocks:
    """The blocks `[first, end)` of a chunk. computed: their bytes in scratch."""

    chunk: _Chunk
    first: int
    end: int
    computed: Bytes

    def equals(self, parts: Sequence[_Parts]) -> bool:
        """Whether the stored and the computed bytes are equal. Needs no more memory than a batch."""
        batches = ((each, *some) for each in parts for some in self.batches(each, each.taken))
        return all(np.array_equal(*self.rows(*some)) for some in batches)

    def batches(self, parts: _Parts, size: int) -> Iterator[tuple[int, int]]:
        """Ranges of segments that have about `_BATCH` numbers, if there are `size` in a block's segment."""
        some = max(1, _BATCH // (size * (self.end - self.first)))
        return ((at, min(at + some, parts.segments)) for at in range(0, parts.segments, some))

    def rows(self, parts: _Parts, at: int, to: int) -> tuple[Bits, Bits]:
        """The numbers of the parts' segments `[at, to)`, stored and computed, [segments, blocks, numbers]."""
        piece, count, size = self.chunk.piece, self.end - self.first, parts.size
        start, step = len(piece.block_ids) * parts.start, len(piece.block_ids) * size
        stored = views(self.chunk.arena, piece.extents, start + at * step, (to - at) * step)
        if len(stored) == 1:
            one = stored[0].reshape(to - at, -1, size)[:, self.first : self.end]
        else:
            ranges = [(start + segment * step + self.first * size, count * size) for segment in range(at, to)]
            found = [part for each in ranges for part in views(self.chunk.arena, piece.extents, *each)]
            one = np.concatenate(found).reshape(to - at, count, size)
        computed = self.computed[count * (parts.start + at * size) : count * (parts.start + to * size)]
        taken = slice(parts.at, parts.at + parts.taken)
        first, second = (each[:, :, taken].view(parts.bits) for each in (one, computed.reshape(one.shape)))
        return first, second


def _parts(layout: Layout) -> Iterator[_Parts]:
    def each() -> Iterator[_Parts]:
        types = iter(layout.numbers or [("unknown", layout.block_bytes)])
        name, left = next(types)
        start = 0
        for segment in layout.segments:
            at = 0
            while at < segment.size:
                if not left:
                    name, left = next(types)
                taken = min(left, segment.size - at)
                yield _Parts(name, start, segment.size, at, taken)
                at, left = at + taken, left - taken
            start += segment.size

    for _, alike in itertools.groupby(each(), lambda part: part._replace(start=0)):
        first, *others = alike
        yield first._replace(segments=1 + len(others))


class _Tiles:
    """Sizes and differences of the tiles of some parts, block by block."""

    def __init__(self, parts: _Parts, blocks: int) -> None:
        self._parts = parts
        self._kind = _TYPES.get(parts.numbers)
        if self._kind is None or parts.bits != self._kind.bits:
            self._kind = None
            return
        values = parts.taken // np.dtype(parts.bits).itemsize
        tile = math.gcd(values, _TILE)
        self._tile = tile if tile * 8 >= _TILE else values
        self._step = 1 if values // self._tile < _MANY else _EVERY
        tiles = -(-values // self._tile // self._step)
        self._largest = np.zeros((2, parts.segments, blocks), parts.bits)  # magnitudes: stored, and computed
        self._strange = np.zeros((parts.segments, blocks), np.bool_)
        self._norms, self._distances = np.empty((2, parts.segments, blocks, tiles))

    def add(self, blocks: _Blocks) -> None:
        if self._kind is None:
            return
        tiles = self._norms.shape[2]
        for at, to in blocks.batches(self._parts, tiles * self._tile):
            here = np.s_[at:to, blocks.first : blocks.end]
            pair = blocks.rows(self._parts, at, to)
            largest = np.array([_largest(each) for each in pair])
            is_large = float(_decode(self._parts.numbers, largest).max()) > _LARGE
            special = (largest >= self._kind.special).any(axis=0)
            if special.any():
                masks = [_magnitudes(each) >= self._kind.special for each in pair]
                self._strange[here] = (masks[0] != masks[1]).any(axis=2)
                largest[:, special] = 0  # special numbers in the same places are equal; the other numbers count
                pair = np.where(masks[0], 0, pair[0]), np.where(masks[1], 0, pair[1])
                is_large = True
            self._largest[:, at:to, blocks.first : blocks.end] = largest
            one, other = (each.reshape(*each.shape[:2], -1, self._tile)[:, :, :: self._step] for each in pair)
            numbers = np.float64 if is_large else np.float32
            for first in range(0, tiles, some := max(1, _BATCH // self._tile)):
                part = np.s_[:, :, first : first + some]
                found = _sizes(self._parts.numbers, one[part], other[part], numbers)
                self._norms[here][part], self._distances[here][part] = found

    def numbers(self, judge: Callable[[Numbers], Numbers]) -> list[float]:
        """The difference of each part: NaN if its bytes are no numbers of its type, infinite if no rounding explains
        it."""
        if self._kind is None:
            return [math.nan] * self._parts.segments
        one, other = _decode(self._parts.numbers, self._largest).max(axis=2)
        explained = (np.maximum(one, other) <= _ABSURD * np.minimum(one, other)) & ~self._strange.any(axis=1)
        least = np.maximum(_FLOOR * self._norms.mean(axis=(1, 2), keepdims=True), np.finfo(np.float32).tiny)
        numbers = judge(np.minimum(self._distances / np.maximum(self._norms, least), _MOST))
        return [float(number) for number in np.where(explained, numbers, math.inf)]


def _magnitudes(bits: Bits) -> Bits:
    """The bits without their sign: as integers, they have the order of the numbers' magnitudes."""
    return bits & bits.dtype.type(np.iinfo(bits.dtype).max >> 1)


def _largest(bits: Bits) -> Bits:
    """The bits of the largest magnitude of each row, [..., numbers]. The largest unsigned integer is the largest
    negative number, if there is one, and the largest signed integer the largest positive one."""
    positive = bits.view(f"i{bits.itemsize}").max(axis=-1)
    return np.maximum(_magnitudes(bits.max(axis=-1)), np.maximum(positive, 0).view(bits.dtype))


def _sizes(name: str, stored: Bits, computed: Bits, numbers: type[np.floating[Any]]) -> tuple[Numbers, Numbers]:
    """The sizes of computed tiles, and of their differences from the stored ones, [segments, blocks, tiles].

    numbers: the type of their squares; float64 is used if float32 turns out to be too small.
    """
    first, second = _decode(name, stored), _decode(name, computed)
    sizes = _squares(second)
    if numbers is np.float64 or sizes.mean(axis=-1).min() < _SMALL**2:
        first, second = first.astype(np.float64), second.astype(np.float64)
        sizes = _squares(second)
    return np.sqrt(sizes), np.sqrt(_squares(np.subtract(first, second, out=second)))  # in scratch, not in the arena


def _squares(tiles: npt.NDArray[Any]) -> Any:
    """The sum of the squares in each tile, [segments, blocks, tiles, numbers]."""
    return np.einsum("sbtv,sbtv->sbt", tiles, tiles)


def _decode(name: str, bits: Bits) -> Floats:
    """The numbers with these bits. All numbers of 8 bits may be scaled by one factor; differences are relative."""
    match name:
        case "float32":
            return cast(Floats, bits.view(np.float32))
        case "bfloat16":
            wide = bits.astype(np.uint32)
            return cast(Floats, np.left_shift(wide, 16, out=wide).view(np.float32))
        case "float8_e5m2":
            bits = np.left_shift(bits, 8, dtype=np.uint16)
        case "float8_e4m3fn":  # read with exponents of five bits: 256 times smaller
            signed = np.left_shift(bits.view(np.int8), 7, dtype=np.int16)
            bits = np.bitwise_and(signed, ~(1 << 14), out=signed)
    return _widen(np.ascontiguousarray(bits).view(np.float16))


def _widen(numbers: npt.NDArray[np.float16]) -> Floats:
    """`numbers` in float32, converted by torch: numpy takes 20 times as long."""
    import torch

    found = np.empty(numbers.shape, np.float32)
    pair = torch.from_numpy(found.reshape(-1)), torch.from_numpy(numbers.reshape(-1))
    for wide, narrow in zip(*(each.split(_ALONE) for each in pair), strict=True):
        wide.copy_(narrow)
    return found


def _mean(tiles: Numbers) -> Numbers:
    """The number of each part, from the numbers of its tiles, [parts, blocks, tiles]."""
    of_blocks = tiles.mean(axis=2)
    return cast(Numbers, np.maximum(of_blocks.mean(axis=1), of_blocks.max(axis=1) / _BLOCK_SHARE))


def _least(tiles: Numbers) -> Numbers:
    """The number of each part in a model with experts, from the numbers of its tiles, [parts, blocks, tiles]."""
    rows = tiles.reshape(len(tiles), -1)
    numbers: Numbers = np.quantile(rows, 0.1, axis=1)
    if rows.shape[1] >= _RUN:
        for part in np.flatnonzero((rows > _UNRELATED).sum(axis=1) >= _RUN * 3 // 4):
            every = np.lib.stride_tricks.sliding_window_view(rows[part], _RUN)
            runs = np.concatenate([every[:: _RUN // 4], every[-1:]])
            if np.quantile(runs, 0.25, axis=1).max() > _UNRELATED:
                numbers[part] = math.inf
    return numbers
