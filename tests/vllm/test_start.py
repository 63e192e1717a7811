"""An engine finds its server: one that is there, one that it starts, one that comes later, or one of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdepot.client import admin
from kvdepot.client.launch import Shared
from kvdepot.config import home_url
from kvdepot.protocol import wire
from kvdepot.protocol.endpoints import holder
from tests.conftest import HANG_S, SHM, Depot, StartDepot, eventually
from tests.programs import missing
from tests.vllm.conftest import StartEngine
from tests.vllm.engines import nothing_is_held, output, prompt, same_as_own


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shared]:
    """The default endpoint of this test's engines; a server that they start there ends with the test."""
    arena = f"kvdepot-test-{uuid.uuid4().hex[:12]}"
    Depot.names.add(arena)
    with tempfile.TemporaryDirectory() as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        monkeypatch.delenv("KVDEPOT_URL", raising=False)
        monkeypatch.setenv("KVDEPOT_ARENA_NAME", arena)
        monkeypatch.setenv("KVDEPOT_ARENA_GIB", "0.0625")
        shared = Shared(home_url())
        yield shared
        if pid := pid_at(shared.url):
            os.kill(pid, signal.SIGTERM)
        eventually(lambda: not shared.is_running() and not (SHM / arena).exists())


def pid_at(url: str) -> int:
    """The process that holds an endpoint; 0: none, or one that has not said yet which it is."""
    who = holder(url)
    return int(who.removeprefix("pid ")) if who.startswith("pid ") else 0


def settings(**extra: Any) -> dict[str, Any]:
    """An engine's connector without a URL."""
    names = {"kvdepot.trust": "given"} | {f"kvdepot.{name}": value for name, value in extra.items()}
    return {
        "kv_transfer_config": {
            "kv_connector": "KVDepotConnector", "kv_role": "kv_both", "kv_connector_extra_config": names,
        }
    }  # fmt: skip


def test_an_engine_without_a_server_starts_one_that_a_second_engine_shares(
    home: Shared, models: dict[str, Path], start_engine: StartEngine
) -> None:
    tokens = prompt(41, 2 * 256 + 9)
    first = start_engine(models["gqa"], "", **settings()).wait_started()
    first.tell("link")  # on a busy machine, the server may take longer to start than the engine waits
    cold = first.run(tokens)
    assert cold["cached"] == 0
    pid = pid_at(home.url)
    assert pid and f"its log: {home.log}" in first.logged() and "serving at" in home.log.read_text()
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    second = start_engine(models["gqa"], "", **settings()).wait_started()
    second.tell("link")
    from_depot = second.run(tokens)
    assert from_depot["cached"] == 512
    assert output(from_depot) == output(second.run(tokens))
    assert from_depot["tokens"] == cold["tokens"]
    assert pid_at(home.url) == pid and "started `kvdepot serve`" not in second.logged()

    # From here on the engine is idle.
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: pid_at(home.url) not in (0, pid))
    with admin.connect(home.url, timeout_s=HANG_S) as client:
        eventually(lambda: client.ask(wire.GetStatus()).result(HANG_S)["instances"] == 1)
    # One that is back within a second was not lost, and is not told of as that.
    eventually(lambda: second.logged().count(f"{home.url} is back") == second.logged().count(f"{home.url} is lost"))
    said = second.logged().splitlines()
    assert all("WARNING" in line for line in said if f"{home.url} is lost" in line)
    assert len([line for line in said if f"{home.url} is lost" in line]) <= 1
    assert len([line for line in said if "started it again" in line]) == 1
    from_restarted = second.run_fresh(tokens)
    assert from_restarted["cached"] == 512 and output(from_restarted) == output(from_depot)
    second.stop()


