"""The stand-in punishes what a real driver punishes, and waits for nothing that nobody waited for."""

from __future__ import annotations

import ctypes
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import eventually
from tests.standin.machine import Machine

SIZE = 1 << 16


@pytest.fixture
def machine() -> Iterator[Machine]:
    with closing(Machine()) as made, made.here():
        yield made


class Cuda:
    """Calls of the stand-in that must succeed; `refused` for those that must not."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.driver: Any = driver
        self.call("cuInit", 0)
        self.context = self.call("cuDevicePrimaryCtxRetain", 0)
        self.call("cuCtxPushCurrent", self.context)

    def call(self, name: str, *args: Any) -> Any:
        result, *values = getattr(self.driver, name)(*args)
        assert result == 0, f"{name}: {result!r}"
        return values[0] if len(values) == 1 else values

    def refused(self, name: str, *args: Any) -> str:
        result, *values = getattr(self.driver, name)(*args)
        assert result != 0 and values == [None] * len(values)
        found: str = self.driver.cuGetErrorName(result)[1].decode()
        return found

    def host(self, size: int = SIZE, registered: bool = True) -> np.ndarray[Any, np.dtype[np.uint8]]:
        memory = np.zeros(size, np.uint8)
        if registered:
            self.call("cuMemHostRegister", memory.ctypes.data, size, 1)
        return memory

    def device(self, size: int = SIZE) -> int:
        return int(self.call("cuMemAlloc", size))

    def stream(self) -> int:
        return int(self.call("cuStreamCreate", 1))

    def read(self, address: int, size: int) -> bytes:
        out = np.zeros(size, np.uint8)
        self.call("cuMemcpyDtoH", out.ctypes.data, address, size)
        return out.tobytes()


@pytest.fixture
def cuda(machine: Machine) -> Cuda:
    return Cuda()


def test_a_process_has_its_lock_before_others_can_see_it(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another that sweeps at that moment would take it for dead, and remove what it says that it holds."""
    seen: list[list[Path]] = []
    flock = fcntl.flock

    def watched(fd: int, how: int) -> None:
        if how == fcntl.LOCK_EX:
            seen.append(list(machine.folder.glob("*.lock")))
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", watched)
    Cuda()
    assert seen == [[]]
    assert len(list(machine.folder.glob("*.lock"))) == 1
    assert "held" in machine.held_by(os.getpid())


def test_a_copy_has_not_happened_before_somebody_waits_for_it(cuda: Cuda) -> None:
    host, device, stream = cuda.host(), cuda.device(), cuda.stream()
    host[:] = 1
    cuda.call("cuMemcpyHtoDAsync", device, host.ctypes.data, SIZE, stream)
    host[:] = 2  # too early: what is copied is this
    cuda.call("cuStreamSynchronize", stream)
    assert cuda.read(device, SIZE) == bytes([2]) * SIZE


def test_a_stream_keeps_its_order_and_streams_do_not_keep_each_others(cuda: Cuda) -> None:
    device, streams = cuda.device(), [cuda.stream() for _ in range(2)]
    seen = set()
    for _ in range(20):
        for value in (1, 2):
            for stream in streams:
                cuda.call("cuMemsetD8Async", device, 16 * streams.index(stream) + value, 16, stream)
        for stream in streams:
            cuda.call("cuStreamSynchronize", stream)
        seen.add(cuda.read(device, 1)[0])
    assert seen == {2, 18}


