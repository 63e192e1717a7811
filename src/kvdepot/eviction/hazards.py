"""Measures how soon chunks come back, by class and age, and computes how much keeping them is worth; see shadows.py.

A class's **hazard** at an age is the number of chunks that came back at that age over the number that could have. The
**rank** of a chunk is its Gittins index: the highest number of uses per epoch of occupied space that keeping it, up to
the best time to evict it, yields (J. C. Gittins, 1979; for caches see Beckmann et al., "LHD", NSDI 2018). If chunks
come back soon or never, ranks fall with age, as in LRU; in a loop that is larger than the cache they rise.

An estimate from few events is pulled towards that of all classes at that age, and the latter towards 1 / age.
"""

from __future__ import annotations

from math import exp

EPOCHS = 32
"""Epochs per turnover. An epoch is the unit of age; a turnover is as many requests and misses as there are chunks."""
_ENDS = tuple(1 << n for n in range(12))
"""Ends of the ranges in which ages are measured, in epochs; each starts at the end of the one before."""
_AGES = len(_ENDS)
_MIDDLES = tuple(end * 0.75 for end in _ENDS)
_WIDTHS = tuple(end - start for start, end in zip((0, *_ENDS), _ENDS, strict=False))
_OLDEST = _ENDS[-1] - 1
_PRIOR = tuple(0.5 / (middle + EPOCHS / 4) for middle in _MIDDLES)
"""Expected uses per epoch at an age without measurements."""
_TRUST_AGE, _TRUST_CLASS, _TRUST = 20.0, 10.0, 20.0
"""Measured uses at which a measurement weighs as much as the expectation: of an age, of a class, and of both."""
_ENOUGH = 500.0
"""The number of uses up to which all counts are kept; above it, at most the share `_FORGOTTEN` is lost per epoch."""
_FORGOTTEN = 0.3 / EPOCHS


class Hazards:
    """Counts and ranks of `classes` classes."""

    def __init__(self, classes: int) -> None:
        self._uses = [[0.0] * _AGES for _ in range(classes)]  # chunks that came back
        self._risk = [[0.0] * _AGES for _ in range(classes)]  # epochs in which chunks could have come back
        self._factor = [1.0] * classes  # ratio of a class's hazard to that of all classes at the same age
        self._rank = [_gittins(list(_PRIOR))] * classes

    def came_back(self, kind: int, age: int, chunks: int) -> None:
        """Count chunks of a class that were used at an age, in epochs."""
        self._uses[kind][min(age, _OLDEST).bit_length()] += chunks

    def could(self, kind: int, age: int, chunks: int) -> None:
        """Count chunks of a class and age that could have come back during an epoch."""
        self._risk[kind][min(age, _OLDEST).bit_length()] += chunks

    def rank(self, kind: int, age: int) -> float:
        """The rank of a class at an age, interpolated, because otherwise a whole range would be evicted at once."""
        exact = min(age, _OLDEST) + 0.5
        at = int(exact).bit_length()
        at -= exact < _MIDDLES[at] and at > 0
        at = min(at, _AGES - 2)
        ranks = self._rank[kind]
        part = (exact - _MIDDLES[at]) / (_MIDDLES[at + 1] - _MIDDLES[at])
        return ranks[at] + (ranks[at + 1] - ranks[at]) * min(1.0, max(0.0, part))

    def learn(self) -> None:
        """Compute the ranks from the counts. O(classes)."""
        all_uses, all_risk, factor = self._uses, self._risk, self._factor
        seen = [kind for kind in range(len(factor)) if any(all_risk[kind]) or any(all_uses[kind])]
        hazard = []  # by age: hazard of all classes, weighted by their factors
        for age in range(_AGES):
            came = sum(all_uses[kind][age] for kind in seen)
            could = sum(all_risk[kind][age] * factor[kind] for kind in seen)
            hazard.append((came + _TRUST_AGE) / (could + _TRUST_AGE / _PRIOR[age]))
        self._rank = [_gittins(hazard)] * len(factor)
        total = sum(sum(all_uses[kind]) for kind in seen)
        kept = max(1 - _FORGOTTEN, min(1.0, _ENOUGH / max(total, 1.0)))
        for kind in seen:
            uses, risk = all_uses[kind], all_risk[kind]
            expected = sum(map(float.__mul__, risk, hazard))
            ratio = factor[kind] = (sum(uses) + _TRUST_CLASS) / (expected + _TRUST_CLASS)
            self._rank[kind] = _gittins(
                [
                    (came + _TRUST) / (could + _TRUST / (usual * ratio))
                    for came, could, usual in zip(uses, risk, hazard, strict=True)
                ]
            )
            if kept < 1:
                all_uses[kind] = [kept * value for value in uses]
                all_risk[kind] = [kept * value for value in risk]


def _gittins(hazards: list[float]) -> list[float]:
    """The highest ratio of expected uses to time for each age, over all ages up to which the chunk could be kept."""
    ranks = [0.0] * _AGES
    best: list[tuple[float, float]] = []  # ranges of ages, the youngest last: probability of a use, expected time
    for age in range(_AGES - 1, -1, -1):
        chance = 1 - exp(-hazards[age] * _WIDTHS[age])
        time = chance / hazards[age]
        while best and best[-1][0] * time > chance * best[-1][1]:  # keeping the chunk longer yields more uses per time
            more, longer = best.pop()
            time += (1 - chance) * longer
            chance += (1 - chance) * more
        best.append((chance, time))
        ranks[age] = chance / time
    return ranks
