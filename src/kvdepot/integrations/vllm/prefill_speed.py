"""How fast an engine computes prompts: by what a load is worth, in seconds.

The connector's scheduler calls it, with what it builds and what comes back. An engine builds steps ahead (vLLM's async
scheduling): the next one is built within milliseconds, while the first still runs, and only the output ends a step. The
one law: a step's time is that from its being built, or from the output before it where that came later, to its own
output; and a step whose output is not known to be its own is not measured. Nor is an engine's first: it pays for
memory that is touched for the first time and for kernels that are chosen or compiled, and took up to six times as long
as the next. An engine that loads nearly all of its prompts would price them by that step alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from statistics import median_high
from typing import NamedTuple

__all__ = ["PrefillSpeed"]

_LARGE_PART = 256
"""Tokens of one request that make a step one of prefill: decoding takes one or a few, and smaller steps are mostly
overhead."""
_MOST_BUILT = 64
"""Steps whose output is awaited: what never comes is forgotten."""
_SAMPLES = 31
"""Steps that the speed is the median of: one that was slow (another compilation) or seemed fast (its output before it
was late) does not count for long."""


class _Built(NamedTuple):
    step: int
    tokens: int
    at: float


class PrefillSpeed:
    """Tokens a second of this engine's latest steps of prefill. Times are those of any clock that only rises."""

    def __init__(self) -> None:
        self._last_step = 0
        self._built: deque[_Built] = deque(maxlen=_MOST_BUILT)
        self._output_at = -math.inf  # of the latest output
        self._is_warm = False  # whether the first measured step is over
        self._samples: deque[float] = deque(maxlen=_SAMPLES)

    def __repr__(self) -> str:
        return f"<PrefillSpeed {self.speed:.0f} tokens/s, {len(self._samples)} steps>"

    @property
    def speed(self) -> float:
        """The median; 0.0 while it is not known."""
        return median_high(self._samples) if self._samples else 0.0

    def built(self, tokens: Collection[int], now: float) -> int:
        """A step is built, of so many tokens of each request. Returns the number that its output is to bring back; 0
        for a step that says nothing of prefill."""
        if max(tokens, default=0) < _LARGE_PART:
            return 0
        self._last_step += 1
        self._built.append(_Built(self._last_step, sum(tokens), now))
        return self._last_step

    def output(self, step: int, now: float) -> None:
        """An output has come; step: the number it brings, 0 where it brings none. Outputs come in the order of steps;
        those of some never do."""
        before, self._output_at = self._output_at, now
        while self._built and self._built[0].step <= step:
            built = self._built.popleft()
            took_s = now - max(built.at, before)
            if built.step == step and took_s > 0 and self._is_warm:
                self._samples.append(built.tokens / took_s)
            self._is_warm = True
