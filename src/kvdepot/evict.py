"""Which chunk goes first when space is needed. Pure; called by index.py and by bounded tiers, on the deciding thread.

A policy is told of every chunk that comes (`insert`), is used (`use`), may be evicted (`add`) and leaves (`remove`),
and names a victim. It never names one that `evictable` refuses: pinned, being copied, or with a chunk behind it in its
chain. So a chain always loses its tail first, whatever the policy. Policies are found by name in `POLICIES`.

**Chains.** A request that hits a chain uses its deepest chunk only, though it needs all before it as much. That is
made up when a chunk leaves: what it knew (when, how often it was used) goes to its parent, which can be evicted only
from then on. A tier without chains leaves `parent` None.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol
from zlib import crc32

import msgspec

from kvdepot.adaptive import Adaptive

__all__ = ["POLICIES", "Ageing", "Lru", "Policy", "S3Fifo", "Victim", "WTinyLfu"]


class Victim(msgspec.Struct, gc=False):
    """What a policy needs to know of a chunk, and what it notes on it; index.Chunk is one."""

    key: bytes = b""
    parent: Any = None
    """The chunk before it in its chain, where known. It is there at least as long as this one."""
    order: float = 0
    """Its date, as the policy counts: of one queue, the lowest goes first."""
    uses: int = 0
    """How often it was used, as the policy counts."""
    place: int = 0
    """Where in the policy it belongs."""
    follows: bool = False
    """Whether it was stored behind a chunk that a request had found, or behind one of which that is so."""
    hit: bool = False
    """Whether it was used since it was stored."""
    queued: int = 0
    """Which of the policy's queues holds it, counted from 1; 0 = none."""
    gone: bool = False


class Policy(Protocol):
    """What index.py asks of an eviction policy. No call may change the chunk's key or parent."""

    def insert(self, chunk: Victim) -> None:
        """`chunk` is new, or back after it left. Once, before all other calls; it cannot be evicted before `add`."""

    def use(self, chunk: Victim) -> None:
        """A request found `chunk`. Once a request, however often that touches it."""

    def touch(self, chunk: Victim) -> None:
        """Date `chunk` as if it were used now, which it was not: no more than an order among what is new."""

    def add(self, chunk: Victim) -> None:
        """`chunk` may be evicted from now on, or again. It may be known already; told when a hold or child went."""

    def victim(self, evictable: Callable[[Victim], bool]) -> Victim | None:
        """The chunk to evict next, or None when there is none.

        It is in no queue then: `remove` follows, or, where it is kept after all, `add`, and it has its old place.
        """

    def remove(self, chunk: Victim, evicted: bool) -> None:
        """`chunk` leaves, whether it is queued or not; its `gone` is set and its parent is still known.

        evicted: for lack of room, so that it may be missed; else it was dropped, or never arrived.
        """


_MOVED = 4
"""Entries that a queue moves at once where it gets rid of what is gone."""


