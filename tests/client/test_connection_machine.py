"""A client's connection under any sequence of events: every request ends once, with a value or an error.

Nothing is answered by a server that has not proved itself. A server has the registrations before any copy of them that
was sent before. A Complete reaches the server that placed its copy, if that still runs.
The same network, servers and clock tell in single tests when a copy ends, and how often a server is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import UnionType

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvdepot.client.connection import DEADLINE_S, GRACE_S, Connection
from kvdepot.client.phases import TRANSITIONS, Change, Phase
from kvdepot.client.servers import Introduction
from kvdepot.errors import (
    Busy,
    KVDepotError,
    LayoutError,
    ProtocolError,
    Unavailable,
    UnknownClient,
    UnknownInstance,
    UnknownRequest,
)
from kvdepot.protocol import wire
from kvdepot.protocol.handshake import SECRET_BYTES, Challenge, Seal
from kvdepot.protocol.layout import BlockFormat

SECRET, LIVENESS = b"a" * SECRET_BYTES, b"secret of a liveness file"
FORMAT = BlockFormat(b"f" * 32, 4096)


class Server:
    """A run of a server, which answers when the machine says so, and the watch of its life."""

    def __init__(self, number: int) -> None:
        self.boot = number.to_bytes(wire.BOOT_BYTES, "little")
        self.secret = SECRET
        self.is_dead = False
        self.watches = 0  # of its life that are open
        self.inbox: list[tuple[bytes, wire.Request]] = []
        self.knows_us = False
        self.instances: set[int] = set()
        self.offered: set[int] = set()  # instances of registrations that were sent to it
        self.placed: dict[bytes, wire.Placement] = {}  # by number of the copy, until its Complete
        self.seal: Seal | None = None
        self.challenge: Challenge | None = None

    def forget(self) -> None:
        """Take the client for dead."""
        self.knows_us, self.seal, self.challenge = False, None, None
        self.instances.clear()
        self.offered.clear()
        self.placed.clear()

    def is_gone(self) -> bool:
        return self.is_dead

    def close(self) -> None:
        self.watches -= 1

    def answer(self, number: bytes, request: wire.Request) -> object:
        """The outcome of a request, as a real server's."""
        if isinstance(request, wire.Hello):
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
            case wire.Store() | wire.Retrieve() | wire.Compare():
                if number not in self.placed and request.instance not in self.instances:
                    return UnknownInstance("it is not registered")
                operation = int.from_bytes(number, "little")
                return self.placed.setdefault(number, wire.Placement(operation, "arena", self.boot, [], []))
            case wire.Complete():
                number = request.operation.to_bytes(wire.ID_BYTES, "little")
                if request.boot != self.boot or self.placed.pop(number, None) is None:
                    return UnknownRequest("it waits for no bytes")
                return True
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

    slow: type | UnionType = wire.Copying | wire.Lookup
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
        self.placements: list[wire.Placement] = []  # that were answered, and are not completed
        self.forged: set[bytes] = set()  # numbers of requests for which others have answered
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
        # What waits for its answer is known when it comes again.
        if not isinstance(request, wire.Copying | wire.Lookup) or all(each != number for each, _ in server.inbox):
            server.inbox.append((number, request))
        return True

    def check_sent(self, server: Server, number: bytes, request: wire.Request) -> None:
        """What may reach a server, given what others have been sent."""
        before = self.reached.setdefault(number, [])
        if isinstance(request, wire.Register):
            assert request.instance in self.wanted, "tensors that were withdrawn are registered again"
            server.offered.add(request.instance)
        elif isinstance(request, wire.Lookup):
            assert number not in self.ended_lookups, "nothing would release its pins, or it ends those of a later one"
            self.lookups[number] = request.request
        elif isinstance(request, wire.Copying):
            assert len({each.boot for each in [*before, server]}) <= 2, "it could be this copy that ends servers"
            is_new = server.knows_us and before and server not in before and request.instance in self.wanted
            assert not is_new or request.instance in server.offered, "it is repeated before its registration"
        if isinstance(request, wire.EndSession) or (isinstance(request, wire.Lookup) and request.hurries):
            ended = [each for each, name in self.lookups.items() if name == request.request]
            self.ended_lookups |= {each for each in ended if each[::-1] < number[::-1]}
        if server.knows_us and not (isinstance(request, wire.Copying) and request.instance not in self.wanted):
            before.append(server)  # else it refuses this

    # -- what the machine does

    @rule(
        kind=st.sampled_from(["lookup", "queued", "hurried", "end", "store", "retrieve", "compare", "noop", "gone"]),
        instance=st.integers(0, 1),
    )
    def ask(self, kind: str, instance: int) -> None:
        lookup = partial(wire.Lookup, "model", 1, 4, f"r{instance}", 1, b"h" * 32, True)
        kinds: dict[str, Callable[[], wire.Request]] = {
            "lookup": lookup,
            "queued": partial(lookup, queued=True),
            "hurried": partial(lookup, hurries=True),
            "end": lambda: wire.EndSession(f"r{instance}"),
            "store": lambda: wire.Store(instance, []),
            "retrieve": lambda: wire.Retrieve(instance, []),
            "compare": lambda: wire.Compare(instance, [], 0.1),
            "noop": wire.Noop,
            "gone": lambda: wire.Unregister(instance),
        }
        if kind == "gone":
            self.wanted.discard(instance)
        self.send_request(kinds[kind](), None if kind in ("queued", "end") else 1.0)

    def send_request(self, request: wire.Request, deadline_s: float | None = DEADLINE_S) -> list[object]:
        ended: list[object] = []
        self.outcomes.append((request, ended))
        self.connection.ask(request, ended.append, deadline_s)
        return ended

    @rule(instance=st.integers(0, 1))
    def register(self, instance: int) -> None:
        self.wanted.add(instance)
        self.send_request(wire.Register(instance, FORMAT))

    @precondition(lambda self: self.placements)
    @rule()
    def complete(self) -> None:
        placed = self.placements.pop(0)
        self.send_request(wire.Complete(placed.operation, placed.boot))

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
        self.server.is_dead |= dies
        self.server = None
        self.coming.clear()
        if is_reported:
            self.connection.disconnected()

    @precondition(lambda self: self.server is not None)
    @rule()
    def cut(self) -> None:
        assert self.server is not None
        self.coming.clear()
        self.connection.disconnected()
        self.come_back(self.server)

    @precondition(lambda self: self.server is not None)
    @rule()
    def forget(self) -> None:
        assert self.server is not None
        self.server.forget()

    @precondition(lambda self: self.connection.requests.pending)
    @rule(data=st.data())
    def forge(self, data: st.DataObject) -> None:
        """Somebody else answers a request, whom the kernel or a seal keeps from saying that he is the server."""
        number = data.draw(st.sampled_from(sorted(self.connection.requests.pending))).to_bytes(wire.ID_BYTES, "little")
        self.forged.add(number)
        self.coming.append(wire.encode_answer(number, b"impostor", "forged"))

    @precondition(lambda self: self.server is not None and self.server.inbox)
    @rule(refusal=st.sampled_from([None] * 6 + [Busy("full"), UnknownClient("who?"), Unavailable("stopping")]))
    def answer(self, refusal: KVDepotError | None) -> None:
        server = self.server
        assert server is not None
        number, request = server.inbox.pop(0)
        if server in self.reached.get(number, ()):
            self.reached[number].remove(server)  # whatever it answers, it is done with it
        # What holds memory is not refused: nobody would ever give that back.
        is_held = number in server.placed or isinstance(request, wire.Complete)
        value = server.answer(number, request) if refusal is None or is_held else refusal
        if isinstance(value, KVDepotError):
            frame = wire.encode_failure(number, server.boot, value)
        else:
            frame = wire.encode_answer(number, server.boot, value)
        is_plain = server.seal is None or isinstance(request, wire.Hello)
        self.coming.append(frame if is_plain or server.seal is None else server.seal.close(frame))

    @precondition(lambda self: self.coming)
    @rule()
    def hear(self) -> None:
        frame = self.coming.pop(0)
        before = [len(ended) for _, ended in self.outcomes]
        self.connection.take(frame)
        boot = frame[wire.ID_BYTES : wire.ID_BYTES + wire.BOOT_BYTES]
        for (_, ended), count in zip(self.outcomes, before, strict=False):
            if len(ended) > count and not isinstance(ended[0], KVDepotError):
                assert boot == self.connection.incarnation, "answered by one who has not proved himself"
                assert ended[0] != "forged"
                if isinstance(ended[0], wire.Placement):
                    self.placements.append(ended[0])

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
        lasting = wire.Copying | wire.Complete | wire.EndSession | wire.Register
        may_be_lost = any(isinstance(each.request, lasting) for each in self.connection.requests.pending.values())
        must_stay = self.connection.welcomed and self.servers[-1].boot == self.connection.incarnation
        must_stay &= not (may_be_lost or any(server.is_dead for server in self.servers) or self.server is None)
        self.now += seconds
        self.connection.expire()
        assert self.connection.welcomed or not must_stay, "a lookup that waits is taken for lost"

    # -- what must hold

    @invariant()
    def requests_end_at_most_once(self) -> None:
        assert all(len(ended) <= 1 for _, ended in self.outcomes)

    def is_settled(self) -> bool:
        has_server = self.server is None or not self.connection.has_met or self.connection.welcomed
        return has_server and all(ended for _, ended in self.outcomes)

    def teardown(self) -> None:
        """With a server that answers, or with none that lives, all requests end; and nothing is held for nobody."""
        last, self.server = self.server, None
        for server in self.servers:
            server.is_dead |= server is not last or len(self.outcomes) % 3 > 0
        self.coming.clear()
        self.connection.disconnected()
        if last is not None and not last.is_dead:
            self.come_back(last)
        elif len(self.outcomes) % 3 == 1:
            self.start(False)
        self.end_all()
        if self.server is last is not None:
            while self.placements:
                self.complete()
            self.end_all()
            assert last.placed.keys() <= self.forged, "no Complete has reached the server for what it placed"
        left = [request for request, ended in self.outcomes if not ended]
        assert not left or not self.connection.has_met, left  # without any server, some wait until the end
        assert self.server is None or not self.connection.has_met or self.connection.welcomed
        self.connection.close()
        assert all(len(ended) == 1 for _, ended in self.outcomes)
        assert not any(server.watches for server in self.servers), "a watch was left open"

    def come_back(self, server: Server) -> None:
        """The server can be reached again; what was on the way to it is lost."""
        server.inbox.clear()
        self.server = server
        self.connection.connected()

    def end_all(self) -> None:
        end = self.now + 2 * DEADLINE_S + 2 * GRACE_S
        while self.now < end and not self.is_settled():
            self.wait(0.1)
            while self.coming or (self.server is not None and self.server.inbox):
                self.hear() if self.coming else self.answer(None)


