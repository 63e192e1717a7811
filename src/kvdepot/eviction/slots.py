"""Keys that the policy `adaptive` remembers: a number (slot) for each, and columns of facts by slot.

A slot outlives its chunk while a shadow (shadows.py) contains it or its key may come back. Everything is in arrays and
the table grows by one bucket at a time (linear hashing; W. Litwin, 1980), so a slot takes some 60 bytes and no call
takes long. Invariant: a slot's parent exists as long as the slot; the code that frees slots ensures this.
"""

from __future__ import annotations

from array import array
from zlib import crc32

__all__ = ["HOLDERS", "REAL", "Links", "Slots"]

REAL = 1
"""The flag of a slot whose chunk exists. Each shadow has a flag for what it contains: 2, 4, 8."""
HOLDERS = 15
"""All of these. The other bits belong to the shadow S3-FIFO."""


class Slots:
    """All slots. Slot 0 means none. A key is known by 32 bits of its hash: a few in a million are confused, which only
    makes the shadows slightly less exact."""

    def __init__(self) -> None:
        self.flags = array("B", [0])
        self.parent = array("I", [0])
        self._hash = array("I", [0])
        self._next = array("I", [0])  # in its bucket, or among the free slots
        self._columns = [self.flags, self.parent, self._hash, self._next]
        self._buckets = array("I", [0])
        self._level = 1  # buckets before the current round of splits
        self._free = 0
        self.used = 0
        """Slots of keys."""

    def column(self, kind: str) -> array[int]:
        """A new column of unsigned integers, 0 for each slot."""
        column = array(kind, bytes(len(self.flags) * array(kind).itemsize))
        self._columns.append(column)
        return column

    def find(self, key: bytes, is_part: bool, parent: int) -> int:
        """The slot of a key behind `parent` whose chunk does not exist; 0 if there is none.

        is_part: of a part in a bounded KV cache group, whose parent has the same key.
        """
        wanted = crc32(key, is_part)
        hashes, parents, flags, following = self._hash, self.parent, self.flags, self._next
        slot = self._buckets[self._bucket(wanted)]
        while slot and (hashes[slot] != wanted or parents[slot] != parent or flags[slot] & REAL):
            slot = following[slot]
        return slot

    def enter(self, key: bytes, is_part: bool, parent: int) -> int:
        """A new slot for a key, 0 in all other columns; chunks of several namespaces may have the same one."""
        slot = self._free
        if slot:
            self._free = self._next[slot]
        else:
            slot = self._new()
        self.used += 1
        self._hash[slot] = wanted = crc32(key, is_part)
        self.parent[slot] = parent
        buckets, level = self._buckets, self._level
        at = wanted & (2 * level - 1)
        if at >= len(buckets):
            at -= level
        self._next[slot] = buckets[at]
        buckets[at] = slot
        if len(buckets) < self.used:
            self._split()
        return slot

    def free(self, slot: int) -> None:
        """Forget a slot that is the parent of none. The caller has set all columns that it uses to 0."""
        at = self._bucket(self._hash[slot])
        following = self._next
        if self._buckets[at] == slot:
            self._buckets[at] = following[slot]
        else:
            before = self._buckets[at]
            while following[before] != slot:
                before = following[before]
            following[before] = following[slot]
        self.used -= 1
        following[slot] = self._free
        self._free = slot

    def new_head(self) -> int:
        """A slot that stands for no key: the head of a list."""
        slot = self._free
        if not slot:
            return self._new()
        self._free = self._next[slot]
        return slot

    def free_head(self, slot: int) -> None:
        """Undo `new_head`."""
        for column in self._columns:
            column[slot] = 0
        self._next[slot] = self._free
        self._free = slot

    def _new(self) -> int:
        for column in self._columns:
            column.append(0)
        return len(self.flags) - 1

    def _bucket(self, value: int) -> int:
        at = value & (2 * self._level - 1)
        return at if at < len(self._buckets) else at - self._level

    def _push(self, slot: int, bucket: int) -> None:
        self._next[slot] = self._buckets[bucket]
        self._buckets[bucket] = slot

    def _split(self) -> None:
        """Add a bucket, and move to it what belongs there."""
        at = len(self._buckets) - self._level
        slot, self._buckets[at] = self._buckets[at], 0
        self._buckets.append(0)
        while slot:
            following = self._next[slot]
            self._push(slot, self._bucket(self._hash[slot]))
            slot = following
        if len(self._buckets) == 2 * self._level:
            self._level *= 2


class Links:
    """Doubly linked lists of slots; a slot is in at most one of them. A list is named by its head."""

    __slots__ = ("after", "before")

    def __init__(self, slots: Slots) -> None:
        self.before = slots.column("I")
        self.after = slots.column("I")  # 0: in no list

    def make(self, head: int) -> int:
        """Make a slot the head of an empty list."""
        self.before[head] = self.after[head] = head
        return head

    def first(self, head: int) -> int:
        """The first slot of a list; 0 if it is empty."""
        slot = self.after[head]
        return 0 if slot == head else slot

    def append(self, head: int, slot: int) -> None:
        """Put a slot, which must be in no list, at the end of one."""
        before, after = self.before, self.after
        last = before[head]
        before[slot], after[slot] = last, head
        after[last] = before[head] = slot

    def prepend(self, head: int, slot: int) -> None:
        """Put a slot, which must be in no list, at the start of one."""
        self.append(self.after[head], slot)

    def unlink(self, slot: int) -> None:
        """Take a slot out of its list, if it is in one."""
        before, after = self.before, self.after
        following = after[slot]
        if following:
            preceding = before[slot]
            after[preceding], before[following] = following, preceding
            after[slot] = 0
