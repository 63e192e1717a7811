"""What a message passes before the depot decides it, driven through the harness with real frames."""

from __future__ import annotations

from typing import Any

import pytest

from kvdepot.config import Config
from kvdepot.core.actions import Reply
from kvdepot.core.index.index import Index
from kvdepot.errors import (
    ArenaError,
    BadRequest,
    Busy,
    KVDepotError,
    LayoutError,
    ProtocolError,
    UnknownClient,
    VersionMismatch,
)
from kvdepot.eviction import Lru
from kvdepot.memory.allocator import PAGE, Allocator
from kvdepot.protocol import wire
from kvdepot.protocol.handshake import Offer, Seal
from tests.harness import ArenaName, Harness, PlainLiveness


def harness(url: str = "ipc:///nowhere", **settings: Any) -> Harness:
    config = Config(url=url, chunk_size=16, **settings)
    return Harness(config, Index(Allocator(0, 8 * PAGE), Lru), tenant=lambda user: user)


@pytest.fixture
def server() -> Harness:
    return harness()


def ask(server: Harness, identity: bytes, request: wire.Request) -> Any:
    return server.answers[server.send(identity, request)]


def test_nobody_is_served_before_hello_and_nobody_who_has_died(server: Harness) -> None:
    assert isinstance(ask(server, b"one", wire.Noop()), UnknownClient)
    server.hello(b"one")
    assert ask(server, b"one", wire.Noop()) == "ok"
    server.die(b"one")
    assert isinstance(ask(server, b"one", wire.Noop()), UnknownClient)
    assert server.depot.counters["clients_died"] == 1


def test_a_hello_is_refused_without_its_liveness_files_secret_and_keeps_nothing(server: Harness) -> None:
    server.hello(b"one")
    name = server.liveness_files[b"one"].name
    for liveness, secret, why in (
        ("no such liveness file", b"x" * 16, LayoutError),
        (name, b"x" * 16, BadRequest),  # somebody else's
    ):
        offer = Offer(liveness, secret, is_sealed=False)
        proof = ask(server, b"two", offer.hello)
        prove, _ = offer.accept(proof, server.boot, server.arena_name.secret)
        assert isinstance(ask(server, b"two", prove), why)
        assert server.depot.client(b"two") is None
    assert isinstance(ask(server, b"two", prove), UnknownClient)  # a proof counts once
    server.hello(b"two")
    server.liveness_files[b"three"] = PlainLiveness("its own", b"s" * 16)
    offer = Offer("its own", b"x" * 16, is_sealed=False)
    prove, _ = offer.accept(ask(server, b"three", offer.hello), server.boot, server.arena_name.secret)
    assert isinstance(ask(server, b"three", prove), BadRequest)
    assert server.depot.counters["hellos_refused"] == 1 and server.depot.client(b"three") is None


def test_a_client_whose_liveness_file_is_not_locked_is_refused(server: Harness) -> None:
    server.hello(b"one")
    server.liveness_files[b"one"].alive = False
    offer = Offer(server.liveness_files[b"one"].name, server.liveness_files[b"one"].secret, is_sealed=False)
    server.act(server.connections.drop_dead())
    prove, _ = offer.accept(ask(server, b"one", offer.hello), server.boot, server.arena_name.secret)
    with pytest.raises(BadRequest, match=r"the lock of liveness file .* is not held"):
        raise ask(server, b"one", prove)


def test_another_version_and_a_lost_arena_are_told_at_hello(server: Harness) -> None:
    assert isinstance(ask(server, b"one", wire.Hello(wire.VERSION + 1, "liveness file")), VersionMismatch)
    assert isinstance(server.arena_name, ArenaName)
    server.arena_name.lost = True
    with pytest.raises(ArenaError, match="removed or replaced"):
        server.hello(b"one")


def test_a_hello_with_a_name_that_is_too_long_to_keep_is_refused(server: Harness) -> None:
    for hello, what in (
        (wire.Hello(wire.VERSION, "l" * 257), "liveness file's name of 257"),
        (wire.Hello(wire.VERSION, "liveness file", engine="e" * 257), "engine's name of 257"),
        (wire.Hello(wire.VERSION, "liveness file", host="h" * 257), "host's name of 257"),
    ):
        with pytest.raises(BadRequest, match=what):
            raise ask(server, b"one", hello)
    assert not server.connections._challenges
    server.hello(b"one", engine="e" * 256)


def test_an_identity_belongs_to_the_user_who_said_hello_with_it(server: Harness) -> None:
    server.hello(b"one", "alice")
    for user, expected in (("mallory", BadRequest), ("alice", str)):
        (reply,) = server.connections.receive([b"one", wire.encode_request(77, wire.Noop())], user, 0.0)
        assert isinstance(reply, Reply) and isinstance(reply.value, expected)
    assert server.depot.counters["users_refused"] == 1
    client = server.depot.client(b"one")
    assert client is not None and client.tenant == "alice"


