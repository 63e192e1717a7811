"""The arena: its lock, which a dead server releases last, proves that the server no longer touches memory."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvdepot.errors import ArenaError
from kvdepot.locks import is_locked
from kvdepot.memory.arena import Arena
from kvdepot.memory.arena_header import HEADER_BYTES, VERSION, ArenaHeader, Watch
from tests.conftest import SHM, eventually

# The owner of an arena, which then opens files by the thousand, as drivers do. The first and the last have locks.
OWNER = """
import os, resource, sys
from kvdepot import locks
from kvdepot.memory.arena import Arena
from kvdepot.memory.shm import SHM

name, first, last, files = *sys.argv[1:4], int(sys.argv[4])
resource.setrlimit(resource.RLIMIT_NOFILE, (files + 200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
arena = Arena(SHM, name, 1 << 20, b"bootboot")
assert locks.lock(os.open(first, os.O_RDWR))
for _ in range(files):
    os.open(first, os.O_RDONLY)
assert locks.lock(os.open(last, os.O_RDWR))
print("up", flush=True)
sys.stdin.read()
"""


def test_a_table_is_read_whole_however_little_the_system_reads_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux reads at most 2 GiB at once, the size of the table in an arena of 256 GiB."""
    reads: list[int] = []

    def read_little(fd: int, buffers: list[memoryview], offset: int) -> int:
        reads.append(preadv(fd, [buffers[0][:5000]], offset))
        return reads[-1]

    preadv = os.preadv
    arena = Arena(SHM, name, 4 << 20, b"bootboot")
    try:
        size = arena.header.table_bytes
        arena.table()[:] = written = random.Random(1).randbytes(size)
        monkeypatch.setattr(os, "preadv", read_little)
        assert arena.read_table() == written
        assert len(reads) > size // 5000 > 1
        os.truncate(arena.path, HEADER_BYTES + 7000)
        assert arena.read_table() == written[:7000], "where the file ends, there is no more"
    finally:
        arena.close()


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_an_arena_of_another_format_is_refused_and_left_as_it_is(name: str, version: int) -> None:
    Arena(SHM, name, 4 << 20, b"bootboot").close(remove=False)
    before = bytearray((SHM / name).read_bytes())
    header = ArenaHeader(4 << 20, int.from_bytes(before[24:32], "little"), b"bootboot").pack(version)
    before[: len(header)] = header
    (SHM / name).write_bytes(before)
    with pytest.raises(ArenaError, match=f"format {version}, this kvdepot has format {VERSION}.* remove the file"):
        Arena(SHM, name, 4 << 20, b"new boot")
    assert (SHM / name).read_bytes() == bytes(before)


def test_a_killed_servers_lock_is_free_only_after_all_it_opened_later_has_ended(name: str, tmp_path: Path) -> None:
    """Files opened later stand for those of drivers, whose work for the server ends when they are released."""
    files = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1] - 200, 15_000)
    later = [tmp_path / "first", tmp_path / "last"]
    for path in later:
        path.touch()
    command = [sys.executable, "-c", OWNER, name, *map(str, later), str(files)]
    with ExitStack() as stack:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        stack.callback(process.communicate)
        stack.callback(process.kill)
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        watch = Watch(SHM, name, b"bootboot")
        stack.callback(watch.close)
        locks = [os.open(path, os.O_RDONLY) for path in later]
        for fd in locks:
            stack.callback(os.close, fd)
        assert not watch.is_gone() and all(map(is_locked, locks))
        process.kill()
        while not watch.is_gone():  # no sleep: it is the first moment that counts
            pass
        assert not any(map(is_locked, locks)), "the arena's lock was free while files of drivers were still open"


def test_memory_of_an_arena_is_allocated_step_by_step_or_where_it_is_needed(name: str) -> None:
    arena = Arena(SHM, name, 4 << 20, b"bootboot")
    try:
        assert arena.is_populated(()) and arena.is_populated(((0, HEADER_BYTES),))
        assert not arena.is_populated(((0, HEADER_BYTES), (2 << 20, 4096)))
        assert arena.ensure(2 << 20, 10_000)
        assert (SHM / name).stat().st_blocks * 512 < 1 << 20, "only what is needed"
        arena.start_populating()
        eventually(lambda: arena.is_populated(((0, 4 << 20),)))
        assert (SHM / name).stat().st_blocks * 512 == 4 << 20
    finally:
        arena.close()


@pytest.mark.parametrize("kind", ["a disk", "nothing", "a file", "too small a size"])
def test_an_arena_in_a_folder_that_does_not_suit_is_refused_with_what_to_do(
    name: str, kind: str, tmp_path: Path
) -> None:
    folder = {"a disk": tmp_path, "nothing": SHM / name, "a file": Path("/proc/self/status")}.get(kind, SHM)
    size = 1 << 50 if folder == SHM else 4 << 20
    with pytest.raises(ArenaError, match="--arena-dir") as refused:
        Arena(folder, name, size, b"bootboot")
    assert str(folder) in str(refused.value) and not (folder / name).exists()


FORKER = """
import os, sys, time
from kvdepot.memory.arena import Arena
from kvdepot.memory.shm import SHM

arena = Arena(SHM, sys.argv[1], 1 << 20, b"bootboot")
child = os.fork()
if child == 0:
    time.sleep(120)
    os._exit(0)
print(child, flush=True)
sys.stdin.read()
"""


def test_a_killed_servers_lock_is_free_though_a_process_that_it_forked_lives_on(name: str) -> None:
    command = [sys.executable, "-c", FORKER, name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        watch = Watch(SHM, name, b"bootboot")
        try:
            assert not watch.is_gone()
            process.kill()
            process.wait()
            os.kill(child, 0)
            eventually(watch.is_gone)
        finally:
            watch.close()
            process.kill()
            os.kill(child, signal.SIGKILL)
