"""Tenants and salts with quotas beside the engines: they fill the arena, pin, lease, and have their quotas changed.

They are in some runs only, without tiers, and what they do is drawn from numbers of their own. They have no tensors, so
they ask the index itself; the engines, who have no quota, ask for their space by messages as ever. After every step of
the server it must hold that nobody has more than its cap, that nobody was taken below its floor by another, that what
is leased is there, and that leases leave every floor to its tenant.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvdepot.core.actions import Reply
from kvdepot.core.clients import Client
from kvdepot.core.index.chunk import Account, Chunk, Namespace
from kvdepot.core.index.index import Index
from kvdepot.core.index.runs import Refusal, Run
from kvdepot.errors import BadRequest, Busy
from kvdepot.memory.allocator import PAGE
from kvdepot.protocol import wire
from kvdepot.protocol.keys import salt_tag, tenant_salt
from kvdepot.protocol.quotas import Quota, name_of
from tests.harness import PlainLiveness
from tests.sim.tiers import WALL

if TYPE_CHECKING:
    from tests.sim.host import Host
    from tests.sim.server import Server

_TAG = salt_tag("a user of blue's")
_OWNERS = (("blue", b""), ("red", b""), ("blue", _TAG))


def are_there(seed: int) -> bool:
    """Whether a run has neighbours."""
    return seed % 12 == 7


@dataclass(eq=False)
class _Neighbour:
    tenant: str
    tag: bytes = b""  # of a salt; empty: the tenant's other requests
    server: Server | None = None  # of which the following tells
    quota: Quota | None = None
    used: int = 0  # bytes, after the last step
    held: list[Chunk] = field(default_factory=list)
    stored: list[bytes] = field(default_factory=list)  # keys, the latest
    leased: dict[str, tuple[bytes, float]] = field(default_factory=dict)  # by name: key, and end

    @property
    def salt(self) -> bytes:
        return tenant_salt(self.tenant, self.tag)

    @property
    def name(self) -> str:
        return name_of(self.tenant, self.tag)

    def account(self, server: Server) -> Account:
        """Its own, or its tenant's, or that of everybody without a quota."""
        return server.index.accounts.of(self.tenant, self.salt)


