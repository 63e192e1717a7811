"""A client's connection under any sequence of events: every request ends once, with a value or an error.

The same network, servers and clock tell in single tests when a copy ends, and how often a server is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import UnionType

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvdepot.client.connection import DEADLINE_S, GRACE_S, LINGER_S, Connection
from kvdepot.client.phases import TRANSITIONS, Change, Phase
from kvdepot.client.servers import Introduction
from kvdepot.errors import Busy, KVDepotError, Unavailable, UnknownClient, UnknownInstance
from kvdepot.protocol import wire
from kvdepot.protocol.handshake import SECRET_BYTES, Challenge, Seal
from kvdepot.protocol.layout import Layout, Mapping, Segment

SECRET, LIVENESS = b"a" * SECRET_BYTES, b"secret of a liveness file"
LAYOUTS = [Layout([Mapping("kv", 1 << 16, gpu)], [Segment(0, 0, 4096, 4096)], 16, b"f" * 32) for gpu in ("", "GPU-0")]
COPY = wire.Store | wire.Retrieve


class Server:
    """A run of a server, which answers when the machine says so, and the watch of its life."""

    def __init__(self, number: int) -> None:
        self.boot = number.to_bytes(wire.BOOT_BYTES, "little")
        self.secret = SECRET
        self.is_dead = False
        self.died_at = 0.0
        self.watches = 0  # of its life that are open
        self.inbox: list[tuple[bytes, wire.Request]] = []
        self.knows_us = False
        self.instances: set[int] = set()
        self.seal: Seal | None = None
        self.challenge: Challenge | None = None

    def die(self, now: float) -> None:
        if not self.is_dead:
            self.is_dead, self.died_at = True, now

    def is_gone(self) -> bool:
        return self.is_dead

    def close(self) -> None:
        self.watches -= 1

    def answer(self, request: wire.Request) -> object:
        """The outcome of a request, as a real server's."""
        if isinstance(request, wire.Hello):
            self.knows_us, self.seal, self.instances = False, None, set()
            self.challenge = Challenge(request, self.boot, "arena", SECRET)
            return self.challenge.proof
        if isinstance(request, wire.Prove) and self.challenge is not None:
            self.seal, self.knows_us = self.challenge.check(request, LIVENESS), True
            return wire.Welcome(wire.VERSION, 256)
        if not self.knows_us:
            return UnknownClient("say hello")
        match request:
            case wire.Register():
                self.instances.add(request.instance)
            case wire.Unregister():
                self.instances.discard(request.instance)
            case wire.Store() | wire.Retrieve() if request.instance not in self.instances:
                return UnknownInstance("it is not registered")
        return None


def watch_of(servers: list[Server]) -> Callable[[str, bytes], Server]:
    """The connection's `watch`, for servers of which others may follow."""

    def watch(arena: str, boot: bytes) -> Server:
        for server in servers:
            if server.boot == boot and not server.is_dead:
                server.watches += 1
                return server
        raise Unavailable("another server owns the arena, or none")

    return watch


