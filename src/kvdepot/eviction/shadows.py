"""Shadows: the chunks that a cache of the same size would contain under another policy, computed from keys alone.

The policy `learned` shows its shadows every use and every new chunk, and lets them evict when it evicts. Like the
index, a shadow contains only whole prefixes: the first chunks of a run (runs.py), and all chunks before the run. So its
lists have only **ends**, the runs behind which it contains no chunk, and a call costs O(1) for each run. The end of the
current request, the **tip**, is in no list, and is not evicted.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod

from kvdepot.eviction.hazards import EPOCHS, Hazards
from kvdepot.eviction.runs import Links, Runs


class Shadow(ABC):
    """The chunks that a cache with another policy would keep."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._size = runs.size
        self._parent = runs.parent
        self.links = Links(runs)
        self.held = runs.column("I")
        """The number of chunks of each run that the shadow contains: its first ones."""
        self.kids = runs.column("I")
        """The number of runs behind each run of which the shadow contains a chunk."""
        self.count = 0
        self.misses = self.recent_misses = 0.0
        """Chunks that entered before the last `age`, with fading weight; `entered` counts the later ones."""
        self.entered = 0
        self._hit = 0  # the run of the current request's deepest hit so far, not yet counted as used
        self._is_within = False  # the hit ends within the run
        self._tip = 0

    def use(self, run: int) -> None:
        """Note that a request hit all chunks up to the end of `run`."""
        self._is_within = False  # these lines repeat `_settle`: a call in each lookup would cost more
        if self._hit:
            hit, self._hit = self._hit, 0
            self._used(hit)
        if self._tip != run:
            self._move(run)
        if self.held[run] == self._size[run]:
            self._hit = run
        else:
            self._fill(run, self._size[run], True)

    def insert(self, run: int, count: int) -> None:
        """Note that chunk number `count` of `run` is stored again, or that the run is new."""
        before = run if count > 1 else self._parent[run]
        if self.held[run] >= count:
            if self._hit != before:
                self._settle()
            self._move(run)
            self._hit, self._is_within = run, count < self._size[run]
            return
        is_hit = self._hit == run
        if is_hit:
            self._hit = 0
        self._settle()
        self._move(run)
        self._fill(run, count, is_hit)

    def extend(self, run: int, count: int) -> None:
        """Note that `count` chunks were added to `run`, which is new."""
        self.count += count
        self.entered += count
        self.held[run] += count

    def evict(self, most: int) -> int:
        """Evict up to `most` chunks of one run, and return the run; 0: no run can be evicted."""
        if not self._is_within:
            self._settle()
        run = self._victim()
        if run:
            taken = min(most, self.held[run])
            self._lose(run, taken)
            self._evicted(run, taken)
        return run

    def drop(self, run: int, count: int) -> None:
        """Take out chunk number `count` of `run`, which was dropped, not evicted, unless chunks are behind it."""
        if self.held[run] != count or self.kids[run]:
            return
        if run in (self._hit, self._tip):
            self._hit = self._tip = 0
        self.forget(run, 1)
        self._lose(run, 1)
        if self.held[run] and not self.links.after[run]:
            self._add_end(run, 0)

    def split(self, run: int, head: int, is_end: bool) -> None:
        """Note that the first chunks of `run` have become its parent `head`. is_end: the request ends with `head`."""
        held = self.held
        held[head] = min(self._size[head], held[run])
        held[run] -= held[head]
        if held[run]:
            self.kids[head] = 1
        else:
            self.links.replace(run, head)
        if is_end or not held[run]:
            self._tip = head if self._tip == run else self._tip
            self._hit = head if self._hit == run else self._hit
            self._is_within = False

    def forget(self, run: int, count: int) -> None:
        """Forget the last `count` chunks of `run`, which the shadow does not contain."""
        return

    def age(self, kept: float, kept_recent: float) -> None:
        """Reduce the counts of misses, and of recent misses, to these shares."""
        self.misses = kept * (self.misses + self.entered)
        self.recent_misses = kept_recent * (self.recent_misses + self.entered)
        self.entered = 0

    def _fill(self, run: int, count: int, is_use: bool) -> None:
        """Add missing chunks up to number `count` of `run`. is_use: count a use of the deepest one that it has."""
        held, size, parent = self.held, self._size, self._parent
        missing = [run]
        while not held[missing[-1]] and (before := parent[missing[-1]]) and held[before] < size[before]:
            missing.append(before)
        top = missing[-1]
        is_partial = held[top] > 0
        if is_use and not is_partial and parent[top]:
            self._used(parent[top])
        for each in reversed(missing):
            self._enter(each, count if each == run else size[each])
        if is_use and is_partial:
            self._used(top)

    def _settle(self) -> None:
        self._is_within = False
        if self._hit:
            run, self._hit = self._hit, 0
            self._used(run)

    def _move(self, run: int) -> None:
        """Let the current request end in `run`."""
        tip, self._tip = self._tip, run
        if tip and tip != run and self.held[tip] and not self.kids[tip] and not self.links.after[tip]:
            self._append(tip)

    def _enter(self, run: int, count: int) -> None:
        """Let the shadow contain the chunks of `run` up to number `count`."""
        before = self._parent[run]
        self.count += count - self.held[run]
        self.entered += count - self.held[run]
        if not self.held[run] and before:
            self.kids[before] += 1
            self.links.unlink(before)
        self.links.unlink(run)
        self.held[run] = count

    def _lose(self, run: int, count: int) -> None:
        self.count -= count
        self.held[run] -= count
        if self.held[run]:
            return
        self.links.unlink(run)
        before = self._parent[run]
        if before:
            self.kids[before] -= 1
            if not self.kids[before]:
                self._add_end(before, run)

    def _evicted(self, run: int, count: int) -> None:
        return

    @abstractmethod
    def _used(self, run: int) -> None:
        """Count a use of the last chunk of `run` that the shadow contains."""

    @abstractmethod
    def _victim(self) -> int:
        """The run to evict from; 0: there is none."""

    @abstractmethod
    def _add_end(self, run: int, after: int) -> None:
        """Note that `run` has become an end, because the run `after` (0: its own last chunk) has left. It is the next
        victim, unless it is the tip or in a list."""

    @abstractmethod
    def _append(self, run: int) -> None:
        """Put an end at the end of its list, so that it is evicted last."""


