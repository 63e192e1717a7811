"""What is asked of the tiers behind memory, loaded from them and written to them. No I/O, thread or clock here.

Called by depot.py on the deciding thread. Errands go to the tiers' carriers, and their outcomes come back. The one law:
a tier can make a lookup late, up to its deadline, and a hit shorter; nothing else. Whatever a tier does or fails to do,
what is in memory is served as if there were none.

A `Search` is one lookup's look behind memory: all tiers are asked at once for all that memory misses; what makes the
prefix longer is loaded into reservations that the search holds; when all has arrived, or at the deadline, the lookup is
answered from memory. What arrives later is sealed all the same, for whoever asks next.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from kvdepot.errors import KVDepotError
from kvdepot.index import Chunk, Index, Namespace
from kvdepot.keys import HASH_BYTES, ROOT
from kvdepot.tiers import TierConfig, Usage
from kvdepot.tiers.breaker import Breaker
from kvdepot.tiers.carrier import MOST_PARTS, Erase, Find, Forget, Load, Part, Probe, Save
from kvdepot.tiers.format import Facts, Header, model_prefix

__all__ = ["Errands", "Search", "Tiering", "Token"]

log = logging.getLogger(__name__)

_ERRAND_BYTES = 8 << 20
"""A load or save is about this long, so that several threads share what one lookup needs."""
_MOST_SEARCHES = 1024
_FORGET_S = 25.0
"""So long tiers have for forgetting before the answer says that they have not; less than clients wait."""
_PROBE_EVERY_S = 10.0
_PROBE_S = 5.0
"""A tier that has not answered by then counts as failed."""

Errands: TypeAlias = list[Any]
"""Errands, and whatever the callbacks of ended searches return."""
Done: TypeAlias = Callable[[], list[Any]]


@dataclass(slots=True, eq=False)
class Search:
    """One lookup's look behind memory, for chunks `[first, ...)` of `hashes`."""

    space: Namespace
    hashes: bytes
    first: int
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

    def key(self, chunk: int) -> bytes:
        return self.hashes[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES]


@dataclass(slots=True, eq=False)
class _Arrival:
    """A shard on its way into memory, and who waits for it."""

    chunk: Chunk
    rank: int
    tier: int
    searches: list[Search]
    forgotten: bool = False


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
    saving: int = 0  # errands
    probing: float = 0.0  # since when; 0: not
    probe_after: float = 0.0
    usage: Usage | None = None
    counters: Counter[str] = field(default_factory=Counter)

    @property
    def bit(self) -> int:
        return 1 << self.number


@dataclass(slots=True, eq=False)
class Token:
    """What an errand's outcome is for: `then(outcome, now)`."""

    tier: _Tier
    then: Callable[[Any, float], Errands]


