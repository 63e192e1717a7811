"""Compares blocks of an engine with the chunks that are stored, as numbers: how far are they apart?

Runs on copy threads. Two honest computations of one prompt differ by rounding: other batch shapes, kernels and
processors add it up layer by layer. So the answer is a relative difference, and whoever asks has a limit for it.

    number of a chunk   the largest of its parts; a part: one segment's numbers of one data type
    number of a part    the mean of its tiles, or a quarter of the mean in one of its blocks, if that is larger
    number of a tile    |stored - computed| / |computed|, Euclidean, of `_TILE` neighbouring values; at most `_MOST`
                        (of many tiles, one in `_EVERY`)

Keys may be a hundred times larger than values: a relative difference of a whole layer would not see the values. A mean
of small tiles does, and one tile near zero moves it little. A value that no rounding explains (not finite, or `_ABSURD`
times the largest of the other side) makes it infinite.

In a mixture of experts, rounding decides between experts that are about as good, and all that follows such a token
differs: parts of the same prompt by up to 0.3, states by up to 0.6. What has nothing in common differs by more than
1. So with experts, a part's number is what nine in ten of its tiles exceed: near the beginning of a prompt, some of
them differ by rounding alone. It is infinite if `_RUN` neighbouring tiles have nothing in common.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvdepot.devices.blocks import ArenaBytes, BlockMemory, CopyPiece
from kvdepot.memory.extents import Bytes, views
from kvdepot.protocol.layout import Layout

Bits: TypeAlias = Any
"""An array of numbers as unsigned integers of as many bytes."""
Numbers: TypeAlias = npt.NDArray[np.float64]

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t

_TILE = 64
_MOST = 2.0
"""The difference of vectors of equal length in opposite directions."""
_ABSURD = 16.0
_BLOCK_SHARE = 4
_EVERY = 5
"""The step between compared tiles of a long row; no divisor of what keys, values and heads alternate by."""
_MANY = 512
_RUN, _UNRELATED = 32, 0.75
"""Neighbouring tiles, and the number that three in four of them exceed if they have nothing in common."""
_FLOOR = 1e-3
"""Tiles smaller than this, relative to the mean tile of their part, count as if they had this size."""
_BATCH = 1 << 17
"""Numbers that are compared at once: so few that they stay in the processor's cache."""
_ALONE = 30 << 10
"""Numbers that torch converts in the calling thread: from 32,768 on, it asks the threads that an engine needs."""
_LARGE, _SMALL = 2.0**50, 2.0**-30
"""In float32, squares of larger numbers may be infinite, and those of tiles of a smaller mean size zero."""


class _Type(NamedTuple):
    """A data type of numbers. special: the bits of infinity, or of NaN without it; larger ones are NaN."""

    bits: type[np.unsignedinteger[Any]]
    special: int


_TYPES = {
    "float32": _Type(np.uint32, 0x7F800000),
    "float16": _Type(np.uint16, 0x7C00),
    "bfloat16": _Type(np.uint16, 0x7F80),
    "float8_e5m2": _Type(np.uint8, 0x7C),
    "float8_e4m3fn": _Type(np.uint8, 0x7F),
}


@dataclass
class _Scratch:
    """Memory for the blocks of one chunk, in place of the arena."""

    bytes: Bytes


_kept = threading.local()


def _scratch(size: int) -> _Scratch:
    """Scratch of at least `size` bytes. Each thread keeps its own: its pages would be zeroed anew for each chunk."""
    found: _Scratch | None = getattr(_kept, "scratch", None)
    if found is None or len(found.bytes) < size:
        found = _kept.scratch = _Scratch(np.empty(size, np.uint8))
    return found


class _Parts(NamedTuple):
    """Parts of equal size and type, in as many `segments` behind each other. start: the first segment's first byte in
    a chunk of one block. size: bytes of a segment in a block. at, taken: the part's first byte, and its bytes, in that.
    """

    numbers: str
    start: int
    size: int
    at: int
    taken: int
    segments: int = 1


