"""What every message passes before the depot decides it: rate limit, seal, hello, user. And every reply on its way out.

Driven by server/loop.py, and in tests by testing/harness.py, with the frames of the wire. No sockets or clocks. What it
must ask of the outside is injected: the server's own arena, a client's lease, and the tenant of a user. A client is
known from its `Prove` until its lease is no longer held; then all it holds is given up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from kvdepot.config import Config
from kvdepot.core.actions import Action, Reply
from kvdepot.core.clients import Client, Lease
from kvdepot.core.depot import Depot
from kvdepot.core.rates import Rates
from kvdepot.errors import ArenaError, BadRequest, Busy, KVDepotError, ProtocolError, UnknownClient, VersionMismatch
from kvdepot.protocol import wire
from kvdepot.protocol.handshake import Challenge, Seal, is_open_to_all, is_sealed

__all__ = ["Connections", "OwnArena"]

log = logging.getLogger(__name__)

_STATUS_COST = 4
"""A status, which tells of all models, engines and tiers there are, counts as so many requests against `max_rate`."""
_MOST_CHALLENGES = 1024
"""Clients between Hello and Prove; beyond that the oldest must begin again."""


class OwnArena(Protocol):
    """What hello needs of the server's arena (memory/arena.py)."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> Path: ...

    @property
    def secret(self) -> bytes:
        """What only a process of this user can read (32 bytes)."""

    def is_lost(self) -> bool:
        """Whether its name no longer leads to it, so that no client could check it."""


