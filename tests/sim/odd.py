"""Clients that are no engine: wrong in hello or bytes, of another tenant, too loud. They learn nothing of engines.

What they do is drawn from numbers of their own and happens in one instant, so that a run of engines is the same with
and without them. Each visit ends with a client that has died, which the server must find.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from kvdepot.errors import BadRequest, Busy, InternalError, KVDepotError, ProtocolError, UnknownClient, UnknownRequest
from kvdepot.protocol import wire
from kvdepot.protocol.handshake import Offer, Seal
from kvdepot.protocol.status import read

if TYPE_CHECKING:
    from tests.sim.host import Host

LOUD_RATE = 1000
"""`max_rate` of runs in which somebody sends more."""
ODD_TENANT = "odd"


class OddClients:
    """Visits of odd clients to one host's servers."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._random = random.Random(host.world.seed ^ 0x0DD)
        self._visits = 0
        self._guests: list[_Odd] = []
        self._over = False
        host.world.after(0.3 * self._random.random(), self._visit)

    def leave(self) -> None:
        """All go, and nobody comes any more."""
        self._over = True
        for guest in self._guests:
            guest.die()
        self._guests.clear()

    def _visit(self) -> None:
        if self._over:
            return
        world, server = self._host.world, self._host.server
        if server is not None and server.serving and not server.frozen and not server.draining:
            self._visits += 1
            guest = _Odd(self._host, f"odd{self._visits}", self._random)
            self._guests.append(guest)
            guest.visit()
            world.after(5 * self._random.random(), guest.die)
        world.after(0.1 + 10 * self._random.random() ** 3 * self._visits, self._visit)


