"""`kvdepot doctor`: its findings with and without problems."""

from __future__ import annotations

import re
import resource
import uuid
from contextlib import closing
from pathlib import Path

import pytest

from kvdepot.memory import shm
from kvdepot.memory.arena import Arena
from tests.cli.command import doctor, run
from tests.conftest import SHM, Depot, StartDepot


@pytest.mark.faults
def test_doctor_finds_a_server_that_works(depot: Depot) -> None:
    code, found = doctor("--url", depot.url, KVDEPOT_ARENA_NAME=depot.name, KVDEPOT_ARENA_GIB="0.0625")
    (server,) = found["server"]
    assert server["state"] == "ok" and f"pid {depot.process.pid}" in server["text"]
    for what in ("system", "memory", "huge pages", "vLLM", "key"):
        assert what in found
    assert not any(depot.name in finding["text"] for finding in found["memory"] if finding["state"] == "warn")
    assert code == int(any(finding["state"] == "fail" for group in found.values() for finding in group))
    text = run("doctor", "--url", depot.url).stdout
    assert re.search(r"^ok +server +", text, re.MULTILINE)


@pytest.mark.faults
def test_doctor_checks_the_arena_of_the_server_that_runs_not_that_of_a_next_one(start_depot: StartDepot) -> None:
    depot = start_depot(arena_mib=16)
    _, found = doctor("--url", depot.url, KVDEPOT_ARENA_GIB="100000")
    assert re.fullmatch(r"the running server's arena takes 1[56](\.\d+)? MiB", found["memory"][0]["text"])
    assert {each["state"] for each in found["memory"]} == {"ok"}


def test_doctor_says_what_to_do_where_there_is_no_shared_memory(tmp_path: Path) -> None:
    (shared,) = doctor("--url", f"ipc://{tmp_path}/x", KVDEPOT_ARENA_DIR=str(tmp_path / "shm"))[1]["memory"]
    assert shared["state"] == "fail" and "No such file" in shared["text"]
    assert f"mount -t tmpfs tmpfs {tmp_path}/shm" in shared["advice"]


def test_doctor_says_what_is_in_the_folder_of_the_arena(tmp_path: Path) -> None:
    name = f"kvdepot-test-{uuid.uuid4().hex[:12]}"
    folder = SHM / f"{name}-folder"
    folder.mkdir(0o700)
    try:
        with closing(shm.LivenessFile(folder)), closing(Arena(folder, name, 8 << 20, b"bootboot")):
            environ = {"KVDEPOT_ARENA_DIR": str(folder), "KVDEPOT_ARENA_NAME": name, "KVDEPOT_ARENA_GIB": "8MiB"}
            _, found = doctor("--url", f"ipc://{tmp_path}/x", **environ)
    finally:
        folder.rmdir()
    texts = [each["text"] for each in found["memory"]]
    for pattern in (rf"{folder} holds .* of {name}, and the liveness files of 1 client", rf"{folder}: .* available"):
        assert any(re.fullmatch(pattern, text) for text in texts)


@pytest.mark.parametrize(
    ("words", "environ", "what", "said"),
    [
        ([], {"KVDEPOT_ARENA_GIB": "100000"}, "memory", "--arena-gib"),
        ([], {"KVDEPOT_CHUNK_SIZE": "0"}, "settings", "KVDEPOT_CHUNK_SIZE"),
        (["--url", "nowhere"], {}, "settings", "nowhere"),
        (["--url", f"ipc:///tmp/{'x' * 300}"], {}, "server", "at most 107 bytes"),
        (["--key", "/missing.key"], {}, "key", "/missing.key"),
    ],
    ids=str,
)
def test_doctor_says_what_keeps_a_depot_from_working(
    words: list[str], environ: dict[str, str], what: str, said: str, tmp_path: Path
) -> None:
    code, found = doctor("--url", f"ipc://{tmp_path}/x", *words, **environ)
    assert code == 1 and {"server", "memory", "web page"} <= set(found), "it goes on"
    assert any(each["state"] == "fail" and said in each["text"] + each["advice"] for each in found[what]), found[what]


def test_doctor_names_a_mistyped_variable_and_how_to_start_a_server(tmp_path: Path) -> None:
    found = doctor("--url", f"ipc://{tmp_path}/x", KVDEPOT_CHUNKSIZE="256")[1]
    assert "did you mean KVDEPOT_CHUNK_SIZE?" in found["settings"][-1]["advice"]
    assert found["server"][0]["state"] == "warn" and "kvdepot serve" in found["server"][0]["advice"]


def test_doctor_reports_a_limit_of_locked_memory_where_a_tier_uses_rdma(tmp_path: Path) -> None:
    before, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, hard))
    try:
        tier = "mooncake://master?local_host=10.0.0.7&segment_gib=1&protocol=rdma&device=mlx5_0"
        _, found = doctor("--url", f"ipc://{tmp_path}/x", KVDEPOT_TIERS=tier)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (before, hard))
    assert found["tier"][0]["state"] == "fail" and "only 64 KiB may be locked" in found["tier"][0]["text"]
