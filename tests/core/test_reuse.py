"""The headline: what engines loaded, of what they asked for."""

from __future__ import annotations

import pytest

from kvdepot.core.reuse import Windows
from kvdepot.status import Reuse


def test_a_window_counts_what_came_since_its_beginning() -> None:
    windows = Windows(0.0)
    for second in range(1, 4000):
        windows.tick(float(second), 100 * second, 100 * second - 60 * min(second, 3000))
    rates = {rate.window_s: rate for rate in windows.rates(400_000, 220_000)}
    assert rates[60.0].rate == pytest.approx(1.0)  # all of it, for a quarter of an hour
    assert rates[600.0].rate == pytest.approx(1.0)
    assert 0.4 < rates[3600.0].rate < 0.6
    assert (rates[86400.0].asked_tokens, rates[86400.0].reused_tokens) == (400_000, 220_000)


def test_nothing_asked_is_no_rate_and_what_was_asked_for_before_the_window_makes_it_one_at_most() -> None:
    windows = Windows(0.0)
    assert set(windows.rates(0, 0)) == {Reuse(s, 0, 0, 0.0) for s in (60.0, 600.0, 3600.0, 86400.0)}
    windows.tick(70.0, 1000, 0)
    windows.tick(140.0, 1000, 0)
    assert windows.rates(1100, 1000)[0] == Reuse(60.0, 100, 1000, 1.0)
