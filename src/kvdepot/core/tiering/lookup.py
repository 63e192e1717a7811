"""Tier lookups: find the chunks of a lookup's prefix that are not in memory, and load them.

Invariant: a tier can only delay a lookup, up to its deadline, or shorten a hit: what has arrived by then is answered
from memory, and what arrives later is sealed for later lookups. For an engine that says how fast it computes, only what
is faster to load is asked for and loaded (speed.py).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvdepot.core.index import matching
from kvdepot.core.index.chunk import Chunk, Namespace, Shard, is_hidden
from kvdepot.core.index.index import Index
from kvdepot.core.index.matching import deepest_boundary, needed_parts
from kvdepot.core.index.runs import Run
from kvdepot.core.tiering.forgetting import Forgettings
from kvdepot.core.tiering.speed import RETRY_S, SLACK
from kvdepot.core.tiering.tier import TASK_BYTES, TierState, facts_of, part_of
from kvdepot.errors import KVDepotError
from kvdepot.eviction.ages import SKEW_S
from kvdepot.protocol.keys import HASH_BYTES, ROOT
from kvdepot.protocol.wire import Tail
from kvdepot.tiers.format import Header
from kvdepot.tiers.worker import MOST_PARTS, Erase, Find, Load, Loaded, Located, NotLoaded, TierTask, Unwanted

log = logging.getLogger(__name__)

_MOST_TIER_LOOKUPS = 1024
_MOST_WANTED = 1 << 16
"""Most shards that one tier lookup asks for; the prefix ends there."""
_MOST_WANTED_IN_ALL = 1 << 20
MOST_TAILS = 8
"""Most tails that one tier lookup asks for, the longest."""
_MOST_FINDS = 64
"""Most Finds in progress in one tier; beyond that it is not asked."""

Place: TypeAlias = tuple[int, int, int]
"""A shard of a tier lookup: KV cache group, chunk, rank."""


@dataclass(slots=True, eq=False)
class TierLookup:
    """One lookup's search of the tiers, for a boundary in `[first, end]` of the chunks of `hashes`, or a tail there.

    namespace: the model's first KV cache group. first: the boundary that memory can restore. held: by number of the
    namespace and key. speed: tokens that the engine computes per second; 0: unknown. tails: the longest first; number n
    stands for chunk -1 - n, until one becomes the last chunk (`end_in`).
    """

    namespace: Namespace
    request: str  # the request id, for the log
    hashes: bytes
    chained: bool
    salt: bytes
    first: int
    begun: float
    held: dict[tuple[int, bytes], Chunk]
    speed: float = 0.0
    tails: tuple[Tail, ...] = ()
    queued: bool = False  # its engine does not need the answer yet
    extended: float = 0.0  # when its deadline was last put off, because its tiers answer
    end: int = 0
    wanted: list[Place] = field(default_factory=list)  # that tiers were asked for
    found: dict[Place, int] = field(default_factory=dict)  # the nearest tier that has it
    owing: set[int] = field(default_factory=set)  # tiers that have not answered their Find
    waiting: Counter[int] = field(default_factory=Counter)  # by tier: shards being loaded
    sizes: Counter[int] = field(default_factory=Counter)  # by tier: bytes that were to be loaded
    loading: bool = False
    load_begun: float = 0.0
    is_trial: bool = False  # it only finds out whether a slow tier is faster by now
    ended: bool = False

    def is_awaited(self) -> bool:
        """Whether answers to Finds are still of use. Thread-safe."""
        return not (self.ended or self.loading)

    @property
    def groups(self) -> list[Namespace]:
        return self.namespace.groups

    def loading_tiers(self) -> set[int]:
        """The tiers whose loads it waits for."""
        return {number for number, count in self.waiting.items() if count}

    def compute_s(self, chunks: int) -> float:
        """The time in which the engine would compute this many chunks; infinity if that is unknown."""
        return chunks * self.namespace.chunk_tokens / self.speed if self.speed else float("inf")

    @property
    def slack_s(self) -> float:
        """The seconds that it may wait in vain."""
        return SLACK * self.compute_s(len(self.hashes) // HASH_BYTES)

    def end_in(self, tail: int) -> None:
        """Make this tail the last chunk."""
        end = self.tails[tail].chunks
        self.hashes, self.end = self.hashes[: end * HASH_BYTES] + self.tails[tail].key, end + 1
        tier_of = {place: tier for place, tier in self.found.items() if 0 <= place[1] < end}
        tails = {(group, end, rank): tier for (group, i, rank), tier in self.found.items() if i == -1 - tail}
        self.found = tier_of | tails

    def key(self, chunk: int) -> bytes:
        if chunk < 0:
            return self.tails[-1 - chunk].key
        return self.hashes[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES]


@dataclass(slots=True, eq=False)
class Arrival:
    """A shard that is being loaded, and the tier lookups that wait for it."""

    chunk: Chunk
    rank: int
    shard: Shard
    tier: int
    tier_lookups: list[TierLookup] = field(default_factory=list)

    @property
    def is_given_up(self) -> bool:
        """Whether a store or another load has taken the shard's place: a late load must block neither."""
        return not self.shard.is_open

    @property
    def place(self) -> tuple[int, bytes, int]:
        return self.chunk.namespace.number, self.chunk.key, self.rank


