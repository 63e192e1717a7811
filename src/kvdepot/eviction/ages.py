"""Expiry by age: chunks in memory and objects of a disk tier, by the time at which they expire. Pure."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

SKEW_S = 60
"""Seconds by which the clocks of hosts that share a tier may differ. An entry with a later date has no known age."""
_LEAST_STEP_S = 10.0
_MOVED = 16
"""The number of items that one record moves to the new heap. To move all at once would take a second per million."""


class _Aging(Protocol):
    expires: float
    """The time of the entry's item in `Ages`, seconds since 1970; 0: it has no item."""

    @property
    def born(self) -> float:
        """When the entry's contents were computed, seconds since 1970."""

    @property
    def gone(self) -> bool: ...


class WallClock:
    """Notices that the wall clock was set back. If the caller then makes all entries older by the same time, setting a
    clock never makes an entry live longer: the wall clock or the monotonic one decides, whichever is ahead."""

    def __init__(self) -> None:
        self._ahead = float("-inf")  # seconds by which it was ahead of the monotonic clock

    @property
    def is_new(self) -> bool:
        """Whether the wall clock has not been read yet."""
        return self._ahead == float("-inf")

    def set_back(self, now: float, wall: float) -> float:
        """Seconds by which the wall clock was set back since the last call. now: seconds of a monotonic clock."""
        back = self._ahead - (wall - now)
        if 0 < back < _LEAST_STEP_S:
            return 0.0
        self._ahead = wall - now
        return max(0.0, back)


AgingT = TypeVar("AgingT", bound=_Aging)


class Ages(Generic[AgingT]):
    """Entries by the time at which they expire. Entries that never expire take no memory here.

    The heap is corrected lazily: an entry whose time to live has become longer moves when its old time has come. An
    entry whose time to live has become shorter is recorded again. Its earlier item is then outdated, as is the item of
    an entry that is gone. When half of the items may be outdated, the others move to a new heap, a few with each
    record.
    """

    def __init__(self, ttl_of: Callable[[AgingT], int]) -> None:
        """ttl_of: returns the seconds after which an entry now expires; 0: never."""
        self._ttl_of = ttl_of
        self._heap: list[tuple[float, int, AgingT]] = []
        self._old: list[tuple[float, int, AgingT]] = []  # a heap too, emptied from its end
        self._serials = itertools.count()
        self._most = 64  # items at which outdated ones are dropped

    def __len__(self) -> int:
        return len(self._heap) + len(self._old)

    def record(self, entry: AgingT) -> None:
        """Note when an entry expires. Called if it is new, is stored again, or expires sooner than before."""
        ttl_s = self._ttl_of(entry)
        if not ttl_s or 0 < entry.expires <= entry.born + ttl_s:
            return
        self._push(entry, entry.born + ttl_s)
        if not self._old and len(self._heap) > self._most:
            self._old, self._heap = self._heap, []
        if self._old:
            self._sweep()

    def _push(self, entry: AgingT, when: float) -> None:
        entry.expires = when
        heapq.heappush(self._heap, (when, next(self._serials), entry))

    def _sweep(self) -> None:
        """Move some items to the new heap, and drop those that are outdated."""
        for _ in range(min(_MOVED, len(self._old))):
            item = self._old.pop()
            when, _, entry = item
            if entry.gone and entry.expires == when:
                entry.expires = 0.0  # it may return: a disk's object that could not be removed does
            elif entry.expires == when:
                heapq.heappush(self._heap, item)
        if not self._old:
            self._most = 2 * len(self._heap) + 64

    def due(self, wall: float) -> Iterator[AgingT]:
        """Remove and yield the entries that have expired at `wall` (seconds since 1970) and are not gone."""
        while True:
            heap, old = self._heap, self._old
            if old and (not heap or old[0] < heap[0]):
                heap = old
            if not heap or heap[0][0] > wall:
                return
            when, _, entry = heapq.heappop(heap)
            if entry.expires != when:
                continue
            entry.expires = 0.0
            ttl_s = 0 if entry.gone else self._ttl_of(entry)
            if ttl_s and entry.born + ttl_s <= wall:
                yield entry
            elif ttl_s:
                self._push(entry, entry.born + ttl_s)
