"""The commands for leases: `lease` and `release`."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.command import run, terminal
from tests.client.engine import CHUNK, Engine, engine_with_a_chunk
from tests.conftest import Depot, eventually


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The token ids of the prompt that `engine` has stored."""
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps([1] * CHUNK))
    return path


@pytest.fixture
def engine(depot: Depot) -> Iterator[Engine]:
    with engine_with_a_chunk(depot) as engine:
        yield engine


def chunks_of(depot: Depot, engine: Engine) -> int:
    return sum(each["chunks"] for each in depot.status()["namespaces"] if each["model"] == engine.model)


@pytest.mark.faults
def test_a_lease_is_started_listed_and_released_with_its_chunks(depot: Depot, engine: Engine, file: Path) -> None:
    which = ("--tokens", file, "--model", engine.model, "--url", depot.url)
    name = f"agent-{uuid.uuid4().hex[:6]}"
    done = run("lease", name, *which, "--seconds", "600", "--priority", "70", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"chunks": 1, "leased": 1}), done.stderr
    listed = json.loads(run("lease", "--url", depot.url, "--json").stdout)
    (lease,) = [each for each in listed if each["name"] == name]
    assert (lease["kind"], lease["chunks"], lease["priority"]) == ("retain", 1, 70)
    assert 0 < lease["ends_s"] <= 600 and lease["bytes"] > 0
    assert name in run("lease", "--url", depot.url).stdout
    assert run("release", *which, "-y").stdout == "removed from memory: 0 of 1 chunk\n", "it is leased"
    done = run("release", name, "--url", depot.url, "--json", "-y")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"released": name}), done.stderr
    eventually(lambda: chunks_of(depot, engine) == 0)
    done = run("release", name, "--url", depot.url, "-y")
    assert done.returncode == 1 and name in done.stderr and "`kvdepot lease` lists them" in done.stderr


@pytest.mark.faults
def test_a_lease_of_an_unstored_prompt_waits_for_its_chunks(depot: Depot, engine: Engine, file: Path) -> None:
    file.write_text(json.dumps([4] * CHUNK))
    which = ("--tokens", str(file), "--model", engine.model, "--url", depot.url)
    done = run("lease", "later", *which)
    said = "lease later: 0 of 1 chunk; the others are not in memory: it takes those that engines store within the next"
    assert (done.returncode, done.stdout) == (0, f"{said} minute\n"), done.stderr
    engine.store([4] * CHUNK, [0, 1, 2, 3])
    assert run("lease", "later", *which).stdout == "lease later: 1 of 1 chunk\n"
    assert "its chunks stay" in run("release", "later", "--keep", "--dry-run", "--url", depot.url).stdout
    done = run("release", "later", "--keep", "--url", depot.url)
    assert (done.returncode, done.stdout) == (0, "lease later has ended; its chunks stay\n"), done.stderr
    assert chunks_of(depot, engine) == 2


@pytest.mark.faults
def test_the_chunks_of_a_prompt_are_removed_but_for_the_first(depot: Depot, engine: Engine, file: Path) -> None:
    which = ("--tokens", file, "--model", engine.model, "--url", depot.url)
    done = run("release", *which, "--dry-run", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"chunks": 1, "removed_at_most": 1})
    done = run("release", *which, "--keep-first", "1", "--yes")
    assert (done.returncode, done.stdout) == (0, "removed from memory: 0 of 1 chunk\n"), done.stderr
    done = run("release", *which, "-y")
    assert (done.returncode, done.stdout) == (0, "removed from memory: 1 of 1 chunk\n"), done.stderr
    assert chunks_of(depot, engine) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["release"], "give either the NAME of a lease"),
        (["release", "--keep", "5", "--tokens", "p.json"], "--keep-first N leaves the first N chunks"),
        (["release", "a", "--keep-first", "1"], "are for a prompt"),
        (["release", "--keep", "--tokens", "p.json"], "--keep is for a lease"),
        (["lease", "--kind", "expire", "--seconds", "5"], "give the lease a NAME"),
        (["status", "--http", "--watch"], "give no --watch"),
        (["lease", "a", "--tokens", "p.json", "--kind", "expire"], "--seconds"),
        (["lease", "a", "--tokens", "p.json", "--priority", "101"], "101 is not in the range 0<=x<=100"),
        (["lease", "a"], "--tokens and --hashes"),
        (["warm", "--tokens", "a", "--hashes", "b"], "exactly one of --tokens and --hashes"),
    ],
    ids=str,
)
def test_wrong_usage_is_refused_with_the_reason(words: list[str], said: str, tmp_path: Path) -> None:
    done = run(*words, "--url", f"ipc://{tmp_path}/none.sock")
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())


@pytest.mark.faults
def test_a_release_asks_before_it_removes_chunks(depot: Depot, engine: Engine, file: Path) -> None:
    which = ("--tokens", file, "--model", engine.model, "--url", depot.url)
    assert run("lease", "asked", *which).returncode == 0
    for words in (which, ("asked", "--url", depot.url)):
        done = run("release", *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert "--yes" in done.stderr and "--dry-run" in done.stderr
    done = run("release", "asked", "--url", depot.url, "--dry-run")
    assert done.returncode == 0 and "lease asked: 1 chunk," in done.stdout and "dry run" in done.stdout
    for answer, code, chunks in (("n\n", 1, 1), ("y\n", 0, 0)):
        with terminal("release", "asked", "--url", depot.url) as shown:
            eventually(lambda shown=shown: "[y/N]" in shown.text)
            shown.press(answer)
            assert shown.end() == code
        eventually(lambda chunks=chunks: chunks_of(depot, engine) == chunks)
