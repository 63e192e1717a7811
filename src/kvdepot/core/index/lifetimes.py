"""Lifetimes of chunks in memory: their age and idle time when they are evicted, and the time until they are reused.

A reader of the index's events; pure. Times are whole seconds of the wall clock.

A chunk's last use is its store, or the last request whose prefix ended with it or with a chunk behind it. A hit marks
only the end of the prefix, because a prompt may have hundreds of chunks; the mark passes to the chunk before when a
chunk is removed. So the last use is exact for chunks with nothing behind them. Only those can be evicted, and only
their times until reuse are counted. After a restart, the last use is not known until the first use.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from kvdepot.core.histograms import AGES_S, Buckets
from kvdepot.core.index.events import IndexEvent, Reason, Removed, Used
from kvdepot.protocol.status import Status

_SAMPLED = 16
_RECENT = 256
"""The number of latest idle times whose median is `holds_s`."""


class Lifetimes:
    def __init__(self) -> None:
        self._ages = Buckets("eviction_age_seconds", "s", AGES_S)
        self._idle = Buckets("eviction_idle_seconds", "s", AGES_S)
        self._reuse = Buckets("reuse_after_seconds", "s", AGES_S)
        self._evicted = 0
        self._recent: deque[int] = deque(maxlen=_RECENT)

    def read(self, events: Sequence[IndexEvent], wall: int) -> None:
        """Count uses, and one eviction in 16, because counting all evictions would make them 10 % slower."""
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
                        self._ages.count(max(0, wall - chunk.born))
                        if chunk.used_s:
                            self._idle.count(idle_s := max(0, wall - chunk.used_s))
                            self._recent.append(idle_s)

    def fill(self, status: Status) -> None:
        status.holds_s = float(statistics.median(self._recent)) if self._recent else None
        status.histograms += [each.figure() for each in (self._ages, self._idle, self._reuse)]