class Queue:
    """Chunks by `order`, each at most once.

    A heap that is corrected when a chunk comes up: using a chunk only writes its date, so a hit costs O(1), and every
    use is paid for by at most one later correction, O(log n). What is not evictable when it comes up is dropped and
    comes back through `push`. Once more than half of it is gone, what is not moves to another heap, a little with each
    that goes: to do so at once would stop the server for a tenth of a second where there are hundreds of thousands.
    """

    __slots__ = ("_gone", "_heap", "_number", "_old", "_serial")

    def __init__(self, number: int = 1) -> None:
        self._number = number
        self._heap: list[tuple[float, int, Victim]] = []
        self._old: list[tuple[float, int, Victim]] = []  # a heap too, emptied from its end
        self._serial = 0  # equal dates go in the order in which they came
        self._gone = 0  # in both

    def __len__(self) -> int:
        return len(self._heap) + len(self._old)

    def push(self, chunk: Victim) -> None:
        chunk.queued = self._number
        self._serial += 1
        heapq.heappush(self._heap, (chunk.order, self._serial, chunk))

    def pop(self, evictable: Callable[[Victim], bool]) -> Victim | None:
        """The one with the lowest date."""
        while True:
            heap, old = self._heap, self._old
            if old and (not heap or old[0] < heap[0]):
                heap = old
            if not heap:
                return None
            order, _, chunk = heap[0]
            if chunk.gone:
                self._gone = max(0, self._gone - 1)
            elif chunk.order > order and evictable(chunk):
                self._serial += 1
                heapq.heapreplace(heap, (chunk.order, self._serial, chunk))
                continue
            heapq.heappop(heap)
            chunk.queued = 0
            if not chunk.gone and evictable(chunk):
                return chunk

    def sweep(self) -> None:
        """One of those queued is gone."""
        self._gone += 1
        if not self._old and self._gone > 4 + len(self._heap) // 2:
            self._old, self._heap = self._heap, []
        for _ in range(min(_MOVED, len(self._old))):
            entry = self._old.pop()
            if entry[2].gone:
                self._gone = max(0, self._gone - 1)
                entry[2].queued = 0  # a disk's object that could not be removed is there once more
            else:
                heapq.heappush(self._heap, entry)


class Lru:
    """Least recently used first."""

    def __init__(self) -> None:
        self._clock = 0
        self._queue = Queue()

    def __repr__(self) -> str:
        return f"<Lru {len(self._queue)} queued>"

    def insert(self, chunk: Victim) -> None:
        self._clock += 1
        chunk.order = self._clock

    def use(self, chunk: Victim) -> None:
        self._clock += 1
        chunk.order = self._clock

    def touch(self, chunk: Victim) -> None:
        self._clock += 1
        chunk.order = self._clock

    def add(self, chunk: Victim) -> None:
        if not chunk.queued:
            self._queue.push(chunk)

    def victim(self, evictable: Callable[[Victim], bool]) -> Victim | None:
        return self._queue.pop(evictable)

    def remove(self, chunk: Victim, evicted: bool) -> None:
        if chunk.queued:
            self._queue.sweep()
        before: Victim | None = chunk.parent
        if before is not None and before.order < chunk.order:
            before.order = chunk.order


_SMALL, _MAIN = 1, 2


class S3Fifo:
    """Two FIFO queues (Yang et al., SOSP 2023): what is new passes through the small one, a tenth of the chunks, and
    only what is used there, or comes back soon after, gets into the main one."""

    def __init__(self) -> None:
        self._clock = 0
        self._small = Queue(_SMALL)
        self._main = Queue(_MAIN)
        self._chunks = 0
        self._in_small = 0  # chunks that belong there, whether or not they can be evicted now
        # What left the small queue lately, oldest first; at most as many as chunks. (The first of a plain dict is found
        # by stepping over all that were deleted before it, which makes removing many chunks quadratic.)
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"<S3Fifo {len(self._small) + len(self._main)} queued, {self._in_small} of {self._chunks} chunks small>"

    def insert(self, chunk: Victim) -> None:
        self._clock += 1
        self._chunks += 1
        chunk.order = self._clock
        chunk.uses = 0
        if chunk.key in self._ghosts:
            del self._ghosts[chunk.key]
            chunk.place = _MAIN
        else:
            chunk.place = _SMALL
            self._in_small += 1

    def use(self, chunk: Victim) -> None:
        if chunk.uses < 3:
            chunk.uses += 1

    def touch(self, chunk: Victim) -> None:
        self._clock += 1
        chunk.order = self._clock

    def add(self, chunk: Victim) -> None:
        if not chunk.queued:
            (self._small if chunk.place == _SMALL else self._main).push(chunk)

    def victim(self, evictable: Callable[[Victim], bool]) -> Victim | None:
        while True:
            chunk = self._small.pop(evictable) if self._in_small * 10 >= self._chunks else None
            chunk = chunk or self._main.pop(evictable) or self._small.pop(evictable)
            if chunk is None or not chunk.uses:
                return chunk
            if chunk.place == _SMALL:
                self._in_small -= 1
                chunk.place = _MAIN
                chunk.uses = 0
            else:
                chunk.uses -= 1
            self._clock += 1
            chunk.order = self._clock
            self._main.push(chunk)

    def remove(self, chunk: Victim, evicted: bool) -> None:
        if chunk.queued:
            (self._small if chunk.queued == _SMALL else self._main).sweep()
        self._chunks -= 1
        if chunk.place == _SMALL:
            self._in_small -= 1
            if evicted:
                self._ghosts[chunk.key] = None
        while len(self._ghosts) > self._chunks:
            self._ghosts.popitem(last=False)
        before: Victim | None = chunk.parent
        if before is not None and not before.gone:
            before.order = max(before.order, chunk.order)
            before.uses = min(3, before.uses + chunk.uses)
            if before.place < chunk.place:
                before.place = _MAIN
                self._in_small -= 1