class Neighbours:
    """All tenants with quotas of one host."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._random = random.Random(host.world.seed ^ 0x9B0)
        self._leasing = random.Random(host.world.seed ^ 0x1EA5E)
        self._all = [_Neighbour(tenant, tag) for tenant, tag in _OWNERS]
        self._acting: _Neighbour | None = None
        self._over = False
        self._pause_s = 0.01
        host.world.after(0.05 * self._random.random(), self._act)

    def leave(self) -> None:
        """They release what they hold, and do nothing any more."""
        self._over = True
        for neighbour in self._all:
            if self._is_well() and neighbour.server is self._host.server:
                self._release(neighbour)

    def _is_well(self) -> bool:
        server = self._host.server
        return server is not None and server.serving and not server.frozen and not server.draining

    def _act(self) -> None:
        if self._over:
            return
        server, draw = self._host.server, self._random
        if server is not None and self._is_well():
            neighbour = draw.choice(self._all)
            if neighbour.server is not server:
                neighbour.server, neighbour.quota, neighbour.held = server, None, []
                neighbour.stored, neighbour.leased = [], {}
                neighbour.used = neighbour.account(server).used
            with self._as(neighbour, server):
                if neighbour.quota is None or draw.random() < 0.1:
                    self._set_quota(neighbour, server)
                elif neighbour.held and draw.random() < 0.3:
                    self._release(neighbour)
                else:
                    self._store(neighbour, server)
                if neighbour.stored and self._leasing.random() < 0.5:
                    self._lease(neighbour, server)
            server.act(server.depot._publish([]))  # a lowered cap leaves work for the next turns of the loop
            server._check()
        self._pause_s *= 1.01  # ever more rarely, because some runs last for hours
        self._host.world.after(self._pause_s * (0.1 + 3 * draw.random() ** 2), self._act)

    @contextmanager
    def _as(self, neighbour: _Neighbour, server: Server) -> Iterator[None]:
        """What happens in here is this one's deed."""
        server.now = self._host.world.now
        self._acting = neighbour
        try:
            yield
            self.check(server)
        finally:
            self._acting = None

    def _set_quota(self, neighbour: _Neighbour, server: Server) -> None:
        draw, counters = self._random, self._host.world.counters
        pages = server.index.allocator.capacity // PAGE
        floor = draw.randrange(pages + 1) if draw.random() < 0.7 else 0
        cap = draw.randint(floor, pages) if draw.random() < 0.6 else 0
        quota = Quota(floor * PAGE, cap * PAGE, draw.choice([0.5, 1.0, 3.0])) if draw.random() < 0.9 else None
        try:
            server.depot._set_quota(
                Client(b"", PlainLiveness("")), wire.SetQuota(neighbour.tenant, quota, neighbour.tag)
            )
        except BadRequest:
            counters["quota_refused"] += 1  # the floors do not fit
            return
        counters["quota_set"] += 1
        neighbour.quota = quota
        for each in self._all:  # chunks may have moved between the accounts of a tenant and its salt
            if each.server is server and each.tenant == neighbour.tenant:
                each.used = each.account(server).used
        counters["quota_below_use"] += quota is not None and 0 < quota.cap_bytes < neighbour.used

    def _store(self, neighbour: _Neighbour, server: Server) -> None:
        draw, index = self._random, server.index
        namespace = self._namespace(neighbour, index)
        size = draw.randint(1, 2 * PAGE)
        namespace.live += 1
        for _ in range(draw.randint(1, 6)):
            key = draw.randbytes(32)
            made = Index.reserve(
                index, namespace, 0, Run(key, size, b"root", 1, neighbour.salt), int(WALL + server.now)
            )
            if made.refusal is not None:
                is_capped = made.refusal is Refusal.OVER_CAP
                self._host.world.counters["capped" if is_capped else "neighbour_without_room"] += 1
                break
            (chunk,) = made.chunks
            Index.seal(index, chunk, 0, born=int(WALL + server.now))
            neighbour.stored = [*neighbour.stored[-20:], key]
            if draw.random() < 0.1:
                index.hold([chunk])
                index.use([chunk])
                neighbour.held.append(chunk)
        namespace.live -= 1
        index.namespaces.forget(namespace)

    def _lease(self, neighbour: _Neighbour, server: Server) -> None:
        """Lease a chunk that it has stored, or end a lease."""
        draw, counters = self._leasing, self._host.world.counters
        name, key = f"{neighbour.name} {draw.randrange(12)}", draw.choice(neighbour.stored)
        if draw.random() < 0.2:
            ended = server.depot.leases.end(neighbour.tenant, name, server.now)
            if neighbour.leased.pop(name, None) is not None and ended is None:  # it has ended since the last check
                why = server.ended_leases.get((neighbour.tenant, name))
                assert why in ("expired", "made room", "quota lowered", "forgotten"), f"{name} has ended: {why}"
                counters["lease_ended"] += 1
            return
        ttl_s = draw.choice([0, 1, 20])
        request = wire.Lease(
            name,
            "retain",
            f"model of {neighbour.tenant}",
            1,
            1,
            key,
            neighbour.tag,
            ttl_s=ttl_s,
            priority=draw.choice([20, 50]),
        )
        try:
            actions = server.depot.sessions.lease(
                Client(b"", PlainLiveness(""), neighbour.tenant), b"", request, server.now
            )
        except Busy:
            counters["lease_refused"] += 1
            return
        (reply,) = actions
        assert isinstance(reply, Reply)
        counters["lease_refused" if isinstance(reply.value, Busy) else "leased"] += 1
        if reply.value == 1:
            neighbour.leased[name] = key, server.now + ttl_s if ttl_s else float("inf")
        elif reply.value == 0:
            neighbour.leased.pop(name, None)

    def _check_leases(self, neighbour: _Neighbour, server: Server) -> None:
        """What it leases is there, and what all lease leaves half of what is above all floors."""
        there = {each.name for each in server.depot.leases.listed(neighbour.tenant, server.now)}
        for name, (key, ends) in list(neighbour.leased.items()):
            if name not in there:  # ended by its time, for another lease, or by a quota
                self._host.world.counters["lease_ended"] += 1
                del neighbour.leased[name]
            elif server.now < ends and not self._host.config.ttl_s:
                chunk = self._namespace(neighbour, server.index).chunks.get(key)
                assert chunk is not None and chunk.sealed, f"{name} is leased, and is gone"

    def _check_budget(self, server: Server) -> None:
        index = server.index
        held: dict[tuple[str, bytes], int] = {}
        owners = [each for each in self._all if each.quota and each.server is server]
        floors = {(each.tenant, each.salt): each.quota.floor_bytes for each in owners if each.quota}
        for lease in server.depot.leases._all():
            own, tenants = (lease.tenant, lease.salt), (lease.tenant, b"")
            whose = own if own in floors else tenants if tenants in floors else ("", b"")
            held[whose] = held.get(whose, 0) + sum(chunk.bytes for chunk, _ in lease.tops)
        above = sum(max(0, size - floors.get(whose, 0)) for whose, size in held.items())
        half = (index.allocator.capacity - sum(floors.values())) // 2
        assert above <= half, f"leases hold {above} bytes above the floors, and may hold {half}"

    def _namespace(self, neighbour: _Neighbour, index: Index) -> Namespace:
        return index.namespaces.find(f"model of {neighbour.tenant}", 1, 0, bytes(32), 1, neighbour.tenant)

    def _release(self, neighbour: _Neighbour) -> None:
        held, neighbour.held = neighbour.held, []
        assert neighbour.server is not None
        neighbour.server.index.release(held)

    def check(self, server: Server) -> None:
        """After every step: nobody is above its cap, and nobody was taken below its floor; and what leases hold."""
        self._check_budget(server)
        for neighbour in self._all:
            if neighbour.server is server:
                self._check_leases(neighbour, server)
            quota = neighbour.quota
            if quota is None or neighbour.server is not server:
                continue
            account = neighbour.account(server)
            used = account.used
            is_acting = self._acting is not None and self._acting.account(server) is account
            if quota.cap_bytes:
                most = max(quota.cap_bytes, neighbour.used)
                assert used <= most, f"{neighbour.name} has {used} bytes, and may have {most}"
            is_trimmed = 0 < quota.cap_bytes < neighbour.used  # of whole chunks, so that it may come below its floor
            if not is_acting and not is_trimmed and not self._host.config.ttl_s:
                least = min(quota.floor_bytes, neighbour.used)
                assert used >= least, f"{neighbour.name} was taken below its floor: {used} bytes of {least}"
            if used < neighbour.used and not is_acting:
                self._host.world.counters["taken_from_a_tenant"] += 1
            neighbour.used = used
