"""`kvdepot why`: what a request found and why no more, for people and as JSON; `kvdepot doctor` says it, too."""

from __future__ import annotations

import json

import pytest

from kvdepot.cli.inspection import _trail
from kvdepot.protocol.trails import Trail
from tests.cli.command import doctor, run
from tests.client.engine import CHUNK, Engine
from tests.conftest import Depot, StartDepot, eventually

BLOCKS = [0, 1, 2, 3]


@pytest.mark.faults
def test_why_shows_what_was_found_and_why_no_more(depot: Depot, used: Engine) -> None:
    assert used.lookup([*[1] * CHUNK, *[9] * CHUNK], "cmpl-77-0") == CHUNK
    assert used.retrieve([1] * CHUNK, BLOCKS, request_id="cmpl-77-0") == set()
    done = run("why", "cmpl-77", "--url", depot.url)
    assert done.returncode == 0, done.stderr
    head, _, asked, ended, shards, tokens = done.stdout.splitlines()
    assert head == "request cmpl-77-0" and used.model in done.stdout
    assert asked.strip() == f"looked up 2 chunks of {CHUNK} tokens; found 1, 1 of them in memory"
    assert "removed long ago; 0 other chunks are stored behind the last one that was found" in ended
    assert (shards.strip(), tokens.strip()) == ("shards: 1 loaded", "tokens, by its engine: none")
    said = json.loads(run("why", "cmpl-77-0", "--json", "-u", depot.url).stdout)
    (found,) = said["lookups"]
    assert (found["found"], found["end"], found["asked"], said["shards"]) == (1, "absent", 2, {"loaded": 1})


@pytest.mark.faults
def test_why_explains_an_eviction_and_doctor_a_server_without_hits(start_depot: StartDepot) -> None:
    depot = start_depot(arena_mib=1)
    engine = Engine(depot, block_bytes=65536)  # 256 KiB a chunk
    engine.store([1] * CHUNK, BLOCKS)
    engine.store([2] * (3 * CHUNK), list(range(12)))
    engine.store([3] * (3 * CHUNK), list(range(12)))
    assert engine.lookup([1] * CHUNK, "gone") == 0
    shown = run("why", "--url", depot.url).stdout
    assert shown.startswith("request gone\n") and "the next chunk had been evicted to make room" in shown
    (hits,) = doctor("--url", depot.url)[1]["hits"]
    assert hits["state"] == "warn" and "kvdepot why" in hits["advice"]
    assert hits["text"].startswith("0 of 256 tokens") and "had been evicted" in hits["text"]
    assert engine.lookup([3] * CHUNK, "there") == CHUNK
    eventually(lambda: doctor("--url", depot.url)[1]["hits"][0]["state"] == "ok")
    engine.close()


@pytest.mark.parametrize(("shards", "said"), [
    ({"equal": 1}, "equal"), ({"equal": 1, "differing": 1}, "differing"), ({}, "the chunks were gone"),
])  # fmt: skip
def test_why_says_how_many_tokens_were_compared_and_whether_they_were_equal(shards: dict[str, int], said: str) -> None:
    *_, tokens = _trail(Trail("", "r", shards=shards, engine={"loaded": 2816, "compared": 128}))
    assert tokens.strip() == f"tokens, by its engine: 2,816 loaded, 128 compared: {said}"


@pytest.mark.faults
def test_an_unknown_request_is_an_error_that_says_how_many_are_kept(depot: Depot) -> None:
    done = run("why", "nobody", "--url", depot.url)
    assert done.returncode == 1 and "512 are kept" in done.stderr and "'nobody'" in done.stderr