class Ageing:
    """Least frequently used first, where a use counts for less with time: half after 0.3 turnovers of the cache
    (LRFU, Lee et al., 2001).

    `order` is the logarithm of the sum of all uses so weighted, seen from the beginning of time: it changes with
    uses only, and the frequency of a parent is exactly its own and its descendants'.
    """

    _HALF_LIFE = 0.3
    """Turnovers. Longer favours what was popular long ago, which finished chats are; by far shorter is LRU."""

    def __init__(self) -> None:
        self._clock = 0.0  # half-lives
        self._queue = Queue()
        self._chunks = 0

    def __repr__(self) -> str:
        return f"<Ageing {len(self._queue)} queued>"

    def insert(self, chunk: Victim) -> None:
        self._chunks += 1
        self._clock += 1 / (self._HALF_LIFE * self._chunks)
        chunk.order = self._clock

    def use(self, chunk: Victim) -> None:
        self._clock += _TICK
        chunk.order = _sum(chunk.order, self._clock)

    def touch(self, chunk: Victim) -> None:
        self._clock += _TICK
        chunk.order = max(chunk.order, self._clock)

    def add(self, chunk: Victim) -> None:
        if not chunk.queued:
            self._queue.push(chunk)

    def victim(self, evictable: Callable[[Victim], bool]) -> Victim | None:
        return self._queue.pop(evictable)

    def remove(self, chunk: Victim, evicted: bool) -> None:
        if chunk.queued:
            self._queue.sweep()
        self._chunks -= 1
        before: Victim | None = chunk.parent
        if before is not None:
            before.order = _sum(before.order, chunk.order)


_TICK = 1e-9
"""Half-lives: nothing but an order among what happens between two insertions."""


def _sum(one: float, other: float) -> float:
    """log2(2 ** one + 2 ** other)."""
    if one < other:
        one, other = other, one
    return one + math.log2(1 + 2.0 ** max(other - one, -60))


_WINDOW, _PROBATION, _PROTECTED = 1, 2, 3