def test_a_device_address_is_none_of_the_processors(cuda: Cuda) -> None:
    device = cuda.device()
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).signal(11, 0)  # not faulthandler's: this one is meant
        ctypes.string_at(device, 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -11


def test_no_context_no_device_and_no_init_are_refused(machine: Machine) -> None:
    from cuda.bindings import driver

    assert driver.cuDeviceGetCount()[0].name == "CUDA_ERROR_NOT_INITIALIZED"
    cuda = Cuda()
    assert cuda.refused("cuDeviceGet", 2) == "CUDA_ERROR_INVALID_DEVICE"
    cuda.call("cuCtxPopCurrent")
    assert cuda.refused("cuMemAlloc", 1) == "CUDA_ERROR_INVALID_CONTEXT"
    assert cuda.refused("cuStreamCreate", 0) == "CUDA_ERROR_INVALID_CONTEXT"
    child = os.fork()
    if child == 0:
        os._exit(driver.cuDeviceGetCount()[0])
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3, "a process that forked has lost the driver"


def test_host_memory_across_two_registrations_is_refused(cuda: Cuda) -> None:
    memory = cuda.host(2 * SIZE, registered=False)
    cuda.call("cuMemHostRegister", memory.ctypes.data, SIZE, 1)
    device, stream = cuda.device(), cuda.stream()
    across = memory.ctypes.data + SIZE - 16
    assert cuda.refused("cuMemcpyHtoDAsync", device, across, 32, stream) == "CUDA_ERROR_INVALID_VALUE"
    cuda.call("cuMemHostRegister", memory.ctypes.data + SIZE, SIZE, 1)
    assert cuda.refused("cuMemcpyHtoDAsync", device, across, 32, stream) == "CUDA_ERROR_INVALID_VALUE"
    again = cuda.refused("cuMemHostRegister", across, 64, 1)
    assert again == "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"
    cuda.call("cuMemHostUnregister", memory.ctypes.data)
    gone = cuda.refused("cuMemHostUnregister", memory.ctypes.data)
    assert gone == "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"


def test_memory_that_goes_with_work_on_it_is_a_failure_on_record(cuda: Cuda, machine: Machine) -> None:
    host, device, stream = cuda.host(), cuda.device(), cuda.stream()
    cuda.call("cuMemcpyHtoDAsync", device, host.ctypes.data, SIZE, stream)
    assert machine.failures() == []
    cuda.call("cuMemFree", device)
    assert "cuMemFree" in machine.failures()[0] and "queued" in machine.failures()[0]
    assert cuda.refused("cuStreamSynchronize", stream) == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert cuda.refused("cuMemAlloc", 1) == "CUDA_ERROR_ILLEGAL_ADDRESS", "a context does not recover"


class Kernel:
    """Something that loads like a module and is launched like our kernel."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        module = cuda.call("cuModuleLoadData", b"\x7fELF copy")
        assert cuda.refused("cuModuleGetFunction", module, b"move") == "CUDA_ERROR_NOT_FOUND"
        self.function = cuda.call("cuModuleGetFunction", module, b"copy")

    def launch(self, stream: int, *rows: tuple[int, int, int]) -> None:
        table = self.cuda.device(24 * len(rows))
        self.cuda.call("cuMemcpyHtoD", table, np.array(rows, np.int64), 24 * len(rows))
        kinds = (ctypes.c_void_p, ctypes.c_int64)
        self.cuda.call("cuLaunchKernel", self.function, 2, 1, 1, 128, 1, 1, 0, stream, ((table, len(rows)), kinds), 0)


def test_a_kernel_copies_the_rows_of_its_table(cuda: Cuda) -> None:
    host, device, stream = cuda.host(), cuda.device(), cuda.stream()
    host[:] = np.arange(SIZE) % 251
    Kernel(cuda).launch(stream, (device, host.ctypes.data + 32, 48), (device + 64, host.ctypes.data, 16))
    cuda.call("cuStreamSynchronize", stream)
    assert cuda.read(device, 48) == host[32:80].tobytes() and cuda.read(device + 64, 16) == host[:16].tobytes()


@pytest.mark.parametrize(
    ("shift", "size", "registered", "result"),
    [(8, 16, True, "MISALIGNED_ADDRESS"), (0, 8, True, "MISALIGNED_ADDRESS"), (0, 16, False, "ILLEGAL_ADDRESS"),
     (SIZE - 16, 32, True, "ILLEGAL_ADDRESS")],
)  # fmt: skip
def test_a_kernel_that_touches_what_it_may_not_breaks_its_context(
    cuda: Cuda, machine: Machine, shift: int, size: int, registered: bool, result: str
) -> None:
    host, device, stream = cuda.host(registered=registered), cuda.device(), cuda.stream()
    Kernel(cuda).launch(stream, (device, host.ctypes.data + shift, size))
    assert cuda.refused("cuStreamSynchronize", stream) == f"CUDA_ERROR_{result}"
    assert len(machine.failures()) == 1


def _batch(cuda: Cuda, stream: int, order: int, *copies: tuple[int, int, int]) -> int:
    address, _ = cuda.call("cuGetProcAddress", b"cuMemcpyBatchAsync", 12080, 0)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    function = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
    dst, src, sizes = (np.array(column, np.uint64) for column in zip(*copies, strict=True))
    attributes, first, failed = np.array([order, 0, 0, 0, 0, 0], np.uint32), size(0), size(0)
    code: int = function(address)(
        dst.ctypes.data, src.ctypes.data, sizes.ctypes.data, len(copies), attributes.ctypes.data,
        ctypes.byref(first), 1, ctypes.byref(failed), stream,
    )  # fmt: skip
    return code


def test_a_batch_copies_and_refuses_the_default_stream(cuda: Cuda, machine: Machine) -> None:
    host, device, stream = cuda.host(), cuda.device(), cuda.stream()
    host[:] = np.arange(SIZE) % 251
    copies = [(device + 16 * i, host.ctypes.data + 16 * (9 - i), 16) for i in range(10)]
    assert _batch(cuda, 0, 1, *copies) == 1, "CUDA_ERROR_INVALID_VALUE"
    assert _batch(cuda, stream, 0, *copies) == 1, "an order is wanted"
    assert _batch(cuda, stream, 1, *copies) == 0
    cuda.call("cuStreamSynchronize", stream)
    assert cuda.read(device, 160) == b"".join(host[16 * (9 - i) :][:16].tobytes() for i in range(10))
    assert machine.failures() == []


def test_a_batch_of_any_order_reads_its_source_too_early_or_too_late(cuda: Cuda) -> None:
    host, device, stream = cuda.host(), cuda.device(), cuda.stream()
    assert _batch(cuda, stream, 3, *((device + 16 * i, host.ctypes.data + 16 * i, 16) for i in range(64))) == 0
    host[:] = 1
    cuda.call("cuStreamSynchronize", stream)
    assert set(cuda.read(device, 1024)) == {0, 1}


def test_drivers_before_12_8_have_no_batch(machine: Machine) -> None:
    old = Machine(version=12040)
    with old.here():
        address, status = Cuda().call("cuGetProcAddress", b"cuMemcpyBatchAsync", 12080, 0)
        assert address == 0 and status == 1
    old.close()


def test_failures_are_made_to_order_and_heal(cuda: Cuda, machine: Machine) -> None:
    machine.fail("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY", nth=2)
    cuda.device()
    assert cuda.refused("cuMemAlloc", 1) == "CUDA_ERROR_OUT_OF_MEMORY"
    cuda.device()
    machine.fail("cuMemAlloc", "CUDA_ERROR_UNKNOWN", pid=os.getpid() + 1)
    cuda.device()
    machine.heal()
    cuda.device()
    machine.fail("copy", "CUDA_ERROR_ECC_UNCORRECTABLE")
    stream = cuda.stream()
    cuda.call("cuMemsetD8Async", cuda.device(), 1, 16, stream)
    assert cuda.refused("cuStreamSynchronize", stream) == "CUDA_ERROR_ECC_UNCORRECTABLE"


def test_more_memory_than_there_is_is_refused_and_all_of_it_is_counted(cuda: Cuda, machine: Machine) -> None:
    free, total = cuda.call("cuMemGetInfo")
    assert total == 1 << 30 and free == total - (64 << 20) and machine.used_bytes(0) == 64 << 20
    assert cuda.refused("cuMemAlloc", free + 1) == "CUDA_ERROR_OUT_OF_MEMORY"
    device = cuda.device(free)
    assert cuda.call("cuMemGetInfo") == [0, total] and machine.used_bytes(1) == 0
    cuda.call("cuMemFree", device)
    cuda.call("cuDevicePrimaryCtxRelease", 0)
    assert machine.used_bytes(0) == 0 and machine.contexts(0) == set()


# -- several processes

_OTHER = """
import ctypes, sys, numpy as np
from cuda.bindings import driver as cu
def call(name, *args):
    result, *values = getattr(cu, name)(*args)
    assert result == 0, (name, result)
    return values[0] if len(values) == 1 else values
call("cuInit", 0)
call("cuCtxPushCurrent", call("cuDevicePrimaryCtxRetain", 0))
"""


@contextmanager
def other(machine: Machine, code: str, *args: str, fds: tuple[int, ...] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a context on GPU 0 that runs `code`; it says what it likes, and ends at the end of its input."""
    process = subprocess.Popen(
        [sys.executable, "-c", _OTHER + code, *args], env=machine.environment(), pass_fds=fds,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            process.kill()


_EXPORT = """
device = call("cuMemAlloc", 4096)
call("cuMemsetD8", device, 7, 4096)
handle = call("cuIpcGetMemHandle", device)
sys.stdout.buffer.write(ctypes.string_at(handle.getPtr(), 64))
sys.stdout.flush()
sys.stdin.read()
"""


def _handle(cuda: Cuda, data: bytes) -> Any:
    handle = cuda.driver.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), data, 64)
    return handle


