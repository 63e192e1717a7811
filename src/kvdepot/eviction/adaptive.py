"""The policy `adaptive`: follows whichever of three policies has had the fewest misses.

Each of the three is simulated on keys alone by a **shadow** (shadows.py, learned.py) that contains as many chunks as
there are: LRU, S3-FIFO, and one that learns how soon chunks come back. So their misses on the same requests are known,
and this policy follows a **leader**: it evicts what the leader does not contain, in the order in which the leader
evicted it. After a change of leader, the chunks become those of the new one as new chunks need space.

The leader is the shadow with the fewest misses in the last few turnovers of the cache; at first it is the one that
learns. But once this policy itself has had more misses than the better of LRU and S3-FIFO, by 0.2 % and by a hundredth
of the chunks, it follows that one until half of this is made up for, or another shadow has a clear lead.

Nothing depends on the time or on Python's hashes: the same calls give the same evictions.

**Known weaknesses.** What a plain policy gains before it is followed is lost, and a change of leader costs up to as
many misses as there are chunks. So in the first few turnovers, or in a cache for a few dozen prompts, the hit rate can
be up to 0.9 points below that of the better plain policy. If chunks differ in size, or many are pinned, the shadows are
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
        self._is_behind = False  # it has spent its budget, and follows a plain policy
        self._chunks = 0
        self._room: float = inf  # for chunks, as far as is known
        # By slot. (Not a plain dict, which finds its first key by skipping all deleted ones: see `victim`.)
        self._queued: OrderedDict[int, Victim] = OrderedDict()
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
        self._misses += 1
        slots = self._slots
        before: Victim | None = chunk.parent
        is_part = before is not None and before.key == chunk.key
        parent = 0 if before is None else before.place
        slot = slots.find(chunk.key, is_part, parent)
        if not slot:
            slot = slots.enter(chunk.key, is_part, parent)
            self._learned.note_new(slot, is_part)
        elif not slots.flags[slot] & HOLDERS:
            self._lru.links.unlink(slot)
            self._gone_count -= 1
        slots.flags[slot] |= REAL
        chunk.place = slot
        for shadow in self._shadows:
            shadow.insert(slot)

    def use(self, chunk: Victim) -> None:
        for shadow in self._shadows:
            shadow.use(chunk.place)
            self._shrink(shadow, self._room)

    def touch(self, chunk: Victim) -> None:
        """Does nothing: a chain loses its end first, wherever it is in a queue."""

    def add(self, chunk: Victim) -> None:
        if chunk.queued:
            return
        chunk.queued = 1
        slot = chunk.place
        self._queued[slot] = chunk
        flags = self._slots.flags[slot]
        for shadow in self._shadows:
            if not flags & shadow.bit:
                shadow.links.prepend(shadow.outside, slot)

    def victim(self, evictable: Callable[[Victim], bool]) -> Victim | None:
        self._room = self._chunks
        for shadow in self._shadows:
            self._shrink(shadow, self._chunks - 1)
        leader = self._choose()
        while self._queued:
            # What the leader keeps goes only if all else is held, or if chunks differ in size.
            slot = leader.links.first(leader.outside) or next(iter(self._queued))
            chunk = self._queued[slot]
            self._leave(chunk)
            if not chunk.gone and evictable(chunk):
                return chunk
        return None

    def remove(self, chunk: Victim, evicted: bool) -> None:
        self._chunks -= 1
        if chunk.queued:
            self._leave(chunk)
        slot, chunk.place = chunk.place, 0
        self._slots.flags[slot] &= ~REAL
        if not evicted:
            for shadow in self._shadows:
                shadow.drop(slot)
        self._release(slot)
        self._forget()

    def _leave(self, chunk: Victim) -> None:
        """Take a chunk out of the queues."""
        chunk.queued = 0
        slot = chunk.place
        del self._queued[slot]
        flags = self._slots.flags[slot]
        for shadow in self._shadows:
            if not flags & shadow.bit:
                shadow.links.unlink(slot)

    def _shrink(self, shadow: Shadow, count: float) -> None:
        if shadow.count > count:
            for slot in shadow.shrink(count):
                if slot in self._queued:
                    shadow.links.append(shadow.outside, slot)
                self._release(slot)

    def _choose(self) -> Shadow:
        if self._epoch != self._learned.epoch:
            self._epoch = self._learned.epoch
            self._misses *= _LONG
            for shadow in self._shadows:
                shadow.misses *= _LONG
                shadow.recent_misses *= _RECENT
        lru, s3fifo, best = self._shadows
        budget = _BUDGET * self._misses + _ALLOWANCE * self._chunks
        other = s3fifo if self._plain is lru else lru
        if self._plain.misses - other.misses > budget / 2:
            self._plain = other
        behind = self._misses - self._plain.misses
        self._is_behind = behind > (budget / 2 if self._is_behind else budget)
        for shadow in (lru, s3fifo):
            if shadow.recent_misses < best.recent_misses:
                best = shadow
        if self._is_behind and self._plain.recent_misses - best.recent_misses <= _CLEAR_LEAD * self._chunks:
            self._leader = self._plain
        elif self._leader.recent_misses - best.recent_misses > _LEAD * self._chunks:
            self._leader = best
        return self._leader

    # -- ghosts

    def _release(self, slot: int) -> None:
        """A shadow no longer contains `slot`, or its chunk is gone: it may be a ghost now."""
        if not self._slots.flags[slot] & HOLDERS:
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
            self._learned.forget(slot)
            slots.free(slot)
