"""Compares blocks of an engine with the chunks that are stored, as numbers: how far are they apart?

Runs on copy threads. Two honest computations of one prompt differ by rounding: other batch shapes, kernels and
processors add it up layer by layer. So the answer is a relative difference, and whoever asks has a limit for it.

    number of a chunk   the largest of its parts; a part: one segment's numbers of one data type
    number of a part    the mean of its tiles, or a quarter of the mean in one of its blocks, if that is larger
    number of a tile    |stored - computed| / |computed|, Euclidean, of `_TILE` neighbouring values; at most `_MOST`

Keys may be a hundred times larger than values: a relative difference of a whole layer would not see the values. A mean
of small tiles does, and one token that took another expert, or one tile near zero, moves it little. A value that no
rounding explains (not finite, or `_ABSURD` times the largest of the other side) makes it infinite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvdepot.memory.copier import Bytes, Copy, CopyPiece, Memory, copy, views
from kvdepot.protocol.layout import Layout

Numbers: TypeAlias = npt.NDArray[np.float32]

_TILE = 64
_MOST = 2.0
"""The difference of vectors of equal length in opposite directions."""
_ABSURD = 16.0
_BLOCK_SHARE = 4
_FLOOR = 1e-3
"""Tiles smaller than this, relative to the mean tile of their part, count as if they had this size."""


class _Scratch:
    """Memory for one chunk, in place of the arena."""

    def __init__(self, size: int) -> None:
        self.bytes: Bytes = np.empty(size, np.uint8)

    def ensure(self, offset: int, size: int) -> bool:
        return True


class _Part(NamedTuple):
    """Bytes of one data type in one segment. start: the segment's first byte in the chunk. size: bytes of the segment
    in a block. at, taken: the part's first byte, and its bytes, in that."""

    numbers: str
    start: int
    size: int
    at: int
    taken: int

    def of(self, chunk: Bytes, blocks: int) -> Numbers | None:
        """The numbers of a chunk's blocks, [blocks, tiles, values]; None for a data type that is not known."""
        rows = chunk[blocks * self.start : blocks * (self.start + self.size)].reshape(blocks, self.size)
        found = _decode(self.numbers, np.ascontiguousarray(rows[:, self.at : self.at + self.taken]))
        if found is None:
            return None
        tile = math.gcd(found.shape[1], _TILE)
        return found.reshape(blocks, -1, tile if tile * 8 >= _TILE else found.shape[1])


def compare(arena: Memory, task: Copy) -> list[float] | None:
    """The difference of each piece, whose extents hold a stored chunk; NaN if its data types are not known.

    Returns None if the blocks may have been overwritten. Blocks while it copies and compares. Raises DeviceError.
    """
    layout, found = task.mapped.layout, []
    for piece in task.pieces:
        blocks = len(piece.block_ids)
        scratch = _Scratch(layout.block_bytes * blocks)
        one = [CopyPiece(((0, len(scratch.bytes)),), piece.block_ids)]
        if not copy(scratch, replace(task, is_store=True, pieces=one)):
            return None
        stored = views(arena.bytes, piece.extents, 0, len(scratch.bytes))
        whole = stored[0] if len(stored) == 1 else np.concatenate(stored)
        if np.array_equal(whole, scratch.bytes):
            found.append(0.0)
            continue
        pairs = ((part.of(whole, blocks), part.of(scratch.bytes, blocks)) for part in _parts(layout))
        known = [_difference(one, other) for one, other in pairs if one is not None and other is not None]
        found.append(max(known, default=math.nan))
    return found


def _parts(layout: Layout) -> Iterator[_Part]:
    """The parts of a layout's chunks, in the order of their bytes; `start` is that of a chunk of one block."""
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


def _difference(stored: Numbers, computed: Numbers) -> float:
    """The relative difference of a part, both [blocks, tiles, values]."""
    is_number = np.isfinite(computed)
    if not np.array_equal(is_number, np.isfinite(stored)):
        return math.inf
    if not is_number.all():
        stored, computed = np.where(is_number, stored, 0), np.where(is_number, computed, 0)
    least, most = sorted((float(np.abs(stored).max()), float(np.abs(computed).max())))
    if not most <= _ABSURD * least:
        return math.inf
    apart = stored - computed
    sizes = np.sqrt(np.einsum("btv,btv->bt", computed, computed))
    errors = np.sqrt(np.einsum("btv,btv->bt", apart, apart))
    least = max(_FLOOR * float(sizes.mean()), float(np.finfo(np.float32).tiny))
    errors = np.minimum(errors / np.maximum(sizes, least), _MOST)
    return max(float(errors.mean()), float(errors.mean(axis=1).max()) / _BLOCK_SHARE)


def _decode(name: str, rows: Bytes) -> Numbers | None:
    """The numbers in rows of bytes; None for a data type that is not known, or that does not fit."""
    item = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e5m2": 1, "float8_e4m3fn": 1}.get(name)
    if item is None or rows.shape[1] % item:
        return None
    if name == "float8_e4m3fn":
        return _e4m3fn()[rows]
    if name == "bfloat16":
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if name == "float8_e5m2":
        return (rows.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    return rows.view(name).astype(np.float32)


@cache
def _e4m3fn() -> Numbers:
    """The value of each byte as an 8-bit float of four exponent bits, whose only special value is NaN."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    size[(byte & 127) == 127] = np.nan
    return np.where(byte < 128, size, -size).astype(np.float32)
