"""Sharing a worker's GPU memory with the server, on a fake driver; both are real processes.

It tests the order of calls and that everything is released; tests/gpu tests that a real driver agrees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.conftest import eventually
from tests.devices.peers import MIB, Peer, Raised
from tests.fakecuda.machine import Machine

pytestmark = pytest.mark.faults


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine(gpus=2)
    yield machine
    failures = machine.failures()
    machine.close()
    assert not failures


@pytest.fixture
def start_peer(machine: Machine) -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def start(**environment: str) -> Peer:
        peers.append(Peer(machine, **environment))
        return peers[-1]

    yield start
    logs = []
    for peer in peers:
        if peer.process.poll() is None:
            _, log = peer.process.communicate("", timeout=120)
            logs.append(log)
    assert not any(logs), "".join(logs)


@pytest.fixture
def worker(start_peer: Callable[..., Peer]) -> Peer:
    return start_peer()


@pytest.fixture
def server(start_peer: Callable[..., Peer]) -> Peer:
    return start_peer()


def held(machine: Machine, peer: Peer) -> dict[str, int]:
    """What a process holds of the driver's, contexts and memory included."""
    ledger = machine.held_by(peer.pid)
    return {**ledger["held"], "memory": len(ledger["memory"]), "contexts": len(ledger["contexts"])}


NOTHING = {"memory": 0, "contexts": 0}


# -- plain allocations


def test_the_gpu_is_found_by_its_uuid_where_numbers_differ(start_peer: Callable[..., Peer]) -> None:
    worker, server = start_peer(CUDA_VISIBLE_DEVICES="1"), start_peer(CUDA_VISIBLE_DEVICES="1,0")
    other = start_peer(CUDA_VISIBLE_DEVICES="0")
    view = worker.ask("tensor", "a", MIB)
    assert view["device"].startswith("GPU-") and len(view["device"]) == 40
    worker.ask("fill", "a", 3)
    number = server.ask("open", view)
    assert server.ask("sum", number) == worker.ask("sum", "a")
    server.ask("close", number)
    with pytest.raises(Raised, match="is not visible to this process") as refused:
        other.ask("open", view)
    assert refused.value.kind == "DeviceError"


def test_a_handle_is_open_once_in_the_driver_however_often_it_is_registered(
    machine: Machine, worker: Peer, server: Peer
) -> None:
    view = worker.ask("tensor", "a", MIB)
    numbers = [server.ask("open", view) for _ in range(3)]
    assert machine.counts(server.pid)["cuIpcOpenMemHandle"] == 1
    for number in numbers:
        server.ask("close", number)
    assert machine.counts(server.pid)["cuIpcCloseMemHandle"] == 1
    number = server.ask("open", view)
    server.ask("close", number)
    assert machine.counts(server.pid)["cuIpcOpenMemHandle"] == 2


@pytest.mark.parametrize("kind", ["tensor", "virtual"])
def test_many_threads_open_and_close_the_same_memory(machine: Machine, worker: Peer, server: Peer, kind: str) -> None:
    view = worker.ask(kind, "a", 2 * MIB)
    worker.ask("fill", "a", 11)
    assert server.ask("open_from_threads", view, 8, 20) == [worker.ask("sum", "a")] * 160
    server.ask("leave")
    assert held(machine, server) == NOTHING


def test_a_thread_without_a_context_can_share(machine: Machine, worker: Peer, server: Peer) -> None:
    worker.ask("allocate", "a", MIB)
    view = worker.ask("view_from_thread", "a")
    worker.ask("fill", "a", 5)
    number = server.ask("open", view)
    assert server.ask("sum", number) == worker.ask("sum", "a")
    server.ask("close", number)


