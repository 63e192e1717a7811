"""Real GPUs by the suite of all devices: each way of copying, memory from the driver and from torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from kvdepot.devices import Devices
from kvdepot.protocol.layout import build_layout
from tests.devices.conformance import DeviceConformance, arena_of
from tests.devices.copy_paths import CopyPathsConformance
from tests.devices.footprints import assert_settles, host_bytes
from tests.devices.tensors import Model
from tests.devices.worker import WorkerProcess
from tests.gpu.conftest import IS_FAKE

MIB = 1 << 20
HOST_SLACK = 4 * MIB
WITH_CONTEXTS = 10

runs_elsewhere = pytest.mark.skipif(IS_FAKE, reason="tests/devices/test_cuda.py runs it on the fake driver")


class OnGpu(CopyPathsConformance):
    """On GPU 0. What other processes take meanwhile would be taken for ours: the GPU must be idle."""

    asking: WorkerProcess
    slack: ClassVar[dict[str, int]] = {"host": HOST_SLACK}

    @pytest.fixture(scope="class")
    @classmethod
    def gpus(cls) -> Iterator[object]:
        cls.asking = WorkerProcess(os.environ)
        yield None
        cls.asking.close()

    @classmethod
    def start_worker(cls, how: str, first: bool) -> WorkerProcess:
        return WorkerProcess(os.environ, how=how)

    def footprint(self) -> dict[str, Any]:
        free, total = self.asking.call("info")
        return {**super().footprint(), "gpu": total - free, "host": host_bytes()}


class TestDma(OnGpu): ...


@runs_elsewhere
class TestStaged(OnGpu):
    paths = ("staged", "staged")


@runs_elsewhere
class TestUnregisteredMemory(OnGpu):
    paths = ("dma", "staged")
    is_registered = False


@runs_elsewhere
class TestVirtualMemory(OnGpu):
    how = "virtual"
    paths = ("dma", "staged")


@runs_elsewhere
class TestAllocationsApart(OnGpu):
    how = "each"
    paths = ("staged", "dma")


class TestAsItIs(DeviceConformance):
    """Nothing made small, copy paths as they are chosen, tensors of torch with its caching allocator."""

    @pytest.fixture(scope="class")
    @classmethod
    def worker(cls, torch_on_gpu: Any) -> Iterator[WorkerProcess]:
        worker = WorkerProcess(os.environ, how="torch")
        yield worker
        worker.close()

    slack: ClassVar[dict[str, int]] = {"host": HOST_SLACK}

    def footprint(self) -> dict[str, Any]:
        return {**super().footprint(), "host": host_bytes()}

    def test_a_chunk_across_pieces_of_pinned_memory(self, worker: WorkerProcess, devices: Devices) -> None:
        """64 MiB a piece: chunks of some MiB around both edges of the second."""
        with arena_of(160 * MIB // 4096) as arena:
            own = Devices(arena, 64 * MIB)
            model = Model().add("layers behind each other", 24, 16, 8, 512, "float32")  # 256 KiB a block, 32 KiB runs
            with self.case(worker, own, arena, model) as case:
                size = -(-8 * case.layout.block_bytes // 4096) * 4096
                order = np.random.default_rng(1).permutation(24).tolist()
                edges = [64 * MIB, 128 * MIB]
                extents = [((edge - size // 2 // 4096 * 4096, size),) for edge in edges]
                case.there_and_back([order[:8], order[8:16]], [order[16:], order[:8]], extents, 0)
            own.close()


def test_contexts_come_and_go_and_leave_nothing() -> None:
    """Each registration is the GPU's first, and its end the last one's."""
    asking, worker = WorkerProcess(os.environ), WorkerProcess(os.environ)
    suite = OnGpu()
    suite.asking = asking
    with arena_of() as arena:
        devices = Devices(arena, 64 * MIB)
        model = Model().add("mla", 4, 2, 1, 8, "bfloat16")
        layout = build_layout(worker.make(model), model.axes)
        assert_settles(lambda: devices.map(layout).close(), suite.footprint, WITH_CONTEXTS, suite.slack)
        assert devices.status() == []
        devices.close()
    worker.close()
    asking.close()