TestConnections = Connections.TestCase
TestConnections.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_every_phase_but_the_last_can_lose_its_server_and_be_closed() -> None:
    assert TRANSITIONS.keys() == set(Phase)
    for phase, changes in TRANSITIONS.items():
        assert (Change.CLOSE in changes) == (phase is not Phase.CLOSED)
        assert (Change.LOSE in changes) == (phase not in (Phase.APART, Phase.CLOSED))


class Talk(Connections):
    """A connection whose server answers at once: all but copies."""

    slow: type | UnionType = wire.Copying

    def begin(self) -> list[list[object]]:
        """Meet a server, register, and send it a store and a retrieve. Returns the outcomes of both."""
        self.start(False)
        self.register(0)
        self.settle()
        self.ask("store", 0)
        self.ask("retrieve", 0)
        assert self.connection.welcomed and self.copies() == 2
        return [ended for request, ended in self.outcomes if isinstance(request, wire.Copying)]

    def copies(self) -> int:
        return sum(1 for _, request in self.sent if isinstance(request, wire.Copying))

    def pass_time(self, seconds: float) -> None:
        """The client calls `expire` every 10 ms."""
        for _ in range(round(seconds / 0.01)):
            self.wait(0.01)
            self.settle()


@pytest.mark.parametrize("refused", [wire.Hello, wire.Prove])
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


