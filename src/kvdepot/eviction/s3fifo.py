"""The policy `s3fifo`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from kvdepot.eviction.policy import Queue, Victim

__all__ = ["S3Fifo"]


_SMALL, _MAIN = 1, 2


class S3Fifo:
    """Two FIFO queues (Yang et al., SOSP 2023): new chunks pass through the small one, a tenth of all; only those that
    are used there, or come back soon after, enter the main one."""

    def __init__(self) -> None:
        self._clock = 0
        self._small = Queue(_SMALL)
        self._main = Queue(_MAIN)
        self._chunks = 0
        self._in_small = 0  # chunks that belong there, evictable or not
        # Keys recently evicted from the small queue, oldest first; at most as many as chunks. (Not a plain dict, which
        # finds its first key by skipping all deleted ones: removing many would be quadratic.)
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()

    def __repr__(self) -> str:
        return f"<S3Fifo {len(self._small) + len(self._main)} queued, {self._in_small} of {self._chunks} chunks small>"

    def insert(self, chunk: Victim) -> None:
        self._clock += 1
        self._chunks += 1
        chunk.order = self._clock
        chunk.uses = 0
        if chunk.key in self._ghosts:
            del self._ghosts[chunk.key]
            chunk.place = _MAIN
        else:
            chunk.place = _SMALL
            self._in_small += 1

    def use(self, chunk: Victim) -> None:
        if chunk.uses < 3:
            chunk.uses += 1

    def touch(self, chunk: Victim) -> None:
        self._clock += 1
        chunk.order = self._clock

    def add(self, chunk: Victim) -> None:
        if not chunk.queued:
            (self._small if chunk.place == _SMALL else self._main).push(chunk)

    def victim(self, evictable: Callable[[Victim], bool]) -> Victim | None:
        while True:
            chunk = self._small.pop(evictable) if self._in_small * 10 >= self._chunks else None
            chunk = chunk or self._main.pop(evictable) or self._small.pop(evictable)
            if chunk is None or not chunk.uses:
                return chunk
            if chunk.place == _SMALL:
                self._in_small -= 1
                chunk.place = _MAIN
                chunk.uses = 0
            else:
                chunk.uses -= 1
            self._clock += 1
            chunk.order = self._clock
            self._main.push(chunk)

    def remove(self, chunk: Victim, evicted: bool) -> None:
        if chunk.queued:
            (self._small if chunk.queued == _SMALL else self._main).sweep()
        self._chunks -= 1
        if chunk.place == _SMALL:
            self._in_small -= 1
            if evicted:
                self._ghosts[chunk.key] = None
        while len(self._ghosts) > self._chunks:
            self._ghosts.popitem(last=False)
        before: Victim | None = chunk.parent
        if before is not None and not before.gone:
            before.order = max(before.order, chunk.order)
            before.uses = min(3, before.uses + chunk.uses)
            if before.place < chunk.place:
                before.place = _MAIN
                self._in_small -= 1
