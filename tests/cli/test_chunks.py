"""`kvdepot warm` and `kvdepot forget`; commands that change something ask first."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.cli.command import run, terminal
from tests.client.engine import CHUNK, Engine
from tests.conftest import Depot, StartDepot, eventually


@pytest.mark.faults
def test_warm_and_forget_say_what_they_did(depot: Depot, used: Engine, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps([1] * CHUNK))
    which = ("--tokens", str(prompt), "--model", used.model, "--url", depot.url)
    done = run("warm", *which, "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"chunks": 1, "in_memory": 1}), done.stderr
    done = run("forget", "--model", used.model, "--url", depot.url, "--json", "--yes")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"memory": 2})
    done = run("warm", *which)
    assert (done.returncode, done.stdout) == (1, "0 of 1 chunk in memory; no tier has the next one\n")


@pytest.mark.faults
def test_a_dry_run_counts_and_forget_fails_if_chunks_may_remain(start_depot: StartDepot, tmp_path: Path) -> None:
    tier = f"disk://{tmp_path}/kv"
    depot = start_depot("--tiers", f"{tier}?capacity_gib=1", "redis://127.0.0.1:1")
    engine = Engine(depot)
    for number in (1, 2):
        engine.store([number] * CHUNK, [0, 1, 2, 3])
    there = eventually(lambda: (now := depot.status())["tiers"][0]["objects"] == 2 and now)
    done = run("forget", "--all", "--dry-run", "--json", "--url", depot.url)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["memory"] == {"chunks": 2, "bytes": there["used_bytes"]}
    assert found["tiers"][tier] == {"objects_at_most": 2, "bytes_at_most": there["tiers"][0]["bytes"]}
    lines = run("forget", "--model", engine.model, "--dry-run", "--url", depot.url).stdout.splitlines()
    assert re.fullmatch(r"memory: 2 chunks, [\d.]+ KiB", lines[0])
    assert re.fullmatch(rf"{re.escape(tier)}: at most 2 objects, [\d.]+ KiB", lines[1])
    assert lines[2].endswith("other servers that share this tier lose them, too") and "dry run" in lines[3]
    assert engine.lookup([1] * CHUNK) == CHUNK
    done = run("forget", "--model", engine.model[:-1], "--url", depot.url, "-y")
    assert done.returncode == 1
    assert done.stdout.splitlines()[:2] == ["memory: 2 chunks", f"{tier}: 2 chunks"]
    engine.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--model, --salt or --all"),
        (["--all", "--model", "m", "--yes"], "--all forgets everything"),
        (["--all", "--salt", "s", "--yes"], "--all forgets everything"),
        (["--all"], "confirm with --yes, or see what would happen with --dry-run"),
        (["--model", "m"], "confirm with --yes"),
    ],
    ids=str,
)
def test_forget_refuses_an_ambiguous_scope_and_asks_for_consent(words: list[str], said: str, tmp_path: Path) -> None:
    done = run("forget", *words, "--url", f"ipc://{tmp_path}/none.sock")
    assert (done.returncode, done.stdout) == (2, "") and said in done.stderr


@pytest.mark.faults
@pytest.mark.parametrize(("answer", "code"), [("\n", 1), ("no\n", 1), ("\x04", 130), ("SIGINT", 130), ("y\n", 0)])
def test_on_a_terminal_the_question_shows_what_would_go(depot: Depot, used: Engine, answer: str, code: int) -> None:
    with terminal("forget", "--all", "--url", depot.url) as shown:
        eventually(lambda: "[y/N]" in shown.text)
        assert re.search(r"memory: \d+ chunks, [\d.]+ [KM]iB", shown.text)
        if answer == "SIGINT":
            os.killpg(shown.process.pid, signal.SIGINT)
        else:
            shown.press(answer)
        assert shown.end() == code and "Traceback" not in shown.text
    assert used.lookup([1] * CHUNK) == (CHUNK if code else 0)
