"""GPUs whose workers come and go, and copies while the arena is being registered, on the stand-in of the driver."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kvdepot.devices import Devices
from kvdepot.errors import DeviceError, KVDepotError
from kvdepot.memory.allocator import PAGE
from kvdepot.memory.arena import Arena
from kvdepot.memory.copier import CopyPiece
from kvdepot.protocol.layout import Layout, build_layout
from tests.conftest import eventually
from tests.devices.conformance import TIMEOUT_S, Case, DeviceConformance
from tests.devices.copy_paths import SMALL_PIECES, STAGING, prepare
from tests.devices.tensors import Model
from tests.devices.worker import WorkerProcess
from tests.fakecuda.machine import Machine

pytestmark = pytest.mark.faults

IDLE_S = 1000.0
SLOW_S = 60.0
"""No test waits for it: healing the machine ends the call."""
EVERYWHERE, AT_THE_END = range(0, 21, 3), range(18, 25)
"""Pages of the arena: in all of its three pieces, and in the last one."""
suite = DeviceConformance()


@pytest.fixture(scope="module")
def workers(gpus: Machine) -> Iterator[list[WorkerProcess]]:
    """Two on GPU 0, and one on GPU 1."""
    made = [WorkerProcess(gpus.environment(), gpu=gpu) for gpu in (0, 0, 1)]
    yield made
    for worker in made:
        worker.close()


def model() -> Model:
    return Model().add("mla", 6, 8, 1, 512, "bfloat16").add("keys and values apart", 6, 2, 2, 8, "float16")


def round_trip(case: Case, pages: range = EVERYWHERE) -> None:
    """A chunk of seven pages goes out and comes back."""
    extents = tuple((case.arena.header.chunks_start + page * PAGE, PAGE) for page in pages)
    case.there_and_back([[1, 4, 2]], [[5, 0, 3]], [extents], 1)


def pins_of(devices: Devices) -> Any:
    return devices._gpus.pins  # type: ignore[union-attr]


def made(machine: Machine) -> Counter[str]:
    """What a GPU costs that comes into use: contexts and registrations of the arena."""
    counts = machine.counts(os.getpid())
    return Counter({name: counts[name] for name in ("cuDevicePrimaryCtxRetain", "cuMemHostRegister")})


@pytest.fixture
def left(devices: Devices, workers: list[WorkerProcess], arena: Arena) -> Devices:
    """With GPU 0 kept, whose only worker has left it when the arena was registered."""
    with suite.case(workers[0], devices, arena, model()) as case:
        round_trip(case)
        eventually(lambda: pins_of(devices).pinned_bytes == len(arena.bytes))
    return devices


def test_a_worker_that_comes_soon_finds_context_and_registrations_as_they_were(
    machine: Machine, left: Devices, workers: list[WorkerProcess], arena: Arena
) -> None:
    before = made(machine)
    assert os.getpid() in machine.contexts(0)
    (kept,) = left.status()
    assert (kept.registrations, kept.pinned_bytes) == (0, len(arena.bytes))
    with suite.case(workers[1], left, arena, model()) as case:
        assert [gpu.registrations for gpu in left.status()] == [1]
        round_trip(case)
    assert made(machine) == before


def test_a_gpu_without_workers_is_released_when_its_time_is_over_and_not_before(
    machine: Machine, left: Devices
) -> None:
    now = time.monotonic()
    assert not left.is_overdue(now)
    left.release_idle(now)
    assert os.getpid() in machine.contexts(0)
    assert left.is_overdue(now + IDLE_S)
    left.release_idle(now + IDLE_S)
    held = machine.held_by(os.getpid())
    assert held["contexts"] == {} and held["memory"] == {} and not any(held["held"].values())
    assert left.status() == [] and not left.is_overdue(now + IDLE_S)


def fails_its_last_copy(machine: Machine, case: Case) -> None:
    machine.fail("cuMemcpyBatchAsync", "CUDA_ERROR_UNKNOWN", pid=os.getpid())
    with pytest.raises(DeviceError):
        case.move([CopyPiece(((case.arena.header.chunks_start, 4 * PAGE),), np.array([1, 4], np.intp))], True)


def keeps_memory_of_its_worker(machine: Machine, case: Case) -> None:
    machine.fail("cuIpcCloseMemHandle", "CUDA_ERROR_UNKNOWN", pid=os.getpid())


def has_a_broken_context(machine: Machine, case: Case) -> None:
    machine.fail("cuCtxSynchronize", "CUDA_ERROR_ECC_UNCORRECTABLE", pid=os.getpid())


def lacks_buffers_for_copies(machine: Machine, case: Case) -> None:
    machine.fail("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY", times=10**6, pid=os.getpid())
    round_trip(case)


@pytest.mark.parametrize(
    "happens", [fails_its_last_copy, keeps_memory_of_its_worker, has_a_broken_context, lacks_buffers_for_copies]
)
def test_a_gpu_is_not_kept_if_only_its_release_can_heal_it(
    machine: Machine, devices: Devices, workers: list[WorkerProcess], arena: Arena, happens: Callable[..., None]
) -> None:
    """Where it lacks buffers, the engine took all memory, and may have been restarted to take less."""
    with suite.case(workers[0], devices, arena, model()) as case:
        happens(machine, case)
    assert os.getpid() not in machine.contexts(0) and devices.status() == []
    machine.heal()
    with suite.case(workers[1], devices, arena, model()) as case:
        round_trip(case)


def test_a_gpu_whose_context_broke_meanwhile_gets_a_new_one(
    machine: Machine, left: Devices, workers: list[WorkerProcess], arena: Arena
) -> None:
    before = made(machine)
    machine.fail("cuCtxSynchronize", "CUDA_ERROR_ECC_UNCORRECTABLE", pid=os.getpid())
    with suite.case(workers[1], left, arena, model()) as case:
        assert made(machine)["cuDevicePrimaryCtxRetain"] == before["cuDevicePrimaryCtxRetain"] + 1
        round_trip(case)


def test_a_gpu_that_is_released_passes_registrations_on_to_one_in_use(
    machine: Machine, left: Devices, workers: list[WorkerProcess], arena: Arena
) -> None:
    with suite.case(workers[2], left, arena, model()) as case:
        pins = pins_of(left)
        (first,) = set(pins._pinned.values())
        left.release_idle(time.monotonic() + IDLE_S)
        assert os.getpid() in machine.contexts(1) - machine.contexts(0)
        round_trip(case)
        eventually(lambda: pins.pinned_bytes == len(arena.bytes))
        assert first not in pins._pinned.values()


def test_workers_come_and_go_while_gpus_without_workers_are_released(
    machine: Machine, devices: Devices, workers: list[WorkerProcess], arena: Arena
) -> None:
    start, pages = arena.header.chunks_start, 7
    layouts = [build_layout(worker.make(model()), model().axes) for worker in (workers[0], workers[2])]

    def come_and_go(layout: Layout, number: int) -> None:
        for turn in range(25):
            mapped = devices.map(layout)
            first = start + (12 * number + turn % 5) * PAGE
            mapped.move(arena, [CopyPiece(((first, pages * PAGE),), np.array([1, 4, 2], np.intp))], turn % 2 == 0)
            mapped.close()

    with ThreadPoolExecutor(4) as pool:
        going = [pool.submit(come_and_go, layouts[number], number) for number in (0, 1, 0, 1)]
        while not all(done.done() for done in going):
            devices.release_idle(time.monotonic() + IDLE_S)
        for done in going:
            done.result(TIMEOUT_S)
    devices.release_idle(time.monotonic() + IDLE_S)
    pins = pins_of(devices)
    assert devices.status() == [] and pins.pinned_bytes == 0 and not +pins._users and not pins._begun


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
@pytest.mark.parametrize("path", ["dma", "staged"])
def test_an_arena_that_cannot_be_registered_is_copied_all_the_same(
    machine: Machine, workers: list[WorkerProcess], arena: Arena, monkeypatch: pytest.MonkeyPatch, has_buffers: bool,
    path: str,
) -> None:  # fmt: skip
    """One piece of it is, so some copies are of both kinds."""
    devices = Devices(arena, STAGING)
    prepare(devices, monkeypatch, path, path)
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


def test_pieces_that_were_refused_are_tried_again_when_a_worker_comes(
    machine: Machine, devices: Devices, workers: list[WorkerProcess], arena: Arena
) -> None:
    machine.fail("cuMemHostRegister", "CUDA_ERROR_NOT_PERMITTED", times=10**6, pid=os.getpid())
    with suite.case(workers[0], devices, arena, model()) as case:
        round_trip(case)
        assert pins_of(devices).pinned_bytes == 0
    machine.heal()
    assert [gpu.registrations for gpu in devices.status()] == [0], "the GPU was not kept"
    with suite.case(workers[1], devices, arena, model()):
        eventually(lambda: pins_of(devices).pinned_bytes == len(arena.bytes))


def test_a_gpu_on_which_no_registration_succeeded_is_not_kept(devices: Devices, workers: list[WorkerProcess]) -> None:
    views = [view._replace(handle=b"\3" + bytes(64)) for view in workers[0].make(model())]
    with pytest.raises(KVDepotError):
        devices.map(build_layout(views, model().axes))
    assert devices.status() == []


def test_the_arena_is_not_passed_on_to_a_gpu_without_workers(
    machine: Machine, devices: Devices, workers: list[WorkerProcess], arena: Arena
) -> None:
    with suite.case(workers[0], devices, arena, model()), suite.case(workers[2], devices, arena, model()):
        eventually(lambda: pins_of(devices).pinned_bytes == len(arena.bytes))
    before = made(machine)
    gpus: Any = devices._gpus
    first = next(gpu for gpu in gpus._gpus.values() if gpu.context == pins_of(devices)._context)
    first.idle_since -= 1.0
    devices.release_idle(first.idle_since + IDLE_S + 0.5)  # more: the sum may round down
    assert [gpu.registrations for gpu in devices.status()] == [0]
    assert pins_of(devices).pinned_bytes == 0 and made(machine) == before
    with suite.case(workers[0], devices, arena, model()) as case:
        eventually(lambda: pins_of(devices).pinned_bytes == len(arena.bytes))
        round_trip(case)


def test_a_gpu_that_is_made_anew_for_one_worker_is_not_made_twice_for_two(
    machine: Machine, left: Devices, workers: list[WorkerProcess]
) -> None:
    (gpu,) = left._gpus._gpus.values()  # type: ignore[union-attr]
    gpu.failure = "broken since"
    layouts = [build_layout(worker.make(model()), model().axes) for worker in workers[:2]]
    retained = made(machine)["cuDevicePrimaryCtxRetain"]
    machine.slow("cuDevicePrimaryCtxRetain", SLOW_S, pid=os.getpid())
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(left.map, layouts[0])
        eventually(lambda: made(machine)["cuDevicePrimaryCtxRetain"] == retained + 1)  # its context is being made
        second = pool.submit(left.map, layouts[1])
        eventually(second.running)
        machine.heal()
        mapped = [one.result(TIMEOUT_S) for one in (first, second)]
    assert made(machine)["cuDevicePrimaryCtxRetain"] == retained + 1
    assert [each.registrations for each in left.status()] == [2]
    for each in mapped:
        each.close()
