"""Workers and servers that die or stop at any step of a copy: nothing half written is found, and memory comes back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.conftest import Depot, StartDepot, eventually, suspend
from tests.faults.conftest import Driver, StartDriver, Watcher, settled
from tests.faults.halting import STEPS
from tests.server.process import kill

pytestmark = pytest.mark.faults

CHUNKS = 6
"""Of every prompt, of four blocks each."""
SIZE = {"blocks": 64, "width": 256}
"""384 KiB a prompt: the eight workers' prompts fill less than half of the arena."""
ARENA_MIB = 8
MANY = range(1000, 1060)
"""Prompts that fill the arena more than twice, so that all memory that may be given to others has been."""
Watch = Callable[[Depot], Watcher]


@dataclass
class Worker:
    """A worker that has stopped itself at a step of a copy."""

    driver: Driver
    step: str
    is_store: bool
    family: int

    def go_on(self) -> str:
        """Continue it; the id of its request."""
        self.driver.signal(signal.SIGCONT)
        request_id: str = self.driver.answer()
        return request_id

    def outcome(self, request_id: str) -> int:
        """Chunks that were stored or loaded; it says that all others were not."""
        if self.is_store:
            return CHUNKS * self.driver.tell("end_store", request_id=request_id)
        failed: int = self.driver.tell("end_retrieve", request_id=request_id)
        return CHUNKS - failed // 4


def start(start_depot: StartDepot, before: Depot | None = None) -> Depot:
    """before: the killed server whose arena is taken over."""
    place = {} if before is None else {"url": before.url, "name": before.name}
    return start_depot("--verify", "always", arena_mib=ARENA_MIB, chunk_size=64, **place)


def stopped(start_driver: StartDriver, depot: Depot, step: str, is_store: bool, family: int) -> Worker:
    driver = start_driver(depot.url, **SIZE)
    if not is_store:
        assert driver.tell("store", family=family, chunks=CHUNKS) is True
    driver.tell("halt", step=step, chunks=CHUNKS, group=0)
    driver.send("begin_store" if is_store else "begin_retrieve", family=family, chunks=CHUNKS)
    driver.wait_stopped()
    return Worker(driver, step, is_store, family)


@pytest.fixture
def workers(start_driver: StartDriver, depot: Depot) -> list[Worker]:
    """At every step of a store, and of a load."""
    kinds = [(step, is_store) for is_store in (False, True) for step in STEPS]
    return [stopped(start_driver, depot, *kind, family) for family, kind in enumerate(kinds)]


@pytest.fixture
def depot(start_depot: StartDepot) -> Depot:
    return start(start_depot)


def families(workers: list[Worker], is_store: bool) -> list[int]:
    return [worker.family for worker in workers if worker.is_store is is_store]


def use_all_memory(other: Driver) -> None:
    """Another engine stores, and is given all memory that may be given away; its bytes stay whole."""
    for family in MANY:
        assert other.tell("store", family=family, chunks=CHUNKS) is True
    assert other.tell("hits", families=list(MANY), chunks=CHUNKS) > CHUNKS
    unharmed(other)


def unharmed(*drivers: Driver) -> None:
    for driver in drivers:
        assert not driver.tell("stats")["wrong"]


def all_memory_is_free(watcher: Watcher) -> bool:
    watcher.clear()
    return bool(watcher.status()["used_bytes"] == 0)


def test_others_go_on_while_workers_are_stopped_in_copies_which_then_end_whole(
    depot: Depot, workers: list[Worker], start_driver: StartDriver, watch: Watch
) -> None:
    other, watcher = start_driver(depot.url, **SIZE), watch(depot)
    use_all_memory(other)
    status = watcher.status()
    assert status["operations"] == len(workers)
    assert status["reserved_shards"] == CHUNKS * len(families(workers, is_store=True))
    assert {(worker.step, worker.is_store): worker.outcome(worker.go_on()) for worker in workers} == {
        (worker.step, worker.is_store): CHUNKS for worker in workers
    }
    assert other.tell("hits", families=families(workers, is_store=True), chunks=CHUNKS) == CHUNKS * len(STEPS)
    assert other.tell("hits", families=list(MANY), chunks=CHUNKS) > 0
    unharmed(other, *(worker.driver for worker in workers))
    settled(depot)
    assert all_memory_is_free(watcher)


