"""The policy `wtinylfu`, and the sketch with which it counts uses."""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

from kvdepot.eviction.policy import Queue, Victim

__all__ = ["WTinyLfu"]


_WINDOW, _PROBATION, _PROTECTED = 1, 2, 3


class WTinyLfu:
    """New chunks enter a window, a hundredth of all; one that leaves it stays only if it was used more often than the
    main part's victim (Einziger et al., ACM ToS 2017). The main part is a segmented LRU; a sketch counts uses."""

    def __init__(self) -> None:
        self._clock = 0
        self._queues = {place: Queue(place) for place in (_WINDOW, _PROBATION, _PROTECTED)}
        self._counts = {_WINDOW: 0, _PROBATION: 0, _PROTECTED: 0}  # chunks that belong there, evictable or not
        self._sketch = Sketch()
        self._room_made = False  # whether a chunk was evicted since the last insertion

    def __repr__(self) -> str:
        return f"<WTinyLfu {sum(map(len, self._queues.values()))} queued, {self._counts} chunks>"

    def insert(self, chunk: Victim) -> None:
        chunk.place = _WINDOW if self._room_made else _PROBATION  # it need not pass the window while there is room
        self._room_made = False
        self._counts[chunk.place] += 1
        chunk.uses = 0
        self._sketch.resize(sum(self._counts.values()))
        self._sketch.count(chunk.key)
        self.touch(chunk)

    def use(self, chunk: Victim) -> None:
        self._sketch.count(chunk.key)
        if chunk.place == _PROBATION:
            self._move(chunk, _PROTECTED)
        self.touch(chunk)

    def touch(self, chunk: Victim) -> None:
        self._clock += 1
        chunk.order = self._clock

    def _move(self, chunk: Victim, place: int) -> None:
        self._counts[chunk.place] -= 1
        self._counts[place] += 1
        chunk.place = place

    def add(self, chunk: Victim) -> None:
        if not chunk.queued:
            self._queues[chunk.place].push(chunk)

    def victim(self, evictable: Callable[[Victim], bool]) -> Victim | None:
        chunks = sum(self._counts.values())
        new = self._pop(_WINDOW, evictable) if self._counts[_WINDOW] * 100 > chunks else None
        while self._counts[_PROTECTED] * 5 > 4 * chunks:
            chunk = self._pop(_PROTECTED, evictable)
            if chunk is None:
                break
            self._move(chunk, _PROBATION)
            self.add(chunk)
        old = self._pop(_PROBATION, evictable) or self._pop(_PROTECTED, evictable)
        if new is None:
            return old or self._pop(_WINDOW, evictable)
        if old is None:
            return new
        if self._frequency(new) > self._frequency(old):
            self._move(new, _PROBATION)
            self.add(new)
            return old
        self.add(old)
        return new

    def _pop(self, place: int, evictable: Callable[[Victim], bool]) -> Victim | None:
        while True:
            chunk = self._queues[place].pop(evictable)
            if chunk is None or chunk.place == place:
                return chunk
            self.add(chunk)  # a use, or the removal of a child, has moved it

    def _frequency(self, chunk: Victim) -> int:
        return self._sketch.estimate(chunk.key) + chunk.uses

    def remove(self, chunk: Victim, evicted: bool) -> None:
        if chunk.queued:
            self._queues[chunk.queued].sweep()
        self._counts[chunk.place] -= 1
        self._room_made |= evicted
        before: Victim | None = chunk.parent
        if before is not None and not before.gone:
            before.order = max(before.order, chunk.order)
            before.uses = min(15, before.uses + self._frequency(chunk) - 1)  # its insertion was not a use of the parent
            if before.place < chunk.place:
                self._move(before, chunk.place)


class Sketch:
    """A count-min sketch: approximate counts of many keys, up to 15; all are halved from time to time."""

    __slots__ = ("_additions", "_rows", "_width")

    _HALVED = bytes(value >> 1 for value in range(256))

    def __init__(self) -> None:
        self._width = 64
        self._rows = [bytearray(self._width) for _ in range(4)]
        self._additions = 0

    def resize(self, keys: int) -> None:
        """Make it wide enough for this number of keys; keeps the counts."""
        while self._width < keys:
            self._width *= 2
            self._rows = [row + row for row in self._rows]

    def _cells(self, key: bytes) -> tuple[int, int, int, int]:
        mask = self._width - 1
        bits = crc32(key)  # hash() differs between processes
        return (
            bits * 0x9E3779B97F4A7C15 >> 32 & mask,
            bits * 0xC2B2AE3D27D4EB4F >> 32 & mask,
            bits * 0x165667B19E3779F9 >> 32 & mask,
            bits * 0x27D4EB2F165667C5 >> 32 & mask,
        )

    def count(self, key: bytes) -> None:
        for row, cell in zip(self._rows, self._cells(key), strict=True):
            if row[cell] < 15:
                row[cell] += 1
        self._additions += 1
        if self._additions >= 10 * self._width:
            self._additions //= 2
            self._rows = [row.translate(self._HALVED) for row in self._rows]

    def estimate(self, key: bytes) -> int:
        one, two, three, four = self._cells(key)
        rows = self._rows
        return min(rows[0][one], rows[1][two], rows[2][three], rows[3][four])
