"""What engines reuse beyond their own caches, by window: the headline of a status. Called by depot.py; no clock here.

The reuse rate of a window is `reused / asked`, both in tokens:

    asked    tokens of the whole chunks of prompts that engines looked up, when they looked them up
    reused   tokens that engines loaded from the depot, on all ranks, instead of computing them (Status.saved)

What an engine had in its own cache it does not load: looked up and found in the depot, it is no reuse. (How much is
found is another figure, `HitRate`: it says whether the depot is large enough, not what it gains.) A request is asked
for when it is looked up, and counts as reused once vLLM's connector has stored the rest of its prompt, so in a window
shorter than that takes the two may be of different requests; the rate is 1 at most.
"""

from __future__ import annotations

from collections import deque

from kvdepot.core.infinite_cache import WINDOWS_S
from kvdepot.protocol.status import Reuse

__all__ = ["Windows"]

_STEPS = 12
"""Marks in a window: it begins at one of them, up to a twelfth of its length early."""


class Windows:
    """Marks of two counters of tokens that only rise."""

    def __init__(self, now: float) -> None:
        self._marks = [deque([(now, 0, 0)]) for _ in WINDOWS_S]  # (when, asked, reused); first: where a window begins

    def __repr__(self) -> str:
        return f"<Windows of {sum(map(len, self._marks))} marks>"

    def tick(self, now: float, asked: int, reused: int) -> None:
        """Let time pass. asked, reused: tokens since the start."""
        for window_s, marks in zip(WINDOWS_S, self._marks, strict=True):
            if now - marks[-1][0] >= window_s / _STEPS:
                marks.append((now, asked, reused))
            while len(marks) > 1 and now - marks[1][0] >= window_s:
                marks.popleft()

    def rates(self, asked: int, reused: int) -> list[Reuse]:
        """Of each window until now. asked, reused: tokens since the start."""
        found = []
        for window_s, marks in zip(WINDOWS_S, self._marks, strict=True):
            _, asked_before, reused_before = marks[0]
            tokens, loaded = asked - asked_before, reused - reused_before
            found.append(Reuse(window_s, tokens, loaded, min(loaded / tokens, 1.0) if tokens else 0.0))
        return found
