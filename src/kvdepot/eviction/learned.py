"""The shadow that learns: it evicts the chunks that, judging by the traffic so far, are least likely to be used soon.

Similar ends of chains form a **class**, by what is known about them:

- never used since they were stored: by **run**, the chunks that one request stored. What it was stored behind: nothing
  (a new prompt), a chunk that others follow too (one of many prompts with that beginning), or the end of an earlier
  prompt (a conversation that goes on); and how long it is, because long documents come back less often than questions;
- used: how often (1, 2-3, 4-7, 8 or more times), and whether it continues a conversation.

A chunk that loses the last one behind it inherits its date, its uses and the length of its run.

Ends of one class last used in the same **epoch** form a **cohort** and share one rank (hazards.py). The lowest goes
first, within a cohort the least recently used. A slot that was evicted stays in its cohort's count until it comes back
or is forgotten, so misses are measured as well as hits.
"""

from __future__ import annotations

import heapq

from kvdepot.eviction.hazards import EPOCHS, Hazards
from kvdepot.eviction.shadows import Shadow
from kvdepot.eviction.slots import Slots

__all__ = ["LearnedShadow"]

_SHORTEST = 64
"""Minimum number of requests and misses in an epoch, to spread the cost of starting one."""
_LEARN = 256
"""Minimum number of requests and misses between two computations of the ranks."""
_NEW, _BRANCH, _CONTINUED, _PART = range(4)
"""What a run was stored behind; `_PART`: it is the part of a chunk in a bounded KV cache group."""
_RUN = 3
_FIRST, _FOLLOWED = 4, 8
"""Flags: first of its run; another was stored behind it."""
_USE, _MOST_USES = 16, 15
"""One use, in the bits above the flags, and how many they hold."""
_LENGTHS = 8
_USED = 8
"""Classes of chunks that were used; those of the others follow."""
_CLASSES = _USED + 4 * _LENGTHS
_LONGEST = 255


class _Cohort:
    """Ends of one class last used in the same epoch."""

    __slots__ = ("at_risk", "epoch", "head", "kind", "listed")

    def __init__(self, epoch: int, kind: int, head: int) -> None:
        self.epoch = epoch
        self.kind = kind
        self.head = head  # of the list of its members
        self.at_risk = 0  # members, and those evicted
        self.listed = False  # in the heap of ranks


