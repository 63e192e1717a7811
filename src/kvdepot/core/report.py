"""The depot's status, journal of events and latencies. Reads the depot's state and decides nothing.

Called by core/depot.py on the deciding thread. Invariant: its time does not grow with the number of chunks.
"""

from __future__ import annotations

import heapq
import logging
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kvdepot import __version__
from kvdepot.core.clients import Client
from kvdepot.core.index.accounts import Accounts
from kvdepot.core.index.chunk import Namespace
from kvdepot.core.tiering.tiering import Tiering
from kvdepot.protocol.counters import SERVER, Counters
from kvdepot.protocol.metrics import Journal, Latencies
from kvdepot.protocol.quotas import shown_tag
from kvdepot.protocol.status import (
    MOST_NAME,
    OTHERS,
    Device,
    Engine,
    GroupStatus,
    NamespaceStatus,
    Saved,
    Status,
    TenantStatus,
    Usage,
)

if TYPE_CHECKING:
    from kvdepot.core.depot import Depot

__all__ = ["SHOWN", "Report"]

log = logging.getLogger(__name__)

SHOWN = 80
"""Most characters of a model's name in the journal."""

_NAMESPACES = 100
"""Most namespaces in a status (the largest ones), so that it stays small; the others are summed in one entry."""
_ENGINES = 64
"""Most engines in a status (those with the latest requests)."""
_MODELS = 4
"""Most models listed for one engine."""
_SHORT = 100
"""Most characters of a model's name in an engine's entry."""
_QUIET_S = 60.0
"""Minimum time between two journal entries for the same counter."""


