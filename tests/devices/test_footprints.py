"""The check for what stays behind: late growth is allowed, growth that goes on is not."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import count

import pytest

from tests.devices.footprints import SERIES, assert_settles

ROUNDS = 20
EVER = (SERIES + 1) * ROUNDS


@pytest.mark.parametrize(("every", "last"), [(1, EVER), (7, EVER), (ROUNDS, EVER), (1, 0), (1, 1), (1, EVER - 40)])
@pytest.mark.parametrize("slack", [0, ROUNDS - 1, ROUNDS])
def test_growth_is_noticed_if_it_goes_on_beyond_the_slack(every: int, last: int, slack: int) -> None:
    rounds, kept = count(1), []

    def repeat() -> None:
        if (number := next(rounds)) <= last and number % every == 0:
            kept.append(number)

    is_noticed = last == EVER and ROUNDS // every > slack
    with pytest.raises(AssertionError, match="adds to kept") if is_noticed else nullcontext():
        assert_settles(repeat, lambda: {"kept": len(kept)}, ROUNDS, {"kept": slack})
