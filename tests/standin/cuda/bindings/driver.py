"""The functions of `cuda.bindings.driver` that are used, with its signatures and the tuples it answers with.

A failed call answers its result and Nones, as the bindings do. Everything is guarded by one lock.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import os
import threading
from collections.abc import Callable
from typing import Any

from cuda.bindings._memory import GRANULE, Memory, Range, buffer_address
from cuda.bindings._process import Process, Refused, uuid_bytes
from cuda.bindings._streams import Event, Stream, Streams, Work
from cuda.bindings._types import (
    CU_IPC_HANDLE_SIZE,
    CU_MEMHOSTALLOC_DEVICEMAP,
    CU_MEMHOSTALLOC_PORTABLE,
    CU_MEMHOSTREGISTER_DEVICEMAP,
    CU_MEMHOSTREGISTER_PORTABLE,
    CUDA_VERSION,
    CUcontext,
    CUctx_flags,
    CUdevice,
    CUdevice_attribute,
    CUdeviceptr,
    CUdriverProcAddressQueryResult,
    CUevent,
    CUevent_flags,
    CUfunction,
    CUfunction_attribute,
    CUipcMem_flags,
    CUipcMemHandle,
    CUmemAccess_flags,
    CUmemAccessDesc,
    CUmemAllocationGranularity_flags,
    CUmemAllocationHandleType,
    CUmemAllocationProp,
    CUmemAllocationType,
    CUmemcpySrcAccessOrder,
    CUmemGenericAllocationHandle,
    CUmemLocation,
    CUmemLocationType,
    CUmemorytype,
    CUmodule,
    CUpointer_attribute,
    CUresult,
    CUstream,
    CUstream_flags,
    CUuuid,
    MemcpyAttributes,
)

__all__ = [
    "CUDA_VERSION",
    "CU_IPC_HANDLE_SIZE",
    "CU_MEMHOSTALLOC_DEVICEMAP",
    "CU_MEMHOSTALLOC_PORTABLE",
    "CU_MEMHOSTREGISTER_DEVICEMAP",
    "CU_MEMHOSTREGISTER_PORTABLE",
    "CUcontext",
    "CUctx_flags",
    "CUdevice",
    "CUdevice_attribute",
    "CUdeviceptr",
    "CUdriverProcAddressQueryResult",
    "CUevent",
    "CUevent_flags",
    "CUfunction",
    "CUfunction_attribute",
    "CUipcMemHandle",
    "CUipcMem_flags",
    "CUmemAccessDesc",
    "CUmemAccess_flags",
    "CUmemAllocationGranularity_flags",
    "CUmemAllocationHandleType",
    "CUmemAllocationProp",
    "CUmemAllocationType",
    "CUmemGenericAllocationHandle",
    "CUmemLocation",
    "CUmemLocationType",
    "CUmemcpySrcAccessOrder",
    "CUmemorytype",
    "CUmodule",
    "CUpointer_attribute",
    "CUresult",
    "CUstream",
    "CUstream_flags",
    "CUuuid",
]

_MODULE_MAGIC = (b"\x7fELF", b".vers", b"//\n//")
_MAX_THREADS = 1024
_MAX_SHARED = 48 << 10
_BATCH_SINCE = 12080


class _State:
    """What the driver knows in this process."""

    def __init__(self, lock: threading.RLock) -> None:
        self.process = Process()
        self.devices = self.process.visible()
        self.memory = Memory(self.process)
        self.streams = Streams(self.process, self.memory, lock)
        self.primary: dict[int, tuple[int, int]] = {}  # device -> context, how often it is retained
        self.contexts: dict[int, int] = {}  # context -> device
        self.events: dict[int, Event] = {}
        self.modules: dict[int, tuple[int, bytes]] = {}  # module -> context, image
        self.functions: dict[int, int] = {}  # function -> module
        self.shared: dict[int, int] = {}  # function -> dynamic shared memory it may have
        self.thread = threading.local()

    def stack(self) -> list[int]:
        if not hasattr(self.thread, "stack"):
            self.thread.stack = []
        found: list[int] = self.thread.stack
        return found

    def context(self) -> int:
        stack = self.stack()
        if not stack or stack[-1] not in self.contexts:
            raise Refused(CUresult.CUDA_ERROR_INVALID_CONTEXT)
        return stack[-1]

    def device(self, ordinal: Any) -> int:
        """The machine's GPU behind this process's number."""
        number = _int(ordinal)
        if not 0 <= number < len(self.devices):
            raise Refused(CUresult.CUDA_ERROR_INVALID_DEVICE)
        return self.devices[number]

    def here(self) -> tuple[int, int]:
        context = self.context()
        return context, self.contexts[context]

    def stream(self, number: Any) -> Stream:
        return self.streams.get(_int(number), self.context())

    def new_handle(self) -> int:
        return 0x7000_0000 + 16 * self.memory.next()


_lock = threading.RLock()
_state: _State | None = None


def _int(value: Any) -> int:
    return 0 if value is None else int(value)


def _leave() -> None:
    """Forget everything, as a process that ends does. The stand-in's own."""
    global _state
    with _lock:
        if _state is not None:
            for context in list(_state.contexts):
                _end_context(_state, context)
            _state.process.leave()
        _state = None


