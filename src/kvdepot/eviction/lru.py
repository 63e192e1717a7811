"""The policy `lru`."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from kvdepot.eviction.policy import Victim

_MOVED = 4
"""The number of entries that one removal moves to the new heap."""


class Lru:
    """Least recently used first.

    A heap that is corrected lazily: using a chunk only changes its date, and each use causes at most one later
    correction, O(log n), when the chunk reaches the top. A chunk that is not evictable then leaves the heap until
    `add`. When more than half of the entries are of removed chunks, the others move to a new heap, a few with each
    removal.
    """

    def __init__(self) -> None:
        self._clock = 0
        self._heap: list[tuple[float, int, Victim]] = []
        self._old: list[tuple[float, int, Victim]] = []  # a heap too, emptied from its end
        self._serial = 0  # orders equal dates by the time of their push
        self._gone = 0  # entries of removed chunks in both heaps

    @property
    def queued(self) -> int:
        return len(self._heap) + len(self._old)

    def insert(self, chunks: Sequence[Victim]) -> None:
        for chunk in reversed(chunks):  # the first chunk gets the latest date, so that the last is evicted first
            self._clock += 1
            chunk.order = self._clock

    def use(self, chunk: Victim) -> None:
        self._clock += 1
        chunk.order = self._clock

    def add(self, chunk: Victim) -> None:
        if not chunk.queued:
            chunk.queued = True
            self._serial += 1
            heapq.heappush(self._heap, (chunk.order, self._serial, chunk))

    def victim(self, evictable: Callable[[Victim], bool]) -> Victim | None:
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
            chunk.queued = False
            if not chunk.gone and evictable(chunk):
                return chunk

    def remove(self, chunk: Victim, evicted: bool) -> None:
        if chunk.queued:
            self._sweep()
        before: Victim | None = chunk.parent
        if before is not None and before.order < chunk.order:
            before.order = chunk.order

    def _sweep(self) -> None:
        """Count the entry of a queued chunk that is gone, and discard a few such entries."""
        self._gone += 1
        if not self._old and self._gone > 4 + len(self._heap) // 2:
            self._old, self._heap = self._heap, []
        for _ in range(min(_MOVED, len(self._old))):
            entry = self._old.pop()
            if entry[2].gone:
                self._gone = max(0, self._gone - 1)
                entry[2].queued = False  # it may return, as an object does that a disk could not remove
            else:
                heapq.heappush(self._heap, entry)
