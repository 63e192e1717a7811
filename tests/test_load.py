"""bench/load.py: what it measures on a running server, and that it leaves nothing there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.client.engine import CHUNK, Engine
from tests.conftest import HANG_S, StartDepot, eventually

pytestmark = pytest.mark.faults

SCRIPT = Path(__file__).parents[1] / "bench" / "load.py"
SMALL = ("-c", "2", "-n", "20", "--prompts", "4", "--chunks", "2", "--chunk-bytes", "16KiB")


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
