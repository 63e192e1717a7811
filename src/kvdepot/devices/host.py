"""Blocks in the processor's memory, copied with numpy where the engine has allocated them.

Used by a worker's lane, and by its engine within a step. A new mapping of the arena has no pages in this process, and
each page that is used first costs a fault. So the pages that have memory are entered in the background as soon as a
server is there: entering the pages of a load takes about as long as copying them. A copy enters the pages that are
left.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvdepot.devices.blocks import ArenaBytes, BlockMemory, CopyPiece
from kvdepot.memory import shm
from kvdepot.memory.extents import Bytes, Ids, views
from kvdepot.protocol.layout import Layout, Segment

_MIN_UNIT = 512
"""Smallest unit to gather by index if segments are not dense; below it, one copy per block is faster."""
_CALLS = 4
"""A stack of at least this many segments per block of a chunk is copied block by block."""
_SHARED_BYTES = 4 << 20
"""Two threads share a copy of this many bytes or more: one thread moves half of what the memory's bus can. Handing a
part to the second thread costs 0.1 ms."""
_FEW = 4
"""Fewer chunks than this are divided between the threads by their segments; more are dealt out in turns."""

_Runs = list[tuple[int, int]]
"""`[first, end)` of adjacent block ids."""

ENTERED_BYTES = 4 << 20
"""Bytes whose pages the background enters at once: under a millisecond, in which the process can map nothing."""

_pages: weakref.WeakKeyDictionary[ArenaBytes, _Pages] = weakref.WeakKeyDictionary()
"""The pages of each mapped arena, for all groups."""


class HostBlocks(BlockMemory):
    """Blocks in memory of this process."""

    device = None
    task_bytes = 16 << 20

    def __init__(self, layout: Layout, memories: Mapping[str, Bytes]) -> None:
        """memories: the bytes of each of the layout's mappings, by name; they are kept alive."""
        self.layout = layout
        self._memories = [memories[mapping.name][: mapping.size] for mapping in layout.mappings]
        rows = [_rows(self._memories[each.mapping], each, layout.num_blocks) for each in layout.segments]
        half = len(rows) // 2
        self._whole = _Plan(_stacks(rows), 0)
        self._halves = _Plan(_stacks(rows[:half]), 0), _Plan(_stacks(rows[half:]), sum(row.size for row in rows[:half]))
        self._second: ThreadPoolExecutor | None = None  # the thread that shares large copies
        self._followed: _Pages | None = None  # the pages of the arena that it follows

    def follow(self, arena: ArenaBytes | None) -> threading.Event:
        if self._followed is not None:
            self._followed.stop()
        self._followed = None if arena is None else _pages_of(arena)
        return super().follow(arena) if self._followed is None else self._followed.start()

    def move(self, arena: ArenaBytes, pieces: Sequence[CopyPiece], is_store: bool) -> None:
        _pages_of(arena).enter([extent for piece in pieces for extent in piece.extents])
        size = self.layout.block_bytes * sum(len(piece.block_ids) for piece in pieces)
        if size < _SHARED_BYTES:
            _copy(self._whole, arena, pieces, is_store)
            return
        is_few = len(pieces) < _FEW
        plans = self._halves if is_few else (self._whole, self._whole)
        lots = (pieces, pieces) if is_few else (pieces[::2], pieces[1::2])
        self._second = self._second or ThreadPoolExecutor(1, "kvdepot-copy", _use_all_processors)
        other = self._second.submit(_copy, plans[1], arena, lots[1], is_store)
        try:
            _copy(plans[0], arena, lots[0], is_store)
        finally:
            other.exception()  # nobody copies any more when this returns or raises
        other.result()

    def load_in_step(self, arena: ArenaBytes, pieces: Sequence[CopyPiece]) -> None:
        self.move(arena, pieces, False)

    def read(self, segment: Segment, block: int) -> Bytes:
        return self._row(segment, block).copy()

    def write(self, segment: Segment, block: int, data: Bytes) -> None:
        self._row(segment, block)[:] = data

    def _row(self, segment: Segment, block: int) -> Bytes:
        start = segment.offset + block * segment.stride
        return self._memories[segment.mapping][start : start + segment.size]

    def close(self) -> None:
        self.follow(None)
        if self._second is not None:
            self._second.shutdown()
            self._second = None


