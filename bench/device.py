"""A GPU, used through the driver alone: paged KV as engines lay it out, and the speed of one large copy. For gpu.py."""

from __future__ import annotations

import math
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

__all__ = ["Gpu", "Kind"]

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
            self._pinned = [int(call("cuMemHostAlloc", self._bytes, 0)) for _ in range(2)]
            try:
                yield
            finally:
                for stream in self._streams:
                    call("cuStreamDestroy", stream)
                for address in self._memory:
                    call("cuMemFree", address)
                for address in self._pinned:
                    call("cuMemFreeHost", address)
        self._driver.release(self._device)

    def peak(self, is_store: bool) -> float:
        """GB/s of one large copy of pinned memory."""
        begun = time.perf_counter()
        self._copy(is_store)
        self._wait(is_store)
        return self._bytes / (time.perf_counter() - begun) / 1e9

    def peak_both(self) -> float:
        """GB/s of two copies at once, one in each direction."""
        begun = time.perf_counter()
        for is_store in (True, False):
            self._copy(is_store)
        for is_store in (True, False):
            self._wait(is_store)
        return 2 * self._bytes / (time.perf_counter() - begun) / 1e9

    def _copy(self, is_store: bool) -> None:
        device, pinned, stream = self._memory[is_store], self._pinned[is_store], self._streams[is_store]
        if is_store:
            self._driver.call("cuMemcpyDtoHAsync", pinned, device, self._bytes, stream)
        else:
            self._driver.call("cuMemcpyHtoDAsync", device, pinned, self._bytes, stream)

    def _wait(self, is_store: bool) -> None:
        self._driver.call("cuStreamSynchronize", self._streams[is_store])

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