class Connections(RuleBasedStateMachine):
    """One connection, its network, and the servers at its address, one after the other."""

    slow: UnionType = COPY | wire.Lookup
    """Requests that `settle` leaves to `answer`; it answers those of the kind `refused` with an error."""
    refused: tuple[type, KVDepotError] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.server: Server | None = None
        self.servers: list[Server] = []
        self.sealed = False
        self.coming: list[bytes] = []
        self.sent: list[tuple[Server, wire.Request]] = []
        self.outcomes: list[tuple[wire.Request, list[object]]] = []
        self.wanted: set[int] = set()  # instances that are to be registered
        self.reached: dict[bytes, list[Server]] = {}  # by number of a copy or lookup: whom it was sent to
        self.lookups: dict[bytes, str] = {}  # requests of lookups that were sent
        self.ended_lookups: set[bytes] = set()  # sent lookups whose session has ended
        self.connection = Connection(
            "ipc:///nowhere",
            Introduction("liveness", LIVENESS, others_between=lambda: self.sealed),
            self.send,
            watch_of(self.servers),
            lambda: self.now,
        )

    def send(self, frame: bytes) -> bool:
        server = self.server
        if server is None:
            return False
        number = frame[: wire.ID_BYTES]
        if frame[wire.ID_BYTES :][:1] == b"\xc1":
            if server.seal is None:  # it does not know us, and cannot read this
                server.inbox.append((number, wire.Noop()))
                return True
            opened = server.seal.open(frame)
            assert opened is not None, "it has sealed a message with a wrong key"
            frame = opened
        request = wire.decode_request(frame)[1]
        assert not isinstance(request, KVDepotError)
        self.check_sent(server, number, request)
        self.sent.append((server, request))
        if not isinstance(request, wire.Lookup) or all(each != number for each, _ in server.inbox):
            server.inbox.append((number, request))
        return True

    def check_sent(self, server: Server, number: bytes, request: wire.Request) -> None:
        """What may reach a server, given what others have been sent."""
        before = self.reached.setdefault(number, [])
        if isinstance(request, wire.Register):
            assert request.instance in self.wanted, "tensors that were withdrawn are registered again"
        elif isinstance(request, wire.Lookup):
            assert number not in self.ended_lookups, "nothing would release its pins, or it ends those of a later one"
            self.lookups[number] = request.request
        elif isinstance(request, COPY):
            others = [each for each in before if each is not server]
            assert len({each.boot for each in [*before, server]}) <= 2, "it could be this copy that ends servers"
            assert all(each.is_dead for each in others), "two servers may touch the same blocks"
            has_gpu = LAYOUTS[request.instance].device
            assert not has_gpu or all(self.now >= each.died_at + LINGER_S for each in others)
        if isinstance(request, wire.EndSession) or (isinstance(request, wire.Lookup) and request.hurries):
            ended = [each for each, name in self.lookups.items() if name == request.request]
            self.ended_lookups |= {each for each in ended if each[::-1] < number[::-1]}
        if server.knows_us and not (isinstance(request, COPY) and request.instance not in self.wanted):
            before.append(server)  # else it refuses this

    # -- what the machine does

    @rule(
        kind=st.sampled_from(["lookup", "queued", "hurried", "end", "store", "retrieve", "noop", "gone"]),
        instance=st.integers(0, 1),
    )
    def ask(self, kind: str, instance: int) -> None:
        lookup = partial(wire.Lookup, "model", 1, 4, f"r{instance}", 1, b"h" * 32, True)
        kinds: dict[str, Callable[[], wire.Request]] = {
            "lookup": lookup,
            "queued": partial(lookup, queued=True),
            "hurried": partial(lookup, hurries=True),
            "end": lambda: wire.EndSession(f"r{instance}"),
            "store": lambda: wire.Store(instance, 1, []),
            "retrieve": lambda: wire.Retrieve(instance, []),
            "noop": wire.Noop,
            "gone": lambda: wire.Unregister(instance),
        }
        request, ended = kinds[kind](), list[object]()
        self.outcomes.append((request, ended))
        if kind == "gone":
            self.wanted.discard(instance)
        self.connection.ask(request, ended.append, None if kind in ("queued", "end") else 1.0)

    @rule(instance=st.integers(0, 1))
    def register(self, instance: int) -> None:
        ended: list[object] = []
        self.outcomes.append((wire.Register(instance, LAYOUTS[instance]), ended))
        self.wanted.add(instance)
        self.connection.ask(wire.Register(instance, LAYOUTS[instance]), ended.append)

    @precondition(lambda self: self.server is None)
    @rule(sealed=st.booleans())
    def start(self, sealed: bool) -> None:
        self.sealed = sealed
        self.server = Server(len(self.servers) + 1)
        self.servers.append(self.server)
        self.connection.connected()

    @precondition(lambda self: self.server is not None)
    @rule(dies=st.booleans(), is_reported=st.booleans())
    def end(self, dies: bool, is_reported: bool) -> None:
        """The server dies, or loses its address while it hangs."""
        assert self.server is not None
        if dies:
            self.server.die(self.now)
        self.server = None
        self.coming.clear()
        if is_reported:
            self.connection.disconnected()

    @precondition(lambda self: self.server is not None)
    @rule()
    def cut(self) -> None:
        assert self.server is not None
        self.server.inbox.clear()
        self.coming.clear()
        self.connection.disconnected()
        self.connection.connected()

    @precondition(lambda self: self.server is not None and self.server.inbox)
    @rule(refusal=st.sampled_from([None] * 6 + [Busy("full"), UnknownClient("who?"), Unavailable("stopping")]))
    def answer(self, refusal: KVDepotError | None) -> None:
        server = self.server
        assert server is not None
        number, request = server.inbox.pop(0)
        if server in self.reached.get(number, ()):
            self.reached[number].remove(server)  # whatever it answers, it is done with it
        value = server.answer(request) if refusal is None else refusal
        if isinstance(value, KVDepotError):
            frame = wire.encode_failure(number, server.boot, value)
        else:
            frame = wire.encode_answer(number, server.boot, value)
        is_plain = server.seal is None or isinstance(request, wire.Hello)
        self.coming.append(frame if is_plain or server.seal is None else server.seal.close(frame))

    @precondition(lambda self: self.coming)
    @rule()
    def hear(self) -> None:
        self.connection.take(self.coming.pop(0))

    @rule()
    def greet(self) -> None:
        """Get further than single steps usually do."""
        if self.server is None:
            self.start(False)
        self.register(0)
        self.settle()

    def settle(self) -> None:
        while self.coming or (self.server is not None and self.takes_next(self.server)):
            if self.coming:
                self.hear()
            else:
                assert self.server is not None
                is_refused = self.refused is not None and isinstance(self.server.inbox[0][1], self.refused[0])
                self.answer(self.refused[1] if self.refused is not None and is_refused else None)

    def takes_next(self, server: Server) -> bool:
        """Whether there is a request that it answers at once; the others wait behind it."""
        server.inbox.sort(key=lambda each: isinstance(each[1], self.slow))
        return bool(server.inbox) and not isinstance(server.inbox[0][1], self.slow)

    @rule(seconds=st.sampled_from([0.02, 0.15, 0.6, 1.2, 11.0]))
    def wait(self, seconds: float) -> None:
        waiting = [request for request, ended in self.outcomes if not ended]
        may_be_lost = any(isinstance(request, COPY | wire.EndSession) for request in waiting)
        must_stay = self.connection.welcomed and self.servers[-1].boot == self.connection.incarnation
        must_stay &= not (may_be_lost or any(server.is_dead for server in self.servers) or self.server is None)
        self.now += seconds
        self.connection.expire()
        assert self.connection.welcomed or not must_stay, "a lookup that waits is taken for lost"

    # -- what must hold

    @invariant()
    def requests_end_at_most_once(self) -> None:
        assert all(len(ended) <= 1 for _, ended in self.outcomes)

    @invariant()
    def no_copy_fails_while_a_server_may_run_it(self) -> None:
        if all(server.is_dead for server in self.servers):
            return
        for request, ended in self.outcomes:
            if isinstance(request, COPY) and ended and isinstance(ended[0], Unavailable):
                assert "down" in str(ended[0]) or "answer" in str(ended[0]) or "stopping" in str(ended[0])

    def is_settled(self) -> bool:
        has_server = self.server is None or not self.connection.has_met or self.connection.welcomed
        return has_server and all(ended for _, ended in self.outcomes)

    def teardown(self) -> None:
        """With a server that answers, or with none that lives, all requests end."""
        for server in self.servers:
            server.die(self.now)
        if self.server is not None:
            self.server = None
            self.coming.clear()
            self.connection.disconnected()
        if len(self.outcomes) % 2:
            self.start(False)
        end = self.now + 2 * DEADLINE_S + 2 * GRACE_S
        while self.now < end and not self.is_settled():
            self.wait(0.1)
            while self.coming or (self.server is not None and self.server.inbox):
                self.hear() if self.coming else self.answer(None)
        left = [request for request, ended in self.outcomes if not ended]
        assert not left or not self.connection.has_met, left  # without any server, some wait until the end
        assert self.server is None or not self.connection.has_met or self.connection.welcomed
        self.connection.close()
        assert all(len(ended) == 1 for _, ended in self.outcomes)
        assert not any(server.watches for server in self.servers), "a watch was left open"


