"""Expiry of chunks by age: those of one account, or of one cache salt. Used by core/index/; pure."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from kvdepot.core.index.chunk import Chunk

__all__ = ["Ages"]


class Ages:
    """When chunks were computed, the oldest first. `ttl_s`, after which they expire, may change at any time."""

    def __init__(self, ttl_s: int) -> None:
        """ttl_s: 0 = chunks never expire."""
        self.ttl_s = ttl_s
        self._heap: list[tuple[int, int, Chunk]] = []
        self._serials = itertools.count()
        self._most = 64  # entries, before those that are outdated are dropped

    def __len__(self) -> int:
        return len(self._heap)

    def note(self, chunk: Chunk) -> None:
        """Record the age of `chunk`, or its new age."""
        if not self.ttl_s:
            return
        if len(self._heap) >= self._most:  # chunks may be gone, noted twice, or have another age now
            kept = (entry for entry in self._heap if not entry[2].gone and entry[0] == entry[2].born)
            self._heap = list({id(entry[2]): entry for entry in kept}.values())
            heapq.heapify(self._heap)
            self._most = 2 * len(self._heap) + 64
        heapq.heappush(self._heap, (chunk.born, next(self._serials), chunk))

    def due(self, wall: int) -> Iterator[Chunk]:
        """Remove and yield the chunks that are too old at `wall` (seconds since 1970) and not gone."""
        while self.ttl_s and self._heap and self._heap[0][0] + self.ttl_s <= wall:
            chunk = heapq.heappop(self._heap)[2]
            if not chunk.gone and chunk.born + self.ttl_s <= wall:
                yield chunk
