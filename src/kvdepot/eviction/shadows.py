"""Shadows: what a cache of the same size would contain under another policy, from keys alone.

The policy `adaptive` tells its shadows of every use and every new chunk, and asks them to shrink before it evicts. Like
the index, a shadow contains only whole prefixes: a slot with kids, slots behind it that the shadow contains, stays. So
its lists have only the ends of chains, and each call costs O(1), plus O(1) for each slot that enters.
"""

from __future__ import annotations

from kvdepot.eviction.slots import Links, Slots

__all__ = ["LruShadow", "S3FifoShadow", "Shadow"]


class Shadow:
    """What all shadows have in common. `bit` is its flag in `Slots.flags`."""

    def __init__(self, slots: Slots, bit: int) -> None:
        self._flags = slots.flags
        self._parent = slots.parent
        self.bit = bit
        self.links = Links(slots)
        self.outside = self.links.make(slots.new_head())
        """The list of chunks to evict while this shadow is followed: they exist, and it does not contain them."""
        self.kids = slots.column("I")
        self.count = 0
        self.misses = self.recent_misses = 0.0
        """How often a slot entered; the caller reduces both over time."""
        self._hit = 0  # the deepest hit of the current request so far, not counted as a use yet
        self._tip = 0  # the end of the current request, which stays

    def use(self, slot: int) -> None:
        """A request hit the chunk of `slot`, and all before it."""
        self._settle()
        self._move(slot)
        if self._flags[slot] & self.bit:
            self._hit = slot
            return
        missing = self._missing(slot)
        self._hit = self._parent[missing[-1]]
        self._settle()
        for each in reversed(missing):
            self._enter(each)

    def insert(self, slot: int) -> None:
        """The chunk of `slot` is new."""
        flags, before = self._flags, self._parent[slot]
        if flags[slot] & self.bit:
            if self._hit != before:
                self._settle()
            self._move(slot)
            self._hit = slot
            return
        self._settle()
        self._move(slot)
        if not before or flags[before] & self.bit:
            self._enter(slot)
        else:
            for each in reversed(self._missing(slot)):
                self._enter(each)

    def shrink(self, count: float) -> list[int]:
        """Evict until at most `count` are left; returns what was evicted."""
        evicted = []
        self._settle()
        while self.count > count:
            slot = self._victim()
            if not slot:
                break
            self._evict(slot)
            evicted.append(slot)
        return evicted

    def drop(self, slot: int) -> None:
        """Take out a slot that was not evicted, unless others are behind it."""
        if self._flags[slot] & self.bit and not self.kids[slot]:
            if slot in (self._hit, self._tip):
                self._hit = self._tip = 0
            self._leave(slot)

    def _missing(self, slot: int) -> list[int]:
        """The slots of the prefix that ends here that it does not contain, the deepest first."""
        flags, parent, bit = self._flags, self._parent, self.bit
        missing = []
        while slot and not flags[slot] & bit:
            missing.append(slot)
            slot = parent[slot]
        return missing

    def _settle(self) -> None:
        if self._hit:
            slot, self._hit = self._hit, 0
            self._used(slot)

    def _move(self, slot: int) -> None:
        self._tip = slot

    def _enter(self, slot: int) -> None:
        self.count += 1
        self.misses += 1
        self.recent_misses += 1
        self._flags[slot] |= self.bit
        self.links.unlink(slot)
        before = self._parent[slot]
        if before:
            self.kids[before] += 1
            self.links.unlink(before)

    def _leave(self, slot: int) -> None:
        self.count -= 1
        self._flags[slot] &= ~self.bit
        self.links.unlink(slot)
        before = self._parent[slot]
        if before:
            self.kids[before] -= 1
            if not self.kids[before]:
                self._ends(before, slot)

    def _evict(self, slot: int) -> None:
        self._leave(slot)

    def _used(self, slot: int) -> None:
        raise NotImplementedError

    def _victim(self) -> int:
        """The slot to evict; 0 if there is none."""
        raise NotImplementedError

    def _ends(self, slot: int, after: int) -> None:
        """The last slot behind `slot`, `after`, has left."""
        raise NotImplementedError


