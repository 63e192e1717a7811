"""Connections whose server dies, hangs or restarts: a copy ends only when nothing can touch its blocks any more."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from kvdepot.client.connection import GRACE_S, LINGER_S, Connection
from kvdepot.client.servers import Introduction, LifeWatch
from kvdepot.errors import Busy, DeadlineExceeded, KVDepotError, Unavailable, UnknownClient
from kvdepot.memory import arena_header as header
from kvdepot.protocol import handshake, wire
from kvdepot.protocol.layout import Layout, Mapping, Segment
from tests.conftest import HANG_S, SHM


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
    start_server: Callable[..., Server], refused: type, error: KVDepotError
) -> None:
    talk = Talk()
    talk.server = start_server()
    talk.ask(wire.Register(1, layout("")), lambda _: None)
    assert talk.connection.welcomed
    talk.server.kill()
    talk.break_off()
    talk.server = start_server(boot=b"boot-two")
    talk.refuses[refused] = error
    talk.connect()
    talk.wait(5.0)
    assert not talk.connection.welcomed
    assert 2 <= talk.reached(talk.server.boot, wire.Hello) <= 60, "not so often that it would be a burden"
    talk.refuses.clear()
    talk.wait(2.0)
    assert talk.connection.welcomed


def test_a_request_caused_by_the_failure_of_another_is_sent_with_its_own_hello(
    talk: Talk, start_server: Callable[..., Server]
) -> None:
    talk.server = start_server()
    talk.refuses[wire.Hello] = Busy("too many clients")
    answers: list[Any] = []

    def ask_again(value: object) -> None:
        answers.append(value)
        talk.refuses.clear()
        talk.connection.ask(wire.Noop(), answers.append)

    talk.ask(wire.Noop(), ask_again)
    assert isinstance(answers[0], Busy) and answers[1:] == [None]
    assert talk.reached(talk.server.boot, wire.Hello) == 2


@pytest.mark.parametrize("answered", [0, 1], ids=["hello under way", "proof under way"])
def test_an_idle_client_that_finds_its_server_dead_in_a_handshake_meets_the_next(
    start_server: Callable[..., Server], answered: int
) -> None:
    talk = Talk()
    talk.server = start_server()
    talk.ask(wire.Noop(), lambda _: None)
    talk.server.kill()
    talk.break_off()
    talk.server = start_server(boot=b"boot-two")
    talk.connection.connected()
    for _ in range(answered):
        talk.connection.take(talk.replies.pop(0))
    talk.now += 0.1
    talk.connection.expire()  # sees that the first server is gone, and expects nothing from it any more
    talk.hear()
    talk.wait(2.0)
    assert talk.connection.welcomed


# Starts owners of arenas: servers as far as their locks tell. They are forked, so that the imports are made once.
OWNERS = """
import os, signal, sys
from kvdepot.errors import KVDepotError
from kvdepot.memory.arena import Arena

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
end_seen, end = os.pipe()
for line in sys.stdin:
    name, boot = line.split()
    if os.fork() == 0:
        os.close(end)
        try:
            arena = Arena(name, 1 << 20, bytes.fromhex(boot))
        except KVDepotError as exc:
            print(exc, flush=True)
            os._exit(1)
        print(os.getpid(), flush=True)
        os.read(end_seen, 1)
        os._exit(0)
