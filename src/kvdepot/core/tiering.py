"""What is asked of the tiers behind memory, loaded from them and written to them. No I/O, thread or clock here.

Called by core/depot.py on the deciding thread. Tier tasks go to the tier workers, and their outcomes come back.
The one law: a tier can make a lookup late, up to its deadline, and a hit shorter; nothing else. Whatever a tier does or
fails to do, what is in memory is served as if there were none.

A `TierLookup` is one lookup's look behind memory: all tiers are asked at once for all that memory misses; what makes
the prefix longer is loaded into reservations that it holds; when all has arrived, or at the deadline, the lookup is
answered from memory. What arrives later is sealed all the same, for whoever asks next.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from kvdepot.core.index.chunk import Chunk, Namespace, Shard, is_evictable
from kvdepot.core.index.index import Index
from kvdepot.core.index.outcomes import Absent, Found, Reason, Replaced, Reserved
from kvdepot.errors import KVDepotError
from kvdepot.protocol.keys import HASH_BYTES, ROOT
from kvdepot.protocol.status import TierStatus
from kvdepot.tiers import TierConfig, Usage
from kvdepot.tiers.breaker import Breaker
from kvdepot.tiers.format import Facts, Header, model_prefix, tenant_prefix
from kvdepot.tiers.worker import (
    MOST_PARTS,
    Erase,
    Find,
    Forget,
    Forgotten,
    Load,
    Loaded,
    Located,
    NotLoaded,
    Part,
    Probe,
    Save,
    Saved,
    TierOutcome,
    Unwanted,
)  # fmt: skip

__all__ = ["Forgetting", "TierLookup", "TierTasks", "Tiering", "Token"]

log = logging.getLogger(__name__)

_TASK_BYTES = 8 << 20
"""A load or save is about this long, so that several threads share what one lookup needs."""
_MOST_TIER_LOOKUPS = 1024
_MOST_WANTED = 1 << 16
"""Shards that one tier lookup asks tiers for; the prefix ends there."""
_MOST_WANTED_IN_ALL = 1 << 20
_MOST_FINDS = 64
"""Finds under way in one tier; above that it is not asked."""
MOST_FORGETTINGS = 16
"""Forgettings under way."""
_FORGET_S = 25.0
"""So long forgetting may take before the answer says what has not been done; less than clients wait."""
_MEMORY = -1
"""Stands for memory among numbers of tiers."""
_SHOWN = 100
"""Characters of a name in an answer."""
_MOST_ERROR = 300
"""Characters of a tier's error that log and status show."""
_PROBE_EVERY_S = 10.0
_PROBE_S = 5.0
"""A tier that has not answered by then counts as failed."""

TierTasks: TypeAlias = list[Any]
"""Tier tasks, and whatever the callbacks of ended tier lookups return."""
Done: TypeAlias = Callable[[], list[Any]]


@dataclass(slots=True, eq=False)
class TierLookup:
    """One lookup's look behind memory, for chunks `[first, end)` of `hashes`."""

    namespace: Namespace
    hashes: bytes
    first: int
    end: int
    chained: bool
    salt: bytes
    begun: float
    done: Done
    held: dict[bytes, Chunk]
    wanted: list[tuple[int, int]] = field(default_factory=list)  # chunk, rank: what tiers were asked for
    found: dict[tuple[int, int], int] = field(default_factory=dict)  # -> tier
    owing: set[int] = field(default_factory=set)  # tiers that have not said what they have
    waiting: Counter[int] = field(default_factory=Counter)  # by tier: shards on their way
    loading: bool = False
    ended: bool = False
    request: str = ""

    def is_awaited(self) -> bool:
        """Whether anybody wants to know what tiers have. Any thread."""
        return not (self.ended or self.loading)

    def key(self, chunk: int) -> bytes:
        return self.hashes[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES]


@dataclass(slots=True, eq=False)
class _Arrival:
    """A shard on its way into memory, and who waits for it."""

    chunk: Chunk
    rank: int
    tier: int
    tier_lookups: list[TierLookup]
    shard: Shard
    replaced: bool = False  # somebody else fills the chunk


@dataclass(slots=True, eq=False)
class _Demotion:
    """A chunk that leaves memory once the tiers have it."""

    chunk: Chunk
    bytes: int
    used: int
    saves: int = 0


