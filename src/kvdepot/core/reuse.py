"""Shares by window: of the prompt tokens that engines asked for beyond their own caches, how many they reused, how many
were there, and how many an infinite cache would have had. Called by core/depot.py; no clock here.

    asked    tokens of prompts that engines looked up and did not have in their own caches
    found    of these, in the depot
    reused   tokens that engines loaded from the depot, on all ranks, instead of computing them
    bound    what an infinite cache would have found, an estimate

Finding what an engine has itself is not reuse, so none of the four counts it, if the engine tells (core/usage.py).
vLLM's connector reports all of a request together, when the rest of its prompt is stored. Other clients' lookups count
at once, and what they reuse at the end of the request, so in a short window these may belong to different requests;
shares are capped at 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvdepot.protocol.status import HitRate, Reuse, TokenCounts

__all__ = ["WINDOWS_S", "Windows"]

WINDOWS_S = (60.0, 600.0, 3600.0, 86400.0)
_STEPS = 12
"""Marks per window. A window begins at a mark, so it may be up to a twelfth too long."""


class Windows:
    """Marks: earlier values of counters that only increase."""

    def __init__(self, now: float) -> None:
        # (when, tokens, chunks looked up); the first one begins the window
        self._marks = [deque([(now, TokenCounts(bound=0), 0)]) for _ in WINDOWS_S]

    def __repr__(self) -> str:
        return f"<Windows of {sum(map(len, self._marks))} marks>"

    def tick(self, now: float, tokens: TokenCounts, chunks: int) -> None:
        """Add marks that are due and drop those no longer needed. tokens, chunks: looked up since the start."""
        for window_s, marks in zip(WINDOWS_S, self._marks, strict=True):
            if now - marks[-1][0] >= window_s / _STEPS:
                marks.append((now, tokens, chunks))
            while len(marks) > 1 and now - marks[1][0] >= window_s:
                marks.popleft()

    def rates(self, tokens: TokenCounts) -> list[Reuse]:
        """The tokens of each window, up to now. tokens: since the start."""
        found = []
        for window_s, marks in zip(WINDOWS_S, self._marks, strict=True):
            before = marks[0][1]
            asked, reused = tokens.asked - before.asked, tokens.reused - before.reused
            bound = None if tokens.bound is None else tokens.bound - (before.bound or 0)
            found.append(Reuse(window_s, asked, reused, _share(reused, asked), tokens.found - before.found, bound))
        return found

    def hit_rates(self, windows: Sequence[Reuse], chunks: int) -> list[HitRate]:
        """The shares found, and their upper bounds; empty without an upper bound.

        windows: from `rates`. chunks: looked up since the start.
        """
        rates = []
        for each, marks in zip(windows, self._marks, strict=True):
            if each.bound_tokens is None:
                return []
            rate = _share(each.found_tokens, each.asked_tokens)
            bound = max(_share(each.bound_tokens, each.asked_tokens), rate)
            rates.append(HitRate(each.window_s, chunks - marks[0][2], rate, bound))
        return rates


def _share(part: int, whole: int) -> float:
    return min(part / whole, 1.0) if whole else 0.0
