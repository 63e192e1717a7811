"""A server that is stopped (SIGSTOP) for 30 s and goes on. It sleeps while the other tests of this folder run."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvdepot.client import MessageQueueClient
from tests.conftest import StartDepot
from tests.faults.conftest import SLEEP_S

pytestmark = pytest.mark.faults

LOOKUP_S = 1.5
"""A lookup's deadline is 1 s; the rest is for the engine's own step."""


@pytest.fixture(scope="module")
def slept(asleep: Future[dict[str, Any]]) -> dict[str, Any]:
    return asleep.result(240)


def test_lookups_answer_0_within_their_deadline_while_the_server_sleeps(slept: dict[str, Any]) -> None:
    _, busy, asking = slept["stats"]
    print(f"slept {slept['slept_s']:.1f} s; busy: {busy}; asking: {asking}")
    assert slept["slept_s"] >= SLEEP_S
    assert len(slept["lookups"]) >= 5 and set(slept["lookups"]) == {0}
    for stats in (busy, asking):
        assert 0 < stats["lookup_max_s"] < LOOKUP_S + slept["stalled_s"]
    assert busy["steps"] > 100
    assert busy["step_max_s"] < LOOKUP_S + slept["stalled_s"]


def test_no_block_is_given_back_that_a_sleeping_server_may_still_touch(slept: dict[str, Any]) -> None:
    assert len(slept["under_way"]) >= 5
    assert all(under_way == slept["begun"] for under_way in slept["under_way"])
    assert not any(slept["wrong"])


def test_after_its_sleep_the_server_and_its_engines_are_well_again(slept: dict[str, Any]) -> None:
    print(f"all transfers ended {slept['recovered_s']:.2f} s after SIGCONT; stores {slept['stored']}; {slept['hits']}")
    assert slept["failed_blocks"] == 0
    assert slept["stored"] == [True, True]
    retrieved, stored, narrow = slept["hits"]
    assert retrieved == 4 and stored == 3 and narrow > 0
    assert not any(slept["wrong"])
    status = slept["status"]
    assert status["instances"] == 3
    assert status["reserved_shards"] == status["holds"] == status["operations"] == 0


def test_a_new_client_waits_the_5_s_it_promises_also_for_a_server_that_connects_before_it_answers(
    start_depot: StartDepot,
) -> None:
    """As a server does that is taking many chunks back: its socket is there, the one that answers is busy."""
    depot = start_depot(arena_mib=4)
    assert depot.stop() == 0
    deaf = depot.context.socket(zmq.ROUTER)
    deaf.bind(depot.url)
    client = MessageQueueClient(depot.url, depot.context)

    def replace() -> None:
        deaf.close(0)
        Path(depot.url.removeprefix("ipc://")).unlink(missing_ok=True)
        start_depot(url=depot.url, name=depot.name, arena_mib=4)

    later = threading.Timer(1.5, replace)
    later.start()
    try:
        assert client.learn_chunk_size(5.0) == 256
    finally:
        later.join()
        client.close()
