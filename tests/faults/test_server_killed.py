"""The server dies (-9), is started again, and comes back with its chunks; planned restarts keep or remove them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvdepot.cli.check import Audit, audit
from tests.conftest import SHM, Depot, StartDepot, eventually
from tests.faults.conftest import Driver, StartDriver, Watcher, settled
from tests.faults.tail_engine import CHUNKS, TOKENS
from tests.server.process import kill

pytestmark = pytest.mark.faults

WIDTHS = 8192, 4096
"""Bytes of a block of attention, and of a state."""


def again(start_depot: StartDepot, depot: Depot, *flags: str, **options: Any) -> Depot:
    """Another server in the same place."""
    return start_depot(*flags, url=depot.url, name=depot.name, **options)


def recovered(*drivers: Driver) -> None:
    """Wait until engines that did nothing to reach the new server reach it."""
    eventually(lambda: all(driver.tell("reaches_server") for driver in drivers))


def done(drivers: list[Driver]) -> list[dict[str, Any]]:
    """What engines did since they were asked last; no byte of it was wrong."""
    all_stats = [driver.tell("stats") for driver in drivers]
    assert not any(stats["wrong"] for stats in all_stats)
    return all_stats


def test_engines_go_on_when_the_server_is_killed_while_they_store_and_retrieve(
    start_depot: StartDepot, start_driver: StartDriver
) -> None:
    chance = random.Random(1)
    options: dict[str, Any] = {"arena_mib": 24, "chunk_size": 64}
    depot = start_depot(**options)
    drivers = [start_driver(depot.url, seed=seed, blocks=160, width=64) for seed in range(3)]
    for driver in drivers:
        driver.tell("start", families=60, running=8)
    for number in range(6):
        time.sleep(chance.uniform(0.02, 0.3))  # the moment of the kill
        kill(depot)
        done(drivers)
        if number % 2:  # some requests end while there is no server
            eventually(lambda: all(stats.get("requests", 0) for stats in done(drivers)))
        depot = again(start_depot, depot, **options)
    eventually(lambda: all(stats.get("loaded_blocks", 0) for stats in done(drivers)))
    for driver in drivers:
        assert not driver.tell("stop")["wrong"]
    assert drivers[0].tell("hits", families=list(range(60)), chunks=6) > 0
    assert not drivers[0].tell("stats")["wrong"]
    assert settled(depot)["instances"] == 3


def test_a_server_started_at_once_has_the_chunks_and_the_engines_back(
    start_depot: StartDepot, start_driver: StartDriver, watch: Callable[[Depot], Watcher]
) -> None:
    options: dict[str, Any] = {"arena_mib": 128, "chunk_size": 64}
    depot = start_depot(**options)
    keeper = start_driver(depot.url, width=64)
    drivers = [start_driver(depot.url, seed=seed, width=64) for seed in range(2)]
    sealed = list(range(1000, 1100))
    for family in sealed:
        assert keeper.tell("store", family=family, chunks=6) is True
    for driver in drivers:
        driver.tell("start", families=60)
    for _ in range(2):
        eventually(lambda: all(stats.get("loaded_blocks", 0) for stats in done(drivers)))
        kill(depot)
        depot = again(start_depot, depot, **options)
        recovered(keeper, *drivers)
        assert keeper.tell("hits", families=sealed, chunks=6) >= 594
        done([keeper, *drivers])
    for driver in drivers:
        stats = driver.tell("stop")
        assert not stats["wrong"]
    watcher = watch(depot)
    assert watcher.status()["instances"] == 3
    for driver in (keeper, *drivers):
        driver.kill()
    watcher.wait_released()


@pytest.mark.parametrize("group", [0, 1], ids=["attention", "state"])
def test_a_tail_that_was_being_written_at_a_kill_of_both_sides_is_gone(
    group: int, start_depot: StartDepot, start_driver: StartDriver, watch: Callable[[Depot], Watcher]
) -> None:
    """group: whose part of the tail is cut off: the first, or the second while the first is sealed."""
    options: dict[str, Any] = {"chunk_size": TOKENS}
    flags = "--verify", "always"
    depot = start_depot(*flags, **options)
    driver = start_driver(depot.url, widths=WIDTHS)
    driver.tell("store_whole")
    stored, cut_off = 1, 2
    assert driver.tell("store", tokens=stored) is True
    driver.tell("halt", step="half", chunks=1, group=group)
    driver.send("begin_store", tokens=cut_off, continues=stored)
    driver.wait_stopped()
    watcher = watch(depot)
    eventually(lambda: watcher.status()["operations"] == 2 - group)
    kill(depot)
    driver.kill()
    sound(depot, [stored], halves=group)
    depot = again(start_depot, depot, *flags, **options)
    driver = start_driver(depot.url, widths=WIDTHS)
    assert driver.tell("found", tails=[cut_off]) == CHUNKS * TOKENS
    assert driver.tell("found", tails=[cut_off, stored]) == CHUNKS * TOKENS + stored
    assert driver.tell("store", tokens=cut_off) is True
    assert driver.tell("found", tails=[cut_off]) == CHUNKS * TOKENS + cut_off
    assert driver.tell("store", tokens=60, continues=cut_off) is True
    assert driver.tell("found", tails=[60, cut_off]) == CHUNKS * TOKENS + 60
    status = settled(depot)
    kill(depot)
    report = sound(depot, [stored, cut_off, 60])
    assert (report.used_bytes, report.chunks) == (status["used_bytes"], status["chunks"])


def sound(depot: Depot, tails: list[int], halves: int = 0) -> Audit:
    """The audit of a killed server's arena: it has these tails, each record its bytes, and memory is accounted.

    halves: tails of which only the first part is there.
    """
    report = audit(SHM, depot.name)
    first, second = CHUNKS + len(tails) + halves, 1 + len(tails)
    assert not report.problems and report.summed_shards == report.shards == report.chunks == first + second
    assert report.used_bytes == first * WIDTHS[0] + second * WIDTHS[1]
    return report


def test_a_planned_restart_keeps_the_arena_when_asked_to_and_removes_it_otherwise(
    start_depot: StartDepot, start_driver: StartDriver
) -> None:
    options: dict[str, Any] = {"arena_mib": 16, "chunk_size": 64}
    depot = start_depot("--on-stop", "keep", **options)
    driver = start_driver(depot.url, width=64)
    families = list(range(20))
    for family in families:
        assert driver.tell("store", family=family, chunks=3) is True
    assert depot.stop() == 0
    assert (SHM / depot.name).exists()
    depot = again(start_depot, depot, **options)  # without the flag: removed at its end
    recovered(driver)
    assert driver.tell("hits", families=families, chunks=3) == 60
    assert depot.stop() == 0
    assert not (SHM / depot.name).exists()
    depot = again(start_depot, depot, **options)
    recovered(driver)
    assert driver.tell("hits", families=families, chunks=3) == 0
    assert driver.tell("store", family=1, chunks=3) is True
    assert driver.tell("hits", families=[1], chunks=3) == 3
    assert not driver.tell("stats")["wrong"]
