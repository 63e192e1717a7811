"""The policy `adaptive`: evicts the chunks that, judging by the traffic so far, are least likely to be used soon.

It does not simulate other policies. It measures how soon chunks come back, depending on what is known about them:

- Similar chunks form a **class**: how often they were used (0, 1, 2-3, 4-7, 8 or more times), and whether they were
  stored behind a chunk that was a hit, like the next turn of a chat. Chunks of a class that were last used in the same
  **epoch**, a sixteenth of a turnover of the cache, form a **cohort** and share one rank.
- An evicted chunk stays in its cohort as a **ghost** (its key) until it comes back, or until there are more ghosts than
  chunks. So misses are measured as well as hits.
- Once per epoch each class's hazard is estimated by age: chunks that came back over chunks that could have. The rank of
  a cohort is its Gittins index: the highest number of uses per epoch of occupied space that keeping it, up to the best
  time to evict it, yields (J. C. Gittins, 1979; for caches see Beckmann et al., "LHD", NSDI 2018). The lowest goes
  first.

If chunks come back soon or never, the index falls with age, and this is LRU; if the number of uses predicts the next,
it is LFU. In a flood of prompts that never repeat it evicts new chunks first; in a loop larger than the cache, the
youngest. Estimates from few events are pulled towards those of all classes, and these towards 1 / age.

**Chains.** Only the end of a chain can be evicted, so only ends are measured. A chunk leaves its cohort when another is
stored behind it; when that one is removed, the chunk inherits its date and uses, and joins the cohort for them.

**Known weaknesses.** Chunks of one prompt come back together, so hits are fewer independent events than they seem. In a
cache for a few dozen prompts the measurements are noise: it was up to 2.5 points of hit rate below LRU (chats, agents),
and up to 1.6 below S3-FIFO with a few popular prompts in a flood of others. When the traffic changes, it needs up to a
turnover of the cache to adapt.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from math import exp

from kvdepot.eviction.policy import Victim

__all__ = ["Adaptive"]

_EPOCHS = 16
"""Epochs per turnover; a turnover is as many uses and insertions as there are chunks."""
_SHORTEST = 32
"""Minimum number of events in an epoch, to spread the cost of starting one."""
_MOST_USES = 8
_CLASSES = 10
_CLASS = tuple(2 * min(4, uses.bit_length()) for uses in range(_MOST_USES + 1))
"""Class by uses; plus one if the chunk followed a hit."""
_ENDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Ends of the ranges in which ages are measured, in epochs; each starts at the end of the one before."""
_AGES = len(_ENDS)
_MIDDLES = tuple(end * 0.75 for end in _ENDS)
_WIDTHS = tuple(end - start for start, end in zip((0, *_ENDS), _ENDS, strict=False))
_OLDEST = _ENDS[-1] - 1
_AGE = tuple(age.bit_length() for age in range(_OLDEST + 1))
"""The range of each age; higher ages count as `_OLDEST`."""
_PRIOR = tuple(0.5 / (middle + _EPOCHS / 4) for middle in _MIDDLES)
"""Expected uses per epoch at an age without measurements."""
_TRUST_AGE, _TRUST_CLASS, _TRUST = 2.0, 10.0, 20.0
"""Measured uses at which the measurement weighs as much as the expectation: for an age, a class, both."""
_ENOUGH = 500.0
"""Up to this many uses nothing is forgotten; above it, at most `_FORGOTTEN` per epoch."""
_FORGOTTEN = 0.3 / _EPOCHS


class _Cohort:
    """Chunks of one class last used in the same epoch."""

    __slots__ = ("at_risk", "epoch", "kind", "listed", "members", "rank")

    def __init__(self, epoch: int, kind: int) -> None:
        self.epoch = epoch
        self.kind = kind
        self.members: dict[int, Victim] = {}  # by id(); the last one to join is evicted first
        self.at_risk = 0  # members and ghosts
        self.rank = 0.0
        self.listed = False  # in the heap of ranks


