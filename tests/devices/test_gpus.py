"""Copies while the arena is being registered, on the stand-in of the driver."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from kvdepot.devices import Devices
from kvdepot.memory.allocator import PAGE
from kvdepot.memory.arena import Arena
from tests.conftest import eventually
from tests.devices.conformance import TIMEOUT_S, Case, DeviceConformance, arena_of
from tests.devices.copy_paths import SMALL_PIECES, STAGING, prepare
from tests.devices.tensors import Model
from tests.devices.worker import WorkerProcess
from tests.standin.machine import Machine

pytestmark = pytest.mark.faults

SLOW_S = 60.0
"""No test waits for it: healing the machine ends the call."""
EVERYWHERE, AT_THE_END = range(0, 21, 3), range(18, 25)
"""Pages of the arena: in all of its three pieces, and in the last one."""
suite = DeviceConformance()


@pytest.fixture(scope="module")
def gpus() -> Iterator[Machine]:
    with closing(Machine()) as made, made.here():
        yield made


@pytest.fixture(scope="module")
def workers(gpus: Machine) -> Iterator[list[WorkerProcess]]:
    """Two on GPU 0, and one on GPU 1."""
    made = [WorkerProcess(gpus.environment(), gpu=gpu) for gpu in (0, 0, 1)]
    yield made
    for worker in made:
        worker.close()


@pytest.fixture
def machine(gpus: Machine) -> Iterator[Machine]:
    yield gpus
    gpus.heal()
    assert os.getpid() not in gpus.contexts(0) | gpus.contexts(1)
    assert gpus.failures() == []


@pytest.fixture
def arena() -> Iterator[Arena]:
    with arena_of(24) as made:
        yield made


@pytest.fixture
def devices(machine: Machine, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    made = Devices(arena, STAGING)
    prepare(made, monkeypatch)
    yield made
    machine.heal()
    made.close()


def model() -> Model:
    return Model().add("mla", 6, 8, 1, 512, "bfloat16").add("keys and values apart", 6, 2, 2, 8, "float16")


def round_trip(case: Case, pages: range = EVERYWHERE) -> None:
    """A chunk of seven pages goes out and comes back."""
    extents = tuple((case.arena.header.chunks_start + page * PAGE, PAGE) for page in pages)
    case.there_and_back([[1, 4, 2]], [[5, 0, 3]], [extents], 1)


def pins_of(devices: Devices) -> Any:
    return devices._gpus.pins  # type: ignore[union-attr]


# -- copies before the arena is registered


def test_a_copy_does_not_wait_for_the_registration_of_its_memory(
    machine: Machine, devices: Devices, workers: list[WorkerProcess], arena: Arena
) -> None:
    me = os.getpid()
    before = machine.counts(me)
    machine.slow("cuMemHostRegister", SLOW_S, pid=me)
    with suite.case(workers[0], devices, arena, model()) as case, ThreadPoolExecutor(1) as pool:
        pool.submit(round_trip, case).result(TIMEOUT_S)
        assert devices.status()[0].pinned_bytes == 0
        assert machine.counts(me)["pageable_copies"] == before["pageable_copies"], "they go through pinned buffers"
        machine.heal()
        eventually(lambda: devices.status()[0].pinned_bytes == len(arena.bytes))
        round_trip(case)


def test_memory_that_copies_want_is_registered_first(
    machine: Machine, devices: Devices, workers: list[WorkerProcess], arena: Arena
) -> None:
    machine.slow("cuMemHostRegister", SLOW_S, pid=os.getpid())
    with suite.case(workers[0], devices, arena, model()) as case:
        pins = pins_of(devices)
        eventually(lambda: pins._begun)  # the first piece is under way
        round_trip(case, AT_THE_END)
        assert not pins._pinned
        machine.heal()
        eventually(lambda: pins.pinned_bytes == len(arena.bytes))
        assert list(pins._pinned) == [0, 2, 1]


def test_after_a_failure_only_memory_that_copies_want_is_registered(
    machine: Machine, devices: Devices, workers: list[WorkerProcess], arena: Arena
) -> None:
    machine.fail("cuMemHostRegister", "CUDA_ERROR_OUT_OF_MEMORY", pid=os.getpid())
    with suite.case(workers[0], devices, arena, model()) as case:
        pins = pins_of(devices)
        eventually(lambda: pins._refused)
        round_trip(case, AT_THE_END)
        eventually(lambda: list(pins._pinned) == [2])
        round_trip(case)
        eventually(lambda: list(pins._pinned) == [2, 1])


@pytest.mark.parametrize("has_buffers", [True, False])
@pytest.mark.parametrize("way", ["dma", "kernel", "staged"])
def test_an_arena_that_cannot_be_registered_is_copied_all_the_same(
    machine: Machine, workers: list[WorkerProcess], arena: Arena, monkeypatch: pytest.MonkeyPatch, has_buffers: bool,
    way: str,
) -> None:  # fmt: skip
    """One piece of it is, so some copies are of both kinds."""
    devices = Devices(arena, STAGING)
    prepare(devices, monkeypatch, way, way)
    me = os.getpid()
    before = machine.counts(me)
    if not has_buffers:
        machine.fail("cuMemHostAlloc", "CUDA_ERROR_OUT_OF_MEMORY", times=10**6, pid=me)
    machine.fail("cuMemHostRegister", "CUDA_ERROR_OUT_OF_MEMORY", nth=2, times=10**6, pid=me)
    with suite.case(workers[0], devices, arena, model()) as case:
        eventually(lambda: pins_of(devices)._refused)
        round_trip(case)
        assert devices.status()[0].pinned_bytes == SMALL_PIECES
    devices.close()
    assert (machine.counts(me)["pageable_copies"] == before["pageable_copies"]) == has_buffers
