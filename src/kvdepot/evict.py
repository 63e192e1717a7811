"""Which chunk goes first when space is needed. Pure; called by index.py on the deciding thread.

A policy sees chunks enter (`add`), be used (`touch`) and leave (`remove`), and names a victim. It never
names one that `evictable` refuses: pinned, being copied, or with a chunk behind it in its chain. So a chain
always loses its tail first, whatever the policy. Policies are found by name in `POLICIES`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

import msgspec

__all__ = ["POLICIES", "Lru", "Policy", "Victim"]


class Victim(msgspec.Struct, gc=False):
    """What a policy needs to know of a chunk; index.Chunk is one."""

    used: int = 0
    """When it was last used, as a running number."""
    queued: bool = False
    """Whether the policy's queue holds it."""
    gone: bool = False


class Policy(Protocol):
    """What index.py asks of an eviction policy."""

    def add(self, chunk: Victim) -> None:
        """`chunk` may be evicted from now on, or again."""

    def touch(self, chunk: Victim) -> None:
        """`chunk` was used."""

    def victim(self, evictable: Callable[[Victim], bool]) -> Victim | None:
        """The chunk to evict next, or None when there is none. It is out of the policy's queue then."""


class Lru:
    """Least recently used first.

    A heap with one entry a chunk, corrected when it comes up: using a chunk only writes its number, so a
    hit costs O(1), and every use is paid for by at most one later correction, O(log n).
    """

    def __init__(self) -> None:
        self._clock = 0
        self._heap: list[tuple[int, int, Victim]] = []
        self._serial = 0

    def __repr__(self) -> str:
        return f"<Lru {len(self._heap)} queued>"

    def add(self, chunk: Victim) -> None:
        if not chunk.queued:
            chunk.queued = True
            self._push(chunk)

    def _push(self, chunk: Victim) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (chunk.used, self._serial, chunk))

    def touch(self, chunk: Victim) -> None:
        self._clock += 1
        chunk.used = self._clock

    def victim(self, evictable: Callable[[Victim], bool]) -> Victim | None:
        while self._heap:
            used, _, chunk = heapq.heappop(self._heap)
            chunk.queued = False
            if chunk.gone or not evictable(chunk):
                continue  # it comes back through `add` when it may be evicted again
            if chunk.used > used:
                chunk.queued = True
                self._push(chunk)
                continue
            return chunk
        return None


POLICIES: dict[str, Callable[[], Policy]] = {"lru": Lru}
