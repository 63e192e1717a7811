"""The deadlines of tier lookups and forgettings, in order. No clock here."""

from __future__ import annotations

import heapq
import itertools
from typing import NamedTuple, TypeAlias

from kvdepot.core.tiering.forgetting import Forgetting
from kvdepot.core.tiering.lookup import TierLookup

__all__ = ["Deadline", "Deadlines", "HalfTime", "Overdue"]


class HalfTime(NamedTuple):
    """Half of a tier lookup's time is over: it continues with the answers it has."""

    of: TierLookup


class Overdue(NamedTuple):
    """The time is over: the reply is due, even if something has not arrived."""

    of: TierLookup | Forgetting


Deadline: TypeAlias = HalfTime | Overdue


class Deadlines:
    """A heap of deadlines. `add` drops those at the top whose subject has ended; `pop` may return one."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Deadline]] = []
        self._numbers = itertools.count()  # deadlines at the same time stay in the order of `add`

    def __repr__(self) -> str:
        return f"<Deadlines {len(self)}>"

    def __len__(self) -> int:
        return len(self._heap)

    def next(self) -> float:
        """When the earliest is due; infinity if there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def pop(self) -> Deadline:
        """Remove and return the earliest."""
        return heapq.heappop(self._heap)[2]

    def add(self, when: float, deadline: Deadline) -> None:
        while self._heap and self._heap[0][2].of.ended:
            heapq.heappop(self._heap)
        heapq.heappush(self._heap, (when, next(self._numbers), deadline))
