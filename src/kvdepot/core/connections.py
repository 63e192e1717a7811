"""Checks each message before the depot decides it (rate limit, seal, handshake, user), and encodes each reply.

Called with wire frames by server/loop.py on the deciding thread, and in tests by tests/harness.py. No sockets or
clocks; the arena, the liveness files and the tenants of users are injected. A client exists from its `Prove` until no
process holds its liveness file; then everything that it holds is released.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from kvdepot.config import Config
from kvdepot.core.actions import Action, Reply
from kvdepot.core.admission import check_hello
from kvdepot.core.clients import Client, Liveness
from kvdepot.core.depot import Depot
from kvdepot.errors import ArenaError, BadRequest, Busy, KVDepotError, ProtocolError, UnknownClient, VersionMismatch
from kvdepot.protocol import wire
from kvdepot.protocol.handshake import Challenge, Seal, is_open_to_all, is_sealed
from kvdepot.protocol.metrics import COMMANDS

log = logging.getLogger(__name__)

_LISTS = wire.GetStatus, wire.ListLeases, wire.Inspect, wire.Why
_STATUS_COST = 4
"""The number of requests that a status costs of `max_rate`, because it lists all models, engines and tiers."""
_MOST_COST = 4
"""A list costs more requests the more entries it compares, but at most `max_rate` divided by this number."""
_LEASES = 100
"""A list of leases compares all leases, so it costs one more request per this many leases."""
_MOST_CHALLENGES = 1024
"""The most clients between Hello and Prove; a further one ends the oldest handshake."""
_UNIT_BYTES = 4096
"""A message costs one request, plus one per 4 KiB."""
_LEFT = 100
"""A flooding client's limit is `max_rate` divided by this."""