@pytest.mark.parametrize("refusal", [Busy("too many wait"), UnknownClient("who are you?"), LayoutError("too large")])
def test_a_server_that_refuses_registrations_is_not_flooded(refusal: KVDepotError) -> None:
    talk = Talk()
    copies = talk.begin()
    talk.end(dies=True, is_reported=True)
    talk.refused, talk.slow = (wire.Register, refusal), wire.Lookup
    talk.start(False)
    talk.pass_time(1.0)
    assert all(isinstance(ended[0], UnknownInstance) for ended in copies)
    asked = len(talk.sent)
    assert asked < 60
    talk.pass_time(2.0)
    assert len(talk.sent) == asked and talk.connection.welcomed


def test_a_killed_servers_copies_fail_if_no_other_comes_within_the_grace() -> None:
    talk = Talk()
    copies = talk.begin()
    talk.pass_time(2 * GRACE_S)
    assert not any(copies), "it lives"
    talk.end(dies=True, is_reported=False)
    began = talk.now
    while not all(copies):
        assert talk.now < began + 5.0
        talk.pass_time(0.01)
    assert all(isinstance(ended[0], Unavailable) for ended in copies)
    assert GRACE_S <= talk.now - began < GRACE_S + 0.5


def test_a_copy_does_not_fail_while_its_server_runs_whether_connected_or_not() -> None:
    """Nobody would complete what that server has placed."""
    talk = Talk()
    copies, first = talk.begin(), talk.servers[0]
    talk.slow = object  # it is stopped: nothing is answered, no hello either
    talk.pass_time(15.0)
    assert not any(copies)
    talk.end(dies=False, is_reported=True)
    talk.pass_time(5 * GRACE_S)
    assert not any(copies) and not talk.connection.lost_s
    first.is_dead = True
    talk.pass_time(0.1)
    assert all(isinstance(ended[0], Unavailable) for ended in copies) and talk.connection.lost_s


