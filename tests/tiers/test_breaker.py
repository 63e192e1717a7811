"""A tier's circuit breaker."""

from __future__ import annotations

import pytest

from kvdepot.tiers.breaker import FAILURES, FIRST_WAIT_S, LONGEST_WAIT_S, PROBES, Breaker


def test_a_kind_of_call_that_fails_while_others_succeed_opens_it_ever_longer() -> None:
    breaker, now = Breaker(), 0.0
    for opens in [False] * (FAILURES - 1) + [True]:
        breaker.succeeded(now, "lookups")
        assert breaker.failed(now, "reads") == opens
    assert not breaker.failed(now, "reads"), "it was called before"
    for number in range(1, 8):
        wait_s = breaker.probe_at - now
        assert wait_s == min(FIRST_WAIT_S * 2 ** (number - 1), LONGEST_WAIT_S)
        now = breaker.probe_at
        assert breaker.succeeded(now, PROBES) and breaker.failing == (["reads"] if number > 1 else [])
        assert breaker.failed(now, "reads"), "the first failure is enough to count again"
    assert breaker.succeeded(now, "reads") and not breaker.failing
    assert not breaker.failed(now, "reads") and breaker.wait_s == FIRST_WAIT_S


@pytest.mark.parametrize("was_there", [False, True])
def test_the_first_probe_of_a_tier_that_never_answered_opens_it(was_there: bool) -> None:
    breaker = Breaker()
    if was_there:
        breaker.succeeded(0.0, "lookups")
    assert breaker.failed(1.0, PROBES) != was_there