def _copy(plan: _Plan, arena: ArenaBytes, pieces: Sequence[CopyPiece], is_store: bool) -> None:
    for piece in pieces:
        start = plan.first * len(piece.block_ids)
        runs = _runs(piece.block_ids if is_store else piece.block_ids[piece.skip :])
        for stack, size in _sized(plan.stacks, piece):
            where = views(arena.bytes, piece.extents, start, size)
            whole = where[0]
            if len(where) > 1:
                whole = np.empty(size, np.uint8) if is_store else np.concatenate(where)
            stack.copy(piece, runs, whole, is_store)
            for part in where if is_store and len(where) > 1 else ():
                part[:] = whole[: len(part)]
                whole = whole[len(part) :]
            start += size


def _use_all_processors() -> None:
    """Engines bind the thread that starts another to one processor."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def _pages_of(arena: ArenaBytes) -> _Pages:
    return _pages.get(arena) or _pages.setdefault(arena, _Pages(arena))


class _Pages:
    """The pages of one mapped arena that this process has entered: entering them again takes longer than copying.

    Any thread; two may enter a page twice. Invariant: no hole of the file is entered, which would allocate it.
    """

    def __init__(self, arena: ArenaBytes) -> None:
        self._arena, self._memory = weakref.ref(arena), arena.bytes
        self._entered = np.zeros(-(-len(self._memory) // mmap.PAGESIZE), np.bool_)
        self._lock = threading.Lock()
        self._followers = 0
        self._stopping = threading.Event()
        self._ended: threading.Event | None = None  # of the thread's work

    def enter(self, extents: Sequence[tuple[int, int]]) -> None:
        """Enter the pages of these extents, which have memory. Blocks without the GIL."""
        for offset, length in extents:
            first, end = offset // mmap.PAGESIZE, -(-(offset + length) // mmap.PAGESIZE)
            if not self._entered[first:end].all():
                shm.enter_pages(self._memory.ctypes.data + first * mmap.PAGESIZE, (end - first) * mmap.PAGESIZE)
                self._entered[first:end] = True

    def start(self) -> threading.Event:
        """Enter all pages that have memory now, in the background. Returns an event that is set at the end."""
        with self._lock:
            self._followers += 1
            if self._ended is None or self._ended.is_set() or self._stopping.is_set():
                self._stopping = threading.Event()
                self._ended = threading.Event()
                try:
                    work = self._ended, self._stopping
                    threading.Thread(target=self._run, args=work, name="kvdepot-pages", daemon=True).start()
                except RuntimeError:  # no thread can be started: pages are entered as they are used
                    self._ended.set()
            return self._ended

    def stop(self) -> None:
        """Undo one `start`. After the last one, the background ends early. Never blocks."""
        with self._lock:
            self._followers -= 1
            if not self._followers:
                self._stopping.set()

    def _run(self, ended: threading.Event, stopping: threading.Event) -> None:
        _use_all_processors()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            for start in range(0, len(self._memory), ENTERED_BYTES):
                size = min(ENTERED_BYTES, len(self._memory) - start)
                if stopping.is_set() or not self._enter_allocated(start, size):
                    break
        finally:
            ended.set()

    def _enter_allocated(self, start: int, size: int) -> bool:
        """Enter the pages of this range that have memory. Returns whether the arena is still a server's."""
        first, pages = start // mmap.PAGESIZE, -(-size // mmap.PAGESIZE)
        entered = self._entered[first : first + pages]
        if entered.all():
            return True
        allocated = np.frombuffer(shm.allocated(self._memory.ctypes.data + start, size), np.bool_)
        edges = np.flatnonzero(np.diff(allocated & ~entered, prepend=False, append=False)) + first
        self.enter([(low * mmap.PAGESIZE, (high - low) * mmap.PAGESIZE) for low, high in edges.reshape(-1, 2).tolist()])
        arena = self._arena()
        if arena is None or not arena.is_freed():
            return True
        shm.free_mapped(self._memory.ctypes.data + start, size)  # these pages may have been allocated again since
        return False


class _Plan(NamedTuple):
    """Segments that one thread copies. first: bytes of the segments before them, in a block."""

    stacks: Sequence[_Stack]
    first: int


@dataclass
class _Rows:
    """One segment of all blocks, for indexing by block id."""

    size: int
    strided: Bytes  # uint8[num_blocks, size]
    dense: bool  # blocks are adjacent
    units: Bytes | None = None  # uint8[n, unit]: the same memory in units, for np.take
    unit_ids: Ids | None = None  # units of a block, relative to block * unit_stride
    unit_stride: int = 1


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


