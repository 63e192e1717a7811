"""Expiry by age: chunks in memory and objects of a disk tier, by the time at which they expire. Pure."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

__all__ = ["Ages"]


class _Aging(Protocol):
    """An entry that may expire."""

    @property
    def born(self) -> float:
        """When its contents were computed: seconds since 1970."""

    @property
    def gone(self) -> bool: ...


AgingT = TypeVar("AgingT", bound=_Aging)


class Ages(Generic[AgingT]):
    """Entries by the time at which they expire; those that never do take no memory here.

    The heap is corrected lazily: an entry whose time to live has become longer moves when its old time has come. The
    caller records entries again whose time to live has become shorter.
    """

    def __init__(self, ttl_of: Callable[[AgingT], int]) -> None:
        """ttl_of: seconds after which an entry expires at present; 0: never."""
        self._ttl_of = ttl_of
        self._heap: list[tuple[float, int, AgingT]] = []
        self._serials = itertools.count()
        self._most = 64  # items, before those that are outdated are dropped

    def __len__(self) -> int:
        return len(self._heap)

    def record(self, entry: AgingT) -> None:
        """Note when an entry expires: it is new, or is back, or expires sooner than it did."""
        if ttl_s := self._ttl_of(entry):
            heapq.heappush(self._heap, (entry.born + ttl_s, next(self._serials), entry))
            if len(self._heap) > self._most:
                self._drop_outdated()

    def _drop_outdated(self) -> None:
        entries = {id(entry): entry for _, _, entry in self._heap if not entry.gone}  # some were recorded twice
        timed = [(entry, self._ttl_of(entry)) for entry in entries.values()]
        self._heap = [(entry.born + ttl_s, next(self._serials), entry) for entry, ttl_s in timed if ttl_s]
        heapq.heapify(self._heap)
        self._most = 2 * len(self._heap) + 64

    def due(self, wall: float) -> Iterator[AgingT]:
        """Remove and yield the entries that have expired at `wall` (seconds since 1970) and are not gone."""
        while self._heap and self._heap[0][0] <= wall:
            entry = heapq.heappop(self._heap)[2]
            ttl_s = 0 if entry.gone else self._ttl_of(entry)
            if ttl_s and entry.born + ttl_s <= wall:
                yield entry
            elif ttl_s:
                heapq.heappush(self._heap, (entry.born + ttl_s, next(self._serials), entry))
