"""The reuse rate by window: what engines reuse beyond their own caches. Called by core/depot.py; no clock here.

The reuse rate of a window is `reused / asked`, both in tokens:

    asked    tokens of the whole chunks of prompts that engines looked up, when they looked them up
    reused   tokens that engines loaded from the depot, on all ranks, instead of computing them (Status.saved)

An engine does not load what is in its own cache, so finding that in the depot is not reuse. (`HitRate` is what was
found; it says whether the depot is large enough, not what it gains.) A request counts as asked when it is looked up,
and as reused once vLLM's connector has stored the rest of its prompt. In a short window the two may therefore belong
to different requests; the rate is capped at 1.
"""

from __future__ import annotations

from collections import deque

from kvdepot.core.infinite_cache import WINDOWS_S
from kvdepot.protocol.status import Reuse

__all__ = ["Windows"]

_STEPS = 12
"""Marks per window. A window begins at a mark, so it may be up to a twelfth too long."""


class Windows:
    """Marks: earlier values of two token counters that only increase."""

    def __init__(self, now: float) -> None:
        # (when, asked, reused); the first one begins the window
        self._marks = [deque([(now, 0, 0)]) for _ in WINDOWS_S]

    def __repr__(self) -> str:
        return f"<Windows of {sum(map(len, self._marks))} marks>"

    def tick(self, now: float, asked: int, reused: int) -> None:
        """Add marks that are due and drop those no longer needed. asked, reused: tokens since the start."""
        for window_s, marks in zip(WINDOWS_S, self._marks, strict=True):
            if now - marks[-1][0] >= window_s / _STEPS:
                marks.append((now, asked, reused))
            while len(marks) > 1 and now - marks[1][0] >= window_s:
                marks.popleft()

    def rates(self, asked: int, reused: int) -> list[Reuse]:
        """The reuse rate of each window, up to now. asked, reused: tokens since the start."""
        found = []
        for window_s, marks in zip(WINDOWS_S, self._marks, strict=True):
            _, asked_before, reused_before = marks[0]
            tokens, loaded = asked - asked_before, reused - reused_before
            found.append(Reuse(window_s, tokens, loaded, min(loaded / tokens, 1.0) if tokens else 0.0))
        return found
