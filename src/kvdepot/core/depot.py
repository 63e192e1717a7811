"""The deciding part of the server: takes requests and outcomes, and returns actions. Other files do the work.

Called with requests by core/connections.py and with outcomes by server/loop.py, on one thread. No sockets, threads,
clocks or I/O here: anything that takes time is returned as an action. Invariant: every request is answered exactly
once, and what it holds (reservations, pins) is released exactly once, when it ends, fails, or its client dies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from kvdepot.config import Config
from kvdepot.core.actions import Action, Prepared, Reply, Stop
from kvdepot.core.admission import check, check_description, check_names, check_report, check_salt
from kvdepot.core.clients import Client, CopyOperation, Liveness
from kvdepot.core.departures import Departures
from kvdepot.core.engines import Engines, fill_engines
from kvdepot.core.forgetting import STEP_CHUNKS, Removals
from kvdepot.core.index.chunk import Namespace
from kvdepot.core.index.events import Reader
from kvdepot.core.index.excess import expire, set_back, trim
from kvdepot.core.index.index import Index
from kvdepot.core.index.lifetimes import Lifetimes
from kvdepot.core.inspections import inspect
from kvdepot.core.leases import Leases
from kvdepot.core.lookups.lookups import Lookups
from kvdepot.core.naming import Naming
from kvdepot.core.registrations import Registrations
from kvdepot.core.report import SHOWN, Report, ServerFacts, fill_namespaces, tenant_figures
from kvdepot.core.tiering.forgetting import Forgetting
from kvdepot.core.tiering.loading import TierSearch
from kvdepot.core.tiering.tiering import Decision, Tiering
from kvdepot.core.trails import Recorders, Trails
from kvdepot.core.transfers import Transfers
from kvdepot.core.usage import Usages
from kvdepot.core.verification import Verification
from kvdepot.errors import BadRequest, Busy, InternalError, KVDepotError, UnknownClient
from kvdepot.eviction.ages import WallClock
from kvdepot.protocol import wire
from kvdepot.protocol.counters import Counters
from kvdepot.protocol.handshake import Seal
from kvdepot.protocol.keys import tenant_salt
from kvdepot.protocol.metrics import COMMANDS
from kvdepot.protocol.quotas import name_of
from kvdepot.protocol.status import Status
from kvdepot.tiers import TierConfig
from kvdepot.tiers.worker import TierOutcome, TierTask

log = logging.getLogger(__name__)

_WITH_SHARDS = wire.Store, wire.Retrieve, wire.Compare
_MOST_TOPICS = 256
"""The most topics of KV events; each topic gets a copy of every message about its models."""


class Depot:
    """One server's decisions: owns its index, transfers, lookups, pins, registrations and tier state."""

    def __init__(
        self,
        config: Config,
        index: Index,
        tiers: Sequence[TierConfig] = (),
        server: ServerFacts | None = None,
        step_chunks: int = STEP_CHUNKS,
        is_tenant: Callable[[str], bool] = lambda tenant: True,
        readers: Sequence[Reader] = (),
    ) -> None:
        """step_chunks: the number of chunks that one step of a removal examines. is_tenant: whether a client can have
        this tenant. readers: get the events of chunks, besides the depot's own readers."""
        self.index = index
        self.counters = Counters()
        self.tiering = Tiering(tiers, index)
        self._has_tiers = bool(tiers)
        self.usages = Usages()
        self.leases = Leases(index, self.counters)
        self.report = Report(server or ServerFacts())
        self.verification = Verification(index.namespaces, self.counters, self.usages, self.report)
        departures = Departures()
        self.trails = Trails(index.namespaces, self.tiering.names, departures)
        recorders = Recorders(self.counters, self.usages, self.trails, self.verification)
        self.lookups = Lookups(config, index, self.tiering, self.leases, recorders)
        self.pins = self.lookups.pins
        self._naming = Naming(index.namespaces.all)
        self.registrations = Registrations(config, index, self.counters)
        self.transfers = Transfers(config, index, self.registrations, self.pins, recorders, self.report.server.boot)
        self._readers: list[Reader] = [*readers, departures, Lifetimes()]
        self.max_clients = config.max_clients  # lowered if there are too few file descriptors
        self._config = config
        self._clients: dict[bytes, Client] = {}
        self._idle_since = float("inf")  # first tick without an engine; commands, probes and web pages are none
        self._is_tenant = is_tenant
        self._step_chunks = step_chunks
        self._is_behind = False  # there are chunks that have expired or that are above a cap
        self.now = 0.0
        self._clock = WallClock()
        self.wall = 0  # seconds since 1970, as of the last tick
        self.engines = Engines(self.report.note)
        self.removals = Removals(
            config, index, self.tiering, self.lookups, self.leases, self.counters, self.report, step_chunks
        )

    @property
    def withdrawals(self) -> int:
        """The number of times that chunks were hidden from requests that had found them."""
        return self.index.namespaces.withdrawals

    # -- events

    def welcome(
        self,
        identity: bytes,
        liveness: Liveness,
        user: str = "",
        tenant: str = "",
        seal: Seal | None = None,
        hello: wire.Hello | None = None,
    ) -> None:
        """Add a client that has passed the handshake, with access to this tenant's chunks. Raises Busy."""
        assert identity not in self._clients
        if len(self._clients) >= self.max_clients:
            self.counters["clients_refused"] += 1
            raise Busy(f"{len(self._clients)} clients are connected, the limit set by max_clients or open files")
        client = self._clients[identity] = Client(identity, liveness, tenant, user, seal, self.now, self.now)
        client.belongs_to(hello)

    def client(self, identity: bytes) -> Client | None:
        return self._clients.get(identity)

    def handle(self, identity: bytes, number: bytes, request: wire.Request, now: float = 0.0) -> list[Action]:
        """Decide one request. A KVDepotError becomes the reply and is never raised."""
        self.now = now
        try:
            client = self._clients.get(identity)
            if client is None:
                raise UnknownClient("unknown client: send Hello first")
            client.heard = now
            chunks = check(request)
            if chunks > wire.MAX_CHUNKS:
                self.counters["large_requests_refused"] += 1
                raise Busy(f"the request names {chunks} chunks; the limit is {wire.MAX_CHUNKS}")
            if isinstance(request, _WITH_SHARDS):
                is_known = all(not part.model or part.model == client.model for part in request.shards)
            else:
                is_known = getattr(request, "model", "") in ("", client.model)
            if not is_known:  # otherwise the request has the server's own name of the model
                request = self._naming.rename(request, client.tenant)
            actions = self._decide(client, number, request)
            if client.is_engine and not client.is_seen:
                self.engines.joined(client)
        except KVDepotError as exc:
            is_command = client is not None and not client.is_engine and type(request).__name__ in COMMANDS
            self.counters["errors"] += not is_command
            asked = {"client": identity.hex()[:8], "request": getattr(request, "request", "")}
            log.debug("%s failed: %s", type(request).__name__, exc, extra=asked)
            if client is not None:
                self.trails.failed(client, request, exc)
            actions = [Reply(identity, number, exc)]
        return self._conclude(actions)

    def _conclude(self, actions: list[Action]) -> list[Action]:
        """Take the last steps of a decision that has changed chunks; returns the actions of all steps.

        1. What was stored is saved in tiers, and room is made for more, which may evict.
        2. Lookups that waited for it go on: they hold what was stored, and may reserve space for what tiers have.
        3. Namespaces that are empty now are dropped.
        4. Readers get the events of all these steps.

        Neither of the first two ends a store, so none is due twice.
        """
        index = self.index
        if index.events:
            if self._has_tiers:
                actions += self.tiering.save(index.events)
            actions += self.lookups.settled(index.events, self.now)
            if index.namespaces.emptied:
                index.namespaces.drop_emptied()
            events, index.events = index.events, []
            for reader in self._readers:
                reader.read(events, self.wall)
        return actions

    def _decide(self, client: Client, number: bytes, request: wire.Request) -> list[Action]:
        match request:
            case wire.Lookup():
                return self.lookups.look_up(client, number, request, self.now)
            case wire.Store():
                return self.transfers.store(client, number, request, self.wall)
            case wire.Retrieve():
                return self.transfers.retrieve(client, number, request)
            case wire.Compare():
                return self.transfers.compare(client, number, request)
            case wire.Complete():
                return self.transfers.complete(client, number, request, self.wall)
            case wire.EndSession():
                actions = self.lookups.give_up((client, request.request))
                self.pins.end(client, request.request)  # even if the reported savings are invalid
                return [*actions, Reply(client.identity, number, self._report(client, request))]
            case wire.Clear():
                return self.removals.clear(client, number, request, self.now)
            case wire.TakeLease():
                if request.drops or request.kind == "expire":
                    self.removals.refuse_drops()
                return self.lookups.lease(client, number, request, self.now)
            case wire.EndLease():
                if request.drops:
                    self.removals.refuse_drops()
                actions = self.lookups.give_up((client.tenant, request.name))
                ended = self.leases.end(client.tenant, request.name, self.now)
                if ended is not None and request.drops:
                    self.removals.drop_leased(ended)
                return [*actions, Reply(client.identity, number, ended is not None)]
            case wire.Drop():
                return self.removals.drop(client, number, request, self.now)
            case wire.ForgetChunks():
                return self.removals.forget(client, number, request, self.now)
            case wire.Count():
                return self.removals.count(client, number, request, self.now)
            case wire.Describe():
                if not self._config.wants_tokens:
                    raise BadRequest("this server publishes no token ids")
                check_description(request)
                return [request, Reply(client.identity, number, None)]
        return [Reply(client.identity, number, self._value(client, request))]

    def _value(self, client: Client, request: wire.Request) -> object:
        """The answer to a request whose reply is its only action."""
        match request:
            case wire.Register():
                self.registrations.register(client, request)
                self.verification.learn(client, request)
            case wire.Unregister():
                self.registrations.unregister(client, request.instance)
            case wire.ChunkSize():
                return self._config.chunk_tokens
            case wire.Noop():
                return "ok"
            case wire.ListLeases():
                return self.leases.listed(client.tenant, self.now)
            case wire.Inspect():
                return inspect(request, client.tenant, self.index.namespaces.all(), self.tiering.names, self.wall)
            case wire.Why():
                return self.trails.find(client.tenant, request.request)
            case wire.SetQuota():
                self._set_quota(client, request)
            case wire.EndQuarantine():
                check_names("", request.model)
                return self.verification.release(client.tenant, request.model)
            case wire.GetStatus():
                return self.status(client.tenant)
            case _:
                raise InternalError(f"no reply to {type(request).__name__} here")
        return None

    def finished(
        self, token: TierTask | CopyOperation, outcome: TierOutcome | Prepared, now: float = 0.0
    ) -> list[Action]:
        """Handle the outcome of a tier task (see worker.TierWorker) or of a Prepare."""
        self.now = now
        if isinstance(token, CopyOperation):
            assert isinstance(outcome, Prepared)
            return self._conclude(self.transfers.prepared(token, outcome, self.wall))
        assert not isinstance(outcome, Prepared)
        actions = [*self._go_on(self.tiering.finished(token, outcome, now)), *self.tiering.saves.make_room(None)]
        return self._conclude(actions)

    def next_deadline(self) -> float:
        """When `expire` must be called next (the depot's clock); 0: as soon as all received messages are handled."""
        if self.removals or self._is_behind:
            return 0.0
        parts = self.tiering.forgettings, self.lookups, self.transfers
        return min(part.next_deadline() for part in parts)

    def expire(self, now: float) -> list[Action]:
        """Continue removals, and requests whose wait has reached its deadline; free memory that no dead client can
        write to any more."""
        self.now = now
        self.transfers.expire(now)
        if self._is_behind:
            self._drop_excess()
        actions = [*self.removals.step(now), *self.lookups.expire(now)]
        for forgetting in self.tiering.forgettings.expire(now):
            actions += self.removals.answer(forgetting)
        return self._conclude(actions)

    def _go_on(self, decisions: list[Decision]) -> list[Action]:
        """Carry out the tiering's decisions in order, because each depends on the state after the one before."""
        actions: list[Action] = []
        for decision in decisions:
            match decision:
                case TierSearch():
                    actions += self.lookups.loaded(decision)
                case Forgetting():
                    actions += self.removals.answer(decision)
                case _:
                    actions.append(decision)
        return actions

    def tick(self, now: float, wall: float) -> list[Action]:
        """Called once a second. now: seconds of the depot's clock. wall: seconds since 1970."""
        if back := self._clock.set_back(now, wall):
            set_back(self.index, back)
        self.now, self.wall = now, int(wall)
        self.report.wall = self.wall
        self.trails.wall = self.wall
        for lease in self.leases.tick(now):
            self.removals.drop_leased(lease)
        self.removals.tick()
        self._drop_excess()
        self.report.tick(now, self.counters, self.tiering.status(now))
        is_used = any(client.is_engine for client in self.clients)
        self._idle_since = float("inf") if is_used else min(self._idle_since, now)
        actions: list[Action] = [*self.tiering.tick(now)]
        if 0 < self._config.idle_exit <= now - self._idle_since:
            actions.append(Stop(f"no engine for {self._config.idle_exit:g} s"))
        return self._conclude(actions)

    def _drop_excess(self) -> None:
        """Remove some of the expired chunks, and some chunks of tenants above their caps."""
        expired = expire(self.index, self.wall, self._step_chunks)
        self.counters["expired_chunks"] += expired
        self._is_behind = trim(self.index, self._step_chunks) or expired == self._step_chunks

    def _set_quota(self, client: Client, request: wire.SetQuota) -> None:
        """Raises BadRequest or Busy, and then changes nothing."""
        tenant, quota, tag = request.tenant, request.quota, request.salt
        check_salt(tag)
        if client.tenant:
            raise BadRequest("only a client without a tenant may set quotas")
        if quota is not None and not (self._is_tenant(tenant) or (tag and not tenant)):
            raise BadRequest(f"no key is bound to the tenant {tenant[:SHOWN]!r}: see `kvdepot keygen --tenant`")
        if quota is not None and (fault := self.tiering.fault(tenant, tenant_salt(tenant, tag), quota)):
            raise BadRequest(fault)
        self.index.set_quota(tenant, quota, tag)
        self.tiering.set_rules()
        self.leases.quota_changed(self.now)
        self._is_behind = True
        whose = name_of(tenant[:SHOWN], tag)
        self.report.note("quota", f"quota of {whose}: {'none' if quota is None else quota.words}")

    def stop_waiting(self) -> list[Action]:
        """Finish removals before shutdown, and answer all requests that wait."""
        actions = [*self.removals.stop(), *self.lookups.stop()]
        for forgetting in self.tiering.forgettings.end_all():
            actions += self.removals.answer(forgetting)
        return self._conclude(actions)

    def died(self, identity: bytes, has_left: bool = False) -> list[Action]:
        """Remove a client and release what it holds. has_left: it closed its connection."""
        client = self._clients.pop(identity, None)
        if client is None:
            return []
        if not has_left:
            self.counters["clients_died"] += 1
        self.engines.left(client, has_left)
        client.dead = True
        actions = self.lookups.leave(client)
        self.transfers.leave(client, has_left, self.now, self.wall)
        for number in list(client.instances):
            self.registrations.unregister(client, number)
        return self._conclude(actions)

    def _report(self, client: Client, request: wire.EndSession) -> BadRequest | None:
        """Count what an engine reports about a request; returns why it cannot be counted."""
        try:
            check_report(request)
        except BadRequest as exc:  # returned, because raising it would lose the reply to a lookup that was given up
            self.counters["errors"] += 1
            return exc
        self.usages.report(client, request)
        self.counters["retrieved_chunks"] += request.copied
        self.transfers.retrieved_bytes += request.copied_bytes
        if request.copied:
            asked = {"client": client.called, "request": request.request}
            log.debug("the engine retrieved %d chunks itself", request.copied, extra=asked)
        self.trails.ended(client, request)
        return None

    def topics(self) -> frozenset[tuple[str, Namespace]]:
        """The topics of KV events of the registered engines, each with a namespace whose chunks these engines can load.

        Of a model with several KV cache groups, it is that of the first unbounded group: every hit needs its chunks.
        """
        found: dict[tuple[str, Namespace], None] = {}
        topics: set[str] = set()
        for instance in (each for client in self._clients.values() for each in client.instances.values()):
            is_new = instance.topic not in topics
            if not instance.topic or instance.fault or (is_new and len(topics) == _MOST_TOPICS):
                continue
            topics.add(instance.topic)
            for namespace in instance.namespaces.values():
                whole = next((group for group in namespace.groups if not group.reach), None)
                if whole is not None:
                    found[instance.topic, whole] = None
        return frozenset(found)

    # -- status

    @property
    def operations(self) -> int:
        return self.transfers.operations

    @property
    def is_busy(self) -> bool:
        """Whether work is in progress that a stopping server should let end."""
        return bool(self.operations or self.tiering.busy) or self.transfers.next_deadline() < float("inf")

    @property
    def clients(self) -> Collection[Client]:
        return self._clients.values()

    def status(self, tenant: str = "") -> Status:
        """The status that this tenant may see; empty: everything."""
        index, usages = self.index, self.usages
        lease_count, leased_bytes = self.leases.totals(tenant)
        status = Status(
            capacity_bytes=index.allocator.capacity,
            used_bytes=index.allocator.capacity - index.allocator.free_bytes,
            chunks=index.chunks,
            reserved_shards=index.reserved,
            holds=index.held,
            evicted_chunks=index.evicted,
            record_slots=index.records.capacity,
            record_slots_used=index.records.used,
            unrecorded_shards=index.unrecorded,
            clients=len(self.clients),
            sessions=sum(len(client.sessions) for client in self.clients),
            instances=sum(len(client.instances) for client in self.clients),
            chunk_size_tokens=self._config.chunk_tokens,
            operations=self.operations,
            lease_count=lease_count,
            leased_bytes=leased_bytes,
            waiting_bytes=self.pins.budget.bytes,
            stored_bytes=self.transfers.stored_bytes,
            retrieved_bytes=self.transfers.retrieved_bytes,
            tenants=tenant_figures(index.accounts.all(), tenant, self.tiering.bytes_of),
            tiers=self.tiering.status(self.now),
            counters={**self.counters, "evicted_chunks": index.evicted},
            histograms=[each.figure() for each in (usages.hit_tokens, usages.saved_s)],
        )
        for reader in self._readers:
            reader.fill(status)
        self.report.fill(status, tenant, self.now)
        usages.fill(status, tenant)
        self.verification.fill(status, tenant)
        fill_engines(status, self.clients, tenant, self.now)
        firsts = [each for each in index.namespaces.all() if each.groups[0] is each and tenant in ("", each.tenant)]
        fill_namespaces(status, firsts)
        return status