class LruShadow(Shadow):
    """As the policy `lru`."""

    def __init__(self, slots: Slots, bit: int) -> None:
        super().__init__(slots, bit)
        self._queue = self.links.make(slots.new_head())  # least recently used first

    def _enter(self, slot: int) -> None:
        super()._enter(slot)
        self.links.append(self._queue, slot)

    def _used(self, slot: int) -> None:
        self.links.unlink(slot)
        self.links.append(self._queue, slot)

    def _victim(self) -> int:
        links, kids = self.links, self.kids
        slot = links.first(self._queue)
        while slot and kids[slot]:
            links.unlink(slot)
            slot = links.first(self._queue)
        if slot and slot == self._tip:
            slot = links.after[slot]
            while slot != self._queue and kids[slot]:
                slot = links.after[slot]
        return 0 if slot == self._queue else slot

    def _ends(self, slot: int, after: int) -> None:
        if not self.links.after[slot]:  # its own last use was earlier
            self.links.prepend(self._queue, slot)


_USE, _USES, _MAIN = 16, 48, 64
"""In `Slots.flags`: one use, up to three uses, and whether it belongs to the main queue."""


class S3FifoShadow(Shadow):
    """As the policy `s3fifo`."""

    def __init__(self, slots: Slots, bit: int) -> None:
        super().__init__(slots, bit)
        self._small = self.links.make(slots.new_head())
        self._main = self.links.make(slots.new_head())
        self._state = slots.flags
        self._in_small = 0
        self._ghosts = 0  # evicted from the small queue so far; the number of each is in `kids` while it is outside

    def _enter(self, slot: int) -> None:
        ghost, self.kids[slot] = self.kids[slot], 0
        is_main = ghost and self._ghosts - ghost <= self.count
        super()._enter(slot)
        self._state[slot] &= ~(_USES | _MAIN)
        self._state[slot] |= _MAIN if is_main else 0
        self._in_small += not is_main
        self._queue(slot)

    def _leave(self, slot: int) -> None:
        self._in_small -= not self._state[slot] & _MAIN
        super()._leave(slot)

    def _evict(self, slot: int) -> None:
        self._leave(slot)
        if not self._state[slot] & _MAIN:
            self._ghosts += 1
            self.kids[slot] = self._ghosts

    def _used(self, slot: int) -> None:
        if self._state[slot] & _USES < _USES:
            self._state[slot] += _USE

    def _queue(self, slot: int) -> None:
        self.links.append(self._main if self._state[slot] & _MAIN else self._small, slot)

    def _victim(self) -> int:
        links = self.links
        kept = 0
        while True:
            slot = links.first(self._small) if self._in_small * 10 >= self.count else 0
            slot = slot or links.first(self._main) or links.first(self._small)
            if slot and slot == self._tip:
                links.unlink(slot)
                kept = slot
                continue
            if not slot or not self._state[slot] & _USES:
                break
            links.unlink(slot)
            if self._state[slot] & _MAIN:
                self._state[slot] -= _USE
            else:
                self._in_small -= 1
                self._state[slot] = self._state[slot] & ~_USES | _MAIN
            self._queue(slot)
        if kept:
            links.prepend(self._main if self._state[kept] & _MAIN else self._small, kept)
        return slot

    def _ends(self, slot: int, after: int) -> None:
        if self._state[slot] & _MAIN > self._state[after] & _MAIN:
            self._queue(slot)
            return
        if self._state[after] & _MAIN > self._state[slot] & _MAIN:
            self._state[slot] |= _MAIN
            self._in_small -= 1
        self.links.prepend(self._main if self._state[slot] & _MAIN else self._small, slot)
