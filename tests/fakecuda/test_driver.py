"""The fake driver, called through NVIDIA's bindings: what a real one refuses or punishes does not pass here either."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from tests.fakecuda.machine import Machine

pytestmark = pytest.mark.faults

SIZE = 4096


class Cuda:
    """Calls by their names, which answer with a value or raise with the name of the error."""

    def __init__(self, machine: Machine) -> None:
        from cuda.bindings import driver

        self.machine = machine
        self._driver: Any = driver
        self.call("cuInit", 0)
        self.context = self.call("cuDevicePrimaryCtxRetain", 0)
        self.call("cuCtxPushCurrent", self.context)
        self.device = int(self.call("cuMemAlloc", SIZE))
        self.stream = self.call("cuStreamCreate", 1)
        self.host = np.zeros(2 * SIZE, np.uint8)
        self.address = self.host.ctypes.data

    def call(self, name: str, *args: Any) -> Any:
        result, *values = getattr(self._driver, name)(*args)
        if result:
            raise OSError(result.name)
        return values[0] if len(values) == 1 else values


@pytest.fixture
def cuda() -> Iterator[Cuda]:
    with closing(Machine(gpus=1, total_mib=256)) as machine, machine.here():
        yield Cuda(machine)


def test_a_copy_from_registered_memory_happens_when_someone_waits(cuda: Cuda) -> None:
    cuda.call("cuMemHostRegister", cuda.address, 2 * SIZE, 1)
    cuda.host[:] = 1
    cuda.call("cuMemcpyHtoDAsync", cuda.device, cuda.address, SIZE, cuda.stream)
    cuda.host[:] = 2
    cuda.call("cuStreamSynchronize", cuda.stream)
    cuda.call("cuMemcpyDtoH", cuda.address + SIZE, cuda.device, SIZE)
    assert set(cuda.host[SIZE:]) == {2}


def test_memory_that_is_given_up_with_a_copy_queued_is_a_failure(cuda: Cuda) -> None:
    cuda.call("cuMemHostRegister", cuda.address, SIZE, 1)
    cuda.call("cuMemcpyHtoDAsync", cuda.device, cuda.address, SIZE, cuda.stream)
    cuda.call("cuMemHostUnregister", cuda.address)
    with pytest.raises(OSError, match="ILLEGAL_ADDRESS"):
        cuda.call("cuStreamSynchronize", cuda.stream)
    assert len(cuda.machine.failures()) == 1


def test_a_copy_across_two_registrations_or_beyond_one_is_refused(cuda: Cuda) -> None:
    for half in (0, SIZE // 2):
        cuda.call("cuMemHostRegister", cuda.address + half, SIZE // 2, 1)
    for address in (cuda.address, cuda.address + SIZE // 2 + 16):
        with pytest.raises(OSError, match="INVALID_VALUE"):
            cuda.call("cuMemcpyHtoDAsync", cuda.device, address, SIZE // 2 + 16, cuda.stream)


def test_memory_is_counted_and_no_more_is_given_than_there_is(cuda: Cuda) -> None:
    free, total = cuda.call("cuMemGetInfo")
    assert total == 256 << 20
    assert total - free == cuda.machine.used_bytes(0) == (64 << 20) + SIZE
    with pytest.raises(OSError, match="OUT_OF_MEMORY"):
        cuda.call("cuMemAlloc", free + 1)
    cuda.call("cuMemFree", int(cuda.call("cuMemAlloc", free)))


def test_streams_and_contexts_are_refused_after_their_end(cuda: Cuda) -> None:
    cuda.call("cuStreamDestroy", cuda.stream)
    with pytest.raises(OSError, match="INVALID_HANDLE"):
        cuda.call("cuStreamSynchronize", cuda.stream)
    cuda.call("cuDevicePrimaryCtxRelease", 0)
    with pytest.raises(OSError, match="INVALID_CONTEXT"):
        cuda.call("cuMemFree", cuda.device)
    assert cuda.machine.used_bytes(0) == 0


def test_a_process_cannot_open_its_own_memory(cuda: Cuda) -> None:
    handle = cuda.call("cuIpcGetMemHandle", cuda.device)
    with pytest.raises(OSError, match="INVALID_CONTEXT"):
        cuda.call("cuIpcOpenMemHandle", handle, 1)


def test_who_reads_device_memory_without_the_driver_dies_and_gives_it_back(cuda: Cuda) -> None:
    code = (
        "import ctypes; from cuda.bindings import driver as d; d.cuInit(0); _, c = d.cuDevicePrimaryCtxRetain(0);"
        "d.cuCtxPushCurrent(c); _, p = d.cuMemAlloc(64); ctypes.string_at(int(p), 1)"
    )
    before = cuda.machine.used_bytes(0)
    died = subprocess.run([sys.executable, "-c", code], env=cuda.machine.environment(), check=False)
    assert died.returncode == -signal.SIGSEGV
    assert cuda.machine.used_bytes(0) == before
    assert cuda.machine.contexts(0) == {os.getpid()}