@pytest.mark.parametrize("dies", [True, False], ids=["died", "lost its address"])
def test_copies_are_sent_to_one_successor_of_their_server_and_to_no_third(dies: bool) -> None:
    talk = Talk()
    copies = talk.begin()
    talk.end(dies=dies, is_reported=True)
    talk.start(False)
    talk.pass_time(0.1)
    assert talk.copies() == 4 and not any(copies)
    talk.end(dies=True, is_reported=True)
    talk.start(False)
    talk.pass_time(0.1)
    assert talk.copies() == 4 and all(isinstance(ended[0], Unavailable) for ended in copies)


@pytest.mark.parametrize("is_forged", [True, False])
def test_a_complete_waits_for_its_server_as_long_as_that_runs(is_forged: bool) -> None:
    talk = Talk()
    talk.begin()
    talk.slow = wire.Lookup
    talk.settle()
    if not is_forged:
        talk.end(dies=False, is_reported=True)
        talk.pass_time(2 * GRACE_S)
    talk.complete()
    _, completed = talk.outcomes[-1]
    if is_forged:
        (number,) = talk.connection.requests.pending
        talk.coming.append(wire.encode_answer(number.to_bytes(wire.ID_BYTES, "little"), b"impostor", True))
        talk.hear()
        talk.end(dies=False, is_reported=True)
    talk.pass_time(5 * GRACE_S)
    assert not completed
    talk.come_back(talk.servers[0])
    talk.pass_time(0.1)
    assert completed == [True]


def test_a_registration_follows_a_withdrawal_of_the_same_number_that_was_lost() -> None:
    talk = Talk()
    talk.begin()
    talk.slow = wire.Lookup
    talk.ask("gone", 0)
    assert talk.server is not None
    talk.server.inbox.clear()
    talk.cut()
    talk.register(0)
    talk.settle()
    assert talk.server.instances == {0}
    talk.ask("gone", 0)
    talk.settle()
    assert not talk.server.instances


def test_a_reply_that_cannot_be_read_fails_its_request_and_no_other() -> None:
    talk = Talk()
    copies = talk.begin()
    number = max(talk.connection.requests.pending).to_bytes(wire.ID_BYTES, "little")
    talk.coming.append(number + talk.servers[0].boot + msgspec.msgpack.encode(["Placement", "no number"]))
    talk.hear()
    (stored, (loaded,)) = copies
    assert isinstance(loaded, ProtocolError) and not stored and talk.connection.welcomed


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


def test_a_client_that_cannot_watch_the_server_is_told_so_and_sends_no_copy() -> None:
    """Else it could not tell a server that is silent from one that is gone."""
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
