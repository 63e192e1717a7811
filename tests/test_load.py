"""bench/load.py: what it measures on a running server, and that it leaves nothing there."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvdepot.client import admin
from tests.cli.command import heed_signals
from tests.client.engine import CHUNK, Engine
from tests.conftest import HANG_S, Depot, StartDepot, eventually

pytestmark = pytest.mark.faults

SCRIPT = Path(__file__).parents[1] / "bench" / "load.py"
SMALL = ("-c", "2", "-n", "20", "--prompts", "4", "--chunks", "2", "--chunk-bytes", "16KiB")


def _imported() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_load", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # msgspec looks up the types of fields there
    spec.loader.exec_module(module)
    return module


load = _imported()


def run(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=HANG_S, check=False, **options
    )


def test_a_running_server_is_measured_and_left_as_it_was(start_depot: StartDepot, tmp_path: Path) -> None:
    tier = f"disk://{tmp_path}/kv"
    depot = start_depot("--tiers", f"{tier}?capacity_gib=1", arena_mib=8)
    engine = Engine(depot)
    engine.store([1] * CHUNK, [0, 1, 2, 3])
    before = depot.status()
    done = run("--url", depot.url, *SMALL, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert [(each["kind"], each["requests"], each["failed"]) for each in said["results"]] == [
        ("store", 4, 0), ("lookup", 20, 0), ("retrieve", 20, 0),
    ]  # fmt: skip
    assert all(each["per_s"] > 0 and 0 < each["p50_s"] <= each["p99_s"] for each in said["results"])
    # A chunk that the tier is still writing goes when that has ended.
    after = eventually(lambda: (now := depot.status())["chunks"] == before["chunks"] and now)
    assert after["used_bytes"] == before["used_bytes"]
    assert after["tokens"] == before["tokens"], "no lookup of an engine"
    assert after["stored_bytes"] - before["stored_bytes"] == 4 * 2 * (16 << 10)
    assert engine.lookup([1] * CHUNK) == CHUNK
    head, *rows = (line.split() for line in run("-u", depot.url, *SMALL).stdout.splitlines())
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
    done = run("--url", depot.url, *large)
    assert (done.returncode, done.stdout) == (2, "")
    assert "9 MiB would be stored" in done.stderr and "--yes" in done.stderr
    assert engine.lookup([1] * CHUNK) == CHUNK
    assert depot.status()["evicted_chunks"] == 0
    done = run("--url", depot.url, *large, "--yes")
    assert done.returncode == 1 and "missed stored chunks" in done.stderr, "nor do nine fit into eight"
    assert depot.status()["evicted_chunks"] > 0
    engine.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_measurement_leaves_nothing(start_depot: StartDepot, number: int) -> None:
    depot = start_depot(arena_mib=8)
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), "--url", depot.url, *SMALL, "-n", "10000000"], stdout=subprocess.PIPE, text=True,
        preexec_fn=heed_signals,
    ) as running:  # fmt: skip
        assert running.stdout is not None
        while not running.stdout.readline().startswith("store "):
            pass
        os.kill(running.pid, number)
        assert running.wait(HANG_S) == 130
    eventually(lambda: depot.status()["chunks"] == 0)
    eventually(lambda: depot.status()["instances"] == 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--chunk-bytes", "1"], "between 4KiB and 1GiB"),
        (["--chunk-bytes", "much"], "'much' is not a size"),
        (["-c", "0"], "--clients"),
        (["--key", "/nothing/there"], "kvdepot keygen"),
    ],
)
def test_what_cannot_be_measured_is_said(words: list[str], said: str, tmp_path: Path) -> None:
    done = run("--url", f"ipc://{tmp_path}/none", *words)
    assert done.returncode == 2 and said in " ".join(done.stderr.split())


def test_the_clients_import_nothing_from_the_working_directory(depot: Depot, tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit(99)")
    small = ("-c", "1", "-n", "1", "--prompts", "1", "--chunks", "1", "--chunk-bytes", "4KiB")
    assert "retrieve" in run("--url", depot.url, *small, cwd=tmp_path).stdout
