"""GPUs across processes: a real server and real workers on a fake driver, also killed ones."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvdepot.adapters import LMCacheMPWorkerAdapter, LoadStoreOp
from tests.conftest import HANG_S, Depot, StartDepot, eventually
from tests.devices.engines import BLOCK, BLOCKS, Engine, settled, tokens_of
from tests.fakecuda.machine import VARIABLES, Machine

pytestmark = pytest.mark.faults

COPY_ENGINES = ("--gpu-staging-mib", "0")
"""No kernel need be compiled: batched copies alone."""
LEAN = (*COPY_ENGINES, "--gpu-idle-s", "0")
"""And a GPU is released with its last worker."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Two GPUs, for all processes that the test starts."""
    made = Machine()
    for name in VARIABLES:
        monkeypatch.setenv(name, made.environment()[name])
    yield made
    failures = made.failures()
    made.close()
    assert failures == []


StartEngine = Callable[..., Engine]


@pytest.fixture
def start_engine(machine: Machine) -> Iterator[StartEngine]:
    started: list[Engine] = []

    def start(depot: Depot, gpu: int = 0, how: str = "one", name: str = "model") -> Engine:
        started.append(Engine(depot.url, os.environ, gpu, how, name, len(started)))
        return started[-1]

    yield start
    for engine in started:
        engine.process.close()


@pytest.mark.parametrize("how", ["one", "virtual"])
@pytest.mark.parametrize("is_store", [True, False])
def test_a_worker_killed_in_mid_copy_is_given_up_when_the_copy_has_ended(
    machine: Machine, start_depot: StartDepot, start_engine: StartEngine, is_store: bool, how: str
) -> None:
    depot = start_depot(*LEAN, arena_mib=16)
    server = depot.process.pid
    victim, other = start_engine(depot, gpu=0, how=how), start_engine(depot, gpu=1)
    assert victim.store(list(range(8)), tokens_of(1, 2))
    with machine.gate(after=3):
        victim.begin(list(range(8, 16)), tokens_of(2 if is_store else 1, 2), is_store)
        eventually(lambda: machine.is_held(server))
        victim.process.kill()
        eventually(lambda: depot.status()["clients"] == 2)  # it has been noticed: the other, and who asks
        assert machine.contexts(0) == {server}, "the copy still needs its memory"
        assert depot.status()["operations"] == 1
    settled(depot, instances=1)
    eventually(lambda: machine.contexts(0) == set())
    assert machine.used_bytes(0) == 0
    assert [gpu["registrations"] for gpu in depot.status()["devices"]] == [1]
    other.round_trip(list(range(8)), list(range(8, 16)), tokens_of(3, 2))
    again = start_engine(depot, gpu=0, how=how)
    assert again.retrieve(list(range(8)), tokens_of(2, 2)) == list(range(8)), "what it stored is discarded"
    again.round_trip(list(range(8)), list(range(8, 16)), tokens_of(4, 2))


@pytest.mark.parametrize("how", ["one", "virtual"])
def test_a_server_killed_in_mid_copy_fails_its_retrieve_and_the_next_one_serves(
    machine: Machine, start_depot: StartDepot, start_engine: StartEngine, how: str
) -> None:
    name = f"kvdepot-test-{uuid.uuid4().hex[:12]}"
    depot = start_depot(*LEAN, arena_mib=16, name=name)
    engine = start_engine(depot, how=how)
    assert engine.store(list(range(8)), tokens_of(1, 2))
    stored = engine.truth
    with machine.gate(after=3):
        request = engine.begin(list(range(8, 16)), tokens_of(1, 2), False)
        eventually(lambda: machine.is_held(depot.process.pid))
        depot.process.kill()
        depot.process.wait(HANG_S)
    assert engine.end(request)[1] == list(range(8, 16))
    eventually(lambda: machine.contexts(0) == {engine.pid})
    after = engine.process.read()
    untouched = [block for block in range(BLOCKS) if not 8 <= block < 16]
    expected = [storage.copy() for storage in after]
    engine.model.move(stored, expected, {block: block for block in untouched})
    assert engine.wrong(expected) == [0, 0], "blocks that were not asked for are as they were"
    second = start_depot(*LEAN, arena_mib=16, name=name, url=depot.url)
    eventually(lambda: engine.retrieve(list(range(8, 16)), tokens_of(1, 2)) == [])
    engine.comes_back(stored, list(range(8)), list(range(16, 24)), tokens_of(1, 2))
    engine.round_trip(list(range(8)), list(range(8, 16)), tokens_of(2, 2))
    assert machine.contexts(0) == {engine.pid, second.process.pid}


