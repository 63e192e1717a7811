"""The functions of `cuda.bindings.driver` that are used, with its signatures and the tuples it answers with.

A failed call answers its result and Nones, as the bindings do. Everything is guarded by one lock.
"""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings import _state
from cuda.bindings._memory import buffer_address
from cuda.bindings._memory_calls import *  # noqa: F403 - what the real module offers in one place
from cuda.bindings._process import Refused, uuid_bytes
from cuda.bindings._state import State, as_int, call, count, end_context
from cuda.bindings._state import cuInit as cuInit
from cuda.bindings._state import leave as leave
from cuda.bindings._streams import Event, Stream, Work
from cuda.bindings._types import *  # noqa: F403
from cuda.bindings._types import (
    CUcontext,
    CUdevice,
    CUdevice_attribute,
    CUdriverProcAddressQueryResult,
    CUevent,
    CUevent_flags,
    CUfunction,
    CUfunction_attribute,
    CUmodule,
    CUresult,
    CUstream,
    CUstream_flags,
    CUuuid,
    MemcpyAttributes,
)

_MODULE_MAGIC = (b"\x7fELF", b".vers", b"//\n//")
_MAX_THREADS = 1024
_MAX_SHARED = 48 << 10
_BATCH_SINCE = 12080


# -- the driver and its devices


@call(1, context=False)
def cuDriverGetVersion(s: State) -> int:
    return int(s.process.config["version"])


@call(1, always=True)
def cuGetErrorName(error: CUresult) -> bytes:
    if not isinstance(error, CUresult):
        raise TypeError(f"Argument 'error' has incorrect type (expected CUresult, got {type(error).__name__})")
    return error.name.encode()


@call(1, always=True)
def cuGetErrorString(error: CUresult) -> bytes:
    if not isinstance(error, CUresult):
        raise TypeError(f"Argument 'error' has incorrect type (expected CUresult, got {type(error).__name__})")
    return error.name.removeprefix("CUDA_ERROR_").replace("_", " ").lower().encode()


@call(1, context=False)
def cuDeviceGetCount(s: State) -> int:
    return len(s.devices)


@call(1, context=False)
def cuDeviceGet(s: State, ordinal: int) -> CUdevice:
    s.device(ordinal)
    return CUdevice(ordinal)


@call(1, context=False)
def cuDeviceGetName(s: State, length: int, dev: Any) -> bytes:
    return f"Stand-in {s.device(dev)}".encode().ljust(length, b"\0")[:length]


@call(1, context=False)
def cuDeviceGetUuid(s: State, dev: Any) -> CUuuid:
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


@call(1, context=False)
def cuDeviceGetAttribute(s: State, attrib: CUdevice_attribute, dev: Any) -> int:
    s.device(dev)
    return int(s.process.config.get("attributes", {}).get(attrib.name, _ATTRIBUTES[attrib]))


@call(1, context=False)
def cuDeviceCanAccessPeer(s: State, dev: Any, peerDev: Any) -> int:
    return int(s.device(dev) != s.device(peerDev))


# -- contexts


@call(context=False)
def cuDevicePrimaryCtxSetFlags(s: State, dev: Any, flags: int) -> None:
    s.device(dev)
    if flags & ~0xFF:
        raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)


@call(2, context=False)
def cuDevicePrimaryCtxGetState(s: State, dev: Any) -> tuple[int, int]:
    return 0, int(s.device(dev) in s.primary)


@call(1, context=False)
def cuDevicePrimaryCtxRetain(s: State, dev: Any) -> CUcontext:
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


@call(context=False)
def cuDevicePrimaryCtxRelease(s: State, dev: Any) -> None:
    device = s.device(dev)
    if device not in s.primary:
        raise Refused(CUresult.CUDA_ERROR_INVALID_CONTEXT)
    context, uses = s.primary[device]
    if uses > 1:
        s.primary[device] = context, uses - 1
    else:
        end_context(s, context)


@call(context=False)
def cuCtxPushCurrent(s: State, ctx: Any) -> None:
    if as_int(ctx) not in s.contexts:
        raise Refused(CUresult.CUDA_ERROR_INVALID_CONTEXT)
    s.stack().append(as_int(ctx))


@call(1, context=False)
def cuCtxPopCurrent(s: State) -> CUcontext:
    if not s.stack():
        raise Refused(CUresult.CUDA_ERROR_INVALID_CONTEXT)
    return CUcontext(s.stack().pop())


@call(context=False)
def cuCtxSetCurrent(s: State, ctx: Any) -> None:
    stack = s.stack()
    del stack[-1:]
    if as_int(ctx):
        if as_int(ctx) not in s.contexts:
            raise Refused(CUresult.CUDA_ERROR_INVALID_CONTEXT)
        stack.append(as_int(ctx))