@dataclass(slots=True, eq=False)
class _Tier:
    """A tier as the deciding thread sees it."""

    number: int
    config: TierConfig
    breaker: Breaker = field(default_factory=Breaker)
    queue: deque[tuple[Chunk, int, _Demotion | None]] = field(default_factory=deque)  # to be saved
    queued_bytes: int = 0
    finding: int = 0  # tier tasks
    saving: set[int] = field(default_factory=set)  # tier tasks, by number
    forgets: list[tuple[set[int], Forgetting]] = field(default_factory=list)  # and the saves that must end before
    probing: float | None = None  # since when
    probe_after: float = 0.0
    usage: Usage | None = None
    error: str = ""  # the last one
    failed_at: float = 0.0
    counters: Counter[str] = field(default_factory=Counter)

    @property
    def bit(self) -> int:
        return 1 << self.number


@dataclass(slots=True, eq=False)
class Token:
    """What a tier task's outcome is for: `then(outcome, now)`."""

    tier: _Tier
    then: Callable[[TierOutcome, float], TierTasks]
    is_probe: bool = False


@dataclass(slots=True, eq=False)
class Forgetting:
    """What is to be forgotten, while memory or a tier has not done so: nothing of it is loaded meanwhile.

    Tiers file by whole names. Of models whose name begins so, they are told `model` itself and all that are known here;
    one that only a tier knows is not found by the beginning of its name, and the answer says where that may be.
    """

    tenant: str | None  # None: of all
    model: str  # what names begin with; empty: any
    known: Collection[str]  # the names here that begin so
    salt: bytes | None  # None: any
    done: Callable[[dict[str, Any]], list[Any]]
    owing: set[int] = field(default_factory=set)  # tiers, and memory
    said: dict[str, Any] = field(default_factory=dict)
    ended: bool = False  # it has been answered

    def covers(self, namespace: Namespace, salt: bytes) -> bool:
        is_named = self.tenant in (None, namespace.tenant) and namespace.model.startswith(self.model)
        return is_named and self.salt in (None, salt)

    def is_whole_name(self) -> bool:
        """Whether `model` is known to be no mere beginning: a model here is called so, or a tier had one that is."""
        there = any(isinstance(what, int) and what > 0 for what in self.said.values())
        return not self.model or self.model in self.known or (there and not self.known)

    def trouble(self) -> str:
        """Why something may be left that no tier has told of; empty: nothing is."""
        if _MEMORY in self.owing:
            return f"memory has not been gone through within {_FORGET_S:g} s; nobody gets what is left there"
        if self.owing:
            return f"not every tier has answered within {_FORGET_S:g} s"
        if len(self.said) == 1 or self.is_whole_name():
            return ""
        return (
            f"tiers file models by whole names: they were told {len(self.known)} that this server knows to begin with "
            f"{self.model[:_SHOWN]!r}, and may have others; name those in full, or forget all"
        )

    def tier_task(self, tier: _Tier, then: Callable[[TierOutcome, float], TierTasks]) -> Forget:
        namespaces = {"" if self.tenant is None else tenant_prefix(self.tenant)}
        if self.model:
            namespaces = {model_prefix(self.tenant or "", name) for name in (self.model, *self.known)}
        return Forget(Token(tier, then), tier.number, "" if self.salt is None else self.salt.hex(), sorted(namespaces))