def sealed(server: Harness, identity: bytes) -> Seal:
    """Introduce a client whose messages are sealed from then on."""
    server.liveness_files.pop(identity, None)
    with pytest.raises(KVDepotError, match="must be sealed"):
        server.hello(identity)
    liveness = server.liveness_files[identity] = PlainLiveness(f"liveness file of {identity!r}")
    offer = Offer(liveness.name, liveness.secret, is_sealed=True)
    prove, seal = offer.accept(ask(server, identity, offer.hello), server.boot, server.arena_name.secret)
    assert isinstance(ask(server, identity, prove), wire.Welcome) and seal is not None
    return seal


def test_where_every_user_can_connect_messages_are_sealed_both_ways() -> None:
    heard: list[bytes] = []

    class Listening(Harness):
        def replied(self, reply: Reply, frame: bytes) -> None:
            heard.append(frame)
            super().replied(reply, frame)

    config = Config(url="tcp://127.0.0.1:1", chunk_size=16)
    server = Listening(config, Index(Allocator(0, 8 * PAGE), Lru))
    seal = sealed(server, b"one")
    assert seal.open(heard[-1]) is not None  # the welcome is the first that is sealed
    server.deliver(b"one", seal.close(wire.encode_request(500, wire.Noop())))
    plain = seal.open(heard[-1])
    assert plain is not None and wire.decode_reply(plain)[2] == "ok"
    answer = ask(server, b"one", wire.Noop())  # somebody in between
    assert isinstance(answer, UnknownClient)
    assert wire.decode_reply(heard[-1])[2].code == answer.code, "who lost the key must be able to read this"
    again = seal.close(wire.encode_request(501, wire.Noop()))
    server.deliver(b"one", again)
    server.deliver(b"one", again)  # repeated
    assert isinstance(server.answers[b"one", (501).to_bytes(8, "little")], UnknownClient)


def test_requests_beyond_the_rate_are_refused_and_a_status_counts_more() -> None:
    server = harness(max_rate=16)
    server.hello(b"one")
    server.hello(b"two")
    answers = [ask(server, b"one", wire.GetStatus()) for _ in range(5)]
    assert [isinstance(answer, Busy) for answer in answers] == [False] * 3 + [True] * 2
    assert ask(server, b"two", wire.Noop()) == "ok"
    assert server.depot.counters["requests_refused"] == 2
    server.tick(1.0, 1000.0)
    server.tick(2.0, 1001.0)
    assert not isinstance(ask(server, b"one", wire.GetStatus()), KVDepotError)


def test_a_list_of_leases_counts_by_their_number_and_can_always_be_asked_for() -> None:
    for max_rate, served in ((1000, 1000 // (4 + 10)), (32, 3)):
        server = harness(max_rate=max_rate)
        for client in (b"one", b"two"):
            server.hello(client)
        for number in range(1000):
            request = wire.TakeLease(f"{number}", "retain", "m", 1, 1, bytes(32))
            assert server.depot.handle(b"one", b"", request) and len(server.depot.leases) == number + 1
        answers = [ask(server, b"two", wire.ListLeases()) for _ in range(served + 1)]
        assert [isinstance(answer, Busy) for answer in answers] == [False] * served + [True]


def test_a_message_of_several_frames_or_too_many_bytes_is_refused_by_its_number(server: Harness) -> None:
    server.hello(b"one")
    frame = wire.encode_request(9, wire.Noop())
    long = frame + bytes(Config(url="ipc:///nowhere").max_message_mib << 20)
    for frames in ([b"one", b"", frame], [b"one", long]):
        (reply,) = server.connections.receive(frames, "", 0.0)
        assert isinstance(reply, Reply) and isinstance(reply.value, ProtocolError)
        assert reply.number == (9).to_bytes(8, "little")
    assert server.depot.counters["bad_messages"] == 2


def test_hellos_that_are_never_proved_are_forgotten_from_the_oldest(server: Harness) -> None:
    offers = [Offer(f"liveness file {i}", b"x" * 16, is_sealed=False) for i in range(1100)]
    for i, offer in enumerate(offers):
        ask(server, b"%d" % i, offer.hello)
    assert isinstance(ask(server, b"0", wire.Prove(bytes(32))), UnknownClient)
    assert isinstance(ask(server, b"1099", wire.Prove(bytes(32))), LayoutError)  # there is no such liveness file
    assert len(server.connections._challenges) == 1023


def test_a_server_that_is_told_so_stops_when_no_engine_was_there_for_so_long() -> None:
    server = harness(idle_exit=60.0)
    server.tick(1000.0, 0.0)
    server.hello(b"engine")
    ask(server, b"engine", wire.Lookup("m", 1, 1, "r", 1, bytes(32)))  # now it is an engine, not a probe
    server.tick(1059.0, 0.0)
    server.tick(5000.0, 0.0)
    assert not server.stops  # however long it says nothing
    server.die(b"engine")
    server.tick(5001.0, 0.0)
    server.hello(b"probe")  # `kvdepot status`, a scrape, the web page: they keep no server alive
    for second in (5030.0, 5060.0):
        ask(server, b"probe", wire.GetStatus())
        server.tick(second, 0.0)
    assert not server.stops
    server.tick(5061.0, 0.0)
    assert [stop.reason for stop in server.stops] == ["no engine for 60 s"]
