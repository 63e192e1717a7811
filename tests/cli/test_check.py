"""`kvdepot check` on intact and damaged arenas of real servers; and servers that start on these."""

from __future__ import annotations

import gc
import json
import os
import struct
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvdepot import cli, locks
from kvdepot.cli.check import audit
from kvdepot.memory.arena_header import HEADER_BYTES, ArenaHeader
from kvdepot.memory.records import SLOT_BYTES
from kvdepot.values import plural
from tests.client.engine import CHUNK, Engine
from tests.conftest import SHM, Depot, StartDepot
from tests.server.process import kill, run_serve

pytestmark = pytest.mark.faults

CHUNKS = 10
MIB = 1 << 20


class Left:
    """An arena with chunks that a killed server left, each time as it was."""

    def __init__(self) -> None:
        server = Depot("--verify", "always", arena_mib=4).wait_ready()
        self.url, self.name, self.path = server.url, server.name, SHM / server.name
        self.engine = Engine(server, block_bytes=4096)  # 16 KiB a chunk
        for number in range(CHUNKS):
            self.engine.cache[:4] = number
            self.engine.store([number] * CHUNK, [0, 1, 2, 3])
        kill(server)
        self.data = self.path.read_bytes()
        self.server = server

    def restore(self) -> None:
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(fd, len(self.data))
        os.pwrite(fd, self.data, 0)
        os.close(fd)

    def change(self, offset: int, bits: int = 1) -> None:
        with self.path.open("r+b") as file:
            file.seek(offset)
            file.write(bytes([self.data[offset] ^ bits]))

    @property
    def chunks_start(self) -> int:
        (table,) = struct.unpack_from("<Q", self.data, 24)
        return HEADER_BYTES + int(table) + 64

    def hits(self, verify: str) -> list[int]:
        """Prompts whose bytes come back right from a server on this arena; all others must be no hit, or fail."""
        server = Depot("--verify", verify, url=self.url, name=self.name, arena_mib=4).wait_ready()
        try:
            self.engine.wait_connected()
            found = []
            for number in range(CHUNKS):
                self.engine.cache[4:8] = 255
                hit = self.engine.lookup([number] * CHUNK)
                failed = self.engine.retrieve([number] * CHUNK, [4, 5, 6, 7]) if hit else {4, 5, 6, 7}
                if not failed:
                    assert torch.equal(self.engine.cache[4:8], torch.full_like(self.engine.cache[4:8], number))
                    found.append(number)
            return found
        finally:
            server.close()


@pytest.fixture(scope="module")
def module_left() -> Iterator[Left]:
    left = Left()
    yield left
    left.engine.close()
    left.server.close()


@pytest.fixture
def left(module_left: Left) -> Left:
    module_left.restore()
    return module_left


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(name: str, *flags: str) -> tuple[int, str]:
        code = cli.main(["check", "--arena-name", name, *flags])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def test_a_sound_arena_has_no_problems(left: Left, check: Run) -> None:
    code, said = check(left.name)
    assert code == 0
    assert f"{CHUNKS} chunks in 1 namespace: {CHUNKS} shards, {CHUNKS * 16} KiB" in said
    assert f"{CHUNKS} shards have a checksum" in said and "0 problems" in said
    found = json.loads(check(left.name, "--json")[1])
    assert (found["problems"], found["in_use"], found["chunks"]) == ([], False, CHUNKS)
    assert left.path.read_bytes() == left.data


def test_a_running_servers_arena_can_be_checked_but_not_fixed(start_depot: StartDepot, check: Run) -> None:
    server = start_depot("--verify", "always", arena_mib=4)
    engine = Engine(server, block_bytes=1024)
    engine.store([1] * CHUNK, [0, 1, 2, 3])
    code, said = check(server.name)
    assert (code, "in use by a server" in said, "1 chunk in" in said) == (0, True, True)
    code, said = check(server.name, "--fix", "--yes")
    assert code == 1
    assert "stop it with --on-stop keep before fixing" in said
    assert engine.lookup([1] * CHUNK) == CHUNK
    engine.close()