def test_another_processs_memory_is_opened_once_and_outlives_it(cuda: Cuda, machine: Machine) -> None:
    with other(machine, _EXPORT) as process:
        assert process.stdout is not None
        handle = _handle(cuda, process.stdout.read(64))
        first = int(cuda.call("cuIpcOpenMemHandle", handle, 1))
        assert int(cuda.call("cuIpcOpenMemHandle", handle, 1)) == first, "the second time is the first's address"
        assert cuda.read(first, 4096) == bytes([7]) * 4096
        assert machine.used_bytes(0) == 2 * (64 << 20) + 4096, "mapped twice, there once"
    assert cuda.read(first, 1) == b"\7", "it stays until the last who opened it closes it"
    assert machine.used_bytes(0) == (64 << 20) + 4096
    assert cuda.refused("cuMemFree", first) == "CUDA_ERROR_INVALID_VALUE"
    for _ in range(2):
        cuda.call("cuIpcCloseMemHandle", first)
    assert cuda.refused("cuIpcCloseMemHandle", first) == "CUDA_ERROR_INVALID_VALUE"
    cuda.call("cuMemGetInfo")
    assert machine.used_bytes(0) == 64 << 20
    assert cuda.refused("cuIpcOpenMemHandle", handle, 1) == "CUDA_ERROR_INVALID_HANDLE"


