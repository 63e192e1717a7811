"""Registers an arena's memory with the driver of an accelerator, which then copies it at the speed of the bus.

Registering pins pages, some 4 to 60 ms for each piece. So a thread does it in the background, and copies of what is not
registered yet go through a buffer (accelerator.py). Laws: no copy crosses from one piece into the next; a piece is
unregistered only while no copy uses the registration.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
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

_Call = Callable[[int, int], str]
"""Takes an address and a number of bytes; returns the driver's error, or an empty string."""


class Registration:
    """The pieces of one mapped arena that are registered for a device. Any thread."""

    def __init__(self, memory: Bytes, device: torch.device, before: Registration | None = None) -> None:
        """Begin to register a mapping. Never blocks. before: a registration, perhaps of the same mapping, which must
        end first."""
        self.memory = memory
        self.ended = threading.Event()
        """Set once every piece is registered, or the driver has refused one."""
        self._device = device
        self._change = threading.Condition()
        self._pieces: set[int] = set()  # added to by the thread alone
        self._users = 0  # copies that use the registration; guarded by _change, like _stopping
        self._stopping = False
        self._thread = threading.Thread(target=self._run, args=[before], name="kvdepot-register", daemon=True)
        self._thread.start()

    @property
    def registered_bytes(self) -> int:
        return sum(self._length(piece) for piece in tuple(self._pieces))

    def covers(self, memory: Bytes) -> bool:
        return self.memory.ctypes.data == memory.ctypes.data and len(self.memory) == len(memory)

    @contextlib.contextmanager
    def use(self) -> Iterator[Collection[int]]:
        """Hold the registration during a copy. Yields the numbers of the pieces for direct copies, which may grow."""
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
        self._thread.join()

    def _length(self, piece: int) -> int:
        return min(PIECE_BYTES, len(self.memory) - piece * PIECE_BYTES)

    def _run(self, before: Registration | None) -> None:
        if before is not None:
            before.join()
            del before
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))  # engines bind the thread that started this to one CPU
        start = self.memory.ctypes.data
        try:
            with _driver(self._device) as (register, unregister):
                self._register(lambda piece: register(start + piece * PIECE_BYTES, self._length(piece)))
                with self._change:
                    self._change.wait_for(lambda: self._stopping and not self._users)
                for piece in self._pieces:
                    unregister(start + piece * PIECE_BYTES, self._length(piece))
        except Exception:
            log.exception("copies to and from %s are slower: the arena could not be registered", self._device)
        finally:
            self.ended.set()

    def _register(self, register: Callable[[int], str]) -> None:
        for piece in range(-(-len(self.memory) // PIECE_BYTES)):
            if self._stopping:
                break
            if fault := register(piece):
                done, size = self.registered_bytes >> 20, len(self.memory) >> 20
                log.warning(
                    "copies to and from %s are slower: %d of %d MiB of the arena could be registered: %s",
                    self._device, done, size, fault,
                )  # fmt: skip
                break
            self._pieces.add(piece)
        self.ended.set()


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

        def outcome(status: object) -> str:
            return str(runtime.cudaGetErrorString(status)) if int(status) else ""  # type: ignore[call-overload]

        yield (
            lambda start, size: outcome(runtime.cudaHostRegister(start, size, _PORTABLE)),
            lambda start, _: outcome(runtime.cudaHostUnregister(start)),
        )


@contextlib.contextmanager
def relaxed_capture(device: torch.device) -> Iterator[None]:
    """Let this thread use the driver while another thread of the process captures a CUDA graph.

    Engines capture with torch's default mode, in which a call such as cudaHostRegister or cudaEventQuery in any other
    thread fails, and with it the capture, unless that thread has asked for the relaxed mode.
    """
    exchange = _exchange_capture_mode() if device.type == "cuda" else None
    mode = ctypes.c_int(_RELAXED)
    if exchange is not None:
        exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        if exchange is not None:
            exchange(ctypes.byref(mode))


@functools.cache
def _exchange_capture_mode() -> Callable[..., int] | None:
    """CUDA's function; None with a runtime that torch has linked statically, or ROCm's."""
    function: Callable[..., int] | None = getattr(ctypes.CDLL(None), "cudaThreadExchangeStreamCaptureMode", None)
    return function
