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
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

__all__ = ["POLICIES", "Lru", "Policy", "Victim"]


class Victim(msgspec.Struct, gc=False):
    """What a policy needs to know of a chunk, and what it notes on it; index.Chunk is one."""

    key: bytes = b""
    parent: Any = None
    """The chunk before it in its chain, where known. It is there at least as long as this one."""
    used: int = 0
    """Its date, by the policy's clock."""
    uses: int = 0
    """How often it was used, as the policy counts."""
    place: int = 0
    """Which of the policy's queues it belongs to."""
    queued: bool = False
    """Whether a queue of the policy holds it."""
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


class Queue:
    """Chunks in the order of `used`, each at most once.

    A heap that is corrected when a chunk comes up: using a chunk only writes its date, so a hit costs O(1), and every
    use is paid for by at most one later correction, O(log n). What is not evictable when it comes up is dropped and
    comes back through `push`; what is gone is swept out once it is more than half.
    """

    __slots__ = ("_gone", "_heap", "_serial")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Victim]] = []
        self._serial = 0  # equal dates go in the order in which they came
        self._gone = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, chunk: Victim) -> None:
        chunk.queued = True
        self._serial += 1
        heapq.heappush(self._heap, (chunk.used, self._serial, chunk))

    def pop(self, evictable: Callable[[Victim], bool]) -> Victim | None:
        """The one with the lowest date."""
        heap = self._heap
        while heap:
            used, _, chunk = heap[0]
            if chunk.gone:
                self._gone -= 1
            elif chunk.used > used and evictable(chunk):
                self._serial += 1
                heapq.heapreplace(heap, (chunk.used, self._serial, chunk))
                continue
            heapq.heappop(heap)
            chunk.queued = False
            if not chunk.gone and evictable(chunk):
                return chunk
        return None

    def sweep(self) -> None:
        """One of those queued is gone."""
        self._gone += 1
        if self._gone > 16 + len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if not entry[2].gone]
            heapq.heapify(self._heap)
            self._gone = 0


class Lru:
    """Least recently used first."""

    def __init__(self) -> None:
        self._clock = 0
        self._queue = Queue()

    def __repr__(self) -> str:
        return f"<Lru {len(self._queue)} queued>"

    def insert(self, chunk: Victim) -> None:
        self._clock += 1
        chunk.used = self._clock

    def use(self, chunk: Victim) -> None:
        self._clock += 1
        chunk.used = self._clock

    def touch(self, chunk: Victim) -> None:
        self._clock += 1
        chunk.used = self._clock

    def add(self, chunk: Victim) -> None:
        if not chunk.queued:
            self._queue.push(chunk)

    def victim(self, evictable: Callable[[Victim], bool]) -> Victim | None:
        return self._queue.pop(evictable)

    def remove(self, chunk: Victim, evicted: bool) -> None:
        if chunk.queued:
            self._queue.sweep()
        before: Victim | None = chunk.parent
        if before is not None and before.used < chunk.used:
            before.used = chunk.used


POLICIES: dict[str, Callable[[], Policy]] = {"lru": Lru}