"""


@pytest.fixture(scope="module", autouse=True)
def _owners() -> Iterator[None]:
    with subprocess.Popen(
        [sys.executable, "-c", OWNERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as Server.owners:
        yield


class Server:
    """A process that owns an arena; the test answers for it."""

    owners: ClassVar[subprocess.Popen[str]]

    def __init__(self, name: str, boot: bytes) -> None:
        self.name = name
        self.boot = boot
        assert self.owners.stdin is not None and self.owners.stdout is not None
        self.owners.stdin.write(f"{name} {boot.hex()}\n")
        self.owners.stdin.flush()
        self.pid = int(self.owners.stdout.readline())
        self._process = os.pidfd_open(self.pid)

    def kill(self) -> None:
        """Returns when it has ended."""
        if self._process >= 0:
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
            assert select.select([self._process], [], [], HANG_S)[0]
            os.close(self._process)
            self._process = -1


LEASE = b"secret of a liveness file"


class Talk:
    """A connection with a network and a clock of the test; locks and processes are real."""

    def __init__(self) -> None:
        self.now = 0.0
        self.server: Server | None = None
        self.replies: list[bytes] = []
        self.slow: list[bytes] = []  # answers to registrations, where they are held back
        self.holds_back = False
        self.between = False
        self.seal: handshake.Seal | None = None
        self.connection = Connection(
            "ipc:///nowhere",
            Introduction("card", LEASE, others_between=lambda: self.between),
            self.send,
            header.Watch,
            lambda: self.now,
        )
        self.is_deaf = False  # what reaches the server now is not answered
        self.refuses: dict[type, KVDepotError] = {}  # kinds of requests that get an error
        self.sent: list[tuple[bytes, wire.Request]] = []  # whom it reached, and what it was
        self.copies: list[tuple[bytes, bytes]] = []  # the same of copies, by number

    def send(self, frame: bytes) -> bool:
        """Deliver a frame; the server answers all but copies at once."""
        server = self.server
        if server is None:
            return False
        number, request = frame[: wire.ID_BYTES], wire.decode_request(frame)[1]
        assert not isinstance(request, KVDepotError)
        self.sent.append((server.boot, request))
        if self.is_deaf:
            return True
        if type(request) in self.refuses:
            self.replies.append(wire.encode_failure(number, server.boot, self.refuses[type(request)]))
            return True
        if isinstance(request, wire.Hello):
            secret = header.Watch(server.name, server.boot).secret
            self.challenge = handshake.Challenge(request, server.boot, server.name, secret)
            value: Any = self.challenge.proof
        elif isinstance(request, wire.Prove):
            self.seal = self.challenge.check(request, LEASE)
            value = wire.Welcome(wire.VERSION, 256)
        elif isinstance(request, wire.Store | wire.Retrieve):
            self.copies.append((server.boot, number))
            return True
        else:
            value = 7 if isinstance(request, wire.Lookup) else None
        slow = self.holds_back and isinstance(request, wire.Register)
        (self.slow if slow else self.replies).append(wire.encode_answer(number, server.boot, value))
        return True

    def ask(self, request: wire.Request, done: Callable[[Any], None], deadline_s: float | None = 30.0) -> None:
        self.connection.ask(request, done, deadline_s)
        self.hear()

    def break_off(self) -> None:
        """The connection breaks, messages in transit are lost, and the socket reports it."""
        self.replies.clear()
        self.connection.disconnected()

    def connect(self) -> None:
        """The socket reports a connection."""
        self.connection.connected()
        self.hear()

    def reached(self, boot: bytes, kind: type) -> int:
        """How many requests of a kind have reached a server."""
        return sum(1 for whom, request in self.sent if whom == boot and isinstance(request, kind))

    def answer_copies(self, boot: bytes) -> None:
        """The server of that boot has finished its copies."""
        for whom, number in self.copies:
            if whom == boot:
                self.replies.append(wire.encode_answer(number, boot, True))
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


@pytest.mark.parametrize("has_met", [False, True])
def test_a_closed_connection_ignores_what_its_socket_reports(
    talk: Talk, start_server: Callable[..., Server], has_met: bool
) -> None:
    if has_met:
        talk.server = start_server()
        talk.ask(wire.Noop(), lambda _: None)
        assert talk.connection.welcomed
    talk.connection.close()
    talk.connection.disconnected()
    talk.connection.lose_for_good(Unavailable("refused"))
    talk.wait(2.0)
    assert not talk.connection.welcomed and len(talk.connection) == 0


def test_a_registration_that_takes_long_is_waited_for(talk: Talk, start_server: Callable[..., Server]) -> None:
    """For example with eight ranks on eight GPUs: contexts, a compiler, measurements."""
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
    """It has no deadline, or its pins could stay; and no other request is under way that would reveal the loss."""
    talk.server = start_server()
    talk.ask(wire.Noop(), lambda value: None)
    answers: list[Any] = []
    talk.connection.ask(wire.EndSession("r"), answers.append, deadline_s=None)
    talk.replies.clear()  # with the connection that it came by
    talk.wait(60.0)
    assert answers == [None]


def lookup(request: str = "r") -> wire.Lookup:
    return wire.Lookup("model", 1, 4, request, 1, b"h" * 32, True)


def begin_copies(talk: Talk, device: str) -> dict[str, Any]:
    """Register, then send a store and a retrieve, which the server does not answer. Returns their outcomes."""
    told: dict[str, Any] = {}
    talk.ask(wire.Register(1, layout(device)), lambda value: told.update(registered=value))
    talk.ask(wire.Store(1, 1, []), lambda value: told.update(store=value))
    talk.ask(wire.Retrieve(1, []), lambda value: told.update(retrieve=value))
    assert told.pop("registered") is None
    return told


def test_a_copy_that_a_hanging_server_may_do_is_sent_to_no_successor(
    talk: Talk, start_server: Callable[..., Server]
) -> None:
    first = talk.server = start_server(boot=b"boot-one")
    told = begin_copies(talk, "GPU-0")
    for boot in (b"boot-two", b"boot-333"):
        talk.server = None
        talk.break_off()
        talk.server = start_server(boot=boot)
        talk.connect()
        talk.wait(0.3)
        successor = talk.server
    successor.kill()
    talk.server = None
    talk.break_off()
    talk.server = start_server(boot=b"boot-444")
    talk.connect()
    talk.wait(2 * LINGER_S)
    assert {boot for boot, _ in talk.copies} == {b"boot-one"} and told == {}
    first.kill()
    talk.wait(2 * LINGER_S)
    assert {boot for boot, _ in talk.copies} == {b"boot-one", b"boot-444"} and told == {}
    talk.answer_copies(b"boot-444")
    assert told == {"store": True, "retrieve": True}


@pytest.mark.parametrize("refusal", [Busy("too many wait"), UnknownClient("who are you?")])
def test_a_copy_is_sent_again_only_when_its_registration_was_taken_back(
    refusal: KVDepotError, talk: Talk, start_server: Callable[..., Server]
) -> None:
    """Else the server may still be copying, and would copy twice."""
    talk.server = start_server()
    begin_copies(talk, "")
    assert len(talk.copies) == 2
    talk.refuses[wire.Unregister] = refusal
    talk.break_off()
    talk.connect()
    talk.wait(1.0)
    assert len(talk.copies) == 2
    asked = len(talk.sent)
    talk.wait(1.0)
    assert len(talk.sent) - asked < 60, "it floods a server that refuses it"
    talk.refuses.clear()
    talk.wait(1.0)
    assert len(talk.copies) == 4


@pytest.mark.parametrize("device", ["", "GPU-0"])
def test_a_killed_servers_copies_end_if_no_other_comes(
    device: str, talk: Talk, start_server: Callable[..., Server]
) -> None:
    """Copies queued with a GPU's driver may run on after the process is gone and its lock is free."""
    server = talk.server = start_server()
    told = begin_copies(talk, device)
    talk.wait(2 * LINGER_S)
    assert told == {}, "it lives"
    server.kill()
    talk.server = None
    began = talk.now
    while len(told) < 2:
        assert talk.now < began + 5.0
        talk.wait(0.01)
    took = talk.now - began
    assert isinstance(told["store"], Unavailable) and isinstance(told["retrieve"], Unavailable)
    assert max(GRACE_S, LINGER_S if device else 0.0) <= took < GRACE_S + 0.5