@call(1, context=False)
def cuCtxGetCurrent(s: State) -> CUcontext:
    return CUcontext(s.stack()[-1] if s.stack() else 0)


@call(1)
def cuCtxGetDevice(s: State) -> CUdevice:
    return CUdevice(s.devices.index(s.here()[1]))


@call()
def cuCtxSynchronize(s: State) -> None:
    context = s.context()
    s.streams.advance(context, lambda: not any(stream.context == context for stream in s.streams.busy()))


# -- streams and events


@call(1)
def cuStreamCreate(s: State, Flags: int) -> CUstream:
    number = s.new_handle()
    s.streams.all[number] = Stream(number, s.context(), not Flags & CUstream_flags.CU_STREAM_NON_BLOCKING)
    count(s)
    return CUstream(number)


@call(1)
def cuStreamCreateWithPriority(s: State, flags: int, priority: int) -> CUstream:
    number = s.new_handle()
    s.streams.all[number] = Stream(number, s.context(), not flags & CUstream_flags.CU_STREAM_NON_BLOCKING)
    count(s)
    return CUstream(number)


@call()
def cuStreamDestroy(s: State, hStream: Any) -> None:
    stream = s.stream(hStream)
    if stream.number < 0:
        raise Refused(CUresult.CUDA_ERROR_INVALID_HANDLE)
    del s.streams.all[stream.number]
    s.streams.leaving.append(stream)  # what is in it still runs
    count(s)


@call()
def cuStreamSynchronize(s: State, hStream: Any) -> None:
    s.streams.drain(s.stream(hStream))


@call()
def cuStreamQuery(s: State, hStream: Any) -> None:
    if s.stream(hStream).work:
        raise Refused(CUresult.CUDA_ERROR_NOT_READY)


@call()
def cuStreamWaitEvent(s: State, hStream: Any, hEvent: Any, Flags: int) -> None:
    event = _event(s, hEvent)
    s.streams.put(s.stream(hStream), Work("wait", event=event, version=event.recorded))


def _event(s: State, number: Any) -> Event:
    if as_int(number) not in s.events:
        raise Refused(CUresult.CUDA_ERROR_INVALID_HANDLE)
    return s.events[as_int(number)]


@call(1)
def cuEventCreate(s: State, Flags: int) -> CUevent:
    number = s.new_handle()
    s.events[number] = Event(s.context(), Flags)
    count(s)
    return CUevent(number)


@call()
def cuEventRecord(s: State, hEvent: Any, hStream: Any) -> None:
    event, stream = _event(s, hEvent), s.stream(hStream)
    event.recorded += 1
    event.stream = stream
    s.streams.put(stream, Work("mark", event=event, version=event.recorded))


@call()
def cuEventSynchronize(s: State, hEvent: Any) -> None:
    event = _event(s, hEvent)
    wanted = event.recorded
    s.streams.advance(event.context, lambda: event.done >= wanted)


@call()
def cuEventQuery(s: State, hEvent: Any) -> None:
    event = _event(s, hEvent)
    if event.done < event.recorded:
        raise Refused(CUresult.CUDA_ERROR_NOT_READY)


@call(1)
def cuEventElapsedTime(s: State, hStart: Any, hEnd: Any) -> float:
    start, end = _event(s, hStart), _event(s, hEnd)
    if not (start.recorded and end.recorded) or (start.flags | end.flags) & CUevent_flags.CU_EVENT_DISABLE_TIMING:
        raise Refused(CUresult.CUDA_ERROR_INVALID_HANDLE)
    if start.done < start.recorded or end.done < end.recorded:
        raise Refused(CUresult.CUDA_ERROR_NOT_READY)
    return max((end.at - start.at) * 1e3, 1e-3)


@call()
def cuEventDestroy(s: State, hEvent: Any) -> None:
    _event(s, hEvent)
    del s.events[as_int(hEvent)]
    count(s)


# -- copies


@call()
def cuMemcpyHtoDAsync(s: State, dstDevice: Any, srcHost: Any, ByteCount: int, hStream: Any) -> None:
    s.streams.copy(s.stream(hStream), as_int(dstDevice), buffer_address(srcHost), ByteCount)


@call()
def cuMemcpyDtoHAsync(s: State, dstHost: Any, srcDevice: Any, ByteCount: int, hStream: Any) -> None:
    s.streams.copy(s.stream(hStream), buffer_address(dstHost), as_int(srcDevice), ByteCount)


@call()
def cuMemcpyDtoDAsync(s: State, dstDevice: Any, srcDevice: Any, ByteCount: int, hStream: Any) -> None:
    s.streams.copy(s.stream(hStream), as_int(dstDevice), as_int(srcDevice), ByteCount)