def _call(values: int = 0, context: bool = True, always: bool = False) -> Callable[[Any], Any]:
    """What every function of the driver has in common.

    values: how many it answers with beside the result; context: needs a current one; always: works before cuInit.
    """

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            with _lock:
                try:
                    if always:
                        answer = function(*args, **kwargs)
                    else:
                        # A process that forked has lost the driver.
                        if _state is None or _state.process.pid != os.getpid():
                            raise Refused(CUresult.CUDA_ERROR_NOT_INITIALIZED)
                        _state.process.meet_faults(name)
                        if context:
                            _state.streams.check(_state.context())
                        answer = function(_state, *args, **kwargs)
                except Refused as exc:
                    return (exc.result, *[None] * values)
            if values == 0:
                return (CUresult.CUDA_SUCCESS,)
            return (CUresult.CUDA_SUCCESS, *(answer if values > 1 else (answer,)))

        signature = inspect.signature(function)
        ours = list(signature.parameters.values())
        called.__signature__ = signature.replace(parameters=ours if always else ours[1:])  # type: ignore[attr-defined]
        return called

    return wrap


# -- the driver and its devices


@_call(always=True)
def cuInit(Flags: int) -> None:
    global _state
    if Flags:
        raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
    if _state is None:
        _state = _State(_lock)
    if _state.process.pid != os.getpid():
        raise Refused(CUresult.CUDA_ERROR_NOT_INITIALIZED)
    _state.process.meet_faults("cuInit")
    if not _state.devices:
        raise Refused(CUresult.CUDA_ERROR_NO_DEVICE)


@_call(1, context=False)
def cuDriverGetVersion(s: _State) -> int:
    return int(s.process.config["version"])


@_call(1, always=True)
def cuGetErrorName(error: CUresult) -> bytes:
    if not isinstance(error, CUresult):
        raise TypeError(f"Argument 'error' has incorrect type (expected CUresult, got {type(error).__name__})")
    return error.name.encode()


@_call(1, always=True)
def cuGetErrorString(error: CUresult) -> bytes:
    if not isinstance(error, CUresult):
        raise TypeError(f"Argument 'error' has incorrect type (expected CUresult, got {type(error).__name__})")
    return error.name.removeprefix("CUDA_ERROR_").replace("_", " ").lower().encode()


@_call(1, context=False)
def cuDeviceGetCount(s: _State) -> int:
    return len(s.devices)


@_call(1, context=False)
def cuDeviceGet(s: _State, ordinal: int) -> CUdevice:
    s.device(ordinal)
    return CUdevice(ordinal)


