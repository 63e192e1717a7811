"""The commands for leases: lease, release, leases."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.command import run, terminal
from tests.client.engine import CHUNK, Engine, engine_with_a_chunk
from tests.conftest import Depot, StartDepot, eventually
from tests.server.process import kill


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The token ids of the prompt that `engine` has stored."""
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps([1] * CHUNK))
    return path


@pytest.fixture
def engine(depot: Depot) -> Iterator[Engine]:
    """An engine that has stored one chunk, and pins nothing."""
    with engine_with_a_chunk(depot) as engine:
        yield engine


def chunks_of(depot: Depot, engine: Engine) -> int:
    return sum(each["chunks"] for each in depot.status()["namespaces"] if each["model"] == engine.model)


@pytest.mark.faults
def test_a_lease_is_begun_shown_with_its_receipt_and_released_with_its_chunks(
    depot: Depot, engine: Engine, file: Path
) -> None:
    which = ("--tokens", file, "--model", engine.model, "--url", depot.url, "--json")
    name = f"agent-{uuid.uuid4().hex[:6]}"
    done = run("lease", name, *which, "--seconds", "600", "--priority", "70")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"chunks": 1, "leased": 1}), done.stderr
    shown = json.loads(run("leases", "--url", depot.url, "--json").stdout)
    (lease,) = [each for each in shown["leases"] if each["name"] == name]
    assert (lease["kind"], lease["chunks"], lease["priority"], lease["ended"]) == ("retain", 1, 70, "")
    assert 0 < lease["ends_s"] <= 600 and lease["bytes"] > 0
    assert [each["kind"] for each in shown["sums"]] == ["retain"]
    table = run("leases", "--url", depot.url).stdout
    assert name in table and "saved tokens" in table and "(no tenant)" in table
    done = run("release", *which, "-y")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"chunks": 1, "removed": 0}), "it is leased"
    done = run("release", name, "--url", depot.url, "--json", "-y")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"released": name}), done.stderr
    eventually(lambda: chunks_of(depot, engine) == 0)
    done = run("release", name, "--url", depot.url, "-y")
    assert done.returncode == 1 and name in done.stderr


@pytest.mark.faults
def test_a_prompts_chunks_are_released_but_for_those_that_are_to_stay(depot: Depot, engine: Engine, file: Path) -> None:
    which = ("--tokens", file, "--model", engine.model, "--url", depot.url)
    done = run("release", *which, "--keep", "1", "--yes")
    assert (done.returncode, done.stdout) == (0, "removed from memory: 0 of 1 chunk\n"), done.stderr
    done = run("release", *which, "-y")
    assert (done.returncode, done.stdout) == (0, "removed from memory: 1 of 1 chunk\n"), done.stderr
    assert chunks_of(depot, engine) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["release"], "give either the NAME of a lease"),
        (["release", "a", "--tokens", "p.json"], "give either the NAME of a lease"),
        (["release", "a", "--keep", "1"], "are for a prompt"),
        (["lease", "a", "--tokens", "p.json", "--kind", "expire"], "--seconds"),
        (["lease", "a", "--tokens", "p.json", "--kind", "forever"], "--kind"),
        (["lease", "a", "--tokens", "p.json", "--priority", "101"], "'101' is not a whole number from 0 to 100"),
        (["lease", "a", "--tokens", "p.json", "--seconds", "-1"], "'-1' is not a whole number of at least 0"),
        (["lease", "a"], "--tokens and --hashes"),
    ],
    ids=str,
)
def test_wrong_usage_is_refused_with_the_reason(words: list[str], said: str, tmp_path: Path) -> None:
    done = run(*words, "--url", f"ipc://{tmp_path}/none.sock")
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())


@pytest.mark.faults
def test_leases_end_with_their_server_and_their_chunks_stay(start_depot: StartDepot, file: Path) -> None:
    """Also those of clients that are gone by then."""
    depot = start_depot(name=f"leases-{uuid.uuid4().hex[:8]}")
    with engine_with_a_chunk(depot) as engine:
        pass
    which = ("--tokens", file, "--model", engine.model)
    assert run("lease", "agent", *which, "--url", depot.url).returncode == 0
    before = json.loads(run("leases", "--url", depot.url, "--json").stdout)
    assert [each["chunks"] for each in before["leases"]] == [1]
    kill(depot)
    depot = start_depot(name=depot.name)
    assert json.loads(run("leases", "--url", depot.url, "--json").stdout) == {"leases": [], "sums": []}
    assert chunks_of(depot, engine) == 1
    assert run("lease", "agent", *which, "--url", depot.url).returncode == 0
    done = run("release", "agent", "--url", depot.url, "--yes")
    assert done.returncode == 0, done.stderr
    eventually(lambda: chunks_of(depot, engine) == 0)


@pytest.mark.faults
def test_a_release_asks_first_and_can_be_tried(depot: Depot, engine: Engine, file: Path) -> None:
    which = ("--tokens", file, "--model", engine.model, "--url", depot.url)
    done = run("release", *which)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--yes" in done.stderr and "--dry-run" in done.stderr
    done = run("release", *which, "--dry-run", "--json")
    assert (done.returncode, json.loads(done.stdout)) == (0, {"chunks": 1, "removed_at_most": 1})
    assert run("lease", "asked", *which).returncode == 0
    done = run("release", "asked", "--url", depot.url, "--dry-run")
    assert done.returncode == 0 and "lease asked: 1 chunk," in done.stdout and "dry run" in done.stdout
    with terminal("release", "asked", "--url", depot.url) as shown:
        eventually(lambda: "[y/N]" in shown.text)
        shown.press("n\n")
        assert shown.end() == 1 and "nothing was changed" in shown.text
    assert chunks_of(depot, engine) == 1
    with terminal("release", "asked", "--url", depot.url) as shown:
        eventually(lambda: "[y/N]" in shown.text)
        shown.press("y\n")
        assert shown.end() == 0
    eventually(lambda: chunks_of(depot, engine) == 0)