@dataclass
class _Stack:
    """Segments of equal size at equal distances, such as those of all layers: a block of them is one array, which is
    copied with one call. Small chunks have more segments than blocks, and so few bytes that calls count."""

    rows: list[_Rows]
    planes: Bytes
    """uint8[layers, segments of a layer, num_blocks, size], the memory of `rows`."""

    def copy(self, piece: CopyPiece, runs: _Runs | None, area: Bytes, is_store: bool) -> None:
        """Copy blocks to a chunk's bytes of these segments, or back; a load does not write the first `skip` blocks.
        runs: see `_runs`, of the copied ids."""
        skip = 0 if is_store else piece.skip
        size, count, ids = self.rows[0].size, len(piece.block_ids), piece.block_ids[skip:]
        if len(self.rows) < _CALLS * count:
            parts = area.reshape(len(self.rows), count, size)[:, skip:]
            for row, part in zip(self.rows, parts, strict=True):
                (_gather_rows if is_store else _scatter_rows)(row, ids, runs, part)
            return
        parts = area.reshape(*self.planes.shape[:2], count, size)
        for at, block in enumerate(ids.tolist(), skip):
            if is_store:
                parts[:, :, at] = self.planes[:, :, block]
            else:
                self.planes[:, :, block] = parts[:, :, at]


def _stacks(rows: list[_Rows]) -> list[_Stack]:
    """The segments in order, in as few stacks as possible: with one segment a layer, or two (keys and values)."""
    stacks, at = [], 0
    starts = [row.strided.ctypes.data for row in rows]
    while at < len(rows):
        counts = {in_layer: _equally_apart(rows[at:], starts[at:], in_layer) for in_layer in (2, 1)}
        in_layer = max(counts, key=lambda each: (counts[each], -each))
        members, first = rows[at : at + counts[in_layer]], rows[at].strided
        layers = len(members) // in_layer
        steps = starts[at + in_layer * (layers > 1)] - starts[at], starts[at + in_layer - 1] - starts[at]
        shape, strides = (layers, in_layer, *first.shape), (*steps, *first.strides)
        stacks.append(_Stack(members, np.lib.stride_tricks.as_strided(first, shape, strides)))
        at += len(members)
    return stacks


def _equally_apart(rows: Sequence[_Rows], starts: Sequence[int], in_layer: int) -> int:
    """The number of segments, from the first on, that one stack can have with `in_layer` segments a layer."""
    first, count = rows[0].strided, 0
    for row, start in zip(rows, starts, strict=True):
        if row.strided.shape != first.shape or row.strided.strides != first.strides:
            break
        if count >= in_layer and start - starts[count - in_layer] != starts[in_layer] - starts[0]:
            break
        count += 1
    return count // in_layer * in_layer


def _sized(stacks: Sequence[_Stack], piece: CopyPiece) -> Iterator[tuple[_Stack, int]]:
    """The stacks and their bytes in a chunk. A chunk that lies in several places is copied segment by segment, by a
    buffer."""
    if len(piece.extents) > 1:
        stacks = [_Stack([row], row.strided[None, None]) for stack in stacks for row in stack.rows]
    for stack in stacks:
        yield stack, len(stack.rows) * stack.rows[0].size * len(piece.block_ids)


def _runs(ids: Ids) -> _Runs | None:
    """`[first, end)` runs of adjacent block ids; None if they are so short that indexing is faster."""
    if len(ids) < 2:
        return [(0, 1)] if len(ids) else []
    cuts = np.flatnonzero(np.diff(ids) != 1) + 1
    if len(cuts) * 2 >= len(ids) > 2:
        return None
    edges = [0, *cuts.tolist(), len(ids)]
    return list(itertools.pairwise(edges))


def _gather_rows(row: _Rows, ids: Ids, runs: _Runs | None, out: Bytes) -> None:
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


def _scatter_rows(row: _Rows, ids: Ids, runs: _Runs | None, source: Bytes) -> None:
    """Block ids[i] of this segment = source[i]. Index assignment also releases the GIL."""
    if runs is not None:
        for first, end in runs:
            block = ids[first]
            row.strided[block : block + end - first] = source[first:end]
    else:
        row.strided[ids] = source
