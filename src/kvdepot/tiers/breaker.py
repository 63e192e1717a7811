"""Circuit breakers of a tier: when they open, and when the tier is tried again. Pure: time is an argument.

A tier has one for all its calls, which its probes close, and one for each kind of call: a store may answer everything
but reads, because its user may not read, or everything but writes, because it has become a replica.
"""

from __future__ import annotations

FAILURES = 3
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0
FORGET_S = 60.0
_NEVER = float("inf")


class Breaker:
    """A circuit breaker. `usable`: it is closed, and calls may be made.

    It opens after FAILURES failures with no success in between, or when the first probe of a tier that has never
    answered fails. From `retry_at` on, calls of one kind are made again (`tick`), and the tier gets a probe: another
    failure opens it for twice as long, a success closes it.
    """

    __slots__ = ("error", "failures", "last_success", "retry_at", "usable", "wait_s")

    def __init__(self) -> None:
        self.error = ""  # the text of the last failure
        self.last_success = -_NEVER
        self._close()

    def _close(self) -> None:
        self.usable = True
        self.failures = 0
        self.wait_s = FIRST_WAIT_S
        self.retry_at = _NEVER

    @property
    def is_failing(self) -> bool:
        return self.failures >= FAILURES

    def succeeded(self, now: float) -> bool:
        """A call succeeded. Returns whether calls failed before."""
        was_failing = self.is_failing
        self._close()
        self.last_success = now
        return was_failing

    def failed(self, now: float, why: str, is_probe: bool = False) -> bool:
        """A call failed or timed out. Returns whether this failure opens the breaker after a success."""
        if not self.usable and now < self.retry_at:
            return False  # the call began before the breaker opened
        if is_probe and self.last_success == -_NEVER:
            self.failures = max(self.failures, FAILURES - 1)  # the tier has never answered
        self.failures += 1
        self.error = why
        if not self.is_failing:
            return False
        if self.failures > FAILURES:
            self.wait_s = min(2 * self.wait_s, LONGEST_WAIT_S)
        self.usable = False
        self.retry_at = now + self.wait_s
        return self.failures == FAILURES

    def forgive(self) -> None:
        """Let calls be made: the tier is back. The first one that fails opens it again."""
        self.usable = True
        self.failures = min(self.failures, FAILURES - 1)

    def tick(self, now: float) -> None:
        """Let calls be made again if the pause is over. If none fails for FORGET_S, earlier failures are forgotten."""
        self.usable = self.usable or now >= self.retry_at
        if self.is_failing and now >= self.retry_at + FORGET_S:
            self.forgive()
            self.wait_s = FIRST_WAIT_S
