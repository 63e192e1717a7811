"""A connection to a server that stops answering: what was sent ends only when nothing can touch its blocks any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from kvdepot import client, connection, handshake, header, wire
from kvdepot.adapters import LMCacheMPWorkerAdapter, LoadStoreOp
from kvdepot.connection import LINGER_S, Connection, Watch
from kvdepot.errors import Busy, Unavailable, VersionMismatch
from kvdepot.layout import Layout, Mapping, Segment

from .conftest import SHM, StartDepot, eventually, suspend


def test_a_client_that_cannot_watch_the_server_is_told_so_and_sends_no_copy() -> None:
    """Else nobody could tell whether blocks may be given back when the server falls silent."""
    frames: list[bytes] = []

    def send(frame: bytes) -> bool:
        frames.append(frame)
        return True

    def watch(arena: str, boot: bytes) -> Watch:
        raise Busy("too many open files")

    connection = Connection("ipc:///nowhere", "card", send, watch, time.monotonic)
    answers: list[Any] = []
    connection.ask(wire.Store(1, 1, []), answers.append)
    (hello,) = frames
    proof = wire.Proof(wire.VERSION, "arena", bytes(16), bytes(32))
    connection.take(wire.encode_answer(hello[: wire.ID_BYTES], b"bootboot", proof))
    (answer,) = answers
    assert isinstance(answer, Unavailable) and "too many open files" in str(answer)
    assert len(frames) == 1 and not connection.welcomed


def test_who_waits_for_a_connection_says_hello_as_soon_as_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (connection, client):
        monkeypatch.setattr(module, "CHECK_S", 60.0)
    url = f"ipc://{tmp_path}/s"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        asking = client.MessageQueueClient(url, context)
        future = asking.ask(wire.ChunkSize())
        waiting = threading.Thread(target=asking.wait, args=(future.query, 30.0))
        waiting.start()
        server.bind(url)
        assert server.poll(10_000), "no hello before the next look at what is overdue"
        identity, hello = server.recv_multipart()
        number, request = wire.decode_request(hello)
        assert isinstance(request, wire.Hello)
        server.send_multipart((identity, wire.encode_failure(number, b"bootboot", VersionMismatch("another"))))
        waiting.join(10.0)
        assert not waiting.is_alive() and future.query()
        asking.close()


def test_a_hello_that_was_refused_is_repeated_at_the_next_look_and_not_by_all_that_happens_at_the_socket() -> None:
    talk = Talk()
    talk.server = Server(f"kvdepot-test-{uuid.uuid4().hex[:12]}", b"12345678")
    try:
        told: list[Any] = []
        talk.ask(wire.Store(1, 1, []), told.append)
        assert talk.connection.welcomed and not told
        hellos = 0

        def refuse(frame: bytes) -> bool:
            nonlocal hellos
            number, request = frame[: wire.ID_BYTES], wire.decode_request(frame)[1]
            assert isinstance(request, wire.Hello)
            hellos += 1
            talk.replies.append(wire.encode_failure(number, b"12345678", Busy("too many clients")))
            return True

        talk.connection._send = refuse
        talk.connection.welcomed = False  # as where its answer may be lost
        for _ in range(100):
            talk.connection.stirred()
            talk.hear()
        assert hellos <= 1 and not told, "its store may still be copied"
        talk.wait(0.05)
        assert 1 <= hellos <= 6
    finally:
        talk.server.kill()
        (SHM / talk.server.name).unlink(missing_ok=True)


@pytest.mark.faults
@pytest.mark.parametrize("is_store", [True, False], ids=["store", "retrieve"])
def test_a_copy_sent_to_a_stopped_server_does_not_end_before_the_server_answers(
    is_store: bool, start_depot: StartDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    depot = start_depot()
    monkeypatch.setattr(connection, "_STALE_S", 0.2)
    monkeypatch.setattr(connection, "_HELLO_S", 0.2)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    worker = LMCacheMPWorkerAdapter(depot.url, context, "stopped", 1, 0, 64)
    worker.register_kv_caches({"layer": torch.zeros(16, 64, 1, 8)})
    suspend(depot.process.pid)
    op = LoadStoreOp([1, 2, 3, 4], token_ids=list(range(256)), start=0, end=256)
    if is_store:
        worker.submit_store_request("r", op, None)
    else:
        worker.submit_retrieve_request("r", op, None)
    futures = worker.store_futures if is_store else worker.retrieve_futures
    (transfer,) = futures["r"]
    # Long enough for several suspicions and hellos that nobody answers.
    assert not worker.mq_client.wait(transfer.done, 2.0), "given back while the sleeping server may still copy"
    os.kill(depot.process.pid, signal.SIGCONT)
    eventually(transfer.done)
    stored, loaded = worker.get_finished({"r"})
    assert (stored if is_store else loaded) == {"r"}
    worker.shutdown()
    context.term()


# The owner of an arena: a server as far as its lock tells.
OWNER = """
import sys
from kvdepot.arena import Arena