class Connections:
    """All clients of one depot, as messages come from them and go to them."""

    def __init__(
        self,
        config: Config,
        depot: Depot,
        boot: bytes,
        arena: OwnArena,
        open_lease: Callable[[str], Lease],
        tenant: Callable[[str], str] = lambda user: "",
    ) -> None:
        """boot: the incarnation's id, in every reply. open_lease: by name; raises KVDepotError. tenant: of a user."""
        self._config = config
        self._depot = depot
        self._boot = boot
        self._arena = arena
        self._open_lease = open_lease
        self._tenant = tenant
        self._rates = Rates(config.max_rate)
        self._challenges: dict[bytes, Challenge] = {}  # of clients that have said hello and not proved themselves yet
        self._most_bytes = config.max_message_mib << 20
        self._must_seal = not config.keys and is_open_to_all(config.url)

    def __repr__(self) -> str:
        return f"<Connections of {self._depot}, {len(self._challenges)} in their hello>"

    # -- messages

    def receive(self, frames: list[bytes], user: str, now: float) -> list[Action]:
        """Take one message and decide it. Never raises a KVDepotError: it becomes the reply.

        frames: the sender's identity and the message, as a ROUTER socket gives them. user: whose key the connection
        has, as ZeroMQ proved it; empty: the server has no keys.
        """
        identity, frame = frames[0], frames[-1]
        number = wire.number_of(frame)
        try:
            self._refuse_unless(self._rates.count(identity, len(frame)))
            if len(frames) != 2:
                raise ProtocolError(f"a message of {len(frames) - 1} frames, not 1")
            if len(frame) > self._most_bytes:
                raise ProtocolError(f"a message of {len(frame)} bytes is longer than {self._most_bytes}")
            client = self._depot.client(identity)
            number, request = _open(client, frame)
            if isinstance(request, KVDepotError):
                raise request
            if isinstance(request, wire.Status):
                self._refuse_unless(self._rates.charge(identity, _STATUS_COST - 1))
            self._depot.report.latencies.begin(identity, number, type(request).__name__, now)
            if client is not None and user != client.user:
                # ROUTER_HANDOVER gives an identity to whoever names it last, for a client that connects again.
                self._depot.counters["users_refused"] += 1
                raise BadRequest("another client has introduced itself under this identity")
            if isinstance(request, wire.Hello):
                return [Reply(identity, number, self._challenge(identity, client, request))]
            if isinstance(request, wire.Prove):
                return [Reply(identity, number, self._welcome(identity, user, client, request))]
        except KVDepotError as exc:
            self._depot.counters["bad_messages" if isinstance(exc, ProtocolError) else "errors"] += 1
            return [Reply(identity, number, exc)]
        return self._depot.handle(identity, number, request, now)

    def _refuse_unless(self, within_rate: bool) -> None:
        if not within_rate:
            self._depot.counters["requests_refused"] += 1
            raise Busy(f"more than {self._config.max_rate} requests a second, the most that max_rate allows")

    def only_floods(self) -> bool:
        """Whether each client that floods has had a turn and nobody else sent anything, so that it is time to pause."""
        return self._rates.only_floods()

    def encode(self, reply: Reply, now: float) -> bytes:
        """The frame of a reply, sealed where its client's messages are. To be sent in the order of these calls."""
        value = reply.value
        failed = isinstance(value, KVDepotError)
        self._depot.report.latencies.end(reply.client, reply.number, failed, now)
        encode: Callable[[bytes, bytes, Any], bytes] = wire.encode_failure if failed else wire.encode_answer
        frame = encode(reply.number, self._boot, value)
        client = self._depot.client(reply.client)
        if client is None or client.seal is None:
            return frame
        # Proof and UnknownClient go unsealed: the client may have lost its key.
        return frame if isinstance(value, wire.Proof | UnknownClient) else client.seal.close(frame)

    # -- hello

    def _challenge(self, identity: bytes, known: Client | None, hello: wire.Hello) -> wire.Proof:
        if hello.version != wire.VERSION:
            raise VersionMismatch(
                f"the client speaks protocol {hello.version}, this server {wire.VERSION}: "
                "install the same kvdepot on both sides"
            )
        if self._arena.is_lost():
            raise ArenaError(
                f"the server's arena {self._arena.path} was removed or replaced while it ran, so no client can check "
                "whom it talks to: restart the server"
            )
        if known is not None and hello.lease != known.lease.name:
            raise BadRequest("this client has introduced itself with another lease")
        if self._must_seal and not hello.sealed:
            raise BadRequest("messages must be sealed where every user of this host can connect")
        challenge = Challenge(hello, self._boot, self._arena.name, self._arena.secret)
        self._challenges.pop(identity, None)
        if len(self._challenges) >= _MOST_CHALLENGES:
            del self._challenges[next(iter(self._challenges))]
        self._challenges[identity] = challenge
        return challenge.proof

    def _welcome(self, identity: bytes, user: str, known: Client | None, prove: wire.Prove) -> wire.Welcome:
        challenge = self._challenges.pop(identity, None)
        if challenge is None:
            raise UnknownClient("say hello first: this server has not been asked to prove itself")
        if known is None:
            self._meet(identity, user, challenge, prove)
        else:
            known.seal = challenge.check(prove, known.lease.secret)
        lookup_s = self._config.lookup_s if self._depot.tiering else 0.0
        return wire.Welcome(wire.VERSION, self._config.chunk_size, lookup_s)

    def _meet(self, identity: bytes, user: str, challenge: Challenge, prove: wire.Prove) -> None:
        """Take a new client in, once it has proved that it owns its lease. Raises KVDepotError with nothing kept."""
        if any(client.lease.name == challenge.lease for client in self._depot.clients):
            raise BadRequest(f"lease {challenge.lease} belongs to another client")
        lease = self._open_lease(challenge.lease)
        try:
            if not lease.is_alive():
                raise BadRequest(f"nobody holds the lock of lease {challenge.lease[:64]!r}")
            seal = challenge.check(prove, lease.secret)
            self._depot.welcome(identity, lease, user, self._tenant(user), seal)
        except KVDepotError:
            self._depot.counters["hellos_refused"] += 1
            lease.close(remove=False)
            raise

    # -- time and the end

    def tick(self, now: float, wall: float) -> list[Action]:
        """Once a second. wall: seconds since 1970."""
        self._rates.tick()
        return [*self._depot.tick(now, wall), *self.drop_dead()]

    def drop_dead(self) -> list[Action]:
        """Give up what clients hold whose lease nobody holds any more."""
        actions: list[Action] = []
        for client in [client for client in self._depot.clients if not client.lease.is_alive()]:
            level = logging.INFO if client.is_engine else logging.DEBUG  # a probe comes each few seconds
            log.log(level, "client %s is gone", client.called, extra={"client": client.called})
            actions += self._depot.died(client.identity, client.lease.has_left())
            self._depot.report.latencies.gone(client.identity)
            self._challenges.pop(client.identity, None)
            client.lease.close(remove=True)
        return actions

    def close(self) -> None:
        """Let go of all leases; their files stay with their clients."""
        for client in self._depot.clients:
            client.lease.close(remove=False)


def _open(client: Client | None, frame: bytes) -> tuple[bytes, wire.Request | ProtocolError]:
    """Decode a message, and take its seal off. Raises UnknownClient where the seal is not what it must be."""
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
    raise UnknownClient("say hello first: this message is not sealed as was agreed with this server")
