"""Workers, schedulers and whole engines that die: all they held is released, and nothing piles up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvdepot.memory.shm import LivenessFile, LivenessView
from tests.conftest import SHM, Depot, StartDepot, eventually
from tests.faults.conftest import StartDriver, Watcher, footprint

pytestmark = pytest.mark.faults

WIDE = {"blocks": 64, "width": 1 << 15}
"""2 MiB a block, 128 MiB in all: copying them takes long enough to be interrupted."""
ROUNDS = 3
TOGETHER = 5
WARM_UP = 1
"""Rounds of `TOGETHER` engines before the first numbers are taken."""


def helper_of(pid: int) -> int:
    """The process that removes the shared memory of an engine's process, torch_shm_manager: its child."""
    for number in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if Path(f"/proc/{number}/comm").read_text().startswith("torch_shm"):
            return int(number)
    raise AssertionError("torch has started no helper")


@pytest.mark.parametrize("is_store", [True, False], ids=["store", "retrieve"])
def test_a_worker_killed_in_a_copy_leaves_chunks_whole_and_nothing_held(
    is_store: bool, start_depot: StartDepot, start_driver: StartDriver, watch: Callable[[Depot], Watcher]
) -> None:
    depot = start_depot("--copy-threads", "1", arena_mib=512, chunk_size=64)
    watcher = watch(depot)
    worker = start_driver(depot.url, **WIDE)
    files = worker.tell("files")
    if not is_store:
        assert worker.tell("store", family=1, chunks=8) is True
    do = "begin_store" if is_store else "begin_retrieve"
    watcher.stop_in_copy(depot, worker, lambda n: {"do": do, "family": 1 + n * is_store, "chunks": 8})
    worker.kill()
    depot.process.send_signal(signal.SIGCONT)
    watcher.wait_released()
    eventually(lambda: not any((SHM / name).exists() for name in files))
    # The copy that went on after the death is sealed if it ended before the death was noticed: whole or not at all.
    chunks = watcher.status()["chunks"]
    assert chunks % 8 == 0 if is_store else chunks == 8
    other = start_driver(depot.url, **WIDE)
    assert other.tell("hits", families=list(range(1, 21)), chunks=8) == chunks
    assert other.tell("store", family=30, chunks=8) is True
    assert other.tell("hits", families=[30], chunks=8) == 8
    assert not other.tell("stats")["wrong"]


def test_engines_killed_and_started_again_leave_no_descriptor_thread_or_map_behind(
    start_depot: StartDepot, start_driver: StartDriver, watch: Callable[[Depot], Watcher]
) -> None:
    depot = start_depot(arena_mib=4, chunk_size=64)
    watcher = watch(depot)
    before: dict[str, int] = {}
    files: list[str] = []
    for number in range(WARM_UP + ROUNDS):
        if number == WARM_UP:
            before = footprint(depot.process.pid)
        drivers = [start_driver(depot.url, seed=TOGETHER * number + i, blocks=100, width=16) for i in range(TOGETHER)]
        eventually(lambda files=files: not any((SHM / name).exists() for name in files))  # of the last round
        files = [name for driver in drivers for name in driver.tell("files")]
        for driver in drivers:
            driver.tell("start", families=60, running=3)
        eventually(lambda: watcher.status()["sessions"])
        for driver in drivers:
            driver.kill()
        watcher.wait_released()
        eventually(lambda: "torch_" not in Path(f"/proc/{depot.process.pid}/maps").read_text())
    after = footprint(depot.process.pid)
    print(f"{before} -> {after}")
    for what, count in before.items():
        assert after[what] <= count + TOGETHER, f"{what} grew from {count} to {after[what]}"
    last = start_driver(depot.url, width=16)
    assert last.tell("hits", families=list(range(60)), chunks=6) > 0
    assert not last.tell("stats")["wrong"]


FORKS = """
import ctypes, os, sys, time
import zmq
from kvdepot.client import MessageQueueClient

client = MessageQueueClient(sys.argv[1], zmq.Context())
client.learn_chunk_size(20.0)
fork = ctypes.PyDLL(None).fork if sys.argv[2] == "C" else os.fork
child = fork()
if child == 0:
    time.sleep(120)
    os._exit(0)
print(client.liveness.name, child, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("language", ["Python", "C"])
def test_a_killed_client_is_gone_though_a_process_that_it_forked_lives_on(
    start_depot: StartDepot, language: str
) -> None:
    depot = start_depot(arena_mib=8)
    command = [sys.executable, "-c", FORKS, depot.url, language]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        liveness, child = client.stdout.readline().split()
        try:
            assert (SHM / liveness).exists()
            client.kill()
            client.wait()
            os.kill(int(child), 0)
            eventually(lambda: not (SHM / liveness).exists())
        finally:
            client.kill()
            os.kill(int(child), signal.SIGKILL)


def test_a_fork_that_closes_its_parents_liveness_takes_nothing_from_it() -> None:
    liveness = LivenessFile(SHM)
    child = os.fork()
    if child == 0:
        liveness.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    view = LivenessView(SHM, liveness.name)
    assert not view.has_left() and view.is_alive()
    view.close(remove=False)
    liveness.close()