@pytest.mark.parametrize("device", ["", "GPU-0"])
@pytest.mark.parametrize("is_heard", [True, False], ids=["heard of", "found out"])
def test_a_killed_servers_copies_are_asked_of_the_next_once(
    device: str, is_heard: bool, talk: Talk, start_server: Callable[..., Server]
) -> None:
    server = talk.server = start_server()
    told = begin_copies(talk, device)
    server.kill()
    talk.server = start_server(server.name, b"boot-two")
    if is_heard:
        talk.break_off()
        talk.connect()
    began = talk.now
    while sum(boot == b"boot-two" for boot, _ in talk.copies) < 2:
        assert talk.now < began + 5.0
        talk.wait(0.01)
    assert talk.now - began >= LINGER_S if device else talk.now - began < 0.5
    assert told == {}
    talk.server.kill()
    talk.server = start_server(server.name, b"boot-3rd")
    while len(told) < 2:
        assert talk.now < began + 10.0
        talk.wait(0.01)
    assert isinstance(told["store"], Unavailable) and isinstance(told["retrieve"], Unavailable)
    assert not any(boot == b"boot-3rd" for boot, _ in talk.copies), "it could be they that end servers"


def test_what_a_living_server_was_asked_is_asked_again_after_a_break(
    talk: Talk, start_server: Callable[..., Server]
) -> None:
    server = talk.server = start_server()
    told = begin_copies(talk, "")
    talk.is_deaf = True
    talk.ask(lookup(), lambda value: told.update(lookup=value), 1.0)
    talk.ask(wire.EndSession("s"), lambda value: told.update(end=value), None)
    talk.ask(wire.Status(), lambda value: told.update(status=value))
    assert told == {}
    talk.break_off()
    assert isinstance(told.pop("status"), Unavailable), "who knows whether it was done"
    assert told == {}
    talk.is_deaf = False
    talk.connect()
    assert told == {"lookup": 7, "end": None}
    talk.answer_copies(server.boot)
    assert told == {"lookup": 7, "end": None, "store": True, "retrieve": True}
    assert talk.reached(server.boot, wire.Store) == talk.reached(server.boot, wire.Lookup) == 2