def compare(
    blocks: BlockMemory, arena: ArenaBytes, pieces: Sequence[CopyPiece], has_experts: bool
) -> list[list[float]]:
    """The differences of each piece, whose extents hold a stored chunk: the largest, then one for each of its parts, in
    the order of their bytes; NaN if no data type, or its, is known. [0.0] if the bytes are equal.

    Blocks while it copies and compares. Raises DeviceError.
    """
    every, judge, found = list(_parts(blocks.layout)), _least if has_experts else _mean, []
    for piece in pieces:
        size = blocks.layout.block_bytes * len(piece.block_ids)
        scratch = _scratch(size)
        blocks.move(scratch, [CopyPiece(((0, size),), piece.block_ids)], is_store=True)
        chunk = _Chunk(arena.bytes, piece, scratch.bytes[:size])
        if chunk.is_equal():
            found.append([0.0])
            continue
        numbers = [number for parts in every for number in _differences(chunk, parts, judge)]
        found.append([max((number for number in numbers if not math.isnan(number)), default=math.nan), *numbers])
    return found


@dataclass
class _Chunk:
    """A stored chunk, and the same blocks as they were computed."""

    arena: Bytes
    piece: CopyPiece
    computed: Bytes

    def is_equal(self) -> bool:
        """Whether their bytes are equal. Unlike numpy, memcmp needs no memory for that; it runs without the GIL."""
        start = 0
        for stored in views(self.arena, self.piece.extents, 0, len(self.computed)):
            if _memcmp(stored.ctypes.data, self.computed[start:].ctypes.data, len(stored)):
                return False
            start += len(stored)
        return True

    def rows(self, parts: _Parts, first: int, end: int) -> tuple[Bits, Bits]:
        """The numbers of the parts' rows `[first, end)`, stored and computed, [rows, numbers]. A row: one block of one
        part."""
        start, size = len(self.piece.block_ids) * parts.start + first * parts.size, (end - first) * parts.size
        stored = views(self.arena, self.piece.extents, start, size)
        whole = stored[0] if len(stored) == 1 else np.concatenate(stored)
        taken = slice(parts.at, parts.at + parts.taken)
        one, other = (
            each.reshape(-1, parts.size)[:, taken].view(_TYPES[parts.numbers].bits)
            for each in (whole, self.computed[start : start + size])
        )
        return one, other


def _parts(layout: Layout) -> Iterator[_Parts]:
    """The parts of a layout's chunks, in the order of their bytes."""

    def each() -> Iterator[_Parts]:
        types = iter(layout.numbers)
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


