"""Workers, schedulers and whole engines that die: all they held is released, and nothing piles up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from kvdepot.memory.shm import LivenessFile, LivenessView
from tests.conftest import SHM, Depot, StartDepot, eventually
from tests.faults.conftest import StartDriver, Watcher, footprint

pytestmark = pytest.mark.faults

ROUNDS = 3
TOGETHER = 5
WARM_UP = 1
"""Rounds of `TOGETHER` engines before the first numbers are taken."""


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
