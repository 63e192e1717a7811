"""Servers that engines start: the shared one, by several at once, and an engine's own, which must end with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvdepot.client import admin
from kvdepot.client.launch import Shared
from kvdepot.protocol.endpoints import holder
from tests.cli.command import run
from tests.conftest import HANG_S, SHM, Depot, eventually

pytestmark = pytest.mark.faults

SHARES = """
import sys
from kvdepot.client import admin
from kvdepot.client.launch import Shared
sys.stdin.readline()
Shared(sys.argv[1]).start()
print("started", flush=True)
sys.stdin.readline()
with admin.connect(sys.argv[1], timeout_s=100) as client:
    print(client.incarnation.hex(), flush=True)
"""
OWNS = """
import sys
from kvdepot.client import admin
from kvdepot.client.launch import Embedded
own = Embedded(sys.argv[1], sys.argv[2])
with admin.connect(sys.argv[1], timeout_s=100):
    print(own._process.pid, flush=True)
    while sys.stdin.readline() == "again\\n":
        own._process.wait()
        assert own.has_crashed() and own.start() and not own.has_crashed()
        with admin.connect(sys.argv[1], timeout_s=100):
            print(own._process.pid, flush=True)
own.close()
assert not own.has_crashed()
"""


@dataclass
class Place:
    """Where servers of one test are, and programs that start them."""

    url: str
    arena: str
    environ: dict[str, str]
    programs: list[subprocess.Popen[str]] = field(default_factory=list)

    def run(self, code: str, *arguments: str) -> subprocess.Popen[str]:
        program = subprocess.Popen(
            [sys.executable, "-c", code, self.url, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=self.environ,
        )  # fmt: skip
        self.programs.append(program)
        return program

    def pid(self) -> int:
        """Of the server that listens; 0: none does."""
        return int(holder(self.url).removeprefix("pid ") or 0)

    def is_clean(self) -> bool:
        """Whether no socket and no arena is left."""
        path = Path(self.url.removeprefix("ipc://"))
        files = [path, path.with_name(f"{path.name}.lock"), SHM / self.arena]
        return not any(file.exists() for file in files)


@pytest.fixture
def make_place(tmp_path: Path) -> Iterator[Callable[..., Place]]:
    made: list[Place] = []

    def make(**settings: str) -> Place:
        arena = f"kvdepot-test-{uuid.uuid4().hex[:12]}"
        Depot.names.add(arena)
        given = {"KVDEPOT_ARENA_NAME": arena, "KVDEPOT_ARENA_GIB": "0.0625", **settings}
        made.append(Place(f"ipc://{tmp_path}/depot.sock", arena, os.environ | given))
        return made[-1]

    yield make
    for place in made:
        for program in place.programs:
            program.kill()
            program.communicate()
        if pid := place.pid():
            os.kill(pid, signal.SIGTERM)
        eventually(place.is_clean)


def tell(program: subprocess.Popen[str], what: str = "go") -> None:
    assert program.stdin is not None
    program.stdin.write(f"{what}\n")
    program.stdin.flush()


def hear(program: subprocess.Popen[str]) -> str:
    assert program.stdout is not None
    return program.stdout.readline().strip()


def test_eight_engines_at_once_start_one_server_that_outlives_them(make_place: Callable[..., Place]) -> None:
    place = make_place()
    engines = [place.run(SHARES) for _ in range(8)]
    for engine in engines:
        tell(engine)
    assert {hear(engine) for engine in engines} == {"started"}
    for engine in engines:
        tell(engine)
    assert len({hear(engine) for engine in engines}) == 1, "they are connected to different servers"
    assert [engine.wait(HANG_S) for engine in engines] == [0] * 8
    log = Shared(place.url).log
    assert log.read_text().count("serving at") == 1
    assert not log.with_suffix(".log.1").exists()
    assert log.stat().st_mode & 0o777 == 0o600
    parent = int(Path(f"/proc/{place.pid()}/stat").read_text().rpartition(")")[2].split()[1])
    assert parent not in [engine.pid for engine in engines]  # else it would die with an engine that kills its children
    eventually(lambda: json.loads(run("status", "--json", "--url", place.url).stdout)["clients"] == 1)  # ours


def test_a_server_is_started_although_the_engine_that_starts_it_is_killed(make_place: Callable[..., Place]) -> None:
    place = make_place()
    engine = place.run(SHARES)
    tell(engine)
    hear(engine)
    engine.kill()
    with admin.connect(place.url, timeout_s=HANG_S) as client:
        assert client.chunk_size == 256


def test_a_server_has_crashed_only_if_an_engine_started_it_and_it_was_not_stopped(
    make_place: Callable[..., Place],
) -> None:
    place = make_place()
    shared = Shared(place.url)
    by_hand = Depot(url=place.url).wait_ready()
    assert not shared.has_crashed()
    by_hand.close()  # kill -9
    eventually(lambda: not shared.is_running())
    assert not shared.has_crashed()
    for end, has_crashed in ((signal.SIGKILL, True), (signal.SIGTERM, False)):
        engine = place.run(SHARES)
        for _ in range(2):
            tell(engine)
            assert hear(engine)
        assert not shared.has_crashed()
        os.kill(place.pid(), end)
        eventually(lambda: not shared.is_running())
        assert shared.has_crashed() is has_crashed


def test_a_start_that_fails_says_why_and_the_next_may_try_again(make_place: Callable[..., Place]) -> None:
    place = make_place(KVDEPOT_ARENA_GIB="100000")
    shared = Shared(place.url)
    for _ in range(2):
        engine = place.run(SHARES)
        tell(engine)
        assert hear(engine) == "started"
        eventually(lambda: not shared.is_running())
        assert "an arena of 97.7 TiB" in shared.failure() or "does not fit in /dev/shm" in shared.failure()
        assert str(shared.log) in shared.failure()
    assert shared.log.with_suffix(".log.1").exists()


def test_a_failed_start_is_remembered_for_one_engine_and_one_start(tmp_path: Path) -> None:
    shared = Shared(f"ipc://{tmp_path}/depot.sock")
    lock = tmp_path / "depot.sock.start"
    lock.write_text("engine-1")
    assert [shared.has_failed_for(engine) for engine in ("engine-1", "engine-1_dp0", "engine-10")] == [
        True, True, False,
    ]  # fmt: skip
    assert not shared.start("engine-1"), "it may have failed since the engine's other process looked"
    os.utime(lock, (time.time() - 3600, time.time() - 3600))
    assert not shared.has_failed_for("engine-1"), "a user may start the engine again, under the id of before"


def test_a_started_server_ends_by_itself_when_no_engine_is_left(make_place: Callable[..., Place]) -> None:
    place = make_place(KVDEPOT_IDLE_EXIT="0.1")
    engine = place.run(SHARES)
    tell(engine)
    hear(engine)
    shared = Shared(place.url)
    eventually(lambda: not shared.is_running() and place.is_clean())
    assert "no engine for 0.1 s" in shared.log.read_text()


@pytest.mark.parametrize("end", ["kill -9", "in order"])
def test_an_engines_own_server_ends_with_the_engine_and_leaves_nothing(
    make_place: Callable[..., Place], end: str
) -> None:
    place = make_place()
    name = uuid.uuid4().hex[:12]
    engine = place.run(OWNS, name)
    pid = hear(engine)
    arena = SHM / f"kvdepot-{os.geteuid()}-engine-{name}"
    assert arena.exists() and place.pid() == int(pid)
    os.kill(int(pid), signal.SIGKILL)
    tell(engine, "again")
    first, pid = pid, hear(engine)
    assert pid != first and place.pid() == int(pid)
    if end == "kill -9":
        engine.kill()
    else:
        tell(engine)
        assert engine.wait(HANG_S) == 0
    eventually(lambda: not Path(f"/proc/{pid}").exists() and not arena.exists() and place.is_clean())


def test_the_next_engine_removes_the_arena_of_a_server_killed_with_its_engine(make_place: Callable[..., Place]) -> None:
    place = make_place()
    left, young = (SHM / f"kvdepot-{os.geteuid()}-engine-{uuid.uuid4().hex[:12]}" for _ in range(2))
    try:
        for path in (left, young):
            path.touch(0o600)
        os.utime(left, (0, 0))
        hear(place.run(OWNS, uuid.uuid4().hex[:12]))
        assert not left.exists() and young.exists()
    finally:
        left.unlink(missing_ok=True)
        young.unlink(missing_ok=True)
