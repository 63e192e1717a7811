"""The one place where KV bytes move: between the mapped tensors of workers and the arena.

The server gives it tasks; a few threads run them with the GIL released, loads before stores, and report back.
The one law: it decides nothing. It copies what a task says, and says whether every byte arrived.

A chunk lies in the arena segment by segment, and its extents are filled in order (layout.py, space.py):

    logical bytes of a chunk     [seg 0: block 0..n-1][seg 1: block 0..n-1] ...
    segment s                    [n * before(s), n * before(s) + n * size(s))      before = sizes of earlier segments
    extents                      [0, len 0)[len 0, len 0 + len 1) ...              cut anywhere, at page multiples
"""

from __future__ import annotations

import itertools
import logging
import math
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from kvdepot import shm
from kvdepot.errors import KVDepotError
from kvdepot.layout import Layout, Segment
from kvdepot.space import Extents

__all__ = ["Call", "Copy", "CopyPiece", "Mapped", "Memory", "Mover", "checksum", "copy", "views"]

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.intp]

_MIN_UNIT = 512
"""Smallest unit to gather by index when segments are not dense; below it, one copy a block is faster."""


class Memory(Protocol):
    """What copies need of the arena (arena.Arena)."""

    bytes: Bytes

    def ensure(self, offset: int, size: int) -> bool: ...


@dataclass(slots=True)
class CopyPiece:
    """One chunk of one rank: its place in the arena and its blocks; the first `skip` blocks stay as they are."""

    extents: Extents
    block_ids: Ids
    skip: int = 0
    summed: bool = False
    """Whether its checksum is wanted."""


@dataclass(slots=True)
class Copy:
    """Copy `pieces` between `mapped` and the arena. `token` is the caller's and comes back with the outcome.

    A store checks the client's `fence` after its last byte: raised to `ticket` or beyond, it has failed. The outcome is
    one checksum a piece, of the arena's bytes (0 where none is wanted), or None when it failed.
    """

    token: Any
    is_store: bool
    mapped: Mapped
    pieces: list[CopyPiece]
    fence: Callable[[], int] | None = None
    ticket: int = 0
    whole: Callable[[], bool] | None = None
    """`mapped.whole`, or what remembers its answer for all tasks of one operation: asking costs a call a file."""


@dataclass(slots=True)
class Call:
    """Run something slow that is not a copy (map, unmap). Its return value is the outcome."""

    token: Any
    run: Callable[[], Any]


@dataclass
class _Rows:
    """One segment of all blocks, ready to be indexed by block id."""

    size: int
    strided: Bytes  # uint8[num_blocks, size]
    dense: bool  # blocks follow each other without a gap
    units: Bytes | None = None  # uint8[any, unit]: the same memory in pieces for np.take
    unit_ids: Ids | None = None  # units of a block, relative to block * unit_stride
    unit_stride: int = 1


@dataclass
class Mapped:
    """A worker's paged KV tensors as this process sees them."""

    layout: Layout
    rows: list[_Rows] = field(default_factory=list)
    _maps: list[mmap.mmap] = field(default_factory=list)
    _files: list[int] = field(default_factory=list)

    @classmethod
    def open(cls, layout: Layout) -> Mapped:
        """Map every file of a layout. Raises LayoutError when one is missing, too small or not ours."""
        mapped = cls(layout)
        views = []
        try:
            for mapping in layout.mappings:
                area, fd = shm.map_shared(mapping.name, mapping.size)
                mapped._maps.append(area)
                mapped._files.append(fd)
                views.append(np.frombuffer(area, np.uint8))
        except KVDepotError:
            views.clear()
            mapped.close()
            raise
        mapped.populate()
        mapped.rows = [_rows(views[s.mapping], s, layout.num_blocks) for s in layout.segments]
        return mapped

    def populate(self) -> None:
        """Enter the pages into this process's page table now rather than during copies."""
        for area in self._maps:
            shm.populate(np.frombuffer(area, np.uint8).ctypes.data, len(area))

    def whole(self) -> bool:
        """Whether the files are as long as they were: touching what a client cut off would kill this process."""
        sizes = zip(self._files, self.layout.mappings, strict=False)
        return all(os.fstat(fd).st_size >= mapping.size for fd, mapping in sizes)

    def close(self) -> None:
        """Unmap. No copy may be under way."""
        self.rows.clear()
        for fd in self._files:
            os.close(fd)
        self._files.clear()
        for area in self._maps:
            area.close()
        self._maps.clear()