arena = Arena(sys.argv[1], 1 << 20, bytes.fromhex(sys.argv[2]))
print("up", flush=True)
sys.stdin.read()
"""


class Server:
    """A process that owns an arena, and the frames that would reach it; the test answers them."""

    def __init__(self, name: str, boot: bytes) -> None:
        self.name = name
        self.boot = boot
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, name, boot.hex()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None and self.process.stdout.readline() == "up\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


CARD = b"secret of a card"


class Talk:
    """A connection whose network and clock are the test's; locks and processes are real."""

    def __init__(self) -> None:
        self.now = 0.0
        self.server: Server | None = None
        self.replies: list[bytes] = []
        self.slow: list[bytes] = []  # answers to registrations, where they are held back
        self.holds_back = False
        self.between = False
        self.seal: handshake.Seal | None = None
        self.connection = Connection(
            "ipc:///nowhere", "card", self.send, header.Watch, lambda: self.now, CARD, lambda: self.between
        )

    def send(self, frame: bytes) -> bool:
        """Deliver; all but copies are answered at once."""
        server = self.server
        if server is None:
            return False
        number, request = frame[: wire.ID_BYTES], wire.decode_request(frame)[1]
        if isinstance(request, wire.Hello):
            secret = header.Watch(server.name, server.boot).secret
            self.challenge = handshake.Challenge(request, server.boot, server.name, secret)
            value: Any = self.challenge.proof
        elif isinstance(request, wire.Prove):
            self.seal = self.challenge.check(request, CARD)
            value = wire.Welcome(wire.VERSION, 256)
        elif isinstance(request, wire.Store | wire.Retrieve):
            return True
        else:
            value = None
        slow = self.holds_back and isinstance(request, wire.Register)
        (self.slow if slow else self.replies).append(wire.encode_answer(number, server.boot, value))
        return True

    def ask(self, request: wire.Request, done: Callable[[Any], None]) -> None:
        self.connection.ask(request, done)
        self.hear()

    def hear(self) -> None:
        while self.replies:
            self.connection.take(self.replies.pop(0))

    def wait(self, seconds: float) -> None:
        """Let time pass as a client does that looks every 10 ms."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + 0.01, end)
            self.connection.expire()
            self.hear()


def layout(device: str) -> Layout:
    return Layout(
        [Mapping("kv", 1 << 20, device, b"handle" if device else b"")], [Segment(0, 0, 4096, 4096)], 16, b"f" * 32
    )


@pytest.fixture
def start_server() -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(name: str = "", boot: bytes = b"boot-one") -> Server:
        started.append(Server(name or f"kvdepot-test-{uuid.uuid4().hex[:12]}", boot))
        return started[-1]

    yield start
    for server in started:
        server.kill()
        (SHM / server.name).unlink(missing_ok=True)


@pytest.fixture
def talk() -> Iterator[Talk]:
    talk = Talk()
    yield talk
    talk.connection.close()


def test_a_registration_that_takes_long_is_waited_for(talk: Talk, start_server: Callable[..., Server]) -> None:
    """Of eight ranks on eight GPUs, say: contexts, a compiler, measurements."""
    talk.server = start_server()
    talk.holds_back = True
    answers: list[Any] = []
    talk.ask(wire.Register(1, layout("GPU-0")), answers.append)
    talk.wait(20.0)
    assert answers == []
    talk.replies += talk.slow
    talk.hear()
    assert answers == [None]


def test_the_end_of_a_session_whose_answer_was_lost_is_told_again(
    talk: Talk, start_server: Callable[..., Server]
) -> None:
    """It has no deadline, for what it pins would stay pinned; nothing else is under way that would find out."""
    talk.server = start_server()
    talk.ask(wire.Noop(), lambda value: None)
    answers: list[Any] = []
    talk.connection.ask(wire.EndSession("r"), answers.append, deadline_s=None)
    talk.replies.clear()  # with the connection that it came by
    talk.wait(60.0)
    assert answers == [None]


@pytest.mark.parametrize("device", ["", "GPU-0"])
@pytest.mark.parametrize("successor", ["none", "at once"])
def test_a_killed_servers_copies_end_at_once_on_the_processor_and_a_moment_later_on_a_gpu(
    device: str, successor: str, talk: Talk, start_server: Callable[..., Server]
) -> None:
    """What was queued with a GPU's driver may run on when the process is gone and its lock is free."""
    server = talk.server = start_server()
    told: dict[str, Any] = {}
    talk.ask(wire.Register(1, layout(device)), lambda value: told.update(registered=value))
    talk.ask(wire.Store(1, 1, []), lambda value: told.update(store=value))
    talk.ask(wire.Retrieve(1, []), lambda value: told.update(retrieve=value))
    assert told == {"registered": None}
    talk.wait(2 * LINGER_S)
    assert told == {"registered": None}, "it lives"
    server.kill()
    talk.server = start_server(server.name, b"boot-two") if successor == "at once" else None
    began = talk.now
    while len(told) < 3:
        assert talk.now < began + 5.0
        talk.wait(0.01)
    took = talk.now - began
    assert isinstance(told["store"], Unavailable) and isinstance(told["retrieve"], Unavailable)
    assert LINGER_S <= took < LINGER_S + 0.5 if device else took < 0.5