class Tiering:
    """All tiers of one depot, nearest first."""

    def __init__(self, configs: Sequence[TierConfig], index: Index, chunk_tokens: int, lookup_s: float) -> None:
        self._tiers = [_Tier(number, config) for number, config in enumerate(configs)]
        self._index = index
        self._chunk_tokens = chunk_tokens
        self._lookup_s = lookup_s
        self._arrivals: dict[tuple[int, bytes, int], _Arrival] = {}  # by namespace, key, rank
        self._arriving_bytes = 0
        self._demoting_bytes = 0
        self._low_bytes = index.allocator.capacity >> 3  # so much is kept free where chunks are saved as they leave
        self._times: list[tuple[float, int, Callable[[float], TierTasks], TierLookup | Forgetting]] = []
        self._numbers = itertools.count()
        self._forgettings: set[Forgetting] = set()
        self.tier_lookups = 0
        self._wanted = 0  # shards that all tier lookups asked for

    def __repr__(self) -> str:
        return f"<Tiering {len(self._tiers)} tiers, {self.tier_lookups} lookups, {len(self._arrivals)} shards arriving>"

    def __bool__(self) -> bool:
        return bool(self._tiers)

    # -- time

    def next_deadline(self) -> float:
        """When `expire` must be called next."""
        return self._times[0][0] if self._times else float("inf")

    def expire(self, now: float) -> TierTasks:
        """Do what is due."""
        tier_tasks: TierTasks = []
        while self._times and self._times[0][0] <= now:
            tier_tasks += heapq.heappop(self._times)[2](now)
        return tier_tasks

    def _at(self, when: float, act: Callable[[float], TierTasks], whose: TierLookup | Forgetting) -> None:
        while self._times and self._times[0][3].ended:
            heapq.heappop(self._times)
        heapq.heappush(self._times, (when, next(self._numbers), act, whose))

    def tick(self, now: float) -> TierTasks:
        """Once a second: look after tiers that are quiet, and those whose circuit breaker is open."""
        tier_tasks: TierTasks = []
        for tier in self._tiers:
            due = now >= (tier.probe_after if tier.breaker.usable else tier.breaker.probe_at)
            if due and tier.probing is None:
                tier.probing, tier.probe_after = now, now + _PROBE_EVERY_S
                tier_tasks.append(Probe(Token(tier, partial(self._probed, tier), is_probe=True), tier.number))
            elif tier.probing is not None and now - tier.probing > _PROBE_S:
                tier.probing = now
                self._failed(tier, now, "does not answer", is_probe=True)
        return tier_tasks

    def _probed(self, tier: _Tier, outcome: TierOutcome, now: float) -> TierTasks:
        tier.probing = None
        if isinstance(outcome, Usage):
            tier.usage = outcome
        return []

    # -- lookups

    def look_up(
        self,
        namespace: Namespace,
        hashes: bytes,
        first: int,
        chained: bool,
        salt: bytes,
        held: list[Chunk],
        now: float,
        done: Done,
        request: str = "",
    ) -> tuple[TierLookup, TierTasks] | None:
        """Look behind memory for what it misses of `hashes` from chunk `first` on; None where there is no use.

        held: chunks of the prefix that memory has; kept, with what is loaded, until `done` has been called, once: by
        `finished` or `expire` or `end`. What that returns goes where the tier tasks go. request: what the log calls it.
        """
        usable = [tier for tier in self._tiers if tier.breaker.usable]
        if not usable or len(namespace.sizes) < namespace.world_size or self._is_being_forgotten(namespace, salt):
            return None
        asked = [tier for tier in usable if tier.finding < _MOST_FINDS]
        end = min(len(hashes) // HASH_BYTES, first + _MOST_WANTED // namespace.world_size)
        room = self._wanted + (end - first) * namespace.world_size <= _MOST_WANTED_IN_ALL
        for tier in usable:
            tier.counters["searches_refused"] += not room or tier not in asked
        if self.tier_lookups >= _MOST_TIER_LOOKUPS or not room or not asked:
            return None
        tier_lookup = TierLookup(
            namespace, hashes, first, end, chained, salt, now, done, {chunk.key: chunk for chunk in held}
        )
        tier_lookup.request = request
        asked_for = hashes[first * HASH_BYTES : end * HASH_BYTES]
        near = [self._index.find(namespace, rank, asked_for) for rank in range(namespace.world_size)]
        tier_lookup.wanted = [
            (i, rank)
            for i in range(first, end)
            for rank in range(namespace.world_size)
            if isinstance(near[rank][i - first], Absent) and self._arrival(namespace, rank, tier_lookup.key(i)) is None
        ]
        self._index.hold(list(tier_lookup.held.values()), use=False)
        self.tier_lookups += 1
        self._wanted += len(tier_lookup.wanted)
        tier_lookup.owing = {tier.number for tier in asked} if tier_lookup.wanted else set()
        self._at(now + self._lookup_s / 2, partial(self._half_time, tier_lookup), tier_lookup)
        self._at(now + self._lookup_s, partial(self._overdue, tier_lookup), tier_lookup)
        if not tier_lookup.wanted:
            return tier_lookup, self._load(tier_lookup)
        facts = [self._facts(namespace, rank) for rank in range(namespace.world_size)]
        objects = [(facts[rank], tier_lookup.key(i)) for i, rank in tier_lookup.wanted]
        for tier in asked:
            tier.finding += 1
        return tier_lookup, [
            Find(
                Token(tier, partial(self._found, tier_lookup, tier)), tier.number, objects, salt, tier_lookup.is_awaited
            )
            for tier in asked
        ]

    def _is_near(self, tier_lookup: TierLookup, chunk: int, rank: int) -> bool:
        """Whether a shard is in memory, or on its way there."""
        key = tier_lookup.key(chunk)
        (found,) = self._index.find(tier_lookup.namespace, rank, key)
        return isinstance(found, Found) or self._arrival(tier_lookup.namespace, rank, key) is not None

    def _arrival(self, namespace: Namespace, rank: int, key: bytes) -> _Arrival | None:
        """A shard's way into memory, if it is worth waiting for."""
        arrival = self._arrivals.get((namespace.number, key, rank))
        return arrival if arrival is not None and self._tiers[arrival.tier].breaker.usable else None

    def _is_being_forgotten(self, namespace: Namespace, salt: bytes) -> bool:
        return any(forgetting.covers(namespace, salt) for forgetting in self._forgettings)

    def _facts(self, namespace: Namespace, rank: int) -> Facts:
        known = namespace.facts.get(rank)
        if known is None:
            known = namespace.facts[rank] = Facts(
                namespace.tenant,
                namespace.model,
                namespace.world_size,
                rank,
                namespace.blocks_in_chunk,
                self._chunk_tokens,
                namespace.layouts[rank],
            )
        return known

    def _found(self, tier_lookup: TierLookup, tier: _Tier, outcome: TierOutcome, now: float) -> TierTasks:
        tier.finding -= 1
        tier_lookup.owing.discard(tier.number)
        if isinstance(outcome, KVDepotError):
            log.debug("a tier lookup cannot learn what this tier has: %s", outcome, extra=_about(tier, tier_lookup))
        if tier_lookup.ended or tier_lookup.loading:
            return []
        if isinstance(outcome, Located):
            for place, there in zip(tier_lookup.wanted, outcome.there, strict=True):
                if there:  # the nearest that has it
                    tier_lookup.found[place] = min(tier.number, tier_lookup.found.get(place, tier.number))
        if not tier_lookup.owing or len(tier_lookup.found) == len(tier_lookup.wanted):
            return self._load(tier_lookup)
        return []

    def _half_time(self, tier_lookup: TierLookup, now: float) -> TierTasks:
        """Some tiers have not said what they have: load what the others have, while there is time."""
        if tier_lookup.ended or tier_lookup.loading:
            return []
        begins = all(
            (tier_lookup.first, rank) in tier_lookup.found or self._is_near(tier_lookup, tier_lookup.first, rank)
            for rank in range(tier_lookup.namespace.world_size)
        )
        return self._load(tier_lookup) if begins else []

    def _load(self, tier_lookup: TierLookup) -> TierTasks:
        tier_lookup.loading = True
        by_tier: dict[int, list[tuple[_Arrival, Part]]] = {}
        for i in range(tier_lookup.first, tier_lookup.end):
            chunk = self._reserve(tier_lookup, i, by_tier) if not tier_lookup.namespace.gone else None
            if chunk is None:
                break
            if chunk.key not in tier_lookup.held:
                self._index.hold([chunk], use=False)
                tier_lookup.held[chunk.key] = chunk
        tier_tasks: TierTasks = []
        for number, arriving in by_tier.items():
            tier = self._tiers[number]
            log.debug("a tier lookup loads %d shards from this tier", len(arriving), extra=_about(tier, tier_lookup))
            for some in _batches(arriving, lambda item: item[1].size):
                arrivals = [arrival for arrival, _ in some]
                token = Token(tier, partial(self._arrived, tier, arrivals))
                tier_tasks.append(Load(token, number, [part for _, part in some]))
        return tier_tasks if tier_lookup.waiting.total() else [*tier_tasks, *self.end(tier_lookup)]

    def _reserve(
        self, tier_lookup: TierLookup, i: int, by_tier: dict[int, list[tuple[_Arrival, Part]]]
    ) -> Chunk | None:
        """Chunk `i`, whole or with all its shards on their way; None where the prefix ends."""
        namespace, key = tier_lookup.namespace, tier_lookup.key(i)
        near: list[_Arrival] = []
        far: list[tuple[int, int]] = []  # rank, tier
        for rank in range(namespace.world_size):
            arrival = self._arrival(namespace, rank, key)
            if arrival is not None:
                near.append(arrival)
            elif isinstance(self._index.find(namespace, rank, key)[0], Absent):
                tier = tier_lookup.found.get((i, rank))
                late = (namespace.number, key, rank) in self._arrivals  # of a tier whose circuit breaker is open
                if tier is None or not (late or self._index.is_missing(namespace, rank, key)):
                    return None
                far.append((rank, tier))
        if self._arriving_bytes + sum(namespace.sizes[rank] for rank, _ in far) > self._index.allocator.capacity // 2:
            return None
        chunk = namespace.chunks.get(key)
        if far and self._is_being_forgotten(namespace, tier_lookup.salt if chunk is None else chunk.salt):
            return None  # a tier may have said that it has it before it was told to forget it
        fresh: list[_Arrival] = []
        for rank, tier in far:
            parent = b"" if not tier_lookup.chained else tier_lookup.key(i - 1) if i else ROOT
            position = i + 1 if tier_lookup.chained else 0
            (outcome,) = self._index.reserve_missing(
                namespace, rank, key, parent, position, namespace.sizes[rank], tier_lookup.salt, is_load=True
            )
            if isinstance(outcome, Replaced):
                self.replaced(outcome.chunk, rank)
            elif not isinstance(outcome, Reserved):  # no room: those of its other ranks are no use
                for arrival in fresh:
                    self._index.remove(arrival.chunk, Reason.FAILED, arrival.rank)
                return None
            fresh.append(_Arrival(outcome.chunk, rank, tier, [], outcome.chunk.shards[rank]))
        for arrival in fresh:
            chunk, rank = arrival.chunk, arrival.rank
            self._arrivals[namespace.number, key, rank] = arrival
            shard = chunk.shards[rank]
            self._arriving_bytes += shard.size
            part = Part(self._facts(namespace, rank), chunk.salt, key, shard.extents, shard.size)
            by_tier.setdefault(arrival.tier, []).append((arrival, part))
        for arrival in (*near, *fresh):
            arrival.tier_lookups.append(tier_lookup)
            tier_lookup.waiting[arrival.tier] += 1
        return namespace.chunks[key]

    def replaced(self, chunk: Chunk, rank: int) -> None:
        """A shard that was on its way has been reserved anew: whoever asked fills it now.

        A load that is late or hangs must not keep out what is computed meanwhile, nor what another tier has.
        """
        arrival = self._arrivals.pop((chunk.namespace.number, chunk.key, rank))
        arrival.replaced = True
        self._let_go(arrival)  # it goes, should whoever fills it fail

    def _let_go(self, arrival: _Arrival) -> None:
        """Searches do not hold it any more."""
        for tier_lookup in arrival.tier_lookups:
            if tier_lookup.held.pop(arrival.chunk.key, None) is not None:
                self._index.release([arrival.chunk])

    def _arrived(self, tier: _Tier, arrivals: list[_Arrival], outcome: TierOutcome, now: float) -> TierTasks:
        tier_tasks: TierTasks = []
        corrupt: list[str] = []
        sealed: list[tuple[Chunk, int]] = []
        outcomes = outcome.shards if isinstance(outcome, Loaded) else [NotLoaded.ABSENT] * len(arrivals)
        if isinstance(outcome, KVDepotError):
            for tier_lookup in {
                id(tier_lookup): tier_lookup for arrival in arrivals for tier_lookup in arrival.tier_lookups
            }.values():
                log.debug("what a tier lookup found could not be loaded: %s", outcome, extra=_about(tier, tier_lookup))
        for arrival, header in zip(arrivals, outcomes, strict=True):
            chunk, rank = arrival.chunk, arrival.rank
            self._arriving_bytes -= arrival.shard.size
            if header is NotLoaded.CORRUPT:
                corrupt.append(self._facts(chunk.namespace, rank).name(chunk.salt, chunk.key))
            if arrival.replaced:
                self._index.give_back(arrival.shard)
                continue
            del self._arrivals[chunk.namespace.number, chunk.key, rank]
            if isinstance(header, Header) and not self._index.is_hidden(chunk):
                chunk.shards[rank].tiers |= tier.bit
                self._index.seal(chunk, rank, header.checksum, header.born)
                sealed.append((chunk, rank))
            else:
                self._let_go(arrival)
                self._index.remove(chunk, Reason.FAILED, rank)
        tier.counters["loaded_chunks"] += len(sealed)
        tier.counters["missed_chunks"] += outcomes.count(NotLoaded.ABSENT)
        tier.counters["spoilt_chunks"] += len(corrupt)
        if corrupt:
            tier_tasks.append(Erase(Token(tier, _ignore), tier.number, corrupt, spoilt=True))
        for arrival in arrivals:
            for tier_lookup in arrival.tier_lookups:
                tier_lookup.waiting[tier.number] -= 1
                if not tier_lookup.ended and not tier_lookup.waiting.total():
                    tier_tasks += self.end(tier_lookup)
        # What was far away is kept nearer, too.
        nearer = [other for other in self._tiers[: tier.number] if other.config.options.write == "through"]
        return [*tier_tasks, *self._save(nearer, sealed)]

    def _overdue(self, tier_lookup: TierLookup, now: float) -> TierTasks:
        if tier_lookup.ended:
            return []
        for number in tier_lookup.owing | {number for number, count in tier_lookup.waiting.items() if count}:
            tier = self._tiers[number]
            tier.counters["late"] += 1
            log.debug("a tier lookup is answered without this tier: too late", extra=_about(tier, tier_lookup))
            if tier.breaker.last_success < tier_lookup.begun:
                self._failed(tier, now, "does not answer")
        return self.end(tier_lookup)

    def end(self, tier_lookup: TierLookup) -> TierTasks:
        """Answer with what is in memory by now."""
        assert not tier_lookup.ended
        tier_lookup.ended = True
        self.tier_lookups -= 1
        self._wanted -= len(tier_lookup.wanted)
        tier_tasks = tier_lookup.done()
        self._index.release(list(tier_lookup.held.values()))
        tier_lookup.held.clear()
        # It may be remembered until its deadline.
        tier_lookup.wanted, tier_lookup.found, tier_lookup.hashes = [], {}, b""
        return tier_tasks

    # -- writing

    def stored(self, shards: Iterable[tuple[Chunk, int]]) -> TierTasks:
        """These were just sealed."""
        through = [tier for tier in self._tiers if tier.config.options.write == "through"]
        return self._save(through, shards)

    def _save(self, tiers: list[_Tier], shards: Iterable[tuple[Chunk, int]]) -> TierTasks:
        tier_tasks: TierTasks = []
        shards = list(shards)
        for tier in tiers if shards else ():
            room = tier.config.options.queue_mib << 20
            for chunk, rank in shards:
                shard = chunk.shards.get(rank)
                if shard is None:
                    tier.counters["overtaken_chunks"] += 1  # forgotten while it was on its way
                elif not tier.breaker.usable:
                    tier.counters["unavailable_chunks"] += 1
                elif tier.queued_bytes and tier.queued_bytes + shard.size > room:
                    tier.counters["dropped_chunks"] += 1
                else:
                    tier.queue.append((chunk, rank, None))
                    tier.queued_bytes += shard.size
            tier_tasks += self._dispatch(tier)
        return tier_tasks

    def _dispatch(self, tier: _Tier) -> TierTasks:
        tier_tasks: TierTasks = []
        while tier.queue and len(tier.saving) < tier.config.options.threads:
            batch: list[tuple[Chunk, int, _Demotion | None]] = []
            parts: list[Part] = []
            taken = 0
            while tier.queue and len(parts) < MOST_PARTS and taken < _TASK_BYTES:
                chunk, rank, demotion = tier.queue.popleft()
                shard = chunk.shards.get(rank)
                tier.queued_bytes -= chunk.namespace.sizes.get(rank, 0) if shard is None else shard.size
                is_leaving = chunk.gone or self._index.is_hidden(chunk)
                if is_leaving or shard is None or not shard.sealed or shard.tiers & tier.bit:
                    tier.counters["overtaken_chunks"] += 1  # evicted or forgotten meanwhile, or there already
                    self._part_demoted(demotion)
                    continue
                part = Part(
                    self._facts(chunk.namespace, rank), chunk.salt, chunk.key, shard.extents, shard.size,
                    shard.checksum, chunk.born,
                )  # fmt: skip
                batch.append((chunk, rank, demotion))
                parts.append(part)
                taken += part.size
            if parts:
                self._index.hold([chunk for chunk, _, _ in batch], use=False)
                number = next(self._numbers)
                tier.saving.add(number)
                tier_tasks.append(Save(Token(tier, partial(self._saved, tier, number, batch)), tier.number, parts))
        return tier_tasks

    def _saved(
        self,
        tier: _Tier,
        number: int,
        batch: list[tuple[Chunk, int, _Demotion | None]],
        outcome: TierOutcome,
        now: float,
    ) -> TierTasks:
        tier.saving.discard(number)
        outcomes = outcome.kept if isinstance(outcome, Saved) else [False] * len(batch)
        unsaved = "unavailable_chunks" if isinstance(outcome, KVDepotError) else "refused_chunks"
        for (chunk, rank, demotion), kept in zip(batch, outcomes, strict=True):
            if kept:
                chunk.shards[rank].tiers |= tier.bit
            tier.counters["saved_chunks" if kept else unsaved] += 1
            self._index.release([chunk])
            self._part_demoted(demotion)
        return [*self._forget_after(tier, number), *self._dispatch(tier)]

    # -- on the way out of memory

    def make_room(self) -> TierTasks:
        """Where tiers get what memory evicts: save the next victims before their room is needed."""
        tiers = [tier for tier in self._tiers if tier.config.options.write == "on_evict" and tier.breaker.usable]
        tier_tasks: TierTasks = []
        while tiers and self._index.allocator.free_bytes + self._demoting_bytes < self._low_bytes:
            chunk = self._index.victim()
            if chunk is None:
                break
            missing = [tier for tier in tiers if not _has_all(chunk, tier.bit)]
            if not missing:
                self._index.remove(chunk, Reason.EVICTED)
                continue
            demotion = _Demotion(chunk, chunk.bytes, chunk.used)
            self._index.hold([chunk], use=False)
            self._demoting_bytes += demotion.bytes
            for tier in missing:
                for rank, shard in chunk.shards.items():
                    tier.queue.append((chunk, rank, demotion))
                    tier.queued_bytes += shard.size
                    demotion.saves += 1
            for tier in missing:
                tier_tasks += self._dispatch(tier)
        return tier_tasks

    def _part_demoted(self, demotion: _Demotion | None) -> None:
        if demotion is None:
            return
        demotion.saves -= 1
        if not demotion.saves:
            chunk = demotion.chunk
            self._demoting_bytes -= demotion.bytes
            self._index.release([chunk])
            short = self._index.allocator.free_bytes < self._low_bytes
            if short and chunk.used == demotion.used and is_evictable(chunk):
                self._index.remove(chunk, Reason.EVICTED)

    def _undemoted(self, tier: _Tier) -> dict[str, int]:
        """How many chunks were evicted that this tier had not all of, where it was to get them."""
        if tier.config.options.write != "on_evict":
            return {}
        saved = self._index.evicted_saved
        count = self._index.evicted - sum(saved[tiers] for tiers in saved if tiers & tier.bit)
        return {"undemoted_chunks": count} if count else {}

    # -- forgetting

    @property
    def forgettings(self) -> int:
        """How many are under way."""
        return len(self._forgettings)

    def forget(self, forgetting: Forgetting, now: float) -> TierTasks:
        """Remove what is in the tiers; its `done` is told once what they and memory said: how many, or an error.

        What is on its way into memory is dropped when it arrives; a tier is told once what it was saving is saved.
        Memory is for the caller to go through: `forgotten_here`.
        """
        forgetting.owing = {_MEMORY, *(tier.number for tier in self._tiers)}
        forgetting.said = {"memory": 0, **{tier.config.name: 0 for tier in self._tiers}}
        self._forgettings.add(forgetting)
        self._at(now + _FORGET_S, partial(self._answer_forget, forgetting), forgetting)
        for tier in self._tiers:
            tier.forgets.append((set(tier.saving), forgetting))
        return [tier_task for tier in self._tiers for tier_task in self._forget_after(tier, -1)]

    def _forget_after(self, tier: _Tier, number: int) -> TierTasks:
        """A save has ended: tell the tier to forget what had to wait for it."""
        tier_tasks: TierTasks = []
        for saves, forgetting in tier.forgets:
            saves.discard(number)
            if not saves:
                tier_tasks.append(forgetting.tier_task(tier, partial(self._forgotten, forgetting, tier)))
        tier.forgets = [item for item in tier.forgets if item[0]]
        return tier_tasks

    def _forgotten(self, forgetting: Forgetting, tier: _Tier, outcome: TierOutcome, now: float) -> TierTasks:
        told = outcome.objects if isinstance(outcome, Forgotten) else f"not forgotten: {outcome}"
        forgetting.said[tier.config.name] = told
        return self._no_longer_owes(forgetting, tier.number, now)

    def forgotten_here(self, forgetting: Forgetting, chunks: int, now: float) -> TierTasks:
        """Memory has been gone through."""
        forgetting.said["memory"] = chunks
        return self._no_longer_owes(forgetting, _MEMORY, now)

    def _no_longer_owes(self, forgetting: Forgetting, number: int, now: float) -> TierTasks:
        forgetting.owing.discard(number)
        if forgetting.owing:
            return []
        self._forgettings.discard(forgetting)
        return self._answer_forget(forgetting, now)

    def _answer_forget(self, forgetting: Forgetting, now: float) -> TierTasks:
        """Say how it went; where somebody has not answered, it goes on being forgotten."""
        if forgetting.ended:
            return []
        forgetting.ended = True
        if trouble := forgetting.trouble():
            forgetting.said["error"] = trouble
        return forgetting.done(dict(forgetting.said))

    def stop(self) -> TierTasks:
        """Answer what waits to be forgotten."""
        return [tier_task for each in list(self._forgettings) for tier_task in self._answer_forget(each, 0.0)]

    # -- outcomes

    def finished(self, token: Token, outcome: TierOutcome, now: float) -> TierTasks:
        """A tier task has ended."""
        tier = token.tier
        if isinstance(outcome, KVDepotError):
            tier.counters["failures"] += 1
            self._failed(tier, now, str(outcome), token.is_probe)
        elif not isinstance(outcome, Unwanted) and tier.breaker.succeeded(now):
            log.info("tier %s recovered", tier.config.name, extra={"tier": tier.config.name})
        return token.then(outcome, now)

    def _failed(self, tier: _Tier, now: float, why: str, is_probe: bool = False) -> None:
        why = why[:_MOST_ERROR]
        tier.error, tier.failed_at = why, now
        if not tier.breaker.failed(now, is_probe):
            return
        log.warning(
            "tier %s: circuit breaker open, retrying with backoff: %s",
            tier.config.name,
            why,
            extra={"tier": tier.config.name},
        )
        queue, tier.queue = tier.queue, deque()
        tier.queued_bytes = 0
        tier.counters["unavailable_chunks"] += len(queue)
        for _, _, demotion in queue:
            self._part_demoted(demotion)

    @property
    def busy(self) -> bool:
        """Whether anything is being saved, loaded or forgotten."""
        return bool(self._arriving_bytes or self._forgettings or any(t.saving or t.queue for t in self._tiers))

    def status(self, now: float) -> list[TierStatus]:
        """What people see of each tier."""
        return [
            TierStatus(
                name=tier.config.name,
                write=tier.config.options.write,
                state="up" if tier.breaker.usable else "circuit breaker open",
                objects=tier.usage.objects if tier.usage is not None else None,
                bytes=tier.usage.bytes if tier.usage is not None else None,
                capacity_bytes=tier.usage.capacity_bytes if tier.usage is not None else None,
                queued_bytes=tier.queued_bytes,
                saves=len(tier.saving),
                counters={
                    **(tier.usage.counters if tier.usage is not None else {}),
                    **tier.counters,
                    **self._undemoted(tier),
                    "left_alone": tier.breaker.trips,
                },
                error=tier.error,
                error_s=now - tier.failed_at if tier.error else None,
            )
            for tier in self._tiers
        ]


def _has_all(chunk: Chunk, bit: int) -> bool:
    return all(shard.tiers & bit for shard in chunk.shards.values())


def _batches(items: list[Any], size: Callable[[Any], int]) -> Iterable[list[Any]]:
    """Runs of at most MOST_PARTS items and about _TASK_BYTES."""
    batch: list[Any] = []
    taken = 0
    for item in items:
        batch.append(item)
        taken += size(item)
        if len(batch) == MOST_PARTS or taken >= _TASK_BYTES:
            yield batch
            batch, taken = [], 0
    if batch:
        yield batch


def _about(tier: _Tier, tier_lookup: TierLookup) -> dict[str, str]:
    """Fields of a line of the log."""
    return {"tier": tier.config.name, "request": tier_lookup.request}


def _ignore(outcome: TierOutcome, now: float) -> TierTasks:
    return []