def _rows(memory: Bytes, segment: Segment, num_blocks: int) -> _Rows:
    size, stride = segment.size, segment.stride
    span = memory[segment.offset : segment.offset + (num_blocks - 1) * stride + size]
    strided = np.lib.stride_tricks.as_strided(span, (num_blocks, size), (stride, 1))
    if stride == size:
        return _Rows(size, strided, True, span.reshape(num_blocks, size))
    unit = math.gcd(stride, size)
    if unit < _MIN_UNIT:
        return _Rows(size, strided, False)
    per_block = np.arange(size // unit, dtype=np.intp)
    return _Rows(size, strided, False, span.reshape(-1, unit), per_block, stride // unit)


class Mover:
    """Copy threads. Outcomes are handed to `report(token, outcome)` on a copy thread.

    The outcome of a Copy is told there; that of a Call is its value, or the KVDepotError it raised.
    """

    def __init__(self, arena: Memory, threads: int, report: Callable[[Any, Any], None]) -> None:
        self._arena = arena
        self._report = report
        self._ready = threading.Condition()
        self._loads: deque[Copy | Call] = deque()
        self._stores: deque[Copy | Call] = deque()
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._run, name=f"kvdepot-copy-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def threads(self) -> int:
        return len(self._threads)

    def submit(self, task: Copy | Call) -> None:
        """Queue a task; the deciding thread bounds how many there are."""
        with self._ready:
            behind = isinstance(task, Copy) and task.is_store
            (self._stores if behind else self._loads).append(task)
            self._ready.notify()

    def stop(self) -> None:
        """Finish what is queued, then end the threads. Blocks until they have."""
        with self._ready:
            self._stopping = True
            self._ready.notify_all()
        for thread in self._threads:
            thread.join()

    def _next(self) -> Copy | Call | None:
        with self._ready:
            while not (self._loads or self._stores or self._stopping):
                self._ready.wait()
            if self._loads:
                return self._loads.popleft()
            return self._stores.popleft() if self._stores else None

    def _run(self) -> None:
        while (task := self._next()) is not None:
            outcome: Any
            try:
                outcome = copy(self._arena, task) if isinstance(task, Copy) else task.run()
            except KVDepotError as exc:
                outcome = exc
            except Exception:
                log.exception("a copy task failed")
                outcome = None
            token = task.token
            del task  # its mapping must be free to close once the outcome is known
            self._report(token, outcome)


def copy(arena: Memory, task: Copy) -> list[int] | None:
    """Run one task; its outcome. Blocks while the bytes move."""
    if not (task.whole or task.mapped.whole)():
        log.warning("a client has cut off its shared memory: not copied")
        return None
    rows = task.mapped.rows
    size = sum(row.size for row in rows)
    sums = []
    for piece in task.pieces:
        if task.is_store:
            if not all(arena.ensure(*extent) for extent in piece.extents):
                log.warning("no memory behind the arena: %s is full", shm.SHM)
                return None
            _gather(arena.bytes, rows, piece)
        else:
            _scatter(arena.bytes, rows, piece)
        sums.append(checksum(arena.bytes, piece.extents, size * len(piece.block_ids)) if piece.summed else 0)
    # Read after the last byte: whoever raised the fence before that may have reused the blocks.
    return sums if task.fence is None or task.fence() < task.ticket else None


def checksum(memory: Bytes, extents: Extents, size: int) -> int:
    """XXH3 (64 bits, https://xxhash.com) of the first `size` bytes in these extents; never 0."""
    digest = xxhash.xxh3_64()
    for part in views(memory, extents, 0, size):
        digest.update(part.data)
    return digest.intdigest() or 1


def _gather(memory: Bytes, rows: Sequence[_Rows], piece: CopyPiece) -> None:
    ids, count = piece.block_ids, len(piece.block_ids)
    runs = _runs(ids)
    start = 0
    for row in rows:
        size = row.size * count
        where = views(memory, piece.extents, start, size)
        out = where[0] if len(where) == 1 else np.empty(size, np.uint8)
        _gather_rows(row, ids, runs, out.reshape(count, row.size))
        if len(where) > 1:
            done = 0
            for part in where:
                part[:] = out[done : done + len(part)]
                done += len(part)
        start += size


def _scatter(memory: Bytes, rows: Sequence[_Rows], piece: CopyPiece) -> None:
    ids, count = piece.block_ids, len(piece.block_ids)
    skip = piece.skip
    ids = ids[skip:]
    runs = _runs(ids)
    start = 0
    for row in rows:
        size = row.size * count
        where = views(memory, piece.extents, start, size)
        source = where[0] if len(where) == 1 else np.concatenate(where)
        _scatter_rows(row, ids, runs, source.reshape(count, row.size)[skip:])
        start += size


def views(memory: Bytes, extents: Extents, start: int, size: int) -> list[Bytes]:
    """The arena's bytes under a chunk's logical bytes `[start, start + size)`, in order."""
    if len(extents) == 1:
        offset = extents[0][0] + start
        return [memory[offset : offset + size]]
    found = []
    for offset, length in extents:
        if start < length and size:
            take = min(size, length - start)
            found.append(memory[offset + start : offset + start + take])
            size -= take
            start = 0
        else:
            start -= length
    return found


def _runs(ids: Ids) -> list[tuple[int, int]] | None:
    """`[first, end)` runs of adjacent block ids, or None where they are so short that an index is faster."""
    if len(ids) < 2:
        return [(0, 1)] if len(ids) else []
    cuts = np.flatnonzero(np.diff(ids) != 1) + 1
    if len(cuts) * 2 >= len(ids) > 2:
        return None
    edges = [0, *cuts.tolist(), len(ids)]
    return list(itertools.pairwise(edges))


def _gather_rows(row: _Rows, ids: Ids, runs: list[tuple[int, int]] | None, out: Bytes) -> None:
    """out[i] = block ids[i] of this segment. np.take and slice copies release the GIL."""
    if runs is not None and (row.dense or len(runs) == len(ids)):
        for first, end in runs:
            block = ids[first]
            out[first:end] = row.strided[block : block + end - first]
    elif row.units is None:
        for i, block in enumerate(ids):
            out[i] = row.strided[block]
    elif row.unit_ids is None:
        np.take(row.units, ids, axis=0, out=out, mode="clip")  # ids were checked; "raise" would buffer
    else:
        units = (ids[:, None] * row.unit_stride + row.unit_ids).reshape(-1)
        np.take(row.units, units, axis=0, out=out.reshape(len(units), -1), mode="clip")


def _scatter_rows(row: _Rows, ids: Ids, runs: list[tuple[int, int]] | None, source: Bytes) -> None:
    """Block ids[i] of this segment = source[i]. Index assignment releases the GIL too."""
    if runs is not None:
        for first, end in runs:
            block = ids[first]
            row.strided[block : block + end - first] = source[first:end]
    else:
        row.strided[ids] = source
