"""Shares a worker's GPU memory with the server: the worker exports each allocation, the server maps it.

The worker calls `share` on the engine's thread, and `finish` on one that may block; the server `open_allocation` on a
copy thread. The first byte of a handle gives its kind:

    1, 64 bytes     memory from cudaMalloc: a CUDA IPC handle
    2, an offer     virtual memory (PyTorch's expandable segments, vLLM's cumem allocator): physical pieces, mapped
                    here one behind the other; each is passed as a file descriptor (descriptors.py)

Invariant: the server keeps no reference to a worker's memory other than those of an `Opened`, because a reference
would keep the memory allocated after the engine has freed it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvdepot.devices.cuda import descriptors
from kvdepot.devices.cuda.driver import Driver, load
from kvdepot.errors import DeviceError, LayoutError
from kvdepot.protocol.layout import Mapping, TensorView

if TYPE_CHECKING:
    import torch

_IPC, _PIECES = b"\1", b"\2"
_IPC_BYTES = 64

_EXPANDABLE = (
    "PyTorch's expandable segments: take expandable_segments:True out of PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF"
)
_CUMEM = "vLLM's cumem allocator: start it without --enable-sleep-mode and --enable-cumem-allocator"
_POOL = (
    "memory of a CUDA pool or managed memory: remove backend:cudaMallocAsync from PYTORCH_CUDA_ALLOC_CONF and "
    "PYTORCH_ALLOC_CONF"
)


# -- the worker's end


def share(tensor: torch.Tensor, name: str) -> TensorView:
    """Export the allocation that contains a tensor, and describe where its elements are.

    Tensors of one allocation get the same mapping and handle. The memory must not be remapped: vLLM's sleep and wake
    put other memory behind the same addresses, which must be shared and registered again. Any thread. Raises
    LayoutError for a tensor without memory, DeviceError, with what to set, for memory that cannot be shared.
    """
    storage = tensor.untyped_storage()
    start, size = storage.data_ptr(), storage.nbytes()
    if not start or size < 1:
        raise LayoutError(f"{name or 'tensor'} has no memory")
    driver = load()
    device = int(driver.call("cuDeviceGet", tensor.device.index))
    with _primary(driver, device):
        what = driver.cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        if driver.call("cuPointerGetAttribute", what, start):
            base, length = _allocation(driver, start)
            exported = driver.call("cuIpcGetMemHandle", base)
            handle = _IPC + ctypes.string_at(int(exported.getPtr()), _IPC_BYTES)  # newer bindings give only its address
        else:
            pieces = _pieces(driver, start, size, name)
            base, length = pieces[0][0], sum(piece for _, piece in pieces)
            _check_exportable(driver, pieces, name)
            export = partial(_export, driver, device, [address for address, _ in pieces])
            handle = _PIECES + descriptors.offer((device, *pieces), [piece for _, piece in pieces], export)
    if start + size > base + length:
        raise DeviceError(f"{name or 'tensor'}: {size} bytes at {start:#x} extend beyond their allocation")
    item = tensor.element_size()
    return TensorView(
        name=name,
        mapping=f"cuda-{base:x}-{length:x}",
        mapping_bytes=length,
        offset=tensor.data_ptr() - base,
        shape=tuple(tensor.shape),
        strides=tuple(stride * item for stride in tensor.stride()),
        item_bytes=item,
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=driver.uuid(device),
        handle=handle,
    )


def finish(uuid: str) -> None:
    """Wait until the GPU has finished all work that this process has submitted. Blocks without the GIL. Raises
    DeviceError."""
    driver = load()
    with _primary(driver, driver.device(uuid)):
        driver.call("cuCtxSynchronize")


@contextlib.contextmanager
def _primary(driver: Driver, device: int) -> Iterator[None]:
    """Make the engine's context current on this thread. Not `driver.retain`, which sets the context's flags."""
    context = driver.call("cuDevicePrimaryCtxRetain", device)
    try:
        with driver.current(context):
            yield
    finally:
        driver.call("cuDevicePrimaryCtxRelease", device)


def _allocation(driver: Driver, address: int) -> tuple[int, int]:
    """Base and bytes of the allocation, or of the mapped piece of virtual memory, that contains an address."""
    base, length = driver.call("cuMemGetAddressRange", address)
    return int(base), int(length)


def _pieces(driver: Driver, start: int, size: int, name: str) -> list[tuple[int, int]]:
    """Address and bytes of each piece of virtual memory under `[start, start + size)`, in order."""
    pieces: list[tuple[int, int]] = []
    address = start
    while address < start + size:
        base, length = _allocation(driver, address)
        if not base <= address < base + length or (pieces and base != address):
            raise DeviceError(
                f"{name or 'tensor'}: the memory behind {address:#x} does not match what the driver reports"
            )
        pieces.append((base, length))
        address = base + length
    return pieces


def _check_exportable(driver: Driver, pieces: list[tuple[int, int]], name: str) -> None:
    """Raise DeviceError, with what to set, unless the memory's allocator requested exportable handles."""
    address = pieces[0][0]
    try:
        memory = driver.call("cuMemRetainAllocationHandle", address)
    except DeviceError as exc:
        raise DeviceError(f"{name or 'tensor'} cannot be shared ({exc}). It is {_POOL}") from exc
    try:
        os.close(_descriptor(driver, memory))
    except DeviceError as exc:
        # An expandable segment reserves more addresses than the GPU has memory, the cumem allocator only what it maps.
        what = driver.cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE
        reserved = driver.call("cuPointerGetAttribute", what, address)
        whose = _EXPANDABLE if reserved > sum(piece for _, piece in pieces) else _CUMEM
        raise DeviceError(f"{name or 'tensor'} cannot be shared ({exc}). It is memory of {whose}") from exc
    finally:
        driver.call("cuMemRelease", memory)


