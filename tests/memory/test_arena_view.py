"""A client's view of an arena: while it copies, no other server gives the memory away."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest

from kvdepot import locks
from kvdepot.errors import ArenaError, KVDepotError, Unavailable
from kvdepot.memory import arena as arena_module
from kvdepot.memory import arena_view
from kvdepot.memory.arena import Arena
from kvdepot.memory.arena_header import ArenaHeader
from kvdepot.memory.arena_view import ArenaView
from tests.conftest import HANG_S, SHM
from tests.programs import die_with_parent

SIZE = 4 << 20
FIRST, SECOND = b"bootone1", b"boottwo2"
AT = SIZE // 2


def die(name: str) -> None:
    """Leave an arena as a server does that dies."""
    Arena(name, SIZE, FIRST).close(remove=False)


def boot_of(name: str) -> bytes:
    fd = os.open(SHM / name, os.O_RDONLY)
    try:
        header = ArenaHeader.read(fd, name)
        assert header is not None
        return header.boot
    finally:
        os.close(fd)


def test_a_view_is_of_one_run_of_a_server(name: str) -> None:
    die(name)
    with pytest.raises(Unavailable):
        ArenaView(name, SECOND)
    (SHM / name).write_bytes(b"\0" * SIZE)
    with pytest.raises(Unavailable):
        ArenaView(name, FIRST)
    (SHM / name).write_bytes(b"something else" * 1000)
    with pytest.raises(ArenaError):
        ArenaView(name, FIRST)
    (SHM / name).unlink()
    with pytest.raises(KVDepotError):
        ArenaView(name, FIRST)


def test_a_successor_takes_over_once_all_uses_have_ended(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_USE_WAIT_S", HANG_S)
    die(name)
    views = [ArenaView(name, FIRST), ArenaView(name, FIRST)]
    tried, taken = threading.Event(), threading.Event()
    refuse = locks.refuse_use

    def refuse_use(fd: int, timeout_s: float) -> bool:
        assert not refuse(fd, 0.0)
        tried.set()
        return refuse(fd, timeout_s)

    monkeypatch.setattr(locks, "refuse_use", refuse_use)
    successors: list[Arena] = []

    def succeed() -> None:
        successors.append(Arena(name, SIZE, SECOND))
        taken.set()

    with ExitStack() as uses:
        uses.enter_context(views[1].use())
        with views[0].use() as seen, views[0].use():
            thread = threading.Thread(target=succeed)
            thread.start()
            assert tried.wait(HANG_S)
            seen[AT] = 7
        assert not taken.wait(0.1) and boot_of(name) == FIRST
        with views[0].use() as seen:  # it still is the first server's
            seen[AT + 1] = 8
    assert taken.wait(HANG_S)
    thread.join()
    assert boot_of(name) == SECOND and successors[0].taken_over
    assert successors[0].bytes[AT : AT + 2].tolist() == [7, 8]
    for view in views:
        with pytest.raises(Unavailable, match="replaced"), view.use():
            pytest.fail("a replaced server's arena was used")
    successors.pop().close(remove=False)
    fd = os.open(SHM / name, os.O_RDWR)
    assert refuse(fd, 0.0), "a use that was refused goes on"
    os.close(fd)


def test_a_use_that_does_not_end_costs_the_successor_what_was_stored(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(arena_module, "_USE_WAIT_S", 0.05)
    die(name)
    view = ArenaView(name, FIRST)
    with view.use() as seen:
        with caplog.at_level(logging.WARNING):
            successor = Arena(name, SIZE, SECOND)
        assert "empty arena" in caplog.text
        assert not successor.taken_over
        seen[AT] = 9  # the stopped program goes on
        assert successor.bytes[AT] == 0
    assert boot_of(name) == SECOND
    # Its descriptor has to have a lower number than any that is opened later (memory/arena.py).
    later = os.open("/", os.O_RDONLY)
    os.close(later)
    assert later > successor._fd
    with ArenaView(name, SECOND).use() as seen:
        assert seen[AT] == 0
    successor.close()


KILLED = """
import sys
from kvdepot.memory.arena_view import ArenaView
view = ArenaView(sys.argv[1], sys.argv[2].encode())
with view.use():
    print("uses", flush=True)
    sys.stdin.read()
"""


def test_the_use_of_a_killed_program_ends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_USE_WAIT_S", HANG_S)
    die(name)
    parent = os.getpid()
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, name, FIRST.decode()], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        preexec_fn=lambda: die_with_parent(parent),
    ) as program:  # fmt: skip
        assert program.stdout is not None and program.stdout.readline() == b"uses\n"
        fd = os.open(SHM / name, os.O_RDWR)
        assert not locks.refuse_use(fd, 0.0)
        os.close(fd)
        program.kill()
        successor = Arena(name, SIZE, SECOND)
    assert successor.taken_over
    successor.close()


def test_a_use_that_was_interrupted_before_it_had_the_lock_is_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    die(name)
    view = ArenaView(name, FIRST)
    other = os.open(SHM / name, os.O_RDWR)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(locks, "use", interrupt)
        with view.use():
            pytest.fail("a use began without the lock")
    assert locks.refuse_use(other, 0.0)
    locks.end_use(other)
    with view.use():
        assert not locks.refuse_use(other, 0.0), "this use is not in the kernel"
    assert locks.refuse_use(other, 0.0)
    os.close(other)


def interrupt(*_: object) -> bool:
    raise KeyboardInterrupt


def test_a_use_is_refused_while_a_successor_hangs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_view, "_USE_S", 0.05)
    die(name)
    view = ArenaView(name, FIRST)
    other = os.open(SHM / name, os.O_RDWR)
    assert locks.refuse_use(other, 0.0)
    with pytest.raises(Unavailable), view.use():
        pytest.fail("a use began while it was refused")
    locks.end_use(other)
    with view.use():
        assert not locks.refuse_use(other, 0.0)
    os.close(other)


def test_a_kernel_without_memory_for_locks_proves_no_copy_ended(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    die(name)
    view, control = ArenaView(name, FIRST), fcntl.fcntl

    def fail(fd: int, command: int, *rest: object) -> object:
        if command in (fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW):
            raise OSError(errno.ENOLCK, "no locks available")
        return control(fd, command, *rest)

    with view.use() as seen:
        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "fcntl", fail)
            try:
                successor = Arena(name, SIZE, SECOND)
            except ArenaError:
                return
        seen[AT] = 9
        assert successor.bytes[AT] == 0
    successor.close()


def test_without_locks_of_open_files_a_server_starts_and_a_use_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in sandboxes that lack them."""
    monkeypatch.setattr(fcntl, "F_OFD_SETLK", 99)
    monkeypatch.setattr(fcntl, "F_OFD_SETLKW", 99)
    die(name)
    successor = Arena(name, SIZE, SECOND)
    view = ArenaView(name, SECOND)
    for _ in range(2):
        with pytest.raises(KVDepotError), view.use():
            pytest.fail("a use began without a lock")
    successor.close()
