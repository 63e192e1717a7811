"""A tier's circuit breaker: when it opens, and when the tier is probed. Pure: time is an argument.

It opens after FAILURES failures with no success in between, or when the first probe of a tier that has never answered
fails. While it is open, the tier gets one harmless probe after a pause, which doubles with each probe that fails; a
probe that succeeds closes it.
"""

from __future__ import annotations

__all__ = ["Breaker"]

FAILURES = 3
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0


class Breaker:
    """One tier's circuit breaker. `usable`: it is closed, and the tier may be called."""

    __slots__ = ("failures", "last_success", "probe_at", "trips", "usable", "wait_s")

    def __init__(self) -> None:
        self.usable = True
        self.failures = 0
        self.last_success = float("-inf")
        self.wait_s = FIRST_WAIT_S
        self.probe_at = float("inf")
        """Time of the next probe."""
        self.trips = 0

    def succeeded(self, now: float) -> bool:
        """A call succeeded; whether that closes the breaker."""
        back = not self.usable
        self.usable = True
        self.failures = 0
        self.last_success = now
        self.wait_s = FIRST_WAIT_S
        self.probe_at = float("inf")
        return back

    def failed(self, now: float, is_probe: bool = False) -> bool:
        """A call failed or timed out; whether that opens the breaker. is_probe: the call was a probe."""
        if not self.usable and now < self.probe_at:
            return False  # called before the breaker opened
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
