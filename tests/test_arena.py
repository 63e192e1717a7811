"""The arena's lock proves that its server touches no memory any more: it is the last thing of a dead server to go."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvdepot.arena import Watch
from kvdepot.shm import is_locked

from .conftest import SHM

# An arena's owner that afterwards opens files by the thousand, as drivers open theirs, and at last one with a lock.
OWNER = """
import os, resource, sys
from kvdepot import shm
from kvdepot.arena import Arena

name, late, files = sys.argv[1], sys.argv[2], int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (files + 200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
arena = Arena(name, 1 << 20, b"bootboot")
for _ in range(files):
    os.open(late, os.O_RDONLY)
assert shm.lock(os.open(late, os.O_RDWR))
print("up", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Callable[[int], tuple[str, Path, subprocess.Popen[str]]]]:
    name = f"kvdepot-test-{uuid.uuid4().hex[:12]}"
    started: list[subprocess.Popen[str]] = []

    def start(files: int) -> tuple[str, Path, subprocess.Popen[str]]:
        late = tmp_path / "late"
        late.touch()
        process = subprocess.Popen(
            [sys.executable, "-c", OWNER, name, str(late), str(files)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        return name, late, process

    yield start
    for process in started:
        process.kill()
        process.communicate()
    (SHM / name).unlink(missing_ok=True)


def test_a_killed_servers_lock_is_free_only_after_all_it_opened_later_has_ended(
    owner: Callable[[int], tuple[str, Path, subprocess.Popen[str]]],
) -> None:
    """What it opened later is what drivers hold: with it ends what they do for the server."""
    files = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 200, 15_000)
    name, late, process = owner(files)
    watch = Watch(name, b"bootboot")
    late_fd = os.open(late, os.O_RDONLY)
    try:
        assert not watch.is_gone() and is_locked(late_fd)
        process.kill()
        while not watch.is_gone():  # ends with the process: no sleep, for the moment in between is what counts
            pass
        assert not is_locked(late_fd), "the arena's lock was free while files of drivers were still open"
    finally:
        os.close(late_fd)
        watch.close()