class Report:
    """Status, journal and latencies of one depot."""

    def __init__(self, depot: Depot, devices: Callable[[], list[Device]], boot: bytes) -> None:
        self.journal = Journal()
        self.latencies = Latencies()
        self.http = ""  # where the server listens for HTTP; set by server/loop.py, on the deciding thread
        self.http_failure = ""  # why it does not serve HTTP although it should
        self.unreachable = ""  # why no new client can find this server
        self.settings: dict[str, str] = {}  # set by server/loop.py before it serves
        self._depot = depot
        self._devices = devices
        self._boot = boot
        self._began: float | None = None  # time of the first tick
        self._counted = Counters()  # values at their last journal entries
        self._told: dict[str, float] = {}  # by counter: no further journal entry before this time
        self._tiers: dict[str, str] = {}  # by tier: its state in the journal
        self._corrupt = 0  # corrupt chunks when last logged

    def __repr__(self) -> str:
        return f"<Report {self.journal}, {self.latencies}>"

    def note(self, kind: str, text: str) -> None:
        """Add an event to the journal."""
        self.journal.note(self._depot.wall, kind, text)

    def reach(self, obstacle: str, where: str = "") -> None:
        """Called once a second. obstacle: why no new client can find this server; empty: clients can.

        where: logged only, because anyone may see the status.
        """
        if obstacle and not self.unreachable:
            log.error("%s (%s): no new engine can connect; restart the server", obstacle, where)
            self.note("unreachable", obstacle)
        self.unreachable = obstacle

    def tick(self, now: float) -> None:
        """Called once a second: adds journal entries for changed counters and tier states."""
        if self._began is None:
            self._began = now
            self.note("start", f"kvdepot {__version__} started")
        for counted in SERVER:
            name, count = counted.name, self._depot.counters[counted.name]
            if counted.is_event and count > self._counted[name] and now >= self._told.get(name, 0.0):
                self.note(name, f"{counted.meaning.rstrip('.')}: {count - self._counted[name]}")
                self._counted[name], self._told[name] = count, now + _QUIET_S
        corrupt = self._depot.counters["corrupt_chunks"]
        if corrupt > self._corrupt:
            log.error("%d chunks failed their checksum; suspect faulty RAM", corrupt)
            self._corrupt = corrupt
        for tier in self._depot.tiering.status(now):
            if self._tiers.setdefault(tier.name, "up") != tier.state:
                self._tiers[tier.name] = tier.state
                self.note("tier", f"{tier.name}: {tier.state}" + (f": {tier.error}" if tier.state != "up" else ""))

    def status(self, tenant: str = "") -> Status:
        """The current status. tenant: whose namespaces and engines to list; empty: everybody's."""
        depot, index = self._depot, self._depot.index
        clients = depot.clients
        now = depot.now
        engines = [each for each in clients if (each.instances or each.model) and tenant in ("", each.tenant)]
        namespaces = [
            namespace
            for namespace in index.namespaces.all()
            if namespace.groups[0] is namespace and tenant in ("", namespace.tenant)
        ]
        lease_count, leased_bytes = depot.leases.totals(tenant)
        tokens, models = depot.usages.tokens, depot.usages.by_model(tenant)
        listed, others = _namespaces(namespaces, models)
        return Status(
            version=__version__,
            boot=self._boot.hex(),
            pid=os.getpid(),
            wall_s=depot.wall,
            uptime_s=now - self._began if self._began is not None else 0.0,
            http=self.http,
            http_failure=self.http_failure,
            unreachable=self.unreachable,
            settings={} if tenant else self.settings,
            chunk_size_tokens=depot.chunk_size,
            capacity_bytes=index.allocator.capacity,
            used_bytes=index.allocator.capacity - index.allocator.free_bytes,
            chunks=index.chunks,
            reserved_shards=index.reserved,
            holds=index.held,
            evicted_chunks=index.evicted,
            record_slots=index.records.capacity,
            record_slots_used=index.records.used,
            unrecorded_shards=index.unrecorded,
            operations=depot.operations,
            clients=len(clients),
            sessions=sum(len(client.sessions) for client in clients),
            instances=sum(len(client.instances) for client in clients),
            namespace_count=len(namespaces),
            engine_count=len(engines),
            divided_engines=_divided(engines),
            lease_count=lease_count,
            leased_bytes=leased_bytes,
            stored_bytes=depot.transfers.stored_bytes,
            retrieved_bytes=depot.transfers.retrieved_bytes,
            cached_tokens=sum(_chunks(namespace) * namespace.chunk_tokens for namespace in namespaces),
            saved=Saved(tokens.reused, depot.usages.saved_s.sum),
            tokens=tokens,
            usage=depot.usages.by_tenant(tenant),
            model_usage=models,
            latencies=self.latencies.figures(),
            namespaces=listed,
            other_namespaces=others,
            histograms=[each.figure() for each in (depot.usages.hit_tokens, *index.lifetimes, depot.usages.saved_s)],
            holds_s=index.lifetimes.holds_s(),
            host=os.uname().nodename,
            engines=_engines(engines, now),
            tenants=_tenants(index.accounts, depot.tiering, tenant),
            tiers=depot.tiering.status(now),
            devices=self._devices(),
            counters={**depot.counters, "evicted_chunks": index.evicted},
            events=[] if tenant else self.journal.events(),
        )


