"""The commands for chunks: warm, pin, forget, check."""

from __future__ import annotations

import json
import os
import re
import signal
import uuid
from pathlib import Path

import pytest

from tests.cli.command import run, terminal
from tests.client.engine import CHUNK, Engine
from tests.conftest import Depot, StartDepot, eventually


@pytest.mark.faults
def test_what_people_do_to_chunks_is_told_as_json(depot: Depot, used: Engine, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps([1] * CHUNK))
    which = ("--tokens", str(prompt), "--model", used.model, "--url", depot.url, "--json")
    done = run("warm", *which)
    assert (done.returncode, json.loads(done.stdout)) == (0, {"chunks": 1, "in_memory": 1}), done.stderr
    name = f"pin-{uuid.uuid4().hex[:6]}"
    done = run("pin", name, *which)
    assert (done.returncode, json.loads(done.stdout)) == (0, {"chunks": 1, "pinned": 1}), done.stderr
    assert name in run("status", "--url", depot.url).stdout
    done = run("unpin", name, "--url", depot.url, "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"unpinned": name})
    done = run("unpin", name, "--url", depot.url, "--json")
    assert done.returncode == 1 and name in done.stderr
    done = run("forget", "--model", used.model, "--url", depot.url, "--json", "--yes")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"memory": 2})
    prompt.write_text(json.dumps([3] * CHUNK))
    done = run("warm", *which)
    assert (done.returncode, json.loads(done.stdout)) == (1, {"chunks": 1, "in_memory": 0})


@pytest.mark.faults
def test_a_pin_of_a_prompt_that_is_not_stored_yet_tells_what_becomes_of_it(
    depot: Depot, used: Engine, tmp_path: Path
) -> None:
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps([4] * CHUNK))
    which = ("--tokens", str(prompt), "--model", used.model, "--url", depot.url)
    done = run("pin", "later", *which)
    told = "pin later: 0 of 1 chunk; the others are not in memory: it takes those that engines store within the next"
    assert (done.returncode, done.stdout) == (0, f"{told} minute\n"), done.stderr
    used.store([4] * CHUNK, [0, 1, 2, 3])
    eventually(lambda: [each["chunks"] for each in depot.status()["leases"] if each["name"] == "later"] == [1])
    assert run("pin", "later", *which).stdout == "pin later: 1 of 1 chunk\n"
    assert run("unpin", "later", "--url", depot.url).returncode == 0


@pytest.mark.faults
def test_what_may_be_left_in_a_tier_is_no_success(start_depot: StartDepot, tmp_path: Path) -> None:
    tier = f"disk://{tmp_path}/kv?capacity_gib=1"
    depot = start_depot("--tiers", tier)
    engine = Engine(depot)
    engine.store([1] * CHUNK, [0, 1, 2, 3])
    eventually(lambda: depot.status()["tiers"][0]["counters"].get("saved_chunks", 0) == 1)
    done = run("forget", "--model", engine.model[:-1], "--url", depot.url, "-y")
    assert done.returncode == 1
    assert done.stdout.splitlines()[:2] == ["memory: 1 chunk", f"disk://{tmp_path}/kv: 1 chunk"]
    assert "name those in full" in done.stdout
    done = run("forget", "--model", engine.model, "--url", depot.url, "-y")
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 2)
    engine.close()


def test_what_is_to_be_forgotten_must_be_said(depot: Depot) -> None:
    done = run("forget", "--url", depot.url)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--model, --salt or --all" in done.stderr


@pytest.mark.parametrize("words", [["--all", "--model", "m"], ["--all", "--salt", "s"]], ids=" ".join)
def test_to_forget_everything_and_one_thing_is_a_contradiction(words: list[str], depot: Depot) -> None:
    done = run("forget", *words, "--yes", "--url", depot.url)
    assert done.returncode == 2
    assert "--all forgets everything" in done.stderr


@pytest.mark.faults
def test_a_mistyped_model_is_named_and_nothing_of_others_is_forgotten(depot: Depot, used: Engine) -> None:
    for words in (["--dry-run"], ["--yes"]):
        done = run("forget", "--model", "nosuch", *words, "--url", depot.url)
        assert done.returncode == 0, "tiers may have it"
        assert "no model of this server has a name that begins with 'nosuch'; models: " in done.stderr
        assert used.model in done.stderr and "memory: 0 chunks" in done.stdout
    assert "begins with" not in run("forget", "-m", used.model, "--dry-run", "--url", depot.url).stderr


