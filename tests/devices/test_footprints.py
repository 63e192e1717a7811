"""The check for what stays behind: late growth is allowed, growth that goes on is not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.devices.footprints import SERIES, assert_settles, descriptors_and_maps

ROUNDS = 20


class Rounds:
    """Something repeated, which keeps a descriptor open in some of its rounds."""

    def __init__(self) -> None:
        self.done = 0
        self.kept: list[int] = []

    def keep_one(self) -> None:
        self.kept.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))


@pytest.fixture
def rounds() -> Iterator[Rounds]:
    made = Rounds()
    yield made
    for fd in made.kept:
        os.close(fd)


@pytest.mark.parametrize("every", [1, 7, ROUNDS])
def test_what_stays_behind_once_a_series_or_more_often_is_noticed(rounds: Rounds, every: int) -> None:
    def repeat() -> None:
        rounds.done += 1
        if rounds.done % every == 0:
            rounds.keep_one()

    with pytest.raises(AssertionError, match="adds to fds"):
        assert_settles(repeat, descriptors_and_maps, ROUNDS)
    assert rounds.done == SERIES * ROUNDS


@pytest.mark.parametrize("last", [0, 1, ROUNDS, (SERIES - 1) * ROUNDS])
def test_what_is_acquired_in_the_first_rounds_only_is_allowed(rounds: Rounds, last: int) -> None:
    def repeat() -> None:
        rounds.done += 1
        if rounds.done <= last:
            rounds.keep_one()

    assert_settles(repeat, descriptors_and_maps, ROUNDS)
    assert rounds.done == (-(-last // ROUNDS) + 1) * ROUNDS


def test_a_number_may_grow_by_its_slack_and_no_more() -> None:
    sizes: Iterator[dict[str, Any]] = iter({"bytes": size} for size in range(0, 1000, 10))
    assert_settles(lambda: None, lambda: next(sizes), 1, {"bytes": 10})
    with pytest.raises(AssertionError, match="adds to bytes"):
        assert_settles(lambda: None, lambda: next(sizes), 1, {"bytes": 9})


def test_values_that_are_no_numbers_must_become_the_same() -> None:
    held: Iterator[dict[str, Any]] = iter([{"held": {"a": n}} for n in (1, 2, 2, *range(100))])
    assert_settles(lambda: None, lambda: next(held), 1)
    with pytest.raises(AssertionError, match="adds to held"):
        assert_settles(lambda: None, lambda: next(held), 1)