@_call(1, context=False)
def cuDeviceGetName(s: _State, length: int, dev: Any) -> bytes:
    return f"Stand-in {s.device(dev)}".encode().ljust(length, b"\0")[:length]


@_call(1, context=False)
def cuDeviceGetUuid(s: _State, dev: Any) -> CUuuid:
    return CUuuid(uuid_bytes(s.device(dev)))


_ATTRIBUTES = {
    CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: _MAX_THREADS,
    CUdevice_attribute.CU_DEVICE_ATTRIBUTE_WARP_SIZE: 32,
    CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: 132,
    CUdevice_attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED: 0,
    CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY: 1,
    CUdevice_attribute.CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: 3,
    CUdevice_attribute.CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: 1,
    CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: 9,
    CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: 0,
    CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: 1,
    CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: 227 << 10,
    CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED: 1,
    CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: 1,
    CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: 1,
}


@_call(1, context=False)
def cuDeviceGetAttribute(s: _State, attrib: CUdevice_attribute, dev: Any) -> int:
    s.device(dev)
    return int(s.process.config.get("attributes", {}).get(attrib.name, _ATTRIBUTES[attrib]))


@_call(1, context=False)
def cuDeviceCanAccessPeer(s: _State, dev: Any, peerDev: Any) -> int:
    return int(s.device(dev) != s.device(peerDev))


# -- contexts


@_call(context=False)
def cuDevicePrimaryCtxSetFlags(s: _State, dev: Any, flags: int) -> None:
    s.device(dev)
    if flags & ~0xFF:
        raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)


@_call(2, context=False)
def cuDevicePrimaryCtxGetState(s: _State, dev: Any) -> tuple[int, int]:
    return 0, int(s.device(dev) in s.primary)


