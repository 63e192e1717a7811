"""`kvdepot doctor`: its findings with and without problems."""

from __future__ import annotations

import json
import os
import re
import resource
import uuid
from pathlib import Path

import pytest

from kvdepot.cli.doctor import findings
from kvdepot.cli.options import Address
from kvdepot.memory import shm
from tests.cli.command import doctor, run
from tests.conftest import Depot, StartDepot


@pytest.mark.faults
def test_doctor_finds_a_server_that_works(depot: Depot) -> None:
    code, found = doctor("--url", depot.url, KVDEPOT_ARENA_NAME=depot.name, KVDEPOT_ARENA_GIB="0.0625")
    (server,) = found["server"]
    assert server["state"] == "ok" and f"pid {depot.process.pid}" in server["text"]
    for what in ("system", "shared memory", "memory", "huge pages", "vLLM", "NVIDIA", "key"):
        assert what in found
    assert not any(depot.name in finding["text"] for finding in found["shared memory"] if finding["state"] == "warn")
    assert code == int(any(finding["state"] == "fail" for group in found.values() for finding in group))
    text = run("doctor", "--url", depot.url).stdout
    assert re.search(r"^ok +server +", text, re.MULTILINE)


@pytest.mark.faults
def test_config_shows_the_settings_of_the_running_server_without_secrets(
    start_depot: StartDepot, tmp_path: Path
) -> None:
    tier = "redis://:hunter2@127.0.0.1:1/0"
    depot = start_depot("--verify", "always", "--tiers", tier, arena_mib=16)
    assert "hunter2" not in json.dumps(depot.status())
    _, found = doctor("--url", depot.url)
    (_, down) = found["server"]
    assert down["text"].count("redis://127.0.0.1:1") == 1 and down["text"].endswith(" Connection refused")
    assert "Connection refused. " in (shown := " ".join(run("status", "--url", depot.url).stdout.split())), shown
    given = json.loads(run("config", "--url", depot.url, "--verify", "off", "--json").stdout)
    assert given["settings"]["verify"]["value"] == "off"
    assert given["server"]["settings"]["verify"] == "always"
    table = run("config", "--url", depot.url, "--verify", "off").stdout
    assert re.search(r"^verify +off +--verify +always *$", table, re.M), table
    assert re.search(r"redis://\*\*\*@127.0.0.1:1/0 *$", table, re.M), table
    assert re.search(rf"^url +{re.escape(depot.url)} +--url *$", table, re.M), "what is equal is not repeated"
    assert json.loads(run("config", "--url", f"ipc://{tmp_path}/x", "--json").stdout)["server"] is None


@pytest.mark.faults
def test_doctor_checks_the_arena_of_the_server_that_runs_not_that_of_a_next_one(start_depot: StartDepot) -> None:
    depot = start_depot(arena_mib=16)
    _, found = doctor("--url", depot.url, KVDEPOT_ARENA_GIB="100000")
    (arena, *_) = found["shared memory"]
    assert arena["state"] != "fail" and re.search(r"the running server's arena takes 1[56](\.\d+)? MiB", arena["text"])
    assert found["memory"][0]["state"] == "ok"


def test_doctor_says_what_to_do_where_there_is_no_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "SHM", tmp_path / "shm")
    found = [
        each for each in findings(None, Address(f"ipc://{tmp_path}/x", None), lambda what: None) if each.state == "fail"
    ]
    (shared,) = [each for each in found if each.what == "shared memory"]
    assert "No such file or directory" in shared.text and "mount -t tmpfs" in shared.advice


def test_doctor_says_what_keeps_a_depot_from_working(tmp_path: Path) -> None:
    code, found = doctor("--url", f"ipc://{tmp_path}/x", KVDEPOT_ARENA_GIB="100000")
    assert code == 1
    assert found["shared memory"][0]["state"] == "fail"
    assert "--arena-gib" in found["shared memory"][0]["advice"]
    assert found["server"][0]["state"] == "warn" and "kvdepot serve" in found["server"][0]["advice"]


def test_doctor_goes_on_where_the_settings_are_wrong(tmp_path: Path) -> None:
    code, found = doctor("--url", f"ipc://{tmp_path}/x", KVDEPOT_CHUNK_SIZE="0", KVDEPOT_CHUNKSIZE="256")
    assert code == 1
    wrong, mistyped = found["settings"]
    assert wrong["state"] == "fail" and "KVDEPOT_CHUNK_SIZE" in wrong["text"]
    assert mistyped["state"] == "warn" and "did you mean KVDEPOT_CHUNK_SIZE?" in mistyped["advice"]
    assert "server" in found


def test_doctor_reports_a_url_that_is_none() -> None:
    code, found = doctor("--url", "nowhere")
    assert code == 1 and found["settings"][0]["state"] == "fail" and "server" in found


def test_doctor_reports_a_socket_path_that_is_too_long(tmp_path: Path) -> None:
    code, found = doctor("--url", f"ipc://{tmp_path}/{'x' * 300}")
    assert code == 1 and found["server"][0]["state"] == "fail"
    assert "at most 107 bytes" in found["server"][0]["text"]


def test_doctor_reports_a_limit_of_locked_memory_where_a_tier_uses_rdma(tmp_path: Path) -> None:
    before, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, hard))
    try:
        tier = "mooncake://master?local_host=10.0.0.7&segment_gib=1&protocol=rdma&device=mlx5_0"
        _, found = doctor("--url", f"ipc://{tmp_path}/x", KVDEPOT_TIERS=tier)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (before, hard))
    assert found["tier"][0]["state"] == "fail" and "only 64 KiB may be locked" in found["tier"][0]["text"]


def test_doctor_tells_a_key_that_cannot_be_used(tmp_path: Path) -> None:
    code, found = doctor("--url", f"ipc://{tmp_path}/x", "--key", str(tmp_path / "missing.key"))
    assert code == 1 and found["key"][0]["state"] == "fail" and "missing.key" in found["key"][0]["text"]


@pytest.mark.faults
def test_doctor_tells_an_arena_that_no_server_has(start_depot: StartDepot) -> None:
    def told() -> bool:
        texts = [finding["text"] for finding in doctor("--url", left.url)[1]["shared memory"]]
        return any(re.search("unused arenas? takes? ", text) and left.name in text for text in texts)

    # Of many it names a few: the first by name.
    left = start_depot("--on-stop", "keep", arena_mib=4, name=f"0-kvdepot-test-{uuid.uuid4().hex[:12]}")
    assert not told()
    assert left.stop() == 0
    assert told()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
def test_doctor_tells_a_socket_of_another_user(tmp_path: Path) -> None:
    path = tmp_path / "depot.sock"
    path.touch()
    os.chown(path, 12345, -1)
    code, found = doctor("--url", f"ipc://{path}")
    assert code == 1 and found["server"][0]["state"] == "fail" and "12345" in found["server"][0]["text"]
