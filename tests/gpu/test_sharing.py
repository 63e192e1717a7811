"""A worker's GPU memory in the server, with the driver that is there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kvdepot.devices.cuda.driver import DriverError
from kvdepot.errors import DeviceError, LayoutError
from kvdepot.protocol.layout import TensorView
from tests.devices.footprints import assert_settles
from tests.devices.worker import WorkerProcess
from tests.gpu.conftest import IS_FAKE

MIB = 1 << 20
LARGEST = (200 if IS_FAKE else 2000) * MIB
"""Bytes of the largest allocation here."""
StartProcess = Callable[..., WorkerProcess]
with_torch = pytest.mark.usefixtures("torch_on_gpu")


@pytest.fixture
def start_process() -> Iterator[StartProcess]:
    started: list[WorkerProcess] = []

    def start(**environment: str) -> WorkerProcess:
        started.append(WorkerProcess({**os.environ, **environment}))
        return started[-1]

    yield start
    for process in started:
        process.close()


@pytest.fixture
def worker(start_process: StartProcess) -> WorkerProcess:
    return start_process()


@pytest.fixture
def server(start_process: StartProcess) -> WorkerProcess:
    return start_process()


def check_both_ways(worker: WorkerProcess, server: WorkerProcess, name: str, view: TensorView) -> None:
    """What one side writes the other reads, all of it."""
    worker.call("fill", name, 1)
    number = server.call("attach", view)
    assert server.call("sum", number) == worker.call("sum", name)
    server.call("overwrite", number, 2)
    assert server.call("sum", number) == worker.call("sum", name)
    server.call("detach", number)


@pytest.mark.parametrize("size", [512, 4096, 100_000, 2 * MIB, 3 * MIB + 512, 64 * MIB])
def test_a_plain_allocation_of_any_size_arrives_from_its_first_byte(
    worker: WorkerProcess, server: WorkerProcess, size: int
) -> None:
    # Small allocations lie in one block of the driver's: neither may be taken for the other, nor for the block.
    views = [worker.call("tensor", name, size) for name in "abc"]
    for name, view in zip("abc", views, strict=True):
        assert view.mapping_bytes >= size
        check_both_ways(worker, server, name, view)


def test_memory_registered_again_is_mapped_before_the_old_is_closed(
    worker: WorkerProcess, server: WorkerProcess
) -> None:
    for kind in ("tensor", "virtual"):
        view = worker.call(kind, kind, 4 * MIB)
        worker.call("fill", kind, 3)
        first = server.call("attach", view)
        second = server.call("attach", view)
        server.call("detach", first)
        assert server.call("sum", second) == worker.call("sum", kind)
        server.call("detach", second)


def test_virtual_memory_in_pieces_arrives_as_one_range(worker: WorkerProcess, server: WorkerProcess) -> None:
    view = worker.call("virtual", "a", 20 * MIB, 2 * MIB)
    assert view.mapping_bytes == 20 * MIB
    check_both_ways(worker, server, "a", view)


def test_as_many_pieces_as_a_large_tensor_has_arrive(worker: WorkerProcess, server: WorkerProcess) -> None:
    check_both_ways(worker, server, "a", worker.call("virtual", "a", LARGEST, 2 * MIB))


def test_a_tensor_inside_an_expandable_segment_brings_only_the_pieces_under_it(
    worker: WorkerProcess, server: WorkerProcess
) -> None:
    worker.call("reserve", "segment", 20 * MIB, 2 * MIB, 40 * MIB)
    view = worker.call("part", "segment", 3 * MIB + 512, 6 * MIB)
    assert view.mapping_bytes == 8 * MIB and view.offset == MIB + 512
    number = server.call("attach", view)
    server.call("overwrite", number, 8)
    assert worker.call("sum", "segment", 2 * MIB, 8 * MIB) == server.call("sum", number)
    server.call("detach", number)


@pytest.mark.parametrize(
    ("reserved", "advice"), [(8 * MIB, "--enable-sleep-mode"), (64 * MIB, "expandable_segments:True")]
)
def test_memory_that_is_not_exportable_is_refused_with_what_to_set(
    worker: WorkerProcess, reserved: int, advice: str
) -> None:
    worker.call("reserve", "a", 8 * MIB, 2 * MIB, reserved, False)
    with pytest.raises(DeviceError, match="layer 0") as refused:
        worker.call("part", "a", 0, 8 * MIB)
    assert {"--enable-sleep-mode", "expandable_segments:True"} & set(str(refused.value).split()) == {advice}


@with_torch
@pytest.mark.parametrize("settings", ["expandable_segments:False", "expandable_segments:True"])
def test_what_torch_allocates_can_be_shared(start_process: StartProcess, server: WorkerProcess, settings: str) -> None:
    worker = start_process(PYTORCH_ALLOC_CONF=settings, PYTORCH_CUDA_ALLOC_CONF=settings)
    check_both_ways(worker, server, "a", worker.call("torch_tensor", "a", 50 * MIB))


@with_torch
def test_what_torchs_other_allocator_gives_is_refused_with_what_to_set(start_process: StartProcess) -> None:
    settings = "backend:cudaMallocAsync"
    worker = start_process(PYTORCH_ALLOC_CONF=settings, PYTORCH_CUDA_ALLOC_CONF=settings)
    with pytest.raises(DeviceError, match="cudaMallocAsync"):
        worker.call("torch_tensor", "a", 50 * MIB)


def test_more_than_there_is_of_an_allocation_is_refused(worker: WorkerProcess, server: WorkerProcess) -> None:
    view = worker.call("tensor", "a", 4 * MIB)
    with pytest.raises(LayoutError):
        server.call("attach", view._replace(mapping_bytes=6 * MIB))


@pytest.mark.parametrize("lie", ["larger", "other"])
def test_a_worker_that_lies_about_its_pieces_is_refused_by_the_driver(
    worker: WorkerProcess, server: WorkerProcess, lie: str
) -> None:
    view = worker.call("lie", lie)
    with pytest.raises(DriverError):
        server.call("attach", view)
    check_both_ways(worker, server, "a", worker.call("tensor", "a", MIB))  # the context has not suffered


def test_memory_of_a_killed_worker_is_readable_until_the_server_closes_it(
    worker: WorkerProcess, server: WorkerProcess
) -> None:
    half = LARGEST // 4 // (2 * MIB) * 2 * MIB
    views = [worker.call("tensor", "a", half), worker.call("virtual", "b", half)]
    worker.call("fill", "b", 9)
    numbers = [server.call("attach", view) for view in views]
    expected = server.call("sum", numbers[1])
    path = Path("/dev/shm") / msgspec.msgpack.decode(views[1].handle[1:])[0]
    worker.kill()
    assert server.call("sum", numbers[1]) == expected
    before = server.call("info")[0]
    for number in numbers:
        server.call("detach", number)
    assert server.call("info")[0] - before > 1.8 * half
    assert not path.exists(), "the dead worker's socket goes with the last of its memory"


@pytest.mark.parametrize("kind", ["tensor", "virtual"])
def test_a_hundred_registrations_leave_nothing(worker: WorkerProcess, server: WorkerProcess, kind: str) -> None:
    view = worker.call(kind, "a", 64 * MIB, *([2 * MIB] if kind == "virtual" else []))

    def repeat() -> None:
        server.call("detach", server.call("attach", view))

    repeat()  # it has a context then
    assert_settles(repeat, lambda: server.call("footprint"), 100)