def test_a_gpu_is_left_with_its_last_worker_and_untouched_before_its_first(
    machine: Machine, start_depot: StartDepot, start_engine: StartEngine
) -> None:
    depot = start_depot(*LEAN, arena_mib=16)
    server = depot.process.pid
    assert machine.held_by(server) == {}, "the driver is not even loaded"
    first, second = start_engine(depot, gpu=1), start_engine(depot, gpu=1, how="each")
    first.round_trip(list(range(8)), list(range(8, 16)), tokens_of(1, 2))
    assert machine.used_bytes(0) == 0
    assert machine.contexts(1) == {server, first.pid, second.pid}
    first.process.call("disconnect")
    settled(depot, instances=1)
    assert machine.contexts(1) == {server, first.pid, second.pid}
    second.round_trip(list(range(8)), list(range(8, 16)), tokens_of(2, 2))
    second.process.kill()
    settled(depot)
    eventually(lambda: machine.contexts(1) == {first.pid})
    held = machine.held_by(server)
    assert held["contexts"] == {} and held["memory"] == {} and not any(held["held"].values())
    assert depot.status()["devices"] == []


def test_an_engine_that_restarts_finds_the_gpu_until_the_server_ends(
    machine: Machine, start_depot: StartDepot, start_engine: StartEngine
) -> None:
    depot = start_depot(*COPY_ENGINES, arena_mib=16)
    server = depot.process.pid
    first = start_engine(depot)
    first.round_trip(list(range(8)), list(range(8, 16)), tokens_of(1, 2))
    stored = first.truth  # what the retrieve left, in 8 to 15
    eventually(lambda: machine.counts(server)["cuMemHostRegister"])
    before = machine.counts(server)
    first.process.kill()
    settled(depot)
    assert machine.contexts(0) == {server}
    assert [gpu["registrations"] for gpu in depot.status()["devices"]] == [0]
    second = start_engine(depot)
    second.comes_back(stored, list(range(8, 16)), list(range(8)), tokens_of(1, 2))
    for name in ("cuDevicePrimaryCtxRetain", "cuMemHostRegister"):
        assert machine.counts(server)[name] == before[name]
    second.process.kill()
    settled(depot)
    assert depot.stop() == 0
    assert machine.contexts(0) == set() and "Traceback" not in depot.logged()


def test_the_status_shows_the_memory_and_the_copy_paths_of_each_gpu_in_use(
    machine: Machine, start_depot: StartDepot, start_engine: StartEngine
) -> None:
    depot = start_depot("--gpu-staging-mib", "16", "--gpu-idle-s", "0", "--gpu-dma-from-kib", "8", arena_mib=16)
    assert depot.status()["devices"] == []
    engine = start_engine(depot, gpu=1)
    engine.round_trip(list(range(8)), list(range(8, 16)), tokens_of(1, 2))
    (shown,) = depot.status()["devices"]
    worker = machine.held_by(engine.pid)
    of_worker = sum(worker["contexts"].values()) + sum(worker["memory"].values())
    assert 0 < shown["staging_bytes"] <= 16 << 20 and shown["context_bytes"] > 0
    assert shown["staging_bytes"] + shown["context_bytes"] == machine.used_bytes(1) - of_worker
    assert shown["copy_paths"] == {"store": [[0, "dma"]], "retrieve": [[0, "staged"], [8 << 10, "dma"]]}
    assert f"{shown['uuid']} is in use: stores use dma; retrieves use staged, dma from 8192 bytes on" in depot.logged()
    engine.process.kill()
    eventually(lambda: depot.status()["devices"] == [])


def test_a_server_releases_a_gpu_that_no_worker_has_come_back_to(
    machine: Machine, start_depot: StartDepot, start_engine: StartEngine
) -> None:
    depot = start_depot(*COPY_ENGINES, "--gpu-idle-s", "0.1", arena_mib=16)
    engine = start_engine(depot)
    engine.round_trip(list(range(8)), list(range(8, 16)), tokens_of(1, 2))
    engine.process.kill()
    eventually(lambda: machine.contexts(0) == set())
    eventually(lambda: depot.status()["devices"] == [])
    start_engine(depot).round_trip(list(range(8)), list(range(8, 16)), tokens_of(2, 2))


