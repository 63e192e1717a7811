"""A process that owns KV tensors on a GPU, as an engine's worker does: CUDA shares no memory within one process.

Tensors are made through the driver alone (`DriverTensor`), so that the real one and its stand-in run the same tests
without torch. Run as `python -m tests.devices.worker FD`: one pickled call in, one answer out, until its end closes.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvdepot.layout import TensorView
from tests.devices.tensors import DTYPES, Bytes, Model, Placed

ROOT = Path(__file__).parent.parent.parent
GRANULE = 2 << 20
ALIGNMENT = 512
"""Of tensors in an allocation, as torch's allocator does it."""


class DriverTensor:
    """As much of a torch tensor as sharing asks for, over memory that the driver gave."""

    def __init__(self, gpu: int, storage: int, size: int, placed: Placed) -> None:
        item = DTYPES[placed.dtype]
        self.device = SimpleNamespace(type="cuda", index=gpu)
        self.dtype = f"torch.{placed.dtype}"
        self.shape = placed.shape
        self._address = storage + placed.offset
        self._strides = tuple(stride // item for stride in placed.strides)
        self._item = item
        self._storage = SimpleNamespace(data_ptr=lambda: storage, nbytes=lambda: size)

    def data_ptr(self) -> int:
        return self._address

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def element_size(self) -> int:
        return self._item

    def untyped_storage(self) -> Any:
        return self._storage


class GpuMemory:
    """Memory of one GPU: an allocation for all storages, one each, or pieces of virtual memory."""

    def __init__(self, gpu: int, how: str) -> None:
        """how: "one", "each" or "virtual" (exportable), "closed" (virtual and not exportable)."""
        from kvdepot.devices.cuda.driver import load

        self.driver = load()
        self.gpu, self.how = gpu, how
        self.context = self.driver.retain(gpu)
        self.driver.call("cuCtxPushCurrent", self.context)
        self.sizes: list[int] = []
        self.addresses: list[int] = []
        self._undo = contextlib.ExitStack()

    def allocate(self, sizes: Sequence[int]) -> None:
        self.free()
        self.sizes = list(sizes)
        if self.how == "each":
            self.addresses = [self._allocate(size) for size in sizes]
            return
        places, end = [], 0
        for size in sizes:
            places.append(end)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        base = self._allocate(end) if self.how == "one" else self._map(end, self.how == "virtual")
        self.addresses = [base + place for place in places]

    def _allocate(self, size: int) -> int:
        address = int(self.driver.call("cuMemAlloc", size))
        self._undo.callback(self.driver.call, "cuMemFree", address)
        return address

    def _map(self, size: int, exportable: bool) -> int:
        cu, call = self.driver.cu, self.driver.call
        size = -(-size // GRANULE) * GRANULE
        prop = cu.CUmemAllocationProp()
        prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = self.gpu
        if exportable:
            prop.requestedHandleTypes = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        access = cu.CUmemAccessDesc()
        access.location = prop.location
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        base = int(call("cuMemAddressReserve", size, 0, 0, 0))
        self._undo.callback(call, "cuMemAddressFree", base, size)
        for address in range(base, base + size, GRANULE):
            handle = call("cuMemCreate", GRANULE, prop, 0)
            call("cuMemMap", address, GRANULE, 0, handle, 0)
            call("cuMemRelease", handle)
            self._undo.callback(call, "cuMemUnmap", address, GRANULE)
        call("cuMemSetAccess", base, size, [access], 1)
        return base

    def make(self, model: Model) -> list[TensorView]:
        """Memory for a model, shared as the adapters do."""
        from kvdepot.devices import share

        self.allocate(model.sizes)
        tensors: list[Any] = [
            DriverTensor(self.gpu, self.addresses[layer.storage], self.sizes[layer.storage], layer)
            for layer in model.layers
        ]
        return [share(tensor, layer.name) for tensor, layer in zip(tensors, model.layers, strict=True)]

    def write(self, storages: Sequence[Bytes]) -> None:
        for address, new in zip(self.addresses, storages, strict=True):
            data = np.ascontiguousarray(new)
            self.driver.call("cuMemcpyHtoD", address, data.ctypes.data, data.nbytes)
        self.driver.call("cuCtxSynchronize")

    def read(self) -> list[Bytes]:
        found = [np.empty(size, np.uint8) for size in self.sizes]
        for address, out in zip(self.addresses, found, strict=True):
            self.driver.call("cuMemcpyDtoH", out.ctypes.data, address, out.nbytes)
        return found

    def free(self) -> None:
        self._undo.close()
        self.addresses.clear()

    def info(self) -> tuple[int, int]:
        """Free and all bytes of the GPU, as the driver says."""
        free, total = self.driver.call("cuMemGetInfo")
        return int(free), int(total)


class WorkerProcess:
    """The other end: calls of GpuMemory in a process of its own."""

    def __init__(self, environment: Mapping[str, str], gpu: int = 0, how: str = "one") -> None:
        self._ours, theirs = Pipe()
        path = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), str(ROOT)]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.devices.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()], env={**environment, "PYTHONPATH": path}, cwd=ROOT,
        )  # fmt: skip
        theirs.close()
        self.call("open", gpu, how)

    def call(self, name: str, *args: Any) -> Any:
        self._ours.send((name, args))
        kind, value = self._ours.recv()
        if kind == "error":
            raise value
        return value

    def make(self, model: Model) -> list[TensorView]:
        views: list[TensorView] = self.call("make", model)
        return views

    def write(self, storages: Sequence[Bytes]) -> None:
        self.call("write", storages)

    def read(self) -> list[Bytes]:
        storages: list[Bytes] = self.call("read")
        return storages

    def close(self) -> None:
        self._ours.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)


def main() -> None:
    channel = Connection(int(sys.argv[1]))
    memory: GpuMemory | None = None
    while True:
        try:
            name, args = channel.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            if name == "open":
                memory = GpuMemory(*args)
                channel.send(("ok", os.getpid()))
            else:
                channel.send(("ok", getattr(memory, name)(*args)))
        except Exception as exc:  # noqa: BLE001 - the top of a process: whoever called hears of it
            try:
                channel.send(("error", exc))
            except Exception:  # noqa: BLE001 - it cannot travel
                channel.send(("error", RuntimeError("".join(traceback.format_exception(exc)))))


if __name__ == "__main__":
    main()