@_call(1, context=False)
def cuDevicePrimaryCtxRetain(s: _State, dev: Any) -> CUcontext:
    device = s.device(dev)
    if device not in s.primary:
        size = int(s.process.config.get("context_bytes", 64 << 20))
        if s.process.used_bytes(device) + size > s.process.config["total_bytes"]:
            raise Refused(CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        context = s.new_handle()
        s.primary[device] = context, 0
        s.contexts[context] = device
        s.process.contexts[str(device)] = size
    context, uses = s.primary[device]
    s.primary[device] = context, uses + 1
    s.process.write()
    return CUcontext(context)


@_call(context=False)
def cuDevicePrimaryCtxRelease(s: _State, dev: Any) -> None:
    device = s.device(dev)
    if device not in s.primary:
        raise Refused(CUresult.CUDA_ERROR_INVALID_CONTEXT)
    context, uses = s.primary[device]
    if uses > 1:
        s.primary[device] = context, uses - 1
    else:
        _end_context(s, context)


def _end_context(s: _State, context: int) -> None:
    device = s.contexts.pop(context)
    s.streams.leave_context(context)
    s.memory.leave_context(context)
    s.events = {number: event for number, event in s.events.items() if event.context != context}
    s.modules = {number: module for number, module in s.modules.items() if module[0] != context}
    del s.primary[device], s.process.contexts[str(device)]
    _count(s)


def _count(s: _State) -> None:
    s.process.held["streams"] = sum(number > 0 for number in s.streams.all)
    s.process.held["events"] = len(s.events)
    s.process.held["modules"] = len(s.modules)
    s.process.write()


@_call(context=False)
def cuCtxPushCurrent(s: _State, ctx: Any) -> None:
    if _int(ctx) not in s.contexts:
        raise Refused(CUresult.CUDA_ERROR_INVALID_CONTEXT)
    s.stack().append(_int(ctx))


@_call(1, context=False)
def cuCtxPopCurrent(s: _State) -> CUcontext:
    if not s.stack():
        raise Refused(CUresult.CUDA_ERROR_INVALID_CONTEXT)
    return CUcontext(s.stack().pop())


@_call(context=False)
def cuCtxSetCurrent(s: _State, ctx: Any) -> None:
    stack = s.stack()
    del stack[-1:]
    if _int(ctx):
        if _int(ctx) not in s.contexts:
            raise Refused(CUresult.CUDA_ERROR_INVALID_CONTEXT)
        stack.append(_int(ctx))


@_call(1, context=False)
def cuCtxGetCurrent(s: _State) -> CUcontext:
    return CUcontext(s.stack()[-1] if s.stack() else 0)


@_call(1)
def cuCtxGetDevice(s: _State) -> CUdevice:
    return CUdevice(s.devices.index(s.here()[1]))


@_call()
def cuCtxSynchronize(s: _State) -> None:
    context = s.context()
    s.streams.advance(context, lambda: not any(stream.context == context for stream in s.streams.busy()))


# -- memory


@_call(2)
def cuMemGetInfo(s: _State) -> tuple[int, int]:
    total = int(s.process.config["total_bytes"])
    return total - s.process.used_bytes(s.here()[1]), total


@_call(1)
def cuMemAlloc(s: _State, bytesize: int) -> CUdeviceptr:
    context, device = s.here()
    return CUdeviceptr(s.memory.allocate(device, bytesize, context).start)


def _goes(s: _State, part: Range, what: str) -> None:
    s.streams.memory_goes(part.start, part.end, what)


@_call()
def cuMemFree(s: _State, dptr: Any) -> None:
    part = s.memory.starting(_int(dptr), "alloc")
    _goes(s, part, "cuMemFree")
    s.memory.free(part)


@_call(1)
def cuMemHostAlloc(s: _State, bytesize: int, Flags: int) -> int:
    context, device = s.here()
    return s.memory.allocate_host(bytesize, context, device)


@_call()
def cuMemFreeHost(s: _State, p: Any) -> None:
    part = s.memory.starting(buffer_address(p), "hostalloc")
    _goes(s, part, "cuMemFreeHost")
    s.memory.free_host(part.start)


@_call()
def cuMemHostRegister(s: _State, p: Any, bytesize: int, Flags: int) -> None:
    context, device = s.here()
    if not Flags & CU_MEMHOSTREGISTER_PORTABLE:
        s.process.failure("cuMemHostRegister without PORTABLE: other contexts see pageable memory")
    s.memory.register(buffer_address(p), bytesize, context, device)


@_call()
def cuMemHostUnregister(s: _State, p: Any) -> None:
    part = s.memory.at(buffer_address(p))
    if part is not None and part.kind == "host":
        _goes(s, part, "cuMemHostUnregister")
    s.memory.unregister(buffer_address(p))


@_call(1)
def cuMemHostGetDevicePointer(s: _State, p: Any, Flags: int) -> CUdeviceptr:
    address = buffer_address(p)
    part = s.memory.at(address)
    if part is None or part.kind not in ("host", "hostalloc") or Flags:
        raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
    return CUdeviceptr(address)


@_call(2)
def cuMemGetAddressRange(s: _State, dptr: Any) -> tuple[CUdeviceptr, int]:
    part = s.memory.at(_int(dptr))
    if part is None:
        raise Refused(CUresult.CUDA_ERROR_NOT_FOUND)
    return CUdeviceptr(part.start), part.size


@_call(1, context=False)
def cuPointerGetAttribute(s: _State, attribute: CUpointer_attribute, ptr: Any) -> Any:
    kinds = CUpointer_attribute
    known = {
        kinds.CU_POINTER_ATTRIBUTE_MAPPING_SIZE,  # up to bindings 13.0
        kinds.CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR,
    }
    if attribute in known:
        raise TypeError(f"Unsupported attribute: {attribute.name}")
    part = s.memory.at(_int(ptr))
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
            return CUdeviceptr(_int(ptr))
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


# -- streams and events


@_call(1)
def cuStreamCreate(s: _State, Flags: int) -> CUstream:
    number = s.new_handle()
    s.streams.all[number] = Stream(number, s.context(), not Flags & CUstream_flags.CU_STREAM_NON_BLOCKING)
    _count(s)
    return CUstream(number)


@_call(1)
def cuStreamCreateWithPriority(s: _State, flags: int, priority: int) -> CUstream:
    number = s.new_handle()
    s.streams.all[number] = Stream(number, s.context(), not flags & CUstream_flags.CU_STREAM_NON_BLOCKING)
    _count(s)
    return CUstream(number)


@_call()
def cuStreamDestroy(s: _State, hStream: Any) -> None:
    stream = s.stream(hStream)
    if stream.number < 0:
        raise Refused(CUresult.CUDA_ERROR_INVALID_HANDLE)
    del s.streams.all[stream.number]
    s.streams.leaving.append(stream)  # what is in it still runs
    _count(s)


@_call()
def cuStreamSynchronize(s: _State, hStream: Any) -> None:
    s.streams.drain(s.stream(hStream))


@_call()
def cuStreamQuery(s: _State, hStream: Any) -> None:
    if s.stream(hStream).work:
        raise Refused(CUresult.CUDA_ERROR_NOT_READY)


@_call()
def cuStreamWaitEvent(s: _State, hStream: Any, hEvent: Any, Flags: int) -> None:
    event = _event(s, hEvent)
    s.streams.put(s.stream(hStream), Work("wait", event=event, version=event.recorded))


def _event(s: _State, number: Any) -> Event:
    if _int(number) not in s.events:
        raise Refused(CUresult.CUDA_ERROR_INVALID_HANDLE)
    return s.events[_int(number)]


@_call(1)
def cuEventCreate(s: _State, Flags: int) -> CUevent:
    number = s.new_handle()
    s.events[number] = Event(s.context(), Flags)
    _count(s)
    return CUevent(number)


@_call()
def cuEventRecord(s: _State, hEvent: Any, hStream: Any) -> None:
    event, stream = _event(s, hEvent), s.stream(hStream)
    event.recorded += 1
    event.stream = stream
    s.streams.put(stream, Work("mark", event=event, version=event.recorded))


@_call()
def cuEventSynchronize(s: _State, hEvent: Any) -> None:
    event = _event(s, hEvent)
    wanted = event.recorded
    s.streams.advance(event.context, lambda: event.done >= wanted)


@_call()
def cuEventQuery(s: _State, hEvent: Any) -> None:
    event = _event(s, hEvent)
    if event.done < event.recorded:
        raise Refused(CUresult.CUDA_ERROR_NOT_READY)


@_call(1)
def cuEventElapsedTime(s: _State, hStart: Any, hEnd: Any) -> float:
    start, end = _event(s, hStart), _event(s, hEnd)
    if not (start.recorded and end.recorded) or (start.flags | end.flags) & CUevent_flags.CU_EVENT_DISABLE_TIMING:
        raise Refused(CUresult.CUDA_ERROR_INVALID_HANDLE)
    if start.done < start.recorded or end.done < end.recorded:
        raise Refused(CUresult.CUDA_ERROR_NOT_READY)
    return max((end.at - start.at) * 1e3, 1e-3)


@_call()
def cuEventDestroy(s: _State, hEvent: Any) -> None:
    _event(s, hEvent)
    del s.events[_int(hEvent)]
    _count(s)


# -- copies


@_call()
def cuMemcpyHtoDAsync(s: _State, dstDevice: Any, srcHost: Any, ByteCount: int, hStream: Any) -> None:
    s.streams.copy(s.stream(hStream), _int(dstDevice), buffer_address(srcHost), ByteCount)


@_call()
def cuMemcpyDtoHAsync(s: _State, dstHost: Any, srcDevice: Any, ByteCount: int, hStream: Any) -> None:
    s.streams.copy(s.stream(hStream), buffer_address(dstHost), _int(srcDevice), ByteCount)


@_call()
def cuMemcpyDtoDAsync(s: _State, dstDevice: Any, srcDevice: Any, ByteCount: int, hStream: Any) -> None:
    s.streams.copy(s.stream(hStream), _int(dstDevice), _int(srcDevice), ByteCount)


@_call()
def cuMemcpyAsync(s: _State, dst: Any, src: Any, ByteCount: int, hStream: Any) -> None:
    s.streams.copy(s.stream(hStream), _int(dst), _int(src), ByteCount)


def _copy_now(s: _State, dst: int, src: int, size: int) -> None:
    null = s.stream(0)
    s.streams.copy(null, dst, src, size)
    for stream in [stream for stream in s.streams.busy() if stream.context == null.context and stream.blocking]:
        s.streams.drain(stream)


@_call()
def cuMemcpyHtoD(s: _State, dstDevice: Any, srcHost: Any, ByteCount: int) -> None:
    _copy_now(s, _int(dstDevice), buffer_address(srcHost), ByteCount)


@_call()
def cuMemcpyDtoH(s: _State, dstHost: Any, srcDevice: Any, ByteCount: int) -> None:
    _copy_now(s, buffer_address(dstHost), _int(srcDevice), ByteCount)


@_call()
def cuMemsetD8(s: _State, dstDevice: Any, uc: int, N: int) -> None:
    cuMemsetD8Async.__wrapped__(s, dstDevice, uc, N, 0)
    s.streams.drain(s.stream(0))


@_call()
def cuMemsetD8Async(s: _State, dstDevice: Any, uc: int, N: int, hStream: Any) -> None:
    stream = s.stream(hStream)
    s.memory.host_address(_int(dstDevice), N, stream.context)
    s.streams.put(stream, Work("set", _int(dstDevice), uc, N))


_CUPTR = ctypes.POINTER(ctypes.c_uint64)
_BATCH = ctypes.CFUNCTYPE(
    ctypes.c_int, _CUPTR, _CUPTR, ctypes.POINTER(ctypes.c_size_t), ctypes.c_size_t, ctypes.POINTER(MemcpyAttributes),
    ctypes.POINTER(ctypes.c_size_t), ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t), ctypes.c_void_p,
)  # fmt: skip


