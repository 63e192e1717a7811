"""The server dies (-9), is started again, and comes back with its chunks; planned restarts keep or remove them."""

from __future__ import annotations

import random
import signal
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import SHM, Depot, StartDepot, eventually
from tests.faults.conftest import Driver, StartDriver, Watcher

pytestmark = pytest.mark.faults

STEP_S = 1.5
"""The most that a fault may hold up an engine's step, on a machine that is busy with other things too."""


def kill(depot: Depot) -> None:
    depot.process.kill()
    depot.process.wait(20)


def again(start_depot: StartDepot, depot: Depot, *flags: str, **options: Any) -> Depot:
    """Another server in the same place."""
    return start_depot(*flags, url=depot.url, name=depot.name, **options)


def traffic(drivers: list[Driver], **options: Any) -> None:
    for driver in drivers:
        driver.tell("start", **options)


def went_well(drivers: list[Driver], what: str) -> list[dict[str, Any]]:
    """What the engines did since they were asked last; no wrong byte, and no step that waited."""
    all_stats = [driver.tell("stats") for driver in drivers]
    for stats in all_stats:
        print(what, stats)
        assert not stats["wrong"]
        assert stats["step_max_s"] < STEP_S
        assert stats["lookup_max_s"] < STEP_S
    return all_stats


def test_engines_go_on_at_once_when_the_server_is_killed_while_they_store_and_retrieve(
    start_depot: StartDepot, start_driver: StartDriver
) -> None:
    chance = random.Random(1)
    options: dict[str, Any] = {"arena_mib": 24, "chunk_size": 64}
    depot = start_depot(**options)
    drivers = [start_driver(depot.url, seed=seed, blocks=160, width=64) for seed in range(3)]
    traffic(drivers, families=60, running=8)
    for number in range(10):
        time.sleep(chance.uniform(0.02, 0.3))  # the moment of the kill
        kill(depot)
        went_well(drivers, f"round {number}, until the kill")
        time.sleep(chance.choice([0.0, 0.3]))  # without a server
        for stats in went_well(drivers, f"round {number}, after the kill"):
            assert stats["steps"] > 0
        depot = again(start_depot, depot, **options)
    for driver in drivers:
        driver.tell("stats")
        eventually(lambda driver=driver: driver.tell("stats")["loaded_blocks"] > 0)
        assert not driver.tell("stop")["wrong"]
    assert drivers[0].tell("hits", families=list(range(60)), chunks=6) > 0
    assert not drivers[0].tell("stats")["wrong"]
    status = depot.status()
    assert status["instances"] == 3
    assert status["reserved_shards"] == status["holds"] == status["operations"] == status["sessions"] == 0


def test_without_a_server_engines_finish_their_requests(start_depot: StartDepot, start_driver: StartDriver) -> None:
    depot = start_depot(arena_mib=24, chunk_size=64)
    driver = start_driver(depot.url, blocks=160, width=64)
    traffic([driver], families=60)
    eventually(lambda: driver.tell("stats").get("loaded_blocks", 0))
    kill(depot)
    driver.tell("stats")
    finished = 0

    def count() -> int:
        nonlocal finished
        finished += went_well([driver], "alone")[0].get("requests", 0)
        return finished

    eventually(lambda: count() > 100)
    assert not driver.tell("stop")["wrong"]


def test_a_server_started_within_100_ms_has_the_chunks_back_and_engines_register_by_themselves(
    start_depot: StartDepot, start_driver: StartDriver, watch: Callable[[Depot], Watcher]
) -> None:
    options: dict[str, Any] = {"arena_mib": 128, "chunk_size": 64}
    depot = start_depot(**options)
    keeper = start_driver(depot.url, width=64)
    drivers = [start_driver(depot.url, seed=seed, width=64) for seed in range(2)]
    sealed = list(range(1000, 1100))
    for family in sealed:
        assert keeper.tell("store", family=family, chunks=6) is True
    traffic(drivers, families=60)
    for number in range(3):
        eventually(lambda: any(driver.tell("stats").get("loaded_blocks", 0) for driver in drivers))
        began = time.monotonic()
        kill(depot)
        depot = again(start_depot, depot, **options)
        answered_s = time.monotonic() - began
        hits = keeper.tell("hits", families=sealed, chunks=6)
        print(f"round {number}: answered {answered_s:.3f} s after the kill, {hits} of 600 chunks are back")
        assert hits >= 594
        went_well([keeper, *drivers], f"round {number}")
    for driver in drivers:
        stats = driver.tell("stop")
        assert not stats["wrong"]
    watcher = watch(depot)
    assert watcher.status()["instances"] == 3
    for driver in (keeper, *drivers):
        driver.kill()
    watcher.released_s()


