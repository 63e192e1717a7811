"""`kvdepot ls` and `kvdepot inspect`: what prompts are in memory, as tables and as JSON."""

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
def test_ls_lists_what_is_in_memory(depot: Depot, chats: Engine) -> None:
    which = ("--url", depot.url, "--model", chats.model)
    done = run("ls", *which, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(each["hash"], each["prompts"], each["shared_tokens"], each["tokens"]) for each in found[:1]] == [
        (last_hash(SYSTEM), 2, 2 * CHUNK, 4 * CHUNK)
    ] or found[0]["hash"] == last_hash([1] * CHUNK)
    by_tokens = json.loads(run("ls", *which, "-j", "-s", "tokens", "-n", "1").stdout)
    assert [each["hash"] for each in by_tokens] == [last_hash(SYSTEM)]
    assert (by_tokens[0]["hits"], by_tokens[0]["hit_tokens"]) == (1, 3 * CHUNK)
    shown = run("ls", *which, "-s", "tokens")
    heads, first, *_ = shown.stdout.splitlines()
    assert re.split(r"  +", heads.strip())[:4] == ["prefix", "model", "hits", "bytes"]
    prefix = last_hash(SYSTEM[:CHUNK])  # the first chunk's, which stays when a chat goes on
    assert by_tokens[0]["id"] == prefix
    assert first.startswith(prefix[:12] + " ") and prefix not in shown.stdout
    assert prefix in run("ls", *which, "-l").stdout
    assert "2 of 2 chunks in memory" in run("inspect", prefix[:12], *which).stdout, "all that its prompts share"


@pytest.mark.faults
def test_inspect_shows_a_prompt_by_the_hash_that_ls_shows(depot: Depot, chats: Engine) -> None:
    which = ("--url", depot.url, "--model", chats.model)
    end = last_hash([*SYSTEM, *[8] * CHUNK])
    assert "2 of 2 chunks" in run("inspect", last_hash(SYSTEM)[:9], *which).stdout, "an odd number of digits"
    done = run("inspect", end, *which)
    assert done.returncode == 0, done.stderr
    assert "3 of 3 chunks in memory" in done.stdout and "3 ready" in done.stdout
    assert re.search(r"0: all chunks +1-3 ", done.stdout)
    done = run("inspect", end.upper(), *which, "--json")
    said = json.loads(done.stdout)
    assert said["chunks"] == 3
    assert [(each["position"], each["state"]) for each in said["in_memory"]] == [(i, "ready") for i in (1, 2, 3)]
    assert run("ls", "-u", depot.url, "-m", "no such").stdout == "no prompts of models named no such... are in memory\n"
    done = run("inspect", "00" * 32, "--url", depot.url)
    assert (done.returncode, done.stdout) == (1, f"memory has no chunk whose hash begins with {'00' * 32}\n")


@pytest.mark.faults
def test_inspect_says_which_chunks_of_a_prompt_memory_lacks(depot: Depot, chats: Engine, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps([*SYSTEM, *[9] * (2 * CHUNK)]))
    which = ("--tokens", prompt, "--model", chats.model, "--url", depot.url)
    done = run("inspect", *which)
    assert done.returncode == 0, done.stderr
    assert "2 of 4 chunks in memory" in done.stdout
    assert "chunks 3-4 are not in memory; whether tiers have them is unknown" in done.stdout
    prompt.write_text(json.dumps([9] * CHUNK))
    done = run("inspect", *which)
    assert (done.returncode, done.stdout) == (1, "memory has none of the prompt's 1 chunks\n")


@pytest.mark.faults
def test_inspect_names_the_tiers_that_have_a_chunk_too(start_depot: StartDepot, tmp_path: Path) -> None:
    tier = f"disk://{tmp_path}/kv"
    depot = start_depot("--tiers", f"{tier}?capacity_gib=1")
    engine = Engine(depot)
    engine.store([1] * CHUNK, list(range(PER_CHUNK)))
    which = ("inspect", last_hash([1] * CHUNK), "--url", depot.url)
    eventually(lambda: json.loads(run(*which, "-j").stdout)["in_memory"][0]["tiers"] == [tier])
    assert f"{tier}: 1" in run(*which).stdout
    engine.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give exactly one of HASH, --tokens and --hashes"),
        (["abcdef", "--tokens", "x"], "give exactly one of HASH, --tokens and --hashes"),
        (["abc"], "'abc' is not a chunk's hash"),
        (["xyzxyz"], "'xyzxyz' is not a chunk's hash"),
        (["0" * 66], "is not a chunk's hash"),
        (["\N{SUPERSCRIPT TWO}" * 8], "is not a chunk's hash"),
    ],
)
def test_what_names_no_prompt_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", *words]) == 2
    assert said in capsys.readouterr().err