class _Odd:
    """One odd client, in place of its connection."""

    def __init__(self, host: Host, name: str, draw: random.Random) -> None:
        self.name = name
        self.identity = name.encode()
        self._host = host
        self._random = draw
        self._number = 0
        self._seal: Seal | None = None
        self._heard: list[bytes] = []
        self.liveness = host.new_liveness(f"liveness-{name}")

    def reply(self, frame: bytes) -> bool:
        """As Link.reply."""
        self._heard.append(frame)
        return True

    def die(self) -> None:
        self.liveness.locked = False

    def _ask(self, request: wire.Request, welcomed: Seal | None = None) -> Any:
        """The answer to a request, which comes at once. welcomed: what seals from this answer on."""
        server = self._host.server
        assert server is not None
        self._number += 1
        frame = wire.encode_request(self._number, request)
        server.users[self.identity] = ODD_TENANT
        server.deliver(self, self._seal.close(frame) if self._seal is not None else frame)
        assert self._heard, f"{self.name}: no answer at once to {request}"
        self._seal = self._seal or welcomed
        reply = self._heard.pop()
        if self._seal is not None:
            reply = self._seal.open(reply) or reply
        number, _, value = wire.decode_reply(reply)
        assert number == self._number and not self._heard, f"{self.name}: another answer than to {request}"
        return value

    def _must_be_refused(self, request: wire.Request, why: type[KVDepotError]) -> None:
        answer = self._ask(request)
        assert type(answer) is why, f"{self.name}: {request} was answered {answer!r}"
        self._host.world.counters["hello_refused"] += 1

    def visit(self) -> None:
        """Everything that such a client does."""
        server, draw = self._host.server, self._random
        assert server is not None
        self._must_be_refused(wire.Noop(), UnknownClient)
        self._must_be_refused(wire.Prove(bytes(32)), UnknownClient)
        others = [client for client in self._host.clients if client.liveness.page.locked]
        if others:  # a liveness file that somebody else holds, whose secret it cannot know
            page = draw.choice(others).liveness.page
            self._ask(Offer(page.name, bytes(16), is_sealed=False).hello)
            self._must_be_refused(wire.Prove(draw.randbytes(32)), BadRequest)
        offer = Offer(self.liveness.name, self.liveness.secret, is_sealed=draw.random() < 0.5)
        self._ask(offer.hello)
        self._must_be_refused(wire.Prove(draw.randbytes(32)), BadRequest)
        prove, seal = offer.accept(wire_proof(self._ask(offer.hello)), server.boot, server.file.secret)
        welcome = self._ask(prove, welcomed=seal)
        assert not isinstance(welcome, KVDepotError), welcome
        self._must_be_refused(Offer("another-liveness", bytes(16), is_sealed=False).hello, BadRequest)
        self._look_around()
        self._fuzz()
        if self._host.config.max_rate == LOUD_RATE:
            self._flood()

    def _look_around(self) -> None:
        """What engines of another tenant have stored is not there for it, and it cannot take it away."""
        truth = list(self._host.truth.items())
        if truth:
            (_, key), (model, _) = self._random.choice(truth)
            lookup = wire.Lookup(model.name, model.world_size, 0, "r", 1, key)
            found = self._ask(lookup)
            assert found == [0, None, [], None], f"{self.name}: found {found} chunks of another tenant"
            self._host.world.counters["looked_for_anothers_chunks"] += 1
        server = self._host.server
        assert server is not None
        if not server.depot.removals:  # else its own waits for those
            assert self._ask(wire.Count()) == {"chunks": 0, "bytes": 0}
            if truth:
                assert self._ask(wire.Inspect(hashes=key)) == []
            assert self._ask(wire.Clear()) is None
        assert not read(self._ask(wire.GetStatus())).namespaces, "a tenant is told of another's"
        assert self._ask(wire.EndSession("r")) is None
        trail = self._ask(wire.Why())
        assert isinstance(trail, UnknownRequest) or trail["tenant"] == ODD_TENANT, (
            "a tenant is told of another's request"
        )

    def _fuzz(self) -> None:
        """Requests with some wrong bytes: each is answered once at most, as what it has become or with an error."""
        server, draw = self._host.server, self._random
        assert server is not None
        part = wire.Shards("r", "m", 1, 0, b"", 0, bytes(64), 2)
        for request in (
            wire.Lookup("m", 1, 0, "r", 1, draw.randbytes(64)), wire.Retrieve(1, [part]), wire.Store(1, [part] * 2),
            wire.Describe(bytes(32), bytes(32), bytes(64), 16), wire.Inspect("m", bytes(32)),
            wire.TakeLease("name", "retain", "m", 1, 1, bytes(32)), wire.Unregister(7), wire.EndSession("r"),
            wire.Why("r"),
        ):  # fmt: skip
            self._number += 1
            frame = bytearray(wire.encode_request(self._number, request))
            for _ in range(draw.randint(1, 4)):
                wrong = draw.choice([0, 1, 0x7F, 0xC1, 0xFF, draw.getrandbits(8)])
                frame[draw.randrange(wire.ID_BYTES, len(frame))] = wrong
            del frame[draw.randint(wire.ID_BYTES, 2 * len(frame)) :]
            is_message = not isinstance(wire.decode_request(bytes(frame))[1], ProtocolError)
            server.deliver(self, bytes(frame) if self._seal is None else self._seal.close(bytes(frame)))
            assert len(self._heard) == 1 or (is_message and not self._heard), f"{len(self._heard)} answers to {frame!r}"
            for reply in self._heard:
                number, _, value = wire.decode_reply((self._seal and self._seal.open(reply)) or reply)
                assert number == self._number and not isinstance(value, InternalError), f"{frame!r}: {value!r}"
            self._heard.clear()

    def _flood(self) -> None:
        """More than the rate that is allowed: what is beyond it is refused, and costs nobody else an answer."""
        answers = [self._ask(wire.Noop()) for _ in range(LOUD_RATE + 10)]
        served = answers.count("ok")
        assert all(isinstance(answer, Busy) for answer in answers[served:]), "served again after it was refused"
        assert served < LOUD_RATE and len(answers) - served >= 10
        self._host.world.counters["flood_refused"] += 1


def wire_proof(value: Any) -> wire.Proof:
    """The answer to a Hello, as the client decodes it."""
    assert not isinstance(value, KVDepotError), value
    return wire.Proof(*value)
