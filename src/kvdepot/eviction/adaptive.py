"""The policy `adaptive`: follows whichever of three policies has had the fewest misses.

Each of the three is simulated on keys alone by a **shadow** (shadows.py, learned.py) that contains as many chunks as
there are: LRU, S3-FIFO, and one that learns how soon chunks come back. So their misses on the same requests are known,
and this policy follows a **leader**: it evicts what the leader does not contain, in the order in which the leader
evicted it. After a change of leader, the chunks become those of the new one as new chunks need space.

The leader is the shadow with the fewest misses in the last few turnovers of the cache. At first it is the one that
learns, or LRU if there is room for few prompts. But once this policy itself has had more misses than the better of LRU
and S3-FIFO, by 0.2 % and by a hundredth of the chunks, it follows that one until half of this is made up for, or
another shadow has a clear lead. In small caches, a lead counts from the misses of a few requests.

Nothing depends on the time or on Python's hashes: the same calls give the same evictions.

**Known weaknesses.** What a plain policy gains before it is followed is lost, and a change of leader costs up to as
many misses as there are chunks. So in traces of a few turnovers, the hit rate can be a point below that of the better
plain policy, mostly in a cache for a few dozen prompts. If chunks differ in size, or many are pinned, the shadows are
inexact, because they count chunks and know no pins.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from math import exp, inf

from kvdepot.eviction.hazards import EPOCHS
from kvdepot.eviction.learned import LearnedShadow
from kvdepot.eviction.policy import Victim
from kvdepot.eviction.shadows import LruShadow, S3FifoShadow, Shadow
from kvdepot.eviction.slots import HOLDERS, REAL, Slots

__all__ = ["Adaptive"]

_RECENT = exp(-1 / (4 * EPOCHS))
_LONG = exp(-1 / (100 * EPOCHS))
"""What is left of the counts of misses after each epoch: they matter for 4 turnovers, and for 100."""
_LEAD, _CLEAR_LEAD = 0.002, 0.04
"""The lead in recent misses, per chunk, that makes a shadow the leader, and that does even when the budget is spent."""
_BUDGET, _ALLOWANCE = 0.002, 0.01
"""How many more misses than the better plain policy it may have: per miss of its own, and per chunk."""
_CHANCE, _MOST = 4.0, 0.05
"""Lead and allowance are at least so many runs of missing chunks, because less is chance, but at most so much of the
chunks."""
_FEW = 48
"""With room for fewer runs than this, what is learned at first is chance: LRU is the first leader."""
_LOOKED_AT = 64
"""Queued chunks that are looked at for one victim, at most."""


class Adaptive:
    """The best of LRU, S3-FIFO and what is learned."""

    def __init__(self) -> None:
        self._slots = slots = Slots()
        self._lru = LruShadow(slots, 2)
        self._learned = LearnedShadow(slots, 8)
        self._shadows: tuple[Shadow, Shadow, Shadow] = (self._lru, S3FifoShadow(slots, 4), self._learned)
        self._leader: Shadow = self._learned
        self._plain: Shadow = self._lru  # the better of the two plain ones
        self._epoch = self._learned.epoch
        self._misses = 0.0  # its own, as `Shadow.misses`
        self._entered = 0
        self._runs = 0.0  # of chunks that it missed; one whose key was known counts as a run
        self._is_behind = False  # it has spent its budget, and follows a plain policy
        self._is_first = True  # no leader has been chosen yet
        self._is_new = True  # nor in the current request
        self._born = 0  # the last new chunk of the current request, if its key was not known
        self._chunks = 0
        self._room: float = inf  # for chunks, as far as is known
        # By slot. (Not plain dicts, which find their first key by skipping all deleted ones: see `victim`.)
        self._queued: OrderedDict[int, Victim] = OrderedDict()
        self._outside: OrderedDict[int, None] = OrderedDict()  # those that the leader evicted, in this order
        self._unseen = 0  # how many of the queued ones may be outside too, since the leader changed
        # Slots that have no chunk and that no shadow contains, oldest first, in the links of the first shadow.
        self._gone = self._lru.links.make(slots.new_head())
        self._gone_count = 0

    def __repr__(self) -> str:
        return f"<Adaptive {len(self._queued)} queued, {self.ghosts} ghosts, following {type(self._leader).__name__}>"

    @property
    def ghosts(self) -> int:
        """Keys that it remembers without their chunks: at most four times as many as chunks."""
        return self._slots.used - self._chunks

    def insert(self, chunk: Victim) -> None:
        self._chunks += 1
        self._entered += 1
        slots = self._slots
        before: Victim | None = chunk.parent
        is_part = before is not None and before.key == chunk.key
        parent = 0 if before is None else before.place
        if parent and parent == self._born and not is_part:  # nothing was ever behind it
            chunk.place = self._born = slot = slots.enter(chunk.key, False, parent)
            slots.flags[slot] = HOLDERS
            for shadow in self._shadows:
                shadow.extend(slot, parent)
            return
        self._is_new = True
        self._runs += 1
        slot = slots.find(chunk.key, is_part, parent)
        if not slot:
            self._born = slot = slots.enter(chunk.key, is_part, parent)
            self._learned.note_new(slot, is_part)
        else:
            self._born = 0
            if not slots.flags[slot] & HOLDERS:
                self._lru.links.unlink(slot)
                self._gone_count -= 1
        slots.flags[slot] |= REAL
        chunk.place = slot
        for shadow in self._shadows:
            shadow.insert(slot)

    def use(self, chunk: Victim) -> None:
        self._is_new = True
        self._born = 0
        for shadow in self._shadows:
            shadow.use(chunk.place)
            if shadow.count > self._room:
                self._shrink(shadow, self._room)

    def touch(self, chunk: Victim) -> None:
        """Does nothing: a chain loses its end first, wherever it is in a queue."""

    def add(self, chunk: Victim) -> None:
        if chunk.queued:
            return
        chunk.queued = 1
        slot = chunk.place
        self._queued[slot] = chunk
        if not self._slots.flags[slot] & self._leader.bit:
            self._outside[slot] = None
            self._outside.move_to_end(slot, last=False)

    def victim(self, evictable: Callable[[Victim], bool]) -> Victim | None:
        self._room = self._chunks
        for shadow in self._shadows:
            if shadow.count >= self._chunks:
                self._shrink(shadow, self._chunks - 1)
        if self._is_new:
            self._is_new = False
            leader = self._choose()
            if leader is not self._leader:
                self._leader = leader
                self._outside.clear()
                self._unseen = len(self._queued)
        while self._queued:
            chunk = self._queued[self._next()]
            self._leave(chunk)
            if not chunk.gone and evictable(chunk):
                return chunk
        return None

    def _next(self) -> int:
        """The slot to evict among those that are queued: one that the leader does not contain, if there is one.

        After a change of leader, it looks for such slots, a few at a time.
        """
        flags, bit, outside, queued = self._slots.flags, self._leader.bit, self._outside, self._queued
        if self._unseen:
            for _ in range(min(self._unseen, _LOOKED_AT)):
                self._unseen -= 1
                slot = next(iter(queued))
                if not flags[slot] & bit:
                    return slot
                queued.move_to_end(slot)
        while outside:
            slot = next(iter(outside))
            if not flags[slot] & bit:
                return slot
            del outside[slot]
        return next(iter(queued))  # all else is held, or chunks differ in size

    def remove(self, chunk: Victim, evicted: bool) -> None:
        self._chunks -= 1
        if chunk.queued:
            self._leave(chunk)
        slot, chunk.place = chunk.place, 0
        flags = self._slots.flags
        flags[slot] &= ~REAL
        if slot == self._born:
            self._born = 0
        if not evicted:
            for shadow in self._shadows:
                shadow.drop(slot)
        if not flags[slot] & HOLDERS:
            self._release(slot)
        if self._gone_count > self._chunks:
            self._forget()

    def _leave(self, chunk: Victim) -> None:
        """Take a chunk out of the queue."""
        chunk.queued = 0
        del self._queued[chunk.place]
        self._outside.pop(chunk.place, None)

    def _shrink(self, shadow: Shadow, count: float) -> None:
        flags = self._slots.flags
        while shadow.count > count:
            slot = shadow.evict()
            if not slot:
                return
            if not flags[slot] & HOLDERS:
                self._release(slot)
            elif shadow is self._leader and slot in self._queued:
                self._outside[slot] = None

    def _choose(self) -> Shadow:
        """The shadow to follow now."""
        if self._epoch != self._learned.epoch:
            self._epoch = self._learned.epoch
            self._misses = _LONG * (self._misses + self._entered)
            self._entered = 0
            self._runs *= _LONG
            for shadow in self._shadows:
                shadow.age(_LONG, _RECENT)
        own = self._misses + self._entered
        run = own / max(1.0, self._runs)
        chance = min(_CHANCE * run, _MOST * self._chunks)
        lru, s3fifo, learned = self._shadows
        other = s3fifo if self._plain is lru else lru
        budget = _BUDGET * own + max(_ALLOWANCE * self._chunks, chance)
        if self._plain.misses + self._plain.entered - other.misses - other.entered > budget / 2:
            self._plain = other
        plain = self._plain
        behind = own - plain.misses - plain.entered
        self._is_behind = behind > (budget / 2 if self._is_behind else budget)
        recent = {shadow: shadow.recent_misses + shadow.entered for shadow in (learned, lru, s3fifo)}
        best = min(recent, key=recent.__getitem__)
        if self._is_behind and recent[plain] - recent[best] <= _CLEAR_LEAD * self._chunks:
            return plain
        if self._is_first:
            self._is_first = False
            return lru if self._chunks < _FEW * run else learned
        if recent[self._leader] - recent[best] > max(_LEAD * self._chunks, chance):
            return best
        return self._leader

    # -- ghosts

    def _release(self, slot: int) -> None:
        """`slot` has no chunk and no shadow contains it."""
        self._lru.links.append(self._gone, slot)
        self._gone_count += 1

    def _forget(self) -> None:
        """Keep as many ghosts that no shadow contains as there are chunks.

        The oldest goes first, hence a slot before its parent: chunks and shadows lose the ends of chains first.
        """
        slots, links = self._slots, self._lru.links
        while self._gone_count > self._chunks:
            slot = links.first(self._gone)
            links.unlink(slot)
            self._gone_count -= 1
            for shadow in self._shadows:
                shadow.forget(slot)
            slots.flags[slot] = 0
            slots.free(slot)