def _batch(
    dsts: Any, srcs: Any, sizes: Any, count: int, attrs: Any, indices: Any, given: int, failed: Any, to: Any
) -> int:
    """cuMemcpyBatchAsync as CUDA 12.8 has it, called through its address."""
    with _lock:
        try:
            s = _state
            if s is None:
                return int(CUresult.CUDA_ERROR_NOT_INITIALIZED)
            s.process.meet_faults("cuMemcpyBatchAsync")
            s.streams.check(s.context())
            # Not the default stream; every copy has attributes, from the first on.
            if not to or to in (1, 2) or not count or not 1 <= given <= count or indices[0] != 0:
                raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
            if any(not 1 <= attrs[i].order <= 3 for i in range(given)):
                raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
            copies = list(zip(dsts[:count], srcs[:count], sizes[:count], strict=True))
            stream = s.stream(to)
            s.streams.batch(stream, copies, attrs[0].order)
        except Refused as exc:
            if failed:
                failed[0] = ctypes.c_size_t(-1).value
            return int(exc.result)
    return 0


_batch_at = _BATCH(_batch)


@_call(2, context=False)
def cuGetProcAddress(s: _State, symbol: bytes, cudaVersion: int, flags: Any) -> tuple[int, Any]:
    answers = CUdriverProcAddressQueryResult
    if not isinstance(symbol, bytes):
        raise TypeError(f"expected bytes, {type(symbol).__name__} found")
    if symbol != b"cuMemcpyBatchAsync" or s.process.config["version"] < _BATCH_SINCE:
        return 0, answers.CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND
    if cudaVersion < _BATCH_SINCE:
        return 0, answers.CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
    if cudaVersion >= 13000:
        s.process.failure("cuMemcpyBatchAsync of CUDA 13 has other arguments than the stand-in's")
    return ctypes.cast(_batch_at, ctypes.c_void_p).value or 0, answers.CU_GET_PROC_ADDRESS_SUCCESS