class Adaptive:
    """Lowest Gittins index first, measured."""

    def __init__(self) -> None:
        self._chunks = 0
        self._queued = 0
        self._epoch = 0
        self._left = _SHORTEST  # events until the next epoch
        self._cohorts: dict[int, _Cohort] = {}  # by epoch * _CLASSES + class, which is a chunk's `place`
        self._order: list[tuple[float, int, int, _Cohort]] = []  # heap of cohorts that may have members
        # Key -> place * 16 + uses, in the order of eviction. (Not a plain dict: see S3Fifo.)
        self._ghosts: OrderedDict[bytes, int] = OrderedDict()
        self._uses = [[0.0] * _AGES for _ in range(_CLASSES)]  # chunks that came back
        self._risk = [[0.0] * _AGES for _ in range(_CLASSES)]  # epochs in which chunks could have come back
        self._factor = [1.0] * _CLASSES  # ratio of a class's hazard to that of all classes at the same age
        self._rank = [[0.0] * _AGES for _ in range(_CLASSES)]
        self._learn()

    def __repr__(self) -> str:
        return f"<Adaptive {self._queued} queued in {len(self._cohorts)} cohorts, {len(self._ghosts)} ghosts>"

    def insert(self, chunk: Victim) -> None:
        self._chunks += 1
        self._left -= 1
        if self._left <= 0:
            self._next_epoch()
        before: Victim | None = chunk.parent
        if before is not None:
            chunk.follows = before.follows or before.hit
            if before.queued:
                self._leave(before)
        chunk.hit = False
        chunk.uses = 0
        ghost = self._ghosts.pop(chunk.key, None)
        if ghost is not None:
            place, uses = divmod(ghost, 16)
            self._came_back(self._cohorts[place])
            chunk.uses = min(uses + 1, _MOST_USES)
            chunk.follows = chunk.follows or place % 2 == 1
        chunk.place = self._epoch * _CLASSES + _CLASS[chunk.uses] + chunk.follows

    def use(self, chunk: Victim) -> None:
        self._left -= 1
        if self._left <= 0:
            self._next_epoch()
        if chunk.queued:
            self._came_back(self._leave(chunk), 0)
        chunk.hit = True
        if chunk.uses < _MOST_USES:
            chunk.uses += 1
        chunk.place = self._epoch * _CLASSES + _CLASS[chunk.uses] + chunk.follows

    def touch(self, chunk: Victim) -> None:
        """Does nothing: within a cohort the last one to join is evicted first, and that is the tail."""

    def add(self, chunk: Victim) -> None:
        if chunk.queued:
            return
        place = chunk.place
        cohort = self._cohorts.get(place)
        if cohort is None:
            cohort = self._cohorts[place] = _Cohort(*divmod(place, _CLASSES))
        cohort.members[id(chunk)] = chunk
        cohort.at_risk += 1
        chunk.queued = 1
        self._queued += 1
        if not cohort.listed:
            self._list(cohort)
            heapq.heappush(self._order, (cohort.rank, cohort.epoch, cohort.kind, cohort))

    def victim(self, evictable: Callable[[Victim], bool]) -> Victim | None:
        order = self._order
        while order:
            cohort = order[0][3]
            members = cohort.members
            while members:
                chunk = members.popitem()[1]
                chunk.queued = 0
                cohort.at_risk -= 1
                self._queued -= 1
                if not chunk.gone and evictable(chunk):
                    return chunk
            cohort.listed = False
            heapq.heappop(order)
        return None

    def remove(self, chunk: Victim, evicted: bool) -> None:
        self._chunks -= 1
        if chunk.queued:
            self._leave(chunk)
        ghosts = self._ghosts
        if evicted:
            self._forget(ghosts.pop(chunk.key, None))  # a chunk of another namespace may have the same key
            cohort = self._cohorts.get(chunk.place)
            if cohort is None:
                cohort = self._cohorts[chunk.place] = _Cohort(*divmod(chunk.place, _CLASSES))
            cohort.at_risk += 1
            ghosts[chunk.key] = chunk.place * 16 + chunk.uses
        while len(ghosts) > self._chunks:
            self._forget(ghosts.popitem(last=False)[1])
        before: Victim | None = chunk.parent
        if before is not None:
            if before.queued:
                self._leave(before)
            before.uses = min(before.uses + chunk.uses, _MOST_USES)
            epoch = max(before.place, chunk.place) // _CLASSES
            before.place = epoch * _CLASSES + _CLASS[before.uses] + before.follows

    # -- cohorts

    def _leave(self, chunk: Victim) -> _Cohort:
        cohort = self._cohorts[chunk.place]
        del cohort.members[id(chunk)]
        cohort.at_risk -= 1
        chunk.queued = 0
        self._queued -= 1
        return cohort

    def _forget(self, ghost: int | None) -> None:
        if ghost is not None:
            self._cohorts[ghost // 16].at_risk -= 1

    def _came_back(self, cohort: _Cohort, leaves: int = 1) -> None:
        cohort.at_risk -= leaves
        self._uses[cohort.kind][_AGE[min(self._epoch - cohort.epoch, _OLDEST)]] += 1

    def _list(self, cohort: _Cohort) -> None:
        """Rank it by its age, interpolated, because otherwise a whole range of ages would be evicted at once."""
        cohort.listed = True
        age = min(self._epoch - cohort.epoch, _OLDEST) + 0.5
        at = _AGE[int(age)]
        at -= age < _MIDDLES[at] and at > 0
        at = min(at, _AGES - 2)
        ranks = self._rank[cohort.kind]
        part = (age - _MIDDLES[at]) / (_MIDDLES[at + 1] - _MIDDLES[at])
        cohort.rank = ranks[at] + (ranks[at + 1] - ranks[at]) * min(1.0, max(0.0, part))

    def _next_epoch(self) -> None:
        """Count the chunks at risk in the epoch that ends, learn, and reorder the cohorts. O(cohorts)."""
        self._left = max(_SHORTEST, self._chunks // _EPOCHS)
        now = self._epoch
        risk = self._risk
        empty = []
        for place, cohort in self._cohorts.items():
            if cohort.at_risk:
                risk[cohort.kind][_AGE[min(now - cohort.epoch, _OLDEST)]] += cohort.at_risk
            else:
                empty.append(place)
        for place in empty:
            del self._cohorts[place]
        self._epoch += 1
        self._learn()
        self._order = []
        for cohort in self._cohorts.values():
            cohort.listed = False
            if cohort.members:
                self._list(cohort)
                self._order.append((cohort.rank, cohort.epoch, cohort.kind, cohort))
        heapq.heapify(self._order)

    def _learn(self) -> None:
        """Compute hazards and ranks from the counts."""
        factor = self._factor
        hazard = []  # of all classes, weighted by their factors, by age
        for age in range(_AGES):
            came = sum(uses[age] for uses in self._uses)
            could = sum(risk[age] * factor[kind] for kind, risk in enumerate(self._risk))
            hazard.append((came + _TRUST_AGE) / (could + _TRUST_AGE / _PRIOR[age]))
        total = sum(map(sum, self._uses))
        kept = max(1 - _FORGOTTEN, min(1.0, _ENOUGH / max(total, 1.0)))
        for kind in range(_CLASSES):
            uses, risk = self._uses[kind], self._risk[kind]
            expected = sum(map(float.__mul__, risk, hazard))
            factor[kind] = (sum(uses) + _TRUST_CLASS) / (expected + _TRUST_CLASS)
            self._rank[kind] = _gittins(
                [
                    (uses[age] + _TRUST) / (risk[age] + _TRUST / (hazard[age] * factor[kind]))
                    for age in range(_AGES)
                ]
            )  # fmt: skip
            if kept < 1:
                self._uses[kind] = [kept * value for value in uses]
                self._risk[kind] = [kept * value for value in risk]


def _gittins(hazards: list[float]) -> list[float]:
    """For each age, the highest ratio of expected uses to time, over all ages up to which the chunk could be kept."""
    ranks = [0.0] * _AGES
    best: list[tuple[float, float]] = []  # ranges of ages, the youngest last: probability of a use, expected time
    for age in range(_AGES - 1, -1, -1):
        chance = 1 - exp(-hazards[age] * _WIDTHS[age])
        time = chance / hazards[age]
        while best and best[-1][0] * time > chance * best[-1][1]:  # keeping it longer yields more
            more, longer = best.pop()
            time += (1 - chance) * longer
            chance += (1 - chance) * more
        best.append((chance, time))
        ranks[age] = chance / time
    return ranks