@call()
def cuMemcpyAsync(s: State, dst: Any, src: Any, ByteCount: int, hStream: Any) -> None:
    s.streams.copy(s.stream(hStream), as_int(dst), as_int(src), ByteCount)


def _copy_now(s: State, dst: int, src: int, size: int) -> None:
    null = s.stream(0)
    s.streams.copy(null, dst, src, size)
    for stream in [stream for stream in s.streams.busy() if stream.context == null.context and stream.blocking]:
        s.streams.drain(stream)


@call()
def cuMemcpyHtoD(s: State, dstDevice: Any, srcHost: Any, ByteCount: int) -> None:
    _copy_now(s, as_int(dstDevice), buffer_address(srcHost), ByteCount)


@call()
def cuMemcpyDtoH(s: State, dstHost: Any, srcDevice: Any, ByteCount: int) -> None:
    _copy_now(s, buffer_address(dstHost), as_int(srcDevice), ByteCount)


@call()
def cuMemsetD8(s: State, dstDevice: Any, uc: int, N: int) -> None:
    cuMemsetD8Async.__wrapped__(s, dstDevice, uc, N, 0)
    s.streams.drain(s.stream(0))


@call()
def cuMemsetD8Async(s: State, dstDevice: Any, uc: int, N: int, hStream: Any) -> None:
    stream = s.stream(hStream)
    s.memory.host_address(as_int(dstDevice), N, stream.context)
    s.streams.put(stream, Work("set", as_int(dstDevice), uc, N))


_CUPTR = ctypes.POINTER(ctypes.c_uint64)
_BATCH = ctypes.CFUNCTYPE(
    ctypes.c_int, _CUPTR, _CUPTR, ctypes.POINTER(ctypes.c_size_t), ctypes.c_size_t, ctypes.POINTER(MemcpyAttributes),
    ctypes.POINTER(ctypes.c_size_t), ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t), ctypes.c_void_p,
)  # fmt: skip


def _batch(
    dsts: Any, srcs: Any, sizes: Any, count: int, attrs: Any, indices: Any, given: int, failed: Any, to: Any
) -> int:
    """cuMemcpyBatchAsync as CUDA 12.8 has it, called through its address."""
    with _state.lock:
        try:
            s = _state.current
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


@call(2, context=False)
def cuGetProcAddress(s: State, symbol: bytes, cudaVersion: int, flags: Any) -> tuple[int, Any]:
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


# -- modules


@call(1)
def cuModuleLoadData(s: State, image: Any) -> CUmodule:
    data = bytes(image) if isinstance(image, (bytes, bytearray, memoryview)) else None
    if data is None or not data.startswith(_MODULE_MAGIC):
        raise Refused(CUresult.CUDA_ERROR_INVALID_IMAGE)
    number = s.new_handle()
    s.modules[number] = s.context(), data
    count(s)
    return CUmodule(number)


@call()
def cuModuleUnload(s: State, hmod: Any) -> None:
    if s.modules.pop(as_int(hmod), None) is None:
        raise Refused(CUresult.CUDA_ERROR_INVALID_HANDLE)
    s.functions = {number: module for number, module in s.functions.items() if module != as_int(hmod)}
    count(s)


@call(1)
def cuModuleGetFunction(s: State, hmod: Any, name: bytes) -> CUfunction:
    if not isinstance(name, bytes):
        raise TypeError(f"expected bytes, {type(name).__name__} found")
    if as_int(hmod) not in s.modules:
        raise Refused(CUresult.CUDA_ERROR_INVALID_HANDLE)
    if name not in s.modules[as_int(hmod)][1]:
        raise Refused(CUresult.CUDA_ERROR_NOT_FOUND)
    number = s.new_handle()
    s.functions[number] = as_int(hmod)
    return CUfunction(number)


def _function(s: State, number: Any) -> int:
    if as_int(number) not in s.functions:
        raise Refused(CUresult.CUDA_ERROR_INVALID_HANDLE)
    return as_int(number)


@call(1)
def cuFuncGetAttribute(s: State, attrib: CUfunction_attribute, hfunc: Any) -> int:
    number = _function(s, hfunc)
    if attrib == CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        return _MAX_THREADS
    if attrib == CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        return s.shared.get(number, _MAX_SHARED)
    return 0


@call()
def cuFuncSetAttribute(s: State, hfunc: Any, attrib: CUfunction_attribute, value: int) -> None:
    number = _function(s, hfunc)
    if attrib == CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        s.shared[number] = value


@call()
def cuLaunchKernel(
    s: State, f: Any, gridDimX: int, gridDimY: int, gridDimZ: int, blockDimX: int, blockDimY: int, blockDimZ: int,
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
