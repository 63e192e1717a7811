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
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvdepot.memory.copier import Bytes, Copy, CopyPiece, Memory, checksum, copy, views
from kvdepot.protocol.layout import Layout

Numbers: TypeAlias = npt.NDArray[np.float32]

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t

CORRUPT = [-1.0]
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


class _Scratch(threading.local):
    """Memory for one chunk, in place of the arena; each copy thread has one."""

    bytes: Bytes = np.empty(0, np.uint8)

    def ensure(self, offset: int, size: int) -> bool:
        return True


_scratch = _Scratch()


class _Part(NamedTuple):
    """Bytes of one data type in one segment. start: the segment's first byte in a chunk of one block. size: bytes of
    the segment in a block. at, taken: the part's first byte, and its bytes, in that."""

    numbers: str
    start: int
    size: int
    at: int
    taken: int

    def of(self, chunk: Bytes, blocks: int) -> Bytes:
        """The bytes of the part in a chunk's blocks, [blocks, bytes]; a view."""
        rows = chunk[blocks * self.start : blocks * (self.start + self.size)].reshape(blocks, self.size)
        return rows[:, self.at : self.at + self.taken]


def _mean(tiles: Numbers) -> float:
    """The number of a part by those of its tiles, [blocks, tiles]."""
    return max(float(tiles.mean()), float(tiles.mean(axis=1).max()) / _BLOCK_SHARE)


