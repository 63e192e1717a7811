"""Leases keep the chunks of a prompt in memory for a tenant, for a time and within a budget. Decisions only.

Called by core/lookups/ with the match of a lease's lookup, and by core/depot.py, on the deciding thread. A lease
belongs to a tenant and has a name there. It holds the chunks of the longest prefix of its prompt that memory has. One
that lacks chunks is looked up again each second for a minute, and holds chunks stored meanwhile. Invariants:

- the bytes that the leases of one account hold are within its budget (`Accounts.lease_budget`), and what all hold above
  their floors is at most half of what is above all floors. So leases never keep a tenant below its floor;
- a lease that does not fit changes nothing, except that leases of the same tenant and account make room that have an
  end and no higher priority;
- what a lease holds is released exactly once: when it ends. `Chunk.leases` counts the leases that keep a chunk.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from kvdepot.core.admission import check_prompt
from kvdepot.core.index.chunk import Account, Chunk, Namespace, Pin, is_forgotten
from kvdepot.core.index.index import Index
from kvdepot.core.index.matching import match_prompt
from kvdepot.errors import BadRequest, Busy
from kvdepot.protocol import wire
from kvdepot.protocol.counters import Counters
from kvdepot.protocol.keys import HASH_BYTES, tenant_salt
from kvdepot.protocol.leases import KINDS, MOST_HASHES, MOST_LEASES, MOST_LISTED, MOST_PRIORITY, LeaseStatus

log = logging.getLogger(__name__)

GROW_S = 60.0
"""Seconds during which a lease grows with the chunks that are stored."""
_MOST_TTL_S = 1 << 31
_MOST_MATCHED = 64
"""The number of leases that one tick looks up again; the others follow with the next ticks."""
_MOST_NAME = 256
"""The most characters of a name in a list."""
_NEVER = float("inf")

_Tops: TypeAlias = list[tuple[Chunk, int]]
"""Chunks that a lease holds, each with the bytes of the chain that this hold protects."""


@dataclass(slots=True, eq=False)
class Lease:
    """One lease. request: its request, without the hashes."""

    tenant: str
    request: wire.TakeLease
    ends: float
    number: int
    hashes: bytes = b""
    """The hashes of its prompt, kept while it grows, or until its end if its chunks will be dropped."""
    salt: bytes = b""
    """The salt that its chunks are stored under; before it holds any, the salt in the request."""
    chunks: int = 0
    tops: _Tops = field(default_factory=list)
    held: int = 0  # bytes
    grows_until: float = _NEVER

    @property
    def holds(self) -> bool:
        return self.request.kind != "expire"

    @property
    def drops(self) -> bool:
        """Whether its chunks are dropped when its time is over."""
        return self.request.drops or not self.holds

    @property
    def rank(self) -> tuple[bool, int, int]:
        """The order in which leases end if room is short: those with an end first, then low priorities, then the
        oldest."""
        return self.ends == _NEVER, self.request.priority, self.number

    def keys(self) -> bytes:
        """The hashes of its prompt; if they are not kept any more, the keys of the chunks that it holds."""
        if self.hashes:
            return self.hashes
        spaces = [top.namespace for top, _ in self.tops]
        trunk = next((each for each in spaces if not each.reach), spaces[0] if spaces else None)
        chains = (_chain(top) for top, _ in self.tops if top.namespace is trunk)
        return b"".join(key for chain in chains for key in reversed([each.key for each in chain]))


class Leases:
    def __init__(self, index: Index, counters: Counters) -> None:
        self.now = 0.0
        self.bytes = 0  # bytes that all leases hold
        self._ticked = 0.0
        self._index = index
        self._counters = counters
        self._by_tenant: dict[str, dict[str, Lease]] = {}  # then by name, the oldest first
        self._count = 0
        self._leased: Counter[Account] = Counter()  # bytes
        self._growing: dict[Lease, None] = {}  # in the order of the last lookup, the oldest first
        self._hashes = 0  # kept
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return self._count

    # -- begin

    def admit(self, tenant: str, request: wire.TakeLease, now: float) -> Lease:
        """A new lease, before its lookup: it holds nothing, and `begin` puts it into the table.

        Raises BadRequest or Busy.
        """
        self.now = now
        check_prompt(request.name, request)
        if request.kind not in KINDS:
            raise BadRequest(f"a lease of kind {request.kind[:80]!r}; kinds are {', '.join(KINDS)}")
        if not 0 <= request.priority <= MOST_PRIORITY:
            raise BadRequest(f"priority {request.priority} is not between 0 and {MOST_PRIORITY}")
        if not 0 <= request.ttl_s <= _MOST_TTL_S:
            raise BadRequest(f"a lease of {request.ttl_s} s; the limit is {_MOST_TTL_S} s")
        if request.kind == "expire" and not request.ttl_s:
            raise BadRequest("a lease of kind expire needs ttl_s")
        self._refuse_beyond_most(tenant, request)
        ends = now + request.ttl_s if request.ttl_s else _NEVER
        bare = msgspec.structs.replace(request, hashes=b"")
        return Lease(tenant, bare, ends, next(self._numbers), request.hashes, tenant_salt(tenant, request.salt))

    def _refuse_beyond_most(self, tenant: str, request: wire.TakeLease) -> None:
        if self._count >= MOST_LEASES and self._find(tenant, request.name) is None:
            self._refuse(f"there are {self._count} leases, the limit of one server")

    def _refuse(self, why: str) -> None:
        self._counters["leases_refused"] += 1
        raise Busy(why)

    def begin(self, lease: Lease, pins: list[Pin], matched: int) -> int:
        """Hold the matched chunks, and end the tenant's lease of the same name; returns the number of chunks.

        Raises Busy, counted, if it does not fit, BadRequest if the chunks have several salts, and then changes nothing.
        """
        old = self._find(lease.tenant, lease.request.name)
        self._refuse_beyond_most(lease.tenant, lease.request)
        chunks = len(lease.hashes) // HASH_BYTES
        spare = MOST_HASHES - self._hashes + (0 if old is None else len(old.hashes) // HASH_BYTES)
        grows = matched < chunks and lease.holds
        if lease.drops and chunks > spare:
            self._refuse(f"leases keep {self._hashes} hashes to drop their chunks; the limit is {MOST_HASHES}")
        if grows and chunks > spare:
            self._counters["lease_growths_refused"] += 1
            grows = False
        tops = _weigh(pins, []) if lease.holds and matched else []
        if tops:
            salt = _salt_of(tops)
            if salt is None:
                raise BadRequest("the prompt's chunks are stored under several cache salts")
            lease.salt = salt
        size = _size(tops)
        if not self._make_room(lease, size, old):
            self._refuse(f"the lease takes {size} bytes, more than its tenant's other leases leave of their budget")
        self._hold(lease, tops, matched)  # first, so that chunks of both stay held
        if old is not None:
            self._end(old, "replaced")
        self._by_tenant.setdefault(lease.tenant, {})[lease.request.name] = lease
        self._count += 1
        self._counters["leases_begun"] += 1
        if not grows and not lease.drops:
            lease.hashes = b""
        self._hashes += len(lease.hashes) // HASH_BYTES
        if grows:
            lease.grows_until = self.now + GROW_S
            self._growing[lease] = None
        return matched

    def _hold(self, lease: Lease, tops: _Tops, matched: int) -> None:
        """Let a lease hold these chunks instead of those that it holds. matched: chunks in the prefix."""
        before, chunks = [chunk for chunk, _ in lease.tops], [chunk for chunk, _ in tops]
        self._index.hold(chunks)
        if not before:
            self._index.use(chunks)
        _count(tops, lease.tops)  # before the release, which may remove chunks and the chunks before them
        self._index.release(before)
        size = _size(tops) - lease.held
        lease.tops, lease.chunks = tops, matched
        lease.held += size
        self._leased[self._account(lease)] += size
        self.bytes += size

    # -- the budget

    def _account(self, lease: Lease) -> Account:
        """The account whose budget a lease uses: the account of its chunks, whatever salt its client names."""
        return self._index.accounts.of(lease.tenant, lease.salt)

    def _fits(self, account: Account, size: int) -> bool:
        accounts = self._index.accounts
        own = self._leased[account] + size
        if own <= account.floor:
            return True
        others = (each for each in accounts.all() if each is not account)
        above = own - account.floor + sum(max(0, self._leased[each] - each.floor) for each in others)
        return own <= accounts.lease_budget(account) and above <= accounts.above_floors // 2

    def _make_room(self, lease: Lease, size: int, old: Lease | None = None) -> bool:
        """End leases of the same tenant and account until `size` bytes more fit; returns whether they fit. old: the
        lease that will be replaced, whose bytes count as free. If ending all is not enough, none ends."""
        account = self._account(lease)
        free = old.held if old is not None and self._account(old) is account else 0
        if not size or self._fits(account, size - free):
            return True
        yielding = [
            each
            for each in self._by_tenant.get(lease.tenant, {}).values()
            if each.held and each.ends < _NEVER and each.request.priority <= lease.request.priority
            if each is not old and each is not lease and self._account(each) is account
        ]
        if not self._fits(account, size - free - sum(each.held for each in yielding)):
            return False  # before sorting thousands of leases, because growing leases come here often
        for each in sorted(yielding, key=lambda each: each.rank):
            if self._fits(account, size - free):
                break
            self._end(each, "made room")
        return True

    def quota_changed(self, now: float) -> None:
        """End leases that no longer fit after a quota has changed, those without an end last."""
        self.now = now
        self._leased = Counter()
        for lease in self._all():
            self._leased[self._account(lease)] += lease.held
        if all(self._fits(each, 0) for each in self._index.accounts.all()):
            return
        for lease in sorted((each for each in self._all() if each.held), key=lambda each: each.rank):
            if not self._fits(self._account(lease), 0):
                self._end(lease, "quota lowered")

    # -- growth

    def _grow(self, lease: Lease) -> None:
        """Hold the chunks that memory now has of its prompt. Growing ends with the last chunk, without room or in
        time."""
        found = match_prompt(self._index.namespaces, lease.tenant, lease.request, lease.hashes)
        if found.chunks > lease.chunks:
            tops = _weigh(found.pins, lease.tops)
            salt = _salt_of(tops)
            if not lease.tops and salt is not None:
                lease.salt = salt
            if salt != lease.salt or not self._make_room(lease, _size(tops) - lease.held):
                self._counters["lease_growths_refused"] += 1
                self._stop_growing(lease)
                return
            self._hold(lease, tops, found.chunks)
        if lease.chunks * HASH_BYTES >= len(lease.hashes) or lease.grows_until <= self.now:
            self._stop_growing(lease)
            if not lease.chunks and not lease.drops:
                self._end(lease, "no chunk of it was stored")
        else:
            del self._growing[lease]
            self._growing[lease] = None  # as the last one

    def _stop_growing(self, lease: Lease) -> None:
        del self._growing[lease]
        if not lease.drops:
            self._hashes -= len(lease.hashes) // HASH_BYTES
            lease.hashes = b""

    # -- end

    def end(self, tenant: str, name: str, now: float) -> Lease | None:
        """End a lease on request; returns it with the hashes of its prompt, or None if the tenant has no such lease."""
        self.now = now
        lease = self._find(tenant, name)
        if lease is not None:
            keys = lease.keys()
            self._end(lease, "released")
            lease.hashes = keys
        return lease

    def _end(self, lease: Lease, why: str) -> None:
        log.debug("lease %r of %s has ended: %s", lease.request.name, lease.tenant or "no tenant", why)
        names = self._by_tenant[lease.tenant]
        del names[lease.request.name]
        if not names:
            del self._by_tenant[lease.tenant]
        self._count -= 1
        self._growing.pop(lease, None)
        self._hashes -= len(lease.hashes) // HASH_BYTES
        self._hold(lease, [], 0)

    def tick(self, now: float) -> list[Lease]:
        """Called once a second: ends leases whose time is over, and lets others grow; returns the leases to drop."""
        self._counters["lease_byte_seconds"] += round(self.bytes * (now - self._ticked))
        self.now = self._ticked = now
        over = [lease for lease in self._all() if lease.ends <= now]  # takes a millisecond with `MOST_LEASES`
        for lease in over:
            self._end(lease, "expired")
        for lease in list(itertools.islice(self._growing, _MOST_MATCHED)):
            if lease in self._growing:  # the growth of an earlier lease may have ended this one
                self._grow(lease)
        return [lease for lease in over if lease.drops]

    def forget(self) -> None:
        """End leases of chunks that a removal in progress covers: a hold would keep them from being stored again."""
        for lease in list(self._all()):
            if any(is_forgotten(chunk) for chunk, _ in lease.tops):
                self._end(lease, "forgotten")

    # -- the table

    def _find(self, tenant: str, name: str) -> Lease | None:
        return self._by_tenant.get(tenant, {}).get(name)

    def _all(self, tenant: str = "") -> Iterable[Lease]:
        if tenant:
            return self._by_tenant.get(tenant, {}).values()
        return itertools.chain.from_iterable(each.values() for each in self._by_tenant.values())

    # -- what people see

    def count_found(self, namespace: Namespace, hashes: bytes, matched: int, chunk_tokens: int) -> None:
        """Count the leased tokens of the prefix that an engine's lookup has found. namespace: the model's first group.

        Leased chunks are the first ones of a chain, so bisection finds the last leased chunk.
        """
        lead = namespace.trunk
        if lead is None:
            return

        def is_free(number: int) -> bool:
            chunk = lead.chunks.get(hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES])
            return chunk is None or not chunk.leases

        self._counters["leased_hit_tokens"] += bisect_left(range(matched), True, key=is_free) * chunk_tokens

    def totals(self, tenant: str) -> tuple[int, int]:
        """The number of leases of a tenant (empty: of all tenants), and the bytes that they hold."""
        if not tenant:
            return self._count, self.bytes
        own = self._by_tenant.get(tenant, {}).values()
        return len(own), sum(each.held for each in own)

    def listed(self, tenant: str, now: float) -> list[LeaseStatus]:
        """The leases that a tenant may see (empty: all leases), those that hold the most bytes first."""
        self.now = now
        return [
            LeaseStatus(
                name=lease.request.name[:_MOST_NAME],
                tenant=lease.tenant,
                kind=lease.request.kind,
                model=lease.request.model[:_MOST_NAME],
                priority=lease.request.priority,
                chunks=lease.chunks,
                bytes=lease.held,
                ends_s=max(0.0, lease.ends - self.now) if lease.ends < _NEVER else None,
            )
            for lease in heapq.nlargest(MOST_LISTED, self._all(tenant), key=lambda lease: lease.held)
        ]


def _count(tops: _Tops, before: _Tops) -> None:
    """Count a lease on the chunks that `tops` keep instead of those of `before`; visits only chunks that differ."""
    old = {id(top): top for top, _ in before}
    for top, _ in tops:
        for chunk in _chain(top):
            if old.pop(id(chunk), None) is not None:
                break  # this chunk and those before it are counted already
            chunk.leases += 1
    for chunk in itertools.chain.from_iterable(map(_chain, old.values())):
        chunk.leases -= 1


def _size(tops: _Tops) -> int:
    return sum(size for _, size in tops)


def _salt_of(tops: _Tops) -> bytes | None:
    """The salt that all these chunks are stored under. None: they have several, because requests with different salts
    have stored the chunks of different KV cache groups."""
    salt = tops[0][0].salt
    return salt if all(top.salt == salt for top, _ in tops) else None


def _weigh(pins: list[Pin], known: _Tops) -> _Tops:
    """The chunks of pins, each with the bytes that holding it protects. known: results of an earlier call."""
    weights = {id(chunk): size for chunk, size in known}
    tops: _Tops = []
    for top in (chunk for pin in pins for chunk in pin.chunks):
        size = 0
        for chunk in _chain(top):
            if id(chunk) in weights:
                size += weights[id(chunk)]
                break
            size += chunk.bytes
        tops.append((top, size))
    return tops


def _chain(top: Chunk) -> Iterator[Chunk]:
    """A chunk and the chunks before it in its chain, from the last to the first."""
    chunk: Chunk | None = top
    while chunk is not None:
        yield chunk
        chunk = chunk.parent if chunk.position else None
