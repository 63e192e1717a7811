"""Which objects of a disk tier have expired. Used by ledger.py under its lock; no system calls, no clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable

from kvdepot.tiers.disk.entry import Entry
from kvdepot.tiers.rules import Rules

__all__ = ["Expiry"]


class Expiry:
    """Objects by the time at which they expire. Those that never do take no memory here."""

    def __init__(self) -> None:
        self._rules = Rules()
        self._heap: list[tuple[float, int, Entry]] = []
        self._serials = itertools.count()
        self._most = 64  # entries, before those that are gone are dropped

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, rules: Rules, entries: Iterable[Entry]) -> None:
        """Other rules; `entries` are all objects. O(n) if other times to live follow from them."""
        is_new, self._rules = rules.ages != self._rules.ages, rules
        if is_new:
            self._heap.clear()
            for entry in entries:
                self.note(entry)

    def note(self, entry: Entry) -> None:
        """A new object, or one that is back."""
        ttl_s = self._rules.ttl_of(entry.name)
        if not ttl_s:
            return
        heapq.heappush(self._heap, (entry.born + ttl_s, next(self._serials), entry))
        if len(self._heap) > self._most:
            self._heap = [item for item in self._heap if not item[2].gone]
            heapq.heapify(self._heap)
            self._most = 2 * len(self._heap) + 64

    def due(self, wall: float) -> Entry | None:
        """Remove and return an object that has expired at `wall` (seconds since 1970); None if there is none."""
        while self._heap and self._heap[0][0] <= wall:
            entry = heapq.heappop(self._heap)[2]
            if not entry.gone:
                return entry
        return None
