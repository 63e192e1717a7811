"""The deciding part of the server: requests and outcomes in, actions out. It hands each to the file that decides it.

Called with requests by core/connections.py and with outcomes by server/loop.py, on one thread. No sockets, threads or
clocks here, and no I/O: what takes time is returned as an action. The one law: every request is answered exactly once,
and what a request holds (reservations, pins, mappings) is given up exactly once, whatever comes first: its end, an
error, or its client's death.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kvdepot.config import Config
from kvdepot.core.actions import Action, Reply
from kvdepot.core.admission import chunks_named
from kvdepot.core.clients import Client, Lease, PendingLookup
from kvdepot.core.forgetting import STEP_CHUNKS, RemovalRequests, Removals
from kvdepot.core.index.index import Index
from kvdepot.core.infinite_cache import InfiniteCache
from kvdepot.core.registrations import Registrations, Remapping
from kvdepot.core.report import SHOWN, Report
from kvdepot.core.reuse import Windows
from kvdepot.core.sessions import Sessions
from kvdepot.core.tiering.forgetting import Forgetting
from kvdepot.core.tiering.lookup import Arrived, TierLookup
from kvdepot.core.tiering.tier import Token
from kvdepot.core.tiering.tiering import Decision, Tiering
from kvdepot.core.transfers import CopyToken, Transfers
from kvdepot.devices.cpu import HostTensors
from kvdepot.errors import BadRequest, Busy, InternalError, KVDepotError, UnknownClient
from kvdepot.memory.copier import Mapped
from kvdepot.protocol import wire
from kvdepot.protocol.counters import Counters
from kvdepot.protocol.handshake import Seal
from kvdepot.protocol.layout import Layout
from kvdepot.protocol.status import Device, Status
from kvdepot.tiers import TierConfig

__all__ = ["Depot"]

log = logging.getLogger(__name__)

_MOST_SAVED = 1 << 32
"""Tokens, or seconds, that one request can have saved."""


class Depot:
    """Index, pins, sessions and registrations of one server."""

    def __init__(
        self,
        config: Config,
        index: Index,
        map_layout: Callable[[Layout], Mapped] = HostTensors.open,
        tiers: Sequence[TierConfig] = (),
        device_status: Callable[[], list[Device]] = list,
        boot: bytes = b"",
        step_chunks: int = STEP_CHUNKS,
    ) -> None:
        """step_chunks: so many are removed in one go where many are."""
        self.index = index
        self.removals = Removals(index, step_chunks)
        self.counters = Counters()
        self.tiering = Tiering(tiers, index, config.chunk_size, config.lookup_s)
        self.ceiling = InfiniteCache(0.0)
        self.reuse = Windows(0.0)
        self.sessions = Sessions(config, index, self.tiering, self.counters, self.ceiling)
        self.registrations = Registrations(config, index, self.counters, map_layout)
        self.transfers = Transfers(config, index, self.registrations, self.sessions, self.tiering, self.counters)
        self.max_clients = config.max_clients  # less where there are not descriptors enough
        self._config = config
        self._clients: dict[bytes, Client] = {}
        self.saved_tokens, self.saved_s = 0, 0.0  # as engines said
        self.now = 0.0
        self.wall = 0  # seconds since 1970, as of the last tick
        self.report = Report(self, device_status, boot)
        self.forgetting = RemovalRequests(
            config, index, self.removals, self.tiering, self.sessions, self.counters, self.report
        )

    def __repr__(self) -> str:
        return f"<Depot {len(self._clients)} clients, {self.operations} operations, {self.index}>"

    @property
    def asked_tokens(self) -> int:
        """Of prompts that engines looked up, as far as chunks are whole."""
        return self.counters["lookup_chunks"] * self._config.chunk_size

    @property
    def reused_tokens(self) -> int:
        """That engines loaded instead of computing them: what they said, and what requests that named none got."""
        return self.saved_tokens + self.sessions.retrieved_chunks * self._config.chunk_size

    # -- events

    def welcome(
        self, identity: bytes, lease: Lease, user: str = "", tenant: str = "", seal: Seal | None = None
    ) -> None:
        """Take in a client that has proved itself; it reaches only this tenant's chunks. Raises Busy: too many."""
        assert identity not in self._clients
        if len(self._clients) >= self.max_clients:
            self.counters["clients_refused"] += 1
            raise Busy(f"{len(self._clients)} clients are connected, the most that max_clients or open files allow")
        self._clients[identity] = Client(identity, lease, tenant, user, seal, self.now, self.now)

    def client(self, identity: bytes) -> Client | None:
        """The client of this identity, if it has said hello and lives."""
        return self._clients.get(identity)

    def handle(self, identity: bytes, number: bytes, request: wire.Request, now: float = 0.0) -> list[Action]:
        """Decide one request. Never raises a KVDepotError: it becomes the reply."""
        self.now = now
        try:
            client = self._clients.get(identity)
            if client is None:
                raise UnknownClient("say hello first: this server has not met you")
            client.heard = now
            chunks = chunks_named(request)
            if chunks > wire.MAX_CHUNKS:
                self.counters["large_requests_refused"] += 1
                raise Busy(f"a request that names {chunks} chunks, more than {wire.MAX_CHUNKS}")
            return self._decide(client, number, request)
        except KVDepotError as exc:
            self.counters["errors"] += 1
            asked = {"client": identity.hex()[:8], "request": getattr(request, "request", "")}
            log.debug("%s failed: %s", type(request).__name__, exc, extra=asked)
            return [Reply(identity, number, exc)]

    def _decide(self, client: Client, number: bytes, request: wire.Request) -> list[Action]:
        value: object = None
        match request:
            case wire.Lookup():
                return self.sessions.lookup(PendingLookup(client, number, client, request, 0), self.now)
            case wire.Store():
                return self.transfers.store(client, number, request, self.wall)
            case wire.Retrieve():
                return self.transfers.retrieve(client, number, request)
            case wire.EndSession():
                actions = self.sessions.give_up(client, request.request)
                self.sessions.end(client, request.request)  # whatever it says that it saved
                return [*actions, Reply(client.identity, number, self._count_saved(request))]
            case wire.Register():
                self.report.note(
                    "engine", f"client {client.called} registers KV tensors of {request.model[:SHOWN] or 'a model'}"
                )
                return self.registrations.register(client, number, request)
            case wire.Unregister():
                return self.registrations.unregister(client, request.instance, [number])
            case wire.ChunkSize():
                value = self._config.chunk_size
            case wire.Noop():
                value = "ok"
            case wire.Clear():
                return self.forgetting.clear(client, number, request)
            case wire.Pin():
                return self.sessions.pin(client, number, request, self.now)
            case wire.Unpin():
                return self.sessions.unpin(client, number, request.name)
            case wire.Forget():
                return self.forgetting.forget(client, number, request, self.now)
            case wire.Count():
                return self.forgetting.count(client, number, request)
            case wire.Status():
                value = self.status(client.tenant)
            case wire.Hello() | wire.Prove():
                raise InternalError("hello is for core/connections.py to answer")
        return [Reply(client.identity, number, value)]

    def finished(self, token: object, outcome: Any, now: float = 0.0) -> list[Action]:
        """A task or a tier task has ended; `outcome` as in copier.Copier and worker.TierWorker."""
        self.now = now
        match token:
            case Token():
                return [*self._go_on(self.tiering.finished(token, outcome, now)), *self.tiering.make_room()]
            case CopyToken():
                return self.transfers.copied(token, outcome, self.wall)
            case Remapping():
                return self.registrations.mapped(token, outcome)
        raise AssertionError(f"nothing was asked for with {token!r}")

    def next_deadline(self) -> float:
        """When `expire` must be called next; 0: as soon as what has arrived is served."""
        return 0.0 if self.removals else self.tiering.next_deadline()

    def expire(self, now: float) -> list[Action]:
        """Go on with what is being removed, and answer what has waited for tiers long enough."""
        self.now = now
        actions = self.forgetting.step()
        while self.tiering.next_deadline() <= now:
            actions += self._go_on(self.tiering.expire(now))
        return actions

    def _go_on(self, decisions: list[Decision]) -> list[Action]:
        """Do what has to follow what was decided of tiers, in its order: each must find what the one before left."""
        actions: list[Action] = []
        for decision in decisions:
            match decision:
                case TierLookup():
                    actions += self.sessions.answer(decision)
                case Arrived():
                    actions += self.tiering.keep_nearer(decision)
                case Forgetting():
                    actions += self.forgetting.answer(decision)
                case _:
                    actions.append(decision)
        return actions

    def tick(self, now: float, wall: float) -> list[Action]:
        """Once a second. wall: seconds since 1970."""
        self.now, self.wall = now, int(wall)
        self.sessions.tick(now)
        self.ceiling.tick(now, self.counters["hit_chunks"])
        self.reuse.tick(now, self.asked_tokens, self.reused_tokens)
        self.counters["expired_chunks"] += self.index.expire(self.wall)
        self.report.tick(now)
        return [*self.tiering.tick(now)]

    def stop_waiting(self) -> list[Action]:
        """Remove what is to be removed, and answer every request that awaits tiers: the server is about to end."""
        actions: list[Action] = []
        while self.removals:
            actions += self.forgetting.step()
        actions += self.sessions.stop(list(self._clients.values()))
        for forgetting in self.tiering.stop():
            actions += self.forgetting.answer(forgetting)
        return actions

    def died(self, identity: bytes, has_left: bool = False) -> list[Action]:
        """A client is gone: give up all it holds. What is being copied for it ends first, by itself.

        has_left: it closed its connection, and that is no death.
        """
        client = self._clients.pop(identity, None)
        if client is None:
            return []
        if not has_left:
            self.counters["clients_died"] += 1
        if client.is_engine:
            self.report.note("engine", f"client {client.called} {'is gone' if has_left else 'died'}")
        client.dead = True
        actions = self.sessions.leave(client)
        for number in list(client.instances):
            actions += self.registrations.unregister(client, number, [])
        return actions

    def _count_saved(self, request: wire.EndSession) -> BadRequest | None:
        if not (0 <= request.saved_tokens <= _MOST_SAVED and 0.0 <= request.saved_s <= _MOST_SAVED):
            self.counters["errors"] += 1
            return BadRequest(f"{request.saved_tokens} tokens and {request.saved_s} s are no saving")
        self.saved_tokens += request.saved_tokens
        self.saved_s += request.saved_s
        return None

    # -- what people see

    @property
    def operations(self) -> int:
        """Stores and retrieves under way."""
        return self.transfers.operations

    @property
    def clients(self) -> Collection[Client]:
        """All that have said hello and live."""
        return self._clients.values()

    @property
    def chunk_size(self) -> int:
        """Tokens a chunk."""
        return self._config.chunk_size

    def status(self, tenant: str = "") -> Status:
        """What there is and what has happened; see core/report.py."""
        return self.report.status(tenant)