# -- other processes


@_call(1)
def cuIpcGetMemHandle(s: _State, dptr: Any) -> CUipcMemHandle:
    handle = CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), s.memory.export(_int(dptr)), CU_IPC_HANDLE_SIZE)
    return handle


@_call(1)
def cuIpcOpenMemHandle(s: _State, handle: CUipcMemHandle, Flags: int) -> CUdeviceptr:
    if not isinstance(handle, CUipcMemHandle):
        raise TypeError(f"Argument 'handle' has incorrect type (expected CUipcMemHandle, got {type(handle).__name__})")
    if Flags != CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS:
        raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
    context, device = s.here()
    return CUdeviceptr(s.memory.open(ctypes.string_at(handle.getPtr(), CU_IPC_HANDLE_SIZE), device, context).start)


@_call()
def cuIpcCloseMemHandle(s: _State, dptr: Any) -> None:
    part = s.memory.starting(_int(dptr), "ipc")
    if part.context != s.context():
        raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
    part.uses -= 1
    if not part.uses:
        _goes(s, part, "cuIpcCloseMemHandle")
        s.memory.free(part)


# -- virtual memory


def _of_device(s: _State, location: CUmemLocation) -> int:
    if location.type != CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE:
        raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
    return s.device(location.id)


@_call(1, context=False)
def cuMemCreate(s: _State, size: int, prop: CUmemAllocationProp | None, flags: int) -> CUmemGenericAllocationHandle:
    if prop is None or flags or prop.type != CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED:
        raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
    device = _of_device(s, prop.location)
    return CUmemGenericAllocationHandle(s.memory.create(device, size, int(prop.requestedHandleTypes)))


