"""A real server and real workers on a real GPU: bytes, two at once, and deaths in the middle of copies."""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Callable, Iterator

import pytest

from kvdepot.client import MessageQueueClient
from kvdepot.protocol import wire
from tests.conftest import Depot, StartDepot, eventually
from tests.devices.engines import BLOCKS, Engine, round_trips_at_once, settled, tokens_of
from tests.devices.worker import WorkerProcess
from tests.gpu.conftest import IS_FAKE

SCALE = 128 if IS_FAKE else 8192
"""Blocks of 17 MiB: twelve of them take some milliseconds to copy."""
FLAGS = ("--gpu-staging-mib", "0") if IS_FAKE else ()
"""No kernel is compiled for the fake driver; tests/devices has that."""
ARENA_MIB = 256 if IS_FAKE else 2048
SOURCE, TARGET = list(range(12)), list(range(12, 24))

StartEngine = Callable[..., Engine]


@pytest.fixture
def start_engine() -> Iterator[StartEngine]:
    started: list[Engine] = []

    def start(depot: Depot, **options: object) -> Engine:
        started.append(Engine(depot.url, os.environ, seed=len(started), **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for engine in started:
        engine.process.close()


@pytest.fixture
def used_bytes() -> Iterator[Callable[[], int]]:
    """What is in use of the GPU, by whomever; a process of its own asks, which takes a context itself."""
    asking = WorkerProcess(os.environ)

    def used() -> int:
        free, total = asking.call("info")
        return int(total - free)

    yield used
    asking.close()


@pytest.mark.parametrize("how", ["one", "each", "virtual", "torch"])
def test_what_a_worker_stored_comes_back_byte_for_byte_and_to_another_worker_too(
    start_depot: StartDepot, start_engine: StartEngine, how: str, request: pytest.FixtureRequest
) -> None:
    if how == "torch":
        request.getfixturevalue("torch_on_gpu")
    depot = start_depot(*FLAGS, arena_mib=256)
    engine = start_engine(depot, how=how)
    order = random.Random(1).sample(range(BLOCKS), 24)
    source, target = order[:12], order[12:]
    engine.round_trip(source, target, tokens_of(1, 3))
    stored = engine.truth  # what the retrieve left, in `target`
    other = start_engine(depot)
    other.comes_back(stored, target, source, tokens_of(1, 3))


def test_two_workers_store_and_retrieve_at_once(start_depot: StartDepot, start_engine: StartEngine) -> None:
    depot = start_depot(*FLAGS, arena_mib=512)
    engines = [start_engine(depot, name=f"model {i}", scale=16) for i in range(2)]
    round_trips_at_once(engines, 20)
    settled(depot, instances=2)


def begun(depot: Depot, begin: Callable[[int], str]) -> str:
    """Begin copies until one is caught under way; its request."""
    client = MessageQueueClient(depot.url, depot.context)
    try:
        for attempt in range(50):
            request = begin(attempt)
            for _ in range(20):
                if client.ask(wire.Status()).result(10.0)["operations"]:
                    return request
    finally:
        client.close()
    raise AssertionError("50 copies were too fast to be caught")


@pytest.mark.parametrize("is_store", [True, False])
def test_a_worker_killed_in_mid_copy_is_given_up_and_others_are_served(
    start_depot: StartDepot, start_engine: StartEngine, used_bytes: Callable[[], int], is_store: bool
) -> None:
    depot = start_depot(*FLAGS, arena_mib=ARENA_MIB)
    other = start_engine(depot)
    before = used_bytes()
    victim = start_engine(depot, scale=SCALE, name="large")
    assert victim.store(SOURCE, tokens_of(1, 3))

    def begin(attempt: int) -> str:
        tokens = tokens_of(2 + attempt, 3) if is_store else tokens_of(1, 3)
        return victim.begin(SOURCE if is_store else TARGET, tokens, is_store)

    begun(depot, begin)
    victim.process.kill()
    settled(depot, instances=1)
    eventually(lambda: used_bytes() <= before + sum(victim.model.sizes) // 2)
    other.round_trip(SOURCE, TARGET, tokens_of(99, 3))


def test_a_server_killed_in_mid_copy_fails_its_retrieve_and_the_next_one_serves(
    start_depot: StartDepot, start_engine: StartEngine
) -> None:
    name = f"kvdepot-test-{uuid.uuid4().hex[:12]}"
    depot = start_depot(*FLAGS, arena_mib=ARENA_MIB, name=name)
    engine = start_engine(depot, scale=SCALE)
    assert engine.store(SOURCE, tokens_of(1, 3))
    stored = engine.truth
    request = begun(depot, lambda _: engine.begin(TARGET, tokens_of(1, 3), False))
    depot.process.kill()
    depot.process.wait(20)
    failed = engine.end(request)[1]
    assert failed in ([], TARGET), "all of it arrived in time, or all of it is recomputed"
    start_depot(*FLAGS, arena_mib=ARENA_MIB, name=name, url=depot.url)
    eventually(lambda: engine.retrieve(TARGET, tokens_of(1, 3)) == [])
    engine.comes_back(stored, SOURCE, TARGET, tokens_of(1, 3))
    engine.round_trip(SOURCE, TARGET, tokens_of(2, 3))
