"""A server that is stopped (SIGSTOP) for longer than any deadline of its clients, and goes on."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from tests.conftest import Depot, eventually, suspend
from tests.faults.conftest import Nursery, Watcher, is_zombie

pytestmark = pytest.mark.faults

STALE_S = 2.0
"""After so long engines of these tests suspect that an answer was lost (client/connection.py)."""
SLEEP_S = 3 * STALE_S


@pytest.fixture(scope="module")
def slept(nursery: Nursery) -> dict[str, Any]:
    """What a server's sleep did to its engines."""
    depot = Depot(chunk_size=64)
    idle, busy, asking = drivers = [nursery.spawn() for _ in range(3)]
    watcher = None
    try:
        depot.wait_ready()
        watcher = Watcher(depot)
        for driver, model in zip(drivers, ("idle", "busy", "busy"), strict=True):
            driver.tell("open", url=depot.url, model=model, stale_s=STALE_S, blocks=200)
        assert idle.tell("store", family=1, chunks=4) is True
        busy.tell("start", families=40)
        eventually(lambda: busy.tell("stats").get("loaded_blocks", 0))
        suspend(depot.process.pid)
        began = time.monotonic()
        begun = [idle.tell("begin_store", family=3, chunks=3), idle.tell("begin_retrieve", family=1, chunks=4)]
        under_way: list[list[str]] = []
        lookups: list[int] = []
        while time.monotonic() - began < SLEEP_S:
            time.sleep(0.5)
            under_way.append(idle.tell("under_way"))
            lookups.append(asking.tell("lookup", family=len(lookups), chunks=3))
        asleep_stats = [driver.tell("stats") for driver in drivers]
        depot.process.send_signal(signal.SIGCONT)
        stored = idle.tell("end_store", request_id=begun[0])
        failed = idle.tell("end_retrieve", request_id=begun[1])
        stop_stats = busy.tell("stop")
        result: dict[str, Any] = {
            "begun": sorted(begun),
            "under_way": under_way,
            "lookups": lookups,
            "stats": asleep_stats,
            "stored": stored,
            "failed_blocks": failed,
            "hits": [
                idle.tell("hits", families=[1], chunks=4), idle.tell("hits", families=[3], chunks=3),
                asking.tell("hits", families=list(range(40)), chunks=6),
            ],
            "wrong": [stop_stats["wrong"], *(driver.tell("stats")["wrong"] for driver in drivers)],
        }  # fmt: skip
        # An engine without requests makes no call, and the end of a session may wait in its client for the next one.
        eventually(lambda: not busy.tell("is_cut_off") and watcher.status()["sessions"] == 0)
        result["status"] = watcher.status()
        return result
    finally:
        depot.process.send_signal(signal.SIGCONT)
        for driver in drivers:
            if not is_zombie(driver.pid):
                os.kill(driver.pid, signal.SIGKILL)
            driver.close()
        if watcher is not None:
            watcher.close()
        depot.close()


def test_lookups_answer_0_and_engines_go_on_while_the_server_sleeps(slept: dict[str, Any]) -> None:
    _, busy, _ = slept["stats"]
    assert len(slept["lookups"]) >= 3 and set(slept["lookups"]) == {0}  # each was answered before the server went on
    assert busy["steps"] > 50


def test_what_a_sleeping_server_was_asked_stays_under_way_until_it_answers(slept: dict[str, Any]) -> None:
    assert len(slept["under_way"]) >= 3
    assert all(under_way == slept["begun"] for under_way in slept["under_way"])
    assert not any(slept["wrong"])


def test_after_its_sleep_the_server_and_its_engines_are_well_again(slept: dict[str, Any]) -> None:
    assert slept["failed_blocks"] == 0
    assert slept["stored"] is True
    retrieved, stored, busy = slept["hits"]
    assert retrieved == 4 and stored == 3 and busy > 0
    assert not any(slept["wrong"])
    status = slept["status"]
    assert status["instances"] == 3
    assert status["reserved_shards"] == status["holds"] == status["operations"] == 0