def test_its_own_memory_no_process_can_open(cuda: Cuda) -> None:
    handle = cuda.call("cuIpcGetMemHandle", cuda.device())
    assert cuda.refused("cuIpcOpenMemHandle", handle, 1) == "CUDA_ERROR_INVALID_CONTEXT"


def test_what_a_killed_process_had_is_free_again(cuda: Cuda, machine: Machine) -> None:
    with other(machine, 'call("cuMemAlloc", 4096); print("there", flush=True); sys.stdin.read()') as process:
        assert process.stdout is not None and process.stdout.readline() == b"there\n"
        assert machine.contexts(0) == {os.getpid(), process.pid}
        process.kill()
        eventually(lambda: machine.used_bytes(0) == 64 << 20)
    cuda.call("cuMemGetInfo")
    assert {path.suffix for path in machine.folder.iterdir() if path.is_file()} == {"", ".lock", ".ledger"}
    assert machine.failures() == []


_IMPORT = """
fd, size = int(sys.argv[1]), 2 << 20
handle = call("cuMemImportFromShareableHandle", fd, cu.CUmemAllocationHandleType(1))
at = call("cuMemAddressReserve", size, 0, 0, 0)
call("cuMemMap", at, size, 0, handle, 0)
desc = cu.CUmemAccessDesc()
desc.location.type, desc.location.id = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
desc.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
call("cuMemSetAccess", at, size, [desc], 1)
call("cuMemRelease", handle)
call("cuMemsetD8", at, 9, size)
call("cuMemUnmap", at, size)
call("cuMemAddressFree", at, size)
print("done", flush=True)
"""


