"""Functions of the driver: memory, of this process and of others."""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings._memory import GRANULE, Range, buffer_address
from cuda.bindings._process import Refused
from cuda.bindings._state import State, as_int, call
from cuda.bindings._types import (
    CU_IPC_HANDLE_SIZE,
    CU_MEMHOSTREGISTER_PORTABLE,
    CUcontext,
    CUdeviceptr,
    CUipcMem_flags,
    CUipcMemHandle,
    CUmemAccess_flags,
    CUmemAllocationGranularity_flags,
    CUmemAllocationHandleType,
    CUmemAllocationProp,
    CUmemAllocationType,
    CUmemGenericAllocationHandle,
    CUmemLocation,
    CUmemLocationType,
    CUmemorytype,
    CUpointer_attribute,
    CUresult,
)

# -- memory


@call(2)
def cuMemGetInfo(s: State) -> tuple[int, int]:
    total = int(s.process.config["total_bytes"])
    return total - s.process.used_bytes(s.here()[1]), total


@call(1)
def cuMemAlloc(s: State, bytesize: int) -> CUdeviceptr:
    context, device = s.here()
    return CUdeviceptr(s.memory.allocate(device, bytesize, context).start)


def _goes(s: State, part: Range, what: str) -> None:
    s.streams.memory_goes(part.start, part.end, what)


@call()
def cuMemFree(s: State, dptr: Any) -> None:
    part = s.memory.starting(as_int(dptr), "alloc")
    _goes(s, part, "cuMemFree")
    s.memory.free(part)


@call(1)
def cuMemHostAlloc(s: State, bytesize: int, Flags: int) -> int:
    context, device = s.here()
    return s.memory.allocate_host(bytesize, context, device)


@call()
def cuMemFreeHost(s: State, p: Any) -> None:
    part = s.memory.starting(buffer_address(p), "hostalloc")
    _goes(s, part, "cuMemFreeHost")
    s.memory.free_host(part.start)


@call()
def cuMemHostRegister(s: State, p: Any, bytesize: int, Flags: int) -> None:
    context, device = s.here()
    if not Flags & CU_MEMHOSTREGISTER_PORTABLE:
        s.process.failure("cuMemHostRegister without PORTABLE: other contexts see pageable memory")
    s.memory.register(buffer_address(p), bytesize, context, device)


@call()
def cuMemHostUnregister(s: State, p: Any) -> None:
    part = s.memory.at(buffer_address(p))
    if part is not None and part.kind == "host":
        _goes(s, part, "cuMemHostUnregister")
    s.memory.unregister(buffer_address(p))


@call(1)
def cuMemHostGetDevicePointer(s: State, p: Any, Flags: int) -> CUdeviceptr:
    address = buffer_address(p)
    part = s.memory.at(address)
    if part is None or part.kind not in ("host", "hostalloc") or Flags:
        raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
    return CUdeviceptr(address)


@call(2)
def cuMemGetAddressRange(s: State, dptr: Any) -> tuple[CUdeviceptr, int]:
    part = s.memory.at(as_int(dptr))
    if part is None:
        raise Refused(CUresult.CUDA_ERROR_NOT_FOUND)
    return CUdeviceptr(part.start), part.size


@call(1, context=False)
def cuPointerGetAttribute(s: State, attribute: CUpointer_attribute, ptr: Any) -> Any:
    kinds = CUpointer_attribute
    known = {
        kinds.CU_POINTER_ATTRIBUTE_MAPPING_SIZE,  # up to bindings 13.0
        kinds.CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR,
    }
    if attribute in known:
        raise TypeError(f"Unsupported attribute: {attribute.name}")
    part = s.memory.at(as_int(ptr))
    if part is None:
        raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
    on_host = part.kind in ("host", "hostalloc")
    match attribute:
        case kinds.CU_POINTER_ATTRIBUTE_CONTEXT:
            if part.kind == "virtual":
                raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
            return CUcontext(part.context)
        case kinds.CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            return int(CUmemorytype.CU_MEMORYTYPE_HOST if on_host else CUmemorytype.CU_MEMORYTYPE_DEVICE)
        case kinds.CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
            return CUdeviceptr(as_int(ptr))
        case kinds.CU_POINTER_ATTRIBUTE_BUFFER_ID:
            return id(part)
        case kinds.CU_POINTER_ATTRIBUTE_IS_MANAGED:
            return False
        case kinds.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
            return s.devices.index(part.device)
        case kinds.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
            return part.kind == "alloc"
        case kinds.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
            return CUdeviceptr(s.memory.reservation(part)[0])
        case kinds.CU_POINTER_ATTRIBUTE_RANGE_SIZE:
            return s.memory.reservation(part)[1]
        case kinds.CU_POINTER_ATTRIBUTE_MAPPED:
            return True
        case kinds.CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
            return part.physical.handle_types if part.physical is not None else 0
    raise TypeError(f"Unsupported attribute: {attribute.name}")


