"""GPUs, with the conformance suite of devices on a fake driver: logic, not speed (see tests/gpu)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import pytest

from kvdepot.devices import Devices
from kvdepot.devices.cuda.plan import CopyPlan
from kvdepot.errors import DeviceError
from kvdepot.memory.allocator import PAGE
from kvdepot.memory.arena import Arena
from kvdepot.memory.copier import CopyPiece
from kvdepot.protocol.layout import build_layout
from tests.conftest import eventually
from tests.devices.conformance import TIMEOUT_S, DeviceConformance
from tests.devices.copy_paths import SMALL_PIECES, STAGING, CopyPathsConformance, prepare
from tests.devices.tensors import Model
from tests.devices.worker import WorkerProcess
from tests.fakecuda.machine import Machine

pytestmark = pytest.mark.faults  # a worker process each


class OnFakeDriver(CopyPathsConformance):
    """The suite on GPU 1 of two, with a worker that sees it as its GPU 0."""

    version: ClassVar[int] = 13000
    machine: ClassVar[Machine]

    def footprint(self) -> dict[str, Any]:
        held = self.machine.held_by(os.getpid())
        del held["counts"]
        return {**super().footprint(), "held": held, "used": [self.machine.used_bytes(gpu) for gpu in (0, 1)]}

    @pytest.fixture(scope="class")
    @classmethod
    def gpus(cls) -> Iterator[Machine]:
        cls.machine = Machine(version=cls.version)
        try:
            with cls.machine.here():
                yield cls.machine
                assert cls.machine.failures() == []
        finally:
            cls.machine.close()

    @classmethod
    def start_worker(cls, how: str, first: bool) -> WorkerProcess:
        seen = {"CUDA_VISIBLE_DEVICES": "1"} if first else {}
        return WorkerProcess(cls.machine.environment() | seen, gpu=0 if first else 1, how=how)


class TestDma(OnFakeDriver):
    def test_copies_are_batched_in_order_for_stores_only_and_from_pinned_memory(
        self, worker: WorkerProcess, devices: Devices, arena: Arena
    ) -> None:
        before = self.machine.counts(os.getpid())
        self.footprint()
        with self.case(worker, devices, arena, Model().add("mla", 4, 2, 1, 8, "bfloat16")) as case:
            piece = CopyPiece(((arena.header.chunks_start, PAGE),), np.array([3, 1], np.intp))
            for is_store in (True, False):
                case.move([piece], is_store)
        after = self.machine.counts(os.getpid())
        assert after["batch_order_1"] == before["batch_order_1"] + 1, "STREAM for the store"
        assert after["batch_order_3"] == before["batch_order_3"] + 1, "ANY for the retrieve"
        assert after["batch_flags_1"] == before["batch_flags_1"] + 2, "the multiprocessors are the engine's"
        assert after["pageable_copies"] == 0


@pytest.mark.faults
class TestDmaOfAnOldDriver(OnFakeDriver):
    """Before 12.8: no batches."""

    version = 12040


class TestStaged(OnFakeDriver):
    paths = ("staged", "staged")


@pytest.mark.faults
class TestUnregisteredMemory(OnFakeDriver):
    paths = ("dma", "staged")
    is_registered = False


@pytest.mark.faults
class TestVirtualMemory(OnFakeDriver):
    how = "virtual"
    paths = ("dma", "staged")


@pytest.mark.faults
class TestAllocationsApart(OnFakeDriver):
    how = "each"
    paths = ("staged", "dma")


@pytest.fixture(scope="module")
def worker(gpus: Machine) -> Iterator[WorkerProcess]:
    made = WorkerProcess(gpus.environment())
    yield made
    made.close()


suite = DeviceConformance()


def small() -> Model:
    return Model().add("mla", 6, 2, 1, 512, "bfloat16").add("keys and values apart", 6, 2, 2, 8, "float16")


@pytest.mark.parametrize("function", ["cuMemcpyBatchAsync", "cuStreamCreate", "cuCtxPushCurrent"])
@pytest.mark.parametrize("is_store", [True, False])
def test_a_call_that_fails_is_an_error_and_touches_neither_side(
    machine: Machine, devices: Devices, worker: WorkerProcess, arena: Arena, function: str, is_store: bool
) -> None:
    with suite.case(worker, devices, arena, small()) as case:
        before = case.fill_arena()
        extents = ((arena.header.chunks_start, 4 * PAGE),)
        eventually(lambda: devices.status()[0].pinned_bytes == len(arena.bytes))  # or pinning meets the failure
        machine.fail(function, "CUDA_ERROR_OUT_OF_MEMORY", pid=os.getpid())
        with pytest.raises(DeviceError, match="CUDA_ERROR_OUT_OF_MEMORY"):
            case.move([CopyPiece(extents, np.array([1, 4], np.intp))], is_store)
        assert "CUDA_ERROR_OUT_OF_MEMORY" in devices.status()[0].failure
        case.assert_tensors_are(case.truth, "the call failed")
        assert np.array_equal(arena.bytes, before)
        machine.heal()
        case.there_and_back([[1, 4]], [[5, 0]], [extents], 0)
        assert devices.status()[0].failure == "", "a copy has succeeded"


@pytest.mark.parametrize("is_store", [True, False])
def test_a_copy_that_fails_under_way_leaves_the_side_that_it_read_untouched(
    machine: Machine, devices: Devices, worker: WorkerProcess, arena: Arena, is_store: bool
) -> None:
    """Such a failure breaks the context, for good as far as the driver is concerned."""
    with suite.case(worker, devices, arena, small()) as case:
        before = case.fill_arena()
        piece = CopyPiece(((arena.header.chunks_start, 4 * PAGE),), np.array([1, 4], np.intp))
        eventually(lambda: devices.status()[0].pinned_bytes == len(arena.bytes))  # or pinning meets the failure
        machine.fail("copy", "CUDA_ERROR_ECC_UNCORRECTABLE", nth=2, pid=os.getpid())
        for _ in range(2):
            with pytest.raises(DeviceError, match="ECC_UNCORRECTABLE"):
                case.move([piece], is_store)
        if is_store:
            case.assert_tensors_are(case.truth, "a store only reads")
        else:
            assert np.array_equal(arena.bytes, before)
    machine.heal()
    with suite.case(worker, devices, arena, small()) as case:  # the context went with its last registration
        case.there_and_back([[1, 4]], [[5, 0]], [piece.extents], 0)


@pytest.mark.parametrize(
    "function", ["cuDevicePrimaryCtxRetain", "cuIpcOpenMemHandle", "cuMemGetAddressRange", "cuDeviceGetUuid"]
)
def test_a_registration_that_fails_keeps_nothing(
    machine: Machine, devices: Devices, worker: WorkerProcess, function: str
) -> None:
    model = small()
    layout = build_layout(worker.make(model), model.axes)
    machine.fail(function, "CUDA_ERROR_UNKNOWN", pid=os.getpid())
    with pytest.raises(DeviceError, match="CUDA_ERROR_UNKNOWN"):
        devices.map(layout)
    assert machine.contexts(0) == {worker.process.pid} and devices.status() == []
    devices.map(layout).close()
    assert machine.contexts(0) == {worker.process.pid} and devices.status() == []


def test_a_gpu_without_memory_for_a_context_is_an_error(
    machine: Machine, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    tight = Machine(gpus=1, total_mib=100)
    with tight.here():
        devices, worker = Devices(arena, STAGING), WorkerProcess(tight.environment())
        prepare(devices, monkeypatch)
        model = small()
        layout = build_layout(worker.make(model), model.axes)
        with pytest.raises(DeviceError, match=r"OUT_OF_MEMORY.*--gpu-memory-utilization"):
            devices.map(layout)
        assert tight.contexts(0) == {worker.process.pid}
        worker.close()
        devices.close()
    tight.close()


@pytest.mark.parametrize("function", ["cuMemHostUnregister", "cuCtxPushCurrent"])
def test_a_gpu_that_is_lost_is_left_and_does_not_stop_the_copies_of_others(
    machine: Machine, devices: Devices, worker: WorkerProcess, arena: Arena, function: str
) -> None:
    extents = ((arena.header.chunks_start, 20 * PAGE),)
    other = WorkerProcess(machine.environment(), gpu=1)
    with suite.case(other, devices, arena, small()) as second, suite.case(worker, devices, arena, small()) as first:
        second.there_and_back([[1, 4, 2]], [[5, 0, 3]], [extents], 0)
        machine.fail(function, "CUDA_ERROR_UNKNOWN", times=10**6, pid=os.getpid())
        second.mapped.close()
        machine.heal()
        assert [gpu.registrations for gpu in devices.status()] == [1]
        with ThreadPoolExecutor(1) as pool:
            pool.submit(first.there_and_back, [[1, 4, 2]], [[5, 0, 3]], [extents], 0).result(TIMEOUT_S)
    other.close()


def test_a_copy_goes_on_while_other_pieces_of_the_arena_pass_from_gpu_to_gpu(
    machine: Machine, devices: Devices, worker: WorkerProcess, arena: Arena
) -> None:
    """The first piece cannot be unregistered while a copy uses it, but the pieces behind it can be used."""
    other = WorkerProcess(machine.environment(), gpu=1)
    start = arena.header.chunks_start
    with suite.case(other, devices, arena, small()) as second, suite.case(worker, devices, arena, small()) as first:
        pins = devices._gpus.pins  # type: ignore[union-attr]
        eventually(lambda: pins.pinned_bytes == len(arena.bytes))
        address = np.array([pins.address], np.uint64)
        with ThreadPoolExecutor(2) as pool:
            with pins.used(CopyPlan("store", address, address, address)):
                leaving = pool.submit(second.mapped.close)
                eventually(lambda: len(devices.status()) == 1)
                behind = ((start + SMALL_PIECES, 2 * PAGE), (start + 2 * SMALL_PIECES - 4 * PAGE, 2 * PAGE))
                pool.submit(first.there_and_back, [[1, 4, 2]], [[5, 0, 3]], [behind], 0).result(TIMEOUT_S)
                assert not leaving.done()
            leaving.result(TIMEOUT_S)
        eventually(lambda: pins.pinned_bytes == len(arena.bytes))
        assert set(pins._pinned.values()) == {devices._gpus._gpus[first.layout.device].context}  # type: ignore[union-attr]
    other.close()


def test_a_gpu_is_entered_while_another_one_is(
    machine: Machine, devices: Devices, worker: WorkerProcess, arena: Arena
) -> None:
    """If one GPU hangs, its engine waits, but the other GPU's does not."""
    other = WorkerProcess(machine.environment(), gpu=1)
    model = small()
    layout = build_layout(other.make(model), model.axes)
    hung = devices._gpus  # type: ignore[assignment]
    hung._turning.add(layout.device)  # as the thread would have it that does not come back from the driver
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(devices.map, layout)
        try:
            with suite.case(worker, devices, arena, small()) as case:
                assert len(devices.status()) == 1
                case.there_and_back([[1]], [[5]], [((arena.header.chunks_start, 4 * PAGE),)], 0)
            assert not waits.done()
        finally:  # or a failure would hang
            hung._turned(layout.device)
        waits.result(TIMEOUT_S).close()
    other.close()
