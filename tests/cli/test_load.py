"""`kvdepot bench --url`: what it measures on a running server, and that it leaves nothing there."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from kvdepot import cli
from kvdepot.cli import load
from kvdepot.client import admin
from tests.cli.command import run, terminal
from tests.client.engine import CHUNK, Engine
from tests.conftest import Depot, StartDepot, eventually

pytestmark = pytest.mark.faults

SMALL = ("-c", "2", "-n", "20", "--prompts", "4", "--chunks", "2", "--chunk-bytes", "16KiB")


def test_a_running_server_is_measured_and_left_as_it_was(start_depot: StartDepot, tmp_path: Path) -> None:
    tier = f"disk://{tmp_path}/kv"
    depot = start_depot("--tiers", f"{tier}?capacity_gib=1", arena_mib=8)
    engine = Engine(depot)
    engine.store([1] * CHUNK, [0, 1, 2, 3])
    before = depot.status()
    done = run("bench", "--url", depot.url, *SMALL, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert [(each["kind"], each["requests"], each["failed"]) for each in said["results"]] == [
        ("store", 4, 0), ("lookup", 20, 0), ("retrieve", 20, 0),
    ]  # fmt: skip
    assert all(each["per_s"] > 0 and 0 < each["p50_s"] <= each["p99_s"] for each in said["results"])
    # A chunk that the tier is still writing goes when that has ended.
    after = eventually(lambda: (now := depot.status())["chunks"] == before["chunks"] and now)
    assert after["used_bytes"] == before["used_bytes"]
    assert after["asked_tokens"] == before["asked_tokens"], "no lookup of an engine"
    assert after["stored_bytes"] - before["stored_bytes"] == 4 * 2 * (16 << 10)
    assert engine.lookup([1] * CHUNK) == CHUNK
    head, *rows = (line.split() for line in run("bench", "-u", depot.url, *SMALL).stdout.splitlines())
    assert head == ["requests", "requests/s", "GB/s", "p50", "p99"]
    assert [row[0] for row in rows] == ["store", "lookup", "retrieve"]
    assert [row[3] == "-" for row in rows] == [False, True, False], "a lookup moves no bytes"
    engine.close()


def test_rates_are_of_all_clients_in_the_time_that_passed() -> None:
    one, other = (load._Done([0.05] * 10, 0, began, began + 1.0) for began in (5.0, 6.0))
    assert load._rate([one]) == 10, "with the time between requests"
    assert load._rate([one, other]) == 10, "one after the other"
    assert load._rate([one, one]) == 20, "at the same time"


def test_a_client_waits_for_the_others_before_it_begins(depot: Depot) -> None:
    """The requests of one that began earlier would not be measured under the load of all."""
    plan = load.Plan(depot.url, "", load.MODEL + "wait", 1, 1, 1, 16 << 10)
    before = depot.status()["stored_bytes"]
    with load._started(plan) as client:
        load._answer(client)
        load._say(client, "store")
        assert load._answer(client) == {}
        assert depot.status()["stored_bytes"] == before, "prepared, but nothing is sent"
        load._say(client, "go")
        done = load._answer(client)
        assert done["failed"] == 0 and 0 < done["times_s"][0] <= done["ended_s"] - done["began_s"]
    with admin.connect(depot.url) as other:
        admin.forget(other, plan.model, "")


def test_what_would_evict_others_chunks_is_refused(start_depot: StartDepot) -> None:
    depot = start_depot(arena_mib=8)
    engine = Engine(depot)
    engine.store([1] * CHUNK, [0, 1, 2, 3])
    large = ("--prompts", "9", "--chunks", "1", "--chunk-bytes", "1MiB", "-n", "1", "-c", "1")
    done = run("bench", "--url", depot.url, *large)
    assert (done.returncode, done.stdout) == (2, "")
    assert "9 MiB would be stored" in done.stderr and "--yes" in done.stderr
    assert engine.lookup([1] * CHUNK) == CHUNK
    assert depot.status()["evicted_chunks"] == 0
    done = run("bench", "--url", depot.url, *large, "--yes")
    assert done.returncode == 1 and "missed stored chunks" in done.stderr, "nor do nine fit into eight"
    assert depot.status()["evicted_chunks"] > 0
    engine.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_measurement_leaves_nothing(start_depot: StartDepot, number: int) -> None:
    depot = start_depot(arena_mib=8)
    with terminal("bench", "--url", depot.url, *SMALL, "-n", "10000000") as shown:
        eventually(lambda: "store " in shown.text)
        os.killpg(shown.process.pid, number)
        assert shown.end() == 130
        assert "Traceback" not in shown.text
    eventually(lambda: depot.status()["chunks"] == 0)
    eventually(lambda: depot.status()["instances"] == 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--url", "URL", "--tiny"], "--url measures a running server"),
        (["--url", "URL", "--chunk-bytes", "1"], "between 4KiB and 1GiB"),
        (["--url", "URL", "--chunk-bytes", "much"], "'much' is not a size"),
        (["--url", "URL", "-c", "0"], "--clients"),
        (["--url", "URL", "--key", "/nothing/there"], "kvdepot keygen"),
    ],
)
def test_what_cannot_be_measured_is_said(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *(word.replace("URL", f"ipc://{tmp_path}/none") for word in words)]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
