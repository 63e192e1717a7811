"""A client's view of an arena: while it copies, no other server gives the memory away."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess
import sys
from contextlib import ExitStack

import pytest

from kvdepot import locks
from kvdepot.errors import ArenaError, KVDepotError, ProtocolError, Unavailable
from kvdepot.memory import arena as arena_module
from kvdepot.memory import arena_view
from kvdepot.memory.allocator import PAGE
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
    Arena(SHM, name, SIZE, FIRST).close(remove=False)


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
        ArenaView(SHM, name, SECOND)
    (SHM / name).write_bytes(b"\0" * SIZE)
    with pytest.raises(Unavailable):
        ArenaView(SHM, name, FIRST)
    (SHM / name).write_bytes(b"something else" * 1000)
    with pytest.raises(ArenaError):
        ArenaView(SHM, name, FIRST)
    (SHM / name).unlink()
    with pytest.raises(KVDepotError):
        ArenaView(SHM, name, FIRST)


def test_a_successor_takes_over_at_once_and_knows_what_is_in_use(name: str) -> None:
    die(name)
    views = [ArenaView(SHM, name, FIRST), ArenaView(SHM, name, FIRST)]
    with ExitStack() as uses:
        uses.enter_context(views[1].use([(AT + 2 * PAGE, PAGE), (AT, PAGE), (AT + PAGE, 10)]))
        seen = uses.enter_context(views[0].use([(AT + PAGE, PAGE)]))
        with views[0].use([(AT, PAGE), (AT + 8 * PAGE, PAGE)]):
            successor = Arena(SHM, name, SIZE, SECOND)
        assert boot_of(name) == SECOND and successor.taken_over
        assert joined(successor.in_use) == [(AT, 3 * PAGE), (AT + 8 * PAGE, PAGE)]
        seen[AT + PAGE] = 7
        assert successor.bytes[AT + PAGE] == 7
        assert not successor.is_used(((AT + 8 * PAGE, PAGE),)), "that use has ended, and no other"
        assert successor.is_used(((AT + 4 * PAGE, PAGE), (AT + 2 * PAGE, PAGE)))
        for view in views:
            with pytest.raises(Unavailable, match="replaced"), view.use([(AT + 8 * PAGE, PAGE)]):
                pytest.fail("a replaced server's arena was used")
        assert not successor.is_used(((AT + 8 * PAGE, PAGE),)), "a use that was refused goes on"
    assert not successor.is_used(((0, SIZE),))
    successor.close()


@pytest.mark.parametrize(
    "place", [(SIZE - PAGE, PAGE + 1), (SIZE, 1), (0, PAGE), (AT, 0), (AT, -1), (-PAGE, PAGE), (1 << 62, 1 << 62)]
)
def test_a_place_outside_the_arenas_chunks_is_refused_and_nothing_is_used(name: str, place: tuple[int, int]) -> None:
    """Header and records are not a client's to write, and what is behind the end would end the process (SIGBUS)."""
    die(name)
    view = ArenaView(SHM, name, FIRST)
    with pytest.raises(ProtocolError, match="outside"), view.use([(AT, PAGE), place]):
        pytest.fail("a use of it began")
    assert not view._uses
    with view.use([(SIZE - PAGE, PAGE)]) as seen:
        seen[SIZE - 1] = 1


def joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(start, end - start) for start, end in arena_view._joined(ranges)]


def test_a_use_of_very_many_places_covers_all_between_them(name: str) -> None:
    die(name)
    with ArenaView(SHM, name, FIRST).use((SIZE - at * 2 * PAGE, PAGE) for at in range(1, 300)):
        successor = Arena(SHM, name, SIZE, SECOND)
        assert successor.in_use == [(SIZE - 598 * PAGE, 597 * PAGE)]
    successor.close()


def test_a_use_behind_the_end_of_a_smaller_arena_costs_the_successor_what_was_stored(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(arena_module, "_USE_WAIT_S", 0.05)
    die(name)
    view = ArenaView(SHM, name, FIRST)
    with view.use([(SIZE - PAGE, PAGE)]) as seen:
        with caplog.at_level(logging.WARNING):
            successor = Arena(SHM, name, SIZE - PAGE, SECOND)
        assert "empty arena" in caplog.text
        assert not successor.taken_over and not successor.in_use
        # Its descriptor has to have a lower number than any that is opened later (memory/arena.py).
        later = os.open("/", os.O_RDONLY)
        os.close(later)
        assert later > successor._fd
        seen[AT] = 9  # the stopped program goes on
        assert successor.bytes[AT] == 0
    assert boot_of(name) == SECOND
    with ArenaView(SHM, name, SECOND).use([(AT, PAGE)]) as seen:
        assert seen[AT] == 0
    successor.close()


KILLED = """
import sys
from kvdepot.memory.arena_view import ArenaView
from kvdepot.memory.shm import SHM
view = ArenaView(SHM, sys.argv[1], sys.argv[2].encode())
with view.use([(int(sys.argv[3]), 4096)]):
    print("uses", flush=True)
    sys.stdin.read()
"""


def test_the_use_of_a_killed_program_ends(name: str) -> None:
    die(name)
    parent = os.getpid()
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, name, FIRST.decode(), str(AT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        preexec_fn=lambda: die_with_parent(parent),
    ) as program:  # fmt: skip
        assert program.stdout is not None and program.stdout.readline() == b"uses\n"
        successor = Arena(SHM, name, SIZE, SECOND)
        assert successor.in_use == [(AT, PAGE)]
        program.kill()
        program.wait(HANG_S)
        assert not successor.is_used(((AT, PAGE),))
    successor.close()


def test_a_use_that_was_interrupted_before_it_had_the_lock_is_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> bool:
        raise KeyboardInterrupt

    die(name)
    view = ArenaView(SHM, name, FIRST)
    other = os.open(SHM / name, os.O_RDWR)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(locks, "use", interrupt)
        with view.use([(AT, PAGE)]):
            pytest.fail("a use began without the lock")
    assert not locks.uses(other, 0, SIZE) and not view._uses
    with view.use([(AT, PAGE)]):
        assert locks.uses(other, 0, SIZE) == [(AT, PAGE)], "this use is not in the kernel"
    assert not locks.uses(other, 0, SIZE)
    os.close(other)


def test_a_kernel_that_cannot_tell_proves_no_copy_ended(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    die(name)
    control = fcntl.fcntl

    def fail(fd: int, command: int, *rest: object) -> object:
        if command == fcntl.F_OFD_GETLK:
            raise OSError(errno.ENOLCK, "no locks available")
        return control(fd, command, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "fcntl", fail)
        successor = Arena(SHM, name, SIZE, SECOND)
        ((start, size),) = successor.in_use
        assert start == successor.header.chunks_start and start + size == SIZE
    successor.close()


def test_without_locks_of_open_files_a_server_starts_and_a_use_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in sandboxes that lack them."""
    monkeypatch.setattr(fcntl, "F_OFD_SETLK", 99)
    monkeypatch.setattr(fcntl, "F_OFD_GETLK", 99)
    die(name)
    successor = Arena(SHM, name, SIZE, SECOND)
    view = ArenaView(SHM, name, SECOND)
    for _ in range(2):
        with pytest.raises(KVDepotError), view.use([(AT, PAGE)]):
            pytest.fail("a use began without a lock")
    successor.close()
