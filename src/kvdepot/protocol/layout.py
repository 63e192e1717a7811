"""Layouts say where the bytes of each block are, as segments of the memory of an engine's worker.

Used by the client to describe its paged KV tensors. The server knows `BlockFormat` alone. No torch, no I/O.
A block is bytes: no format is known by name (NHD, HND, MLA, fp8); shapes and strides are enough.

A tensor of any shape has one **block axis**. The bytes of one block form one or more contiguous runs; each run is a
**segment**, the same in every block, one block stride apart:

    segment s of block b:   [offset + b * stride, offset + b * stride + size)

A chunk of `n` blocks is stored segment by segment, in each the `n` blocks in prompt order:

    [segment 0: block 0 .. block n-1][segment 1: block 0 .. block n-1] ...
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
from blake3 import blake3

from kvdepot.errors import LayoutError

MAX_SEGMENTS = 1 << 16
"""The most segments in one layout; tensors that are more scattered cannot be copied at a useful speed."""
MAX_BLOCK_BYTES = 1 << 40


class BlockFormat(msgspec.Struct, frozen=True, array_like=True):
    """The part of a worker's layout that a server knows.

    fingerprint: 32 bytes, equal for two workers exactly when the bytes of a chunk mean the same. block_bytes: the bytes
    of a block, over all layers of the KV cache group.
    """

    fingerprint: bytes
    block_bytes: int

    def check(self) -> None:
        """Raise LayoutError for values that no worker registers."""
        if len(self.fingerprint) != 32:
            raise LayoutError(f"a layout's fingerprint has {len(self.fingerprint)} bytes, not 32")
        if not 0 < self.block_bytes <= MAX_BLOCK_BYTES:
            raise LayoutError(f"blocks of {self.block_bytes} bytes; the limit is {MAX_BLOCK_BYTES}")


class TensorView(NamedTuple):
    """One layer's paged KV as strided bytes in memory of this process. Strides and offset in bytes.

    mapping: names the memory, such as a torch storage, within this process; mapping_bytes: its size. numbers: the data
    types of a block's bytes, as in `Layout`; a single one holds for all bytes; empty: the first word of `dtype`.
    """

    name: str
    mapping: str
    mapping_bytes: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    dtype: str
    numbers: tuple[tuple[str, int], ...] = ()


class Mapping(msgspec.Struct, frozen=True, array_like=True):
    """Memory of this process that holds KV tensors, such as a torch storage. size: in bytes."""

    name: str
    size: int


class Segment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`size` bytes of every block, `stride` bytes from one block to the next, from `offset` in a mapping."""

    mapping: int
    offset: int
    stride: int
    size: int


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """Where the bytes of each block of one worker are.

    `fingerprint` (32 bytes) is equal for two layouts exactly when the bytes of a chunk mean the same: same layers,
    dtypes, shapes and byte order within a block. It does not depend on the number of blocks.
    numbers: the data types of a block's bytes, in the order of a chunk, each with its number of bytes; without them,
    chunks cannot be compared (devices/comparison.py).
    """

    mappings: list[Mapping]
    segments: list[Segment]
    num_blocks: int
    fingerprint: bytes
    numbers: list[tuple[str, int]] = []

    @property
    def block_bytes(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def format(self) -> BlockFormat:
        return BlockFormat(self.fingerprint, self.block_bytes)

    def check(self) -> None:
        """Raise LayoutError unless every byte of every block is inside its mapping."""
        if self.num_blocks < 1:
            raise LayoutError("layout has no blocks")
        if self.numbers and sum(size for _, size in self.numbers) != self.block_bytes:
            raise LayoutError(f"data types of {self.numbers} for blocks of {self.block_bytes} bytes")
        for number, segment in enumerate(self.segments):
            where = f"segment {number} {segment}"
            if segment.size < 1 or segment.offset < 0 or segment.stride < segment.size:
                raise LayoutError(f"{where}: its blocks are empty, negative or overlap")
            end = segment.offset + (self.num_blocks - 1) * segment.stride + segment.size
            if end > self.mappings[segment.mapping].size:
                raise LayoutError(
                    f"{where}: block {self.num_blocks - 1} ends at byte {end} of a mapping of "
                    f"{self.mappings[segment.mapping].size}"
                )


def chunk_format(chunk_bytes: int, meaning: str) -> BlockFormat:
    """The format of chunks that are copied whole, each as one block. meaning: describes the bytes of a chunk."""
    return BlockFormat(blake3(b"kvdepot chunks 1" + meaning.encode()).digest(), chunk_bytes)


def find_block_axes(views: Sequence[TensorView], block_tokens: int = 0) -> list[int]:
    """Find the block axis of each layer from its shape, for callers that did not name it.

    An axis is possible if every layer has it with the same number of blocks. The block axis is axis 0
    (`[num_blocks, ...]`), or axis 1 behind a K/V axis of two (`[2, num_blocks, ...]`). If both are possible,
    `block_tokens` (tokens per block; 0 = unknown) decides: an axis after the block axis then has that size, alone or
    fused with others. Five axes that begin with two, or four with the tokens in the third, are separate K and V,
    because a paged cache of two blocks would be useless. A tensor that may hold several layers is rejected: six axes
    or more, or a longer axis between the block axis and the tokens (`[layers, 2, blocks, tokens, ...]`). Raises
    LayoutError, with the shapes, unless exactly one interpretation is left.
    """
    if not views:
        raise LayoutError("no KV tensors were given")

    def possible(view: TensorView) -> list[int]:
        axes = [0] if len(view.shape) >= 2 else []
        if len(view.shape) >= 3 and view.shape[0] == 2:
            axes.append(1)
        if len(axes) == 2 and block_tokens:
            fits = [a for a in axes if any(n % block_tokens == 0 for n in view.shape[a + 1 :])]
            axes = fits or axes
        kv_apart = len(view.shape) >= 5 or (
            len(view.shape) == 4 and (view.shape[1] != block_tokens or view.shape[2] == block_tokens)
        )
        if len(axes) == 2 and kv_apart and view.shape[1] != 2:
            axes = [1]
        return [axis for axis in axes if not _may_hold_layers(view.shape, axis, block_tokens)]

    per_layer = [possible(view) for view in views]
    readings: list[list[int]] = []
    for count in {views[0].shape[axis] for axis in per_layer[0]}:
        choices = [
            [axis for axis in axes if view.shape[axis] == count] for view, axes in zip(views, per_layer, strict=True)
        ]
        readings += [list(reading) for reading in itertools.islice(itertools.product(*choices), 2)]
    if len(readings) != 1:
        shapes = ", ".join(f"{view.name} {list(view.shape)}" for view in views[:8])
        more = f" and {len(views) - 8} more" if len(views) > 8 else ""
        raise LayoutError(
            f"the shapes do not determine the block axis ({shapes}{more}): name it when registering (block_axes=...)"
        )
    return readings[0]


def _may_hold_layers(shape: Sequence[int], axis: int, block_tokens: int) -> bool:
    """Whether the presumed block axis may be an axis of layers, with the blocks behind it."""
    if len(shape) >= 6:
        return True
    inner = list(shape[axis + 1 :])
    before_tokens = inner[: inner.index(block_tokens)] if block_tokens in inner else []
    return max(before_tokens, default=0) > shape[axis]


def build_layout(views: Sequence[TensorView], block_axes: Sequence[int]) -> Layout:
    """Describe tensors whose block axes are known. Raises LayoutError if they cannot be described.

    Adjacent segments, such as those of fused or cross-layer tensors, are merged.
    """
    if len(views) != len(block_axes) or not views:
        raise LayoutError(f"{len(views)} KV tensors but {len(block_axes)} block axes")
    for view, axis in zip(views, block_axes, strict=True):
        if not isinstance(axis, int) or not 0 <= axis < len(view.shape):
            raise LayoutError(f"{view.name}: {axis!r:.20} is not an axis of shape {list(view.shape)}")
        if 0 in view.shape:
            raise LayoutError(f"{view.name}: shape {list(view.shape)} has no blocks, or blocks without bytes")
    counts = {view.shape[axis] for view, axis in zip(views, block_axes, strict=True)}
    if len(counts) != 1:
        raise LayoutError(f"layers disagree on the number of blocks: {sorted(counts)}")
    (num_blocks,) = counts
    mappings: dict[str, Mapping] = {}
    numbers: dict[str, int] = {}
    segments: list[Segment] = []
    types: list[tuple[tuple[str, int], ...]] = []  # data types of each segment
    identity = blake3(b"kvdepot layout 1")
    for view, axis in zip(views, block_axes, strict=True):
        number = numbers.setdefault(view.mapping, len(numbers))
        mappings[view.mapping] = Mapping(view.mapping, view.mapping_bytes)
        runs, run_bytes = _runs(view, axis)
        stride = view.strides[axis]
        if num_blocks == 1:
            stride = max(stride, run_bytes)  # the stride of an axis of size one is arbitrary
        segments += [Segment(number, view.offset + run, stride, run_bytes) for run in runs]
        kinds = view.numbers or ((view.dtype.partition(" ")[0], run_bytes),)
        if len(kinds) == 1:
            kinds = ((kinds[0][0], run_bytes),)
        elif len(runs) > 1 or sum(size for _, size in kinds) != run_bytes:
            kinds = (("unknown", run_bytes),)  # such bytes can be stored, not compared
        types += [kinds] * len(runs)
        identity.update(_meaning(view, axis))
        if len(segments) > MAX_SEGMENTS:
            raise LayoutError(f"KV tensors need more than {MAX_SEGMENTS} segments per block")
    given = segments
    segments, order = _merge(given)
    # Merging changes the order of a chunk's bytes, so it is part of their meaning.
    identity.update(msgspec.msgpack.encode([segment.size for segment in segments]))
    if order != sorted(order):
        identity.update(msgspec.msgpack.encode([(number, given[number].size) for number in order]))
    layout = Layout(
        mappings=list(mappings.values()),
        segments=segments,
        num_blocks=num_blocks,
        fingerprint=identity.digest(),
        numbers=_join(each for number in order for each in types[number]),
    )
    layout.check()
    return layout


def _join(types: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """The data types of consecutive bytes, with neighbours of the same type joined."""
    grouped = itertools.groupby(types, key=lambda each: each[0])
    return [(name, sum(size for _, size in group)) for name, group in grouped]


def _runs(view: TensorView, axis: int) -> tuple[list[int], int]:
    """Contiguous runs of one block: their offsets in ascending order, and the size of each in bytes."""
    inner = sorted(
        (stride, size)
        for i, (stride, size) in enumerate(zip(view.strides, view.shape, strict=True))
        if i != axis and size > 1
    )
    if any(stride <= 0 for stride, _ in inner) or view.strides[axis] < 0:
        raise LayoutError(f"{view.name}: shape {view.shape}, strides {view.strides} overlap or run backwards")
    for (stride, size), (outer, _) in itertools.pairwise(inner):
        if outer < stride * size:  # the order of the strides would not give the order of the values
            raise LayoutError(f"{view.name}: shape {view.shape}, strides {view.strides} overlap or interleave")
    run = view.item_bytes
    while inner and inner[0][0] == run:
        run *= inner.pop(0)[1]
    count = 1
    for _, size in inner:
        count *= size
    if count > MAX_SEGMENTS:
        raise LayoutError(f"{view.name}: shape {view.shape} falls into {count} runs a block")
    offsets = sorted(
        sum(index * stride for index, (stride, _) in zip(indices, inner, strict=True))
        for indices in itertools.product(*(range(size) for _, size in inner))
    )
    if any(later - earlier < run for earlier, later in itertools.pairwise(offsets)):
        raise LayoutError(f"{view.name}: shape {view.shape}, strides {view.strides} overlap")
    return offsets, run


def _meaning(view: TensorView, axis: int) -> bytes:
    """The meaning of a block's bytes, encoded: name, dtype, shape, and the order of the inner axes in memory."""
    inner = [i for i in range(len(view.shape)) if i != axis and view.shape[i] > 1]
    order = sorted(inner, key=lambda i: -view.strides[i])
    sizes = [view.shape[i] for i in range(len(view.shape)) if i != axis]
    return msgspec.msgpack.encode([view.name, view.dtype, sizes, [i - (i > axis) for i in order]])


def _merge(segments: Sequence[Segment]) -> tuple[list[Segment], list[int]]:
    """Join segments that are adjacent in memory in every block; the order in which they are given does not matter.

    Also returns the numbers of the given segments in the order of their bytes. Joined segments are in the order of
    memory, at the place of the one that was given first; other segments keep their order.
    """
    merged: list[tuple[list[int], Segment]] = []
    for number in sorted(range(len(segments)), key=lambda i: (segments[i].mapping, segments[i].offset)):
        segment = segments[number]
        joined, last = merged[-1] if merged else ([], None)
        if (
            last is not None
            and last.mapping == segment.mapping
            and last.stride == segment.stride
            and last.offset + last.size == segment.offset
            and last.size + segment.size <= last.stride
        ):
            joined.append(number)
            merged[-1] = joined, Segment(last.mapping, last.offset, last.stride, last.size + segment.size)
        else:
            merged.append(([number], segment))
    merged.sort(key=lambda each: min(each[0]))
    return [segment for _, segment in merged], [number for joined, _ in merged for number in joined]
