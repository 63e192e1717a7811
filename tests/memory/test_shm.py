"""Clients' liveness files in shared memory: they are removed after their client's death, and not before."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdepot import locks
from kvdepot.errors import ArenaError, BadRequest
from kvdepot.memory import shm
from tests.client.engine import works
from tests.conftest import HANG_S, SHM, StartDepot, eventually
from tests.programs import missing


@pytest.mark.faults
@pytest.mark.parametrize("when", ["while no server ran", "before the server met it"])
def test_the_liveness_of_a_client_that_died_unseen_is_swept(start_depot: StartDepot, when: str) -> None:
    server = start_depot(arena_mib=4) if when == "before the server met it" else None
    code = (
        "import os; from kvdepot.memory.shm import SHM, LivenessFile\n"
        "page = LivenessFile(SHM); print(page.name, flush=True); os.kill(os.getpid(), 9)"
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
    page.__init__(SHM)
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
    code = "import os, sys; from kvdepot.memory.shm import LivenessFile, SHM; file = LivenessFile(SHM)\n"
    code += f"print(file.name, flush=True); sys.stdin.readline(); {end}"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True) as client:
        assert client.stdin is not None and client.stdout is not None
        view = shm.LivenessView(SHM, client.stdout.readline().strip())
        assert view.is_alive() and not view.has_left()
        client.stdin.close()
        client.wait(HANG_S)
    assert not view.is_alive() and view.has_left() is has_left
    view.close(remove=True)


def test_a_file_that_outlives_pythons_modules_ends_without_a_traceback() -> None:
    code = "import sys, kvdepot; from kvdepot.memory.shm import LivenessFile, SHM; file = LivenessFile(SHM)\n"
    code += "print(file.name); kvdepot.kept, sys.kept = file, dict(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=True)
    shm.LivenessView(SHM, done.stdout.strip()).close(remove=True)
    assert done.stderr == ""


def test_clients_of_a_process_that_maps_files_of_any_name_are_marked_as_left(tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/mod\xe8les"
    fd = os.open(odd, os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, mmap.PAGESIZE)
    with mmap.mmap(fd, mmap.PAGESIZE):
        os.close(fd)
        file = shm.LivenessFile(SHM)
        view = shm.LivenessView(SHM, file.name)
        assert not view.has_left()
        shm.leave_for(os.getpid())
        assert view.has_left() and view.is_alive()
    file.close()
    view.close(remove=True)


PARENT = """
import subprocess, sys
code = "import sys; from kvdepot.memory.shm import LivenessFile, SHM; file = LivenessFile(SHM)"
code += "; print(file.name, flush=True); sys.stdin.read()"
subprocess.run([sys.executable, "-c", code])
"""


def test_clients_of_a_child_are_marked_although_a_thread_ends_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=-1, stdout=-1, text=True) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        view = shm.LivenessView(SHM, parent.stdout.readline().strip())
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


def test_a_sweep_leaves_a_liveness_file_that_is_being_made() -> None:
    name = f"kvdepot-client-{uuid.uuid4().hex[:16]}"
    path = SHM / f".{name}"
    with contextlib.ExitStack() as stack:
        stack.callback(path.unlink, missing_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        stack.callback(os.close, fd)
        shm.sweep_liveness_files(SHM)
        assert path.exists(), "its client is about to lock it and to give it its name"
        an_hour_ago = time.time() - 3600
        assert locks.lock(fd)  # before it is old: a server of another test may sweep, too
        os.utime(path, (an_hour_ago, an_hour_ago))
        shm.sweep_liveness_files(SHM)
        assert path.exists(), "its client lives"
        fcntl.flock(fd, fcntl.LOCK_UN)
        shm.sweep_liveness_files(SHM)
        assert not path.exists(), "its client died while it made it"


@pytest.mark.parametrize(
    "asked", ["../../outside", ".", "..", "", "a\0b", "n" * 10_000, "kvdepot-test-that-is-not-there"]
)
def test_a_name_that_is_no_plain_file_name_is_refused(asked: str) -> None:
    """Names come from the other side: a client says that of its liveness file, a server that of its arena."""
    with pytest.raises(ArenaError):
        shm.open_shared(SHM, asked)


@pytest.mark.parametrize("kind", ["a FIFO", "a symbolic link", "a folder", "a socket", "another user's file"])
def test_what_is_no_plain_file_of_this_user_is_not_opened(name: str, kind: str) -> None:
    target, outside = SHM / name, SHM / f"{name}-outside"
    outside.write_bytes(bytes(8192))
    try:
        match kind:
            case "a FIFO":
                os.mkfifo(target)
            case "a symbolic link":
                target.symlink_to(outside)
            case "a folder":
                target.mkdir()
            case "a socket":
                with socket.socket(socket.AF_UNIX) as listener:
                    listener.bind(str(target))
            case _:
                if os.geteuid() != 0:
                    pytest.skip("needs root, to give a file to somebody else")
                target.write_bytes(bytes(8192))
                os.chown(target, 12345, 12345)
        with pytest.raises(ArenaError, match=str(target)):
            shm.open_shared(SHM, name)
    finally:
        outside.unlink()
        if target.is_dir():
            target.rmdir()


def test_a_liveness_file_with_another_name_or_cut_off_is_refused(name: str) -> None:
    (SHM / name).touch(0o600)
    with pytest.raises(BadRequest, match="not the name of a client's liveness file"):
        shm.LivenessView(SHM, name)
    file = shm.LivenessFile(SHM)
    view = shm.LivenessView(SHM, file.name)
    os.truncate(SHM / file.name, 8)
    files = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(BadRequest, match="too short"):
        shm.LivenessView(SHM, file.name)
    assert len(list(Path("/proc/self/fd").iterdir())) == files
    assert not view.has_left() and view.secret == file.secret, "a server that knew it reads no memory that is gone"
    view.close(remove=True)
    file.close()


@pytest.fixture
def folder(name: str) -> Iterator[Path]:
    """Another folder in memory than /dev/shm itself."""
    made = SHM / f"{name}-folder"
    made.mkdir(0o700)
    yield made
    for path in made.iterdir():
        path.unlink()
    made.rmdir()


def test_liveness_files_are_in_the_folder_that_is_set_and_nowhere_else(folder: Path) -> None:
    file = shm.LivenessFile(folder)
    assert [path.name for path in folder.iterdir()] == [file.name] and not (SHM / file.name).exists()
    assert shm.liveness_files(folder) == 1
    with pytest.raises(ArenaError, match=f"{SHM}/{file.name} cannot be opened"):
        shm.LivenessView(SHM, file.name)
    view = shm.LivenessView(folder, file.name)
    shm.sweep_liveness_files(folder)
    assert view.is_alive() and (folder / file.name).exists()
    shm.leave_for(os.getpid())
    assert view.has_left()
    view.close(remove=True)
    file.close()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "said"),
    [("nothing", "No such file"), ("a file", "is not a folder"), ("a disk", "is on a disk"), ("tmpfs", "not writable"),
     ("hugetlbfs", "is in a hugetlbfs")],
)  # fmt: skip
def test_a_folder_that_does_not_suit_is_refused_with_what_it_is_and_what_to_do(
    kind: str, said: str, name: str, tmp_path: Path
) -> None:
    place = tmp_path if kind not in ("nothing", "a file") else SHM / name
    with contextlib.ExitStack() as stack:
        if kind == "a file":
            place.touch()
        if kind in ("tmpfs", "hugetlbfs"):
            command = ["mount", "-t", kind, "-o", "ro", "none", str(place)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                missing(f"the right to mount a {kind} ({done.stderr.strip()})")
            stack.callback(subprocess.run, ["umount", place], check=True)
        with pytest.raises(ArenaError, match=f"^{place}, .*{said}.*--arena-dir .KVDEPOT_ARENA_DIR.*$"):
            shm.LivenessFile(place)
