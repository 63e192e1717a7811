"""Requirements on the driver and its bindings, and calls that are avoided where they would do harm."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from tests.fakecuda.machine import Machine

SIZE = 1 << 12
COUNT = 16
DMA_ONLY = {"store": [(0, "dma")], "retrieve": [(0, "dma")]}
ELSEWHERE = "CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM"


@pytest.fixture
def machine() -> Iterator[Machine]:
    """One GPU that sees registered memory at other addresses than the processor."""
    with closing(Machine(gpus=1, attributes={ELSEWHERE: 0})) as made, made.here():
        yield made


def test_bindings_that_hold_the_gil_while_they_wait_are_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cuda.bindings

    from kvdepot.devices.cuda.driver import load
    from kvdepot.errors import DeviceError

    monkeypatch.setattr(cuda.bindings, "__version__", "12.9.0")
    with pytest.raises(DeviceError, match=r"cuda-bindings>=12\.9\.1"):
        load()
    monkeypatch.setattr(cuda.bindings, "__version__", "13.0.0.dev3")
    assert load().devices()


@pytest.mark.parametrize(("version", "staged"), [(13000, ["retrieve"]), (12040, ["store", "retrieve"])])
def test_small_copies_are_staged_where_copy_engines_are_slow(version: int, staged: list[str]) -> None:
    """Before CUDA 12.8 each copy is a call of its own."""
    mixed = {direction: [(0, "staged"), (28 << 10, "dma")] for direction in staged}
    with closing(Machine(gpus=1, version=version)) as made, made.here():
        from kvdepot.devices.cuda.copy_paths import CopyPaths
        from kvdepot.devices.cuda.driver import load

        driver = load()
        with driver.current(driver.retain(0)):
            for staging_bytes, dma_from_bytes, chosen in [
                (64 << 20, 28 << 10, DMA_ONLY | mixed),
                (64 << 20, 0, DMA_ONLY),
                (0, 28 << 10, DMA_ONLY),
            ]:
                with closing(CopyPaths(driver, 0, staging_bytes, dma_from_bytes)) as paths:
                    assert paths.choice == chosen
        driver.release(0)


@pytest.mark.parametrize("is_store", [True, False])
def test_a_gpu_that_sees_registered_memory_elsewhere_gets_no_cpu_address(machine: Machine, is_store: bool) -> None:
    from kvdepot.devices.cuda.copy_paths import CopyPaths
    from kvdepot.devices.cuda.driver import load
    from kvdepot.devices.cuda.plan import CopyPlan

    driver = load()
    area = mmap.mmap(-1, SIZE * COUNT)
    host = np.frombuffer(area, np.uint8)
    there = np.random.default_rng(7).integers(0, 256, len(host), dtype=np.uint8)
    steps = np.arange(COUNT, dtype=np.uint64) * np.uint64(SIZE)
    context = driver.retain(0)
    with driver.current(context):
        paths = CopyPaths(driver, 0, 64 << 20, 28 << 10)
        assert paths.without and paths.choice == DMA_ONLY
        device = int(driver.call("cuMemAlloc", len(host)))
        driver.call("cuMemHostRegister", host.ctypes.data, len(host), 3)
        plan = CopyPlan(
            "store" if is_store else "retrieve",
            steps[::-1] + np.uint64(device),
            steps + np.uint64(host.ctypes.data),
            np.full(COUNT, SIZE, np.uint64),
        )
        if is_store:
            driver.call("cuMemcpyHtoD", device, there.ctypes.data, len(there))
        else:
            host[:] = there
        with paths.slot() as slot:
            paths.run(plan, slot)
        found = host.copy()
        if not is_store:
            driver.call("cuMemcpyDtoH", found.ctypes.data, device, len(found))
        driver.call("cuMemHostUnregister", host.ctypes.data)
        driver.call("cuMemFree", device)
        counts = machine.counts(os.getpid())
        paths.close()
    driver.release(0)
    assert found.reshape(COUNT, SIZE).tobytes() == there.reshape(COUNT, SIZE)[::-1].tobytes()
    assert counts["cuMemcpyDtoHAsync" if is_store else "cuMemcpyHtoDAsync"] == COUNT
    assert not counts["batch_copies"] and not counts["kernel_copies"]
    assert machine.failures() == []
