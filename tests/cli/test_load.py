"""`kvdepot bench --url`: what it measures on a running server, and that it leaves nothing there."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from kvdepot import cli
from tests.cli.command import run, terminal
from tests.client.engine import CHUNK, Engine
from tests.conftest import StartDepot, eventually

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
    after = depot.status()
    assert (after["chunks"], after["used_bytes"]) == (before["chunks"], before["used_bytes"])
    assert after["asked_tokens"] == before["asked_tokens"], "no lookup of an engine"
    assert after["stored_bytes"] - before["stored_bytes"] == 4 * 2 * (16 << 10)
    assert engine.lookup([1] * CHUNK) == CHUNK
    assert [line.split()[0] for line in run("bench", "-u", depot.url, *SMALL).stdout.splitlines()] == [
        "store", "lookup", "retrieve",
    ]  # fmt: skip
    engine.close()


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
    assert done.returncode == 1 and "did not find what was stored" in done.stderr, "nor do nine fit into eight"
    assert depot.status()["evicted_chunks"] > 0
    engine.close()


def test_an_interrupted_measurement_leaves_nothing(start_depot: StartDepot) -> None:
    depot = start_depot(arena_mib=8)
    with terminal("bench", "--url", depot.url, *SMALL, "-n", "10000000") as shown:
        eventually(lambda: "store " in shown.text)
        os.killpg(shown.process.pid, signal.SIGINT)
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
