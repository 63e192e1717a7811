"""Connections whose server dies, hangs or restarts: a copy ends only when nothing can touch its blocks any more.

What any sequence of events must keep is in test_connection_machine.py; here are times, and who is asked how often.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvdepot.client.connection import GRACE_S, LINGER_S, Connection
from kvdepot.client.servers import Introduction, LifeWatch
from kvdepot.errors import Busy, KVDepotError, Unavailable, UnknownClient
from kvdepot.protocol import wire
from tests.client.test_connection_machine import COPY, LAYOUTS, LIVENESS, Server, watch_of

CPU, GPU = LAYOUTS


class Talk:
    """A connection with a network, servers and a clock of the test."""

    def __init__(self) -> None:
        self.now = 0.0
        self.server: Server | None = None
        self.servers: list[Server] = []
        self.replies: list[bytes] = []
        self.slow: list[bytes] = []  # answers to registrations, where they are held back
        self.holds_back = False
        self.refuses: dict[type, KVDepotError] = {}  # kinds of requests that get an error
        self.sent: list[tuple[Server, wire.Request]] = []
        self.copies: list[tuple[Server, bytes]] = []  # by number
        self.connection = Connection(
            "ipc:///nowhere", Introduction("card", LIVENESS), self.send, watch_of(self.servers), lambda: self.now
        )

    def serve(self) -> Server:
        """A server takes the address."""
        self.server = Server(len(self.servers) + 1)
        self.servers.append(self.server)
        return self.server

    def send(self, frame: bytes) -> bool:
        """Deliver a frame; the server answers all but copies at once."""
        server = self.server
        if server is None or server.is_dead:
            return False
        number, request = frame[: wire.ID_BYTES], wire.decode_request(frame)[1]
        assert not isinstance(request, KVDepotError)
        self.sent.append((server, request))
        if type(request) in self.refuses:
            self.replies.append(wire.encode_failure(number, server.boot, self.refuses[type(request)]))
        elif isinstance(request, COPY):
            self.copies.append((server, number))
        else:
            value = 7 if isinstance(request, wire.Lookup) else server.answer(request)
            slow = self.holds_back and isinstance(request, wire.Register)
            (self.slow if slow else self.replies).append(wire.encode_answer(number, server.boot, value))
        return True

    def ask(self, request: wire.Request, done: Callable[[Any], None] = lambda _: None) -> None:
        self.connection.ask(request, done)
        self.hear()

    def lose(self) -> None:
        """The connection breaks, messages in transit are lost, and the socket reports it."""
        self.server = None
        self.replies.clear()
        self.connection.disconnected()

    def meet(self) -> Server:
        """Another server takes the address, and the socket connects."""
        server = self.serve()
        self.connection.connected()
        self.hear()
        return server

    def reached(self, server: Server, kind: type) -> int:
        """How many requests of a kind have reached a server."""
        return sum(1 for whom, request in self.sent if whom is server and isinstance(request, kind))

    def answer_copies(self, server: Server) -> None:
        """A server has finished its copies."""
        self.replies += [
            wire.encode_answer(number, server.boot, True) for whom, number in self.copies if whom is server
        ]
        self.hear()

    def hear(self) -> None:
        while self.replies:
            self.connection.take(self.replies.pop(0))

    def wait(self, seconds: float) -> None:
        """Let time pass; the client calls `expire` every 10 ms."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + 0.01, end)
            self.connection.expire()
            self.hear()


@pytest.fixture
def talk() -> Iterator[Talk]:
    talk = Talk()
    yield talk
    talk.connection.close()


def lookup(request: str = "r") -> wire.Lookup:
    return wire.Lookup("model", 1, 4, request, 1, b"h" * 32, True)


def begin_copies(talk: Talk, device: str) -> dict[str, Any]:
    """Register, then send a store and a retrieve, which the server does not answer. Returns their outcomes."""
    told: dict[str, Any] = {}
    talk.ask(wire.Register(1, GPU if device else CPU), lambda value: told.update(registered=value))
    talk.ask(wire.Store(1, 1, []), lambda value: told.update(store=value))
    talk.ask(wire.Retrieve(1, []), lambda value: told.update(retrieve=value))
    assert told.pop("registered") is None
    return told