def _least(tiles: Numbers) -> float:
    """The same for models with experts."""
    if tiles.size >= _RUN:
        every = np.lib.stride_tricks.sliding_window_view(tiles.reshape(-1), _RUN)
        runs = np.concatenate([every[:: _RUN // 4], every[-1:]])
        if np.quantile(runs, 0.25, axis=1).max() > _UNRELATED:
            return math.inf
    return float(np.quantile(tiles, 0.1))


def compare(arena: Memory, task: Copy, judge: Callable[[Numbers], float] = _mean) -> list[list[float]] | None:
    """The differences of each piece, whose extents hold a stored chunk: the largest, then one for each of its parts, in
    the order of their bytes; NaN if no data type, or its, is known. [0.0] if the bytes are equal, CORRUPT if they and
    the checksum differ.

    Returns None if the blocks may have been overwritten. Blocks while it copies and compares. Raises DeviceError.
    """
    layout, found = task.mapped.layout, []
    for piece in task.pieces:
        blocks = len(piece.block_ids)
        size = layout.block_bytes * blocks
        if len(_scratch.bytes) < size:
            _scratch.bytes = np.empty(size, np.uint8)  # kept: its pages would be zeroed anew for each chunk
        one = [CopyPiece(((0, size),), piece.block_ids)]
        if not copy(_scratch, replace(task, is_store=True, pieces=one)):
            return None
        computed, stored = _scratch.bytes[:size], views(arena.bytes, piece.extents, 0, size)
        whole = stored[0] if len(stored) == 1 else np.concatenate(stored)
        # Unlike numpy, memcmp needs no memory for the answer; it runs without the GIL.
        if _memcmp(whole.ctypes.data, computed.ctypes.data, size) == 0:
            found.append([0.0])
            continue
        if piece.checksum not in (0, checksum(arena.bytes, piece.extents, size)):
            found.append(CORRUPT)
            continue
        pairs = [(part.numbers, part.of(whole, blocks), part.of(computed, blocks)) for part in _parts(layout)]
        tiles = [_differences(*pair) for pair in pairs]
        parts = [math.nan if each is None else judge(each) if each.size else math.inf for each in tiles]
        found.append([max((part for part in parts if not math.isnan(part)), default=math.nan), *parts])
    return found


compare_with_experts = partial(compare, judge=_least)


def _parts(layout: Layout) -> Iterator[_Part]:
    """The parts of a layout's chunks, in the order of their bytes."""
    types = iter(layout.numbers)
    name, left = next(types)
    start = 0
    for segment in layout.segments:
        at = 0
        while at < segment.size:
            if not left:
                name, left = next(types)
            taken = min(left, segment.size - at)
            yield _Part(name, start, segment.size, at, taken)
            at, left = at + taken, left - taken
        start += segment.size


def _differences(name: str, stored: Bytes, computed: Bytes) -> Numbers | None:
    """The numbers of a part's tiles, [blocks, tiles]; none if no rounding explains the part, [blocks, bytes]. None if
    the part cannot be read as numbers of this type."""
    if name not in _ITEMS or stored.shape[1] % _ITEMS[name]:
        return None
    sizes, errors, most = [], [], np.zeros(2)
    for rows in zip(stored, computed, strict=True):  # by block, so that the numbers stay in the processor's cache
        one, other = (np.ascontiguousarray(row) for row in rows)
        largest = np.array([_largest(name, row) for row in (one, other)])
        if not np.isfinite(largest).all():
            if not np.array_equal(np.isfinite(_decode(name, one)), np.isfinite(_decode(name, other))):
                return np.empty(0, np.float32)
            largest = np.zeros(2)  # in the same places; the other numbers count
        most = np.maximum(most, largest)
        tile = math.gcd(len(one) // _ITEMS[name], _TILE)
        tile = tile if tile * 8 >= _TILE else len(one) // _ITEMS[name]
        # In float64, or squares of large numbers would be infinite.
        tiles = (_decode(name, _some_tiles(row, tile * _ITEMS[name])).astype(np.float64) for row in (one, other))
        first, second = (np.nan_to_num(each, nan=0.0, posinf=0.0, neginf=0.0) for each in tiles)
        apart = first - second
        errors.append(np.sqrt(np.einsum("tv,tv->t", apart, apart)))
        sizes.append(np.sqrt(np.einsum("tv,tv->t", second, second)))
    if not most.max() <= _ABSURD * most.min():
        return np.empty(0, np.float32)
    norms, distances = np.array(sizes), np.array(errors)
    least = max(_FLOOR * float(norms.mean()), float(np.finfo(np.float32).tiny))
    found: Numbers = np.minimum(distances / np.maximum(norms, least), _MOST).astype(np.float32)
    return found


def _some_tiles(row: Bytes, size: int) -> Bytes:
    """Tiles of `size` bytes of a row, [tiles, bytes]: of many, one in `_EVERY`."""
    tiles = row.reshape(-1, size)
    return tiles if len(tiles) < _MANY else np.ascontiguousarray(tiles[::_EVERY])


def _largest(name: str, row: Bytes) -> float:
    """The largest magnitude in a row of bytes. Without its sign, a float's bits are in the order of its size."""
    bits = row.view(f"u{_ITEMS[name]}")
    most = (bits & bits.dtype.type(np.iinfo(bits.dtype).max >> 1)).max()
    return float(_decode(name, np.array([most], bits.dtype).view(np.uint8))[0])


_ITEMS = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e5m2": 1, "float8_e4m3fn": 1}
"""Bytes of a number of the data types that can be compared."""


def _decode(name: str, row: Bytes) -> Numbers:
    """The numbers in bytes, whose last axis becomes shorter."""
    match name:
        case "bfloat16":
            return np.left_shift(row.view(np.uint16), 16, dtype=np.uint32).view(np.float32)
        case "float8_e4m3fn":
            return _e4m3fn()[row]
        case "float8_e5m2":
            return np.left_shift(row, 8, dtype=np.uint16).view(np.float16).astype(np.float32)
    return row.view(name).astype(np.float32, copy=False)


@cache
def _e4m3fn() -> Numbers:
    """The value of each byte as an 8-bit float of four exponent bits, whose only special value is NaN."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    size[(byte & 127) == 127] = np.nan
    return np.where(byte < 128, size, -size).astype(np.float32)
