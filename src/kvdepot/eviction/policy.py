"""The interface of eviction policies, and a queue that they share. No I/O; see __init__.py for the callers.

The index calls a policy when chunks are inserted (`insert`), and when one is used (`use`), becomes evictable (`add`)
and is removed (`remove`), and asks it for a victim. A policy never names a chunk that `evictable` refuses: one that is
pinned, being copied, or has a chunk behind it. So a chain always loses its tail first, whatever the policy.

**Chains.** A request that hits a chain uses its deepest chunk only, although it needs the whole chain. To make up for
that, a chunk's date and uses pass to its parent when the chunk is removed, which is also when the parent may become
evictable. A tier without chains leaves `parent` None.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

__all__ = ["Policy", "Queue", "Victim"]


class Victim(msgspec.Struct, gc=False):
    """A policy's view of a chunk, and the policy's own fields on it. core/index/chunk.py extends it."""

    key: bytes = b""
    parent: Victim | None = None
    """The chunk before it in its chain, if known. It exists at least as long as this one."""
    order: float = 0
    """Its date, in the policy's own measure; a queue evicts the lowest first."""
    uses: int = 0
    """How often it was used, in the policy's own measure."""
    place: int = 0
    """The part of the policy that it belongs to."""
    queued: int = 0
    """The number of the queue that holds it, from 1; 0 = none."""
    gone: bool = False


class Policy(Protocol):
    """The interface of an eviction policy. A policy must not change a chunk's key or parent."""

    def insert(self, chunks: Sequence[Victim]) -> None:
        """`chunks`, each behind the one before it, are new, or back after they were removed. The first call for them;
        they are not evictable before `add`, and of loose ones the last goes first."""

    def use(self, chunk: Victim) -> None:
        """A request hit `chunk`. Called once per request."""

    def add(self, chunk: Victim) -> None:
        """`chunk` may have become evictable, because a hold or child was removed. It may be queued already."""

    def victim(self, evictable: Callable[[Victim], bool]) -> Victim | None:
        """Take the chunk to evict next out of its queue; None if there is none.

        The caller then calls `remove`, or, if it keeps the chunk, `add`, which restores its old place.
        """

    def remove(self, chunk: Victim, evicted: bool) -> None:
        """`chunk` is removed, queued or not; `gone` is set and the parent is still known.

        evicted: to make room, so it may be missed; otherwise it was dropped, or its copy failed.
        """


_MOVED = 4
"""Entries that a queue moves at once while it discards those that are gone."""


class Queue:
    """Chunks by `order`, each at most once.

    A heap that is corrected lazily: using a chunk only changes its date, so a hit costs O(1), and each use causes at
    most one later correction, O(log n), when the chunk reaches the top. A chunk that is not evictable then is dropped,
    and returns by `push`. When more than half of the entries are gone, the others move to a new heap, a few with each
    removal, because moving hundreds of thousands at once would stop the server for a tenth of a second.
    """

    __slots__ = ("_gone", "_heap", "_number", "_old", "_serial")

    def __init__(self, number: int = 1) -> None:
        self._number = number
        self._heap: list[tuple[float, int, Victim]] = []
        self._old: list[tuple[float, int, Victim]] = []  # a heap too, emptied from its end
        self._serial = 0  # orders equal dates by the time of their push
        self._gone = 0  # entries in both heaps

    def __len__(self) -> int:
        return len(self._heap) + len(self._old)

    def push(self, chunk: Victim) -> None:
        chunk.queued = self._number
        self._serial += 1
        heapq.heappush(self._heap, (chunk.order, self._serial, chunk))

    def pop(self, evictable: Callable[[Victim], bool]) -> Victim | None:
        """Take out the evictable chunk with the lowest date; None if there is none."""
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
        """A queued chunk is gone: count it, and discard such entries gradually."""
        self._gone += 1
        if not self._old and self._gone > 4 + len(self._heap) // 2:
            self._old, self._heap = self._heap, []
        for _ in range(min(_MOVED, len(self._old))):
            entry = self._old.pop()
            if entry[2].gone:
                self._gone = max(0, self._gone - 1)
                entry[2].queued = 0  # it may return: a disk's object that could not be removed does
            else:
                heapq.heappush(self._heap, entry)