class LruShadow(Shadow):
    """The chunks that the policy `lru` would keep."""

    def __init__(self, runs: Runs) -> None:
        super().__init__(runs)
        self._queue = self.links.make(runs.new())  # least recently used first

    def _used(self, run: int) -> None:
        self.links.unlink(run)
        if run != self._tip or self.kids[run]:
            self.links.append(self._queue, run)

    def _victim(self) -> int:
        links, kids = self.links, self.kids
        run = links.first(self._queue)
        while run and kids[run]:
            links.unlink(run)
            run = links.first(self._queue)
        if run and run == self._tip:
            run = links.after[run]
            while run != self._queue and kids[run]:
                run = links.after[run]
        return 0 if run == self._queue else run

    def _add_end(self, run: int, after: int) -> None:
        if not self.links.after[run] and run != self._tip:  # otherwise its own last use was later
            self.links.prepend(self._queue, run)

    def _append(self, run: int) -> None:
        self.links.append(self._queue, run)


_SHORTEST = 64
"""Minimum number of requests and misses in an epoch, to spread the cost of starting one."""
_LEARN = 256
"""Minimum number of requests and misses between two computations of the ranks."""
_NEW, _BRANCH, _CONTINUED, _PART = range(4)
"""The kind of chunk that a run was stored behind; `_PART`: the run is a chunk's part in a bounded KV cache group."""
_BEHIND = 3
_FIRST, _FOLLOWED = 4, 8
"""Flags of a run: its request stored it first; another run was stored behind it."""
_USE, _MOST_USES = 16, 15
"""One use, in the bits above the flags, and the most uses that these bits hold."""
_LENGTHS = 8
_USED = 8
"""The number of classes of used chunks; the classes of chunks that were never used follow."""
_CLASSES = _USED + 4 * _LENGTHS
_LONGEST = 255


class _Cohort:
    """Ends of one class last used in the same epoch."""

    __slots__ = ("at_risk", "epoch", "head", "kind", "listed")

    def __init__(self, epoch: int, kind: int, head: int) -> None:
        self.epoch = epoch
        self.kind = kind
        self.head = head  # head of the list of its members
        self.at_risk = 0  # chunks that could come back: its ends, and evicted ones
        self.listed = False  # it is in the heap of ranks


