"""The arena's memory, registered with the driver, so that GPUs reach it at the speed of the bus.

Used by the copy threads of all GPUs. Memory is registered piece by piece: ahead of its use on a thread of its own, or
by the copy that needs it first. The one law: no copy crosses from one piece into the next (plan.py cuts), and no piece
is given up while a copy uses any.

A registration belongs to the context in which it was made, but all contexts may use it. When the GPU of that context is
left by its last worker while others are in use, all pieces are given up and registered anew through another.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvdepot.devices.cuda.driver import Driver, DriverError
from kvdepot.devices.cuda.plan import Plan
from kvdepot.errors import DeviceError
from kvdepot.mover import Memory

__all__ = ["PIECE_BYTES", "Pins"]

log = logging.getLogger(__name__)

PIECE_BYTES = 64 << 20
"""Registering so much takes some 20 ms: what a copy may have to wait for."""


class Pins:
    """Which pieces of the arena are registered. Pieces begin at the arena's start; the last may be shorter."""

    def __init__(self, driver: Driver, memory: Memory) -> None:
        self._driver = driver
        self._memory = memory
        self.address: int = memory.bytes.ctypes.data
        self._size = len(memory.bytes)
        self._context: Any = None  # in which pieces are registered; None: there is no GPU in use
        self._change = threading.Condition()
        # Guarded by _change:
        self._pinned: set[int] = set()
        self._begun: set[int] = set()  # being registered by some thread
        self._refused: set[int] = set()  # tried in vain
        self._users = 0  # copies under way
        self._moving = False
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    def __repr__(self) -> str:
        return f"<Pins {self.pinned_bytes} of {self._size} bytes>"

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the arena that are registered."""
        return sum(self._length(piece) for piece in tuple(self._pinned))

    def _length(self, piece: int) -> int:
        return min(PIECE_BYTES, self._size - piece * PIECE_BYTES)

    def _place(self, piece: int) -> int:
        return self.address + piece * PIECE_BYTES

    # -- whose context it is

    def attach(self, context: Any) -> None:
        """A GPU is in use: register through its context unless another's serves. Copies may go on."""
        with self._change:
            if self._context is None:
                self._begin(context)
                self._moving = False
                self._change.notify_all()

    def _begin(self, context: Any) -> None:
        self._context = context
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._pin_ahead, args=(self._stopping,), name="kvdepot-pin", daemon=True)
        self._thread.start()

    def detach(self, context: Any) -> None:
        """A GPU is about to be left. Blocks while copies end; if its context served, others wait until one is attached.

        That must be after this context's end: what cannot be given up in one that is lost goes with it.
        """
        with self._change:
            if self._context != context:
                return
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        with self._change:
            self._moving = True
            self._change.wait_for(lambda: not self._users and not self._begun)
            try:
                with self._driver.current(context):
                    for piece in self._pinned:
                        self._unregister(piece)
            except DriverError as exc:
                log.warning("the arena's registrations go with their context: %s", exc)
            self._pinned.clear()
            self._refused.clear()
            self._context = None

    # -- registering

    @contextmanager
    def used(self, plan: Plan) -> Iterator[bool]:
        """Around a copy: whether every piece that it touches is registered, as far as there is memory and the driver
        agrees. What is not can be copied all the same, slowly."""
        pieces = np.unique((plan.host - np.uint64(self.address)) // np.uint64(PIECE_BYTES)).tolist()
        with self._change:
            self._change.wait_for(lambda: not self._moving)
            self._users += 1
            missing = [piece for piece in pieces if piece not in self._pinned]
        try:
            yield all(self._pin(piece) for piece in missing)
        finally:
            with self._change:
                self._users -= 1
                self._change.notify_all()

    def _pin(self, piece: int) -> bool:
        """Register a piece, or wait until another thread has. False where that failed, now or before."""
        with self._change:
            self._change.wait_for(lambda: piece not in self._begun)
            if piece in self._pinned or piece in self._refused:
                return piece in self._pinned
            self._begun.add(piece)
            context = self._context
        done = False
        try:
            done = self._register(piece, context)
        finally:
            with self._change:
                self._begun.discard(piece)
                (self._pinned if done else self._refused).add(piece)
                self._change.notify_all()
        return done

    def _register(self, piece: int, context: Any) -> bool:
        if not self._memory.ensure(piece * PIECE_BYTES, self._length(piece)):
            log.warning("not registered with the driver, and slow to copy: /dev/shm is full at %r", self)
            return False
        try:
            with self._driver.current(context):
                flags = self._driver.cu.CU_MEMHOSTREGISTER_PORTABLE | self._driver.cu.CU_MEMHOSTREGISTER_DEVICEMAP
                self._driver.call("cuMemHostRegister", self._place(piece), self._length(piece), flags)
        except DeviceError as exc:
            log.warning("not registered with the driver, and slow to copy: %s at %r", exc, self)
            return False
        return True

    def _unregister(self, piece: int) -> None:
        try:
            self._driver.call("cuMemHostUnregister", self._place(piece))
        except DriverError as exc:
            log.warning("a piece of the arena stays registered: %s", exc)

    def _pin_ahead(self, stopping: threading.Event) -> None:
        """Register everything, so that no copy has to wait for it; the rest is left alone once it is refused."""
        try:
            for piece in range(-(-self._size // PIECE_BYTES)):
                if stopping.is_set() or not self._pin(piece):
                    return
        except Exception:
            log.exception("the arena could not be registered with the driver")