def _differences(chunk: _Chunk, parts: _Parts, judge: Callable[[Numbers], Numbers]) -> list[float]:
    """The number of each part: NaN if its bytes are no numbers of its type, infinite if no rounding explains it."""
    kind = _TYPES.get(parts.numbers)
    if kind is None or parts.taken % kind.bits().itemsize:
        return [math.nan] * parts.segments
    per_part = len(chunk.piece.block_ids)
    rows, values = parts.segments * per_part, parts.taken // kind.bits().itemsize
    tile = math.gcd(values, _TILE)
    tile = tile if tile * 8 >= _TILE else values
    step = 1 if values // tile < _MANY else _EVERY
    tiles = -(-values // tile // step)
    at_once = max(1, _BATCH // (tiles * tile))
    largest = np.empty((2, rows), kind.bits)
    strange = np.zeros(rows, np.bool_)
    norms, distances = np.empty((2, rows, tiles))
    for first in range(0, rows, at_once):
        end = min(first + at_once, rows)
        pair = chunk.rows(parts, first, end)
        here = largest[:, first:end]
        for most, row in zip(here, pair, strict=True):
            most[:] = _largest(row)
        in_double = float(_decode(parts.numbers, here).max()) > _LARGE
        if (here >= kind.special).any():
            masks = [_magnitudes(row) >= kind.special for row in pair]
            strange[first:end] = (masks[0] != masks[1]).any(axis=1)
            here[:, (here >= kind.special).any(axis=0)] = 0  # in the same places; the other numbers count
            pair = np.where(masks[0], 0, pair[0]), np.where(masks[1], 0, pair[1])
            in_double = True
        one, other = (row.reshape(end - first, -1, tile)[:, ::step] for row in pair)
        for at in range(0, tiles, at_most := max(1, _BATCH // tile)):
            some = np.s_[:, at : at + at_most]
            sizes = _sizes(parts.numbers, one[some], other[some], in_double)
            norms[first:end][some], distances[first:end][some] = sizes
    most = _decode(parts.numbers, largest).reshape(2, parts.segments, per_part).max(axis=2)
    unexplained = strange.reshape(parts.segments, per_part).any(axis=1) | ~(
        most.max(axis=0) <= _ABSURD * most.min(axis=0)
    )
    norms, distances = (each.reshape(parts.segments, per_part, tiles) for each in (norms, distances))
    least = np.maximum(_FLOOR * norms.mean(axis=(1, 2), keepdims=True), np.finfo(np.float32).tiny)
    numbers = judge(np.minimum(distances / np.maximum(norms, least), _MOST))
    return np.where(unexplained, math.inf, numbers).tolist()


def _magnitudes(bits: Bits) -> Bits:
    """The bits without their sign, which are in the order of the numbers' magnitudes."""
    return bits & bits.dtype.type(np.iinfo(bits.dtype).max >> 1)


def _largest(bits: Bits) -> Bits:
    """The bits of the largest magnitude of each row, [rows, numbers]. The largest unsigned integer is the largest
    negative number, if there is one, and the largest signed integer the largest positive one."""
    positive = bits.view(f"i{bits.itemsize}").max(axis=1)
    return np.maximum(_magnitudes(bits.max(axis=1)), np.maximum(positive, 0).view(bits.dtype))


def _sizes(name: str, stored: Bits, computed: Bits, in_double: bool) -> tuple[Numbers, Numbers]:
    """The sizes of computed tiles, and of their differences from the stored ones, [rows, tiles]. in_double: float32 may
    be too small for their squares."""
    first, second = _decode(name, stored), _decode(name, computed)
    sizes = _squares(second)
    if in_double or sizes.mean(axis=1).min() < _SMALL**2:
        first, second = first.astype(np.float64), second.astype(np.float64)
        sizes = _squares(second)
    return np.sqrt(sizes), np.sqrt(_squares(np.subtract(first, second, out=second)))  # in scratch, not in the arena


def _squares(tiles: npt.NDArray[Any]) -> Any:
    """The sum of the squares in each tile, [rows, tiles, numbers]."""
    return np.einsum("rtv,rtv->rt", tiles, tiles)


def _decode(name: str, bits: Bits) -> npt.NDArray[np.float32]:
    """The numbers with these bits; all those of 8 bits are multiplied by one factor, if at all."""
    match name:
        case "float32":
            return bits.view(np.float32)
        case "bfloat16":
            return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)
        case "float8_e5m2":
            bits = np.left_shift(bits, 8, dtype=np.uint16)
        case "float8_e4m3fn":  # with exponents of five bits, which makes them 256 times smaller
            signed = np.left_shift(bits.view(np.int8), 7, dtype=np.int16)
            bits = np.bitwise_and(signed, ~(1 << 14), out=signed)
    return _widen(np.ascontiguousarray(bits).view(np.float16))


def _widen(numbers: npt.NDArray[np.float16]) -> npt.NDArray[np.float32]:
    """The same in float32. numpy takes 20 times as long."""
    import torch

    found = np.empty(numbers.shape, np.float32)
    pair = torch.from_numpy(found.reshape(-1)), torch.from_numpy(numbers.reshape(-1))
    for wide, narrow in zip(*(each.split(_ALONE) for each in pair), strict=True):
        wide.copy_(narrow)
    return found


def _mean(tiles: Numbers) -> Numbers:
    """The numbers of parts by those of their tiles, [parts, blocks, tiles]."""
    of_blocks = tiles.mean(axis=2)
    return np.maximum(of_blocks.mean(axis=1), of_blocks.max(axis=1) / _BLOCK_SHARE)


def _least(tiles: Numbers) -> Numbers:
    """The same for models with experts."""
    rows = tiles.reshape(len(tiles), -1)
    numbers = np.quantile(rows, 0.1, axis=1)
    if rows.shape[1] >= _RUN:
        for part in np.flatnonzero((rows > _UNRELATED).sum(axis=1) >= _RUN * 3 // 4):
            every = np.lib.stride_tricks.sliding_window_view(rows[part], _RUN)
            runs = np.concatenate([every[:: _RUN // 4], every[-1:]])
            if np.quantile(runs, 0.25, axis=1).max() > _UNRELATED:
                numbers[part] = math.inf
    return numbers
