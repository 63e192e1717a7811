"""The online ceiling against exact counts."""

from __future__ import annotations

import random
import sys

import pytest

from kvdepot.core.infinite_cache import WINDOWS_S, InfiniteCache

DAY_S = 86400.0


def fresh(draw: random.Random, count: int) -> list[bytes]:
    return [draw.randbytes(32) for _ in range(count)]


def test_it_counts_what_is_looked_up_again_over_each_window() -> None:
    draw = random.Random(1)
    ceiling = InfiniteCache(0.0)
    first = fresh(draw, 1000)
    ceiling.count(b"".join(first))
    assert ceiling.rates() == [(window_s, 1000, 0.0, pytest.approx(0.0, abs=0.01)) for window_s in WINDOWS_S]
    ceiling.count(b"".join(first[:500]))
    assert ceiling.rates() == [(window_s, 1500, 0.0, pytest.approx(1 / 3, abs=0.01)) for window_s in WINDOWS_S]


def test_a_window_forgets_its_lookups_but_the_cache_does_not() -> None:
    draw = random.Random(2)
    ceiling = InfiniteCache(0.0)
    known = fresh(draw, 1000)
    ceiling.count(b"".join(known))
    for second in range(0, 701, 5):
        ceiling.tick(float(second))
    ceiling.count(b"".join(known[:100]))
    minute, ten_minutes, hour, day = ceiling.rates()
    assert minute == (60.0, 100, 0.0, pytest.approx(1.0, abs=0.01))
    assert ten_minutes == (600.0, 100, 0.0, pytest.approx(1.0, abs=0.01))
    assert hour == (3600.0, 1100, 0.0, pytest.approx(100 / 1100, abs=0.01))
    assert day == (86400.0, 1100, 0.0, pytest.approx(100 / 1100, abs=0.01))


def test_it_is_within_two_points_of_exact_counts_with_half_a_million_chunks_behind_it() -> None:
    draw = random.Random(3)
    ceiling = InfiniteCache(0.0)
    for _ in range(50):
        ceiling.count(draw.randbytes(32 * 10_000))
    known = fresh(draw, 2000)
    ceiling.count(b"".join(known))
    for second in range(0, 121, 5):
        ceiling.tick(float(second))
    for _ in range(400):  # 60 of 100 chunks were there before
        ceiling.count(b"".join(draw.choices(known, k=60)) + draw.randbytes(32 * 40))
    window_s, chunks, _, rate = ceiling.rates()[0]
    assert (window_s, chunks) == (60.0, 40_000)
    assert rate == pytest.approx(0.6, abs=0.02)


def test_lookups_without_chunks_and_windows_without_lookups_are_nothing() -> None:
    ceiling = InfiniteCache(100.0)
    ceiling.count(b"")
    ceiling.tick(101.0)
    assert ceiling.rates() == [(window_s, 0, 0.0, 0.0) for window_s in WINDOWS_S]


def test_a_chunk_is_remembered_for_a_day_and_forgotten_after_two() -> None:
    draw = random.Random(4)
    known = b"".join(fresh(draw, 500))

    def again_after(days: float) -> float:
        """The ceiling of the minute in which all are looked up again."""
        ceiling = InfiniteCache(0.0)
        now = 0.5 * DAY_S
        ceiling.tick(now)
        ceiling.count(known)
        end = now + days * DAY_S
        while now < end:
            now = min(now + 0.1 * DAY_S, end)
            ceiling.tick(now)
        ceiling.count(known)
        return ceiling.rates()[0][3]

    assert again_after(1.0) == pytest.approx(1.0, abs=0.02)
    assert again_after(2.5) == pytest.approx(0.0, abs=0.02)


def test_without_the_library_there_is_no_ceiling_and_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasketches", None)
    ceiling = InfiniteCache(0.0)
    ceiling.count(bytes(64))
    ceiling.tick(1.0)
    assert ceiling.rates() == []