def test_workers_killed_at_any_step_leave_nothing_unsealed_and_hold_nothing(
    depot: Depot, workers: list[Worker], start_driver: StartDriver, watch: Watch
) -> None:
    other, watcher = start_driver(depot.url, **SIZE), watch(depot)
    for worker in workers:
        worker.driver.kill()
    assert other.tell("hits", families=families(workers, is_store=True), chunks=CHUNKS) == 0
    assert other.tell("hits", families=families(workers, is_store=False), chunks=CHUNKS) == CHUNKS * len(STEPS)
    eventually(lambda: watcher.status()["operations"] == 0)
    use_all_memory(other)
    eventually(lambda: all_memory_is_free(watcher))
    status = settled(depot)
    assert status["instances"] == 1


@pytest.mark.parametrize("is_killed", [False, True], ids=["continued", "killed"])
def test_after_its_server_was_replaced_a_stopped_worker_writes_to_nobody_elses_bytes(
    depot: Depot,
    workers: list[Worker],
    start_depot: StartDepot,
    start_driver: StartDriver,
    watch: Watch,
    is_killed: bool,
) -> None:
    """is_killed: whether the workers are, in the end."""
    kill(depot)
    depot = start(start_depot, depot)
    other, watcher = start_driver(depot.url, **SIZE), watch(depot)
    assert other.tell("hits", families=families(workers, is_store=True), chunks=CHUNKS) == 0
    assert other.tell("hits", families=families(workers, is_store=False), chunks=CHUNKS) == CHUNKS * len(STEPS)
    use_all_memory(other)
    assert not all_memory_is_free(watcher), "what a stopped worker may still copy was given away"
    if is_killed:
        for worker in workers:
            worker.driver.kill()
    else:
        use_all_memory(other)
        outcomes = {(worker.step, worker.is_store): worker.outcome(worker.go_on()) for worker in workers}
        assert not any(outcomes.values()), outcomes
        assert other.tell("hits", families=families(workers, is_store=True), chunks=CHUNKS) == 0
        assert other.tell("hits", families=list(MANY), chunks=CHUNKS) > 0
        for worker in workers:
            eventually(lambda worker=worker: worker.driver.tell("reaches_server"))
            assert worker.driver.tell("store", family=2000 + worker.family, chunks=CHUNKS) is True
            assert worker.driver.tell("hits", families=[2000 + worker.family], chunks=CHUNKS) == CHUNKS
        unharmed(other, *(worker.driver for worker in workers))
    eventually(lambda: all_memory_is_free(watcher))
    settled(depot)


@pytest.mark.parametrize("is_store", [True, False], ids=["store", "load"])
@pytest.mark.parametrize("dies", ["nobody", "worker", "server"])
def test_a_copy_whose_completion_was_on_its_way_is_whole_or_not_there(
    depot: Depot, start_depot: StartDepot, start_driver: StartDriver, watch: Watch, is_store: bool, dies: str
) -> None:
    worker = stopped(start_driver, depot, "copied", is_store, family=1)
    suspend(depot.process.pid)
    request_id = worker.go_on()
    eventually(lambda: worker.driver.tell("is_completing"))
    assert worker.driver.tell("under_way") == [request_id]
    match dies:
        case "worker":
            worker.driver.kill()
        case "server":
            kill(depot)
            depot = start(start_depot, depot)
    os.kill(depot.process.pid, signal.SIGCONT)
    if dies != "worker":
        assert worker.outcome(request_id) == (CHUNKS if dies == "nobody" else 0)
        unharmed(worker.driver)
    watcher = watch(depot)
    eventually(lambda: watcher.status()["operations"] == 0)
    other = start_driver(depot.url, **SIZE)
    found = other.tell("hits", families=[1], chunks=CHUNKS)
    possible = {"nobody": {CHUNKS}, "worker": {0, CHUNKS}, "server": {0}}
    assert found in (possible[dies] if is_store else {CHUNKS})
    unharmed(other)
    eventually(lambda: all_memory_is_free(watcher))
