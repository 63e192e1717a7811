"""Sharing a worker's GPU memory with the server, on a fake driver; both are real processes.

It tests the order of calls and that everything is released; tests/gpu tests that a real driver agrees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest

from kvdepot.devices.cuda.driver import DriverError
from kvdepot.errors import DeviceError, LayoutError
from tests.conftest import eventually
from tests.devices.worker import WorkerProcess
from tests.fakecuda.machine import Machine

pytestmark = pytest.mark.faults

MIB = 1 << 20
StartProcess = Callable[..., WorkerProcess]


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine(gpus=2)
    yield machine
    failures = machine.failures()
    machine.close()
    assert not failures


@pytest.fixture
def start_process(machine: Machine) -> Iterator[StartProcess]:
    started: list[WorkerProcess] = []

    def start(**environment: str) -> WorkerProcess:
        started.append(WorkerProcess({"PYTHONWARNINGS": "error", **machine.environment(), **environment}))
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


def held(machine: Machine, peer: WorkerProcess) -> dict[str, int]:
    """What a process holds of the driver's, contexts and memory included."""
    ledger = machine.held_by(peer.pid)
    return {**ledger["held"], "memory": len(ledger["memory"]), "contexts": len(ledger["contexts"])}


NOTHING = {"memory": 0, "contexts": 0}


# -- plain allocations


def test_the_gpu_is_found_by_its_uuid_where_numbers_differ(start_process: StartProcess) -> None:
    worker, server = start_process(CUDA_VISIBLE_DEVICES="1"), start_process(CUDA_VISIBLE_DEVICES="1,0")
    other = start_process(CUDA_VISIBLE_DEVICES="0")
    view = worker.call("tensor", "a", MIB)
    assert view.device.startswith("GPU-") and len(view.device) == 40
    worker.call("fill", "a", 3)
    number = server.call("attach", view)
    assert server.call("sum", number) == worker.call("sum", "a")
    server.call("detach", number)
    with pytest.raises(DeviceError, match="is not visible to this process"):
        other.call("attach", view)


def test_a_handle_is_open_once_in_the_driver_however_often_it_is_registered(
    machine: Machine, worker: WorkerProcess, server: WorkerProcess
) -> None:
    view = worker.call("tensor", "a", MIB)
    numbers = [server.call("attach", view) for _ in range(3)]
    assert machine.counts(server.pid)["cuIpcOpenMemHandle"] == 1
    for number in numbers:
        server.call("detach", number)
    assert machine.counts(server.pid)["cuIpcCloseMemHandle"] == 1
    number = server.call("attach", view)
    server.call("detach", number)
    assert machine.counts(server.pid)["cuIpcOpenMemHandle"] == 2


@pytest.mark.parametrize("kind", ["tensor", "virtual"])
def test_many_threads_open_and_close_the_same_memory(
    machine: Machine, worker: WorkerProcess, server: WorkerProcess, kind: str
) -> None:
    view = worker.call(kind, "a", 2 * MIB)
    worker.call("fill", "a", 11)
    assert server.call("attach_from_threads", view, 8, 20) == [worker.call("sum", "a")] * 160
    server.call("leave")
    assert held(machine, server) == NOTHING


def test_a_thread_without_a_context_can_share(machine: Machine, worker: WorkerProcess, server: WorkerProcess) -> None:
    worker.call("reserve", "a", 2 * MIB)
    view = worker.call("part_from_thread", "a", 0, 2 * MIB)
    worker.call("fill", "a", 5)
    number = server.call("attach", view)
    assert server.call("sum", number) == worker.call("sum", "a")
    server.call("detach", number)


@pytest.mark.parametrize("kind", ["tensor", "virtual"])
def test_sharing_takes_no_more_of_the_engines_context_than_it_gives_back(
    machine: Machine, worker: WorkerProcess, kind: str
) -> None:
    before = machine.counts(worker.pid)["cuDevicePrimaryCtxSetFlags"]
    worker.call(kind, "a", 2 * MIB)
    assert machine.counts(worker.pid)["cuDevicePrimaryCtxSetFlags"] == before
    assert machine.contexts(0) == {worker.pid}
    worker.call("leave")  # the engine's own hold was the last
    assert machine.contexts(0) == set()


# -- virtual memory


def test_the_worker_keeps_no_descriptor_and_no_hold_on_its_memory(
    machine: Machine, worker: WorkerProcess, server: WorkerProcess
) -> None:
    worker.call("virtual", "warm", 2 * MIB)
    before = worker.call("footprint")["fds"], machine.held_by(worker.pid)["held"].get("generic", 0)
    view = worker.call("virtual", "a", 20 * MIB, 2 * MIB)
    number = server.call("attach", view)
    after = worker.call("footprint")["fds"], machine.held_by(worker.pid)["held"].get("generic", 0)
    server.call("detach", number)
    assert after[1] == before[1]
    eventually(lambda: worker.call("footprint")["fds"] - before[0] <= 10)  # the fake driver has a file for each piece


