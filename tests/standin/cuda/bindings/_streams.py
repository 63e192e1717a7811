"""Streams: work that waits, and runs when somebody waits for it, among the work of all other streams.

Each stream keeps its order; what runs next among several streams, and among the copies of one batch or the rows of one
kernel, is drawn. So what was not waited for has most likely not happened, or not in the order that one hoped for.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from cuda.bindings._memory import Memory
from cuda.bindings._process import Process, Refused
from cuda.bindings._types import CUresult

memmove = ctypes.CDLL(None).memmove
memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
memmove.restype = ctypes.c_void_p
memset = ctypes.CDLL(None).memset
memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
memset.restype = ctypes.c_void_p

_DURING_CALL, _ANY = 2, 3
ALIGNMENT = 16
"""Of what our kernel copies."""


@dataclass(eq=False)
class Work:
    """One copy, or something else that a stream does in its turn."""

    what: str  # "copy", "kernel", "mark", "wait", "set"
    dst: int = 0
    src: int = 0
    size: int = 0
    event: Event | None = None
    by_kernel: bool = False
    gone: str = ""  # memory that was given up while this waited
    version: int = 0
    early: bytes | None = None  # the source as it was when the copy was asked for

    def touches(self, start: int, end: int) -> bool:
        return any(start < address + self.size and address < end for address in (self.dst, self.src) if address)


@dataclass(eq=False)
class Event:
    context: int
    flags: int
    recorded: int = 0
    done: int = 0
    at: float = 0.0
    stream: Stream | None = None


@dataclass(eq=False)
class Stream:
    number: int
    context: int
    blocking: bool = True
    work: deque[Work] = field(default_factory=deque)


class Streams:
    """All streams of this process. Guarded by `lock`, which is not held while anything waits at a gate."""

    def __init__(self, process: Process, memory: Memory, lock: threading.RLock) -> None:
        self._process = process
        self._memory = memory
        self._lock = lock
        self._random = random.Random(process.config["seed"])
        self.all: dict[int, Stream] = {}
        self.leaving: list[Stream] = []  # destroyed with work in them
        self.broken: dict[int, CUresult] = {}  # context -> what every call in it answers from now on

    def null(self, context: int) -> Stream:
        """The default stream of a context."""
        return self.all.setdefault(-context, Stream(-context, context))

    def get(self, number: int, context: int) -> Stream:
        if number in (0, 1):
            return self.null(context)
        stream = self.all.get(number)
        if stream is None or stream.context != context:
            raise Refused(CUresult.CUDA_ERROR_INVALID_HANDLE)
        return stream

    def busy(self) -> list[Stream]:
        self.leaving = [stream for stream in self.leaving if stream.work]
        return [stream for stream in (*self.all.values(), *self.leaving) if stream.work]

    # -- running

    def advance(self, context: int, done: Callable[[], bool]) -> None:
        """Run work, of whatever stream, until `done`. Raises Refused with what broke the context."""
        while not done():
            streams = self.busy()
            assert streams, "waited for work that nobody queued"
            self.run_one(self._random.choice(streams))
        self.check(context)

    def check(self, context: int) -> None:
        if context in self.broken:
            raise Refused(self.broken[context])

    def drain(self, stream: Stream) -> None:
        self.advance(stream.context, lambda: not stream.work)

    def run_one(self, stream: Stream) -> None:
        """The next work of a stream. The lock is let go while a gate holds it."""
        while self._process.must_wait():
            self._lock.release()
            try:
                self._process.wait()
            finally:
                self._lock.acquire()
            if not stream.work:
                return  # the thread that came first has run it
        work = stream.work.popleft()
        try:
            if stream.context not in self.broken:
                self._run(stream, work)
        except Refused as exc:
            kind = (
                CUresult.CUDA_ERROR_ILLEGAL_ADDRESS if exc.result == CUresult.CUDA_ERROR_INVALID_VALUE else exc.result
            )
            self.broken[stream.context] = kind

    def _run(self, stream: Stream, work: Work) -> None:
        if work.what == "mark":
            assert work.event is not None
            work.event.done = work.version
            work.event.at = time.monotonic()
        elif work.what == "wait":
            if work.event is not None and work.event.done < work.version:
                stream.work.appendleft(work)
        elif work.what == "kernel":
            self._launch(stream, work)
        else:
            self._process.meet_faults("copy")
            self._touch(stream, work)

    def _touch(self, stream: Stream, work: Work) -> None:
        if work.gone:
            self._process.failure(f"{work.what} of {work.size} bytes ran after {work.gone}")
            raise Refused(CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
        try:
            to, _ = self._memory.host_address(work.dst, work.size, stream.context, work.by_kernel)
            if work.what == "set":
                memset(to, work.src, work.size)
                return
            if work.early is not None:
                memmove(to, work.early, work.size)
                return
            start, _ = self._memory.host_address(work.src, work.size, stream.context, work.by_kernel)
        except Refused:
            self._process.failure(
                f"{work.what} {work.dst:#x} <- {work.src:#x} of {work.size} bytes touches what it may not"
            )
            raise
        memmove(to, start, work.size)

    def _launch(self, stream: Stream, work: Work) -> None:
        """Our one kernel: rows of (destination, source, bytes) in device memory."""
        table, count = work.src, work.size // 24
        address, _ = self._memory.host_address(table, count * 24, stream.context, True)
        flat = (ctypes.c_int64 * (3 * count)).from_address(address)[:]
        rows = [Work("copy", *flat[i : i + 3], by_kernel=True) for i in range(0, 3 * count, 3)]
        for row in rows:
            if row.dst % ALIGNMENT or row.src % ALIGNMENT or row.size % ALIGNMENT or row.size < 0:
                self._process.failure(f"kernel row {row.dst:#x} <- {row.src:#x}, {row.size} bytes is not aligned")
                raise Refused(CUresult.CUDA_ERROR_MISALIGNED_ADDRESS)
        self._random.shuffle(rows)
        self._process.counts["kernel_copies"] += len(rows)
        stream.work.extendleft(row for row in rows if row.size)

    # -- queueing

    def put(self, stream: Stream, *works: Work) -> None:
        self.check(stream.context)
        stream.work.extend(works)

    def copy(self, stream: Stream, dst: int, src: int, size: int) -> None:
        """A copy in stream order; at once where the processor's side is not registered, as the driver does."""
        if not size:
            return
        _, first = self._memory.host_address(dst, size, stream.context)
        _, second = self._memory.host_address(src, size, stream.context)
        self.put(stream, Work("copy", dst, src, size))
        if not (first and second):
            self._process.counts["pageable_copies"] += 1
            self.drain(stream)

    def batch(self, stream: Stream, copies: list[tuple[int, int, int]], order: int) -> None:
        """Copies in any order among each other; sources may be read before their turn where `order` lets them."""
        works = []
        for dst, src, size in copies:
            _, first = self._memory.host_address(dst, size, stream.context)
            start, second = self._memory.host_address(src, size, stream.context)
            if not (first and second):
                self._process.counts["pageable_copies"] += 1
            at_once = order == _DURING_CALL or (order == _ANY and self._random.random() < 0.5)
            works.append(Work("copy", dst, src, size, early=ctypes.string_at(start, size) if at_once else None))
        self._random.shuffle(works)
        self._process.counts["batch_copies"] += len(works)
        self._process.counts[f"batch_order_{order}"] += 1
        self.put(stream, *works)

    def memory_goes(self, start: int, end: int, what: str) -> None:
        """Memory is about to be given up: whatever waits to touch it is a failure."""
        for stream in self.busy():
            for work in stream.work:
                if work.what in ("copy", "set", "kernel") and not work.gone and work.touches(start, end):
                    work.gone = f"{what} of {start:#x}..{end:#x}"
                    self._process.failure(f"{what} of {start:#x}..{end:#x} with work on it queued")

    def leave_context(self, context: int) -> None:
        left = [stream for stream in self.busy() if stream.context == context]
        if left:
            self._process.failure(f"a context ended with work in {len(left)} streams")
        self.all = {number: stream for number, stream in self.all.items() if stream.context != context}
        self.leaving = [stream for stream in self.leaving if stream.context != context]
