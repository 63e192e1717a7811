"""What the other tests stand on: servers that do not start, ports that are nobody else's, a clock for bounds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Depot
from tests.ports import free_port

pytestmark = pytest.mark.faults


def test_a_server_that_ends_while_it_starts_is_told_of_at_once_with_its_log() -> None:
    depot = Depot("--policy", "by-the-moon")
    try:
        with pytest.raises(pytest.fail.Exception, match=r"(?s)ended with status 2.*by-the-moon"):
            depot.wait_ready()
    finally:
        depot.close()


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
