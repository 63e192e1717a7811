"""Leases: which prompts' chunks stay in memory for whom, how long, and within which budget. Decisions only.

Called by core/lookups/ with what a lease's lookup has found, and by core/depot.py, on the deciding thread. A lease
belongs to a tenant and has a name there. It holds the chunks of the longest prefix of its prompt that memory has; one
that lacks some is looked up again each second for a minute, and holds what was stored meanwhile.
Invariants:

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
"""The time for which a lease grows with the chunks that are stored."""
_MOST_TTL_S = 1 << 31
_MOST_MATCHED = 64
"""Leases that one tick looks up again; the others follow with the next."""
_MOST_NAME = 256
"""Characters of a name in a list."""
_NEVER = float("inf")

_Tops: TypeAlias = list[tuple[Chunk, int]]
"""Chunks that a lease holds, each with the bytes of its chain, which it protects."""


@dataclass(slots=True, eq=False)
class Lease:
    """One lease. request: the request, without its hashes."""

    tenant: str
    request: wire.TakeLease
    ends: float
    number: int
    hashes: bytes = b""
    """The hashes of its prompt: kept while it grows, and to its end if its chunks are to be dropped."""
    salt: bytes = b""
    """The salt that its chunks are stored under; before it holds any, the salt in the request."""
    chunks: int = 0
    tops: _Tops = field(default_factory=list)
    held: int = 0
    """Bytes that it holds."""
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
        """The order in which leases end where room is short: those with an end, of the lowest priority, the oldest."""
        return self.ends == _NEVER, self.request.priority, self.number

    def keys(self) -> bytes:
        """The hashes of its prompt; once they are not kept, of the chunks that it holds."""
        if self.hashes:
            return self.hashes
        spaces = [top.namespace for top, _ in self.tops]
        trunk = next((each for each in spaces if not each.reach), spaces[0] if spaces else None)
        chains = (_chain(top) for top, _ in self.tops if top.namespace is trunk)
        return b"".join(key for chain in chains for key in reversed([each.key for each in chain]))


class Leases:
    def __init__(self, index: Index, counters: Counters) -> None:
        self.now = 0.0
        self.bytes = 0  # held by all
        self._ticked = 0.0
        self._index = index
        self._counters = counters
        self._by_tenant: dict[str, dict[str, Lease]] = {}  # then by name, the oldest first
        self._count = 0
        self._leased: Counter[Account] = Counter()  # bytes
        self._growing: dict[Lease, None] = {}  # the one that was looked up longest ago first
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
        """Hold what was matched in place of what a lease of the same name holds; returns the number of chunks.

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
        """Hold these instead of what it holds."""
        before, chunks = [chunk for chunk, _ in lease.tops], [chunk for chunk, _ in tops]
        self._index.hold(chunks)
        if not before:
            self._index.use(chunks)
        _count(tops, lease.tops)  # first, because a release may remove chunks and what they are chained to
        self._index.release(before)
        size = _size(tops) - lease.held
        lease.tops, lease.chunks = tops, matched
        lease.held += size
        self._leased[self._account(lease)] += size
        self.bytes += size

    # -- the budget

    def _account(self, lease: Lease) -> Account:
        """The account whose leases' budget it uses: that of the chunks that it holds, whatever salt a client says."""
        return self._index.accounts.of(lease.tenant, lease.salt)

    def _fits(self, account: Account, size: int) -> bool:
        """Whether the leases of an account may hold `size` bytes more."""
        accounts = self._index.accounts
        own = self._leased[account] + size
        if own <= account.floor:
            return True
        others = (each for each in accounts.all() if each is not account)
        above = own - account.floor + sum(max(0, self._leased[each] - each.floor) for each in others)
        return own <= accounts.lease_budget(account) and above <= accounts.above_floors // 2

    def _make_room(self, lease: Lease, size: int, old: Lease | None = None) -> bool:
        """End leases of the tenant and account of this one until `size` bytes more fit, counting what `old` gives up;
        if ending all of them is not enough, end none."""
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
            return False  # without sorting thousands of leases, as those that grow come here often
        for each in sorted(yielding, key=lambda each: each.rank):
            if self._fits(account, size - free):
                break
            self._end(each, "made room")
        return True

    def quota_changed(self, now: float) -> None:
        """A tenant's account or budget has changed: end leases that no longer fit, those without an end last."""
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
        """Hold what memory has of its prompt by now, and stop growing with the last chunk, without room or in time."""
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
        """End a lease on request; returns it with the hashes of its prompt, or None if there is none."""
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
        """Called once a second: ends leases whose time is over, and lets others grow; returns those to be dropped."""
        self._counters["lease_byte_seconds"] += round(self.bytes * (now - self._ticked))
        self.now = self._ticked = now
        over = [lease for lease in self._all() if lease.ends <= now]  # a millisecond for the most that there can be
        for lease in over:
            self._end(lease, "expired")
        for lease in list(itertools.islice(self._growing, _MOST_MATCHED)):
            if lease in self._growing:  # the growth of one before it may have ended it
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
        """All leases, or a tenant's."""
        if tenant:
            return self._by_tenant.get(tenant, {}).values()
        return itertools.chain.from_iterable(each.values() for each in self._by_tenant.values())

    # -- what people see

    def count_found(self, namespace: Namespace, hashes: bytes, matched: int, chunk_tokens: int) -> None:
        """Count how much of a prefix that an engine's lookup has found is leased. namespace: the model's first group.

        The leased chunks of a chain are its first ones, so the last of them is found by bisection.
        """
        lead = namespace.trunk
        if lead is None:
            return

        def is_free(number: int) -> bool:
            chunk = lead.chunks.get(hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES])
            return chunk is None or not chunk.leases

        self._counters["leased_hit_tokens"] += bisect_left(range(matched), True, key=is_free) * chunk_tokens

    def totals(self, tenant: str) -> tuple[int, int]:
        """The number of leases and the bytes that they hold, of one tenant, or of all if it is empty."""
        if not tenant:
            return self._count, self.bytes
        own = self._by_tenant.get(tenant, {}).values()
        return len(own), sum(each.held for each in own)

    def listed(self, tenant: str, now: float) -> list[LeaseStatus]:
        """The leases that a tenant may see, those that hold most first; empty: all."""
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
    """Count a lease on the chunks that `tops` keep instead of those that `before` kept; walks only what differs."""
    old = {id(top): top for top, _ in before}
    for top, _ in tops:
        for chunk in _chain(top):
            if old.pop(id(chunk), None) is not None:
                break  # it and those before it are counted
            chunk.leases += 1
    for chunk in itertools.chain.from_iterable(map(_chain, old.values())):
        chunk.leases -= 1


def _size(tops: _Tops) -> int:
    return sum(size for _, size in tops)


def _salt_of(tops: _Tops) -> bytes | None:
    """The salt that all of them are stored under. None: several, in KV cache groups whose chunks were stored by
    requests that say different ones."""
    salt = tops[0][0].salt
    return salt if all(top.salt == salt for top, _ in tops) else None


def _weigh(pins: list[Pin], known: _Tops) -> _Tops:
    """The chunks of pins, each with the bytes that holding it protects; known: some that were weighed before."""
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
    """A chunk and those before it in its chain, backwards."""
    chunk: Chunk | None = top
    while chunk is not None:
        yield chunk
        chunk = chunk.parent if chunk.position else None
