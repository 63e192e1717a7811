"""Registers an arena's memory with the driver of an accelerator, which then copies it at the speed of the bus.

Registering pins pages, some 4 to 60 ms for each piece. So a thread does it in the background, and copies of what is not
registered yet go through a buffer (accelerator.py). Laws: no copy crosses from one piece into the next; a piece is
unregistered only while no copy uses the registration; a mapping is registered once in a process, whoever needs it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING

from kvdepot.memory.extents import Bytes

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

PIECE_BYTES = 64 << 20
_PORTABLE = 1
"""cudaHostRegisterPortable: the memory counts as registered for all GPUs of the process."""
_RELAXED = 2
"""cudaStreamCaptureModeRelaxed."""

_lock = threading.Lock()
_registrations: dict[tuple[int, int], Registration] = {}
"""The registration of each address and size that is held, or was last. Guarded by _lock, as are their holders."""


class Registration:
    """The pieces of one mapped arena that are registered. Made by `hold`, given up by `drop`."""

    def __init__(self, memory: Bytes, device: torch.device, before: Registration | None) -> None:
        """before: the registration that the same memory had, which must end first."""
        self.holders = 0
        self.ended = threading.Event()
        """Set once every piece is registered, or no more can be."""
        self._memory, self._device, self._before = memory, device, before
        self._change = threading.Condition()
        self._pieces: set[int] = set()  # added to by the thread alone
        self._users = 0  # guarded by _change, as is _stopping
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvdepot-register", daemon=True)
        self._thread.start()

    @property
    def registered_bytes(self) -> int:
        return sum(self._length(piece) for piece in tuple(self._pieces))

    def covers(self, memory: Bytes) -> bool:
        """Whether this is the registration of this mapping."""
        return _key(self._memory) == _key(memory)

    @contextlib.contextmanager
    def use(self) -> Iterator[Collection[int]]:
        """Copy within: the numbers of the pieces that may be copied directly; more may be added meanwhile."""
        with self._change:
            pieces: Collection[int] = () if self._stopping else self._pieces
            self._users += 1
        try:
            yield pieces
        finally:
            with self._change:
                self._users -= 1
                self._change.notify_all()

    def stop(self) -> None:
        """Begin to unregister, once no copy uses it. Never blocks."""
        with self._change:
            self._stopping = True
            self._change.notify_all()

    def join(self) -> None:
        """Wait until everything is unregistered."""
        self._thread.join()

    def _length(self, piece: int) -> int:
        return min(PIECE_BYTES, len(self._memory) - piece * PIECE_BYTES)

    def _run(self) -> None:
        if self._before is not None:
            self._before.join()
            self._before = None
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))  # engines bind the thread that started this to one CPU
        start = self._memory.ctypes.data
        try:
            with _driver(self._device) as (register, unregister):
                self._register(lambda piece: register(start + piece * PIECE_BYTES, self._length(piece)))
                self._wait_until_unused()
                for piece in self._pieces:
                    unregister(start + piece * PIECE_BYTES, self._length(piece))
        except Exception:
            log.exception("the arena could not be registered with %s", self._device)
        finally:
            self.ended.set()
            self._wait_until_unused()
            with _lock:
                if _registrations.get(_key(self._memory)) is self:
                    del _registrations[_key(self._memory)]

    def _wait_until_unused(self) -> None:
        with self._change:
            self._change.wait_for(lambda: self._stopping and not self._users)

    def _register(self, register: Callable[[int], str]) -> None:
        for piece in range(-(-len(self._memory) // PIECE_BYTES)):
            if self._stopping:
                break
            if fault := register(piece):
                log.warning(
                    "copies to and from %s are slower: %d of %d MiB of the arena are registered (%s)",
                    self._device, self.registered_bytes >> 20, len(self._memory) >> 20, fault,
                )  # fmt: skip
                break
            self._pieces.add(piece)
        self.ended.set()


def hold(memory: Bytes, device: torch.device) -> Registration | None:
    """The registration of a mapping, which is begun if nobody has it yet. None for a kind of device that has none.
    Never blocks."""
    if device.type not in {"cuda", "cpu"}:
        return None
    with _lock:
        found = _registrations.get(_key(memory))
        if found is None or not found.holders:
            found = _registrations[_key(memory)] = Registration(memory, device, found)
        found.holders += 1
        return found


def drop(registration: Registration) -> None:
    """Give up what `hold` returned. The last holder's memory is unregistered in the background. Never blocks."""
    with _lock:
        registration.holders -= 1
        if not registration.holders:
            registration.stop()


def _key(memory: Bytes) -> tuple[int, int]:
    return memory.ctypes.data, len(memory)


_Call = Callable[[int, int], str]
"""Takes an address and bytes; returns what went wrong, or nothing."""


@contextlib.contextmanager
def _driver(device: torch.device) -> Iterator[tuple[_Call, _Call]]:
    """The calls that register memory for a device, and unregister it; on the processor, the kernel locks its pages."""
    if device.type == "cpu":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mlock.argtypes = libc.munlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

        def result(failed: int) -> str:
            return os.strerror(ctypes.get_errno()) if failed else ""

        yield lambda start, size: result(libc.mlock(start, size)), lambda start, size: result(libc.munlock(start, size))
        return
    import torch

    runtime = torch.cuda.cudart()
    with torch.cuda.device(device), relaxed_capture(device):  # not device 0, on which it would make a context
        yield (
            lambda start, size: _error(runtime, runtime.cudaHostRegister(start, size, _PORTABLE)),
            lambda start, _: _error(runtime, runtime.cudaHostUnregister(start)),
        )


def _error(runtime: object, status: object) -> str:
    number = int(status)  # type: ignore[call-overload]
    return str(runtime.cudaGetErrorString(status)) if number else ""  # type: ignore[attr-defined]


@contextlib.contextmanager
def relaxed_capture(device: torch.device) -> Iterator[None]:
    """Let this thread use the driver while another thread of the process captures a CUDA graph.

    Engines capture with torch's default mode, in which a call such as cudaHostRegister or cudaEventQuery in any other
    thread fails, and with it the capture, unless that thread has asked for the relaxed mode.
    """
    exchange = None
    if device.type == "cuda":
        with contextlib.suppress(AttributeError):  # a runtime that torch has linked statically, or ROCm's
            exchange = ctypes.CDLL(None).cudaThreadExchangeStreamCaptureMode
    mode = ctypes.c_int(_RELAXED)
    if exchange is not None:
        exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        if exchange is not None:
            exchange(ctypes.byref(mode))