@pytest.mark.parametrize("kind", ["tensor", "virtual"])
def test_sharing_takes_no_more_of_the_engines_context_than_it_gives_back(
    machine: Machine, worker: Peer, kind: str
) -> None:
    worker.ask(kind, "a", 2 * MIB)
    assert not machine.counts(worker.pid)["cuDevicePrimaryCtxSetFlags"]
    assert machine.contexts(0) == {worker.pid}
    worker.ask("leave")  # the engine's own hold was the last
    assert machine.contexts(0) == set()


# -- virtual memory


def test_a_thousand_pieces_are_mapped_and_given_back(machine: Machine, start_peer: Callable[..., Peer]) -> None:
    machine.close()
    large = Machine(gpus=1, total_mib=4096)
    try:
        worker, server = Peer(large), Peer(large)
        view = worker.ask("virtual", "a", 2000 * MIB, 2 * MIB)
        number = server.ask("open", view)
        worker.ask("poke", "a", 1999 * MIB + 5, 77)
        assert server.ask("peek", number, 1999 * MIB + 5) == 77
        files = server.ask("files")
        server.ask("close", number)
        assert server.ask("files") <= files
        server.ask("leave")
        assert held(large, server) == NOTHING
        assert not large.failures()
        for peer in (worker, server):
            _, log = peer.process.communicate("", timeout=120)
            assert not log
    finally:
        large.close()


def test_the_worker_keeps_no_descriptor_and_no_hold_on_its_memory(machine: Machine, worker: Peer, server: Peer) -> None:
    worker.ask("virtual", "warm", 2 * MIB)
    before = worker.ask("files"), machine.held_by(worker.pid)["held"].get("generic", 0)
    view = worker.ask("virtual", "a", 20 * MIB, 2 * MIB)
    number = server.ask("open", view)
    after = worker.ask("files"), machine.held_by(worker.pid)["held"].get("generic", 0)
    server.ask("close", number)
    assert after[1] - before[1] == 10  # the engine's own ten
    assert eventually(lambda: worker.ask("files") - before[0] <= 10)  # the fake driver has a file open for each piece


def test_what_the_worker_frees_is_free_when_the_server_has_closed_it(
    machine: Machine, worker: Peer, server: Peer
) -> None:
    view = worker.ask("virtual", "a", 8 * MIB)
    number = server.ask("open", view)
    contexts = machine.used_bytes(0) - 8 * MIB
    worker.ask("free_virtual", "a")
    assert machine.used_bytes(0) - contexts == 8 * MIB
    server.ask("close", number)
    assert machine.used_bytes(0) == contexts


@pytest.mark.parametrize(
    "function",
    ["cuMemAddressReserve", "cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"],
)
@pytest.mark.parametrize("nth", [1, 3])
def test_a_driver_that_refuses_half_way_leaves_nothing_mapped(
    machine: Machine, worker: Peer, server: Peer, function: str, nth: int
) -> None:
    view = worker.ask("virtual", "a", 8 * MIB, 2 * MIB)
    server.ask("enter")
    files = server.ask("files")
    nth = 1 if function in ("cuMemAddressReserve", "cuMemSetAccess") else nth
    machine.fail(function, "CUDA_ERROR_OUT_OF_MEMORY", nth=nth, pid=server.pid)
    with pytest.raises(Raised, match=f"{function}: CUDA_ERROR_OUT_OF_MEMORY"):
        server.ask("open", view)
    machine.heal()
    assert server.ask("files") == files
    assert {kind: count for kind, count in held(machine, server).items() if count} == {"contexts": 1}
    number = server.ask("open", view)
    server.ask("close", number)


def test_unmapping_goes_on_where_one_piece_cannot_be_unmapped(machine: Machine, worker: Peer, server: Peer) -> None:
    view = worker.ask("virtual", "a", 8 * MIB, 2 * MIB)
    number = server.ask("open", view)
    machine.fail("cuMemUnmap", "CUDA_ERROR_UNKNOWN", pid=server.pid)
    with pytest.raises(Raised, match="cuMem"):
        server.ask("close", number)
    machine.heal()
    assert machine.held_by(server.pid)["held"]["virtual"] == 1  # that piece
    server.ask("close", number)


