"""Shadows: what a cache of the same size would contain under another policy, from keys alone.

The policy `adaptive` tells its shadows of every use and every new chunk, and has them evict as it evicts. Like the
index, a shadow contains only whole prefixes: a slot with kids, slots behind it that the shadow contains, stays. So its
lists have only the ends of chains, and each call costs O(1), plus O(1) for each slot that enters.

Most slots enter and leave in runs, so two ends of chains are in no list, and the slots of a run join none: the **tip**,
the end of the current request, which stays; and the **loose** slot, whose kid was evicted last, and which is next.
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
        self.kids = slots.column("I")
        self.count = 0
        self.misses = self.recent_misses = 0.0
        """How often a slot entered, up to the last `age`; see `entered`."""
        self.entered = 0
        """How often one entered since."""
        self._hit = 0  # the deepest hit of the current request so far, not counted as a use yet
        self._tip = 0
        self._loose = 0

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

    def extend(self, slot: int, before: int) -> None:
        """As `insert`, of a slot that was not known, behind `before`, which was not known either before this request.

        The caller has set its flag.
        """
        self.count += 1
        self.entered += 1
        self.kids[before] = 1
        self._tip = slot

    def evict(self) -> int:
        """Evict a slot and return it; 0 if none can go."""
        if self._hit:
            self._settle()
        slot = self._victim()
        if slot:
            self._loose = 0
            self._leave(slot)
        return slot

    def drop(self, slot: int) -> None:
        """Take out a slot that was not evicted, unless others are behind it."""
        if self._flags[slot] & self.bit and not self.kids[slot]:
            self._tie()
            if slot in (self._hit, self._tip):
                self._hit = self._tip = 0
            self._leave(slot)
            self._tie()
            self._dropped(slot)

    def forget(self, slot: int) -> None:
        """`slot` is forgotten: set the columns to 0 that may not be 0 outside this shadow."""

    def age(self, kept: float, kept_recent: float) -> None:
        """Reduce the misses so far to these shares."""
        self.misses = kept * (self.misses + self.entered)
        self.recent_misses = kept_recent * (self.recent_misses + self.entered)
        self.entered = 0

    def _missing(self, slot: int) -> list[int]:
        """The slots of the prefix that ends here that it does not contain, the deepest first."""
        flags, parent, bit = self._flags, self._parent, self.bit
        missing = []
        while slot and not flags[slot] & bit:
            missing.append(slot)
            slot = parent[slot]
        return missing

    def _settle(self) -> None:
        self._tie()
        if self._hit:
            slot, self._hit = self._hit, 0
            self._used(slot)

    def _tie(self) -> None:
        """Put the loose slot into its list."""
        if self._loose:
            slot, self._loose = self._loose, 0
            self._prepend(slot)

    def _move(self, slot: int) -> None:
        """`slot` is the tip now."""
        self._tie()
        tip, self._tip = self._tip, slot
        if tip and tip != slot and self._flags[tip] & self.bit and not self.kids[tip] and not self.links.after[tip]:
            self._append(tip)

    def _enter(self, slot: int) -> None:
        self.count += 1
        self.entered += 1
        self._flags[slot] |= self.bit
        before = self._parent[slot]
        if before:
            self.kids[before] += 1
            self.links.unlink(before)

    def _leave(self, slot: int) -> None:
        """`slot` goes; no other is loose. Its parent is loose then, if it has become an end."""
        self.count -= 1
        self._flags[slot] &= ~self.bit
        if self.links.after[slot]:
            self.links.unlink(slot)
        before = self._parent[slot]
        if before:
            left = self.kids[before] - 1
            self.kids[before] = left
            if not left:
                self._ends(before, slot)

    def _dropped(self, slot: int) -> None:
        """`slot` has left, but was not evicted."""

    def _used(self, slot: int) -> None:
        raise NotImplementedError

    def _victim(self) -> int:
        """The slot to evict; 0 if there is none."""
        raise NotImplementedError

    def _ends(self, slot: int, after: int) -> None:
        """The last slot behind `slot`, `after`, has left: make it loose, unless it is the tip or has a place."""
        raise NotImplementedError

    def _append(self, slot: int) -> None:
        """Put an end of a chain into its list, to go last."""
        raise NotImplementedError

    def _prepend(self, slot: int) -> None:
        """Put an end of a chain into its list, to go first."""
        raise NotImplementedError


class LruShadow(Shadow):
    """As the policy `lru`."""

    def __init__(self, slots: Slots, bit: int) -> None:
        super().__init__(slots, bit)
        self._queue = self.links.make(slots.new_head())  # least recently used first

    def _used(self, slot: int) -> None:
        self.links.unlink(slot)
        if slot != self._tip or self.kids[slot]:
            self.links.append(self._queue, slot)

    def _victim(self) -> int:
        if self._loose:
            return self._loose
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
        if not self.links.after[slot] and slot != self._tip:  # its own last use was earlier
            self._loose = slot

    def _append(self, slot: int) -> None:
        self.links.append(self._queue, slot)

    def _prepend(self, slot: int) -> None:
        self.links.prepend(self._queue, slot)


_USE, _USES, _MAIN = 16, 48, 64
"""In `Slots.flags`: one use, up to three uses, and whether it belongs to the main queue."""


class S3FifoShadow(Shadow):
    """As the policy `s3fifo`."""

    def __init__(self, slots: Slots, bit: int) -> None:
        super().__init__(slots, bit)
        self._small = self.links.make(slots.new_head())
        self._main = self.links.make(slots.new_head())
        self._in_small = 0
        self._ghosts = 0  # evicted from the small queue so far; the number of each is in `kids` while it is outside

    def extend(self, slot: int, before: int) -> None:
        self._in_small += 1
        super().extend(slot, before)

    def forget(self, slot: int) -> None:
        self.kids[slot] = 0

    def _enter(self, slot: int) -> None:
        ghost, self.kids[slot] = self.kids[slot], 0
        is_main = ghost and self._ghosts - ghost <= self.count
        super()._enter(slot)
        self._flags[slot] &= ~(_USES | _MAIN)
        self._flags[slot] |= _MAIN if is_main else 0
        self._in_small += not is_main

    def evict(self) -> int:
        slot = super().evict()
        if slot and not self._flags[slot] & _MAIN:
            self._in_small -= 1
            self._ghosts += 1
            self.kids[slot] = self._ghosts
        return slot

    def _dropped(self, slot: int) -> None:
        self._in_small -= not self._flags[slot] & _MAIN

    def _used(self, slot: int) -> None:
        if self._flags[slot] & _USES < _USES:
            self._flags[slot] += _USE

    def _victim(self) -> int:
        links, flags = self.links, self._flags
        slot = self._loose
        if slot:
            if not flags[slot] & (_USES | _MAIN) and self._in_small * 10 >= self.count:
                return slot
            self._tie()
        kept = 0
        while True:
            slot = links.first(self._small) if self._in_small * 10 >= self.count else 0
            slot = slot or links.first(self._main) or links.first(self._small)
            if slot and slot == self._tip:
                links.unlink(slot)
                kept = slot
                continue
            if not slot or not flags[slot] & _USES:
                break
            links.unlink(slot)
            if flags[slot] & _MAIN:
                flags[slot] -= _USE
            else:
                self._in_small -= 1
                flags[slot] = flags[slot] & ~_USES | _MAIN
            self._append(slot)
        if kept:
            self._prepend(kept)
        return slot

    def _ends(self, slot: int, after: int) -> None:
        flags = self._flags
        if flags[slot] & _MAIN > flags[after] & _MAIN:
            if slot != self._tip:
                self._append(slot)
            return
        if flags[after] & _MAIN > flags[slot] & _MAIN:
            flags[slot] |= _MAIN
            self._in_small -= 1
        if slot != self._tip:
            self._loose = slot

    def _append(self, slot: int) -> None:
        self.links.append(self._main if self._flags[slot] & _MAIN else self._small, slot)

    def _prepend(self, slot: int) -> None:
        self.links.prepend(self._main if self._flags[slot] & _MAIN else self._small, slot)