class WTinyLfu:
    """New chunks wait in a window, a hundredth of the chunks; what leaves it must be used more often than what the main
    part would lose for it (Einziger et al., ACM ToS 2017). The main part is a segmented LRU; a sketch counts uses."""

    def __init__(self) -> None:
        self._clock = 0
        self._queues = {place: Queue(place) for place in (_WINDOW, _PROBATION, _PROTECTED)}
        self._counts = {_WINDOW: 0, _PROBATION: 0, _PROTECTED: 0}  # chunks that belong there, evictable or not
        self._sketch = Sketch()
        self._room_made = False  # since the last insertion

    def __repr__(self) -> str:
        return f"<WTinyLfu {sum(map(len, self._queues.values()))} queued, {self._counts} chunks>"

    def insert(self, chunk: Victim) -> None:
        chunk.place = _WINDOW if self._room_made else _PROBATION  # where there is room nothing is lost for it
        self._room_made = False
        self._counts[chunk.place] += 1
        chunk.uses = 0
        self._sketch.resize(sum(self._counts.values()))
        self._sketch.count(chunk.key)
        self.touch(chunk)

    def use(self, chunk: Victim) -> None:
        self._sketch.count(chunk.key)
        if chunk.place == _PROBATION:
            self._move(chunk, _PROTECTED)
        self.touch(chunk)

    def touch(self, chunk: Victim) -> None:
        self._clock += 1
        chunk.order = self._clock

    def _move(self, chunk: Victim, place: int) -> None:
        self._counts[chunk.place] -= 1
        self._counts[place] += 1
        chunk.place = place

    def add(self, chunk: Victim) -> None:
        if not chunk.queued:
            self._queues[chunk.place].push(chunk)

    def victim(self, evictable: Callable[[Victim], bool]) -> Victim | None:
        chunks = sum(self._counts.values())
        new = self._pop(_WINDOW, evictable) if self._counts[_WINDOW] * 100 > chunks else None
        while self._counts[_PROTECTED] * 5 > 4 * chunks:
            chunk = self._pop(_PROTECTED, evictable)
            if chunk is None:
                break
            self._move(chunk, _PROBATION)
            self.add(chunk)
        old = self._pop(_PROBATION, evictable) or self._pop(_PROTECTED, evictable)
        if new is None:
            return old or self._pop(_WINDOW, evictable)
        if old is None:
            return new
        if self._frequency(new) > self._frequency(old):
            self._move(new, _PROBATION)
            self.add(new)
            return old
        self.add(old)
        return new

    def _pop(self, place: int, evictable: Callable[[Victim], bool]) -> Victim | None:
        while True:
            chunk = self._queues[place].pop(evictable)
            if chunk is None or chunk.place == place:
                return chunk
            self.add(chunk)  # a use, or a child that went, has moved it

    def _frequency(self, chunk: Victim) -> int:
        return self._sketch.estimate(chunk.key) + chunk.uses

    def remove(self, chunk: Victim, evicted: bool) -> None:
        if chunk.queued:
            self._queues[chunk.queued].sweep()
        self._counts[chunk.place] -= 1
        self._room_made |= evicted
        before: Victim | None = chunk.parent
        if before is not None and not before.gone:
            before.order = max(before.order, chunk.order)
            before.uses = min(15, before.uses + self._frequency(chunk) - 1)  # insertion was no use of what is before it
            if before.place < chunk.place:
                self._move(before, chunk.place)


class Sketch:
    """How often each of many keys was counted, up to 15 and roughly (count-min); all halves now and then."""

    __slots__ = ("_additions", "_rows", "_width")

    _HALVED = bytes(value >> 1 for value in range(256))

    def __init__(self) -> None:
        self._width = 64
        self._rows = [bytearray(self._width) for _ in range(4)]
        self._additions = 0

    def resize(self, keys: int) -> None:
        """Make it wide enough for so many keys; what was counted stays."""
        while self._width < keys:
            self._width *= 2
            self._rows = [row + row for row in self._rows]

    def _cells(self, key: bytes) -> tuple[int, int, int, int]:
        mask = self._width - 1
        bits = crc32(key)  # hash() would differ from run to run
        return (
            bits * 0x9E3779B97F4A7C15 >> 32 & mask,
            bits * 0xC2B2AE3D27D4EB4F >> 32 & mask,
            bits * 0x165667B19E3779F9 >> 32 & mask,
            bits * 0x27D4EB2F165667C5 >> 32 & mask,
        )

    def count(self, key: bytes) -> None:
        for row, cell in zip(self._rows, self._cells(key), strict=True):
            if row[cell] < 15:
                row[cell] += 1
        self._additions += 1
        if self._additions >= 10 * self._width:
            self._additions //= 2
            self._rows = [row.translate(self._HALVED) for row in self._rows]

    def estimate(self, key: bytes) -> int:
        one, two, three, four = self._cells(key)
        rows = self._rows
        return min(rows[0][one], rows[1][two], rows[2][three], rows[3][four])


POLICIES: dict[str, Callable[[], Policy]] = {
    "adaptive": Adaptive,
    "ageing": Ageing,
    "lru": Lru,
    "s3fifo": S3Fifo,
    "wtinylfu": WTinyLfu,
}
