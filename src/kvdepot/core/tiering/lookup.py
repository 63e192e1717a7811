"""Tier lookups: find the chunks of a lookup's prefix that are not in memory, and load them.

Invariant: a tier can only delay a lookup, up to its deadline, or shorten a hit. Whatever a tier does or fails to do,
chunks in memory are served as if there were no tier.

All tiers are asked at once for everything that is not in memory. Chunks that extend the prefix are loaded into
reservations that the tier lookup holds. When all have arrived, or at the deadline, the lookup is answered from memory.
Chunks that arrive later are sealed for later lookups.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvdepot.core.index.boundary import deepest_boundary, needed_parts
from kvdepot.core.index.chunk import Chunk, Namespace, Shard
from kvdepot.core.index.index import Index
from kvdepot.core.index.outcomes import Absent, Found, Reason, Replaced, Reserved
from kvdepot.core.tiering.forgetting import Forgettings
from kvdepot.core.tiering.tier import LOOKUPS, READS, TASK_BYTES, TierState, Token, facts_of
from kvdepot.errors import KVDepotError
from kvdepot.protocol import wire
from kvdepot.protocol.keys import HASH_BYTES, ROOT
from kvdepot.tiers.format import Header
from kvdepot.tiers.worker import MOST_PARTS, Erase, Find, Load, Loaded, Located, NotLoaded, Part, TierTask, Unwanted

__all__ = ["Arrived", "EraseToken", "FindToken", "LoadToken", "LookupDecision", "Lookups", "TierLookup"]

log = logging.getLogger(__name__)

_MOST_TIER_LOOKUPS = 1024
_MOST_WANTED = 1 << 16
"""Most shards that one tier lookup asks for; the prefix ends there."""
_MOST_WANTED_IN_ALL = 1 << 20
_MOST_FINDS = 64
"""Most Finds in progress in one tier; beyond that it is not asked."""


Place: TypeAlias = tuple[int, int, int]
"""A shard of a tier lookup: KV cache group, chunk, rank."""


@dataclass(slots=True, eq=False)
class TierLookup:
    """One lookup's search of the tiers, for a boundary in `[first, end]` of the chunks of `hashes`.

    namespace: the model's first KV cache group. first: the boundary that memory can restore.
    """

    namespace: Namespace
    request: str  # the request id, for the log
    hashes: bytes
    chained: bool
    salt: bytes
    first: int
    end: int
    begun: float
    held: dict[tuple[int, bytes], Chunk]  # by number of the namespace and key
    wanted: list[Place] = field(default_factory=list)  # that tiers were asked for
    found: dict[Place, int] = field(default_factory=dict)  # the nearest tier that has it
    owing: set[int] = field(default_factory=set)  # tiers that have not answered their Find
    waiting: Counter[int] = field(default_factory=Counter)  # by tier: shards being loaded
    loading: bool = False
    ended: bool = False

    def is_awaited(self) -> bool:
        """Whether answers to Finds are still of use. Thread-safe."""
        return not (self.ended or self.loading)

    @property
    def groups(self) -> list[Namespace]:
        return self.namespace.groups

    def key(self, chunk: int) -> bytes:
        return self.hashes[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES]


@dataclass(slots=True, eq=False)
class Arrival:
    """A shard that is being loaded, and the tier lookups that wait for it."""

    chunk: Chunk
    rank: int
    shard: Shard
    tier: int
    tier_lookups: list[TierLookup] = field(default_factory=list)
    replaced: bool = False  # a store or another load has taken over the shard

    @property
    def place(self) -> tuple[int, bytes, int]:
        return self.chunk.namespace.number, self.chunk.key, self.rank


@dataclass(slots=True, eq=False)
class FindToken(Token):
    """The token of a Find."""

    kind = LOOKUPS

    tier_lookup: TierLookup


@dataclass(slots=True, eq=False)
class LoadToken(Token):
    """The token of a Load."""

    kind = READS

    arrivals: list[Arrival]  # one per part


@dataclass(slots=True, eq=False)
class EraseToken(Token):
    """The token of an Erase of corrupt objects."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Shards that were loaded from a tier, and sealed."""

    tier: TierState
    shards: list[tuple[Chunk, int]]  # chunk, rank


