"""The policy `lru`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvdepot.eviction.policy import Queue, Victim

__all__ = ["Lru"]


class Lru:
    """Least recently used first."""

    def __init__(self) -> None:
        self._clock = 0
        self._queue = Queue()

    def __repr__(self) -> str:
        return f"<Lru {len(self._queue)} queued>"

    def insert(self, chunks: Sequence[Victim]) -> None:
        for chunk in reversed(chunks):  # the head last, so that the tail is evicted first
            self._clock += 1
            chunk.order = self._clock

    def use(self, chunk: Victim) -> None:
        self._clock += 1
        chunk.order = self._clock

    def add(self, chunk: Victim) -> None:
        if not chunk.queued:
            self._queue.push(chunk)

    def victim(self, evictable: Callable[[Victim], bool]) -> Victim | None:
        return self._queue.pop(evictable)

    def remove(self, chunk: Victim, evicted: bool) -> None:
        if chunk.queued:
            self._queue.sweep()
        before: Victim | None = chunk.parent
        if before is not None and before.order < chunk.order:
            before.order = chunk.order