def test_requests_wait_a_moment_for_a_lost_server_and_then_fail_at_once(
    talk: Talk, start_server: Callable[..., Server]
) -> None:
    server = talk.server = start_server()
    told: dict[str, Any] = {}
    talk.ask(wire.Noop(), lambda value: told.update(first=value))
    server.kill()
    talk.server = None
    talk.break_off()
    talk.ask(lookup(), lambda value: told.update(lookup=value), 10.0)
    talk.wait(GRACE_S - 0.1)
    assert told == {"first": None}
    talk.wait(0.2)
    assert isinstance(told["lookup"], Unavailable)
    talk.ask(lookup("q"), lambda value: told.update(late=value), 10.0)
    assert isinstance(told["late"], Unavailable)
    talk.server = start_server(server.name, b"boot-two")
    talk.connect()
    assert talk.connection.welcomed, "nobody has to ask for that"
    talk.ask(lookup(), lambda value: told.update(again=value), 10.0)
    assert told["again"] == 7


def test_a_lookup_is_not_asked_again_when_its_session_has_ended(
    talk: Talk, start_server: Callable[..., Server]
) -> None:
    """Its pins would stay."""
    server = talk.server = start_server()
    told: dict[str, Any] = {}
    talk.ask(wire.Noop(), lambda value: told.update(first=value))
    talk.is_deaf = True
    talk.ask(lookup(), lambda value: told.update(lookup=value), 1.0)
    talk.is_deaf = False
    talk.ask(wire.EndSession("r"), lambda value: told.update(end=value), None)
    assert told == {"first": None, "end": None}
    talk.break_off()
    assert isinstance(told["lookup"], Unavailable)
    talk.connect()
    assert talk.reached(server.boot, wire.Lookup) == 1