def test_an_engine_runs_without_its_server_and_connects_when_it_comes(
    home: Shared, start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    url = home.url.replace("depot.sock", "late.sock")
    monkeypatch.setenv("KVDEPOT_URL", url)  # as for every command: so the engine starts no server
    tokens = prompt(42, 2 * 256 + 9)
    engine = start_engine(models["gqa"], "", **settings()).wait_started()
    cold = engine.run(tokens)
    assert engine.run_fresh(tokens)["cached"] == 0
    said = engine.logged()
    assert len(re.findall("nothing is cached", said)) == 1 and f"no kvdepot server answers at {url}" in said
    assert "internal error while connecting" not in said
    engine.tell("add", request=engine.request(prompt(43, 900), max_tokens=20))  # one is running when the server comes
    engine.tell("step")
    depot = start_depot(url=url)
    engine.tell("link")
    assert len(engine.tell("finish")) == 1
    again = engine.run_fresh(tokens)
    assert again["cached"] == 0
    from_depot = engine.run_fresh(tokens)
    assert from_depot["cached"] == 512
    assert output(from_depot) == output(engine.run(tokens))
    assert from_depot["tokens"] == again["tokens"] == cold["tokens"]
    assert not home.log.exists()
    engine.stop()
    eventually(lambda: nothing_is_held(depot.status()))


def test_an_engines_own_server_serves_all_its_processes_and_is_gone_after_them(
    home: Shared, models: dict[str, Path], start_engine: StartEngine
) -> None:
    pattern = f"kvdepot-{os.geteuid()}-engine-*"
    before = set(SHM.glob(pattern))
    tokens = prompt(44, 2 * 256 + 9)
    engine = start_engine(models["gqa"], "embedded", tensor_parallel_size=2).wait_started()
    engine.tell("link")
    (arena,) = set(SHM.glob(pattern)) - before
    url = home_url().replace("depot.sock", f"engine-{arena.name.rpartition('-')[2]}.sock")
    with admin.connect(url, timeout_s=HANG_S) as client:
        eventually(lambda: client.ask(wire.GetStatus()).result(HANG_S)["instances"] == 2)
    pid = pid_at(url)
    assert pid
    cold = engine.run(tokens)
    from_depot = engine.run_fresh(tokens)
    assert from_depot["cached"] == 512
    assert from_depot["tokens"] == cold["tokens"]
    assert output(from_depot) == output(engine.run(tokens))
    os.kill(engine.pid, signal.SIGKILL)
    engine.wait()
    eventually(lambda: not Path(f"/proc/{pid}").exists() and not arena.exists() and not holder(url))
    assert not home.log.exists()


def small_shm(tmp_path: Path, size_mib: int, *mount: Path) -> Path:
    """A Python whose processes have a /dev/shm of their own, of this size. mount: two folders: what is in the first,
    they find in the second."""
    python = tmp_path / "python"
    bind = f"mount --bind {mount[0]} {mount[1]} && " if mount else ""
    python.write_text(
        f"#!/bin/sh\nexec unshare --mount --propagation private sh -c '{bind}mount -t tmpfs -o size={size_mib}m tmpfs "
        f'/dev/shm && exec {sys.executable} "$@"\' sh "$@"\n'
    )
    python.chmod(0o755)
    if subprocess.run([python, "-c", ""], check=False).returncode:
        missing("the right to mount a small /dev/shm")
    return python


def test_an_engine_whose_own_server_does_not_fit_runs_uncached_and_says_why(
    home: Shared, models: dict[str, Path], start_engine: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVDEPOT_ARENA_GIB", "100000")
    python = small_shm(tmp_path, 300)
    tokens = prompt(45, 2 * 256 + 9)
    small = start_engine(models["gqa"], "", python=str(python), **settings(), num_gpu_blocks_override=4096)
    small.wait_started()
    cold = small.run(tokens)
    assert small.run_fresh(tokens)["cached"] == 0
    assert output(small.run_fresh(tokens)) == output(cold)
    said = small.logged()
    assert said.count("started `kvdepot serve`") == 1
    assert len(re.findall("WARNING.* nothing is cached.*: the shared server has exited: .*arena of", said)) == 1
    assert not home.log.with_suffix(".log.1").exists()
    small.stop()


def test_an_engine_whose_copies_fail_their_test_runs_uncached_and_says_why_once(
    start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    """One rank's copies are wrong: what a healthy engine has stored is not loaded by the other rank, either."""
    depot, tokens = start_depot(), prompt(47, 2 * 256 + 9)
    healthy = start_engine(models["gqa"], depot.url, tensor_parallel_size=2).wait_started()
    computed = healthy.run(tokens)
    healthy.stop()
    stored = depot.status()["counters"]["stored_chunks"]
    extension = "tests.vllm.wrong_copies.WrongCopies"
    engine = start_engine(models["gqa"], depot.url, tensor_parallel_size=2, worker_extension_cls=extension)
    engine.wait_started()
    assert output(engine.run(tokens)) == output(computed)
    uncached = engine.run_fresh(tokens)
    assert uncached["cached"] == 0 and output(uncached) == output(computed)
    found = depot.status()
    assert (found["counters"]["stored_chunks"], found["counters"]["retrieved_chunks"]) == (stored, 0)
    assert found["faulty_engines"] == 1
    (fault,) = [each["fault"] for each in found["engines"] if each["fault"]]
    assert "the self-test of copies failed: KV cache group 0 on cpu: a store into" in fault
    (warning,) = [line for line in engine.logged().splitlines() if "WARNING" in line and "kvdepot: " in line]
    assert f"this engine runs without a cache: {fault}" in warning
    engine.stop()
    eventually(lambda: nothing_is_held(depot.status()))


@pytest.fixture
def arenas() -> Iterator[Path]:
    """Another folder in memory than /dev/shm itself."""
    made = SHM / f"kvdepot-test-{uuid.uuid4().hex[:12]}"
    made.mkdir(0o700)
    yield made
    shutil.rmtree(made)


def test_a_small_shm_is_enough_beside_another_arena_folder_and_left_empty(
    arenas: Path, start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As in two containers that share a volume in memory, which each mounts where it likes."""
    monkeypatch.setenv("KVDEPOT_ARENA_DIR", str(arenas))
    depot, seen = start_depot(), tmp_path / "arenas"
    seen.mkdir()
    python = str(small_shm(tmp_path, 250, arenas, seen))  # vLLM takes 240 MiB for a queue to its workers
    with monkeypatch.context() as patch:
        patch.setenv("KVDEPOT_ARENA_DIR", str(seen))
        engine = start_engine(models["gqa"], depot.url, python=python, tensor_parallel_size=2)
    fd = os.open(f"/proc/{engine.wait_started().pid}/root/{SHM}", os.O_RDONLY)
    shm = Path(f"/proc/self/fd/{fd}")
    tokens = prompt(48, 2 * 256 + 9)
    assert engine.run(tokens)["cached"] == 0
    same_as_own(engine, tokens, 512)
    assert depot.status()["counters"]["retrieved_chunks"] == 4
    engine.stop()
    left = {path.name for path in shm.iterdir() if not path.name.startswith("vllm_dist_")}
    os.close(fd)
    assert not left, "but what vLLM's ranks on CPUs leave"
    eventually(lambda: [path.name for path in arenas.iterdir()] == [depot.name])
    assert nothing_is_held(depot.status())