@dataclass(slots=True, eq=False)
class _Forgetting:
    """What is to be forgotten, while not every tier has done so: nothing of it is loaded meanwhile."""

    tenant: str
    models: list[str]  # empty string: all there is, of every tenant
    salt: bytes | None  # None: any
    owing: set[int]
    said: dict[str, Any]
    done: Callable[[dict[str, Any]], list[Any]]
    ended: bool = False

    def covers(self, space: Namespace, salt: bytes) -> bool:
        named = "" in self.models or (space.tenant == self.tenant and space.model in self.models)
        return named and self.salt in (None, salt)


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
        self._low_bytes = index.space.capacity >> 3  # so much is kept free where chunks are saved as they leave
        self._times: list[tuple[float, int, Callable[[float], Errands]]] = []
        self._numbers = itertools.count()
        self._forgettings: set[_Forgetting] = set()
        self._erasing: Counter[str] = Counter()  # objects that were saved while they were forgotten
        self.searches = 0
        if any(tier.config.options.write == "on_evict" for tier in self._tiers):
            index.evicting = self._leaves

    def __repr__(self) -> str:
        return f"<Tiering {len(self._tiers)} tiers, {self.searches} searches, {len(self._arrivals)} shards arriving>"

    def __bool__(self) -> bool:
        return bool(self._tiers)

    # -- time

    def next_deadline(self) -> float:
        """When `expire` must be called next."""
        return self._times[0][0] if self._times else float("inf")

    def expire(self, now: float) -> Errands:
        """Do what is due."""
        errands: Errands = []
        while self._times and self._times[0][0] <= now:
            errands += heapq.heappop(self._times)[2](now)
        return errands

    def _at(self, when: float, act: Callable[[float], Errands]) -> None:
        heapq.heappush(self._times, (when, next(self._numbers), act))

    def tick(self, now: float) -> Errands:
        """Once a second: look after tiers that are quiet, and those that were left alone."""
        errands: Errands = []
        for tier in self._tiers:
            due = now >= (tier.probe_after if tier.breaker.usable else tier.breaker.probe_at)
            if due and not tier.probing:
                tier.probing, tier.probe_after = now, now + _PROBE_EVERY_S
                errands.append(Probe(Token(tier, partial(self._probed, tier)), tier.number))
            elif tier.probing and now - tier.probing > _PROBE_S:
                tier.probing = now
                errands += self._failed(tier, now, "does not answer")
        return errands

    def _probed(self, tier: _Tier, outcome: Any, now: float) -> Errands:
        tier.probing = 0.0
        if isinstance(outcome, Usage):
            tier.usage = outcome
        return []

    # -- lookups

    def search(
        self,
        space: Namespace,
        hashes: bytes,
        first: int,
        chained: bool,
        salt: bytes,
        held: list[Chunk],
        now: float,
        done: Done,
    ) -> tuple[Search, Errands] | None:
        """Look behind memory for what it misses of `hashes` from chunk `first` on; None where there is no use.

        held: chunks of the prefix that memory has; kept, with what is loaded, until `done` has been called, once: by
        `finished` or `expire` or `end`. What that returns goes where the errands go.
        """
        usable = [tier for tier in self._tiers if tier.breaker.usable]
        if not usable or len(space.sizes) < space.world_size or self._is_being_forgotten(space, salt):
            return None
        if self.searches >= _MOST_SEARCHES:
            for tier in usable:
                tier.counters["searches_refused"] += 1
            return None
        search = Search(space, hashes, first, chained, salt, now, done, {chunk.key: chunk for chunk in held})
        search.wanted = [
            (i, rank)
            for i in range(first, len(hashes) // HASH_BYTES)
            for rank in range(space.world_size)
            if not self._is_near(search, i, rank)
        ]
        if not search.wanted and not self._is_near(search, first, 0):
            return None
        self._index.hold(held, use=False)
        self.searches += 1
        search.owing = {tier.number for tier in usable} if search.wanted else set()
        self._at(now + self._lookup_s / 2, partial(self._half_time, search))
        self._at(now + self._lookup_s, partial(self._overdue, search))
        if not search.wanted:
            return search, self._load(search)
        names = [self._facts(space, rank).name(salt or bytes(16), search.key(i)) for i, rank in search.wanted]
        return search, [
            Find(Token(tier, partial(self._found, search, tier)), tier.number, names) for tier in usable
        ]  # fmt: skip

    def _is_near(self, search: Search, chunk: int, rank: int) -> bool:
        """Whether a shard is in memory, or on its way there."""
        key = search.key(chunk)
        return (
            search.space.number, key, rank
        ) in self._arrivals or self._index.sealed_shard(search.space, rank, key) is not None  # fmt: skip

    def _is_being_forgotten(self, space: Namespace, salt: bytes) -> bool:
        return any(forgetting.covers(space, salt) for forgetting in self._forgettings)

    def _facts(self, space: Namespace, rank: int) -> Facts:
        known = space.facts.get(rank)
        if known is None:
            known = space.facts[rank] = Facts(
                space.tenant, space.model, space.world_size, rank, space.blocks_in_chunk, self._chunk_tokens,
                space.layouts[rank],
            )  # fmt: skip
        return known

    def _found(self, search: Search, tier: _Tier, outcome: Any, now: float) -> Errands:
        search.owing.discard(tier.number)
        if isinstance(outcome, list):
            for place, there in zip(search.wanted, outcome, strict=True):
                if there:
                    search.found.setdefault(place, tier.number)
        if search.ended or search.loading:
            return []
        if not search.owing or len(search.found) == len(search.wanted):
            return self._load(search)
        return []

    def _half_time(self, search: Search, now: float) -> Errands:
        """Some tiers have not said what they have: load what the others have, while there is time."""
        return self._load(search) if search.found and not search.loading and not search.ended else []

    def _load(self, search: Search) -> Errands:
        search.loading = True
        by_tier: dict[int, list[tuple[_Arrival, Part]]] = {}
        for i in range(search.first, len(search.hashes) // HASH_BYTES):
            chunk = self._reserve(search, i, by_tier) if not search.space.gone else None
            if chunk is None:
                break
            if chunk.key not in search.held:
                self._index.hold([chunk], use=False)
                search.held[chunk.key] = chunk
        errands: Errands = []
        for number, arriving in by_tier.items():
            tier = self._tiers[number]
            for some in _batches(arriving, lambda item: item[1].size):
                arrivals = [arrival for arrival, _ in some]
                token = Token(tier, partial(self._arrived, tier, arrivals))
                errands.append(Load(token, number, [part for _, part in some]))
        return errands if search.waiting.total() else [*errands, *self.end(search)]

    def _reserve(self, search: Search, i: int, by_tier: dict[int, list[tuple[_Arrival, Part]]]) -> Chunk | None:
        """Chunk `i`, whole or with all its shards on their way; None where the prefix ends."""
        space, key = search.space, search.key(i)
        near: list[_Arrival] = []
        far: list[tuple[int, int]] = []  # rank, tier
        for rank in range(space.world_size):
            arrival = self._arrivals.get((space.number, key, rank))
            if arrival is not None:
                near.append(arrival)
            elif self._index.sealed_shard(space, rank, key) is None:
                tier = search.found.get((i, rank))
                if tier is None or not self._index.missing(space, rank, key):
                    return None
                if self._erasing and self._facts(space, rank).name(search.salt or bytes(16), key) in self._erasing:
                    return None
                far.append((rank, tier))
        if self._arriving_bytes + sum(space.sizes[rank] for rank, _ in far) > self._index.space.capacity // 2:
            return None
        chunk: Chunk | None = space.chunks.get(key)
        if far and self._is_being_forgotten(space, search.salt if chunk is None else chunk.salt):
            return None  # a tier may have said that it has it before it was told to forget it
        fresh: list[_Arrival] = []
        for rank, tier in far:
            parent = b"" if not search.chained else search.key(i - 1) if i else ROOT
            position = i + 1 if search.chained else 0
            chunk = self._index.reserve(space, rank, key, parent, position, space.sizes[rank], search.salt)
            if chunk is None:  # no room: those of its other ranks are no use
                for arrival in fresh:
                    self._index.discard(arrival.chunk, arrival.rank)
                return None
            fresh.append(_Arrival(chunk, rank, tier, []))
        for arrival in fresh:
            chunk, rank = arrival.chunk, arrival.rank
            self._arrivals[space.number, key, rank] = arrival
            shard = chunk.shards[rank]
            self._arriving_bytes += shard.size
            part = Part(self._facts(space, rank), chunk.salt, key, shard.extents, shard.size)
            by_tier.setdefault(arrival.tier, []).append((arrival, part))
        for arrival in (*near, *fresh):
            arrival.searches.append(search)
            search.waiting[arrival.tier] += 1
        return space.chunks[key]

    def _arrived(self, tier: _Tier, arrivals: list[_Arrival], outcome: Any, now: float) -> Errands:
        errands: Errands = []
        spoilt: list[str] = []
        sealed: list[tuple[Chunk, int]] = []
        outcomes = outcome if isinstance(outcome, list) else [None] * len(arrivals)
        for arrival, header in zip(arrivals, outcomes, strict=True):
            chunk, rank = arrival.chunk, arrival.rank
            space: Namespace = chunk.namespace
            del self._arrivals[space.number, chunk.key, rank]
            self._arriving_bytes -= chunk.shards[rank].size
            if header is False:
                spoilt.append(self._facts(space, rank).name(chunk.salt or bytes(16), chunk.key))
            if isinstance(header, Header) and not arrival.forgotten:
                chunk.shards[rank].tiers |= tier.bit
                self._index.seal(chunk, rank, header.checksum, header.born)
                sealed.append((chunk, rank))
            else:
                for search in arrival.searches:
                    if search.held.pop(chunk.key, None) is not None:
                        self._index.release([chunk])
                self._index.discard(chunk, rank)
        tier.counters["loaded_chunks"] += len(sealed)
        tier.counters["missed_chunks"] += sum(header is None for header in outcomes)
        tier.counters["spoilt_chunks"] += len(spoilt)
        if spoilt:
            errands.append(Erase(Token(tier, _ignore), tier.number, spoilt, spoilt=True))
        for arrival in arrivals:
            for search in arrival.searches:
                search.waiting[tier.number] -= 1
                if not search.ended and not search.waiting.total():
                    errands += self.end(search)
        # What was far away is kept nearer, too.
        nearer = [other for other in self._tiers[: tier.number] if other.config.options.write == "through"]
        return [*errands, *self._save(nearer, sealed)]

    def _overdue(self, search: Search, now: float) -> Errands:
        if search.ended:
            return []
        errands: Errands = []
        for number in search.owing | {number for number, count in search.waiting.items() if count}:
            tier = self._tiers[number]
            tier.counters["late"] += 1
            if tier.breaker.last_success < search.begun:
                errands += self._failed(tier, now, "does not answer")
        return [*errands, *self.end(search)]

    def end(self, search: Search) -> Errands:
        """Answer with what is in memory by now."""
        assert not search.ended
        search.ended = True
        self.searches -= 1
        errands = search.done()
        self._index.release(list(search.held.values()))
        search.held.clear()
        return errands

    # -- writing

    def stored(self, shards: Iterable[tuple[Chunk, int]]) -> Errands:
        """These were just sealed."""
        through = [tier for tier in self._tiers if tier.config.options.write == "through"]
        return self._save(through, shards)

    def _save(self, tiers: list[_Tier], shards: Iterable[tuple[Chunk, int]]) -> Errands:
        errands: Errands = []
        shards = list(shards)
        for tier in tiers if shards else ():
            room = tier.config.options.queue_mib << 20
            for chunk, rank in shards:
                shard = chunk.shards.get(rank)
                if shard is None:
                    tier.counters["overtaken_chunks"] += 1  # forgotten while it was on its way
                elif not tier.breaker.usable or tier.queued_bytes + shard.size > room:
                    tier.counters["dropped_chunks"] += 1
                else:
                    tier.queue.append((chunk, rank, None))
                    tier.queued_bytes += shard.size
            errands += self._dispatch(tier)
        return errands

    def _dispatch(self, tier: _Tier) -> Errands:
        errands: Errands = []
        while tier.queue and tier.saving < tier.config.options.threads:
            batch: list[tuple[Chunk, int, _Demotion | None]] = []
            parts: list[Part] = []
            taken = 0
            while tier.queue and len(parts) < MOST_PARTS and taken < _ERRAND_BYTES:
                chunk, rank, demotion = tier.queue.popleft()
                shard = chunk.shards.get(rank)
                tier.queued_bytes -= chunk.namespace.sizes.get(rank, 0) if shard is None else shard.size
                if chunk.gone or chunk.doomed or shard is None or not shard.sealed or shard.tiers & tier.bit:
                    tier.counters["overtaken_chunks"] += 1  # evicted or forgotten meanwhile, or there already
                    errands += self._part_demoted(demotion)
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
                tier.saving += 1
                errands.append(Save(Token(tier, partial(self._saved, tier, batch)), tier.number, parts))
        return errands

    def _saved(
        self, tier: _Tier, batch: list[tuple[Chunk, int, _Demotion | None]], outcome: Any, now: float
    ) -> Errands:
        tier.saving -= 1
        errands: Errands = []
        outcomes = outcome if isinstance(outcome, list) else [False] * len(batch)
        forgotten = []
        for (chunk, rank, demotion), kept in zip(batch, outcomes, strict=True):
            if kept:
                chunk.shards[rank].tiers |= tier.bit
            if chunk.doomed:  # kept or not: a write that failed may have happened
                forgotten.append(self._facts(chunk.namespace, rank).name(chunk.salt or bytes(16), chunk.key))
            tier.counters["saved_chunks" if kept else "refused_chunks"] += 1
            self._index.release([chunk])
            errands += self._part_demoted(demotion)
        if forgotten:
            self._erasing.update(forgotten)
            errands.append(Erase(Token(tier, partial(self._erased, forgotten)), tier.number, forgotten))
        return [*errands, *self._dispatch(tier)]

    def _erased(self, names: list[str], outcome: Any, now: float) -> Errands:
        self._erasing.subtract(names)
        self._erasing += Counter()  # those that are at 0 go
        return []

    # -- on the way out of memory

    def make_room(self) -> Errands:
        """Where tiers get what memory evicts: save the next victims before their room is needed."""
        tiers = [tier for tier in self._tiers if tier.config.options.write == "on_evict" and tier.breaker.usable]
        errands: Errands = []
        while tiers and self._index.space.free_bytes + self._demoting_bytes < self._low_bytes:
            chunk = self._index.victim()
            if chunk is None:
                break
            missing = [tier for tier in tiers if not _has_all(chunk, tier.bit)]
            if not missing:
                self._index.evict(chunk)
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
                errands += self._dispatch(tier)
        return errands

    def _part_demoted(self, demotion: _Demotion | None) -> Errands:
        if demotion is None:
            return []
        demotion.saves -= 1
        if not demotion.saves:
            chunk = demotion.chunk
            self._demoting_bytes -= demotion.bytes
            self._index.release([chunk])
            short = self._index.space.free_bytes < self._low_bytes
            if short and chunk.used == demotion.used and self._index.is_evictable(chunk):
                self._index.evict(chunk)
        return []

    def _leaves(self, chunk: Chunk) -> None:
        """A chunk is evicted."""
        for tier in self._tiers:
            if tier.config.options.write == "on_evict" and not _has_all(chunk, tier.bit):
                tier.counters["undemoted_chunks"] += 1

    # -- forgetting

    def forget(
        self,
        tenant: str,
        models: Iterable[str],
        salt: bytes | None,
        now: float,
        done: Callable[[dict[str, Any]], Errands],
    ) -> Errands:
        """Remove what is in the tiers; `done` is told once what each said: how many, or its error.

        models: empty string: all there is, of every tenant. What is on its way into memory is dropped when it arrives,
        what is being saved is removed after that.
        """
        models = list(models)
        said: dict[str, Any] = {tier.config.name: 0 for tier in self._tiers}
        forgetting = _Forgetting(tenant, models, salt, set(), said, done)
        for arrival in self._arrivals.values():
            arrival.forgotten |= forgetting.covers(arrival.chunk.namespace, arrival.chunk.salt)
        prefixes = [model_prefix(tenant, model) if model else "" for model in models]
        errands: Errands = []
        for tier in self._tiers:
            for prefix in prefixes:
                number = next(self._numbers)
                forgetting.owing.add(number)
                token = Token(tier, partial(self._forgotten, forgetting, number, tier))
                errands.append(Forget(token, tier.number, "" if salt is None else salt.hex(), prefix))
        if not errands:
            return done(forgetting.said)
        self._forgettings.add(forgetting)
        self._at(now + _FORGET_S, partial(self._forgot, forgetting))
        return errands

    def _forgotten(self, forgetting: _Forgetting, number: int, tier: _Tier, outcome: Any, now: float) -> Errands:
        forgetting.owing.discard(number)
        name = tier.config.name
        if isinstance(outcome, int) and isinstance(forgetting.said[name], int):
            forgetting.said[name] += outcome
        elif isinstance(outcome, KVDepotError):
            forgetting.said[name] = f"not forgotten: {outcome}"
        return self._forgot(forgetting, now) if not forgetting.owing else []

    def _forgot(self, forgetting: _Forgetting, now: float) -> Errands:
        if forgetting.ended:
            return []
        forgetting.ended = True
        self._forgettings.discard(forgetting)
        if forgetting.owing:
            forgetting.said["error"] = f"not every tier has answered within {_FORGET_S:g} s"
        return forgetting.done(forgetting.said)

    # -- outcomes

    def finished(self, token: Token, outcome: Any, now: float) -> Errands:
        """An errand has ended."""
        errands: Errands = []
        tier = token.tier
        if isinstance(outcome, KVDepotError):
            tier.counters["failures"] += 1
            errands += self._failed(tier, now, str(outcome))
        elif tier.breaker.succeeded(now):
            log.info("tier %s is back", tier.config.name)
        return [*errands, *token.then(outcome, now)]

    def _failed(self, tier: _Tier, now: float, why: str) -> Errands:
        if not tier.breaker.failed(now):
            return []
        log.warning("tier %s is left alone for a while: %s", tier.config.name, why[:300])
        queue, tier.queue = tier.queue, deque()
        tier.queued_bytes = 0
        tier.counters["dropped_chunks"] += len(queue)
        return [errand for _, _, demotion in queue for errand in self._part_demoted(demotion)]

    @property
    def busy(self) -> bool:
        """Whether anything is being saved, loaded or erased."""
        return bool(self._arrivals or self._erasing or any(tier.saving or tier.queue for tier in self._tiers))

    def status(self) -> list[dict[str, Any]]:
        """What people see of each tier. Sizes in bytes."""
        return [
            {
                "name": tier.config.name,
                "write": tier.config.options.write,
                "state": "up" if tier.breaker.usable else "left alone",
                "objects": tier.usage.objects if tier.usage is not None else None,
                "bytes": tier.usage.bytes if tier.usage is not None else None,
                "capacity_bytes": tier.usage.capacity_bytes if tier.usage is not None else None,
                "queued_bytes": tier.queued_bytes,
                "saves": tier.saving,
                "counters": {
                    **(tier.usage.counters if tier.usage is not None else {}),
                    **tier.counters,
                    "left_alone": tier.breaker.trips,
                },
            }
            for tier in self._tiers
        ]


def _has_all(chunk: Chunk, bit: int) -> bool:
    return all(shard.tiers & bit for shard in chunk.shards.values())


def _batches(items: list[Any], size: Callable[[Any], int]) -> Iterable[list[Any]]:
    """Runs of at most MOST_PARTS items and about _ERRAND_BYTES."""
    batch: list[Any] = []
    taken = 0
    for item in items:
        batch.append(item)
        taken += size(item)
        if len(batch) == MOST_PARTS or taken >= _ERRAND_BYTES:
            yield batch
            batch, taken = [], 0
    if batch:
        yield batch


def _ignore(outcome: Any, now: float) -> Errands:
    return []
