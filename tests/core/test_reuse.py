"""Shares by window: what engines loaded, of what they asked for, and what was there."""

from __future__ import annotations

import pytest

from kvdepot.core.reuse import WINDOWS_S, Windows
from kvdepot.status import HitRate, Reuse, TokenCounts


def test_a_window_counts_what_came_since_its_beginning() -> None:
    windows = Windows(0.0)
    for second in range(1, 4000):
        reused = 100 * second - 60 * min(second, 3000)
        windows.tick(float(second), TokenCounts(100 * second, 90 * second, reused, 95 * second), 10 * second)
    now = TokenCounts(400_000, 360_000, 220_000, 380_000)
    told = windows.rates(now)
    rates = {rate.window_s: rate for rate in told}
    assert rates[60.0].rate == pytest.approx(1.0)  # all of it, for a quarter of an hour
    assert rates[600.0].rate == pytest.approx(1.0)
    assert 0.4 < rates[3600.0].rate < 0.6
    assert rates[86400.0] == Reuse(86400.0, 400_000, 220_000, 0.55, 360_000, 380_000)
    minute, *_, day = windows.hit_rates(told, 40_000)
    assert (minute.hit_rate, minute.ceiling) == (pytest.approx(0.9), pytest.approx(0.95))
    assert day == HitRate(86400.0, 40_000, 0.9, 0.95)


def test_nothing_asked_is_no_rate_and_what_was_asked_for_before_the_window_makes_it_one_at_most() -> None:
    windows = Windows(0.0)
    assert windows.rates(TokenCounts(bound=0)) == [Reuse(s, 0, 0, 0.0, 0, 0) for s in WINDOWS_S]
    windows.tick(70.0, TokenCounts(1000, bound=0), 10)
    windows.tick(140.0, TokenCounts(1000, bound=0), 10)
    told = windows.rates(TokenCounts(1100, 100, 1000, 90))
    assert told[0] == Reuse(60.0, 100, 1000, 1.0, 100, 90)
    assert windows.hit_rates(told, 11)[0] == HitRate(60.0, 1, 1.0, 1.0)


def test_without_an_upper_bound_the_other_tokens_are_told() -> None:
    windows = Windows(0.0)
    now = TokenCounts(100, 50, 40)
    windows.tick(70.0, now, 10)
    told = windows.rates(now)
    assert told[-1] == Reuse(86400.0, 100, 40, 0.4, 50, None)
    assert windows.hit_rates(told, 10) == []
