"""An engine's prefill speed, from which follow the seconds that a load saves.

The connector's scheduler reports the steps that it builds and their outputs. With vLLM's async scheduling the next step
is built within milliseconds, while the first still runs, and only its output ends a step. A step's time is counted
from when it was built, or from the previous output if that came later, to its own output. Steps whose output cannot be
attributed are not measured. Nor is an engine's first: it pays for the first touch of memory and for kernels being
chosen or compiled, and took up to six times as long as the next; an engine that loads nearly all of its prompts would
value them by that step alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from statistics import median_high
from typing import NamedTuple

__all__ = ["PrefillSpeed"]

_LARGE_PART = 256
"""A step counts as prefill from this many tokens of one request: decoding takes a few, and small steps are mostly
overhead."""
_MOST_BUILT = 64
"""Steps whose output is awaited; a bound, as some never come."""
_SAMPLES = 31
"""The speed is the median of this many steps, so one that was slow (another compilation) or seemed fast (the output
before it was late) does not count for long."""


class _Built(NamedTuple):
    step: int
    tokens: int
    at: float


class PrefillSpeed:
    """Tokens per second of this engine's latest prefill steps. Times are those of any monotonic clock."""

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
        """The median in tokens per second; 0.0 while it is unknown."""
        return median_high(self._samples) if self._samples else 0.0

    def built(self, tokens: Collection[int], now: float) -> int:
        """A step is built. tokens: of each of its requests. Returns the number that its output brings back; 0 for a
        step that is not prefill."""
        if max(tokens, default=0) < _LARGE_PART:
            return 0
        self._last_step += 1
        self._built.append(_Built(self._last_step, sum(tokens), now))
        return self._last_step

    def output(self, step: int, now: float) -> None:
        """An output has come. step: the number that it brings back; 0 if none. Outputs come in the order of steps; some
        never come."""
        before, self._output_at = self._output_at, now
        while self._built and self._built[0].step <= step:
            built = self._built.popleft()
            took_s = now - max(built.at, before)
            if built.step == step and took_s > 0 and self._is_warm:
                self._samples.append(built.tokens / took_s)
            self._is_warm = True
