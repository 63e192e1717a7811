"""A process for tests of sharing: a worker with GPU memory, or a server that opens it.

A request is one line of JSON: a method and its arguments. The reply is "ok" and a value, or an exception's type and
text.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
from cuda.bindings import driver as cu
from footprints import descriptors_and_maps

from kvdepot.devices.cuda import descriptors, sharing
from kvdepot.devices.cuda.driver import load
from kvdepot.protocol.layout import Mapping, TensorView

_GRANULE = 2 << 20


class DriverTensor:
    """The part of a torch tensor that sharing uses, on memory from the driver."""

    dtype = "torch.uint8"

    def __init__(self, storage: tuple[int, int], offset: int, shape: list[int], stride: list[int], item: int) -> None:
        self.device = SimpleNamespace(type="cuda", index=0)
        self.shape = shape
        self._storage = SimpleNamespace(data_ptr=lambda: storage[0], nbytes=lambda: storage[1])
        self._offset = offset
        self._stride = stride
        self._item = item

    def data_ptr(self) -> int:
        return int(self._storage.data_ptr()) + self._offset

    def untyped_storage(self) -> SimpleNamespace:
        return self._storage

    def stride(self) -> list[int]:
        return self._stride

    def element_size(self) -> int:
        return self._item


class Peer:
    def __init__(self) -> None:
        self.driver = load()
        self.context: Any = None
        self.device = 0
        self.memory: dict[str, tuple[int, int]] = {}
        self.handles: dict[str, list[Any]] = {}
        self.opened: list[sharing.Opened] = []
        self.kept: list[Any] = []

    def enter(self, device: int = 0) -> None:
        if self.context is None:
            self.device = device
            self.context = self.driver.call("cuDevicePrimaryCtxRetain", device)
            self.driver.call("cuCtxPushCurrent", self.context)

    def leave(self) -> None:
        if self.context is not None:
            self.driver.call("cuCtxPopCurrent")
            self.driver.release(self.device)
            self.context = None

    # -- a worker

    def allocate(self, name: str, size: int) -> None:
        self.enter()
        self.memory[name] = int(self.driver.call("cuMemAlloc", size)), size

    def tensor(
        self,
        name: str,
        size: int,
        offset: int = 0,
        shape: list[int] | None = None,
        stride: list[int] | None = None,
        item: int = 1,
    ) -> dict[str, Any]:
        self.allocate(name, size)
        tensor = DriverTensor(self.memory[name], offset, shape or [size - offset], stride or [1], item)
        return told(sharing.share(tensor, "layer 0"))  # type: ignore[arg-type]

    def torch_tensor(self, name: str, size: int) -> dict[str, Any]:
        """A tensor from torch's own allocator, however the environment sets that up."""
        import torch

        self.enter()
        tensor = torch.zeros(size, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        self.kept.append(tensor)
        view = sharing.share(tensor, name)
        self.memory[name] = tensor.data_ptr() - view.offset, view.mapping_bytes
        return told(view)

    def view(self, name: str, offset: int = 0) -> dict[str, Any]:
        return told(sharing.share(DriverTensor(self.memory[name], offset, [16], [1], 1), f"at {offset}"))  # type: ignore[arg-type]

    def view_from_thread(self, name: str) -> dict[str, Any]:
        views: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: views.append(self.view(name)))
        thread.start()
        thread.join()
        return views[0]

    def empty(self) -> None:
        sharing.share(DriverTensor((0, 0), 0, [0], [1], 1), "nothing")  # type: ignore[arg-type]

    def allocate_virtual(self, name: str, size: int, piece: int = 0, reserved: int = 0, kind: int = 1) -> None:
        """Pieces mapped side by side, as torch's expandable segments (or vLLM's allocator: one piece) do."""
        self.enter()
        call = self.driver.call
        piece = piece or size
        start = int(call("cuMemAddressReserve", reserved or size, 0, 0, 0))
        handles = []
        for at in range(0, size, piece):
            properties = cu.CUmemAllocationProp()
            properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            properties.location.id = 0
            properties.requestedHandleTypes = cu.CUmemAllocationHandleType(kind)
            handles.append(call("cuMemCreate", piece, properties, 0))
            call("cuMemMap", start + at, piece, 0, handles[-1], 0)
        access = cu.CUmemAccessDesc()
        access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = 0
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        call("cuMemSetAccess", start, size, [access], 1)
        self.memory[name] = start, size
        self.handles[name] = handles

    def virtual(self, name: str, size: int, piece: int = 0) -> dict[str, Any]:
        self.allocate_virtual(name, size, piece)
        return self.part(name, 0, size)

    def reserve(self, name: str, reserved: int, size: int, piece: int, kind: int = 1) -> dict[str, Any]:
        """An expandable segment: more addresses than memory."""
        self.allocate_virtual(name, size, piece, reserved, kind)
        return self.part(name, 0, size)

    def part(self, name: str, offset: int, size: int) -> dict[str, Any]:
        """A tensor whose storage is a part of what is mapped."""
        storage = self.memory[name][0] + offset, size
        return told(sharing.share(DriverTensor(storage, 0, [size], [1], 1), "layer 0"))  # type: ignore[arg-type]

    def free_virtual(self, name: str) -> None:
        start, size = self.memory.pop(name)
        handles = self.handles.pop(name)
        for number, handle in enumerate(handles):
            piece = size // len(handles)
            self.driver.call("cuMemUnmap", start + number * piece, piece)
            self.driver.call("cuMemRelease", handle)
        self.driver.call("cuMemAddressFree", start, size)

    def lie(self, kind: str) -> dict[str, Any]:
        """A handle of one piece that has 2 MiB, not 4, or that is no memory of a GPU at all."""
        view = self.virtual("lie", _GRANULE)

        def export(first: int, end: int) -> Iterator[int]:
            memory = self.handles["lie"][0]
            posix = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            yield (
                self.driver.call("cuMemExportToShareableHandle", memory, posix, 0)
                if kind == "larger"
                else os.memfd_create("anything")
            )

        handle = b"\2" + descriptors.offer("lie", [2 * _GRANULE], export)
        return {**view, "mapping_bytes": 2 * _GRANULE, "handle": handle.hex()}

    def fill(self, name: str, seed: int) -> None:
        self._write(*self.memory[name], seed)

    # -- a server

    def open(self, view: dict[str, Any]) -> int:
        mapping = Mapping(view["mapping"], view["mapping_bytes"], view["device"], bytes.fromhex(view["handle"]))
        self.enter(self.driver.device(mapping.device))
        self.opened.append(sharing.open_allocation(self.driver, mapping))
        return len(self.opened) - 1

    def open_from_threads(self, view: dict[str, Any], threads: int, times: int) -> list[int]:
        """Open, read and close it so often on each of so many threads; the checksums."""
        mapping = Mapping(view["mapping"], view["mapping_bytes"], view["device"], bytes.fromhex(view["handle"]))
        self.enter(self.driver.device(mapping.device))
        sums: list[int] = []

        def run() -> None:
            with self.driver.current(self.context):
                for _ in range(times):
                    opened = sharing.open_allocation(self.driver, mapping)
                    data = np.empty(opened.size, np.uint8)
                    self.driver.call("cuMemcpyDtoH", data.ctypes.data, opened.address, len(data))
                    sums.append(zlib.crc32(data))
                    opened.close()

        running = [threading.Thread(target=run) for _ in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        return sums

    def close(self, number: int) -> None:
        self.opened[number].close()

    def write(self, number: int, seed: int) -> None:
        self._write(self.opened[number].address, self.opened[number].size, seed)

    # -- both

    def _write(self, address: int, size: int, seed: int) -> None:
        data = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        self.driver.call("cuMemcpyHtoD", address, data.ctypes.data, size)

    def sum(self, which: str | int, offset: int = 0, size: int = 0) -> int:
        """A checksum of memory."""
        if isinstance(which, str):
            address, length = self.memory[which]
        else:
            address, length = self.opened[which].address, self.opened[which].size
        data = np.empty(size or length, np.uint8)
        self.driver.call("cuMemcpyDtoH", data.ctypes.data, address + offset, len(data))
        return zlib.crc32(data)

    def poke(self, name: str, offset: int, value: int) -> None:
        data = np.array([value], np.uint8)
        self.driver.call("cuMemcpyHtoD", self.memory[name][0] + offset, data.ctypes.data, 1)

    def peek(self, number: int, offset: int) -> int:
        data = np.zeros(1, np.uint8)
        self.driver.call("cuMemcpyDtoH", data.ctypes.data, self.opened[number].address + offset, 1)
        return int(data[0])

    def free_bytes(self) -> int:
        """Of the GPU, as its driver says."""
        return int(self.driver.call("cuMemGetInfo")[0])

    def footprint(self) -> dict[str, int]:
        """What must not grow: memory in use on the GPU, and this process's descriptors and mappings."""
        free, total = self.driver.call("cuMemGetInfo")
        return {"gpu": int(total) - int(free), **descriptors_and_maps()}

    def files(self) -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names, not paths


def told(view: TensorView) -> dict[str, Any]:
    return {**view._asdict(), "handle": view.handle.hex()}


def main() -> None:
    peer = Peer()
    for line in sys.stdin:
        what, *args = json.loads(line)
        answer: tuple[str, Any]
        try:
            answer = "ok", getattr(peer, what)(*args)
        except Exception as exc:  # noqa: BLE001 - told to whoever asked
            answer = type(exc).__name__, str(exc)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