TestConnections = Connections.TestCase
TestConnections.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_every_phase_but_the_last_can_lose_its_server_and_be_closed() -> None:
    assert TRANSITIONS.keys() == set(Phase)
    for phase, changes in TRANSITIONS.items():
        assert (Change.CLOSE in changes) == (phase is not Phase.CLOSED)
        assert (Change.LOSE in changes) == (phase not in (Phase.APART, Phase.CLOSED))


class Talk(Connections):
    """A connection whose server answers at once: all but copies."""

    slow = COPY

    def begin(self, instance: int) -> list[list[object]]:
        """Meet a server, register, and send it a store and a retrieve. Returns the outcomes of both."""
        self.start(False)
        self.register(instance)
        self.settle()
        self.ask("store", instance)
        self.ask("retrieve", instance)
        assert self.connection.welcomed and self.copies() == 2
        return [ended for request, ended in self.outcomes if isinstance(request, COPY)]

    def copies(self) -> int:
        return sum(1 for _, request in self.sent if isinstance(request, COPY))

    def pass_time(self, seconds: float) -> None:
        """The client calls `expire` every 10 ms."""
        for _ in range(round(seconds / 0.01)):
            self.wait(0.01)
            self.settle()


@pytest.mark.parametrize("refused", [wire.Hello, wire.Prove, wire.Unregister])
@pytest.mark.parametrize("error", [Busy("too many clients"), UnknownClient("send Hello before Prove")])
def test_an_idle_client_says_hello_until_a_new_server_welcomes_it(refused: type, error: KVDepotError) -> None:
    talk = Talk()
    talk.start(False)
    talk.register(0)
    talk.settle()
    assert talk.connection.welcomed
    talk.end(dies=True, is_reported=True)
    talk.refused = refused, error
    talk.start(False)
    talk.pass_time(5.0)
    assert not talk.connection.welcomed
    hellos = sum(1 for server, request in talk.sent if server is talk.server and isinstance(request, wire.Hello))
    assert 2 <= hellos <= 60, "not so often that it would be a burden"
    talk.refused = None
    talk.pass_time(2.0)
    assert talk.connection.welcomed


