"""Decides whether to load or compute, from how fast a tier has answered lookups and how fast an engine computes. Pure.

Used by loading.py on the deciding thread. An engine says with each lookup how many tokens a second it computes, for all
its requests together. So a tier's time is measured for all its calls together, too: it begins with the call, or with
the end of the call before if that is later. A tier that has not been measured lately counts as fast, so that a lookup
waits for it and measures it. Invariant: a tier that is slower than computing costs a lookup at most `SLACK` of the time
in which the engine would compute the whole prompt. Lookups in progress when a tier becomes slow are the exception.
"""

from __future__ import annotations

import math

SLACK = 0.05
"""The share of a prompt's time of computing that a lookup may lose by waiting for a tier that has nothing."""
RETRY_S = 10.0
"""Seconds between two lookups that try a slow tier again."""
_STALE_S = 6 * RETRY_S
"""Seconds after which a measurement of loads is void, if a call has reached the tier since. Without this, a tier whose
Finds take longer than the slack would never be measured again, because lookups that try it load nothing."""
_HALF_S = 1.0
"""The weight of a measurement halves in this many seconds, so that a tier that has become slow is noticed soon."""
_FADE_HITS = 0.7
_LATE = 2.0
"""A tier that has not answered yet is expected to take this many times the time that has passed so far."""


class TierSpeed:
    """The measured times of one tier. Sizes are in bytes, times in seconds."""

    __slots__ = (
        "_bytes", "_found_at", "_load_s", "_loaded_at", "_tried_at", "find_s", "hits", "reached_at", "retry_at",
    )  # fmt: skip

    def __init__(self) -> None:
        self.find_s = 0.0  # time of a Find; 0.0: not measured
        self.hits = 1.0  # the share of Finds in which the tier had a shard
        self.reached_at = -math.inf  # when the tier's thread last reached a call, even one that nobody wanted any more
        self.retry_at = 0.0  # when a lookup may try the tier again although it is slow
        self._bytes = self._load_s = 0.0  # sums over loads, the older ones with less weight
        self._found_at = self._loaded_at = self._tried_at = -math.inf

    def found(self, begun: float, now: float, hits: int) -> None:
        """Note that a Find was answered. hits: 1 if the tier has any of the shards asked for, else 0."""
        keep = 0.5 ** (1 + (now - self._found_at) / _HALF_S)
        self.find_s = keep * self.find_s + (1 - keep) * (now - max(begun, self.reached_at))
        self._found_at = now
        self.hits = _FADE_HITS * self.hits + (1 - _FADE_HITS) * hits

    def loaded(self, size: int, begun: float, now: float) -> None:
        """Note that all loads of one lookup have ended. size: their bytes; 0: other lookups began them."""
        if not size:
            return
        took_s = now - max(begun, self._loaded_at)
        keep = 0.5 ** ((now - self._loaded_at) / _HALF_S)
        # The fixed time of a call does not depend on its bytes; the time of a Find measures it.
        self._load_s = keep * self._load_s + max(took_s - self.find_s, took_s / 10)
        self._bytes = keep * self._bytes + size
        self._loaded_at = self._tried_at = now

    def find_late(self, begun: float, now: float) -> None:
        """Note that a lookup has stopped waiting for a Find."""
        self.find_s = max(self.find_s, _LATE * (now - max(begun, self.reached_at)))

    def load_late(self, size: int, begun: float, now: float) -> None:
        """Note that a lookup has stopped waiting for its loads. size: their bytes; 0: other lookups began them."""
        if not size:
            return
        expected_s = _LATE * (now - max(begun, self._loaded_at))
        if expected_s > self.load_s(size, now):
            self._load_s, self._bytes = expected_s, size
        self._tried_at = now

    def load_s(self, size: int, now: float) -> float:
        """The expected time of loading `size` bytes after the Find; 0.0: unknown."""
        is_stale = now - self._tried_at > _STALE_S and self.reached_at > self._tried_at
        if not self._bytes or not size or is_stale:
            return 0.0
        return self.find_s + size * self._load_s / self._bytes

    def pays(self, size: int, compute_s: float, slack_s: float, now: float) -> bool:
        """Whether to ask for up to `size` bytes, which the engine would compute in `compute_s`.

        slack_s: the time that the lookup may lose if the tier has nothing.
        """
        gain_s = compute_s - self.load_s(size, now)
        return gain_s > 0 and (self.find_s <= slack_s or self.find_s < self.hits * gain_s)
