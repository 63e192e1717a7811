"""How long chunks live in memory: their age and idle time when they are evicted, and the time until they are reused.

Used by core/index/index.py on the deciding thread; pure. Times are whole seconds of the wall clock.

A chunk's last use is its store, or the last request whose prefix ended with it or with a chunk behind it. A hit marks
only the end of the prefix, because a prompt may have hundreds of chunks; the mark passes to the chunk before when a
chunk is removed. So it is exact for chunks with nothing behind them, and only those can be evicted: the time until
reuse is taken of these alone. After a restart it is not known until the first use.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator

from kvdepot.core.histograms import AGES_S, Buckets
from kvdepot.core.index.chunk import Chunk

__all__ = ["SAMPLED", "Lifetimes"]

SAMPLED = 16
"""Of evictions, one in so many is counted: each would cost as much as a tenth of an eviction."""
_RECENT = 256
"""Idle times that `holds_s` is the median of."""


class Lifetimes:
    """The histograms of one index."""

    def __init__(self) -> None:
        self._ages = Buckets("eviction_age_seconds", "s", AGES_S)
        self._idle = Buckets("eviction_idle_seconds", "s", AGES_S)
        self._reuse = Buckets("reuse_after_seconds", "s", AGES_S)
        self._recent: deque[int] = deque(maxlen=_RECENT)

    def __repr__(self) -> str:
        return f"<Lifetimes {self._ages}, {self._reuse}>"

    def __iter__(self) -> Iterator[Buckets]:
        return iter((self._ages, self._idle, self._reuse))

    def evicted(self, chunk: Chunk, wall: int) -> None:
        """A sampled chunk is evicted."""
        self._ages.count(max(0, wall - chunk.born))
        if chunk.used_s:
            idle_s = max(0, wall - chunk.used_s)
            self._idle.count(idle_s)
            self._recent.append(idle_s)

    def reused(self, chunk: Chunk, wall: int) -> None:
        """A request hits the prefix that ends with this chunk; called before its last use is set."""
        if chunk.used_s and not chunk.children:
            self._reuse.count(max(0, wall - chunk.used_s))

    def holds_s(self) -> float | None:
        """Median idle time of recently evicted chunks; None if none was evicted."""
        return float(statistics.median(self._recent)) if self._recent else None