def test_lookups_do_not_wait_for_what_a_dead_servers_gpus_still_copy(
    talk: Talk, start_server: Callable[..., Server]
) -> None:
    server = talk.server = start_server()
    told = begin_copies(talk, "GPU-0")
    server.kill()
    talk.server = start_server(server.name, b"boot-two")
    talk.ask(lookup(), lambda value: told.update(lookup=value))
    talk.wait(0.5)
    assert told == {"lookup": 7}
    assert not any(boot == b"boot-two" for boot, _ in talk.copies), "the old server's copies may still run"
    talk.wait(LINGER_S)
    talk.answer_copies(b"boot-two")
    assert told == {"lookup": 7, "store": True, "retrieve": True}


@pytest.mark.parametrize("boot", [b"boot-one", b"boot-two"], ids=["the same server", "another"])
def test_tensors_that_are_being_withdrawn_are_mapped_by_no_server_again(
    boot: bytes, talk: Talk, start_server: Callable[..., Server]
) -> None:
    """Their memory is about to be freed; and a copy that was sent ends before they are withdrawn."""
    first = talk.server = start_server(boot=b"boot-one")
    told = begin_copies(talk, "")
    talk.is_deaf = True
    talk.ask(wire.Unregister(1), lambda value: told.update(withdrawn=value))
    talk.is_deaf = False
    talk.server = None
    talk.break_off()
    assert told == {}
    if boot == first.boot:
        talk.server = first
    else:
        first.kill()
        talk.server = start_server(boot=boot)
    asked = len(talk.sent)
    talk.connect()
    talk.wait(0.5)
    assert told == {"withdrawn": None}
    again = [request for _, request in talk.sent[asked:] if isinstance(request, wire.Register | wire.Unregister)]
    assert wire.Unregister(1) in again
    assert not any(isinstance(request, wire.Register) for request in again)


def test_tensors_registered_without_a_server_are_once_there_is_one(
    talk: Talk, start_server: Callable[..., Server]
) -> None:
    """An engine that wakes while its server is away shares its KV as soon as it is back."""
    first = talk.server = start_server(boot=b"boot-one")
    told: list[Any] = []
    talk.ask(wire.Noop(), lambda value: None)
    talk.refuses[wire.Register] = Busy("too many")
    talk.ask(wire.Register(1, layout("")), told.append)
    talk.refuses.clear()
    first.kill()
    talk.server = None
    talk.break_off()
    talk.ask(wire.Register(2, layout("")), told.append)
    talk.wait(2 * GRACE_S)
    assert [type(each) for each in told] == [Busy, Unavailable]
    talk.server = start_server(boot=b"boot-two")
    talk.connect()
    made = [request.instance for _, request in talk.sent if isinstance(request, wire.Register)]
    assert made == [1, 2]
    assert talk.connection.welcomed


def test_a_withdrawal_that_was_given_up_reaches_the_next_server_once(
    talk: Talk, start_server: Callable[..., Server]
) -> None:
    """Else each engine that sleeps while its server is away would leave a registration behind."""
    first = talk.server = start_server(boot=b"boot-one")
    told: list[Any] = []
    talk.ask(wire.Register(1, layout("")), told.append)
    first.kill()
    talk.server = None
    talk.break_off()
    talk.ask(wire.Unregister(1), told.append, 0.1)
    talk.wait(2 * GRACE_S)
    assert [type(each) for each in told] == [type(None), DeadlineExceeded]
    second = talk.server = start_server(boot=b"boot-two")
    talk.connect()
    assert talk.reached(second.boot, wire.Unregister) == 1 and talk.reached(second.boot, wire.Register) == 0
    talk.break_off()
    talk.connect()
    assert talk.connection.welcomed
    assert talk.reached(second.boot, wire.Unregister) == 1
