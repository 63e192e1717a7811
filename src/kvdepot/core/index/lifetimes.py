"""Lifetimes of chunks in memory: their age and idle time when they are evicted, and the time until they are reused.

A listener of the index's events; pure. Times are whole seconds of the wall clock.

A chunk's last use is its store, or the last request whose prefix ended with it or with a chunk behind it. A hit marks
only the end of the prefix, because a prompt may have hundreds of chunks; the mark passes to the chunk before when a
chunk is removed. So it is exact for chunks with nothing behind them, and only those can be evicted: the time until
reuse is taken of these alone. After a restart it is not known until the first use.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NoReturn

from kvdepot.core.histograms import AGES_S, Buckets
from kvdepot.core.index.chunk import Chunk
from kvdepot.core.index.events import IndexEvent, Reason, Removed, Used

_SAMPLED = 16
_RECENT = 256
"""Idle times that `holds_s` is the median of."""


class Lifetimes:
    def __init__(self) -> None:
        self._ages = Buckets("eviction_age_seconds", "s", AGES_S)
        self._idle = Buckets("eviction_idle_seconds", "s", AGES_S)
        self._reuse = Buckets("reuse_after_seconds", "s", AGES_S)
        self.wall = 0  # set once a second
        self._evicted = 0
        self._recent: deque[int] = deque(maxlen=_RECENT)

    def __iter__(self) -> Iterator[Buckets]:
        return iter((self._ages, self._idle, self._reuse))

    def notice(self, events: Sequence[IndexEvent], now: float) -> Sequence[NoReturn]:
        """Count uses and evictions of chunks, one eviction in 16: counting all would make them 10 % slower."""
        wall = self.wall
        for event in events:
            if type(event) is Used:  # `match` takes three times as long, and each lookup waits for it
                end = event.chunks[-1]
                if end.used_s and not end.children:
                    self._reuse.count(max(0, wall - end.used_s))
                for chunk in event.chunks:
                    chunk.used_s = wall
            elif type(event) is Removed:
                chunk, parent = event.chunk, event.parent
                if parent is not None and parent.used_s < chunk.used_s:
                    parent.used_s = chunk.used_s
                if event.reason is Reason.EVICTED:
                    self._evicted += 1
                    if not self._evicted % _SAMPLED:
                        self._count_eviction(chunk)
        return ()

    def _count_eviction(self, chunk: Chunk) -> None:
        self._ages.count(max(0, self.wall - chunk.born))
        if chunk.used_s:
            idle_s = max(0, self.wall - chunk.used_s)
            self._idle.count(idle_s)
            self._recent.append(idle_s)

    def holds_s(self) -> float | None:
        """Median idle time of recently evicted chunks; None if none was evicted."""
        return float(statistics.median(self._recent)) if self._recent else None