class LearnedShadow(Shadow):
    """Lowest Gittins index first, measured."""

    def __init__(self, slots: Slots, bit: int) -> None:
        super().__init__(slots, bit)
        self._slots = slots
        self.epoch = 1
        self._left = _SHORTEST  # requests and misses until the next epoch
        self._until_learning = 0
        self._date = slots.column("I")  # epoch of the last use
        self._class = slots.column("B")  # of its cohort, plus 1; 0: not at risk
        self._run = slots.column("B")  # what it was stored behind, flags, and uses
        self._length = slots.column("B")  # chunks of its run up to this one
        self._cohorts: dict[int, _Cohort] = {}  # by epoch * _CLASSES + class
        self._order: list[tuple[float, int, int, _Cohort]] = []  # heap of cohorts that may have members
        self._loose_in: _Cohort | None = None  # the cohort of the loose slot
        self._hazards = Hazards(_CLASSES)

    def __repr__(self) -> str:
        return f"<LearnedShadow {self.count} slots, {len(self._cohorts)} cohorts, epoch {self.epoch}>"

    def note_new(self, slot: int, is_part: bool) -> None:
        """`slot` was not known before. Call it before `insert`."""
        before = self._parent[slot]
        run = self._run
        what = _PART if is_part else _NEW if not before else _BRANCH if run[before] & _FOLLOWED else _CONTINUED
        run[slot] = what | _FIRST
        self._length[slot] = 1
        if before and before == self._tip != self._hit:
            self._add_uses(before, 1)  # it was a miss here, so `_used` does not count it
        if before and not is_part:
            run[before] |= _FOLLOWED

    def extend(self, slot: int, before: int) -> None:
        self._left -= 1
        if self._left <= 0:
            self._next_epoch()
        run, length = self._run, self._length
        run[slot] = run[before] & _RUN
        run[before] |= _FOLLOWED
        longer = length[before]
        length[slot] = longer + 1 if longer < _LONGEST else longer
        self._date[slot] = self.epoch
        super().extend(slot, before)

    def forget(self, slot: int) -> None:
        if self._class[slot]:
            self._cohort(slot).at_risk -= 1
            self._class[slot] = 0

    def use(self, slot: int) -> None:
        self._tick()
        super().use(slot)

    def _enter(self, slot: int) -> None:
        self._tick()
        before = self._parent[slot]
        if before:
            self.forget(before)
        if self._class[slot]:
            self._came_back(slot)
        super()._enter(slot)
        self._date[slot] = self.epoch

    def _used(self, slot: int) -> None:
        if self._class[slot]:
            self._came_back(slot)
            self.links.unlink(slot)
        self._add_uses(slot, 1)
        self._date[slot] = self.epoch
        if slot != self._tip and not self.kids[slot]:
            self._append(slot)

    def _dropped(self, slot: int) -> None:
        self.forget(slot)

    def _ends(self, slot: int, after: int) -> None:
        runs, dates, length = self._run, self._date, self._length
        run, last = runs[slot], runs[after]
        if dates[after] > dates[slot]:
            dates[slot] = dates[after]
        if not last & _FIRST:
            length[slot] = length[after]
        if last >= _USE:
            self._add_uses(slot, last // _USE)
        if slot == self._tip:
            return
        kind = self._class[after]
        if kind and run < _USE and not last & _FIRST and last < _USE and dates[slot] == dates[after]:
            self._class[slot] = kind  # the same run, and as its other slots not used since
            cohort = self._cohort(slot)
        else:
            cohort = self._join(slot)
        cohort.at_risk += 1
        self._loose, self._loose_in = slot, cohort

    def _add_uses(self, slot: int, uses: int) -> None:
        run = self._run[slot]
        self._run[slot] = run + _USE * min(uses, _MOST_USES - run // _USE)

    def _victim(self) -> int:
        order = self._order
        slot = self._loose
        if slot:
            if order and order[0][3] is self._loose_in:
                return slot
            self._tie()
        while order:
            cohort = order[0][3]
            slot = self.links.first(cohort.head)
            if slot:
                return slot
            cohort.listed = False
            heapq.heappop(order)
        return 0

    # -- cohorts

    def _cohort(self, slot: int) -> _Cohort:
        return self._cohorts[self._date[slot] * _CLASSES + self._class[slot] - 1]

    def _join(self, slot: int) -> _Cohort:
        """The cohort that an end of a chain belongs to; notes its class."""
        run = self._run[slot]
        uses = run // _USE
        if uses:
            kind = 2 * min(uses.bit_length() - 1, 3) + (run & _RUN == _CONTINUED)
        else:
            kind = _USED + (run & _RUN) * _LENGTHS + min(self._length[slot].bit_length(), _LENGTHS) - 1
        self._class[slot] = kind + 1
        epoch = self._date[slot]
        cohort = self._cohorts.get(epoch * _CLASSES + kind)
        if cohort is None:
            head = self.links.make(self._slots.new_head())
            cohort = self._cohorts[epoch * _CLASSES + kind] = _Cohort(epoch, kind, head)
        return cohort

    def _append(self, slot: int) -> None:
        cohort = self._join(slot)
        cohort.at_risk += 1
        self.links.append(cohort.head, slot)
        self._list(cohort)

    def _prepend(self, slot: int) -> None:
        cohort = self._loose_in
        assert cohort is not None
        self.links.prepend(cohort.head, slot)
        self._list(cohort)

    def _list(self, cohort: _Cohort) -> None:
        if not cohort.listed:
            heapq.heappush(self._order, self._entry(cohort))

    def _came_back(self, slot: int) -> None:
        cohort = self._cohort(slot)
        cohort.at_risk -= 1
        self._class[slot] = 0
        self._hazards.came_back(cohort.kind, self.epoch - cohort.epoch)

    def _tick(self) -> None:
        self._left -= 1
        if self._left <= 0:
            self._next_epoch()

    def _next_epoch(self) -> None:
        """Count the chunks at risk in the epoch that ends, learn, and reorder the cohorts. O(cohorts)."""
        self._tie()
        self._left = max(_SHORTEST, self.count // EPOCHS)
        self._until_learning -= self._left
        now, hazards = self.epoch, self._hazards
        for place, cohort in list(self._cohorts.items()):
            if cohort.at_risk:
                hazards.could(cohort.kind, now - cohort.epoch, cohort.at_risk)
            else:
                del self._cohorts[place]
                self._slots.free_head(cohort.head)
        self.epoch += 1
        if self._until_learning <= 0:
            self._until_learning = _LEARN
            hazards.learn()
        self._order = []
        for cohort in self._cohorts.values():
            cohort.listed = bool(self.links.first(cohort.head))
            if cohort.listed:
                self._order.append(self._entry(cohort))
        heapq.heapify(self._order)

    def _entry(self, cohort: _Cohort) -> tuple[float, int, int, _Cohort]:
        cohort.listed = True
        return self._hazards.rank(cohort.kind, self.epoch - cohort.epoch), cohort.epoch, cohort.kind, cohort
