"""Copy threads: they move KV bytes between the mapped tensors of workers and the arena, and report whether all arrived.

Each kind of device (`devices/`) has a subclass of `Mapped` that moves the bytes, and lanes of its own, so that no copy
waits for another device's bus. A chunk is stored in the arena segment by segment, and its extents are filled in order:

    logical bytes of a chunk     [seg 0: block 0..n-1][seg 1: block 0..n-1] ...
    segment s                    [n * before(s), n * before(s) + n * size(s))      before = sizes of earlier segments
    extents                      [0, len 0)[len 0, len 0 + len 1) ...              cut at any multiple of a page
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvdepot.errors import KVDepotError
from kvdepot.logs import Sparing
from kvdepot.memory.allocator import Extents
from kvdepot.protocol.layout import Layout

log = logging.getLogger(__name__)
sparing_log = Sparing(log)

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.intp]


class Memory(Protocol):
    """The part of `arena.Arena` that copies use."""

    bytes: Bytes

    def ensure(self, offset: int, size: int) -> bool: ...


@dataclass(slots=True)
class CopyPiece:
    """One chunk of one rank: its extents in the arena and its blocks; the first `skip` blocks are not written.

    checksum: that of a stored chunk that is to be compared; 0: none was computed.
    """

    extents: Extents
    block_ids: Ids
    skip: int = 0
    summed: bool = False
    checksum: int = 0


class Mapped(ABC):
    """A worker's paged KV tensors, mapped in this process; each kind of device has a subclass.

    Several copy threads use it at once; `close` is called only when no copy is in progress.
    """

    layout: Layout
    task_bytes: int
    """Approximate bytes of one copy task: large enough to make the cost of handing it over negligible."""

    def lane(self, is_store: bool) -> str:
        """The lane whose threads run a copy; the empty one is the CPU's."""
        return ""

    def whole(self) -> bool:
        """Whether all of the tensors' memory is still there, so that touching it is safe."""
        return True

    @abstractmethod
    def move(self, memory: Memory, pieces: Sequence[CopyPiece], is_store: bool) -> None:
        """Copy blocks into the arena, or back. Blocks until every byte has arrived. Raises DeviceError."""

    @abstractmethod
    def close(self) -> None:
        """Unmap them and release everything that was acquired for them. May be called twice."""

    def close_after_death(self) -> None:
        """`close`, once the client is gone, which may have left its memory behind. Blocks for a moment."""
        self.close()


@dataclass(slots=True)
class Copy:
    """Copy `pieces` between `mapped` and the arena. `token` is reported with the outcome.

    A store reads the client's `fence` after its last byte, and fails if that is `ticket` or higher. The outcome is one
    checksum per piece, of the arena's bytes (0 if not requested), or None if the copy failed.
    """

    token: object
    is_store: bool
    mapped: Mapped
    pieces: list[CopyPiece]
    fence: Callable[[], int] | None = None
    ticket: int = 0
    compare: Callable[[Memory, Copy], list[list[float]] | None] | None = None
    """Called in place of a store: the chunks in the arena stay, and the outcome are the differences of each piece."""
    whole: Callable[[], bool] | None = None
    """`mapped.whole`, or a function that caches its result for all tasks of one operation (one system call a file)."""


@dataclass(slots=True)
class Call:
    """Run something slow that moves no bytes (map, unmap, checksums). Its return value is the outcome."""

    token: object
    run: Callable[[], Outcome]
    lane: str = ""


Outcome: TypeAlias = list[int] | list[list[float]] | Mapped | KVDepotError | None
"""The outcome of a Copy or Call; None: it failed, or it has nothing to return."""


