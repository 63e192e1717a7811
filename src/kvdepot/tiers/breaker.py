"""A tier's circuit breaker: when it opens, and when the tier is tried again. Pure: time is an argument."""

from __future__ import annotations

from collections import Counter

__all__ = ["FAILURES", "PROBES", "Breaker"]

FAILURES = 3
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0
PROBES = "probes"
"""The kind of call that any success makes good."""
_NEVER = float("inf")


class Breaker:
    """One tier's circuit breaker. `usable`: it is closed, and the tier may be called.

    It opens after FAILURES failures of one kind of call with no success of that kind in between, because a store may
    answer everything but reads, or when the first probe of a tier that has never answered fails. While it is open, the
    tier gets one harmless probe at `probe_at`, after a pause that doubles with each failure that follows; any success
    closes it. Until a call of the kind that failed succeeds, the next one that fails opens it again.
    """

    __slots__ = ("failures", "last_success", "probe_at", "usable", "wait_s")

    def __init__(self) -> None:
        self.usable = True
        self.failures: Counter[str] = Counter()  # by kind of call, since its last success
        self.last_success = -_NEVER
        self.wait_s = FIRST_WAIT_S
        self.probe_at = _NEVER

    @property
    def failing(self) -> list[str]:
        """The kinds of call that have opened it more than once, and of which none has succeeded since."""
        return [kind for kind, failures in self.failures.items() if failures > FAILURES and kind != PROBES]

    def succeeded(self, now: float, kind: str) -> bool:
        """A call of this kind succeeded; whether that closes the breaker."""
        closes = not self.usable
        self.usable, self.last_success, self.probe_at = True, now, _NEVER
        for each in (PROBES, kind):
            self.failures.pop(each, None)
        if not self.failures:
            self.wait_s = FIRST_WAIT_S
        return closes

    def failed(self, now: float, kind: str) -> bool:
        """A call of this kind failed or timed out; whether that opens the breaker."""
        if not self.usable and now < self.probe_at:
            return False  # called before the breaker opened
        self.failures[kind] += 1
        was_never_there = kind == PROBES and self.last_success == -_NEVER
        if self.usable and self.failures[kind] < FAILURES and not was_never_there:
            return False
        opens = self.usable
        if not opens or self.failures[kind] > FAILURES:
            self.wait_s = min(2 * self.wait_s, LONGEST_WAIT_S)
        self.usable = False
        self.probe_at = now + self.wait_s
        return opens