def _namespaces(
    namespaces: Iterable[Namespace], models: Iterable[Usage]
) -> tuple[list[NamespaceStatus], NamespaceStatus | None]:
    """One entry per model, the largest ones, and the sum of the others; namespaces: their first KV cache groups."""
    sizes = sorted(((_bytes(each), each) for each in namespaces), key=lambda item: -item[0])
    usages = {(each.tenant, each.model): each for each in models}
    none = Usage("")
    listed = []
    for size, namespace in sizes[:_NAMESPACES]:
        usage = usages.pop((namespace.tenant, namespace.model[:MOST_NAME]), none)  # the largest of the model has it
        listed.append(
            NamespaceStatus(
                tenant=namespace.tenant,
                model=namespace.model[:MOST_NAME],
                world_size=namespace.world_size,
                blocks_in_chunk=namespace.blocks_in_chunk,
                chunk_tokens=namespace.chunk_tokens,
                groups=[GroupStatus(group.reach, len(group.chunks), group.bytes) for group in namespace.groups],
                chunks=_chunks(namespace),
                bytes=size,
                engines=_live(namespace),
                lookup_chunks=namespace.lookup_chunks,
                hit_chunks=namespace.hit_chunks,
                asked_tokens=usage.asked_tokens,
                found_tokens=usage.found_tokens,
                reused_tokens=usage.reused_tokens,
            )
        )
    rest = sizes[_NAMESPACES:]
    if not rest and not usages:
        return listed, None
    others = NamespaceStatus(
        tenant=OTHERS,
        model=OTHERS,
        world_size=0,
        blocks_in_chunk=0,
        chunks=sum(_chunks(each) for _, each in rest),
        bytes=sum(size for size, _ in rest),
        engines=sum(_live(each) for _, each in rest),
        lookup_chunks=sum(each.lookup_chunks for _, each in rest),
        hit_chunks=sum(each.hit_chunks for _, each in rest),
        asked_tokens=sum(each.asked_tokens for each in usages.values()),
        found_tokens=sum(each.found_tokens for each in usages.values()),
        reused_tokens=sum(each.reused_tokens for each in usages.values()),
    )
    return listed, others


def _bytes(namespace: Namespace) -> int:
    """The bytes of a model, given its first KV cache group."""
    return sum(group.bytes for group in namespace.groups)


def _live(namespace: Namespace) -> int:
    """The registered instances of a model, given its first KV cache group."""
    return max(group.live for group in namespace.groups)


def _tenants(accounts: Accounts, tiering: Tiering, tenant: str) -> list[TenantStatus]:
    """The accounts that a tenant may see: its own, and those of its salts; empty: all, if there are several."""
    shown = [each for each in accounts.all() if tenant in ("", each.tenant)] if len(accounts) > 1 else []
    return [
        TenantStatus(
            tenant=account.tenant,
            used_bytes=account.used,
            chunks=account.chunks,
            floor_bytes=account.quota.floor_bytes,
            cap_bytes=account.quota.cap_bytes,
            weight=account.quota.weight,
            ttl_s=account.quota.ttl_s,
            evicted_chunks=account.evicted,
            capped_chunks=account.capped,
            disk_bytes=None if account is accounts.rest else tiering.bytes_of(account),
            disk_floor_bytes=account.quota.disk_floor_bytes,
            disk_cap_bytes=account.quota.disk_cap_bytes,
            salt=shown_tag(account.tag),
        )
        for account in shown
    ]


def _chunks(namespace: Namespace) -> int:
    """The number of chunks of a model, given its first KV cache group: of the group that has most of them."""
    return max(len(group.chunks) for group in namespace.groups)


def _divided(clients: Iterable[Client]) -> int:
    """The number of engines whose processes name different models: what one stores, another never finds."""
    models: dict[tuple[str, str], set[str]] = {}
    for client in clients:
        if client.engine and client.model:
            models.setdefault((client.user, client.engine), set()).add(client.model)
    return sum(len(each) > 1 for each in models.values())


def _engines(clients: Iterable[Client], now: float) -> list[Engine]:
    return [
        Engine(
            id=client.called,
            since_s=now - client.came,
            idle_s=now - client.heard,
            models=sorted(
                {model[:_SHORT] for each in client.instances.values() for model, *_ in each.namespaces}
                | ({client.model[:_SHORT]} if client.model else set())
            )[:_MODELS],
            ranks=sorted({rank for each in client.instances.values() for _, _, rank, _ in each.namespaces}),
            device=next((each.layout.device for each in client.instances.values() if each.layout.device), ""),
            tenant=client.tenant,
            sessions=len(client.sessions),
            pinned_chunks=client.pins,
            queued=client.queued,
            engine=client.engine_called,
            host=client.host[:_SHORT],
            pid=client.pid,
        )
        for client in heapq.nlargest(_ENGINES, clients, key=lambda client: client.heard)
    ]