def test_virtual_memory_is_shared_by_descriptor_and_mapped_piece_by_piece(cuda: Cuda, machine: Machine) -> None:
    driver, size = cuda.driver, 2 << 20
    prop = driver.CUmemAllocationProp()
    prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    kinds = driver.CUmemAllocationHandleType
    prop.requestedHandleTypes = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    assert cuda.refused("cuMemCreate", size // 2, prop, 0) == "CUDA_ERROR_INVALID_VALUE"
    at = int(cuda.call("cuMemAddressReserve", 2 * size, 0, 0, 0))
    access = driver.CUmemAccessDesc()
    access.location = prop.location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    for i in range(2):
        handle = cuda.call("cuMemCreate", size, prop, 0)
        cuda.call("cuMemMap", at + i * size, size, 0, handle, 0)
        cuda.call("cuMemRelease", handle)
    assert cuda.refused("cuMemsetD8", at, 1, 16) == "CUDA_ERROR_INVALID_VALUE", "nobody has access yet"
    cuda.call("cuMemSetAccess", at, 2 * size, [access], 1)
    cuda.call("cuMemsetD8", at, 1, 2 * size)  # across both pieces
    assert cuda.refused("cuIpcGetMemHandle", at) == "CUDA_ERROR_INVALID_VALUE"
    handle = cuda.call("cuMemRetainAllocationHandle", at + size)
    fd = cuda.call("cuMemExportToShareableHandle", handle, kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)
    cuda.call("cuMemRelease", handle)
    with other(machine, _IMPORT, str(fd), fds=(fd,)) as process:
        assert process.stdout is not None and process.stdout.read() == b"done\n"
    os.close(fd)
    assert cuda.read(at + size - 1, 2) == b"\1\11"
    assert machine.used_bytes(0) == (64 << 20) + 2 * size
    cuda.call("cuMemUnmap", at, 2 * size)
    cuda.call("cuMemAddressFree", at, 2 * size)
    assert machine.used_bytes(0) == 64 << 20 and machine.failures() == []


def test_memory_that_was_not_made_for_it_is_not_exported(cuda: Cuda) -> None:
    driver = cuda.driver
    prop = driver.CUmemAllocationProp()
    prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    handle = cuda.call("cuMemCreate", 2 << 20, prop, 0)
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    assert cuda.refused("cuMemExportToShareableHandle", handle, kind, 0) == "CUDA_ERROR_INVALID_VALUE"


def test_a_gate_holds_copies_of_another_process_until_it_opens(machine: Machine) -> None:
    code = """
host = np.ones(64, np.uint8); call("cuMemHostRegister", host, 64, 1)
device, stream = call("cuMemAlloc", 64), call("cuStreamCreate", 1)
sys.stdin.readline()
for i in range(4): call("cuMemcpyHtoDAsync", int(device) + 16 * i, host, 16, stream)
call("cuStreamSynchronize", stream)
print("done", flush=True)
"""
    with other(machine, code) as process:
        assert process.stdin is not None and process.stdout is not None
        with machine.gate(after=2):
            process.stdin.write(b"go\n")
            process.stdin.flush()
            eventually(lambda: machine.is_held(process.pid))
        assert process.stdout.read() == b"done\n"


def test_gpus_are_seen_in_the_order_that_the_process_asks_for(machine: Machine) -> None:
    code = """
seen = [bytes(call("cuDeviceGetUuid", i).bytes)[-1] for i in range(call("cuDeviceGetCount"))]
print(*seen, flush=True)
"""
    for wanted, seen in (("1", b"1\n"), ("1,0", b"1 0\n"), ("0,5,1", b"0\n")):
        environment = machine.environment() | {"CUDA_VISIBLE_DEVICES": wanted}
        assert subprocess.check_output([sys.executable, "-c", _OTHER + code], env=environment) == seen


def test_nothing_is_left_in_shared_memory() -> None:
    machine = Machine()
    with machine.here():
        Cuda().device()
    assert list(machine.folder.glob("*.*")) == []
    machine.close()
    assert not Path(machine.folder).exists()
