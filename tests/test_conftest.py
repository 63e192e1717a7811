"""What the other tests stand on: servers that do not start, ports that are nobody else's, a clock for bounds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import HANG_S, Depot
from tests.metronome import CONTENDED, Metronome, ran_s
from tests.ports import free_port

pytestmark = pytest.mark.faults


def test_a_server_that_ends_while_it_starts_is_told_of_at_once_with_its_log() -> None:
    began = time.monotonic()
    depot = Depot("--policy", "by-the-moon")
    try:
        with pytest.raises(pytest.fail.Exception, match=r"(?s)ended with status 2.*by-the-moon"):
            depot.wait_ready()
    finally:
        depot.close()
    assert ran_s(began) < 4


def test_ports_are_drawn_once_by_all_processes_and_the_kernel_gives_them_to_nobody() -> None:
    draw = "from tests.ports import free_port; print(*[free_port() for _ in range(200)], flush=True); input()"
    root = Path(__file__).parent.parent
    other = subprocess.Popen(
        [sys.executable, "-c", draw], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        theirs = set(map(int, other.stdout.readline().split()))
        ours = {free_port() for _ in range(50)}
    finally:
        other.communicate("\n")
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert len(theirs) == 200 and len(ours) == 50 and not ours & theirs
    assert not [port for port in ours | theirs if first <= port <= last]


def test_the_metronome_tells_of_all_that_it_did_not_run_up_to_now() -> None:
    metronome = Metronome()
    try:
        metronome.stalled()
        metronome.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, metronome.process.pid, os.WSTOPPED | os.WNOWAIT)
        stopped = time.monotonic()
        time.sleep(0.3)
        going_on = time.monotonic()
        metronome.process.send_signal(signal.SIGCONT)
        stalls = metronome.stalled()
        assert any(
            begin <= stopped and going_on <= end and lasted > 0.9 * (going_on - stopped)
            for begin, end, lasted in stalls
        )
    finally:
        metronome.close()


_BUSY = """
import os, subprocess, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one processor, and one other who wants it all the time
other = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
try:
    from tests.metronome import ran_s, slept_s, started
    started()
    began = time.monotonic()
    time.sleep(2.0)
    print(time.monotonic() - began, ran_s(began))
    began, slept = time.monotonic(), slept_s()
    while time.monotonic() < began + 1.0:
        pass
    print(slept_s() - slept)
    slept = slept_s()
    time.sleep(1.0)
    print(slept_s() - slept)
finally:
    other.kill()
    other.wait()
"""


def test_a_bound_on_time_hardly_counts_while_others_have_the_machine_and_what_a_thread_sleeps_is_told_apart() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _BUSY], cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr
    took_s, ran, computing, sleeping = map(float, done.stdout.split())
    assert CONTENDED * took_s / 2 < ran < took_s / 2
    assert computing < 0.5, "a thread that waits for a processor does not sleep"
    assert sleeping >= 0.99
