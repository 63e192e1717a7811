"""A process that owns KV tensors on a GPU, like an engine's worker; CUDA cannot share memory within one process.

Tensors are allocated through the driver alone (`DriverTensor`), so that a real driver and the fake one run the same
tests without torch. Run as `python -m tests.devices.worker FD`: it takes pickled calls and answers them, until the
other end closes.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import traceback
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvdepot.protocol.layout import TensorView
from tests.devices.footprints import descriptors_and_maps
from tests.devices.tensors import DTYPES, Bytes, Model, Placed

ROOT = Path(__file__).parent.parent.parent
HANG_S = 120.0
"""As in tests/conftest.py, which each of these processes would take long to import."""
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
        """how: "one", "each", "virtual", or "torch" (its tensors)."""
        from kvdepot.devices.cuda.driver import load

        self.driver = load()
        self.gpu, self.how = gpu, how
        self.context = self.driver.retain(gpu)
        self.driver.call("cuCtxPushCurrent", self.context)
        self.sizes: list[int] = []
        self.addresses: list[int] = []
        self.storages: list[Any] = []  # of torch
        self._undo = contextlib.ExitStack()

    def allocate(self, sizes: Sequence[int]) -> None:
        self.free()
        self.sizes = list(sizes)
        if self.how == "torch":
            self.addresses = [self._of_torch(size) for size in sizes]
            return
        if self.how == "each":
            self.addresses = [self._allocate(size) for size in sizes]
            return
        places, end = [], 0
        for size in sizes:
            places.append(end)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        base = self._allocate(end) if self.how == "one" else self._map(end, True, self._undo)
        self.addresses = [base + place for place in places]

    def _allocate(self, size: int) -> int:
        address = int(self.driver.call("cuMemAlloc", size))
        self._undo.callback(self.driver.call, "cuMemFree", address)
        return address

    def _of_torch(self, size: int) -> int:
        """As torch's caching allocator gives it: somewhere in a segment."""
        import torch

        made = torch.zeros(size, dtype=torch.uint8, device=f"cuda:{self.gpu}")
        torch.cuda.synchronize(self.gpu)
        self.storages.append(made)
        return made.data_ptr()

    def _layer_of_torch(self, layer: Placed) -> Any:
        import torch

        item = DTYPES[layer.dtype]
        flat = self.storages[layer.storage].view(getattr(torch, layer.dtype))
        return flat.as_strided(layer.shape, [stride // item for stride in layer.strides], layer.offset // item)

    def _map(
        self, size: int, exportable: bool, undo: contextlib.ExitStack, piece: int = GRANULE, reserved: int = 0
    ) -> int:
        """Pieces mapped side by side, as torch's expandable segments do. reserved: addresses, if more than memory."""
        cu, call = self.driver.cu, self.driver.call
        size = -(-size // piece) * piece
        prop = cu.CUmemAllocationProp()
        prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = self.gpu
        if exportable:
            prop.requestedHandleTypes = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        access = cu.CUmemAccessDesc()
        access.location = prop.location
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        base = int(call("cuMemAddressReserve", reserved or size, 0, 0, 0))
        undo.callback(call, "cuMemAddressFree", base, reserved or size)
        for address in range(base, base + size, piece):
            handle = call("cuMemCreate", piece, prop, 0)
            call("cuMemMap", address, piece, 0, handle, 0)
            call("cuMemRelease", handle)
            undo.callback(call, "cuMemUnmap", address, piece)
        call("cuMemSetAccess", base, size, [access], 1)
        return base

    def tensors(self, model: Model) -> dict[str, Any]:
        """A model's layers, in memory that is made for them."""
        self.allocate(model.sizes)
        if self.how == "torch":
            return {layer.name: self._layer_of_torch(layer) for layer in model.layers}
        return {
            layer.name: DriverTensor(self.gpu, self.addresses[layer.storage], self.sizes[layer.storage], layer)
            for layer in model.layers
        }

    def make(self, model: Model) -> list[TensorView]:
        """Memory for a model, shared as the adapters do."""
        from kvdepot.devices import share

        return [share(tensor, name) for name, tensor in self.tensors(model).items()]

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
        self.storages.clear()

    def info(self) -> tuple[int, int]:
        """Free and all bytes of the GPU, as the driver says."""
        free, total = self.driver.call("cuMemGetInfo")
        return int(free), int(total)


class Sharer(GpuMemory):
    """Memory by name, which is shared as a worker's, and what was opened of another process, as a server does."""

    def __init__(self, gpu: int, how: str) -> None:
        super().__init__(gpu, how)
        self.named: dict[str, tuple[int, int]] = {}
        self._unmap: dict[str, contextlib.ExitStack] = {}
        self._opened: list[Any] = []

    # -- a worker

    def reserve(self, name: str, size: int, piece: int = 0, reserved: int = 0, exportable: bool = True) -> None:
        """Virtual memory that is not shared yet."""
        undo = self._unmap[name] = contextlib.ExitStack()
        self.named[name] = self._map(size, exportable, undo, piece or size, reserved), size

    def virtual(self, name: str, size: int, piece: int = 0) -> TensorView:
        self.reserve(name, size, piece)
        return self.part(name, 0, size)

    def unmap(self, name: str) -> None:
        del self.named[name]
        self._unmap.pop(name).close()

    def tensor(self, name: str, size: int) -> TensorView:
        self.named[name] = self._allocate(size), size
        return self.part(name, 0, size)

    def torch_tensor(self, name: str, size: int) -> TensorView:
        """A tensor from torch's own allocator, however the environment sets that up."""
        from kvdepot.devices import share

        address = self._of_torch(size)
        view = share(self.storages[-1], name)
        self.named[name] = address - view.offset, view.mapping_bytes
        return view

    def part(self, name: str, offset: int, size: int) -> TensorView:
        """Share a tensor whose storage is a part of what is mapped."""
        from kvdepot.devices import share

        placed = Placed("layer 0", 0, 0, (size,), (1,), "float8_e4m3fn")
        tensor: Any = DriverTensor(self.gpu, self.named[name][0] + offset, size, placed)
        return share(tensor, "layer 0")

    def part_from_thread(self, name: str, offset: int, size: int) -> TensorView:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self.part, name, offset, size).result(HANG_S)

    def lie(self, kind: str) -> TensorView:
        """A handle of one piece that has 2 MiB, not 4, or that is no memory of a GPU at all."""
        from kvdepot.devices.cuda import descriptors

        view, cu = self.virtual("lie", GRANULE), self.driver.cu
        posix = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

        def export(first: int, end: int) -> Iterator[int]:
            memory = self.driver.call("cuMemRetainAllocationHandle", self.named["lie"][0])
            larger = self.driver.call("cuMemExportToShareableHandle", memory, posix, 0)
            yield larger if kind == "larger" else os.memfd_create("anything")

        handle = b"\2" + descriptors.offer("lie", [2 * GRANULE], export)
        return view._replace(mapping_bytes=2 * GRANULE, handle=handle)

    def fill(self, name: str, seed: int) -> None:
        self._fill(*self.named[name], seed)

    # -- a server

    def _open(self, view: TensorView) -> Any:
        from kvdepot.devices.cuda import sharing
        from kvdepot.protocol.layout import Mapping as Mapped

        mapping = Mapped(view.mapping, view.mapping_bytes, view.device, view.handle)
        self.driver.device(mapping.device)
        return sharing.open_allocation(self.driver, mapping)

    def attach(self, view: TensorView) -> int:
        self._opened.append(self._open(view))
        return len(self._opened) - 1

    def attach_from_threads(self, view: TensorView, threads: int, times: int) -> list[int]:
        """Open, read and close it this many times on each of several threads; the checksums."""

        def run(_: int) -> list[int]:
            sums = []
            with self.driver.current(self.context):
                for _ in range(times):
                    opened = self._open(view)
                    sums.append(self._sum(opened.address, opened.size))
                    opened.close()
            return sums

        with ThreadPoolExecutor(threads) as pool:
            return [each for sums in pool.map(run, range(threads)) for each in sums]

    def detach(self, number: int) -> None:
        self._opened[number].close()

    def overwrite(self, number: int, seed: int) -> None:
        self._fill(self._opened[number].address, self._opened[number].size, seed)

    # -- both

    def _fill(self, address: int, size: int, seed: int) -> None:
        data = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        self.driver.call("cuMemcpyHtoD", address, data.ctypes.data, size)

    def _sum(self, address: int, size: int) -> int:
        data = np.empty(size, np.uint8)
        self.driver.call("cuMemcpyDtoH", data.ctypes.data, address, size)
        return zlib.crc32(data)

    def sum(self, which: str | int, offset: int = 0, size: int = 0) -> int:
        """A checksum of memory."""
        if isinstance(which, str):
            address, length = self.named[which]
        else:
            address, length = self._opened[which].address, self._opened[which].size
        return self._sum(address + offset, size or length)

    def footprint(self) -> dict[str, int]:
        """What must not grow: memory in use on the GPU, and this process's descriptors and mappings."""
        free, total = self.info()
        return {"gpu": total - free, **descriptors_and_maps()}

    def leave(self) -> None:
        """Give up the context."""
        self.driver.call("cuCtxPopCurrent")
        self.driver.release(self.gpu)


class Engine(Sharer):
    """A worker as an engine has it: its tensors are registered with a server through the adapter."""

    def connect(self, url: str, name: str, model: Model, block_tokens: int) -> int:
        """Register; blocks a chunk."""
        import zmq

        from kvdepot.adapters import LMCacheMPWorkerAdapter

        self.stores: set[str] = set()
        self.axes = model.axes
        self.adapter = LMCacheMPWorkerAdapter(url, zmq.Context.instance(), name, 1, 0, block_tokens)
        self.adapter.register_kv_caches(self.tensors(model), block_axes=model.axes)
        return self.adapter.blocks_in_chunk

    def register_again(self, times: int) -> None:
        """The same tensors under the same number, which replaces the registration."""
        for _ in range(times):
            self.adapter.register_kv_caches(self.adapter.kv_caches, block_axes=self.axes)

    def begin(self, request: str, ids: list[int], tokens: list[int], is_store: bool) -> None:
        from kvdepot.adapters import LoadStoreOp

        if is_store:
            self.stores.add(request)
        submit = self.adapter.submit_store_request if is_store else self.adapter.submit_retrieve_request
        submit(request, LoadStoreOp(ids, tokens), None)

    def end(self, request: str, timeout_s: float) -> tuple[bool, list[int]]:
        """Wait as an engine does, by asking; whether the request's store arrived, and blocks that a load failed."""
        dropped = self.adapter.counters["stores_dropped"]
        deadline = time.monotonic() + timeout_s
        while True:
            stored, loaded = self.adapter.get_finished(self.stores & {request})
            if request in (stored or set()) | (loaded or set()):
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"{request} has not ended within {timeout_s} s")
            time.sleep(0.0005)
        failed = sorted(self.adapter.get_block_ids_with_load_errors())
        return self.adapter.counters["stores_dropped"] == dropped, failed

    def run(self, request: str, ids: list[int], tokens: list[int], is_store: bool) -> tuple[bool, list[int]]:
        self.begin(request, ids, tokens, is_store)
        return self.end(request, HANG_S)

    def disconnect(self) -> None:
        self.adapter.shutdown()


class WorkerProcess:
    """The other end: calls of Engine in a process of its own."""

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

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self.process.kill()
        self.process.wait(HANG_S)
        self._ours.close()

    def close(self) -> None:
        """Let it end, which it does without tidying up: so do engines. Safe twice."""
        self._ours.close()
        try:
            self.process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(HANG_S)


def main() -> None:
    channel = Connection(int(sys.argv[1]))
    memory: Engine | None = None
    while True:
        try:
            name, args = channel.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            if name == "open":
                memory = Engine(*args)
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
