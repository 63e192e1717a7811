"""The chunks that the policy `learned` remembers, as runs: consecutive chunks that were stored and used together.

A **run** has a number and columns of facts by number. It is split where a prompt leaves it or ends within it. A run
outlives its chunks while a shadow (shadows.py) contains it or its keys may come back. Everything is in arrays, and the
table grows by one bucket at a time (linear hashing; W. Litwin, 1980), so a run takes some 80 bytes, each further chunk
of it 4, and no call takes long. Invariant: a run's parent exists as long as the run.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvdepot.eviction.policy import Victim


def _mark(key: bytes, salt: int = 0) -> int:
    """32 bits of a hash of a key. Each process has another hash: clients choose keys, and could fill one bucket."""
    return (hash(key) ^ salt * 0x9E3779B9) & 0xFFFFFFFF


class Runs:
    """All runs. Run 0 means none. A key is known by 32 bits of its hash: a few in a million are confused, which only
    makes the shadows slightly less exact."""

    def __init__(self) -> None:
        self.parent = array("I", [0])
        """The run that this run stands behind; all chunks of the parent come before it."""
        self.start = array("I", [0])
        """The number of chunks before the run's first chunk in its chain."""
        self.size = array("I", [0])
        self.real = array("I", [0])
        """The number of chunks that exist; these are the first ones of the run."""
        self.children = array("I", [0])
        """The number of runs whose parent this run is."""
        self._hash = array("I", [0])  # hash of the first key
        self._next = array("I", [0])  # next run in its bucket, or next free run
        self._columns = [self.parent, self.start, self.size, self.real, self.children, self._hash, self._next]
        self._further: list[array[int] | None] = [None]  # hashes of the keys after the first
        self._buckets = array("I", [0])
        self._level = 1  # buckets before the current round of splits
        self._free = 0
        self.used = 0

    def column(self, kind: str) -> array[int]:
        """Add a column of unsigned integers (`kind`: of the array), 0 for each run."""
        column = array(kind, bytes(len(self.size) * array(kind).itemsize))
        self._columns.append(column)
        return column

    def find(self, key: bytes, is_part: bool, parent: int) -> int:
        """The run without existing chunks that begins with a key behind `parent`; 0 if there is none.

        is_part: the chunk is a part in a bounded KV cache group, whose parent has the same key.
        """
        wanted = _mark(key, is_part)
        run = self._buckets[self._bucket(wanted)]
        while run and (self._hash[run] != wanted or self.parent[run] != parent or self.real[run]):
            run = self._next[run]
        return run

    def enter(self, key: bytes, is_part: bool, parent: int, start: int) -> int:
        """Add a run of one existing chunk, with 0 in the columns of others."""
        run = self.new()
        self.used += 1
        self.parent[run], self.start[run], self.size[run], self.real[run] = parent, start, 1, 1
        self.children[parent] += 1
        self._put(run, _mark(key, is_part))
        if len(self._buckets) < self.used:
            self._add_bucket()
        return run

    def extend(self, run: int, chunks: Sequence[Victim]) -> None:
        """Add existing chunks to a run whose chunks all exist."""
        further = self._further[run]
        if further is None:
            further = self._further[run] = array("I")
        further.extend([_mark(chunk.key) for chunk in chunks])
        self.size[run] += len(chunks)
        self.real[run] += len(chunks)

    def is_next(self, run: int, key: bytes) -> bool:
        """Whether this is the key of the first chunk that the run lacks, which is not the run's first."""
        further = self._further[run]
        return further is not None and further[self.real[run] - 1] == _mark(key)

    def split(self, run: int, count: int) -> int:
        """Make the first `count` chunks of a run a new run, which becomes the run's parent; returns the new run."""
        head, further = self.new(), self._further[run]
        assert further is not None and 0 < count < self.size[run]
        self.used += 1
        for column in (self.parent, self.start):
            column[head] = column[run]
        self.size[head], self.real[head] = count, min(count, self.real[run])
        self.children[head] = 1
        self._take(run)
        self._put(head, self._hash[run])
        self._put(run, further[count - 1])
        self._further[head] = further[: count - 1] or None
        self._further[run] = further[count:] or None
        self.parent[run] = head
        self.start[run] += count
        self.size[run] -= count
        self.real[run] -= self.real[head]
        if len(self._buckets) < self.used:
            self._add_bucket()
        return head

    def shorten(self, run: int, count: int) -> None:
        """Forget the last `count` chunks of a run, but not its first."""
        self.size[run] -= count
        further = self._further[run]
        assert further is not None and self.size[run]
        del further[self.size[run] - 1 :]

    def free(self, run: int) -> None:
        """Forget a run that is the parent of no run. The columns that others have added must be 0."""
        self.used -= 1
        self.children[self.parent[run]] -= 1
        self._take(run)
        self._further[run] = None
        self.free_head(run)

    def new(self) -> int:
        """A number without a key, for the head of a list or for a run."""
        run = self._free
        if run:
            self._free, self._next[run] = self._next[run], 0
            return run
        for column in self._columns:
            column.append(0)
        self._further.append(None)
        return len(self.size) - 1

    def free_head(self, run: int) -> None:
        for column in self._columns:
            column[run] = 0
        self._next[run] = self._free
        self._free = run

    def _bucket(self, value: int) -> int:
        at = value & (2 * self._level - 1)
        return at if at < len(self._buckets) else at - self._level

    def _put(self, run: int, value: int) -> None:
        self._hash[run] = value
        at = self._bucket(value)
        self._next[run] = self._buckets[at]
        self._buckets[at] = run

    def _take(self, run: int) -> None:
        at, following = self._bucket(self._hash[run]), self._next
        before = self._buckets[at]
        if before == run:
            self._buckets[at] = following[run]
            return
        while following[before] != run:
            before = following[before]
        following[before] = following[run]

    def _add_bucket(self) -> None:
        at = len(self._buckets) - self._level
        run, self._buckets[at] = self._buckets[at], 0
        self._buckets.append(0)
        while run:
            following = self._next[run]
            self._put(run, self._hash[run])
            run = following
        if len(self._buckets) == 2 * self._level:
            self._level *= 2


class Links:
    """Doubly linked lists of runs; a run is in at most one of them. A list is named by its head."""

    __slots__ = ("after", "before")

    def __init__(self, runs: Runs) -> None:
        self.before = runs.column("I")
        self.after = runs.column("I")
        """0: in no list."""

    def make(self, head: int) -> int:
        self.before[head] = self.after[head] = head
        return head

    def first(self, head: int) -> int:
        """The first run of a list; 0 if it is empty."""
        run = self.after[head]
        return 0 if run == head else run

    def append(self, head: int, run: int) -> None:
        """Put a run that is in no list at the end of a list, or, if `head` is a run, before this run."""
        before, after = self.before, self.after
        last = before[head]
        before[run], after[run] = last, head
        after[last] = before[head] = run

    def prepend(self, head: int, run: int) -> None:
        """Put a run that is in no list at the start of a list."""
        self.append(self.after[head], run)

    def unlink(self, run: int) -> None:
        """Take a run out of its list, if it is in one."""
        before, after = self.before, self.after
        following = after[run]
        if following:
            preceding = before[run]
            after[preceding], before[following] = following, preceding
            after[run] = 0

    def replace(self, run: int, other: int) -> None:
        """Put the run `other`, which is in no list, into the place of `run`."""
        if self.after[run]:
            self.append(run, other)
            self.unlink(run)
