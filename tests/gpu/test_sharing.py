"""A worker's GPU memory in the server, with the driver that is there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.devices.footprints import assert_settles
from tests.devices.peers import MIB, Peer, Raised
from tests.gpu.conftest import IS_FAKE

LARGEST = (200 if IS_FAKE else 2000) * MIB
"""Bytes of the largest allocation here."""
with_torch = pytest.mark.usefixtures("torch_on_gpu")


class RealMachine:
    """In the place of the fake driver's."""

    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONWARNINGS": "default"}  # its torch may warn


@pytest.fixture
def start_peer() -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def start(**environment: str) -> Peer:
        peers.append(Peer(RealMachine(), **environment))  # type: ignore[arg-type]
        return peers[-1]

    yield start
    for peer in peers:
        if peer.process.poll() is None:
            peer.process.communicate("", timeout=60)


@pytest.fixture
def worker(start_peer: Callable[..., Peer]) -> Peer:
    return start_peer()


@pytest.fixture
def server(start_peer: Callable[..., Peer]) -> Peer:
    return start_peer()


def check_both_ways(worker: Peer, server: Peer, name: str, view: dict[str, Any]) -> None:
    """What one side writes the other reads, all of it."""
    worker.ask("fill", name, 1)
    number = server.ask("open", view)
    assert server.ask("sum", number) == worker.ask("sum", name)
    server.ask("write", number, 2)
    assert server.ask("sum", number) == worker.ask("sum", name)
    server.ask("close", number)


@pytest.mark.parametrize("size", [512, 4096, 100_000, 2 * MIB, 3 * MIB + 512, 64 * MIB])
def test_a_plain_allocation_of_any_size_arrives_from_its_first_byte(worker: Peer, server: Peer, size: int) -> None:
    # Small allocations lie in one block of the driver's: neither may be taken for the other, nor for the block.
    views = [worker.ask("tensor", name, size) for name in "abc"]
    for name, view in zip("abc", views, strict=True):
        assert view["mapping_bytes"] >= size
        check_both_ways(worker, server, name, view)


def test_memory_registered_again_is_mapped_before_the_old_is_closed(worker: Peer, server: Peer) -> None:
    for kind in ("tensor", "virtual"):
        view = worker.ask(kind, kind, 4 * MIB)
        worker.ask("fill", kind, 3)
        first = server.ask("open", view)
        second = server.ask("open", view)
        server.ask("close", first)
        assert server.ask("sum", second) == worker.ask("sum", kind)
        server.ask("close", second)


def test_virtual_memory_in_pieces_arrives_as_one_range(worker: Peer, server: Peer) -> None:
    view = worker.ask("virtual", "a", 20 * MIB, 2 * MIB)
    assert view["mapping_bytes"] == 20 * MIB
    check_both_ways(worker, server, "a", view)


def test_as_many_pieces_as_a_large_tensor_has_arrive(worker: Peer, server: Peer) -> None:
    check_both_ways(worker, server, "a", worker.ask("virtual", "a", LARGEST, 2 * MIB))


def test_a_tensor_inside_an_expandable_segment_brings_only_the_pieces_under_it(worker: Peer, server: Peer) -> None:
    worker.ask("reserve", "segment", 40 * MIB, 20 * MIB, 2 * MIB)
    view = worker.ask("part", "segment", 3 * MIB + 512, 6 * MIB)
    assert view["mapping_bytes"] == 8 * MIB and view["offset"] == MIB + 512
    number = server.ask("open", view)
    server.ask("write", number, 8)
    assert worker.ask("sum", "segment", 2 * MIB, 8 * MIB) == server.ask("sum", number)
    server.ask("close", number)


@pytest.mark.parametrize(("reserved", "advice"), [(8 * MIB, "--enable-sleep-mode"), (64 * MIB, "expandable_segments")])
def test_memory_that_is_not_exportable_is_refused_with_what_to_set(worker: Peer, reserved: int, advice: str) -> None:
    with pytest.raises(Raised, match=advice) as refused:
        worker.ask("reserve", "a", reserved, 8 * MIB, 2 * MIB, 0)
    assert refused.value.kind == "DeviceError"


@with_torch
@pytest.mark.parametrize("settings", ["expandable_segments:False", "expandable_segments:True"])
def test_what_torch_allocates_can_be_shared(start_peer: Callable[..., Peer], server: Peer, settings: str) -> None:
    worker = start_peer(PYTORCH_ALLOC_CONF=settings, PYTORCH_CUDA_ALLOC_CONF=settings)
    check_both_ways(worker, server, "a", worker.ask("torch_tensor", "a", 50 * MIB))


@with_torch
def test_what_torchs_other_allocator_gives_is_refused_with_what_to_set(start_peer: Callable[..., Peer]) -> None:
    settings = "backend:cudaMallocAsync"
    worker = start_peer(PYTORCH_ALLOC_CONF=settings, PYTORCH_CUDA_ALLOC_CONF=settings)
    with pytest.raises(Raised, match="cudaMallocAsync") as refused:
        worker.ask("torch_tensor", "a", 50 * MIB)
    assert refused.value.kind == "DeviceError"


def test_more_than_there_is_of_an_allocation_is_refused(worker: Peer, server: Peer) -> None:
    view = worker.ask("tensor", "a", 4 * MIB)
    with pytest.raises(Raised) as refused:
        server.ask("open", {**view, "mapping_bytes": 6 * MIB})
    assert refused.value.kind == "LayoutError"


@pytest.mark.parametrize("lie", ["larger", "other"])
def test_a_worker_that_lies_about_its_pieces_is_refused_by_the_driver(worker: Peer, server: Peer, lie: str) -> None:
    view = worker.ask("lie", lie)
    with pytest.raises(Raised) as refused:
        server.ask("open", view)
    assert refused.value.kind == "DriverError"
    check_both_ways(worker, server, "a", worker.ask("tensor", "a", MIB))  # the context has not suffered


def test_memory_of_a_killed_worker_is_readable_until_the_server_closes_it(worker: Peer, server: Peer) -> None:
    server.ask("enter")
    views = [worker.ask("tensor", "a", 512 * MIB), worker.ask("virtual", "b", 512 * MIB)]
    worker.ask("fill", "b", 9)
    numbers = [server.ask("open", view) for view in views]
    expected = server.ask("sum", numbers[1])
    worker.kill()
    assert server.ask("sum", numbers[1]) == expected
    before = server.ask("free_bytes")
    for number in numbers:
        server.ask("close", number)
    assert server.ask("free_bytes") - before > 900 * MIB


@pytest.mark.parametrize("kind", ["tensor", "virtual"])
def test_a_hundred_registrations_leave_nothing(worker: Peer, server: Peer, kind: str) -> None:
    view = worker.ask(kind, "a", 64 * MIB, *([2 * MIB] if kind == "virtual" else []))

    def repeat() -> None:
        server.ask("close", server.ask("open", view))

    repeat()  # it has a context then
    assert_settles(repeat, lambda: server.ask("footprint"), 100)