LookupDecision: TypeAlias = TierTask | TierLookup | Arrived
"""A tier task, a tier lookup that has ended and whose reply is due, or shards that nearer tiers may save."""


class Lookups:
    """All tier lookups in progress, and the shards that they load."""

    def __init__(self, tiers: Sequence[TierState], index: Index, forgettings: Forgettings) -> None:
        self.arriving_bytes = 0
        self._tiers = tiers
        self._index = index
        self._forgettings = forgettings
        self._arrivals: dict[tuple[int, bytes, int], Arrival] = {}  # by namespace, key, rank
        self._count = 0
        self._wanted = 0  # shards that all tier lookups together asked for

    def __repr__(self) -> str:
        return f"<Lookups {len(self)}, {len(self._arrivals)} shards arriving>"

    def __len__(self) -> int:
        return self._count

    # -- ask

    def begin(
        self, namespace: Namespace, request: wire.Lookup, salt: bytes, first: int, held: list[Chunk], now: float
    ) -> TierLookup | None:
        """Begin a tier lookup: hold `held`, and list what is missing. None if tiers cannot help. See `Tiering`."""
        usable = [tier for tier in self._tiers if tier.is_searchable]
        is_known = all(len(group.sizes) == group.world_size for group in namespace.groups)
        if not usable or not is_known or self._forgettings.is_under_way(namespace, salt):
            return None
        asked = [tier for tier in usable if tier.finding < _MOST_FINDS]
        shards = namespace.world_size * len(namespace.groups)  # of a chunk, at most
        end = min(len(request.hashes) // HASH_BYTES, first + _MOST_WANTED // shards)
        room = self._wanted + (end - first) * shards <= _MOST_WANTED_IN_ALL
        for tier in usable:
            tier.counters["searches_refused"] += not room or tier not in asked
        if self._count >= _MOST_TIER_LOOKUPS or not room or not asked:
            return None
        tier_lookup = TierLookup(
            namespace, request.request, request.hashes, request.chained, salt, first, end, now,
            held={(chunk.namespace.number, chunk.key): chunk for chunk in held},
        )  # fmt: skip
        tier_lookup.wanted = self._missing(tier_lookup)
        tier_lookup.owing = {tier.number for tier in asked} if tier_lookup.wanted else set()
        self._index.hold(list(tier_lookup.held.values()), use=False)
        self._count += 1
        self._wanted += len(tier_lookup.wanted)
        return tier_lookup

    def _missing(self, tier_lookup: TierLookup) -> list[Place]:
        """The shards that are neither in memory nor being loaded, and that some boundary behind `first` needs."""
        missing: list[Place] = []
        for group in tier_lookup.groups:
            # Resuming at the next boundary needs the last `reach` parts before it, some of them before `first`.
            first = max(0, tier_lookup.first + 1 - group.reach) if group.reach else tier_lookup.first
            hashes = tier_lookup.hashes[first * HASH_BYTES : tier_lookup.end * HASH_BYTES]
            near = [self._index.find(group, rank, hashes) for rank in range(group.world_size)]
            missing += [
                (group.group, i, rank)
                for i in range(first, tier_lookup.end)
                for rank in range(group.world_size)
                if isinstance(near[rank][i - first], Absent) and self._arrival(group, rank, tier_lookup.key(i)) is None
            ]
        return missing

    def ask(self, tier_lookup: TierLookup) -> list[TierTask]:
        """Ask the tiers, or load at once if nothing is missing; in that case the tier lookup may end here."""
        if not tier_lookup.wanted:
            return self._load(tier_lookup)
        groups = tier_lookup.groups
        facts = [[facts_of(group, rank) for rank in range(group.world_size)] for group in groups]
        objects = [(facts[group][rank], tier_lookup.key(i)) for group, i, rank in tier_lookup.wanted]
        asked = [tier for tier in self._tiers if tier.number in tier_lookup.owing]
        for tier in asked:
            tier.finding += 1
        return [
            Find(FindToken(tier, tier_lookup), tier.number, objects, tier_lookup.salt, tier_lookup.is_awaited)
            for tier in asked
        ]

    def located(self, token: FindToken, outcome: Located | Unwanted | KVDepotError) -> list[LookupDecision]:
        """Handle the end of a Find."""
        tier, tier_lookup = token.tier, token.tier_lookup
        tier.finding -= 1
        tier_lookup.owing.discard(tier.number)
        if isinstance(outcome, KVDepotError):
            log.debug("tier lookup: cannot find objects in this tier: %s", outcome, extra=_about(tier, tier_lookup))
        if not tier_lookup.is_awaited():
            return []
        if isinstance(outcome, Located):
            for place, there in zip(tier_lookup.wanted, outcome.there, strict=True):
                if there:  # the nearest tier wins
                    tier_lookup.found[place] = min(tier.number, tier_lookup.found.get(place, tier.number))
        if tier_lookup.owing and len(tier_lookup.found) < len(tier_lookup.wanted):
            return []
        return self._load_or_end(tier_lookup)

    def half_time(self, tier_lookup: TierLookup) -> list[LookupDecision]:
        """Half of the time is over: if some tiers have not answered, load what the others have."""
        if not tier_lookup.is_awaited():
            return []
        begins = self._boundary(tier_lookup, tier_lookup.end) > tier_lookup.first
        return self._load_or_end(tier_lookup) if begins else []

    def _boundary(self, tier_lookup: TierLookup, most: int) -> int:
        """The deepest boundary up to `most` that memory and the tiers that have answered can restore together."""
        end = tier_lookup.first
        unbounded = [group for group in tier_lookup.groups if not group.reach]
        while end < most and all(self._can_have(tier_lookup, group, end) for group in unbounded):
            end += 1
        bounded = [(group, group.reach) for group in tier_lookup.groups if group.reach]
        if bounded:
            end = deepest_boundary(bounded, end, lambda group, i: self._can_have(tier_lookup, group, i))
        return end

    def _can_have(self, tier_lookup: TierLookup, group: Namespace, i: int) -> bool:
        """Whether every shard of a part is in memory, being loaded, or in a tier."""
        return all(
            (group.group, i, rank) in tier_lookup.found or self._is_near(tier_lookup, group, i, rank)
            for rank in range(group.world_size)
        )

    def _is_near(self, tier_lookup: TierLookup, group: Namespace, i: int, rank: int) -> bool:
        """Whether a shard is in memory or being loaded."""
        key = tier_lookup.key(i)
        (found,) = self._index.find(group, rank, key)
        return isinstance(found, Found) or self._arrival(group, rank, key) is not None

    def _arrival(self, namespace: Namespace, rank: int, key: bytes) -> Arrival | None:
        """The load of a shard that is in progress, if its tier works; otherwise None."""
        arrival = self._arrivals.get((namespace.number, key, rank))
        return arrival if arrival is not None and self._tiers[arrival.tier].breaker.usable else None

    # -- load

    def _load_or_end(self, tier_lookup: TierLookup) -> list[LookupDecision]:
        tier_tasks = self._load(tier_lookup)
        return [*tier_tasks, tier_lookup] if tier_lookup.ended else [*tier_tasks]

    def _load(self, tier_lookup: TierLookup) -> list[TierTask]:
        """Load what extends the prefix. If nothing is being loaded after that, the tier lookup ends."""
        tier_lookup.loading = True
        by_tier: dict[int, list[Arrival]] = {}
        if not tier_lookup.namespace.gone:
            for arrival in self._reserve_prefix(tier_lookup):
                by_tier.setdefault(arrival.tier, []).append(arrival)
        tier_tasks: list[TierTask] = []
        for number, arrivals in by_tier.items():
            tier = self._tiers[number]
            batches = list(_batches(arrivals))
            tier.loading += len(batches)
            log.debug("tier lookup: loading %d shards from this tier", len(arrivals), extra=_about(tier, tier_lookup))
            tier_tasks += [
                Load(LoadToken(tier, batch), number, [self._part(arrival) for arrival in batch]) for batch in batches
            ]
        if not tier_lookup.waiting.total():
            self.end(tier_lookup)
        return tier_tasks

    def _reserve_prefix(self, tier_lookup: TierLookup) -> list[Arrival]:
        """Reserve what the deepest boundary needs and memory lacks: of unbounded groups all chunks up to the first that
        cannot be completed, then of bounded groups the last parts before the boundary that is left.
        """
        first, groups = tier_lookup.first, tier_lookup.groups
        end = tier_lookup.end if tier_lookup.namespace.is_simple else self._affordable(tier_lookup)
        fresh: list[Arrival] = []
        for group in groups:
            for i in range(first, end) if not group.reach else ():
                if not self._reserve_part(tier_lookup, group, i, fresh):
                    end = i
                    break
        if not tier_lookup.namespace.is_simple:
            end = self._boundary(tier_lookup, end)
        for group in groups:
            for i in needed_parts(group.reach, end) if group.reach and end > first else ():
                if not self._reserve_part(tier_lookup, group, i, fresh):
                    return fresh
        return fresh

    def _affordable(self, tier_lookup: TierLookup) -> int:
        """The deepest boundary whose missing parts have room among what is loaded at a time.

        Unbounded groups come first, so without this they could leave no room for the parts of bounded ones, and would
        be loaded for nothing.
        """
        end = self._boundary(tier_lookup, tier_lookup.end)
        most = min(self._index.allocator.capacity // 2, tier_lookup.namespace.account_of(tier_lookup.salt).cap)
        room = most - self.arriving_bytes
        for group in tier_lookup.groups:
            for i in needed_parts(group.reach, end) if group.reach else ():
                room -= self._missing_bytes(tier_lookup, group, i)
        unbounded = [group for group in tier_lookup.groups if not group.reach]
        for i in range(tier_lookup.first, end):
            room -= sum(self._missing_bytes(tier_lookup, group, i) for group in unbounded)
            if room < 0:
                return self._boundary(tier_lookup, i)
        return end

    def _missing_bytes(self, tier_lookup: TierLookup, group: Namespace, i: int) -> int:
        """Bytes of a part's shards that are neither in memory nor being loaded."""
        ranks = range(group.world_size)
        return sum(group.sizes[rank] for rank in ranks if not self._is_near(tier_lookup, group, i, rank))

    def _reserve_part(self, tier_lookup: TierLookup, group: Namespace, i: int, fresh: list[Arrival]) -> bool:
        """Reserve and hold the part of chunk `i`; adds what was reserved to `fresh`, returns whether it is complete."""
        arrivals = self._reserve(tier_lookup, group, i)
        if arrivals is None:
            return False
        fresh += arrivals
        chunk = group.chunks[tier_lookup.key(i)]
        place = group.number, chunk.key
        if place not in tier_lookup.held:
            self._index.hold([chunk], use=False)
            tier_lookup.held[place] = chunk
        return True

    def _reserve(self, tier_lookup: TierLookup, namespace: Namespace, i: int) -> list[Arrival] | None:
        """Reserve the missing shards of a part, and wait for those being loaded; returns the reserved ones.

        Returns None, with nothing reserved, if the part cannot be completed.
        """
        key = tier_lookup.key(i)
        near: list[Arrival] = []
        far: list[tuple[int, int]] = []  # rank, tier
        for rank in range(namespace.world_size):
            arrival = self._arrival(namespace, rank, key)
            if arrival is not None:
                near.append(arrival)
            elif isinstance(self._index.find(namespace, rank, key)[0], Absent):
                tier = tier_lookup.found.get((namespace.group, i, rank))
                late = (namespace.number, key, rank) in self._arrivals  # its tier's circuit breaker is open
                if tier is None or not (late or self._index.is_missing(namespace, rank, key)):
                    return None
                far.append((rank, tier))
        if self.arriving_bytes + sum(namespace.sizes[rank] for rank, _ in far) > self._index.allocator.capacity // 2:
            return None
        chunk = namespace.chunks.get(key)
        if far and self._forgettings.is_under_way(namespace, tier_lookup.salt if chunk is None else chunk.salt):
            return None  # the tier may have answered before it was told to forget
        fresh = self._reserve_shards(tier_lookup, namespace, i, far)
        if fresh is None:
            return None
        for arrival in fresh:
            self._arrivals[arrival.place] = arrival
            self.arriving_bytes += arrival.shard.size
        for arrival in (*near, *fresh):
            arrival.tier_lookups.append(tier_lookup)
            tier_lookup.waiting[arrival.tier] += 1
        return fresh

    def _reserve_shards(
        self, tier_lookup: TierLookup, namespace: Namespace, i: int, far: list[tuple[int, int]]
    ) -> list[Arrival] | None:
        """Reserve these shards (rank, tier) of a part; returns None, with none reserved, if there is no room."""
        key = tier_lookup.key(i)
        parent = b"" if not tier_lookup.chained else tier_lookup.key(i - 1) if i else ROOT
        position = i + 1 if tier_lookup.chained else 0
        fresh: list[Arrival] = []
        for rank, tier in far:
            (outcome,) = self._index.reserve_missing(
                namespace, rank, key, parent, position, namespace.sizes[rank], tier_lookup.salt, is_load=True
            )
            if isinstance(outcome, Replaced):
                self.replaced(outcome.chunk, rank)
            elif not isinstance(outcome, Reserved):  # no room: without this shard, the others are useless
                for arrival in fresh:
                    self._index.remove(arrival.chunk, Reason.FAILED, arrival.rank)
                return None
            fresh.append(Arrival(outcome.chunk, rank, outcome.chunk.shards[rank], tier))
        return fresh

    def _part(self, arrival: Arrival) -> Part:
        chunk, shard = arrival.chunk, arrival.shard
        facts = facts_of(chunk.namespace, arrival.rank)
        return Part(facts, chunk.salt, chunk.key, shard.extents, shard.size)

    def replaced(self, chunk: Chunk, rank: int) -> None:
        """Note that a store or another load has taken over a shard that was being loaded.

        A load that is late or hangs must block neither newly computed chunks nor those of another tier.
        """
        arrival = self._arrivals.pop((chunk.namespace.number, chunk.key, rank))
        arrival.replaced = True
        self._let_go(arrival)  # so that it can be removed if filling it fails

    def _let_go(self, arrival: Arrival) -> None:
        """Release the holds of all tier lookups on the chunk."""
        for tier_lookup in arrival.tier_lookups:
            place = arrival.chunk.namespace.number, arrival.chunk.key
            if tier_lookup.held.pop(place, None) is not None:
                self._index.release([arrival.chunk])

    # -- what arrives

    def arrived(self, token: LoadToken, outcome: Loaded | KVDepotError) -> list[LookupDecision]:
        """Handle the end of a Load."""
        tier, arrivals = token.tier, token.arrivals
        tier.loading -= 1
        if isinstance(outcome, KVDepotError):
            self._log_failure(token, outcome)
        shards = outcome.shards if isinstance(outcome, Loaded) else [NotLoaded.ABSENT] * len(arrivals)
        if isinstance(outcome, Loaded):
            read = zip(arrivals, shards, strict=True)
            size = sum(arrival.shard.size for arrival, header in read if isinstance(header, Header))
            tier.load_calls.count(size, outcome.took_s)
        corrupt = [
            self._part(arrival).name
            for arrival, header in zip(arrivals, shards, strict=True)
            if header is NotLoaded.CORRUPT
        ]
        sealed = [
            (arrival.chunk, arrival.rank)
            for arrival, header in zip(arrivals, shards, strict=True)
            if self._settle(arrival, header, tier)
        ]
        tier.counters["loaded_chunks"] += len(sealed)
        tier.counters["missed_chunks"] += shards.count(NotLoaded.ABSENT)
        tier.counters["corrupt_chunks"] += len(corrupt)
        decisions: list[LookupDecision] = []
        if corrupt:
            decisions.append(Erase(EraseToken(tier), tier.number, corrupt))
        for arrival in arrivals:
            for tier_lookup in arrival.tier_lookups:
                tier_lookup.waiting[tier.number] -= 1
                if not tier_lookup.ended and not tier_lookup.waiting.total():
                    self.end(tier_lookup)
                    decisions.append(tier_lookup)
        return [*decisions, Arrived(tier, sealed)]

    def _settle(self, arrival: Arrival, header: Header | NotLoaded, tier: TierState) -> bool:
        """Seal a shard that has arrived, or release its reservation; returns whether it is sealed."""
        chunk, rank = arrival.chunk, arrival.rank
        self.arriving_bytes -= arrival.shard.size
        if arrival.replaced:
            self._index.give_back(arrival.chunk, arrival.shard)
            return False
        del self._arrivals[arrival.place]
        if isinstance(header, NotLoaded) or self._index.is_hidden(chunk) or self._index.is_too_old(chunk, header.born):
            self._let_go(arrival)
            self._index.remove(chunk, Reason.FAILED, rank)
            return False
        arrival.shard.tiers |= tier.bit
        self._index.seal(chunk, rank, header.checksum, header.born)
        return True

    def _log_failure(self, token: LoadToken, error: KVDepotError) -> None:
        lookups = {id(each): each for arrival in token.arrivals for each in arrival.tier_lookups}
        for each in lookups.values():
            log.debug("tier lookup: cannot load from this tier: %s", error, extra=_about(token.tier, each))

    # -- the end

    def awaited(self, tier_lookup: TierLookup) -> list[TierState]:
        """Tiers that have not answered a Find, or not completed a Load."""
        numbers = tier_lookup.owing | {number for number, count in tier_lookup.waiting.items() if count}
        return [self._tiers[number] for number in numbers]

    def note_late(self, tier_lookup: TierLookup, tier: TierState) -> bool:
        """Note that a tier is too late for a lookup; returns whether it has answered nothing since the lookup began."""
        tier.counters["late"] += 1
        log.debug("tier lookup: replying without this tier, which is too late", extra=_about(tier, tier_lookup))
        return tier.breaker.last_success < tier_lookup.begun

    def end(self, tier_lookup: TierLookup) -> None:
        """End a tier lookup, to be answered with what is in memory by now. It keeps its holds until `release`."""
        assert not tier_lookup.ended
        tier_lookup.ended = True
        self._count -= 1
        self._wanted -= len(tier_lookup.wanted)
        # Its deadline may keep it alive for some time; free the large fields.
        tier_lookup.wanted, tier_lookup.found, tier_lookup.hashes = [], {}, b""

    def release(self, tier_lookup: TierLookup) -> None:
        """Release what a tier lookup holds, after its reply."""
        self._index.release(list(tier_lookup.held.values()))
        tier_lookup.held.clear()


def _batches(arrivals: list[Arrival]) -> Iterable[list[Arrival]]:
    """Runs of at most MOST_PARTS shards and about TASK_BYTES."""
    batch: list[Arrival] = []
    taken = 0
    for arrival in arrivals:
        batch.append(arrival)
        taken += arrival.shard.size
        if len(batch) == MOST_PARTS or taken >= TASK_BYTES:
            yield batch
            batch, taken = [], 0
    if batch:
        yield batch


def _about(tier: TierState, tier_lookup: TierLookup) -> dict[str, str]:
    """Log fields of a tier and a tier lookup."""
    return {"tier": tier.config.name, "request": tier_lookup.request}
