"""Registers the arena's memory with the driver, so that GPUs access it at the speed of the bus.

A thread of its own registers the memory piece by piece, first the pieces that copies needed; what is not registered yet
is copied more slowly. Invariants: no copy crosses from one piece into the next (plan.py cuts them), and no piece is
unregistered while a copy uses it.

A registration belongs to the context in which it was made, but all contexts may use it. When that context's GPU is
released while others are in use, its pieces are registered again through another context, one by one.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kvdepot.devices.cuda.driver import Driver
from kvdepot.devices.cuda.plan import CopyPlan
from kvdepot.errors import DeviceError
from kvdepot.memory.copier import Memory

log = logging.getLogger(__name__)

PIECE_BYTES = 64 << 20
"""Registering this much takes 4 to 60 ms."""


class Pins:
    """Which pieces of the arena are registered. Pieces begin at the arena's start; the last may be shorter."""

    def __init__(self, driver: Driver, memory: Memory) -> None:
        self._driver = driver
        self._memory = memory
        self.address: int = memory.bytes.ctypes.data
        self._size = len(memory.bytes)
        self._change = threading.Condition()
        # Guarded by _change:
        self._context: object = None  # the context for new registrations; None: no GPU is in use
        self._pinned: dict[int, object] = {}  # registered pieces, and their contexts
        self._begun: dict[int, object] = {}  # pieces that some thread is registering or unregistering
        self._refused: set[int] = set()  # pieces that could not be registered
        self._wanted: dict[int, None] = {}  # pieces that copies needed before they were registered
        self._users: Counter[int] = Counter()  # copies in progress, by piece
        self._leaving: set[int] = set()  # pieces that are about to be unregistered: no further copy may touch them
        self._stopping = threading.Event()

    def __repr__(self) -> str:
        return f"<Pins {self.pinned_bytes} of {self._size} bytes>"

    @property
    def pinned_bytes(self) -> int:
        return sum(self._length(piece) for piece in tuple(self._pinned))

    def _length(self, piece: int) -> int:
        return min(PIECE_BYTES, self._size - piece * PIECE_BYTES)

    def _place(self, piece: int) -> int:
        return self.address + piece * PIECE_BYTES

    def attach(self, context: object) -> None:
        """A worker has come to a GPU without workers: register through its context if there is none yet, and try again
        pieces that were refused. Never blocks."""
        with self._change:
            if self._context is None or self._refused:
                self._context = self._context or context
                self._refused.clear()
                self._begin()

    def _begin(self) -> None:
        self._end_thread()  # it has passed pieces that were then another context's
        self._stopping = threading.Event()
        threading.Thread(target=self._pin_ahead, args=(self._stopping,), name="kvdepot-pin", daemon=True).start()

    def _end_thread(self) -> None:
        self._stopping.set()
        self._change.notify_all()

    def pass_on(self, context: object, other: object) -> None:
        """A GPU is about to be left: register through `other` (None: no GPU) from now on, then call `give_up`. Never
        blocks."""
        with self._change:
            if self._context == context:
                self._end_thread()
                self._context = other
                self._refused.clear()

    def give_up(self, context: object) -> None:
        """Unregister the pieces of a context, before the context ends; then call `resume`. Blocks until copies that use
        them have ended. Errors of the driver are logged."""
        while (piece := self._next_of(context)) is not None:
            try:
                with self._driver.current(context):
                    self._driver.call("cuMemHostUnregister", self._place(piece))
            except DeviceError as exc:  # mostly a lost context, whose end also ends the registration
                log.warning("could not unregister a piece of the arena: %s", exc)
            finally:
                with self._change:
                    del self._begun[piece]
                    self._leaving.discard(piece)
                    self._change.notify_all()

    def resume(self) -> None:
        """Register the pieces again, if a GPU is in use, after the old context's end: pieces that could not be
        unregistered in a lost context are free only then. Never blocks."""
        with self._change:
            if self._context is not None:
                self._refused.clear()
                self._begin()

    def _next_of(self, context: object) -> int | None:
        """The next piece to unregister, once no copy uses it; no copy can use it until that is done. None: no more."""
        with self._change:
            self._change.wait_for(lambda: context not in self._begun.values())
            piece = next((piece for piece, owner in self._pinned.items() if owner == context), None)
            if piece is not None:
                self._leaving.add(piece)
                self._change.wait_for(lambda: not self._users[piece])
                self._begun[piece] = self._pinned.pop(piece)
            return piece

    @contextmanager
    def used(self, plan: CopyPlan) -> Iterator[npt.NDArray[np.bool_]]:
        """Use the pieces of a plan's copies. Yields bool[n]: which copies are of registered memory, to the end of use;
        the others, such as those of memory outside the arena, are slower. Blocks only while one of the pieces is being
        unregistered."""
        where = ((plan.host - np.uint64(self.address)) // np.uint64(PIECE_BYTES)).astype(np.int64)
        pieces = np.unique(where).tolist()
        with self._change:
            # All at once: a copy that held some pieces while it waits for others could deadlock with `give_up`.
            self._change.wait_for(lambda: self._leaving.isdisjoint(pieces))
            self._users.update(pieces)
            missing = [piece for piece in pieces if piece not in self._pinned]
            arena = range(-(-self._size // PIECE_BYTES))
            self._wanted.update(dict.fromkeys(each for each in missing if each in arena and each not in self._refused))
            if self._wanted:
                self._change.notify_all()
        try:
            yield np.isin(where, missing, invert=True) if missing else np.ones(len(where), np.bool_)
        finally:
            with self._change:
                self._users.subtract(pieces)
                self._users += Counter()  # drop those with count 0
                self._change.notify_all()

    def _pin_ahead(self, stopping: threading.Event) -> None:
        """Register all pieces; after a failure, only those that copies need. Runs until it is stopped."""
        ahead = iter(range(-(-self._size // PIECE_BYTES)))
        try:
            while (piece := self._next_to_pin(ahead, stopping)) is not None:
                self._pin(piece)
        except Exception:
            log.exception("could not register the arena with the driver")

    def _next_to_pin(self, ahead: Iterator[int], stopping: threading.Event) -> int | None:
        """The piece to register next; blocks while there is none. None: the thread is to end."""
        with self._change:
            while not stopping.is_set():
                piece = next(iter(self._wanted), None)
                if piece is not None:
                    del self._wanted[piece]
                elif not self._refused:
                    piece = next(ahead, None)
                if piece is not None:
                    return piece
                self._change.wait()
        return None

    def _pin(self, piece: int) -> None:
        """Register a piece, unless that has failed before."""
        with self._change:
            self._change.wait_for(lambda: piece not in self._begun)
            context = self._context
            if piece in self._pinned or piece in self._refused or context is None:
                return
            self._begun[piece] = context
        done = False
        try:
            done = self._register(piece, context)
        finally:
            with self._change:
                del self._begun[piece]
                if done:
                    self._pinned[piece] = context
                elif context == self._context:
                    self._refused.add(piece)
                self._change.notify_all()

    def _register(self, piece: int, context: object) -> bool:
        try:
            if not self._memory.ensure(piece * PIECE_BYTES, self._length(piece)):
                raise DeviceError("/dev/shm is full")
            with self._driver.current(context):
                flags = self._driver.cu.CU_MEMHOSTREGISTER_PORTABLE | self._driver.cu.CU_MEMHOSTREGISTER_DEVICEMAP
                self._driver.call("cuMemHostRegister", self._place(piece), self._length(piece), flags)
        except DeviceError as exc:
            level = logging.DEBUG if self._refused else logging.WARNING  # once: a terabyte's pieces would fill the log
            log.log(level, "memory behind %r is not registered with the driver, and slow to copy: %s", self, exc)
            return False
        return True