def test_what_the_worker_frees_is_free_when_the_server_has_closed_it(
    machine: Machine, worker: WorkerProcess, server: WorkerProcess
) -> None:
    view = worker.call("virtual", "a", 8 * MIB)
    number = server.call("attach", view)
    contexts = machine.used_bytes(0) - 8 * MIB
    worker.call("unmap", "a")
    assert machine.used_bytes(0) - contexts == 8 * MIB
    server.call("detach", number)
    assert machine.used_bytes(0) == contexts


@pytest.mark.parametrize(
    "function", ["cuMemAddressReserve", "cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"]
)
@pytest.mark.parametrize("nth", [1, 3])
def test_a_driver_that_refuses_half_way_leaves_nothing_mapped(
    machine: Machine, worker: WorkerProcess, server: WorkerProcess, function: str, nth: int
) -> None:
    view = worker.call("virtual", "a", 8 * MIB, 2 * MIB)
    files = server.call("footprint")["fds"]
    nth = 1 if function in ("cuMemAddressReserve", "cuMemSetAccess") else nth
    machine.fail(function, "CUDA_ERROR_OUT_OF_MEMORY", nth=nth, pid=server.pid)
    with pytest.raises(DriverError, match=f"{function}: CUDA_ERROR_OUT_OF_MEMORY"):
        server.call("attach", view)
    machine.heal()
    assert server.call("footprint")["fds"] == files
    assert {kind: count for kind, count in held(machine, server).items() if count} == {"contexts": 1}
    number = server.call("attach", view)
    server.call("detach", number)


def test_unmapping_goes_on_where_one_piece_cannot_be_unmapped(
    machine: Machine, worker: WorkerProcess, server: WorkerProcess
) -> None:
    view = worker.call("virtual", "a", 8 * MIB, 2 * MIB)
    number = server.call("attach", view)
    machine.fail("cuMemUnmap", "CUDA_ERROR_UNKNOWN", pid=server.pid)
    with pytest.raises(DriverError, match="cuMem"):
        server.call("detach", number)
    machine.heal()
    assert machine.held_by(server.pid)["held"]["virtual"] == 1  # that piece
    server.call("detach", number)


# -- what cannot be shared


def test_memory_of_a_pool_is_refused_with_what_to_set(machine: Machine, worker: WorkerProcess) -> None:
    worker.call("reserve", "a", 2 * MIB)
    machine.fail("cuMemRetainAllocationHandle", "CUDA_ERROR_INVALID_VALUE", pid=worker.pid)
    with pytest.raises(DeviceError, match="cudaMallocAsync"):
        worker.call("part", "a", 0, 2 * MIB)
    machine.heal()


# -- handles that are none


@pytest.mark.parametrize(
    "handle",
    [b"", b"\1", b"\1" + bytes(63), b"\1" + bytes(65), b"\2", b"\2\x94", b"\3" + bytes(64), bytes(65), b"\2" * 4096,
     b"\2" + msgspec.msgpack.encode(["../../etc/passwd", bytes(16), 0, 1]),
     b"\2" + msgspec.msgpack.encode(["kvdepot-fds-0123456789abcdef", bytes(16), 0, 1])],
)  # fmt: skip
def test_a_handle_that_is_none_is_a_layout_error_and_nothing_is_kept(
    machine: Machine, worker: WorkerProcess, server: WorkerProcess, handle: bytes
) -> None:
    view = worker.call("tensor", "a", MIB)
    with pytest.raises(LayoutError):
        server.call("attach", view._replace(handle=handle, mapping_bytes=2 * MIB))
    server.call("leave")
    assert held(machine, server) == NOTHING


@pytest.mark.parametrize(
    ("size", "kind"),
    [(0, LayoutError), (-1, LayoutError), (6 << 20, LayoutError), (2 << 20, LayoutError), (1 << 62, DriverError),
     ((4 << 20) - 1, DriverError)],
)  # fmt: skip
def test_a_size_that_is_not_that_of_the_pieces_is_refused(
    machine: Machine, worker: WorkerProcess, server: WorkerProcess, size: int, kind: type[Exception]
) -> None:
    view = worker.call("virtual", "a", 4 * MIB, 2 * MIB)
    with pytest.raises(kind):
        server.call("attach", view._replace(mapping_bytes=size))
    server.call("leave")
    assert held(machine, server) == NOTHING
