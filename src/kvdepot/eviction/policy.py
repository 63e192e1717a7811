"""Which chunk goes first when space is needed. Pure; called by the index and by bounded tiers, on the deciding thread.

A policy is told of every chunk that comes (`insert`), is used (`use`), may be evicted (`add`) and leaves (`remove`),
and names a victim. It never names one that `evictable` refuses: pinned, being copied, or with a chunk behind it in its
chain. So a chain always loses its tail first, whatever the policy.

**Chains.** A request that hits a chain uses its deepest chunk only, though it needs all before it as much. That is
made up when a chunk leaves: what it knew (when, how often it was used) goes to its parent, which can be evicted only
from then on. A tier without chains leaves `parent` None.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

import msgspec

__all__ = ["Policy", "Queue", "Victim"]


class Victim(msgspec.Struct, gc=False):
    """What a policy needs to know of a chunk, and what it notes on it; core/index/chunk.py has one."""

    key: bytes = b""
    parent: Victim | None = None
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
    """What core/index/index.py asks of an eviction policy. No call may change the chunk's key or parent."""

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
