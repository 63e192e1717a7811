"""Copy threads: they move KV bytes between the mapped tensors of workers and the arena, and report back.

The server gives tasks; how bytes move is the device's (`Mapped`, one subclass a kind of device, in `devices/`). Each
device has lanes of its own, so that no copy waits for another's bus. The one law: it decides nothing. It copies what
a task says, and says whether every byte arrived.

A chunk lies in the arena segment by segment, and its extents are filled in order (protocol/layout.py,
memory/allocator.py):

    logical bytes of a chunk     [seg 0: block 0..n-1][seg 1: block 0..n-1] ...
    segment s                    [n * before(s), n * before(s) + n * size(s))      before = sizes of earlier segments
    extents                      [0, len 0)[len 0, len 0 + len 1) ...              cut anywhere, at page multiples
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from kvdepot.errors import KVDepotError
from kvdepot.memory import shm
from kvdepot.memory.allocator import Extents
from kvdepot.protocol.layout import Layout

__all__ = ["Call", "Copier", "Copy", "CopyPiece", "Mapped", "Memory", "checksum", "copy", "views"]

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.intp]


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


class Mapped(ABC):
    """A worker's paged KV tensors as this process reaches them: what every device must give.

    Used by copy threads, several at a time; `close` alone when no copy is under way.
    """

    layout: Layout
    task_bytes: int
    """A copy task is about this long: enough that handing it over costs little of it."""

    def lane(self, is_store: bool) -> str:
        """Whose turn a copy must await; copies of the empty lane go loads first."""
        return ""

    def whole(self) -> bool:
        """Whether the tensors can still be touched."""
        return True

    @abstractmethod
    def move(self, memory: Memory, pieces: Sequence[CopyPiece], is_store: bool) -> None:
        """Copy blocks into the arena, or back. Blocks until every byte has arrived. Raises DeviceError."""

    @abstractmethod
    def close(self) -> None:
        """Give them up, and all that was taken for their sake. Safe twice."""


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
    lane: str = ""
    """Whose threads it may keep."""


class Copier:
    """Copy threads. Outcomes are handed to `report(token, outcome)` on a copy thread.

    The outcome of a Copy is told there; that of a Call is its value, or the KVDepotError it raised.
    """

    def __init__(self, arena: Memory, threads: int, report: Callable[[Any, Any], None]) -> None:
        self._arena = arena
        self._report = report
        self.lanes = {"": Lane("cpu", threads, self._run)}

    @property
    def threads(self) -> int:
        """Those that copy from and to the processor's own memory."""
        return len(self.lanes[""].threads)

    def submit(self, task: Copy | Call) -> None:
        """Queue a task; the deciding thread, which alone calls this, bounds how many there are."""
        name = task.mapped.lane(task.is_store) if isinstance(task, Copy) else task.lane
        lane = self.lanes.get(name)
        if lane is None:
            # Two: while one waits for the bus, the other says what it is to do next.
            lane = self.lanes[name] = Lane(name, 2, self._run)
        lane.put(task)

    def stop(self, timeout_s: float | None = None) -> bool:
        """Finish what is queued, then end the threads. Blocks until they have; False where some hang."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for lane in self.lanes.values():
            lane.stop()
        return all(lane.join(deadline) for lane in self.lanes.values())

    def _run(self, task: Copy | Call) -> None:
        outcome: Any
        try:
            outcome = copy(self._arena, task) if isinstance(task, Copy) else task.run()
        except KVDepotError as exc:
            outcome = exc
            if isinstance(task, Copy):
                log.error("a copy failed: %s", exc)
                outcome = None
        except Exception:
            log.exception("a copy task failed")
            outcome = None
        token = task.token
        del task  # its mapping must be free to close once the outcome is known
        self._report(token, outcome)


class Lane:
    """A queue of tasks and the threads that run them, loads before stores."""

    def __init__(self, name: str, threads: int, run: Callable[[Copy | Call], None]) -> None:
        self._run_task = run
        self._ready = threading.Condition()
        self.loads: deque[Copy | Call] = deque()
        self.stores: deque[Copy | Call] = deque()
        self._stopping = False
        self.threads = [
            threading.Thread(target=self._run, name=f"kvdepot-copy-{name}-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self.threads:
            thread.start()

    def put(self, task: Copy | Call) -> None:
        with self._ready:
            behind = isinstance(task, Copy) and task.is_store
            (self.stores if behind else self.loads).append(task)
            self._ready.notify()

    def stop(self) -> None:
        """Run what is queued, then end; `join` waits for that."""
        with self._ready:
            self._stopping = True
            self._ready.notify_all()

    def join(self, deadline: float | None) -> bool:
        """Whether all threads have ended. Blocks until they have, or until the deadline (of time.monotonic)."""
        for thread in self.threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self.threads)

    def take(self) -> Copy | Call | None:
        """The next task; waits for one. None: there are no more."""
        with self._ready:
            while not (self.loads or self.stores or self._stopping):
                self._ready.wait()
            if self.loads:
                return self.loads.popleft()
            return self.stores.popleft() if self.stores else None

    def _run(self) -> None:
        while (task := self.take()) is not None:
            self._run_task(task)
            task = None  # its mapping must be free to close while we wait for the next


def copy(arena: Memory, task: Copy) -> list[int] | None:
    """Run one task; its outcome. Blocks while the bytes move. Raises DeviceError."""
    if not (task.whole or task.mapped.whole)():
        log.warning("a client truncated its shared memory: copy skipped")
        return None
    if task.is_store and not all(arena.ensure(*extent) for piece in task.pieces for extent in piece.extents):
        log.warning("cannot allocate arena memory: %s is full", shm.SHM)
        return None
    task.mapped.move(arena, task.pieces, task.is_store)
    block_bytes = task.mapped.layout.block_bytes
    sums = [
        checksum(arena.bytes, piece.extents, block_bytes * len(piece.block_ids)) if piece.summed else 0
        for piece in task.pieces
    ]
    # Read after the last byte: whoever raised the fence before that may have reused the blocks.
    return sums if task.fence is None or task.fence() < task.ticket else None


def checksum(memory: Bytes, extents: Extents, size: int) -> int:
    """XXH3 (64 bits, https://xxhash.com) of the first `size` bytes in these extents; never 0."""
    digest = xxhash.xxh3_64()
    for part in views(memory, extents, 0, size):
        digest.update(part.data)
    return digest.intdigest() or 1


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
