"""The allocator: which bytes of the arena are free. No I/O; called by core/index/ on the deciding thread.

Invariant: a request for `n` bytes succeeds whenever `n` bytes are free. An allocation may consist of several extents;
it is one if one of a larger size class is free. Extents are multiples of a page, adjacent free ones are joined at once
and kept by size class (powers of two), so allocating and freeing are O(1) in the usual case.
"""

from __future__ import annotations

from collections.abc import Iterable

PAGE = 4096

Extents = tuple[tuple[int, int], ...]
"""`((offset, bytes), ...)` in the order in which a chunk's bytes fill them."""


class Allocator:
    __slots__ = ("_by_class", "_ends", "_starts", "capacity", "end", "free_bytes", "start")

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.capacity = (end - start) // PAGE * PAGE
        assert self.capacity > 0, f"no whole page in [{start}, {end})"
        self.end = start + self.capacity
        self.free_bytes = 0
        self._starts: dict[int, int] = {}  # start of a free extent -> bytes
        self._ends: dict[int, int] = {}  # end of a free extent -> its start
        self._by_class: list[dict[int, None]] = [{} for _ in range(self.capacity.bit_length() + 1)]
        self._insert(self.start, self.capacity)

    def __repr__(self) -> str:
        return f"<Allocator {self.free_bytes} of {self.capacity} bytes free in {len(self._starts)} extents>"

    @staticmethod
    def rounded(size: int) -> int:
        return -(-size // PAGE) * PAGE

    def allocate(self, size: int) -> Extents | None:
        """Allocate `size` bytes (rounded up to pages); None if fewer are free."""
        assert size > 0, size
        need = self.rounded(size)
        if need > self.free_bytes:
            return None
        taken = []
        while need:
            start, length = self._take(need)
            used = min(length, need)
            if length > used:
                self._insert(start + used, length - used)
            taken.append((start, used))
            need -= used
        return tuple(taken)

    def allocate_run(self, size: int, count: int) -> list[Extents]:
        """Allocate `count` times `size` bytes, which must be free; next to each other, if an extent is that long."""
        if count <= 0:
            return []
        need = self.rounded(size)
        whole = self.allocate(need * count)
        assert whole is not None, f"{count} times {need} bytes of {self!r}"
        if len(whole) == 1:
            start = whole[0][0]
            return [((at, need),) for at in range(start + need * (count - 1), start - 1, -need)]
        taken: list[Extents] = []
        left = list(reversed(whole))
        for _ in range(count):
            pieces, missing = [], need
            while missing:
                start, length = left.pop()
                used = min(missing, length)
                pieces.append((start, used))
                missing -= used
                if used < length:
                    left.append((start + used, length - used))
            taken.append(tuple(pieces))
        return taken[::-1]

    def free(self, extents: Extents) -> None:
        for start, length in extents:
            end = start + length
            assert self.start <= start < end <= self.end, (start, length)
            assert start not in self._starts and end not in self._ends, f"freed twice: {start}+{length}"
            before = self._ends.get(start)
            if before is not None:
                self._remove(before, start - before)
                start = before
            after = self._starts.get(end)
            if after is not None:
                self._remove(end, after)
                end += after
            self._insert(start, end - start)

    def occupy(self, taken: Iterable[tuple[int, int, int]]) -> None:
        """Allocate these extents `(offset, bytes, ignored)`: ascending, disjoint; all must still be free. O(n)."""
        assert self.free_bytes == self.capacity
        self._remove(self.start, self.capacity)
        at = self.start
        for start, length, _ in (*taken, (self.end, 0, 0)):
            assert at <= start and start + length <= self.end, (at, start, length)
            if start > at:
                self._insert(at, start - at)
            at = start + length

    def _take(self, need: int) -> tuple[int, int]:
        """Remove and return a free extent of at least `need` bytes, or else one of the largest size class."""
        # popitem, because iterating skips a dict's deleted entries each time, which would be O(n).
        classes = self._by_class
        own = need.bit_length()
        if classes[own]:
            start, _ = classes[own].popitem()
            if self._starts[start] >= need:
                return self._forget(start)
            classes[own][start] = None  # this class has sizes below and above `need`: try one, do not search
        for level in (*range(own + 1, len(classes)), *range(own, -1, -1)):
            if classes[level]:
                return self._forget(classes[level].popitem()[0])
        raise AssertionError(f"{self.free_bytes} bytes free but no extent")

    def _forget(self, start: int) -> tuple[int, int]:
        length = self._starts.pop(start)
        del self._ends[start + length]
        self.free_bytes -= length
        return start, length

    def _insert(self, start: int, length: int) -> None:
        self._starts[start] = length
        self._ends[start + length] = start
        self._by_class[length.bit_length()][start] = None
        self.free_bytes += length

    def _remove(self, start: int, length: int) -> None:
        del self._by_class[length.bit_length()][start]
        self._forget(start)

    def validate(self) -> None:
        """Raise AssertionError unless the free extents are disjoint, joined, and add up to `free_bytes`."""
        previous_end = -1
        total = 0
        for start, length in sorted(self._starts.items()):
            assert length > 0 and start > previous_end, (start, length, previous_end)
            assert self._ends[start + length] == start
            assert start in self._by_class[length.bit_length()]
            previous_end = start + length
            total += length
        assert total == self.free_bytes, (total, self.free_bytes)
        assert len(self._starts) == len(self._ends) == sum(map(len, self._by_class))