def test_registering_and_dying_a_hundred_times_leaves_nothing_in_the_server(
    machine: Machine, start_depot: StartDepot, start_engine: StartEngine
) -> None:
    """Registered again and again by one worker, then by workers that die."""
    depot = start_depot(*LEAN, arena_mib=8)
    server = depot.process.pid
    keeper = start_engine(depot)

    def held() -> tuple[Any, ...]:
        """What the driver has for the server; the streams of copies under way come and go."""
        found = machine.held_by(server)
        return found["contexts"], found["memory"], {**found["held"], "streams": 0}

    def files() -> tuple[int, int]:
        """Descriptors and maps; of clients that said hello before they may still become fewer."""
        proc = Path(f"/proc/{server}")
        maps = [line for line in (proc / "maps").read_text().splitlines() if "/dev/shm" in line or "memfd" in line]
        return len(list((proc / "fd").iterdir())), len(maps)

    def leaves_no_more(before: tuple[Any, ...], open_before: tuple[int, int]) -> bool:
        return held() == before and all(now <= then for now, then in zip(files(), open_before, strict=True))

    keeper.process.call("register_again", 3)
    # The last that was replaced is unmapped late, and the arena is registered in the background.
    eventually(lambda: held()[2] == {"ipc": 1, "host": 1, "streams": 0})
    known = held(), files()
    keeper.process.call("register_again", 100)
    settled(depot, instances=1)
    assert "no longer in use" not in depot.logged(), "the new tensors are mapped before the old are given up"
    eventually(lambda: leaves_no_more(*known))
    for how in ("one", "virtual", "each"):
        victim = start_engine(depot, how=how)
        victim.process.kill()
    settled(depot, instances=1)
    eventually(lambda: leaves_no_more(*known))
    keeper.round_trip([1, 2, 3, 4], [5, 6, 7, 8], tokens_of(1, 1))


def test_a_gpu_that_fails_fails_its_own_copies_and_no_others(
    machine: Machine, start_depot: StartDepot, start_engine: StartEngine
) -> None:
    depot = start_depot(*LEAN, arena_mib=16)
    broken, sound = start_engine(depot, gpu=0, name="broken"), start_engine(depot, gpu=1, name="sound")
    assert broken.store(list(range(8)), tokens_of(1, 2))
    machine.fail("copy", "CUDA_ERROR_ECC_UNCORRECTABLE", pid=depot.process.pid)
    assert broken.retrieve(list(range(8, 16)), tokens_of(1, 2)) == list(range(8, 16))
    machine.heal()
    assert broken.retrieve(list(range(8, 16)), tokens_of(1, 2)) == list(range(8, 16)), "its context is lost"
    assert not broken.store(list(range(8, 16)), tokens_of(2, 2))
    sound.round_trip(list(range(8)), list(range(8, 16)), tokens_of(3, 2))
    broken.process.kill()
    settled(depot, instances=1)
    again = start_engine(depot, gpu=0, name="broken")
    again.round_trip(list(range(8)), list(range(8, 16)), tokens_of(4, 2))


def test_a_server_without_gpus_never_imports_cuda(
    tmp_path: Path, start_depot: StartDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages that kill who imports them lie in its way; what it loaded is also read off its memory."""
    for package in ("cuda", "triton", "pynvml", "torch"):
        (tmp_path / f"{package}.py").write_text("import os\nos._exit(86)\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    with monkeypatch.context() as trapped:
        trapped.setenv("PYTHONPATH", path)
        assert subprocess.run([sys.executable, "-c", "import cuda"]).returncode == 86
        depot = start_depot(arena_mib=16)
    worker = LMCacheMPWorkerAdapter(depot.url, depot.context, "cpu", 1, 0, BLOCK)
    tensor = torch.arange(8 * 64, dtype=torch.int32).reshape(8, 64)
    worker.register_kv_caches({"layer": tensor}, [0])
    try:
        worker.submit_store_request("stored", LoadStoreOp([0, 1, 2, 3], tokens_of(1, 1)), None)
        eventually(lambda: worker.get_finished({"stored"})[0])
        worker.submit_retrieve_request("loaded", LoadStoreOp([4, 5, 6, 7], tokens_of(1, 1)), None)
        eventually(lambda: worker.get_finished(set())[1])
        assert torch.equal(tensor[:4], tensor[4:])
    finally:
        worker.shutdown()
    assert depot.status()["devices"] == []
    maps = Path(f"/proc/{depot.process.pid}/maps").read_text()
    assert "libcuda" not in maps and "cuda/bindings" not in maps
    assert depot.stop() == 0
