"""The journal of events, the latencies, and the parts of a status that combine values of several files.

Called on the deciding thread by core/depot.py, which puts the parts of a status together. Decides nothing. Invariant: a
status takes a time that does not grow with the number of chunks.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvdepot import __version__
from kvdepot.core.index.chunk import Account, Namespace
from kvdepot.protocol.counters import SERVER, Counters
from kvdepot.protocol.metrics import Event, Latencies
from kvdepot.protocol.quotas import shown_tag
from kvdepot.protocol.status import (
    MOST_NAME,
    OTHERS,
    GroupStatus,
    NamespaceStatus,
    Status,
    TenantStatus,
    TierStatus,
    Usage,
    added_up,
)

log = logging.getLogger(__name__)

SHOWN = 80
"""Most characters of a model's name in the journal."""
_NAMESPACES = 100
"""The most namespaces in a status, so that it stays small: the largest. The others are summed in one entry."""
_MOST_EVENTS = 100
_MOST_TEXT = 200
"""Most characters of an event."""
_QUIET_S = 60.0
"""Seconds between two journal entries for the same counter, at least."""


@dataclass(slots=True)
class ServerFacts:
    """Facts for the status that only the server knows. The server changes it on the deciding thread."""

    boot: bytes = b""
    pid: int = 0
    host: str = ""
    http: str = ""
    """HOST:PORT where the server listens for HTTP; empty if it does not."""
    http_failure: str = ""
    """Why it does not serve HTTP although it should."""
    unreachable: str = ""
    """Why no new client can find this server."""
    settings: dict[str, str] = field(default_factory=dict)


class Report:
    """The journal and the latencies of one depot, and the facts of its server."""

    def __init__(self, server: ServerFacts) -> None:
        self.events: deque[Event] = deque(maxlen=_MOST_EVENTS)  # the journal, oldest first
        self.latencies = Latencies()
        self.server = server
        self.wall = 0  # seconds since 1970, as of the last tick
        self._began: float | None = None  # time of the first tick
        self._counted = Counters()  # the values of counters at their last journal entries
        self._quiet_until: dict[str, float] = {}  # by counter: no further journal entry before this time
        self._tiers: dict[str, str] = {}  # by tier: the state that the journal has
        self._corrupt = 0  # corrupt chunks when last logged

    def note(self, kind: str, text: str) -> None:
        self.events.append(Event(self.wall, kind, text[:_MOST_TEXT]))

    def reach(self, obstacle: str, where: str = "") -> None:
        """Called once a second. obstacle: why no new client can find this server; empty: clients can.

        where: the paths concerned; only logged, because anyone may see the status.
        """
        if obstacle and not self.server.unreachable:
            log.error("%s (%s): no new engine can connect; restart the server", obstacle, where)
            self.note("unreachable", obstacle)
        self.server.unreachable = obstacle

    def tick(self, now: float, counters: Counters, tiers: Iterable[TierStatus]) -> None:
        """Called once a second: adds journal entries for changed counters and tier states."""
        if self._began is None:
            self._began = now
            self.note("start", f"kvdepot {__version__} started")
        for counted in SERVER:
            name, count = counted.name, counters[counted.name]
            if counted.is_event and count > self._counted[name] and now >= self._quiet_until.get(name, 0.0):
                self.note(name, f"{counted.meaning.rstrip('.')}: {count - self._counted[name]}")
                self._counted[name], self._quiet_until[name] = count, now + _QUIET_S
        corrupt = counters["corrupt_chunks"]
        if corrupt > self._corrupt:
            log.error("%d chunks failed their checksum; suspect faulty RAM", corrupt)
            self._corrupt = corrupt
        for tier in tiers:
            if self._tiers.setdefault(tier.name, "up") != tier.state:
                self._tiers[tier.name] = tier.state
                self.note("tier", f"{tier.name}: {tier.state}" + (f": {tier.error}" if tier.state != "up" else ""))

    def fill(self, status: Status, tenant: str, now: float) -> None:
        """Fill in the facts of the server that a tenant's client may see; empty: all facts."""
        server = self.server
        for name in ("pid", "host", "http", "http_failure", "unreachable"):
            setattr(status, name, getattr(server, name))
        status.version, status.boot = __version__, server.boot.hex()
        status.wall_s = self.wall
        status.uptime_s = now - self._began if self._began is not None else 0.0
        status.settings = {} if tenant else server.settings
        status.latencies = self.latencies.figures()
        status.events = [] if tenant else list(self.events)


def fill_namespaces(status: Status, namespaces: Sequence[Namespace]) -> None:
    """Fill in the entries of the largest namespaces, and the sum of the others. namespaces: the first KV cache group of
    each. The largest namespace of a model shows the model's tokens in `model_usage`."""
    usages = {(each.tenant, each.model): each for each in status.model_usage}
    largest = sorted(namespaces, key=lambda first: -sum(group.bytes for group in first.groups))
    entries = [_entry(each, usages.pop((each.tenant, each.model[:MOST_NAME]), Usage(""))) for each in largest]
    status.namespaces, rest = entries[:_NAMESPACES], entries[_NAMESPACES:]
    status.namespace_count = len(entries)
    status.cached_tokens = sum(each.chunks * each.chunk_tokens for each in entries)
    for each in usages.values():  # these models have no namespace
        tokens = each.asked_tokens, each.found_tokens, each.reused_tokens
        rest.append(NamespaceStatus("", "", 0, 0, 0, 0, 0, 0, 0, 0, [], *tokens))
    if rest:
        facts = {"tenant": OTHERS, "model": OTHERS, "world_size": 0, "blocks_in_chunk": 0, "chunk_tokens": 0}
        status.other_namespaces = added_up(rest, **facts, groups=[], answers=None)


def _entry(first: Namespace, usage: Usage) -> NamespaceStatus:
    return NamespaceStatus(
        tenant=first.tenant,
        model=first.model[:MOST_NAME],
        world_size=first.world_size,
        blocks_in_chunk=first.blocks_in_chunk,
        chunk_tokens=first.chunk_tokens,
        groups=[GroupStatus(group.reach, len(group.chunks), group.bytes) for group in first.groups],
        chunks=max(len(group.chunks) for group in first.groups),
        bytes=sum(group.bytes for group in first.groups),
        engines=max(group.live for group in first.groups),
        lookup_chunks=first.lookup_chunks,
        hit_chunks=first.hit_chunks,
        asked_tokens=usage.asked_tokens,
        found_tokens=usage.found_tokens,
        reused_tokens=usage.reused_tokens,
        answers=usage.answers,
    )


def tenant_figures(
    accounts: Sequence[Account], tenant: str, disk_bytes: Callable[[Account], int | None]
) -> list[TenantStatus]:
    """The figures of a tenant's account and of those of its salts; tenant empty: of all accounts, if there are several.

    accounts: the rest first. disk_bytes: the bytes that an account has in local tiers.
    """
    return [
        TenantStatus(
            tenant=account.tenant,
            used_bytes=account.used,
            chunks=account.chunks,
            quota=account.quota,
            evicted_chunks=account.evicted,
            capped_chunks=account.capped,
            disk_bytes=None if account is accounts[0] else disk_bytes(account),
            salt=shown_tag(account.tag),
        )
        for account in (accounts if len(accounts) > 1 else ())
        if tenant in ("", account.tenant)
    ]
