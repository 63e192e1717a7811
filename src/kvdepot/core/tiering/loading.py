"""Tier searches: find the chunks of a lookup's prefix that are not in memory, and load them. Knows no answers.

Called by core/lookups/lookups.py, which begins and ends tier searches, and by tiering.py with the outcomes of tiers.
Invariant: a tier can only delay a lookup, up to its deadline, or shorten a hit. The lookup is answered from memory with
the chunks that have arrived by then; chunks that arrive later are sealed for later lookups. If an engine says how fast
it computes, tiers are only asked for chunks that are faster to load (speed.py).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TypeAlias

from kvdepot.core.index import matching
from kvdepot.core.index.chunk import Chunk, Namespace, Shard, is_hidden
from kvdepot.core.index.index import Index
from kvdepot.core.index.matching import deepest_boundary, needed_parts
from kvdepot.core.index.runs import Run
from kvdepot.core.index.wants import Want
from kvdepot.core.tiering.forgetting import Forgettings
from kvdepot.core.tiering.speed import RETRY_S, SLACK
from kvdepot.core.tiering.tier import TASK_BYTES, TierState, facts_of, part_of
from kvdepot.errors import KVDepotError
from kvdepot.eviction.ages import SKEW_S
from kvdepot.protocol.keys import HASH_BYTES, ROOT
from kvdepot.protocol.wire import Lookup, Tail
from kvdepot.tiers.format import Header
from kvdepot.tiers.worker import MOST_PARTS, Erase, Find, Load, Loaded, Located, NotLoaded, TierTask, Unwanted

log = logging.getLogger(__name__)

_MOST_WANTED = 1 << 16
"""The most shards that one tier search asks for; its prefix ends there."""
_MOST_WANTED_IN_ALL = 1 << 20
_MOST_TAILS = 8
"""The most tails that one tier search asks for: the longest ones."""
_MOST_FINDS = 64
"""The most Finds in progress in one tier; further tier searches do not ask it."""

Place: TypeAlias = tuple[int, int, int]
"""A shard of a tier search: the numbers of its KV cache group, chunk and rank."""


@dataclass(slots=True, eq=False)
class TierSearch:
    """One lookup's search of the tiers, for a boundary in `[first, end]` of the chunks of `hashes`, or a tail there.

    namespace: the model's first KV cache group. name: the lookup's name. first: the boundary, in chunks, that memory
    can restore. held: the chunks that the lookup holds, by number of the namespace and key; the lookup releases them.
    tails: the longest first; number n stands for chunk -1 - n, until one becomes the last chunk (`end_in`).
    """

    namespace: Namespace
    name: Hashable
    request: Lookup
    salt: bytes
    first: int
    begun: float
    held: dict[tuple[int, bytes], Chunk]
    want: Want | None = None  # the want of the lookup, if it is queued
    depth: float = inf  # the depth of its loads, as in Run
    hashes: bytes = b""
    tails: tuple[Tail, ...] = ()
    extended: float = 0.0  # when its deadline was last put off, because its tiers answer
    end: int = 0
    wanted: list[Place] = field(default_factory=list)  # shards that tiers were asked for
    found: dict[Place, int] = field(default_factory=dict)  # the nearest tier that has the shard
    owing: set[int] = field(default_factory=set)  # tiers that have not answered their Find
    waiting: Counter[int] = field(default_factory=Counter)  # by tier: shards being loaded
    sizes: Counter[int] = field(default_factory=Counter)  # by tier: bytes of the loads it began
    loading: bool = False
    load_begun: float = 0.0
    is_trial: bool = False  # it only measures whether a slow tier has become faster
    is_half_over: bool = False  # half of its time is over
    ended: bool = False

    def __post_init__(self) -> None:
        self.hashes = self.request.hashes
        self.tails = tuple(tail for tail in self.request.tails if tail.chunks >= self.first)[:_MOST_TAILS]

    def is_awaited(self) -> bool:
        """Whether this tier search still needs answers to Finds. Thread-safe."""
        return not (self.ended or self.loading)

    def loading_tiers(self) -> set[int]:
        """The numbers of the tiers whose loads this tier search waits for."""
        return {number for number, count in self.waiting.items() if count}

    def compute_s(self, chunks: int) -> float:
        """The seconds in which the engine would compute this number of chunks; infinity: unknown."""
        return chunks * self.namespace.chunk_tokens / self.request.speed if self.request.speed else inf

    @property
    def slack_s(self) -> float:
        """The seconds that a lookup may lose if the tiers have nothing."""
        return SLACK * self.compute_s(len(self.hashes) // HASH_BYTES)

    def end_in(self, tail: int) -> None:
        """Make the tail with this number the last chunk of the tier search."""
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
    """A shard that is being loaded, and the tier searches that wait for it."""

    chunk: Chunk
    rank: int
    shard: Shard
    tier: int
    tier_searches: list[TierSearch] = field(default_factory=list)

    @property
    def is_given_up(self) -> bool:
        """Whether a store or another load has taken the shard's place: a late load must block neither."""
        return not self.shard.is_open

    @property
    def place(self) -> tuple[int, bytes, int]:
        return self.chunk.namespace.number, self.chunk.key, self.rank