# -- other processes


@call(1)
def cuIpcGetMemHandle(s: State, dptr: Any) -> CUipcMemHandle:
    handle = CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), s.memory.export(as_int(dptr)), CU_IPC_HANDLE_SIZE)
    return handle


@call(1)
def cuIpcOpenMemHandle(s: State, handle: CUipcMemHandle, Flags: int) -> CUdeviceptr:
    if not isinstance(handle, CUipcMemHandle):
        raise TypeError(f"Argument 'handle' has incorrect type (expected CUipcMemHandle, got {type(handle).__name__})")
    if Flags != CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS:
        raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
    context, device = s.here()
    return CUdeviceptr(s.memory.open(ctypes.string_at(handle.getPtr(), CU_IPC_HANDLE_SIZE), device, context).start)


@call()
def cuIpcCloseMemHandle(s: State, dptr: Any) -> None:
    part = s.memory.starting(as_int(dptr), "ipc")
    if part.context != s.context():
        raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
    part.uses -= 1
    if not part.uses:
        _goes(s, part, "cuIpcCloseMemHandle")
        s.memory.free(part)


# -- virtual memory


def _of_device(s: State, location: CUmemLocation) -> int:
    if location.type != CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE:
        raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
    return s.device(location.id)


@call(1, context=False)
def cuMemCreate(s: State, size: int, prop: CUmemAllocationProp | None, flags: int) -> CUmemGenericAllocationHandle:
    if prop is None or flags or prop.type != CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED:
        raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
    device = _of_device(s, prop.location)
    return CUmemGenericAllocationHandle(s.memory.create(device, size, int(prop.requestedHandleTypes)))


@call(context=False)
def cuMemRelease(s: State, handle: Any) -> None:
    s.memory.release(as_int(handle))


@call(1, context=False)
def cuMemGetAllocationGranularity(
    s: State, prop: CUmemAllocationProp | None, option: CUmemAllocationGranularity_flags
) -> int:
    if prop is None:
        raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
    _of_device(s, prop.location)
    return GRANULE


@call(1, context=False)
def cuMemGetAllocationPropertiesFromHandle(s: State, handle: Any) -> CUmemAllocationProp:
    physical = s.memory.of(as_int(handle))
    prop = CUmemAllocationProp()
    prop.type = CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.requestedHandleTypes = CUmemAllocationHandleType(physical.handle_types)
    prop.location.type = CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = s.devices.index(physical.device)
    return prop


@call(1, context=False)
def cuMemRetainAllocationHandle(s: State, addr: Any) -> CUmemGenericAllocationHandle:
    return CUmemGenericAllocationHandle(s.memory.retain(buffer_address(addr)))


@call(1, context=False)
def cuMemExportToShareableHandle(
    s: State, handle: Any, handleType: CUmemAllocationHandleType, flags: int
) -> int:  # fmt: skip
    if handleType != CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR or flags:
        raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
    return s.memory.to_fd(as_int(handle))


@call(1, context=False)
def cuMemImportFromShareableHandle(
    s: State, osHandle: Any, shHandleType: CUmemAllocationHandleType
) -> CUmemGenericAllocationHandle:
    if shHandleType != CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR:
        raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
    return CUmemGenericAllocationHandle(s.memory.from_fd(buffer_address(osHandle)))


@call(1, context=False)
def cuMemAddressReserve(s: State, size: int, alignment: int, addr: Any, flags: int) -> CUdeviceptr:
    if flags:
        raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
    return CUdeviceptr(s.memory.reserve(size))


@call(context=False)
def cuMemAddressFree(s: State, ptr: Any, size: int) -> None:
    s.memory.unreserve(as_int(ptr), size)


@call(context=False)
def cuMemMap(s: State, ptr: Any, size: int, offset: int, handle: Any, flags: int) -> None:
    if flags:
        raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
    s.memory.map(as_int(ptr), size, offset, as_int(handle))


@call(context=False)
def cuMemUnmap(s: State, ptr: Any, size: int) -> None:
    s.streams.memory_goes(as_int(ptr), as_int(ptr) + size, "cuMemUnmap")
    s.memory.unmap(as_int(ptr), size)


@call(context=False)
def cuMemSetAccess(s: State, ptr: Any, size: int, desc: Any, count: int) -> None:
    if len(desc) != count:
        raise RuntimeError(f"List is too small: {len(desc)} < {count}")
    for one in desc:
        device = _of_device(s, one.location)
        if one.flags == CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE:
            s.memory.allow(as_int(ptr), size, device)