class Copier:
    """The copy threads. They call `report(token, outcome)`: as `Copy` describes it, or a `Call`'s value or
    KVDepotError."""

    def __init__(self, arena: Memory, threads: int, report: Callable[[object, Outcome], None]) -> None:
        self._arena = arena
        self._report = report
        self.lanes = {"": Lane("cpu", threads, self._run)}

    def submit(self, task: Copy | Call) -> None:
        """Queue a task. Only the deciding thread calls this; it limits how many there are."""
        name = task.mapped.lane(task.is_store) if isinstance(task, Copy) else task.lane
        lane = self.lanes.get(name)
        if lane is None:
            # Two threads: while one waits for the bus, the other prepares the next copy.
            lane = self.lanes[name] = Lane(name, 2, self._run)
        lane.put(task)

    def stop(self, timeout_s: float | None = None) -> bool:
        """Finish the queued tasks, then end the threads. Blocks; False if some have not ended at the timeout."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        devices = [lane for name, lane in self.lanes.items() if name]
        ended = True
        for lanes in (devices, [self.lanes[""]]):  # which sums what the others have copied
            for lane in lanes:
                lane.stop()
            ended = all(lane.join(deadline) for lane in lanes) and ended
        return ended

    def _run(self, task: Copy | Call) -> None:
        outcome: Outcome
        try:
            if not isinstance(task, Copy):
                outcome = task.run()
            elif task.compare is not None:
                outcome = task.compare(self._arena, task)
            elif not copy(self._arena, task):
                outcome = None
            elif task.mapped.lane(task.is_store) and any(piece.summed for piece in task.pieces):
                # A core sums 6 GB/s, a tenth of what a GPU's bus moves: the CPU's lane does it meanwhile.
                self.lanes[""].put(Call(task.token, partial(checksums, self._arena, task)))
                return
            else:
                outcome = checksums(self._arena, task)
        except KVDepotError as exc:
            outcome = exc
            if isinstance(task, Copy):
                sparing_log.error("a copy failed: %s", exc)
                outcome = None
        except BaseException:  # the top of a thread: it answers, whatever is raised
            log.exception("a copy task failed")
            outcome = None
        token = task.token
        del task  # it refers to the mapping, which may be closed once the outcome is known
        self._report(token, outcome)


class Lane:
    """A queue of tasks and the threads that run them, loads before stores."""

    def __init__(self, name: str, threads: int, run: Callable[[Copy | Call], None]) -> None:
        self._run_task = run
        self._tasks: queue.PriorityQueue[tuple[int, int, Copy | Call | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self.threads = [
            threading.Thread(target=self._run, name=f"kvdepot-copy-{name}-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self.threads:
            thread.start()

    def put(self, task: Copy | Call) -> None:
        self._tasks.put((isinstance(task, Copy) and task.is_store, next(self._numbers), task))

    def stop(self) -> None:
        for _ in self.threads:
            self._tasks.put((2, next(self._numbers), None))

    def join(self, deadline: float | None) -> bool:
        """Whether all threads have ended. Blocks until then, or until the deadline (of time.monotonic)."""
        for thread in self.threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self.threads)

    def _run(self) -> None:
        while (task := self._tasks.get()[2]) is not None:
            self._run_task(task)
            task = None  # it refers to the mapping, which may be closed while we wait for the next task


def copy(arena: Memory, task: Copy) -> bool:
    """Move the bytes of one task; returns whether all are there. Blocks meanwhile. Raises DeviceError."""
    if not (task.whole or task.mapped.whole)():
        sparing_log.warning("a client truncated its shared memory: its copies are skipped")
        return False
    if task.is_store and not all(arena.ensure(*extent) for piece in task.pieces for extent in piece.extents):
        return False
    task.mapped.move(arena, task.pieces, task.is_store)
    # The fence is read after the last byte: a client that raised it before may already reuse the blocks.
    return task.fence is None or task.fence() < task.ticket


def checksums(arena: Memory, task: Copy) -> list[int]:
    """The outcome of a copy whose bytes are there. Blocks while it reads the arena."""
    block_bytes = task.mapped.layout.block_bytes
    return [
        checksum(arena.bytes, piece.extents, block_bytes * len(piece.block_ids)) if piece.summed else 0
        for piece in task.pieces
    ]


def checksum(memory: Bytes, extents: Extents, size: int) -> int:
    """XXH3 (64 bits, https://xxhash.com) of the first `size` bytes in these extents; never 0."""
    import xxhash  # not needed with verify = off and no tiers

    digest = xxhash.xxh3_64()
    for part in views(memory, extents, 0, size):
        digest.update(part.data)
    return digest.intdigest() or 1


def views(memory: Bytes, extents: Extents, start: int, size: int) -> list[Bytes]:
    """The arena's bytes for a chunk's logical bytes `[start, start + size)`, in order."""
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
