"""Clients' liveness files in shared memory: they are removed after their client's death, and not before."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from kvdepot import locks
from kvdepot.memory import shm
from tests.client.engine import works
from tests.conftest import HANG_S, SHM, StartDepot, eventually


@pytest.mark.faults
@pytest.mark.parametrize("when", ["while no server ran", "before the server met it"])
def test_the_liveness_of_a_client_that_died_unseen_is_swept(start_depot: StartDepot, when: str) -> None:
    server = start_depot(arena_mib=4) if when == "before the server met it" else None
    code = (
        "import os; from kvdepot.memory.shm import LivenessFile\n"
        "page = LivenessFile(); print(page.name, flush=True); os.kill(os.getpid(), 9)"
    )
    died = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert died.returncode == -signal.SIGKILL
    liveness = SHM / died.stdout.strip()
    server = server or start_depot(arena_mib=4)
    eventually(lambda: not liveness.exists())
    assert works(server)
    assert "Traceback" not in server.logged()


NO_ROOM = """
import os, resource
from kvdepot.errors import ArenaError
from kvdepot.memory.shm import SHM, LivenessFile

resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
files = os.listdir("/proc/self/fd")
page = LivenessFile.__new__(LivenessFile)
try:
    page.__init__()
except ArenaError:
    print((SHM / f".{page.name}").exists(), os.listdir("/proc/self/fd") == files)
"""


@pytest.mark.parametrize(
    ("end", "has_left"),
    [
        ("pass", True),
        ("raise KeyboardInterrupt", True),
        ("os.kill(os.getpid(), 9)", False),
        ("os.fork() or sys.exit(); os.wait(); os.kill(os.getpid(), 9)", False),  # a child's end is not its parent's
    ],
)
def test_a_client_has_left_if_python_ended_its_process(end: str, has_left: bool) -> None:
    code = "import os, sys; from kvdepot.memory.shm import LivenessFile; file = LivenessFile()\n"
    code += f"print(file.name, flush=True); sys.stdin.readline(); {end}"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True) as client:
        assert client.stdin is not None and client.stdout is not None
        view = shm.LivenessView(client.stdout.readline().strip())
        assert view.is_alive() and not view.has_left()
        client.stdin.close()
        client.wait(HANG_S)
    assert not view.is_alive() and view.has_left() is has_left
    view.close(remove=True)


def test_a_file_that_outlives_pythons_modules_ends_without_a_traceback() -> None:
    code = "import sys, kvdepot; from kvdepot.memory.shm import LivenessFile; file = LivenessFile(); print(file.name)\n"
    code += "kvdepot.kept, sys.kept = file, dict(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=True)
    shm.LivenessView(done.stdout.strip()).close(remove=True)
    assert done.stderr == ""


def test_clients_of_a_process_that_maps_files_of_any_name_are_marked_as_left(tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/mod\xe8les"
    fd = os.open(odd, os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, mmap.PAGESIZE)
    with mmap.mmap(fd, mmap.PAGESIZE):
        os.close(fd)
        file = shm.LivenessFile()
        view = shm.LivenessView(file.name)
        assert not view.has_left()
        shm.leave_for(os.getpid())
        assert view.has_left() and view.is_alive()
    file.close()
    view.close(remove=True)


PARENT = """
import subprocess, sys
code = "import sys; from kvdepot.memory.shm import LivenessFile; file = LivenessFile()"
code += "; print(file.name, flush=True); sys.stdin.read()"
subprocess.run([sys.executable, "-c", code])
"""


def test_clients_of_a_child_are_marked_although_a_thread_ends_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=-1, stdout=-1, text=True) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        view = shm.LivenessView(parent.stdout.readline().strip())
        threads = Path.iterdir
        monkeypatch.setattr(Path, "iterdir", lambda folder: [folder / "0", *threads(folder)])  # 0 has ended
        shm.leave_for(parent.pid)
        monkeypatch.undo()
        assert view.has_left() and view.is_alive()
        parent.stdin.close()
        parent.wait(HANG_S)
    view.close(remove=True)


def test_a_liveness_that_finds_no_room_leaves_nothing_behind() -> None:
    done = subprocess.run([sys.executable, "-c", NO_ROOM], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout == "False True\n"


def test_a_liveness_that_is_being_made_is_left_alone_by_who_sweeps() -> None:
    name = f"kvdepot-card-{uuid.uuid4().hex[:16]}"
    path = SHM / f".{name}"
    with contextlib.ExitStack() as stack:
        stack.callback(path.unlink, missing_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        stack.callback(os.close, fd)
        shm.sweep_liveness_files()
        assert path.exists(), "its client is about to lock it and to give it its name"
        an_hour_ago = time.time() - 3600
        os.utime(path, (time.time() + 1e6,) * 2)
        assert not shm.is_being_made(path), "the clock was ahead"
        os.utime(path)
        assert locks.lock(fd)  # before it is old: a server of another test may sweep, too
        os.utime(path, (an_hour_ago, an_hour_ago))
        shm.sweep_liveness_files()
        assert path.exists(), "its client lives"
        fcntl.flock(fd, fcntl.LOCK_UN)
        shm.sweep_liveness_files()
        assert not path.exists(), "its client died while it made it"