@pytest.mark.parametrize("what", ["record", "bytes"])
def test_damage_is_found_and_fixed_alone(left: Left, check: Run, what: str) -> None:
    # Slot 0 is the namespace's, so slot 4 the fourth chunk's.
    left.change(HEADER_BYTES + 4 * SLOT_BYTES + 40 if what == "record" else left.chunks_start + 3 * 16384 + 100)
    before = left.path.read_bytes()
    code, said = check(left.name)
    assert code == 1
    assert "1 problem" in said
    assert ("incomplete records" if what == "record" else "its bytes do not match its checksum") in said
    assert left.path.read_bytes() == before, "a check alone changes nothing"
    code, said = check(left.name, "--fix", "--yes")
    assert code == 0
    assert "1 problem, removed" in said
    code, said = check(left.name)
    assert code == 0
    assert f"{CHUNKS - 1} chunks" in said
    assert len(left.hits("off")) == CHUNKS - 1


def test_an_arena_that_was_fixed_is_free_at_once(left: Left) -> None:
    gc.disable()  # the index is a circle of references, and has the file mapped
    try:
        assert audit(left.name, True).fixed
        with left.path.open("rb") as file:
            assert not locks.is_locked(file.fileno())
    finally:
        gc.enable()


def test_a_server_serves_no_damaged_record_and_no_flipped_bit(left: Left) -> None:
    for slot in (2, 5, 7):
        left.change(HEADER_BYTES + slot * SLOT_BYTES + 60)
    left.change(left.chunks_start + 3 * 16384 + 5000, 0x10)
    assert left.hits("always") == [0, 2, 5, 7, 8, 9]


def test_a_damaged_namespace_takes_its_chunks_with_it(left: Left, check: Run) -> None:
    left.change(HEADER_BYTES + 50)
    code, said = check(left.name)
    assert (code, "0 chunks" in said, "its namespace is not recorded" in said) == (1, True, True)
    assert left.hits("off") == []


@pytest.mark.parametrize("kept", [CHUNKS, 7, 0])
def test_an_arena_that_was_cut_off_serves_what_is_left(left: Left, check: Run, kept: int) -> None:
    os.truncate(left.path, left.chunks_start + kept * 16384 + (100 if kept < CHUNKS else 0))
    code, said = check(left.name)
    assert (code, plural(CHUNKS - kept, "problem") in said) == (int(kept < CHUNKS), True)
    assert left.hits("off") == list(range(kept))
    assert left.path.stat().st_size == 4 * MIB if left.path.exists() else True


@pytest.mark.parametrize(
    ("offset", "said", "is_fixable"),
    [
        (0, "not a kvdepot arena", False),  # it may be anyone's
        (8, "format ", False),
        (12, "remove", True),
        (20, "remove", True),
        (39, "remove", True),
        (None, "truncated", False),
    ],
)
def test_an_arena_with_a_damaged_header_is_refused_with_what_to_do(
    left: Left, check: Run, tmp_path: Path, offset: int | None, said: str, is_fixable: bool
) -> None:
    if offset is None:
        os.truncate(left.path, HEADER_BYTES + 100)
    else:
        left.change(offset, 0x20)
    damaged = left.path.read_bytes()
    ended = run_serve("--url", f"ipc://{tmp_path}/x.sock", "--arena-name", left.name, "--arena-gib", "0.004")
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert said in ended.stderr and "remove" in ended.stderr
    assert left.path.read_bytes() == damaged, "a refused file is left as it was"
    assert check(left.name)[0] == 1
    code, _ = check(left.name, "--fix", "--yes")
    assert (code, left.path.exists()) == ((0, False) if is_fixable else (1, True))


def test_an_arena_that_is_not_there_is_named(check: Run) -> None:
    name = f"kvdepot-test-{uuid.uuid4().hex[:12]}"
    code, said = check(name)
    assert (code, name in said, "Traceback" not in said) == (1, True, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
def test_an_arena_of_another_user_is_refused_and_left_alone(left: Left, check: Run, tmp_path: Path) -> None:
    os.chown(left.path, 12345, -1)
    try:
        ended = run_serve("--url", f"ipc://{tmp_path}/x.sock", "--arena-name", left.name, "--arena-gib", "0.004")
        assert (ended.returncode, "is not a file of user" in ended.stderr) == (1, True)
        code, said = check(left.name)
        assert (code, "is not a file of user" in said) == (1, True)
        assert left.path.read_bytes() == left.data
    finally:
        os.chown(left.path, 0, -1)


def test_a_header_says_of_itself_whether_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "arena"
    header = ArenaHeader(1 << 20, 4096, b"bootboot")
    file.write_bytes(header.pack())
    with file.open("rb") as opened:
        assert ArenaHeader.read(opened.fileno(), file) == header
    file.write_bytes(bytes(40))
    with file.open("rb") as opened:
        assert ArenaHeader.read(opened.fileno(), file) is None
