"""`kvdepot check` on intact and damaged arenas; faults/test_arena_file.py has servers that start on these."""

from __future__ import annotations

import json
import os
import struct
import uuid
from collections.abc import Callable, Iterator

import pytest

from kvdepot import cli
from kvdepot.memory.arena_header import HEADER_BYTES
from kvdepot.memory.records import SLOT_BYTES
from tests.client.engine import CHUNK, Engine
from tests.conftest import SHM, Depot, StartDepot
from tests.server.process import kill

pytestmark = pytest.mark.faults

CHUNKS = 10


class Left:
    """The arena of a killed server, with ten chunks; `restore` undoes what a test has changed in the file."""

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
    found, _ = json.JSONDecoder().raw_decode(check(left.name, "--json")[1])  # a hint may follow on standard error
    assert (found["problems"], found["in_use"], found["chunks"]) == ([], False, CHUNKS)
    assert left.path.read_bytes() == left.data


def test_a_running_servers_arena_can_be_checked(start_depot: StartDepot, check: Run) -> None:
    server = start_depot("--verify", "always", arena_mib=4)
    engine = Engine(server, block_bytes=1024)
    engine.store([1] * CHUNK, [0, 1, 2, 3])
    code, said = check(server.name)
    assert (code, "in use by a server" in said, "1 chunk in" in said) == (0, True, True)
    assert engine.lookup([1] * CHUNK) == CHUNK
    engine.close()


@pytest.mark.parametrize("what", ["record", "bytes"])
def test_damage_is_found_and_nothing_is_changed(left: Left, check: Run, what: str) -> None:
    # Slot 0 is the namespace's, so slot 4 the fourth chunk's.
    left.change(HEADER_BYTES + 4 * SLOT_BYTES + 40 if what == "record" else left.chunks_start + 3 * 16384 + 100)
    before = left.path.read_bytes()
    code, said = check(left.name)
    assert code == 1
    assert "1 problem" in said
    assert ("incomplete records" if what == "record" else "its bytes do not match its checksum") in said
    assert left.path.read_bytes() == before


@pytest.mark.parametrize(
    ("offset", "said"), [(0, "not a kvdepot arena"), (8, "format "), (20, "header"), (None, "truncated")]
)
def test_check_names_a_file_that_is_not_a_complete_arena(left: Left, check: Run, offset: int | None, said: str) -> None:
    if offset is None:
        os.truncate(left.path, HEADER_BYTES + 100)
    else:
        left.change(offset, 0x20)
    code, told = check(left.name)
    assert code == 1 and said in told


def test_check_names_a_missing_arena(check: Run) -> None:
    name = f"kvdepot-test-{uuid.uuid4().hex[:12]}"
    code, said = check(name)
    assert (code, name in said, "Traceback" not in said) == (1, True, True)