@dataclass(slots=True, eq=False)
class SearchFind(Find):
    tier_search: TierSearch

    def is_wanted(self) -> bool:
        return self.tier_search.is_awaited()


@dataclass(slots=True, eq=False)
class ArrivalLoad(Load):
    arrivals: list[Arrival]  # one per part


LoadDecision: TypeAlias = TierTask | TierSearch
"""A tier task, or a tier search that has ended and whose lookup must be answered."""


class Loads:
    """All tier searches in progress, and the shards that they load."""

    def __init__(self, tiers: Sequence[TierState], index: Index, forgettings: Forgettings) -> None:
        self.arriving_bytes = 0
        self._tiers = tiers
        self._index = index
        self._forgettings = forgettings
        self._most_arriving = index.allocator.capacity // 2
        self._arrivals: dict[tuple[int, bytes, int], Arrival] = {}  # by namespace, key, rank
        self._count = 0
        self._wanted = 0  # shards that all tier searches together have asked for

    def __len__(self) -> int:
        return self._count

    @property
    def is_full(self) -> bool:
        """Whether so many tier searches are in progress that another one may not be able to ask all tiers."""
        return self._count >= _MOST_FINDS

    # -- ask

    def begin(self, tier_search: TierSearch) -> list[TierTask] | None:
        """Ask the tiers for missing shards, or load at once if none is missing; then the tier search may end here.

        Returns None, and begins nothing, if tiers cannot help or computing is faster. A tier search that is in progress
        after this call is returned once as a decision when it ends, unless `end` is called first.
        """
        namespace, first = tier_search.namespace, tier_search.first
        usable = [tier for tier in self._tiers if tier.is_searchable]
        is_known = all(len(group.sizes) == group.world_size for group in namespace.groups)
        if not usable or not is_known or self._forgettings.is_under_way(namespace, tier_search.salt):
            return None
        asked = [tier for tier in usable if tier.finding < _MOST_FINDS]
        shards = namespace.world_size * len(namespace.groups)  # most shards of a chunk
        tier_search.end = min(len(tier_search.hashes) // HASH_BYTES, first + _MOST_WANTED // shards)
        room = self._wanted + (tier_search.end - first + len(tier_search.tails)) * shards <= _MOST_WANTED_IN_ALL
        for tier in usable:
            tier.counters["searches_refused"] += not room or tier not in asked
        if not room or not asked:
            return None
        asked = self._worth_asking(tier_search, asked)
        if not asked:
            return None
        tier_search.wanted = self._missing(tier_search)
        self._count += 1
        self._wanted += len(tier_search.wanted)
        if not tier_search.wanted:
            return self._load(tier_search, tier_search.begun)
        tier_search.owing = {tier.number for tier in asked}
        groups = tier_search.namespace.groups
        facts = [[facts_of(group, rank) for rank in range(group.world_size)] for group in groups]
        objects = [(facts[group][rank], tier_search.key(i)) for group, i, rank in tier_search.wanted]
        for tier in asked:
            tier.finding += 1
        return [SearchFind(tier.number, objects, tier_search.salt, tier_search) for tier in asked]

    def _worth_asking(self, tier_search: TierSearch, tiers: list[TierState]) -> list[TierState]:
        """The tiers that may be faster than computing; if there are none, a slow tier that is due for another try."""
        chunks, now = tier_search.end - tier_search.first + bool(tier_search.tails), tier_search.begun
        compute_s, slack_s = tier_search.compute_s(chunks), tier_search.slack_s
        size = sum(
            sum(group.sizes.values()) * (min(group.reach, chunks) if group.reach else chunks)
            for group in tier_search.namespace.groups
        )
        asked = [tier for tier in tiers if tier.speed.pays(size, compute_s, slack_s, now)]
        for tier in tiers if tier_search.request.speed else ():
            if not asked and now >= tier.speed.retry_at:
                tier_search.is_trial = True
                asked, tier.speed.retry_at = [tier], now + RETRY_S
            elif tier not in asked:
                tier.counters["computed_tokens"] += chunks * tier_search.namespace.chunk_tokens
        return asked

    def _missing(self, tier_search: TierSearch) -> list[Place]:
        """The shards that a boundary behind `first` may need, and that are neither in memory nor being loaded."""
        missing: list[Place] = []
        for group in tier_search.namespace.groups:
            # Resuming at the next boundary needs the last `reach` parts before it, some of them before `first`.
            first = max(0, tier_search.first + 1 - group.reach) if group.reach else tier_search.first
            hashes = tier_search.hashes[first * HASH_BYTES : tier_search.end * HASH_BYTES]
            near = [matching.find(group, rank, hashes) for rank in range(group.world_size)]
            missing += [
                (group.group, i, rank)
                for i in range(first, tier_search.end)
                for rank in range(group.world_size)
                if near[rank][i - first] is None and self._arrival(group, rank, tier_search.key(i)) is None
            ]
            missing += [
                (group.group, tail, rank)
                for tail in range(-len(tier_search.tails), 0)
                for rank in range(group.world_size)
                if not self._is_near(tier_search, group, tail, rank)
            ]
        return missing

    def located(self, find: SearchFind, outcome: Located | Unwanted | KVDepotError, now: float) -> list[LoadDecision]:
        tier, tier_search = self._tiers[find.tier], find.tier_search
        if isinstance(outcome, Located):
            tier.speed.found(tier_search.begun, now, int(any(outcome.there)))
        if not isinstance(outcome, KVDepotError):
            tier.speed.reached_at = now
        tier.finding -= 1
        tier_search.owing.discard(tier.number)
        if isinstance(outcome, KVDepotError):
            log.debug("tier search: cannot find objects in this tier: %s", outcome, extra=_about(tier, tier_search))
        if not tier_search.is_awaited():
            return []
        if isinstance(outcome, Located):
            for place, there in zip(tier_search.wanted, outcome.there, strict=True):
                if there:  # the nearest tier that has the shard loads it
                    tier_search.found[place] = min(tier.number, tier_search.found.get(place, tier.number))
        if tier_search.owing and len(tier_search.found) < len(tier_search.wanted):
            return []
        tier_tasks = self._load_found(tier_search, now)
        return [*tier_tasks, tier_search] if tier_search.ended else [*tier_tasks]

    def half_time(self, tier_search: TierSearch, now: float) -> list[TierTask]:
        """Load what has been found by half of the time, although tiers have not answered. The search may end here."""
        if not tier_search.is_awaited():
            return []
        begins = self._boundary(tier_search, tier_search.end) > tier_search.first or self._tail(tier_search) is not None
        return self._load_found(tier_search, now) if begins else []

    def _boundary(self, tier_search: TierSearch, most: int) -> int:
        """The deepest boundary up to `most` chunks whose parts are in memory, or in a tier that has answered."""
        end = tier_search.first
        unbounded = [group for group in tier_search.namespace.groups if not group.reach]
        while end < most and all(self._can_have(tier_search, group, end) for group in unbounded):
            end += 1
        bounded = [(group, group.reach) for group in tier_search.namespace.groups if group.reach]
        if bounded:
            end = deepest_boundary(bounded, end, lambda group, i: self._can_have(tier_search, group, i))
        return end

    def _tail(self, tier_search: TierSearch) -> int | None:
        """The number of the longest tail, behind the deepest boundary, that memory and these tiers have; None: none."""
        end = self._boundary(tier_search, tier_search.end) if tier_search.tails else 0
        for number, tail in enumerate(tier_search.tails):
            parts = [(group, -1 - number) for group in tier_search.namespace.groups]
            for group in tier_search.namespace.groups:
                first = needed_parts(group.reach, tail.chunks + 1).start if group.reach else tier_search.first
                parts += [(group, i) for i in range(first, tail.chunks)]
            if end <= tail.chunks <= tier_search.end and all(self._can_have(tier_search, *part) for part in parts):
                return number
        return None

    def _can_have(self, tier_search: TierSearch, group: Namespace, i: int) -> bool:
        """Whether every shard of a part is in memory, being loaded, or in a tier that has answered."""
        return all(
            (group.group, i, rank) in tier_search.found or self._is_near(tier_search, group, i, rank)
            for rank in range(group.world_size)
        )

    def _is_near(self, tier_search: TierSearch, group: Namespace, i: int, rank: int) -> bool:
        """Whether a shard is in memory or being loaded."""
        key = tier_search.key(i)
        (found,) = matching.find(group, rank, key)
        return found is not None or self._arrival(group, rank, key) is not None

    def _arrival(self, namespace: Namespace, rank: int, key: bytes) -> Arrival | None:
        """The load of a shard that is in progress, if its tier works; otherwise None."""
        arrival = self._arrivals.get((namespace.number, key, rank))
        is_usable = arrival is not None and not arrival.is_given_up and self._tiers[arrival.tier].breaker.usable
        return arrival if is_usable else None

    # -- load

    def _load_found(self, tier_search: TierSearch, now: float) -> list[TierTask]:
        self._leave_slow(tier_search, now)
        return self._load(tier_search, now)

    def _leave_slow(self, tier_search: TierSearch, now: float) -> None:
        """Leave to the engine the chunks that it computes faster than the slowest tier loads them, tier by tier."""
        while tier_search.found and tier_search.request.speed and not tier_search.is_trial:
            found, end, sizes = tier_search.found, self._boundary(tier_search, tier_search.end), Counter[int]()
            needed = [(needed_parts(group.reach, end), group.sizes) for group in tier_search.namespace.groups]
            for (group, i, rank), tier in found.items():
                parts, shards = needed[group]
                if i in parts:
                    sizes[tier] += shards[rank]
            times_s = sorted((self._tiers[tier].speed.load_s(size, now), tier) for tier, size in sizes.items())
            if not times_s:
                return
            slowest_s, slowest = times_s[-1]
            gained_s = slowest_s - (times_s[-2][0] if len(times_s) > 1 else 0.0)
            tier_search.found = {place: tier for place, tier in found.items() if tier != slowest}
            chunks = end - self._boundary(tier_search, end)
            if gained_s <= tier_search.compute_s(chunks):
                tier_search.found = found
                return
            self._tiers[slowest].counters["computed_tokens"] += chunks * tier_search.namespace.chunk_tokens

    def _load(self, tier_search: TierSearch, now: float) -> list[TierTask]:
        """Load the shards that extend the prefix. If the tier search then waits for no load, it ends."""
        if (tail := self._tail(tier_search)) is not None:
            tier_search.end_in(tail)
        tier_search.loading, tier_search.load_begun = True, now
        if tier_search.want is not None:
            tier_search.depth = self._index.wants.depth(tier_search.want)
        elif tier_search.request.readers:
            tier_search.depth = 0.0  # the engine itself waits for the answer
        by_tier: dict[int, list[Arrival]] = {}
        if not tier_search.namespace.gone:
            for arrival in self._reserve_prefix(tier_search):
                by_tier.setdefault(arrival.tier, []).append(arrival)
        tier_tasks: list[TierTask] = []
        for number, arrivals in by_tier.items():
            tier = self._tiers[number]
            tier_search.sizes[number] = sum(arrival.shard.size for arrival in arrivals)
            log.debug("tier search: loading %d shards from this tier", len(arrivals), extra=_about(tier, tier_search))
            for batch in _batches(arrivals):
                tier.loading += 1
                parts = [part_of(each.chunk, each.rank, each.shard) for each in batch]
                tier_tasks.append(ArrivalLoad(number, parts, batch))
        if not tier_search.waiting.total():
            self.end(tier_search)
        return tier_tasks

    def _reserve_prefix(self, tier_search: TierSearch) -> list[Arrival]:
        """Reserve the shards that the deepest boundary needs and memory lacks. First come those of unbounded groups, up
        to the first chunk that cannot be completed, then the last parts of bounded groups before the boundary left."""
        first, groups = tier_search.first, tier_search.namespace.groups
        end = tier_search.end if tier_search.namespace.is_simple else self._affordable(tier_search)
        fresh: list[Arrival] = []
        for group in groups:
            for i in range(first, end) if not group.reach else ():
                if not self._reserve_part(tier_search, group, i, fresh):
                    end = i
                    break
        if not tier_search.namespace.is_simple:
            end = self._boundary(tier_search, end)
        for group in groups:
            for i in needed_parts(group.reach, end) if group.reach and end > first else ():
                if not self._reserve_part(tier_search, group, i, fresh):
                    return fresh
        return fresh

    def _affordable(self, tier_search: TierSearch) -> int:
        """The deepest boundary whose missing parts fit the bytes that may be loading at a time."""
        end = self._boundary(tier_search, tier_search.end)
        most = min(self._most_arriving, self._index.accounts.of(tier_search.namespace.tenant, tier_search.salt).cap)
        room = most - self.arriving_bytes
        for group in tier_search.namespace.groups:
            for i in needed_parts(group.reach, end) if group.reach else ():
                room -= self._missing_bytes(tier_search, group, i)
        unbounded = [group for group in tier_search.namespace.groups if not group.reach]
        for i in range(tier_search.first, end):
            room -= sum(self._missing_bytes(tier_search, group, i) for group in unbounded)
            if room < 0:
                return self._boundary(tier_search, i)
        return end

    def _missing_bytes(self, tier_search: TierSearch, group: Namespace, i: int) -> int:
        """Bytes of a part's shards that are neither in memory nor being loaded."""
        ranks = range(group.world_size)
        return sum(group.sizes[rank] for rank in ranks if not self._is_near(tier_search, group, i, rank))

    def _reserve_part(self, tier_search: TierSearch, group: Namespace, i: int, fresh: list[Arrival]) -> bool:
        """Reserve the missing shards of a group's part of chunk `i`, wait for those being loaded, and hold the part.

        Adds the reserved shards to `fresh`. Returns False, with nothing reserved, if the part cannot be completed.
        """
        key = tier_search.key(i)
        near: list[Arrival] = []
        far: list[tuple[int, int]] = []  # rank, tier
        for rank in range(group.world_size):
            arrival = self._arrival(group, rank, key)
            if arrival is not None:
                near.append(arrival)
            elif matching.find(group, rank, key)[0] is None:
                tier = tier_search.found.get((group.group, i, rank))
                late = self._arrivals.get((group.number, key, rank))
                is_late = late is not None and not late.is_given_up  # its tier's circuit breaker is open
                if tier is None or not (is_late or matching.is_missing(group, rank, key)):
                    return False
                far.append((rank, tier))
        if self.arriving_bytes + sum(group.sizes[rank] for rank, _ in far) > self._most_arriving:
            return False
        chunk = group.chunks.get(key)
        if far and self._forgettings.is_under_way(group, tier_search.salt if chunk is None else chunk.salt):
            return False  # the tier may have answered before it began to forget
        parent = b"" if not tier_search.request.chained else tier_search.key(i - 1) if i else ROOT
        position = i + 1 if tier_search.request.chained else 0
        reserved: list[Arrival] = []
        for rank, tier in far:
            run = Run(key, group.sizes[rank], parent, position, tier_search.salt, depth=tier_search.depth)
            made = self._index.reserve(group, rank, run, None)
            if not made.chunks:  # there is no room, and without this shard, the others are useless
                for arrival in reserved:
                    self._index.discard(arrival.chunk, arrival.rank)
                return False
            reserved.append(Arrival(made.chunks[0], rank, made.chunks[0].shards[rank], tier))
        for arrival in reserved:
            self._arrivals[arrival.place] = arrival
            self.arriving_bytes += arrival.shard.size
        for arrival in (*near, *reserved):
            arrival.tier_searches.append(tier_search)
            tier_search.waiting[arrival.tier] += 1
        fresh += reserved
        place = group.number, key
        if place not in tier_search.held:
            tier_search.held[place] = group.chunks[key]
            self._index.hold([group.chunks[key]])
        return True

    # -- what arrives

    def arrived(self, load: ArrivalLoad, outcome: Loaded | KVDepotError, now: float) -> list[LoadDecision]:
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
            for each in {id(each): each for arrival in arrivals for each in arrival.tier_searches}.values():
                log.debug("tier search: cannot load from this tier: %s", outcome, extra=_about(tier, each))
        useless: list[str] = []
        for arrival, header in zip(arrivals, shards, strict=True):
            if header in (NotLoaded.CORRUPT, NotLoaded.FORGOTTEN):
                useless.append(part_of(arrival.chunk, arrival.rank, arrival.shard).name)
            tier.counters["loaded_chunks"] += self._settle(arrival, header, tier)
        tier.counters["missed_chunks"] += shards.count(NotLoaded.ABSENT) + shards.count(NotLoaded.FORGOTTEN)
        tier.counters["corrupt_chunks"] += shards.count(NotLoaded.CORRUPT)
        decisions: list[LoadDecision] = [Erase(tier.number, useless)] if useless else []
        for arrival in arrivals:
            for tier_search in arrival.tier_searches:
                tier_search.waiting[tier.number] -= 1
                if not tier_search.waiting[tier.number] and isinstance(outcome, Loaded):
                    tier.speed.loaded(tier_search.sizes[tier.number], tier_search.load_begun, now)
                if not tier_search.ended and not tier_search.waiting.total():
                    self.end(tier_search)
                    decisions.append(tier_search)
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
        """Whether a chunk computed at `born` (seconds since 1970) had expired at the last tick, or has no known age."""
        age_s = self._index.wall - born
        ttl_s = self._index.accounts.ttl_of(chunk)
        return ttl_s > 0 and not -SKEW_S <= age_s < ttl_s

    # -- the end

    def goes_on(self, tier_search: TierSearch) -> bool:
        """Whether all tiers that a tier search waits for have answered something since its deadline was set."""
        awaited, since = tier_search.owing | tier_search.loading_tiers(), max(tier_search.begun, tier_search.extended)
        return all(self._tiers[number].breaker.last_success > since for number in awaited)

    def late_tiers(self, tier_search: TierSearch, now: float) -> list[TierState]:
        """Count the tiers that are too late for a lookup; returns those that have answered no call since it began."""
        loads = tier_search.loading_tiers()
        late = [self._tiers[number] for number in tier_search.owing | loads]
        for tier in late:
            if tier.number in loads:
                tier.speed.load_late(tier_search.sizes[tier.number], tier_search.load_begun, now)
            else:
                tier.speed.find_late(tier_search.begun, now)
        if tier_search.is_trial:
            return []
        for tier in late:
            tier.counters["late"] += 1
            log.debug("tier search: replying without this tier, which is too late", extra=_about(tier, tier_search))
        return [tier for tier in late if tier.breaker.last_success < tier_search.begun]

    def end(self, tier_search: TierSearch) -> None:
        """End a tier search: its lookup is answered with what memory has now, and keeps its holds."""
        assert not tier_search.ended
        tier_search.ended = True
        self._count -= 1
        self._wanted -= len(tier_search.wanted)
        # Its deadline may keep it alive for some time; free the large fields.
        tier_search.wanted, tier_search.found, tier_search.hashes = [], {}, b""


def _batches(arrivals: list[Arrival]) -> Iterator[list[Arrival]]:
    """Batches of at most MOST_PARTS shards, and of about TASK_BYTES."""
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


def _about(tier: TierState, tier_search: TierSearch) -> dict[str, str]:
    return {"tier": tier.name, "request": tier_search.request.request}