def test_a_client_that_cannot_watch_the_server_is_told_so_and_sends_no_copy() -> None:
    """Else nobody could tell whether blocks may be given back when the server falls silent."""
    frames: list[bytes] = []

    def send(frame: bytes) -> bool:
        frames.append(frame)
        return True

    def watch(arena: str, boot: bytes) -> LifeWatch:
        raise Busy("too many open files")

    connection = Connection("ipc:///nowhere", Introduction("card"), send, watch, time.monotonic)
    answers: list[Any] = []
    connection.ask(wire.Store(1, 1, []), answers.append)
    (hello,) = frames
    proof = wire.Proof(wire.VERSION, "arena", bytes(16), bytes(32))
    connection.take(wire.encode_answer(hello[: wire.ID_BYTES], b"bootboot", proof))
    (answer,) = answers
    assert isinstance(answer, Unavailable) and "too many open files" in str(answer)
    assert len(frames) == 1 and not connection.welcomed


@pytest.mark.parametrize("refused", [wire.Hello, wire.Prove, wire.Unregister])
@pytest.mark.parametrize("error", [Busy("too many clients"), UnknownClient("send Hello before Prove")])
def test_an_idle_client_says_hello_until_a_new_server_welcomes_it(
    talk: Talk, refused: type, error: KVDepotError
) -> None:
    first = talk.serve()
    talk.ask(wire.Register(1, CPU))
    assert talk.connection.welcomed
    first.die(talk.now)
    talk.lose()
    talk.refuses[refused] = error
    server = talk.meet()
    talk.wait(5.0)
    assert not talk.connection.welcomed
    assert 2 <= talk.reached(server, wire.Hello) <= 60, "not so often that it would be a burden"
    talk.refuses.clear()
    talk.wait(2.0)
    assert talk.connection.welcomed


@pytest.mark.parametrize("refusal", [Busy("too many wait"), UnknownClient("who are you?")])
def test_a_server_that_keeps_a_registration_is_not_flooded(refusal: KVDepotError, talk: Talk) -> None:
    server = talk.serve()
    begin_copies(talk, "")
    talk.refuses[wire.Unregister] = refusal
    talk.lose()
    talk.server = server
    talk.connection.connected()
    talk.wait(1.0)
    assert len(talk.copies) == 2, "the server may still be copying, and would copy twice"
    asked = len(talk.sent)
    talk.wait(1.0)
    assert len(talk.sent) - asked < 60, "it floods a server that refuses it"
    talk.refuses.clear()
    talk.wait(1.0)
    assert len(talk.copies) == 4


@pytest.mark.parametrize("device", ["", "GPU-0"])
def test_a_killed_servers_copies_end_if_no_other_comes(device: str, talk: Talk) -> None:
    """Copies queued with a GPU's driver may run on after the process is gone and its lock is free."""
    server = talk.serve()
    told = begin_copies(talk, device)
    talk.wait(2 * LINGER_S)
    assert told == {}, "it lives"
    server.die(talk.now)
    talk.server = None
    began = talk.now
    while len(told) < 2:
        assert talk.now < began + 5.0
        talk.wait(0.01)
    took = talk.now - began
    assert isinstance(told["store"], Unavailable) and isinstance(told["retrieve"], Unavailable)
    assert max(GRACE_S, LINGER_S if device else 0.0) <= took < GRACE_S + 0.5


def test_lookups_do_not_wait_for_what_a_dead_servers_gpus_still_copy(talk: Talk) -> None:
    server = talk.serve()
    told = begin_copies(talk, "GPU-0")
    server.die(talk.now)
    second = talk.serve()
    talk.ask(lookup(), lambda value: told.update(lookup=value))
    talk.wait(0.5)
    assert told == {"lookup": 7}
    assert not any(whom is second for whom, _ in talk.copies), "the old server's copies may still run"
    talk.wait(LINGER_S)
    talk.answer_copies(second)
    assert told == {"lookup": 7, "store": True, "retrieve": True}