def _descriptor(driver: Driver, memory: Any) -> int:
    kind = driver.cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return int(driver.call("cuMemExportToShareableHandle", memory, kind, 0))


def _export(driver: Driver, device: int, addresses: list[int], first: int, end: int) -> Iterator[int]:
    """Create descriptors of the memory at these addresses; keeps no reference, so the engine may free it."""
    with _primary(driver, device):
        for address in addresses[first:end]:
            memory = driver.call("cuMemRetainAllocationHandle", address)
            try:
                fd = _descriptor(driver, memory)
            finally:
                driver.call("cuMemRelease", memory)
            yield fd


# -- the server's end


@dataclass(slots=True)
class Opened:
    """An allocation of a worker, mapped in this process: `[address, address + size)` of its GPU."""

    address: int
    size: int
    _close: Callable[[], None]
    _is_open: bool = True

    def close(self) -> None:
        """Unmap it. The context must be current, and nothing may use it. May be called twice. Raises DeviceError."""
        if self._is_open:
            self._is_open = False
            self._close()


def open_allocation(driver: Driver, mapping: Mapping) -> Opened:
    """Map a worker's allocation. The context must be current. Blocks while the worker passes it on.

    Raises LayoutError for an invalid handle or one for less memory, DeviceError if the driver or the worker refuses;
    then it keeps nothing mapped.
    """
    kind, handle = mapping.handle[:1], mapping.handle[1:]
    if mapping.size > 0 and kind == _IPC and len(handle) == _IPC_BYTES:
        return _open_ipc(driver, mapping, handle)
    if mapping.size > 0 and kind == _PIECES:
        return _open_pieces(driver, mapping, handle)
    raise LayoutError(f"{mapping.name[:64]!r} of {mapping.size} bytes has no device memory handle")


@dataclass(slots=True)
class _Shared:
    """An open CUDA IPC handle: a process may open it once per context."""

    address: int
    users: int = 0


_opening = threading.Lock()
_shared: dict[tuple[int, bytes], _Shared] = {}  # by context and handle; under _opening


def _open_ipc(driver: Driver, mapping: Mapping, handle: bytes) -> Opened:
    key = (int(driver.call("cuCtxGetCurrent")), handle)
    with _opening:
        shared = _shared.get(key)
        if shared is None:
            theirs = driver.cu.CUipcMemHandle()
            ctypes.memmove(int(theirs.getPtr()), handle, _IPC_BYTES)
            flag = int(driver.cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
            shared = _shared[key] = _Shared(int(driver.call("cuIpcOpenMemHandle", theirs, flag)))
        shared.users += 1
    opened = Opened(shared.address, mapping.size, partial(_close_ipc, driver, key))
    try:
        base, length = _allocation(driver, shared.address)
        if base + length - shared.address < mapping.size:
            raise LayoutError(f"{mapping.name[:64]!r} has {length} bytes, not {mapping.size}")
    except (LayoutError, DeviceError):
        opened.close()
        raise
    return opened


def _close_ipc(driver: Driver, key: tuple[int, bytes]) -> None:
    with _opening:
        shared = _shared[key]
        shared.users -= 1
        if not shared.users:
            del _shared[key]
            driver.call("cuIpcCloseMemHandle", shared.address)


def _open_pieces(driver: Driver, mapping: Mapping, handle: bytes) -> Opened:
    cu = driver.cu
    kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    access = cu.CUmemAccessDesc()
    access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = driver.device(mapping.device)
    access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    with contextlib.ExitStack() as undo, contextlib.closing(descriptors.fetch(handle)) as pieces:
        undo.callback(descriptors.sweep)  # a worker that died leaves its socket behind
        start = int(driver.call("cuMemAddressReserve", mapping.size, 0, 0, 0))
        undo.callback(driver.call, "cuMemAddressFree", start, mapping.size)
        done = 0
        for fd, size in pieces:
            if done + size > mapping.size:
                raise LayoutError(f"{mapping.name[:64]!r} has more than its {mapping.size} bytes")
            memory = driver.call("cuMemImportFromShareableHandle", fd, kind)
            try:
                driver.call("cuMemMap", start + done, size, 0, memory, 0)
            finally:
                driver.call("cuMemRelease", memory)  # the mapping keeps the memory
            undo.callback(driver.call, "cuMemUnmap", start + done, size)
            done += size
        if done < mapping.size:
            raise LayoutError(f"{mapping.name[:64]!r} has {done} bytes, not {mapping.size}")
        driver.call("cuMemSetAccess", start, mapping.size, [access], 1)
        kept = undo.pop_all()
    return Opened(start, mapping.size, kept.close)
