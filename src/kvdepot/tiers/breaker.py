"""When a tier is left alone, and when it is tried again. Pure: time is an argument.

A tier that fails FAILURES times with no success in between is left alone, as is one that has never answered when its
first probe fails; after a while it is asked one harmless
question, and when it answers that, it is used again. Each question that fails doubles the while.
"""

from __future__ import annotations

__all__ = ["Breaker"]

FAILURES = 3
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0


class Breaker:
    """One tier's. `usable` says whether it may be asked."""

    __slots__ = ("failures", "last_success", "probe_at", "trips", "usable", "wait_s")

    def __init__(self) -> None:
        self.usable = True
        self.failures = 0
        self.last_success = float("-inf")
        self.wait_s = FIRST_WAIT_S
        self.probe_at = float("inf")
        """When to ask whether it is back."""
        self.trips = 0

    def succeeded(self, now: float) -> bool:
        """It answered; True when it had been left alone until now."""
        back = not self.usable
        self.usable = True
        self.failures = 0
        self.last_success = now
        self.wait_s = FIRST_WAIT_S
        self.probe_at = float("inf")
        return back

    def failed(self, now: float, is_probe: bool = False) -> bool:
        """It failed, or did not answer in time; True when it is to be left alone from now on.

        is_probe: it was asked whether it is there at all, and nothing else.
        """
        if not self.usable and now < self.probe_at:
            return False  # asked before it was left alone
        self.failures += 1
        was_never_there = is_probe and self.last_success == float("-inf")
        if self.usable and self.failures < FAILURES and not was_never_there:
            return False
        tripped = self.usable
        if not tripped:
            self.wait_s = min(2 * self.wait_s, LONGEST_WAIT_S)
        self.trips += tripped
        self.usable = False
        self.probe_at = now + self.wait_s
        return tripped
