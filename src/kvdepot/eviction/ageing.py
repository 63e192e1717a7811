"""The policy `ageing`."""

from __future__ import annotations

import math
from collections.abc import Callable

from kvdepot.eviction.policy import Queue, Victim

__all__ = ["Ageing"]


class Ageing:
    """Least frequently used first; a use's weight halves every 0.3 turnovers of the cache (LRFU, Lee et al., 2001).

    `order` is the logarithm of the weighted sum of all uses. Weights grow with time instead of decaying, so `order`
    changes with uses only, and a parent's frequency is exactly the sum of its own and its descendants'.
    """

    _HALF_LIFE = 0.3
    """In turnovers. A longer one favours chunks that were popular long ago, such as finished chats; a much shorter one
    is LRU."""

    def __init__(self) -> None:
        self._clock = 0.0  # half-lives
        self._queue = Queue()
        self._chunks = 0

    def __repr__(self) -> str:
        return f"<Ageing {len(self._queue)} queued>"

    def insert(self, chunk: Victim) -> None:
        self._chunks += 1
        self._clock += 1 / (self._HALF_LIFE * self._chunks)
        chunk.order = self._clock

    def use(self, chunk: Victim) -> None:
        self._clock += _TICK
        chunk.order = _sum(chunk.order, self._clock)

    def touch(self, chunk: Victim) -> None:
        self._clock += _TICK
        chunk.order = max(chunk.order, self._clock)

    def add(self, chunk: Victim) -> None:
        if not chunk.queued:
            self._queue.push(chunk)

    def victim(self, evictable: Callable[[Victim], bool]) -> Victim | None:
        return self._queue.pop(evictable)

    def remove(self, chunk: Victim, evicted: bool) -> None:
        if chunk.queued:
            self._queue.sweep()
        self._chunks -= 1
        before: Victim | None = chunk.parent
        if before is not None:
            before.order = _sum(before.order, chunk.order)


_TICK = 1e-9
"""In half-lives: so small that it only orders the uses between two insertions."""


def _sum(one: float, other: float) -> float:
    """log2(2 ** one + 2 ** other)."""
    if one < other:
        one, other = other, one
    return one + math.log2(1 + 2.0 ** max(other - one, -60))
