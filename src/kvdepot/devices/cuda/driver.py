"""Calls of the CUDA driver through NVIDIA's own bindings (cuda-python); here, and only here, its errors become ours.

Used by the rest of this folder, on copy threads and in workers. The one law: what the driver refuses raises, here.

Addresses, streams and devices are plain ints outside this file. `copy_batch` alone goes past the bindings, to the
function's address that they give: as arrays of numpy its arguments need no conversion, which for thousands of copies
would take longer than the copies (source: CUDA Driver API reference, "Memory Management").
"""

from __future__ import annotations

import ctypes
import re
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdepot import install
from kvdepot.errors import DeviceError

__all__ = ["Addresses", "Driver", "DriverError", "load"]

Addresses = npt.NDArray[np.uint64]

_BINDINGS_SINCE = (12, 9, 1)
"""Older bindings hold the GIL in all calls: the server would stand still while a copy runs."""
_BATCH_SINCE = 12080
"""CUDA 12.8 brought cuMemcpyBatchAsync; newer drivers keep it as it was then for who asks for that version."""
_ORDER_STREAM, _ORDER_ANY = 1, 3
"""CUmemcpySrcAccessOrder."""


class DriverError(DeviceError):
    """A call of the driver failed; `result` is the name that CUDA gives to why."""

    def __init__(self, message: str, result: str = "") -> None:  # a default, or pickle could not make it again
        super().__init__(message)
        self.result = result


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: order, location hints (none), flags (none)."""

    _fields_ = (("order", ctypes.c_uint32), ("hints", ctypes.c_uint32 * 4), ("flags", ctypes.c_uint32))


_loading = threading.Lock()
_loaded: Driver | None = None


def load() -> Driver:
    """The driver of this process, initialised. Takes no memory of any GPU. Raises DeviceError where there is none."""
    global _loaded
    with _loading:
        if _loaded is None:
            _loaded = Driver()
        return _loaded


class Driver:
    """The CUDA driver. Any thread; calls that block or take long release the GIL."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import __version__, driver
        except ImportError as exc:
            raise DeviceError(f"KV tensors on a GPU need cuda-python: {install.advice('cuda')}") from exc
        if tuple(int(part) for part in re.findall(r"\d+", __version__)[:3]) < _BINDINGS_SINCE:
            raise DeviceError(
                f"cuda-bindings {__version__} block all threads while waiting for a GPU: pip install "
                f"'cuda-bindings>={'.'.join(map(str, _BINDINGS_SINCE))}'"
            )
        self.cu: Any = driver
        try:
            (result,) = driver.cuInit(0)
        except Exception as exc:
            raise DeviceError(f"no CUDA driver here: {exc}") from exc
        if result != driver.CUresult.CUDA_SUCCESS:
            raise self._error("cuInit", result)
        self.version: int = self.call("cuDriverGetVersion")
        self._batch = self._find_batch()

    def __repr__(self) -> str:
        return f"<Driver {self.version // 1000}.{self.version % 1000 // 10}>"

    def call(self, name: str, *args: Any) -> Any:
        """Run a function of the driver: None, the value, or the tuple of values it gives. Raises DriverError."""
        result, *values = getattr(self.cu, name)(*args)
        if result != self.cu.CUresult.CUDA_SUCCESS:
            raise self._error(name, result)
        return values[0] if len(values) == 1 else tuple(values) or None

    def _error(self, name: str, result: Any) -> DriverError:
        _, known = self.cu.cuGetErrorName(result)
        _, meaning = self.cu.cuGetErrorString(result)
        code = known.decode() if known else str(result)
        return DriverError(f"{name}: {code} ({meaning.decode() if meaning else 'unknown'})", code)

    # -- devices and contexts

    def devices(self) -> dict[str, int]:
        """The GPUs that this process may use, by UUID."""
        found = (int(self.call("cuDeviceGet", i)) for i in range(self.call("cuDeviceGetCount")))
        return {self.uuid(device): device for device in found}

    def uuid(self, device: int) -> str:
        """A GPU's UUID as nvidia-smi writes it; of a part of a GPU (MIG), the part's."""
        # Bindings for CUDA 12 have two of it, the older one of which tells the parts of a GPU not apart.
        name = "cuDeviceGetUuid_v2" if hasattr(self.cu, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        return f"GPU-{uuid.UUID(bytes=bytes(self.call(name, device).bytes))}"

    def device(self, wanted: str) -> int:
        """The GPU of this UUID. Raises DeviceError that names those there are."""
        there = self.devices()
        if wanted not in there:
            raise DeviceError(
                f"{wanted} is not visible to this process, which sees {', '.join(there) or 'no GPU'}: give it the GPUs "
                "of its workers (CUDA_VISIBLE_DEVICES, or the container's devices)"
            )
        return there[wanted]

    def name(self, device: int) -> str:
        """What the GPU is called."""
        name: bytes = self.call("cuDeviceGetName", 256, device)
        return name.split(b"\0")[0].decode()

    def retain(self, device: int) -> Any:
        """The GPU's primary context, made unless it is there. It takes some hundred MiB of the GPU."""
        try:  # threads that wait for copies must not keep processors busy
            self.call("cuDevicePrimaryCtxSetFlags", device, int(self.cu.CUctx_flags.CU_CTX_SCHED_BLOCKING_SYNC))
        except DriverError as exc:
            if exc.result != "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE":  # a worker's, which made it to its own liking
                raise
        return self.call("cuDevicePrimaryCtxRetain", device)

    def release(self, device: int) -> None:
        """Give the primary context up; the last to do so frees all that is in it."""
        self.call("cuDevicePrimaryCtxRelease", device)

    @contextmanager
    def current(self, context: Any) -> Iterator[None]:
        """Make a context the calling thread's for a while."""
        self.call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent")

    # -- copies

    def _find_batch(self) -> Any:
        if self.version < _BATCH_SINCE:
            return None
        address, _ = self.call("cuGetProcAddress", b"cuMemcpyBatchAsync", _BATCH_SINCE, 0)
        if not address:
            return None
        pointer = ctypes.c_void_p
        # dsts, srcs, sizes, count, attributes, their first copies, how many of them, which copy failed, stream
        kind = ctypes.CFUNCTYPE(
            ctypes.c_int,
            pointer,
            pointer,
            pointer,
            ctypes.c_size_t,
            pointer,
            pointer,
            ctypes.c_size_t,
            pointer,
            pointer,
        )
        return kind(int(address))

    @property
    def has_batch(self) -> bool:
        """Whether many copies can be asked for in one call."""
        return self._batch is not None

    def copy_batch(self, dst: Addresses, src: Addresses, sizes: Addresses, stream: int, is_store: bool) -> None:
        """Begin copies `dst[i] <- src[i]`, uint64[n] each, in any order, when the stream has got there. Never blocks.

        is_store: the source is read in stream order; else at any time from now on (it must not change any more).
        The stream must not be the default one. Raises DriverError, with some of the copies possibly under way.
        """
        if self._batch is None:
            for to, start, size in zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True):
                self.call("cuMemcpyAsync", to, start, size, stream)
            return
        # The driver reads them as C arrays: a view that repeats one size, say, is none.
        dst, src, sizes = (np.ascontiguousarray(column) for column in (dst, src, sizes))
        attributes = _Attributes(order=_ORDER_STREAM if is_store else _ORDER_ANY)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        code = self._batch(
            dst.ctypes.data, src.ctypes.data, sizes.ctypes.data, len(sizes),
            ctypes.byref(attributes), ctypes.byref(first), 1, ctypes.byref(failed), stream,
        )  # fmt: skip
        if code:
            try:
                result = self.cu.CUresult(code)
            except ValueError:
                raise DriverError(f"cuMemcpyBatchAsync: {code}, newer than these bindings", str(code)) from None
            raise self._error("cuMemcpyBatchAsync", result)
