"""The `kvdepot` command from its users' view: what it accepts, what it refuses, and what it leaves behind."""

from __future__ import annotations

import contextlib
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from kvdepot.adapters import LoadStoreOp, MessageQueueClient
from kvdepot.config import Config
from kvdepot.errors import ArenaError
from kvdepot.protocol import wire
from kvdepot.protocol.layout import chunk_format
from kvdepot.server.loop import Server
from tests.cli.command import run
from tests.client.engine import CHUNK, Engine, works
from tests.conftest import HANG_S, SHM, Depot, StartDepot, eventually
from tests.harness import PlainLiveness
from tests.ports import free_port
from tests.server.process import kill

pytestmark = pytest.mark.faults

MIB = 1 << 20


def socket_path(depot: Depot) -> Path:
    return Path(depot.url.removeprefix("ipc://"))


def files(depot: Depot) -> list[Path]:
    """Socket, lock and arena."""
    path = socket_path(depot)
    return [path, path.with_name(path.name + ".lock"), SHM / depot.name]


@pytest.mark.parametrize(("limit", "most", "says"), [("NOFILE", 16, "ulimit -n"), ("AS", 300 << 20, "ulimit -v")])
def test_a_process_that_may_have_too_little_is_told_what_to_raise(limit: str, most: int, says: str) -> None:
    lower = "import resource, os, sys; resource.setrlimit(getattr(resource, sys.argv[1]), (int(sys.argv[2]),) * 2); "
    ended = subprocess.run(
        [
            sys.executable, "-c", lower + "os.execv(sys.executable, [sys.executable, *sys.argv[3:]])",
            f"RLIMIT_{limit}", str(most), "-m", "kvdepot.cli", "serve", "--arena-gib", "0.1",
        ],
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert ended.stderr.startswith("kvdepot: ") and says in ended.stderr and ended.stderr.count("\n") == 1


def test_an_arena_that_cannot_be_mapped_leaves_no_file() -> None:
    name = f"kvdepot-test-{uuid.uuid4().hex[:12]}"
    said = subprocess.run(
        [
            sys.executable, "-c",
            "import resource, sys; from kvdepot.memory.arena import Arena\n"
            "from kvdepot.memory.shm import SHM\n"
            "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
            "resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20),) * 2)\n"
            "try:\n Arena(SHM, sys.argv[1], 64 << 20, b'bootboot')\n"
            "except Exception as exc:\n print(type(exc).__name__, exc)",
            name,
        ],
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert said.stdout.startswith("ArenaError an arena of 64 MiB cannot be mapped"), said.stderr
    assert not (SHM / name).exists()


def test_a_server_without_standard_files_keeps_their_numbers_from_its_own(tmp_path: Path) -> None:
    name = f"kvdepot-test-{uuid.uuid4().hex[:12]}"
    url = f"ipc://{tmp_path}/s"
    Depot.names.add(name)
    process = subprocess.Popen(
        [
            "/bin/sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh",
            sys.executable, "-m", "kvdepot.cli", "serve", "--url", url, "--arena-name", name, "--arena-gib", "0.05",
        ]
    )  # fmt: skip
    context: zmq.Context[Any] = zmq.Context()
    client = MessageQueueClient(url, context)
    try:
        answer = client.ask(wire.ChunkSize(), deadline_s=None)
        eventually(lambda: answer.query() or process.poll() is not None)
        assert process.poll() is None
        open_files = {int(fd.name): str(fd.readlink()) for fd in Path(f"/proc/{process.pid}/fd").iterdir()}
        assert [open_files[number] for number in range(3)] == ["/dev/null"] * 3
        assert [number for number, path in open_files.items() if path == f"/dev/shm/{name}"]
    finally:
        client.close()
        context.term()
        process.terminate()
        process.wait(HANG_S)
    assert process.returncode == 0


@pytest.fixture(scope="module")
def small() -> Iterator[Depot]:
    with contextlib.closing(Depot(arena_mib=4)) as server:
        yield server.wait_ready()


@pytest.mark.parametrize("what", ["socket", "arena"])
def test_a_second_server_in_the_same_place_is_refused_and_the_first_goes_on(
    small: Depot, tmp_path: Path, what: str
) -> None:
    other = f"kvdepot-test-{uuid.uuid4().hex[:12]}"
    url, name = (small.url, other) if what == "socket" else (f"ipc://{tmp_path}/other.sock", small.name)
    ended = run("serve", "--url", url, "--arena-name", name, "--arena-gib", "0.01")
    assert ended.returncode == 1
    assert "another kvdepot server" in ended.stderr and "Traceback" not in ended.stderr
    assert (small.url if what == "socket" else small.name) in ended.stderr
    assert not (SHM / other).exists() and list(tmp_path.iterdir()) == []
    assert (SHM / small.name).stat().st_size == 4 * MIB
    assert all(path.exists() for path in files(small)) and works(small)


@pytest.mark.parametrize(("gib", "said"), [("1000000", "does not fit in /dev/shm"), ("0.000001", "raise --arena-gib")])
def test_an_arena_of_an_impossible_size_is_refused(tmp_path: Path, gib: str, said: str) -> None:
    name = f"kvdepot-test-{uuid.uuid4().hex[:12]}"
    ended = run("serve", "--url", f"ipc://{tmp_path}/depot.sock", "--arena-name", name, "--arena-gib", gib)
    assert ended.returncode == 1
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (SHM / name).exists()
    assert list(tmp_path.iterdir()) == []


def test_the_arena_is_never_larger_than_asked(start_depot: StartDepot) -> None:
    server = start_depot(arena_mib=3)
    arena = SHM / server.name
    engine = Engine(server, block_bytes=MIB // 16)  # a chunk of 256 KiB

    def check() -> None:
        info = arena.stat()
        assert info.st_size == 3 * MIB
        assert info.st_blocks * 512 <= 3 * MIB

    for number in range(30):
        engine.store([number] * CHUNK, [0, 1, 2, 3])
        check()
    eventually(lambda: arena.stat().st_blocks * 512 == 3 * MIB)
    status = server.status()
    assert status["evicted_chunks"] > 0
    assert status["used_bytes"] <= status["capacity_bytes"] <= 3 * MIB
    engine.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_server_with_0_and_removes_its_files(start_depot: StartDepot, number: int) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may have been started with nohup themselves
    try:
        server = start_depot()
    finally:
        signal.signal(signal.SIGHUP, before)
    engine = Engine(server)
    engine.store(list(range(CHUNK)), [0, 1, 2, 3])
    assert all(path.exists() for path in files(server))
    server.process.send_signal(number)
    assert server.process.wait(HANG_S) == 0
    assert not any(path.exists() for path in files(server))
    assert server.logged().splitlines()[-1].endswith("stopped")  # nor do libraries complain at the end
    assert "Traceback" not in server.logged()
    engine.close()


def test_a_server_that_is_to_outlive_its_terminal_does_so(start_depot: StartDepot) -> None:
    """As `nohup kvdepot serve` is started: with SIGHUP ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        server = start_depot(arena_mib=4)
    finally:
        signal.signal(signal.SIGHUP, before)
    server.process.send_signal(signal.SIGHUP)
    assert server.status()["clients"]
    assert server.stop() == 0


def test_an_arena_whose_name_was_taken_away_is_told_and_whose_else_is_left_alone(start_depot: StartDepot) -> None:
    server = start_depot(arena_mib=4)
    client = MessageQueueClient(server.url, server.context)
    client.learn_chunk_size(HANG_S)
    path = SHM / server.name
    path.unlink()
    eventually(lambda: client.ask(wire.GetStatus()).result(HANG_S)["unreachable"])
    assert client.ask(wire.Noop()).result(HANG_S) == "ok", "who is connected goes on"
    other = MessageQueueClient(server.url, server.context)
    with pytest.raises(ArenaError, match=f"{path} was removed or replaced while it ran.*restart the server"):
        other.learn_chunk_size(HANG_S)
    path.write_text("somebody else's")
    eventually(lambda: f"was removed or replaced ({path})" in server.logged())
    assert server.logged().count("ERROR") == 1
    for each in (client, other):
        each.close()
    assert server.stop() == 0
    assert server.logged().count("ERROR") == 1, "it is said once"
    assert path.read_text() == "somebody else's"


def test_a_socket_whose_name_was_taken_away_is_made_again(start_depot: StartDepot) -> None:
    server = start_depot(arena_mib=4)
    client = MessageQueueClient(server.url, server.context)
    client.learn_chunk_size(HANG_S)
    socket_path(server).unlink()
    eventually(socket_path(server).exists)
    other = MessageQueueClient(server.url, server.context)
    assert other.learn_chunk_size(HANG_S) == client.ask(wire.ChunkSize()).result(HANG_S)
    other.close()
    eventually(lambda: "was removed: listening there again" in server.logged())
    client.close()
    assert server.stop() == 0
    assert not socket_path(server).exists()


def test_a_removed_folder_of_the_socket_is_reported_and_used_again(start_depot: StartDepot, tmp_path: Path) -> None:
    """As /run/user/UID is removed at a logout, and there again, empty, at the next login."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    server = start_depot(arena_mib=4, url=f"ipc://{folder}/depot.sock")
    client = MessageQueueClient(server.url, server.context)
    client.learn_chunk_size(HANG_S)
    shutil.rmtree(folder)
    told = eventually(lambda: client.ask(wire.GetStatus()).result(HANG_S)["unreachable"])
    assert told == "the folder of the unix socket was removed"
    folder.mkdir(mode=0o700)
    eventually(lambda: not client.ask(wire.GetStatus()).result(HANG_S)["unreachable"])
    assert "another file" not in server.logged()
    client.close()
    assert server.stop() == 0


def test_a_server_that_ends_answers_what_is_under_way(start_depot: StartDepot) -> None:
    server = start_depot()
    engine = Engine(server)
    for number in range(50):
        engine.worker.submit_store_request(f"r{number}", LoadStoreOp([0, 1, 2, 3], token_ids=[number] * CHUNK), None)
    server.process.terminate()
    done: set[str] = set()
    names = {f"r{number}" for number in range(50)}
    eventually(lambda: done.update(engine.worker.get_finished(names)[0] or ()) or done == names)
    assert server.process.wait(HANG_S) == 0
    engine.close()


def test_memory_is_allocated_beside_the_loop_and_given_up_at_the_end(tmp_path: Path) -> None:
    name = f"kvdepot-test-{uuid.uuid4().hex[:12]}"
    server = Server(Config(url=f"ipc://{tmp_path}/sock", arena_name=name, arena_gib=64 / 1024, http="off"))
    server.depot.welcome(b"one", PlainLiveness("liveness"))
    server.depot.handle(b"one", b"register", wire.Register(1, chunk_format(MIB, "chunks"), "m", 1, 0, 1))
    (client,) = server.depot.clients
    for number in (b"number 1", b"number 2"):
        hashes = b"".join(i.to_bytes(16, "little") + number * 2 for i in range(16))
        store = wire.Store(1, [wire.Shards("r", "m", 1, 0, b"", 0, hashes, 1)])
        server._act(server.depot.handle(b"one", number, store))
        (*_, operation) = client.operations.values()
        assert operation.placement is None, "this memory is not there yet"
        if number == b"number 1":
            assert select.select([server._wake], [], [], HANG_S)[0]
            server._collect()
            assert operation.placement is not None and (SHM / name).stat().st_blocks * 512 >= 16 * MIB
    server.close()
    assert not server.hangs and not (SHM / name).exists()
    assert not [each for each in threading.enumerate() if "kvdepot-memory" in each.name]


def test_an_arena_of_another_size_keeps_what_fits(start_depot: StartDepot) -> None:
    first = start_depot(arena_mib=8)
    engine = Engine(first, block_bytes=MIB // 16)  # 256 KiB a chunk
    for number in range(24):
        engine.store([number] * CHUNK, [0, 1, 2, 3])
    kill(first)
    smaller = start_depot(url=first.url, name=first.name, arena_mib=4)
    engine.wait_connected()
    assert (SHM / first.name).stat().st_size == 4 * MIB
    found = dict.fromkeys(range(24), 0)
    for number in found:
        found[number] = engine.lookup([number] * CHUNK, str(number))
        engine.scheduler.end_session(str(number))  # pins of requests that retrieve nothing have a limit
    hits = [number for number in found if found[number]]
    assert smaller.status()["chunks"] == len(hits)
    assert 8 <= len(hits) < 16
    warnings = re.findall(r"WARNING (.*)", smaller.logged())
    reason = "its bytes lie behind the end of the arena, which is smaller now"
    assert warnings == [f"dropped {24 - len(hits)} records during recovery: {reason}; the KV is computed again"]
    for number in hits:
        assert engine.retrieve([number] * CHUNK, [4, 5, 6, 7]) == set()
        assert torch.equal(engine.cache[4:8], engine.cache[:4])
    kill(smaller)
    larger = start_depot(url=first.url, name=first.name, arena_mib=16)
    assert (SHM / first.name).stat().st_size == 16 * MIB
    assert larger.status()["chunks"] == len(hits)
    engine.wait_connected()
    engine.store([99] * CHUNK, [0, 1, 2, 3])
    assert engine.lookup([99] * CHUNK) == CHUNK
    engine.close()


def test_a_tcp_endpoint_on_the_loopback_works_and_is_not_shared(start_depot: StartDepot) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    server = start_depot(url=url, arena_mib=8)
    assert works(server)
    ended = run("serve", "--url", url, "--arena-name", f"{server.name}-2", "--arena-gib", "0.01")
    assert ended.returncode == 1
    assert url in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (SHM / f"{server.name}-2").exists()
    assert works(server)
    assert server.stop() == 0
    assert not (SHM / server.name).exists()


def test_a_file_that_lies_where_a_servers_socket_was_is_told_and_left_alone(start_depot: StartDepot) -> None:
    server = start_depot(arena_mib=4)
    client = MessageQueueClient(server.url, server.context)
    client.learn_chunk_size(HANG_S)
    other = socket_path(server).with_suffix(".other")
    other.write_text("somebody else's")
    other.rename(socket_path(server))
    eventually(lambda: "socket" in client.ask(wire.GetStatus()).result(HANG_S)["unreachable"])
    eventually(lambda: "another file has replaced the unix socket" in server.logged())
    client.close()
    server.process.kill()
