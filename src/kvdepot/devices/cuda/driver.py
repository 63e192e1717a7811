"""Calls of the CUDA driver through NVIDIA's bindings (cuda-python); the only place that maps its errors to ours.

Addresses, streams and devices are plain ints outside this file. Only `copy_batch` bypasses the bindings and calls the
driver's function by its address, with numpy arrays: converting thousands of arguments would take longer than the copies
(source: CUDA Driver API reference, "Memory Management").
"""

from __future__ import annotations

import ctypes
import re
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvdepot import install
from kvdepot.errors import DeviceError

Addresses = npt.NDArray[np.uint64]
Copies: TypeAlias = tuple[Addresses, Addresses, Addresses]
"""Destinations, sources and bytes of copies, uint64[n] each."""

_BINDINGS_SINCE = (12, 9, 1)
"""Older bindings hold the GIL in all calls, so the server would stop while a copy runs."""
_BATCH_SINCE = 12080
"""CUDA 12.8 introduced cuMemcpyBatchAsync; newer drivers still provide that version of it on request."""
STREAM_ORDER, ANY_ORDER = 1, 3
"""CUmemcpySrcAccessOrder: sources are read in stream order, or at any time from now on, so they must not change."""
PREFER_OVERLAP = 1
"""CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE: a hint to leave the multiprocessors alone. Outside Tegra, drivers follow
it since CUDA 13.1 (source: CUDA Toolkit release notes)."""


class DriverError(DeviceError):
    """A call of the driver failed; `result` is CUDA's name of the error."""

    def __init__(self, message: str, result: str = "") -> None:  # pickle needs the default
        super().__init__(message)
        self.result = result


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: order, location hints (none), flags."""

    _fields_ = (("order", ctypes.c_uint32), ("hints", ctypes.c_uint32 * 4), ("flags", ctypes.c_uint32))


_loading = threading.Lock()
_loaded: Driver | None = None


def load() -> Driver:
    """The driver of this process, initialised. Uses no GPU memory. Raises DeviceError if there is no driver."""
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

    @property
    def has_batches(self) -> bool:
        """Whether `copy_batch` enqueues its copies with one call."""
        return self._batch is not None

    def call(self, name: str, *args: Any) -> Any:
        """Call a function of the driver; returns None, its value, or a tuple of its values. Raises DriverError."""
        result, *values = getattr(self.cu, name)(*args)
        if result != self.cu.CUresult.CUDA_SUCCESS:
            raise self._error(name, result)
        return values[0] if len(values) == 1 else tuple(values) or None

    def _error(self, name: str, result: Any) -> DriverError:
        _, known = self.cu.cuGetErrorName(result)
        _, meaning = self.cu.cuGetErrorString(result)
        code = known.decode() if known else str(result)
        return DriverError(f"{name}: {code} ({meaning.decode() if meaning else 'unknown'})", code)

    def devices(self) -> dict[str, int]:
        """The GPUs visible to this process, by UUID."""
        found = (int(self.call("cuDeviceGet", i)) for i in range(self.call("cuDeviceGetCount")))
        return {self.uuid(device): device for device in found}

    def uuid(self, device: int) -> str:
        """A GPU's UUID as nvidia-smi prints it; for a MIG instance, that of the instance."""
        # Bindings for CUDA 12 have two versions; the older one does not distinguish MIG instances.
        name = "cuDeviceGetUuid_v2" if hasattr(self.cu, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
        return f"GPU-{uuid.UUID(bytes=bytes(self.call(name, device).bytes))}"

    def device(self, wanted: str) -> int:
        """The GPU with this UUID. Raises DeviceError, which lists the available ones."""
        there = self.devices()
        if wanted not in there:
            raise DeviceError(
                f"{wanted} is not visible to this process, which sees {', '.join(there) or 'no GPU'}: give it the GPUs "
                "of its workers (CUDA_VISIBLE_DEVICES, or the container's devices)"
            )
        return there[wanted]

    def name(self, device: int) -> str:
        name: bytes = self.call("cuDeviceGetName", 256, device)
        return name.split(b"\0")[0].decode()

    def retain(self, device: int) -> Any:
        """The GPU's primary context, created if necessary. It takes some hundred MiB of GPU memory."""
        try:  # threads that wait for copies must sleep, not spin
            self.call("cuDevicePrimaryCtxSetFlags", device, int(self.cu.CUctx_flags.CU_CTX_SCHED_BLOCKING_SYNC))
        except DriverError as exc:
            if exc.result != "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE":  # a worker in this process has set its own flags
                raise
        return self.call("cuDevicePrimaryCtxRetain", device)

    def release(self, device: int) -> None:
        """Release the primary context; the last release frees everything in it."""
        self.call("cuDevicePrimaryCtxRelease", device)

    @contextmanager
    def current(self, context: Any) -> Iterator[None]:
        self.call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent")

    def _find_batch(self) -> Any:
        if self.version < _BATCH_SINCE:
            return None
        address, _ = self.call("cuGetProcAddress", b"cuMemcpyBatchAsync", _BATCH_SINCE, 0)
        if not address:
            return None
        pointer = ctypes.c_void_p
        # dsts, srcs, sizes, count, attributes, first copy of each attribute, count of these, failed copy, stream
        arguments = (pointer, pointer, pointer, ctypes.c_size_t, pointer, pointer, ctypes.c_size_t, pointer, pointer)
        return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(int(address))

    def copy_batch(self, copies: Copies, stream: int, order: int, flags: int = 0) -> None:
        """Enqueue copies on a stream, in any order. Never blocks.

        The stream must not be the default one. order: STREAM_ORDER or ANY_ORDER. flags: 0 or PREFER_OVERLAP; drivers
        without batches have none. Raises DriverError; some of the copies may be enqueued then.
        """
        dst, src, sizes = copies
        if self._batch is None:
            for to, start, size in zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True):
                self.call("cuMemcpyAsync", to, start, size, stream)
            return
        # The driver reads them as C arrays, which a broadcast view, for example, is not.
        dst, src, sizes = (np.ascontiguousarray(column) for column in copies)
        attributes = _Attributes(order=order, flags=flags)
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