@pytest.mark.parametrize("refusal", [Busy("too many wait"), UnknownClient("who are you?")])
def test_a_server_that_keeps_a_registration_is_not_flooded(refusal: KVDepotError) -> None:
    talk = Talk()
    talk.begin(0)
    talk.refused = wire.Unregister, refusal
    talk.cut()
    talk.pass_time(1.0)
    assert talk.copies() == 2, "the server may still be copying, and would copy twice"
    asked = len(talk.sent)
    talk.pass_time(1.0)
    assert len(talk.sent) - asked < 60, "it floods a server that refuses it"
    talk.refused = None
    talk.pass_time(1.0)
    assert talk.copies() == 4


@pytest.mark.parametrize("instance", [0, 1], ids=["CPU", "GPU"])
def test_a_killed_servers_copies_end_if_no_other_comes(instance: int) -> None:
    """Copies queued with a GPU's driver may run on after the process is gone and its lock is free."""
    talk = Talk()
    copies = talk.begin(instance)
    talk.pass_time(2 * LINGER_S)
    assert not any(copies), "it lives"
    talk.end(dies=True, is_reported=False)
    began = talk.now
    while not all(copies):
        assert talk.now < began + 5.0
        talk.pass_time(0.01)
    assert all(isinstance(ended[0], Unavailable) for ended in copies)
    assert max(GRACE_S, LINGER_S * instance) <= talk.now - began < GRACE_S + 0.5


def test_lookups_do_not_wait_for_what_a_dead_servers_gpus_still_copy() -> None:
    talk = Talk()
    copies = talk.begin(1)
    talk.end(dies=True, is_reported=False)
    talk.start(False)
    talk.ask("lookup", 0)
    talk.pass_time(0.5)
    assert talk.outcomes[-1][1] and not any(copies) and talk.copies() == 2, "the old server's copies may still run"
    talk.pass_time(LINGER_S)
    while not all(copies):
        talk.answer(None)
        talk.hear()
    assert talk.copies() == 4
    talk.connection.close()
    assert not any(server.watches for server in talk.servers)


def test_a_new_client_waits_for_a_server_that_is_slow_to_answer() -> None:
    talk = Talk()
    talk.start(False)
    talk.register(0)
    for _ in range(300):
        talk.wait(0.01)
    ((_, ended),) = talk.outcomes
    assert not ended and len(talk.sent) == 3, "a hello a second"
    talk.settle()
    assert ended == [None]


def test_queued_lookups_whose_answers_are_lost_are_asked_again_without_another_hello() -> None:
    talk = Talk()
    talk.start(False)
    talk.register(0)
    talk.settle()
    for instance in (0, 1, 0):
        talk.ask("queued", instance)
    assert talk.server is not None
    talk.server.inbox.clear()
    talk.pass_time(9.0)
    assert [bool(ended) for _, ended in talk.outcomes] == [True, False, False, False]
    talk.pass_time(2.0)
    assert all(ended == [None] for _, ended in talk.outcomes)
    assert sum(isinstance(request, wire.Hello) for _, request in talk.sent) == 1


def test_copies_of_a_server_that_lost_its_address_wait_for_its_own_end() -> None:
    talk = Talk()
    copies, first = talk.begin(0), talk.servers[0]
    talk.end(dies=False, is_reported=True)
    talk.start(False)
    talk.settle()
    assert talk.connection.welcomed
    talk.end(dies=True, is_reported=False)
    talk.pass_time(GRACE_S + 1.0)
    assert not any(copies) and not talk.connection.lost_s, "the first one may still copy"
    first.die(talk.now)
    talk.pass_time(GRACE_S)
    assert all(isinstance(ended[0], Unavailable) for ended in copies) and talk.connection.lost_s


def test_a_client_that_cannot_watch_the_server_is_told_so_and_sends_no_copy() -> None:
    """Else nobody could tell whether blocks may be given back when the server falls silent."""
    talk = Talk()

    def watch(arena: str, boot: bytes) -> Server:
        raise Busy("too many open files")

    talk.connection = Connection("ipc:///nowhere", Introduction("card"), talk.send, watch, lambda: talk.now)
    talk.start(False)
    talk.ask("store", 0)
    talk.settle()
    ((_, (answer,)),) = talk.outcomes
    assert isinstance(answer, Unavailable) and "too many open files" in str(answer)
    assert not talk.connection.welcomed and not talk.copies()