@dataclass(slots=True, eq=False)
class LookupFind(Find):
    tier_lookup: TierLookup

    def is_wanted(self) -> bool:
        return self.tier_lookup.is_awaited()


@dataclass(slots=True, eq=False)
class ArrivalLoad(Load):
    arrivals: list[Arrival]  # one per part


LookupDecision: TypeAlias = TierTask | TierLookup
"""A tier task, or a tier lookup that has ended and whose reply is due."""


class Lookups:
    """All tier lookups in progress, and the shards that they load."""

    def __init__(self, tiers: Sequence[TierState], index: Index, forgettings: Forgettings) -> None:
        self.arriving_bytes = 0
        self._tiers = tiers
        self._index = index
        self._forgettings = forgettings
        self._most_arriving = index.allocator.capacity // 2
        self._arrivals: dict[tuple[int, bytes, int], Arrival] = {}  # by namespace, key, rank
        self._count = 0
        self._wanted = 0  # shards that all tier lookups together asked for

    def __len__(self) -> int:
        return self._count

    @property
    def is_full(self) -> bool:
        """Whether another tier lookup may not be able to ask all tiers."""
        return self._count >= _MOST_FINDS

    # -- ask

    def begin(self, tier_lookup: TierLookup) -> list[TierTask] | None:
        """Hold what a tier lookup holds, and ask the tiers for what is missing, or load at once if nothing is; in that
        case it may end here. None, and nothing is begun, if tiers cannot help, or computing is faster."""
        namespace, first = tier_lookup.namespace, tier_lookup.first
        usable = [tier for tier in self._tiers if tier.is_searchable]
        is_known = all(len(group.sizes) == group.world_size for group in namespace.groups)
        if not usable or not is_known or self._forgettings.is_under_way(namespace, tier_lookup.salt):
            return None
        asked = [tier for tier in usable if tier.finding < _MOST_FINDS]
        shards = namespace.world_size * len(namespace.groups)  # of a chunk, at most
        tier_lookup.end = min(len(tier_lookup.hashes) // HASH_BYTES, first + _MOST_WANTED // shards)
        room = self._wanted + (tier_lookup.end - first + len(tier_lookup.tails)) * shards <= _MOST_WANTED_IN_ALL
        for tier in usable:
            tier.counters["searches_refused"] += not room or tier not in asked
        if self._count >= _MOST_TIER_LOOKUPS or not room or not asked:
            return None
        asked = self._worth_asking(tier_lookup, asked)
        if not asked:
            return None
        tier_lookup.wanted = self._missing(tier_lookup)
        self._index.hold(list(tier_lookup.held.values()))
        self._count += 1
        self._wanted += len(tier_lookup.wanted)
        if not tier_lookup.wanted:
            return self._load(tier_lookup, tier_lookup.begun)
        tier_lookup.owing = {tier.number for tier in asked}
        groups = tier_lookup.groups
        facts = [[facts_of(group, rank) for rank in range(group.world_size)] for group in groups]
        objects = [(facts[group][rank], tier_lookup.key(i)) for group, i, rank in tier_lookup.wanted]
        for tier in asked:
            tier.finding += 1
        return [LookupFind(tier.number, objects, tier_lookup.salt, tier_lookup) for tier in asked]

    def _worth_asking(self, tier_lookup: TierLookup, tiers: list[TierState]) -> list[TierState]:
        """The tiers that may be faster than computing; if there are none, one that is due to be tried again."""
        chunks, now = tier_lookup.end - tier_lookup.first + bool(tier_lookup.tails), tier_lookup.begun
        compute_s, slack_s = tier_lookup.compute_s(chunks), tier_lookup.slack_s
        size = sum(
            sum(group.sizes.values()) * (min(group.reach, chunks) if group.reach else chunks)
            for group in tier_lookup.groups
        )
        asked = [tier for tier in tiers if tier.speed.pays(size, compute_s, slack_s, now)]
        for tier in tiers if tier_lookup.speed else ():
            if tier in asked:
                tier.became_worthwhile(now)
            elif not asked and now >= tier.speed.retry_at:
                tier_lookup.is_trial = True
                asked, tier.speed.retry_at = [tier], now + RETRY_S
            else:
                tier.left_to_compute(chunks * tier_lookup.namespace.chunk_tokens, now)
        return asked

    def _missing(self, tier_lookup: TierLookup) -> list[Place]:
        """The shards that are neither in memory nor being loaded, and that some boundary behind `first` needs."""
        missing: list[Place] = []
        for group in tier_lookup.groups:
            # Resuming at the next boundary needs the last `reach` parts before it, some of them before `first`.
            first = max(0, tier_lookup.first + 1 - group.reach) if group.reach else tier_lookup.first
            hashes = tier_lookup.hashes[first * HASH_BYTES : tier_lookup.end * HASH_BYTES]
            near = [matching.find(group, rank, hashes) for rank in range(group.world_size)]
            missing += [
                (group.group, i, rank)
                for i in range(first, tier_lookup.end)
                for rank in range(group.world_size)
                if near[rank][i - first] is None and self._arrival(group, rank, tier_lookup.key(i)) is None
            ]
            missing += [
                (group.group, tail, rank)
                for tail in range(-len(tier_lookup.tails), 0)
                for rank in range(group.world_size)
                if not self._is_near(tier_lookup, group, tail, rank)
            ]
        return missing

    def located(self, find: LookupFind, outcome: Located | Unwanted | KVDepotError, now: float) -> list[LookupDecision]:
        tier, tier_lookup = self._tiers[find.tier], find.tier_lookup
        if isinstance(outcome, Located):
            tier.speed.found(tier_lookup.begun, now, int(any(outcome.there)))
        if not isinstance(outcome, KVDepotError):
            tier.speed.reached_at = now
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
        return self._load_or_end(tier_lookup, now)

    def half_time(self, tier_lookup: TierLookup, now: float) -> list[LookupDecision]:
        """Half of the time is over: if some tiers have not answered, load what the others have."""
        if not tier_lookup.is_awaited():
            return []
        begins = self._boundary(tier_lookup, tier_lookup.end) > tier_lookup.first or self._tail(tier_lookup) is not None
        return self._load_or_end(tier_lookup, now) if begins else []

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

    def _tail(self, tier_lookup: TierLookup) -> int | None:
        """The longest tail behind the deepest boundary that memory and these tiers can restore together, or None."""
        end = self._boundary(tier_lookup, tier_lookup.end) if tier_lookup.tails else 0
        for number, tail in enumerate(tier_lookup.tails):
            parts = [(group, -1 - number) for group in tier_lookup.groups]
            for group in tier_lookup.groups:
                first = needed_parts(group.reach, tail.chunks + 1).start if group.reach else tier_lookup.first
                parts += [(group, i) for i in range(first, tail.chunks)]
            if end <= tail.chunks <= tier_lookup.end and all(self._can_have(tier_lookup, *part) for part in parts):
                return number
        return None

    def _can_have(self, tier_lookup: TierLookup, group: Namespace, i: int) -> bool:
        """Whether every shard of a part is in memory, being loaded, or in a tier."""
        return all(
            (group.group, i, rank) in tier_lookup.found or self._is_near(tier_lookup, group, i, rank)
            for rank in range(group.world_size)
        )

    def _is_near(self, tier_lookup: TierLookup, group: Namespace, i: int, rank: int) -> bool:
        """Whether a shard is in memory or being loaded."""
        key = tier_lookup.key(i)
        (found,) = matching.find(group, rank, key)
        return found is not None or self._arrival(group, rank, key) is not None

    def _arrival(self, namespace: Namespace, rank: int, key: bytes) -> Arrival | None:
        """The load of a shard that is in progress, if its tier works; otherwise None."""
        arrival = self._arrivals.get((namespace.number, key, rank))
        is_usable = arrival is not None and not arrival.is_given_up and self._tiers[arrival.tier].breaker.usable
        return arrival if is_usable else None

    # -- load

    def _load_or_end(self, tier_lookup: TierLookup, now: float) -> list[LookupDecision]:
        self._leave_slow(tier_lookup, now)
        tier_tasks = self._load(tier_lookup, now)
        return [*tier_tasks, tier_lookup] if tier_lookup.ended else [*tier_tasks]

    def _leave_slow(self, tier_lookup: TierLookup, now: float) -> None:
        """Leave to the engine what it computes faster than the slowest tier brings it, then the next slowest."""
        while tier_lookup.found and tier_lookup.speed and not tier_lookup.is_trial:
            found, end, sizes = tier_lookup.found, self._boundary(tier_lookup, tier_lookup.end), Counter[int]()
            needed = [(needed_parts(group.reach, end), group.sizes) for group in tier_lookup.groups]
            for (group, i, rank), tier in found.items():
                parts, shards = needed[group]
                if i in parts:
                    sizes[tier] += shards[rank]
            times_s = sorted((self._tiers[tier].speed.load_s(size, now), tier) for tier, size in sizes.items())
            if not times_s:
                return
            slowest_s, slowest = times_s[-1]
            gained_s = slowest_s - (times_s[-2][0] if len(times_s) > 1 else 0.0)
            tier_lookup.found = {place: tier for place, tier in found.items() if tier != slowest}
            chunks = end - self._boundary(tier_lookup, end)
            if gained_s <= tier_lookup.compute_s(chunks):
                tier_lookup.found = found
                return
            self._tiers[slowest].left_to_compute(chunks * tier_lookup.namespace.chunk_tokens, now)

    def _load(self, tier_lookup: TierLookup, now: float) -> list[TierTask]:
        """Load what extends the prefix. If nothing is being loaded after that, the tier lookup ends."""
        if (tail := self._tail(tier_lookup)) is not None:
            tier_lookup.end_in(tail)
        tier_lookup.loading, tier_lookup.load_begun = True, now
        by_tier: dict[int, list[Arrival]] = {}
        if not tier_lookup.namespace.gone:
            for arrival in self._reserve_prefix(tier_lookup):
                by_tier.setdefault(arrival.tier, []).append(arrival)
        tier_tasks: list[TierTask] = []
        for number, arrivals in by_tier.items():
            tier = self._tiers[number]
            tier_lookup.sizes[number] = sum(arrival.shard.size for arrival in arrivals)
            log.debug("tier lookup: loading %d shards from this tier", len(arrivals), extra=_about(tier, tier_lookup))
            for batch in _batches(arrivals):
                tier.loading += 1
                parts = [part_of(each.chunk, each.rank, each.shard) for each in batch]
                tier_tasks.append(ArrivalLoad(number, parts, batch))
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
        """The deepest boundary whose missing parts, those of bounded groups included, may be loaded at a time."""
        end = self._boundary(tier_lookup, tier_lookup.end)
        most = min(self._most_arriving, self._index.accounts.of(tier_lookup.namespace.tenant, tier_lookup.salt).cap)
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
        """Reserve the missing shards of chunk `i`, wait for those being loaded, and hold its part.

        Adds what was reserved to `fresh`. False, with nothing reserved, if the part cannot be completed.
        """
        key = tier_lookup.key(i)
        near: list[Arrival] = []
        far: list[tuple[int, int]] = []  # rank, tier
        for rank in range(group.world_size):
            arrival = self._arrival(group, rank, key)
            if arrival is not None:
                near.append(arrival)
            elif matching.find(group, rank, key)[0] is None:
                tier = tier_lookup.found.get((group.group, i, rank))
                late = self._arrivals.get((group.number, key, rank))
                is_late = late is not None and not late.is_given_up  # its tier's circuit breaker is open
                if tier is None or not (is_late or matching.is_missing(group, rank, key)):
                    return False
                far.append((rank, tier))
        if self.arriving_bytes + sum(group.sizes[rank] for rank, _ in far) > self._most_arriving:
            return False
        chunk = group.chunks.get(key)
        if far and self._forgettings.is_under_way(group, tier_lookup.salt if chunk is None else chunk.salt):
            return False  # the tier may have answered before it began to forget
        parent = b"" if not tier_lookup.chained else tier_lookup.key(i - 1) if i else ROOT
        position = i + 1 if tier_lookup.chained else 0
        reserved: list[Arrival] = []
        for rank, tier in far:
            run = Run(key, group.sizes[rank], parent, position, tier_lookup.salt)
            made = self._index.reserve(group, rank, run, None)
            if not made.chunks:  # no room: without this shard, the others are useless
                for arrival in reserved:
                    self._index.discard(arrival.chunk, arrival.rank)
                return False
            reserved.append(Arrival(made.chunks[0], rank, made.chunks[0].shards[rank], tier))
        for arrival in reserved:
            self._arrivals[arrival.place] = arrival
            self.arriving_bytes += arrival.shard.size
        for arrival in (*near, *reserved):
            arrival.tier_lookups.append(tier_lookup)
            tier_lookup.waiting[arrival.tier] += 1
        fresh += reserved
        place = group.number, key
        if place not in tier_lookup.held:
            tier_lookup.held[place] = group.chunks[key]
            self._index.hold([group.chunks[key]])
        return True

    # -- what arrives

    def arrived(self, load: ArrivalLoad, outcome: Loaded | KVDepotError, now: float) -> list[LookupDecision]:
        tier, arrivals = self._tiers[load.tier], load.arrivals
        tier.loading -= 1
        if isinstance(outcome, Loaded):
            shards = outcome.shards
            read = zip(arrivals, shards, strict=True)
            size = sum(arrival.shard.size for arrival, header in read if isinstance(header, Header))
            tier.load_times.record(size, outcome.took_s)
            tier.speed.reached_at = now
        else:
            shards = [NotLoaded.ABSENT] * len(arrivals)
            for each in {id(each): each for arrival in arrivals for each in arrival.tier_lookups}.values():
                log.debug("tier lookup: cannot load from this tier: %s", outcome, extra=_about(tier, each))
        useless: list[str] = []
        for arrival, header in zip(arrivals, shards, strict=True):
            if header in (NotLoaded.CORRUPT, NotLoaded.FORGOTTEN):
                useless.append(part_of(arrival.chunk, arrival.rank, arrival.shard).name)
            tier.counters["loaded_chunks"] += self._settle(arrival, header, tier)
        tier.counters["missed_chunks"] += shards.count(NotLoaded.ABSENT) + shards.count(NotLoaded.FORGOTTEN)
        tier.counters["corrupt_chunks"] += shards.count(NotLoaded.CORRUPT)
        decisions: list[LookupDecision] = [Erase(tier.number, useless)] if useless else []
        for arrival in arrivals:
            for tier_lookup in arrival.tier_lookups:
                tier_lookup.waiting[tier.number] -= 1
                if not tier_lookup.waiting[tier.number] and isinstance(outcome, Loaded):
                    tier.speed.loaded(tier_lookup.sizes[tier.number], tier_lookup.load_begun, now)
                if not tier_lookup.ended and not tier_lookup.waiting.total():
                    self.end(tier_lookup)
                    decisions.append(tier_lookup)
        return decisions

    def _settle(self, arrival: Arrival, header: Header | NotLoaded, tier: TierState) -> bool:
        """Seal a shard that has arrived, or release its reservation; returns whether it is sealed."""
        chunk, rank = arrival.chunk, arrival.rank
        self.arriving_bytes -= arrival.shard.size
        if self._arrivals.get(arrival.place) is arrival:
            del self._arrivals[arrival.place]
        if arrival.is_given_up:
            self._index.give_back(arrival.shard)
            return False
        if isinstance(header, NotLoaded) or is_hidden(chunk) or self._is_too_old(chunk, header.born):
            self._index.discard(chunk, rank)
            return False
        arrival.shard.tiers |= tier.bit
        arrival.shard.writer = header.writer
        self._index.seal(chunk, rank, header.checksum, header.born)
        return True

    def _is_too_old(self, chunk: Chunk, born: int) -> bool:
        """Whether a chunk, if it was computed then, had expired at the last tick, or its age is not known."""
        age_s = self._index.wall - born
        ttl_s = self._index.accounts.ttl_of(chunk)
        return ttl_s > 0 and not -SKEW_S <= age_s < ttl_s

    # -- the end

    def goes_on(self, tier_lookup: TierLookup) -> bool:
        """Whether all tiers that a tier lookup waits for have answered something since its deadline was set."""
        awaited, since = tier_lookup.owing | tier_lookup.loading_tiers(), max(tier_lookup.begun, tier_lookup.extended)
        return all(self._tiers[number].breaker.last_success > since for number in awaited)

    def late_tiers(self, tier_lookup: TierLookup, now: float) -> list[TierState]:
        """Count the tiers that are too late for a lookup; returns those that have answered nothing since it began."""
        loads = tier_lookup.loading_tiers()
        late = [self._tiers[number] for number in tier_lookup.owing | loads]
        for tier in late:
            if tier.number in loads:
                tier.speed.load_late(tier_lookup.sizes[tier.number], tier_lookup.load_begun, now)
            else:
                tier.speed.find_late(tier_lookup.begun, now)
        if tier_lookup.is_trial:
            return []
        for tier in late:
            tier.counters["late"] += 1
            log.debug("tier lookup: replying without this tier, which is too late", extra=_about(tier, tier_lookup))
        return [tier for tier in late if tier.breaker.last_success < tier_lookup.begun]

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


def _batches(arrivals: list[Arrival]) -> Iterator[list[Arrival]]:
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
    return {"tier": tier.name, "request": tier_lookup.request}