@pytest.mark.faults
def test_to_forget_everything_wants_yes_where_nobody_can_be_asked(depot: Depot, used: Engine) -> None:
    done = run("forget", "--all", "--url", depot.url)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--yes" in done.stderr and "--dry-run" in done.stderr
    assert used.lookup([1] * CHUNK) == CHUNK
    done = run("forget", "--all", "--yes", "--json", "--url", depot.url)
    assert (done.returncode, json.loads(done.stdout)["memory"] >= 2) == (0, True), done.stderr
    assert used.lookup([1] * CHUNK) == 0


@pytest.mark.faults
def test_a_dry_run_tells_what_would_be_forgotten_and_forgets_nothing(start_depot: StartDepot, tmp_path: Path) -> None:
    tier = f"disk://{tmp_path}/kv"
    depot = start_depot("--tiers", f"{tier}?capacity_gib=1")
    engine = Engine(depot)
    for number in (1, 2):
        engine.store([number] * CHUNK, [0, 1, 2, 3])
    eventually(lambda: depot.status()["tiers"][0]["objects"] == 2)
    told = depot.status()
    done = run("forget", "--all", "--dry-run", "--json", "--url", depot.url)
    assert done.returncode == 0, done.stderr
    there = told["tiers"][0]
    assert json.loads(done.stdout) == {
        "memory": {"chunks": 2, "bytes": told["used_bytes"]},
        "tiers": {tier: {"objects_at_most": 2, "bytes_at_most": there["bytes"]}},
    }
    done = run("forget", "--model", engine.model, "--dry-run", "--url", depot.url)
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert re.fullmatch(r"memory: 2 chunks, [\d.]+ KiB", lines[0])
    assert re.fullmatch(rf"{tier}: at most 2 objects, [\d.]+ KiB", lines[1])
    assert "nothing was removed" in lines[2]
    done = run("forget", "--salt", "nobody's", "--dry-run", "--json", "--url", depot.url)
    assert json.loads(done.stdout)["memory"] == {"chunks": 0, "bytes": 0}
    assert engine.lookup([1] * CHUNK) == CHUNK
    engine.close()


@pytest.mark.faults
def test_to_forget_one_model_wants_yes_too_and_names_what_other_servers_lose(
    start_depot: StartDepot, tmp_path: Path
) -> None:
    depot = start_depot("--tiers", f"disk://{tmp_path}/kv?capacity_gib=1", "redis://127.0.0.1:1")
    engine = Engine(depot)
    engine.store([1] * CHUNK, [0, 1, 2, 3])
    done = run("forget", "-m", engine.model, "-u", depot.url)
    assert (done.returncode, done.stdout) == (2, "") and "--yes" in done.stderr
    lines = run("forget", "-m", engine.model, "--dry-run", "-u", depot.url).stdout.splitlines()
    assert [line.endswith("other servers that share this tier lose them, too") for line in lines] == [
        False, False, True, False,
    ]  # fmt: skip
    assert engine.lookup([1] * CHUNK) == CHUNK
    engine.close()


@pytest.mark.faults
@pytest.mark.parametrize("answer", ["\n", "no\n", "\x04"], ids=["enter", "no", "end of input"])
def test_to_forget_everything_asks_on_a_terminal_with_what_would_go(depot: Depot, used: Engine, answer: str) -> None:
    with terminal("forget", "--all", "--url", depot.url) as shown:
        eventually(lambda: "[y/N]" in shown.text)
        assert re.search(r"memory: \d+ chunks, [\d.]+ [KM]iB", shown.text)
        shown.press(answer)
        assert shown.end() == 1
        assert "nothing was changed" in shown.text
    assert used.lookup([1] * CHUNK) == CHUNK
    with terminal("forget", "--all", "--url", depot.url) as shown:
        eventually(lambda: "[y/N]" in shown.text)
        shown.press("y\n")
        assert shown.end() == 0
        assert re.search(r"[\r\n]memory: \d+ chunks\r\n", shown.text)
    assert used.lookup([1] * CHUNK) == 0


@pytest.mark.faults
def test_the_question_before_everything_is_forgotten_can_be_interrupted(depot: Depot, used: Engine) -> None:
    with terminal("forget", "--all", "--url", depot.url) as shown:
        eventually(lambda: "[y/N]" in shown.text)
        os.killpg(shown.process.pid, signal.SIGINT)
        assert shown.end() == 130
        assert "Traceback" not in shown.text
    assert used.lookup([1] * CHUNK) == CHUNK


def test_check_tells_what_it_found_as_json(depot: Depot, used: Engine) -> None:
    done = run("check", "--arena-name", depot.name, "--json")
    said = json.loads(done.stdout)
    assert done.returncode == 0
    assert (said["problems"], said["in_use"], said["chunks"] >= 2) == ([], True, True)