class LearningShadow(Shadow):
    """The chunks that, judging by the traffic so far, are most likely to be used soon.

    Similar ends form a **class**, by what is known about them:

    - never used since they were stored: what the request stored them behind, which is nothing (a new prompt), a chunk
      that others follow too (one of many prompts with that beginning), or the end of an earlier prompt (a conversation
      that goes on); and how many chunks it stored, because long documents come back less often than questions;
    - used: how often (1, 2-3, 4-7, 8 or more times), and whether it continues a conversation.

    A run that loses the last run behind it inherits the date, uses and length of that run.

    Ends of one class last used in the same **epoch** form a **cohort** and share one rank (hazards.py). The cohort with
    the lowest rank is evicted first, and within a cohort the least recently used end. An evicted chunk stays in its
    cohort's count until it comes back or is forgotten, so misses are measured as well as hits.
    """

    def __init__(self, runs: Runs) -> None:
        super().__init__(runs)
        self.epoch = 1
        self._left = _SHORTEST  # requests and misses until the next epoch
        self._until_learning = 0
        self._date = runs.column("I")  # epoch of the last use
        self._risk = runs.column("I")  # chunks in a cohort's `at_risk`
        self._class = runs.column("B")  # class of the cohort
        self._since = runs.column("I")  # epoch of the cohort
        self._facts = runs.column("B")  # what it was stored behind, flags, and uses
        self._length = runs.column("B")  # chunks that its request stored up to its end
        self._cohorts: dict[int, _Cohort] = {}  # by epoch * _CLASSES + class
        self._order: list[tuple[float, int, int, _Cohort]] = []  # heap of cohorts that may have members
        self._hazards = Hazards(_CLASSES)

    def note_new(self, run: int, is_part: bool) -> None:
        """Note the facts of a run that was not known before. Called before `insert`."""
        before, facts = self._parent[run], self._facts
        behind = _PART if is_part else _NEW if not before else _BRANCH if facts[before] & _FOLLOWED else _CONTINUED
        facts[run] = behind | _FIRST
        self._length[run] = 1
        if before and before == self._tip != self._hit:
            self._add_uses(before, 1)  # it was a miss of this shadow, so `_used` does not count it
        if before and not is_part:
            facts[before] |= _FOLLOWED

    def use(self, run: int) -> None:
        self._left -= 1
        if self._left <= 0:
            self._next_epoch()
        super().use(run)

    def extend(self, run: int, count: int) -> None:
        self._tick(count)
        self._length[run] = min(_LONGEST, self._length[run] + count)
        self._date[run] = self.epoch
        super().extend(run, count)

    def split(self, run: int, head: int, is_end: bool) -> None:
        facts, risk = self._facts, self._risk
        facts[head] = facts[run] & (_USE - 1) | _FOLLOWED
        facts[run] &= ~_FIRST
        self._length[head] = max(1, self._length[run] - self._size[run])
        for column in (self._date, self._since, self._class):
            column[head] = column[run]
        if self.held[run] <= self._size[head]:  # `head` has its end and the first of its evicted chunks
            risk[head] = max(0, risk[run] - self._size[run])
            risk[run] -= risk[head]
        super().split(run, head, is_end)

    def forget(self, run: int, count: int) -> None:
        if self._risk[run]:
            self._leave_cohort(run, count)

    def _enter(self, run: int, count: int) -> None:
        entered, before = count - self.held[run], self._parent[run]
        self._tick(entered)
        if not self.held[run]:
            self.forget(before, 1)
        self._come_back(run, entered + self._is_end_at_risk(run))
        super()._enter(run, count)
        self._date[run] = self.epoch

    def _used(self, run: int) -> None:
        if self._is_end_at_risk(run):
            self._come_back(run, 1)
        self.links.unlink(run)
        self._add_uses(run, 1)
        self._date[run] = self.epoch
        if run != self._tip and not self.kids[run]:
            self._append(run)

    def _evicted(self, run: int, count: int) -> None:
        more = count - (not self.held[run])  # the end still counts, now as an evicted chunk
        if more and self._risk[run]:
            self._risk[run] += more
            self._cohort(run).at_risk += more

    def _add_end(self, run: int, after: int) -> None:
        if after:
            dates, last = self._date, self._facts[after]
            dates[run] = max(dates[run], dates[after])
            if not last & _FIRST:
                self._length[run] = self._length[after]
            if last >= _USE:
                self._add_uses(run, last // _USE)
        if run != self._tip:
            cohort = self._join(run)
            self.links.prepend(cohort.head, run)
            self._list(cohort)

    def _append(self, run: int) -> None:
        cohort = self._join(run)
        self.links.append(cohort.head, run)
        self._list(cohort)

    def _victim(self) -> int:
        order, links, kept = self._order, self.links, None
        run = 0
        while order and not run:
            cohort = order[0][3]
            run = links.first(cohort.head)
            if run and run == self._tip:
                run = links.after[run] if links.after[run] != cohort.head else 0
                kept = kept if run else order[0]
            if not run:
                cohort.listed = False
                heapq.heappop(order)
        if kept is not None:
            self._list(kept[3])
        return run

    def _add_uses(self, run: int, uses: int) -> None:
        facts = self._facts[run]
        self._facts[run] = facts + _USE * min(uses, _MOST_USES - facts // _USE)

    # -- cohorts

    def _cohort(self, run: int) -> _Cohort:
        return self._cohorts[self._since[run] * _CLASSES + self._class[run]]

    def _join(self, run: int) -> _Cohort:
        """Add an end to its cohort, which begins if necessary; returns the cohort."""
        self.forget(run, self._risk[run])
        facts = self._facts[run]
        uses = facts // _USE
        if uses:
            kind = 2 * min(uses.bit_length() - 1, 3) + (facts & _BEHIND == _CONTINUED)
        else:
            kind = _USED + (facts & _BEHIND) * _LENGTHS + min(self._length[run].bit_length(), _LENGTHS) - 1
        self._class[run], self._since[run] = kind, self._date[run]
        place = self._date[run] * _CLASSES + kind
        cohort = self._cohorts.get(place)
        if cohort is None:
            head = self.links.make(self._runs.new())
            cohort = self._cohorts[place] = _Cohort(self._date[run], kind, head)
        cohort.at_risk += 1
        self._risk[run] = 1
        return cohort

    def _leave_cohort(self, run: int, count: int) -> int:
        """Take up to `count` chunks of a run out of its cohort's count; returns the number taken."""
        left = min(count, self._risk[run])
        self._cohort(run).at_risk -= left
        self._risk[run] -= left
        return left

    def _is_end_at_risk(self, run: int) -> bool:
        """Whether a run's last chunk in the shadow counts as at risk, besides the run's evicted chunks."""
        return self._risk[run] > self._size[run] - self.held[run]

    def _come_back(self, run: int, count: int) -> None:
        """Count a use of up to `count` chunks of a run that are at risk."""
        if self._risk[run]:
            cohort = self._cohort(run)
            self._hazards.came_back(cohort.kind, self.epoch - cohort.epoch, self._leave_cohort(run, count))

    def _list(self, cohort: _Cohort) -> None:
        if not cohort.listed:
            heapq.heappush(self._order, self._entry(cohort))

    def _tick(self, count: int) -> None:
        self._left -= count
        if self._left <= 0:
            self._next_epoch()

    def _next_epoch(self) -> None:
        """Count the chunks at risk in the epoch that ends, learn, and reorder the cohorts. O(cohorts)."""
        self._left = max(_SHORTEST, self.count // EPOCHS)
        self._until_learning -= self._left
        now, hazards = self.epoch, self._hazards
        for place, cohort in list(self._cohorts.items()):
            if cohort.at_risk:
                hazards.could(cohort.kind, now - cohort.epoch, cohort.at_risk)
            else:
                del self._cohorts[place]
                self._runs.free_head(cohort.head)
        self.epoch += 1
        if self._until_learning <= 0:
            self._until_learning = _LEARN
            hazards.learn()
        members = [cohort for cohort in self._cohorts.values() if self.links.first(cohort.head)]
        for cohort in self._cohorts.values():
            cohort.listed = False
        self._order = [self._entry(cohort) for cohort in members]
        heapq.heapify(self._order)

    def _entry(self, cohort: _Cohort) -> tuple[float, int, int, _Cohort]:
        cohort.listed = True
        return self._hazards.rank(cohort.kind, self.epoch - cohort.epoch), cohort.epoch, cohort.kind, cohort
