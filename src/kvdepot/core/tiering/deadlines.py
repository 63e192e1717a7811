"""What is due when: tier lookups and forgettings that must be answered in time. No clock here."""

from __future__ import annotations

import heapq
import itertools
from typing import NamedTuple, TypeAlias

from kvdepot.core.tiering.forgetting import Forgetting
from kvdepot.core.tiering.lookup import TierLookup

__all__ = ["Deadline", "Deadlines", "HalfTime", "Overdue"]


class HalfTime(NamedTuple):
    """A tier lookup goes on with what some tiers have answered."""

    of: TierLookup


class Overdue(NamedTuple):
    """It is answered now, whatever has not arrived."""

    of: TierLookup | Forgetting


Deadline: TypeAlias = HalfTime | Overdue


class Deadlines:
    """A heap of deadlines. Those of what has ended are dropped when they have come to its top."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Deadline]] = []
        self._numbers = itertools.count()  # of two that are due at once, the one that was added first comes first

    def __repr__(self) -> str:
        return f"<Deadlines {len(self)}>"

    def __len__(self) -> int:
        return len(self._heap)

    def next(self) -> float:
        """When the first is due; infinity: there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def pop(self) -> Deadline:
        """Take the first."""
        return heapq.heappop(self._heap)[2]

    def add(self, when: float, deadline: Deadline) -> None:
        while self._heap and self._heap[0][2].of.ended:
            heapq.heappop(self._heap)
        heapq.heappush(self._heap, (when, next(self._numbers), deadline))
