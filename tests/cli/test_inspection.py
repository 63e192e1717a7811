"""`kvdepot inspect`: where the chunks of a prompt are, as a table and as JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvdepot import cli
from kvdepot.keys import ChunkChain
from tests.cli.command import run
from tests.client.engine import CHUNK, PER_CHUNK, Engine
from tests.conftest import Depot, StartDepot, eventually

SYSTEM = list(range(2 * CHUNK))


@pytest.fixture
def chats(depot: Depot, used: Engine) -> Engine:
    """Two chats with the same first two chunks, one of which was found."""
    for last in (7, 8):
        used.store([*SYSTEM, *[last] * CHUNK], list(range(3 * PER_CHUNK)))
    assert used.lookup([*SYSTEM, *[7] * CHUNK]) == 3 * CHUNK
    return used


def last_hash(tokens: list[int]) -> str:
    chain = ChunkChain(CHUNK)
    chain.extend(tokens)
    return chain.hashes[-32:].hex()


@pytest.mark.faults
def test_inspect_says_which_chunks_of_a_prompt_memory_lacks(depot: Depot, chats: Engine, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps([*SYSTEM, *[9] * (2 * CHUNK)]))
    which = ("--tokens", prompt, "--model", chats.model, "--url", depot.url)
    done = run("inspect", *which)
    assert done.returncode == 0, done.stderr
    assert "2 of 4 chunks in memory" in done.stdout
    assert "chunks 3-4 are not in memory; whether tiers have them is unknown" in done.stdout
    assert "2 ready" in done.stdout and re.search(r"0: all chunks +1-2 ", done.stdout)
    said = json.loads(run("inspect", *which, "--json").stdout)
    assert said["chunks"] == 4
    assert [(each["position"], each["state"]) for each in said["in_memory"]] == [(1, "ready"), (2, "ready")]
    prompt.write_text(json.dumps([9] * CHUNK))
    done = run("inspect", *which)
    assert (done.returncode, done.stdout) == (1, "memory has none of the prompt's 1 chunks\n")


@pytest.mark.faults
def test_inspect_names_the_tiers_that_have_a_chunk_too(start_depot: StartDepot, tmp_path: Path) -> None:
    tier = f"disk://{tmp_path}/kv"
    depot = start_depot("--tiers", f"{tier}?capacity_gib=1")
    engine = Engine(depot)
    engine.store([1] * CHUNK, list(range(PER_CHUNK)))
    hashes = tmp_path / "hashes"
    hashes.write_text(last_hash([1] * CHUNK).upper())
    which = ("inspect", "--hashes", hashes, "--url", depot.url)
    eventually(lambda: json.loads(run(*which, "-j").stdout)["in_memory"][0]["tiers"] == [tier])
    assert f"{tier}: 1" in run(*which).stdout
    engine.close()


@pytest.mark.faults
def test_without_a_comparison_none_differed_and_nothing_is_released(depot: Depot) -> None:
    done = run("inspect", "--compare", "--url", depot.url)
    assert (done.returncode, done.stdout) == (0, "since the server started: 0 shards compared, 0 differed\n")
    nothing = {"compared_chunks": 0, "differing_chunks": 0, "quarantined": [], "mismatches": []}
    assert json.loads(run("inspect", "--compare", "--json", "--url", depot.url).stdout) == nothing
    done = run("inspect", "--release", "m", "--url", depot.url)
    assert (done.returncode, done.stdout) == (1, "no such model is in quarantine\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "give exactly one of --tokens and --hashes"),
        ("--hashes y --tokens x", "give exactly one of --tokens and --hashes"),
        ("--compare --tokens x", "--compare and --release need no prompt"),
        ("--release m --salt s", "--compare and --release need no prompt"),
    ],
)
def test_inspect_refuses_options_that_name_no_prompt_or_two(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", *words.split()]) == 2
    assert said in capsys.readouterr().err
