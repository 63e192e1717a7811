"""A tier's circuit breakers: when they open, and when the tier is tried again. Pure: time is an argument.

There is one of the whole tier (`Breaker`), and one of each kind of call (`CallBreaker`): a store may answer everything
but reads, because its user may not read, or everything but writes, because it has become a replica.
"""

from __future__ import annotations

__all__ = ["Breaker", "CallBreaker"]

FAILURES = 3
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0
FORGET_S = 60.0
_NEVER = float("inf")


class Breaker:
    """One tier's circuit breaker. `usable`: it is closed, and the tier may be called.

    It opens after FAILURES failures with no success in between, or when the first probe of a tier that has never
    answered fails. While it is open, the tier gets one harmless probe at `probe_at`, after a pause that doubles with
    each probe that fails; a probe that succeeds closes it.
    """

    __slots__ = ("failures", "last_success", "probe_at", "usable", "wait_s")

    def __init__(self) -> None:
        self.usable = True
        self.failures = 0
        self.last_success = -_NEVER
        self.wait_s = FIRST_WAIT_S
        self.probe_at = _NEVER

    def succeeded(self, now: float) -> bool:
        """A call succeeded; whether that closes the breaker."""
        closes = not self.usable
        self.usable = True
        self.failures = 0
        self.last_success = now
        self.wait_s = FIRST_WAIT_S
        self.probe_at = _NEVER
        return closes

    def failed(self, now: float, is_probe: bool = False) -> bool:
        """A call failed or timed out; whether that opens the breaker. is_probe: the call was a probe."""
        if not self.usable and now < self.probe_at:
            return False  # called before the breaker opened
        self.failures += 1
        was_never_there = is_probe and self.last_success == -_NEVER
        if self.usable and self.failures < FAILURES and not was_never_there:
            return False
        opens = self.usable
        if not opens:
            self.wait_s = min(2 * self.wait_s, LONGEST_WAIT_S)
        self.usable = False
        self.probe_at = now + self.wait_s
        return opens


class CallBreaker:
    """The circuit breaker of one kind of call of a tier that answers others. `usable`: calls may be made.

    It opens after FAILURES failures of this kind with no success of this kind in between. Nothing harmless can probe
    it, so after a pause calls are made again (`tick`): the first one that fails opens it for twice as long. If none
    fails for FORGET_S, as on an idle server, calls of this kind no longer count as failing.
    """

    __slots__ = ("error", "failures", "retry_at", "usable", "wait_s")

    def __init__(self) -> None:
        self.usable = True
        self.failures = 0
        self.error = ""  # of the last failure
        self.wait_s = FIRST_WAIT_S
        self.retry_at = _NEVER

    @property
    def is_failing(self) -> bool:
        """Whether it has opened, and no call has succeeded since."""
        return self.failures >= FAILURES

    def succeeded(self) -> bool:
        """A call succeeded; whether calls failed before."""
        was_failing = self.is_failing
        self.usable = True
        self.failures = 0
        self.wait_s = FIRST_WAIT_S
        return was_failing

    def failed(self, now: float, why: str) -> bool:
        """A call failed; whether that is the failure after which calls count as failing."""
        if not self.usable:
            return False  # called before it opened
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
        """The tier is back: let calls be made; the first one that fails opens it again."""
        self.usable = True
        self.failures = min(self.failures, FAILURES - 1)

    def tick(self, now: float) -> None:
        """Let calls be made again if the pause is over."""
        self.usable = self.usable or now >= self.retry_at
        if self.is_failing and now >= self.retry_at + FORGET_S:
            self.forgive()
            self.wait_s = FIRST_WAIT_S