class OwnArena(Protocol):
    """The part of the server's arena (memory/arena.py) that the handshake uses."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> Path: ...

    @property
    def secret(self) -> bytes:
        """32 bytes that only processes of this user can read."""

    def is_lost(self) -> bool:
        """Whether its file was removed or replaced, so that clients can no longer verify the server."""


class Connections:
    """The protocol side of all clients of one depot."""

    def __init__(
        self,
        config: Config,
        depot: Depot,
        boot: bytes,
        arena: OwnArena,
        open_liveness: Callable[[str], Liveness],
        tenant: Callable[[str], str] = lambda user: "",
    ) -> None:
        """boot: the incarnation's id, sent in every reply. open_liveness: opens a liveness file by name; raises
        KVDepotError. tenant: returns the tenant of a user."""
        self._config = config
        self._depot = depot
        self._boot = boot
        self._arena = arena
        self._open_liveness = open_liveness
        self._tenant = tenant
        self._rates = Rates(config.max_rate)
        self._challenges: dict[bytes, Challenge] = {}  # of clients between Hello and Prove
        self._most_bytes = config.max_message_mib << 20
        self._must_seal = not config.keys and is_open_to_all(config.url)

    # -- messages

    def receive(self, frames: list[bytes], user: str, now: float) -> list[Action]:
        """Check and decide one message. A KVDepotError becomes the reply and is never raised.

        frames: the sender's identity and the message, as received from a ROUTER socket. user: the user whose key
        ZeroMQ has verified for the connection; empty: the server has no keys.
        """
        identity, frame = frames[0], frames[-1]
        number = wire.number_of(frame)
        try:
            self._refuse_unless(self._rates.count(identity, len(frame)))
            if len(frames) != 2:
                raise ProtocolError(f"a message has {len(frames) - 1} frames instead of 1")
            if len(frame) > self._most_bytes:
                raise ProtocolError(f"a message has {len(frame)} bytes; the limit is {self._most_bytes}")
            client = self._depot.client(identity)
            number, request = _open(client, frame)
            if isinstance(request, KVDepotError):
                raise request
            if isinstance(request, _LISTS):
                self._refuse_unless(self._rates.charge(identity, self._cost(request)))
            kind = type(request).__name__
            if client is None or client.is_engine or kind not in COMMANDS:
                self._depot.report.latencies.begin(identity, number, kind, now)
            if client is not None and user != client.user:
                # With ROUTER_HANDOVER, needed for reconnects, a new connection can claim any identity.
                self._depot.counters["users_refused"] += 1
                raise BadRequest("this identity belongs to a client of another user")
            if type(request) is wire.Hello:
                return [Reply(identity, number, self._challenge(identity, client, request))]
            if type(request) is wire.Prove:
                return [Reply(identity, number, self._welcome(identity, user, client, request))]
        except KVDepotError as exc:
            self._depot.counters["bad_messages" if isinstance(exc, ProtocolError) else "errors"] += 1
            return [Reply(identity, number, exc)]
        return self._depot.handle(identity, number, request, now)

    def _cost(self, request: wire.GetStatus | wire.ListLeases | wire.Inspect | wire.Why) -> int:
        """The number of further requests that a list costs; bounded, so that every list can be asked for."""
        most = self._config.max_rate // _MOST_COST
        more = len(self._depot.leases) // _LEASES if isinstance(request, wire.ListLeases) else 0
        if isinstance(request, wire.Inspect):
            models = [each.model for each in self._depot.index.namespaces.all() if each.model.startswith(request.model)]
            more = len(models) * len(request.hashes) // 256  # one per eight hashes of 32 bytes
        return max(_STATUS_COST, min(_STATUS_COST + more, most)) - 1

    def _refuse_unless(self, within_rate: bool) -> None:
        if not within_rate:
            self._depot.counters["requests_refused"] += 1
            raise Busy(f"more than {self._config.max_rate} requests per second, the limit set by max_rate")

    def only_floods(self) -> bool:
        """Whether recently only flooding clients have sent messages, so that the loop should pause."""
        return self._rates.only_floods()

    def encode(self, reply: Reply, now: float) -> bytes:
        """Encode a reply, and seal it if its client uses seals. Frames must be sent in the order of the calls."""
        value = reply.value
        failed = isinstance(value, KVDepotError)
        self._depot.report.latencies.end(reply.client, reply.number, failed, now)
        encode: Callable[[bytes, bytes, Any], bytes] = wire.encode_failure if failed else wire.encode_answer
        frame = encode(reply.number, self._boot, value)
        client = self._depot.client(reply.client)
        if client is None or client.seal is None:
            return frame
        # Proof and UnknownClient are sent unsealed, because the client may not have the key any longer.
        return frame if isinstance(value, wire.Proof | UnknownClient) else client.seal.close(frame)

    # -- handshake

    def _challenge(self, identity: bytes, known: Client | None, hello: wire.Hello) -> wire.Proof:
        if hello.version != wire.VERSION:
            raise VersionMismatch(
                f"the client speaks protocol {hello.version}, this server {wire.VERSION}: "
                "install the same kvdepot on both sides"
            )
        check_hello(hello)
        if self._arena.is_lost():
            raise ArenaError(
                f"the server's arena {self._arena.path} was removed or replaced while it ran, so no client can "
                "verify its identity: restart the server"
            )
        if known is not None and hello.liveness != known.liveness.name:
            raise BadRequest("this client is known under another liveness file")
        if self._must_seal and not hello.sealed:
            raise BadRequest("messages must be sealed because every user of this host can connect")
        challenge = Challenge(hello, self._boot, self._arena.name, self._arena.secret)
        self._challenges.pop(identity, None)
        if len(self._challenges) >= _MOST_CHALLENGES:
            del self._challenges[next(iter(self._challenges))]
        self._challenges[identity] = challenge
        return challenge.proof

    def _welcome(self, identity: bytes, user: str, known: Client | None, prove: wire.Prove) -> wire.Welcome:
        challenge = self._challenges.pop(identity, None)
        if challenge is None:
            raise UnknownClient("send Hello before Prove")
        if known is None:
            self._meet(identity, user, challenge, prove)
        else:
            known.seal = challenge.check(prove, known.liveness.secret)
        config = self._config
        lookup_s = config.lookup_s if self._depot.tiering else 0.0
        hints = config.max_hint_s, config.max_hint_priority
        return wire.Welcome(
            wire.VERSION, config.chunk_tokens, lookup_s, config.wants_tokens, *hints, config.has_free_chunks,
            config.verify_hits,
        )  # fmt: skip

    def _meet(self, identity: bytes, user: str, challenge: Challenge, prove: wire.Prove) -> None:
        """Add a new client if it proves that it owns its liveness file. Raises KVDepotError, and then keeps nothing."""
        if any(client.liveness.name == challenge.liveness for client in self._depot.clients):
            raise BadRequest(f"liveness file {challenge.liveness} belongs to another client")
        liveness = self._open_liveness(challenge.liveness)
        try:
            if not liveness.is_alive():
                raise BadRequest(f"the lock of liveness file {challenge.liveness[:64]!r} is not held")
            seal = challenge.check(prove, liveness.secret)
            self._depot.welcome(identity, liveness, user, self._tenant(user), seal, challenge.hello)
        except KVDepotError:
            self._depot.counters["hellos_refused"] += 1
            liveness.close(remove=False)
            raise

    # -- time and close

    def tick(self, now: float, wall: float) -> list[Action]:
        """Called once a second. wall: seconds since 1970."""
        self._rates.tick()
        return [*self._depot.tick(now, wall), *self.drop_dead()]

    def drop_dead(self) -> list[Action]:
        """Remove clients whose liveness file is no longer held, and release what they hold."""
        actions: list[Action] = []
        dead = [client for client in self._depot.clients if not client.liveness.is_alive()]
        for client in dead:
            client.dead = True  # when its stores end, lookups are answered, but not those of another dead client
        for client in dead:
            log.debug("client %s is gone", client.called, extra={"client": client.called})
            actions += self._depot.died(client.identity, client.liveness.has_left())
            self._depot.report.latencies.gone(client.identity)
            self._challenges.pop(client.identity, None)
            client.liveness.close(remove=True)
        return actions

    def close(self) -> None:
        for client in self._depot.clients:
            client.liveness.close(remove=False)


class Rates:
    """The rate limit: counts of all clients' requests in the current second. A flood does not delay other clients.

    Requests beyond `max_rate` in a second are refused without being decoded. A client that exceeds it is limited to a
    hundredth of `max_rate` until it keeps to that for a second. While only such clients send, the loop pauses to save
    CPU.
    """

    def __init__(self, most: int) -> None:
        """most: requests per second and client."""
        self._most = most
        self._seen: dict[bytes, int] = {}
        self._flooding: set[bytes] = set()
        self._run = 0  # messages refused in a row, of any client

    def tick(self) -> None:
        self._flooding = {client for client, seen in self._seen.items() if seen > self._allowed(client)}
        self._seen.clear()

    def _allowed(self, client: bytes) -> int:
        return self._most // _LEFT if client in self._flooding else self._most

    def count(self, client: bytes, size: int) -> bool:
        """Count a message of `size` bytes; returns whether its client is within its rate."""
        return self.charge(client, 1 + size // _UNIT_BYTES)

    def charge(self, client: bytes, requests: int) -> bool:
        """Count this many requests of a client; returns whether it is within its rate."""
        seen = self._seen[client] = self._seen.get(client, 0) + requests
        if seen > self._most or (self._flooding and seen > self._allowed(client)):
            self._flooding.add(client)
            self._run += 1
            return False
        self._run = 0
        return True

    def only_floods(self) -> bool:
        """Whether more messages in a row were refused than clients are flooding, so that no other client is sending."""
        if self._run <= len(self._flooding):
            return False
        self._run = 0
        return True


def _open(client: Client | None, frame: bytes) -> tuple[bytes, wire.Request | ProtocolError]:
    """Unseal and decode a message. Raises UnknownClient if its seal is missing or wrong."""
    seal: Seal | None = client.seal if client is not None else None
    if seal is None and not is_sealed(frame):
        return wire.decode_request(frame)
    plain = seal.open(frame) if seal is not None else None
    if plain is not None:
        return wire.decode_request(plain)
    if not is_sealed(frame):
        number, request = wire.decode_request(frame)
        if isinstance(request, wire.Hello | wire.Prove | ProtocolError):
            return number, request
    raise UnknownClient("the message's seal is missing or wrong: send Hello again")
