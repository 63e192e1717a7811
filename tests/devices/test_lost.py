"""A lost GPU context, on a fake driver: the GPU is left, its memory forgotten, and other GPUs keep copying."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvdepot.devices import Devices
from kvdepot.memory.allocator import PAGE
from tests.conftest import eventually
from tests.devices.conformance import DeviceConformance, arena_of
from tests.devices.copy_paths import STAGING, prepare
from tests.devices.tensors import Model
from tests.devices.worker import WorkerProcess
from tests.fakecuda.machine import Machine

pytestmark = pytest.mark.faults

suite = DeviceConformance()


@pytest.fixture
def machine() -> Iterator[Machine]:
    with closing(Machine()) as made, made.here():
        yield made


@pytest.mark.parametrize("how", ["one", "virtual"])
def test_a_gpu_that_is_left_without_its_context_keeps_nothing_and_stops_no_other(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    model = Model().add("mla", 6, 2, 1, 512, "bfloat16")
    me = os.getpid()
    lost, sound = (WorkerProcess(machine.environment(), gpu=gpu, how=how) for gpu in (0, 1))
    with arena_of(24) as arena:
        devices = Devices(arena, STAGING)
        prepare(devices, monkeypatch)
        extents = ((arena.header.chunks_start, 20 * PAGE),)
        with suite.case(lost, devices, arena, model) as first, suite.case(sound, devices, arena, model) as second:
            first.there_and_back([[1, 4, 2]], [[5, 0, 3]], [extents], 0)
            machine.fail("cuCtxPushCurrent", "CUDA_ERROR_UNKNOWN", times=3, pid=me)
            first.mapped.close()  # its three looks at the GPU: memory, registrations, what copies had
            machine.heal()
            assert me not in machine.contexts(0) and me in machine.contexts(1)
            assert [gpu.registrations for gpu in devices.status()] == [1]
            second.there_and_back([[1, 4, 2]], [[5, 0, 3]], [extents], 0)
            eventually(lambda: devices.status()[0].pinned_bytes == len(arena.bytes))
        with suite.case(lost, devices, arena, model) as again:
            again.there_and_back([[1, 4, 2]], [[5, 0, 3]], [extents], 0)
        assert devices.status() == [] and me not in machine.contexts(0) | machine.contexts(1)
        assert machine.counts(me)["pageable_copies"] == 0
        devices.close()
    for worker in (lost, sound):
        worker.close()
