"""An engine whose processes disagree on the identity of its KV stores and loads nothing, and an operator sees it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conftest import StartDepot, eventually
from tests.vllm.conftest import StartEngine
from tests.vllm.engines import nothing_is_held, output, prompt

CHUNKS = 4


def _shown(url: str) -> str:
    """What `kvdepot status` says of a server."""
    command = [sys.executable, "-m", "kvdepot.cli", "status", "--url", url]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def test_a_worker_that_disagrees_with_its_scheduler_stores_and_loads_nothing(
    start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    depot = start_depot(arena_mib=64)
    tokens, others = prompt(95, CHUNKS * 256 + 17), prompt(96, CHUNKS * 256 + 17)

    def start(engine_id: str) -> Any:
        transfer = {
            "kv_connector": "KVDepotConnector", "kv_role": "kv_both", "engine_id": engine_id,
            "kv_connector_extra_config": {"kvdepot.url": depot.url},
        }  # fmt: skip
        return start_engine(
            models["gqa"], depot.url, kv_transfer_config=transfer, distributed_executor_backend="mp",
            worker_extension_cls="tests.vllm.dividing.Extension",
        ).wait_started()  # fmt: skip

    whole = start("whole")
    expected, unseen = whole.run(tokens), whole.run(others, salt="its own")
    eventually(lambda: nothing_is_held(depot.status()))
    assert depot.status()["divided_engines"] == 0
    before = depot.status()["counters"]
    assert "disagree" not in _shown(depot.url)
    divided = start("divided")
    for number in range(2):
        assert output(divided.run_fresh(tokens)) == output(expected), number
        assert output(divided.run_fresh(others)) == output(unseen), number
    eventually(lambda: nothing_is_held(depot.status()))
    status = depot.status()
    assert status["counters"]["hit_chunks"] > before.get("hit_chunks", 0), "the scheduler finds the other engine's KV"
    for counter in ("stored_chunks", "known_chunks", "retrieved_chunks"):
        assert status["counters"].get(counter, 0) == before.get(counter, 0), counter
    assert status["divided_engines"] == 1
    assert "1 engine: scheduler and workers disagree on the identity of the KV" in _shown(depot.url)
    assert divided.logged().count("disagree on the identity of its KV") == 1
    divided.tell("stop")
    assert divided.wait() == 0
    eventually(lambda: depot.status()["divided_engines"] == 0)
    whole.stop()