def test_what_was_being_written_when_the_server_was_killed_is_gone_after_its_restart(
    start_depot: StartDepot, start_driver: StartDriver, watch: Callable[[Depot], Watcher]
) -> None:
    options: dict[str, Any] = {"arena_mib": 512, "chunk_size": 64}
    depot = start_depot("--copy-threads", "1", **options)
    driver = start_driver(depot.url, blocks=64, width=1 << 16)
    assert driver.tell("store", family=1, chunks=2) is True
    store = driver.tell("begin_store", family=2, chunks=12)
    watch(depot).wait_busy()
    depot.process.send_signal(signal.SIGSTOP)  # in the middle of the copy
    kill(depot)
    depot = again(start_depot, depot, **options)
    assert driver.tell("end_store", request_id=store) is False
    assert driver.tell("hits", families=[1], chunks=2) == 2
    assert driver.tell("hits", families=[2], chunks=12) == 0
    status = depot.status()
    assert status["chunks"] == 2 and status["used_bytes"] == status["namespaces"][0]["bytes"] >= 2 * (16 << 20)
    assert driver.tell("store", family=2, chunks=12) is True
    assert driver.tell("hits", families=[2], chunks=12) == 12
    assert not driver.tell("stats")["wrong"]


def test_100_000_chunks_are_back_within_a_second(start_depot: StartDepot, start_driver: StartDriver) -> None:
    chunks, families = 1000, list(range(100))
    options: dict[str, Any] = {"arena_mib": 1700, "chunk_size": 16}
    depot = start_depot(**options)
    driver = start_driver(depot.url, blocks=chunks, width=64)  # 4 KiB a chunk
    for family in families:
        assert driver.tell("store", family=family, chunks=chunks) is True
    assert depot.status()["chunks"] == 100_000
    kill(depot)
    began = time.monotonic()
    empty = start_depot(**options)
    without_s = time.monotonic() - began
    kill(empty)
    began = time.monotonic()
    depot = again(start_depot, depot, **options)
    with_s = time.monotonic() - began
    print(f"answers after {with_s:.3f} s with 100,000 chunks to take back, after {without_s:.3f} s with none")
    assert depot.status()["chunks"] >= 99_000
    assert with_s - without_s < 1.0
    assert sum(driver.tell("lookup", family=family, chunks=chunks) for family in families) >= 99_000
    assert driver.tell("hits", families=families[::10], chunks=chunks) >= 9_900
    assert not driver.tell("stats")["wrong"]


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
    assert driver.tell("hits", families=families, chunks=3) == 60
    assert depot.stop() == 0
    assert not (SHM / depot.name).exists()
    depot = again(start_depot, depot, **options)
    assert driver.tell("hits", families=families, chunks=3) == 0
    assert driver.tell("store", family=1, chunks=3) is True
    assert driver.tell("hits", families=[1], chunks=3) == 3
    assert not driver.tell("stats")["wrong"]


def test_an_arena_of_another_format_version_is_refused_with_what_to_do_and_left_alone(start_depot: StartDepot) -> None:
    depot = start_depot("--on-stop", "keep", arena_mib=4)
    assert depot.stop() == 0
    path = SHM / depot.name
    with path.open("r+b") as file:
        file.seek(8)
        (version,) = struct.unpack("<I", file.read(4))
        file.seek(8)
        file.write(struct.pack("<I", version + 1))
    before = path.read_bytes()
    other = Depot(url=depot.url, name=depot.name, arena_mib=4)
    try:
        assert other.process.wait(20) == 1
        said = other.logged()
        assert "version" in said and "remove" in said and str(path) in said
        assert path.read_bytes() == before
    finally:
        other.close()