def test_lookups_do_not_wait_for_what_a_dead_servers_gpus_still_copy(
    talk: Talk, start_server: Callable[..., Server]
) -> None:
    server = talk.server = start_server()
    told: dict[str, Any] = {}
    talk.ask(wire.Register(1, layout("GPU-0")), lambda value: told.update(registered=value))
    talk.ask(wire.Store(1, 1, []), lambda value: told.update(store=value))
    server.kill()
    talk.server = None
    talk.ask(wire.Noop(), lambda value: told.update(down=value))
    assert isinstance(told["down"], Unavailable)
    assert "store" not in told
    talk.server = start_server(server.name, b"boot-two")
    talk.ask(wire.Noop(), lambda value: told.update(up=value))
    talk.wait(0.05)
    assert told["up"] is None
    assert "store" not in told, "the old server's copy may still run"
    talk.wait(LINGER_S)
    assert isinstance(told["store"], Unavailable)
    talk.ask(wire.Store(1, 2, []), lambda value: told.update(again=value))
    talk.wait(2 * LINGER_S)
    assert "again" not in told, "the new server has it"


def test_copies_of_a_stopped_server_do_not_end_because_another_has_taken_its_address(
    talk: Talk, start_server: Callable[..., Server]
) -> None:
    stopped = talk.server = start_server()
    told: dict[str, Any] = {}
    talk.ask(wire.Register(1, layout("")), lambda value: told.update(registered=value))
    talk.ask(wire.Store(1, 1, []), lambda value: told.update(store=value))
    suspend(stopped.process.pid)
    talk.server = start_server(boot=b"boot-two")
    talk.wait(20.0)  # long enough for its silence to be suspected, and the other one to be found
    talk.ask(wire.Noop(), lambda value: told.update(up=value))
    assert told == {"registered": None, "up": None}
    assert talk.connection.boot == b"boot-two"
    stopped.kill()
    talk.wait(0.1)
    assert isinstance(told["store"], Unavailable)
