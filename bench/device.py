"""A GPU, used through the driver alone: paged KV as engines lay it out, and the speed of one large copy. For gpu.py."""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdepot.devices.cuda.driver import Driver
from kvdepot.errors import DeviceError

__all__ = ["PINNED", "Gpu", "Kind"]

PINNED = ("cuMemHostAlloc", "registered tmpfs")
"""Kinds of pinned memory: the driver's own, and shared memory as the arena is."""
_ITEM_BYTES = 2  # bf16


@dataclass(frozen=True)
class Kind:
    """An engine's layout of its KV: `layers` allocations of `[blocks, *block]` bf16."""

    name: str
    layers: int
    block: tuple[int, ...]
    block_tokens: int
    bar: float
    both_bar: float = 0.0
    is_beside: bool = False
    """Whether an engine's kernels are measured beside copies of this layout, too."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one layer."""
        return math.prod(self.block) * _ITEM_BYTES


class Gpu:
    """The first GPU: its memory, and the speed of one copy."""

    def __init__(self, driver: Driver, peak_bytes: int) -> None:
        self._driver = driver
        there = driver.devices()
        if not there:
            raise DeviceError("there is no GPU")
        self._device = next(iter(there.values()))
        self._bytes = peak_bytes
        self.name = driver.name(self._device)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Make its context current on this thread."""
        call = self._driver.call
        context = self._driver.retain(self._device)
        with self._driver.current(context):
            flags = self._driver.cu.CUstream_flags.CU_STREAM_NON_BLOCKING
            self._streams = [int(call("cuStreamCreate", int(flags))) for _ in range(2)]
            self._memory = [int(call("cuMemAlloc", self._bytes)) for _ in range(2)]
            allocated = [int(call("cuMemHostAlloc", self._bytes, 0)) for _ in range(2)]
            shared = [_shared(self._bytes) for _ in range(2)]
            for area in shared:
                call("cuMemHostRegister", area.ctypes.data, self._bytes, self._driver.cu.CU_MEMHOSTREGISTER_PORTABLE)
            self._pinned = dict(zip(PINNED, (allocated, [int(area.ctypes.data) for area in shared]), strict=True))
            try:
                yield
            finally:
                for stream in self._streams:
                    call("cuStreamDestroy", stream)
                for address in self._memory:
                    call("cuMemFree", address)
                for address in allocated:
                    call("cuMemFreeHost", address)
                for area in shared:
                    call("cuMemHostUnregister", area.ctypes.data)
        self._driver.release(self._device)

    def peak(self, *directions: bool, pinned: str = PINNED[0]) -> float:
        """GB/s of one large copy of pinned memory in each of these directions (is_store), at once."""
        begun = time.perf_counter()
        for is_store in directions:
            self._copy(is_store, self._pinned[pinned][is_store])
        for is_store in directions:
            self._driver.call("cuStreamSynchronize", self._streams[is_store])
        return len(directions) * self._bytes / (time.perf_counter() - begun) / 1e9

    def _copy(self, is_store: bool, pinned: int) -> None:
        device, stream = self._memory[is_store], self._streams[is_store]
        if is_store:
            self._driver.call("cuMemcpyDtoHAsync", pinned, device, self._bytes, stream)
        else:
            self._driver.call("cuMemcpyHtoDAsync", device, pinned, self._bytes, stream)

    def refuses_torch(self, device: str) -> str:
        """Why torch cannot use `device`, which is this GPU if it is "cuda"; empty if it can."""
        try:
            import torch
        except ImportError:
            return "torch is not installed"
        if device == "cuda" and not (torch.cuda.is_available() and self.name == torch.cuda.get_device_name(0)):
            return f"torch cannot use {self.name}"
        return ""

    def used_bytes(self) -> int:
        """GPU memory in use by all processes together."""
        free, total = self._driver.call("cuMemGetInfo")
        return int(total) - int(free)

    @contextmanager
    def tensors(self, kind: Kind, blocks: int) -> Iterator[dict[str, Any]]:
        """Layers of random bytes, each in its own allocation, as tensors that the worker can share."""
        rng = np.random.default_rng(3)
        size = blocks * kind.block_bytes
        made: list[int] = []
        try:
            for _ in range(kind.layers):
                made.append(int(self._driver.call("cuMemAlloc", size)))
                random = rng.integers(0, 256, size, np.uint8)
                self._driver.call("cuMemcpyHtoD", made[-1], random.ctypes.data, size)
            yield {f"layers.{i}": Tensor(address, (blocks, *kind.block)) for i, address in enumerate(made)}
        finally:
            for address in made:
                self._driver.call("cuMemFree", address)

    def read(self, tensor: Tensor) -> npt.NDArray[np.uint8]:
        """All bytes of it."""
        data = np.empty(tensor.nbytes(), np.uint8)
        self._driver.call("cuMemcpyDtoH", data.ctypes.data, tensor.data_ptr(), tensor.nbytes())
        return data


def _shared(size: int) -> npt.NDArray[np.uint8]:
    """Shared memory of its own, with all pages there."""
    fd = os.memfd_create("kvdepot-bench")
    os.ftruncate(fd, size)
    area = np.frombuffer(mmap.mmap(fd, size), np.uint8)
    os.close(fd)
    area[:] = 1
    return area


class Tensor:
    """The part of a contiguous bf16 torch tensor, which fills its storage, that `kvdepot.devices.share` uses."""

    dtype = "torch.bfloat16"
    device = SimpleNamespace(type="cuda", index=0)

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self._address = address
        self.shape = shape

    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES

    def data_ptr(self) -> int:
        return self._address

    def element_size(self) -> int:
        return _ITEM_BYTES

    def storage_offset(self) -> int:
        return 0

    def stride(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))

    def untyped_storage(self) -> Tensor:
        return self