@_call(context=False)
def cuMemRelease(s: _State, handle: Any) -> None:
    s.memory.release(_int(handle))


@_call(1, context=False)
def cuMemGetAllocationGranularity(
    s: _State, prop: CUmemAllocationProp | None, option: CUmemAllocationGranularity_flags
) -> int:
    if prop is None:
        raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
    _of_device(s, prop.location)
    return GRANULE


@_call(1, context=False)
def cuMemGetAllocationPropertiesFromHandle(s: _State, handle: Any) -> CUmemAllocationProp:
    physical = s.memory.of(_int(handle))
    prop = CUmemAllocationProp()
    prop.type = CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.requestedHandleTypes = CUmemAllocationHandleType(physical.handle_types)
    prop.location.type = CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = s.devices.index(physical.device)
    return prop


@_call(1, context=False)
def cuMemRetainAllocationHandle(s: _State, addr: Any) -> CUmemGenericAllocationHandle:
    return CUmemGenericAllocationHandle(s.memory.retain(buffer_address(addr)))


@_call(1, context=False)
def cuMemExportToShareableHandle(
    s: _State, handle: Any, handleType: CUmemAllocationHandleType, flags: int
) -> int:  # fmt: skip
    if handleType != CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR or flags:
        raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
    return s.memory.to_fd(_int(handle))


@_call(1, context=False)
def cuMemImportFromShareableHandle(
    s: _State, osHandle: Any, shHandleType: CUmemAllocationHandleType
) -> CUmemGenericAllocationHandle:
    if shHandleType != CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR:
        raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
    return CUmemGenericAllocationHandle(s.memory.from_fd(buffer_address(osHandle)))


@_call(1, context=False)
def cuMemAddressReserve(s: _State, size: int, alignment: int, addr: Any, flags: int) -> CUdeviceptr:
    if flags:
        raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
    return CUdeviceptr(s.memory.reserve(size))


@_call(context=False)
def cuMemAddressFree(s: _State, ptr: Any, size: int) -> None:
    s.memory.unreserve(_int(ptr), size)


