"""Circuit breakers of a tier, and of one kind of its calls."""

from __future__ import annotations

from kvdepot.core.tiering.tier import WRITES, TierState
from kvdepot.tiers import parse
from kvdepot.tiers.breaker import FAILURES, FIRST_WAIT_S, FORGET_S, Breaker


def test_calls_that_nobody_makes_any_more_do_not_count_as_failing_for_ever() -> None:
    breaker = Breaker()
    assert [breaker.failed(0.0, "refused") for _ in range(FAILURES)] == [False] * (FAILURES - 1) + [True]
    breaker.tick(FIRST_WAIT_S)
    assert breaker.usable and breaker.is_failing, "it is tried again, and nothing has succeeded"
    breaker.tick(FIRST_WAIT_S + FORGET_S)
    assert not breaker.is_failing
    assert breaker.failed(FIRST_WAIT_S + FORGET_S, "refused"), "one failure is enough to count again"


def test_queued_saves_are_dropped_each_time_that_writes_fail_again() -> None:
    tier = TierState(0, parse("redis://localhost:1"))
    for _ in range(FAILURES - 1):
        assert not tier.call_failed(0.0, "read only", WRITES)
    assert tier.call_failed(0.0, "read only", WRITES)
    assert not tier.call_failed(0.0, "read only", WRITES), "it was sent before"
    tier.breakers[WRITES].tick(FIRST_WAIT_S)
    assert tier.call_failed(FIRST_WAIT_S, "read only", WRITES)
    assert not tier.is_writable