# -- what cannot be shared


@pytest.mark.parametrize(
    ("reserved", "advice"), [(8 * MIB, "--enable-sleep-mode"), (64 * MIB, "expandable_segments:True")]
)
def test_memory_that_is_not_exportable_is_refused_with_what_to_set(worker: Peer, reserved: int, advice: str) -> None:
    with pytest.raises(Raised) as refused:
        worker.ask("reserve", "a", reserved, 8 * MIB, 2 * MIB, 0)
    assert refused.value.kind == "DeviceError" and "layer 0" in str(refused.value)
    assert {"--enable-sleep-mode", "expandable_segments:True"} & set(str(refused.value).split()) == {advice}


def test_memory_of_a_pool_is_refused_with_what_to_set(machine: Machine, worker: Peer) -> None:
    worker.ask("allocate_virtual", "a", 2 * MIB)
    machine.fail("cuMemRetainAllocationHandle", "CUDA_ERROR_INVALID_VALUE", pid=worker.pid)
    with pytest.raises(Raised, match="cudaMallocAsync") as refused:
        worker.ask("part", "a", 0, 2 * MIB)
    assert refused.value.kind == "DeviceError"
    machine.heal()


# -- ends


def test_memory_of_a_killed_worker_stays_until_the_server_closes_it(
    machine: Machine, worker: Peer, server: Peer
) -> None:
    views = [worker.ask("tensor", "a", 2 * MIB), worker.ask("virtual", "b", 4 * MIB)]
    for name in "ab":
        worker.ask("fill", name, 9)
    numbers = [server.ask("open", view) for view in views]
    sums = [server.ask("sum", number) for number in numbers]
    path = Path("/dev/shm") / msgspec.msgpack.decode(bytes.fromhex(views[1]["handle"])[1:])[0]
    worker.kill()
    assert [server.ask("sum", number) for number in numbers] == sums
    for number in numbers:
        server.ask("close", number)
    assert not path.exists()  # the dead worker's socket goes with the last of its memory
    server.ask("leave")
    assert held(machine, server) == NOTHING
    assert machine.used_bytes(0) == 0


# -- handles that are none


@pytest.mark.parametrize(
    "handle",
    [b"", b"\1", b"\1" + bytes(63), b"\1" + bytes(65), b"\2", b"\2\x94", b"\3" + bytes(64), bytes(65), b"\2" * 4096,
     b"\2" + msgspec.msgpack.encode(["../../etc/passwd", bytes(16), 0, 1]),
     b"\2" + msgspec.msgpack.encode(["kvdepot-fds-0123456789abcdef", bytes(16), 0, 1])],
)  # fmt: skip
def test_a_handle_that_is_none_is_a_layout_error_and_nothing_is_kept(
    machine: Machine, worker: Peer, server: Peer, handle: bytes
) -> None:
    view = worker.ask("tensor", "a", MIB)
    with pytest.raises(Raised) as refused:
        server.ask("open", {**view, "handle": handle.hex(), "mapping_bytes": 2 * MIB})
    assert refused.value.kind == "LayoutError"
    server.ask("leave")
    assert held(machine, server) == NOTHING


@pytest.mark.parametrize(
    ("size", "kind"),
    [(0, "LayoutError"), (-1, "LayoutError"), (6 << 20, "LayoutError"), (2 << 20, "LayoutError"),
     (1 << 62, "DriverError"), ((4 << 20) - 1, "DriverError")],
)  # fmt: skip
def test_a_size_that_is_not_that_of_the_pieces_is_refused(
    machine: Machine, worker: Peer, server: Peer, size: int, kind: str
) -> None:
    view = worker.ask("virtual", "a", 4 * MIB, 2 * MIB)
    with pytest.raises(Raised) as refused:
        server.ask("open", {**view, "mapping_bytes": size})
    assert refused.value.kind == kind
    server.ask("leave")
    assert held(machine, server) == NOTHING