@_call(context=False)
def cuMemMap(s: _State, ptr: Any, size: int, offset: int, handle: Any, flags: int) -> None:
    if flags:
        raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
    s.memory.map(_int(ptr), size, offset, _int(handle))


@_call(context=False)
def cuMemUnmap(s: _State, ptr: Any, size: int) -> None:
    s.streams.memory_goes(_int(ptr), _int(ptr) + size, "cuMemUnmap")
    s.memory.unmap(_int(ptr), size)


@_call(context=False)
def cuMemSetAccess(s: _State, ptr: Any, size: int, desc: Any, count: int) -> None:
    if len(desc) != count:
        raise RuntimeError(f"List is too small: {len(desc)} < {count}")
    for one in desc:
        device = _of_device(s, one.location)
        if one.flags == CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE:
            s.memory.allow(_int(ptr), size, device)


# -- modules


@_call(1)
def cuModuleLoadData(s: _State, image: Any) -> CUmodule:
    data = bytes(image) if isinstance(image, (bytes, bytearray, memoryview)) else None
    if data is None or not data.startswith(_MODULE_MAGIC):
        raise Refused(CUresult.CUDA_ERROR_INVALID_IMAGE)
    number = s.new_handle()
    s.modules[number] = s.context(), data
    _count(s)
    return CUmodule(number)


@_call()
def cuModuleUnload(s: _State, hmod: Any) -> None:
    if s.modules.pop(_int(hmod), None) is None:
        raise Refused(CUresult.CUDA_ERROR_INVALID_HANDLE)
    s.functions = {number: module for number, module in s.functions.items() if module != _int(hmod)}
    _count(s)


@_call(1)
def cuModuleGetFunction(s: _State, hmod: Any, name: bytes) -> CUfunction:
    if not isinstance(name, bytes):
        raise TypeError(f"expected bytes, {type(name).__name__} found")
    if _int(hmod) not in s.modules:
        raise Refused(CUresult.CUDA_ERROR_INVALID_HANDLE)
    if name not in s.modules[_int(hmod)][1]:
        raise Refused(CUresult.CUDA_ERROR_NOT_FOUND)
    number = s.new_handle()
    s.functions[number] = _int(hmod)
    return CUfunction(number)


def _function(s: _State, number: Any) -> int:
    if _int(number) not in s.functions:
        raise Refused(CUresult.CUDA_ERROR_INVALID_HANDLE)
    return _int(number)


@_call(1)
def cuFuncGetAttribute(s: _State, attrib: CUfunction_attribute, hfunc: Any) -> int:
    number = _function(s, hfunc)
    if attrib == CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        return _MAX_THREADS
    if attrib == CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        return s.shared.get(number, _MAX_SHARED)
    return 0


@_call()
def cuFuncSetAttribute(s: _State, hfunc: Any, attrib: CUfunction_attribute, value: int) -> None:
    number = _function(s, hfunc)
    if attrib == CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        s.shared[number] = value


@_call()
def cuLaunchKernel(
    s: _State, f: Any, gridDimX: int, gridDimY: int, gridDimZ: int, blockDimX: int, blockDimY: int, blockDimZ: int,
    sharedMemBytes: int, hStream: Any, kernelParams: Any, extra: Any,
) -> None:  # fmt: skip
    number, stream = _function(s, f), s.stream(hStream)
    threads = blockDimX * blockDimY * blockDimZ
    if min(gridDimX, gridDimY, gridDimZ, threads) < 1 or threads > _MAX_THREADS:
        raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
    if sharedMemBytes > s.shared.get(number, _MAX_SHARED):
        raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
    values, kinds = kernelParams
    if len(values) != len(kinds) or len(values) < 2:
        raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
    table, count = int(values[0]), int(values[1])
    s.process.counts["kernel_launches"] += 1
    if count:
        s.streams.put(stream, Work("kernel", 0, table, 24 * count))
