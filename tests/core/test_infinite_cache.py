"""The online upper bound against exact counts."""

from __future__ import annotations

import random
import sys

import pytest

from kvdepot.core.infinite_cache import InfiniteCache

DAY_S = 86400.0
CHUNK = 16


def fresh(draw: random.Random, count: int) -> list[bytes]:
    return [draw.randbytes(32) for _ in range(count)]


def bound(cache: InfiniteCache, found: int = 0) -> int:
    told = cache.bound(found)
    assert told is not None
    return told


def test_it_has_the_tokens_of_all_chunks_that_were_looked_up_before() -> None:
    draw = random.Random(1)
    cache = InfiniteCache(0.0)
    first = fresh(draw, 1000)
    cache.count(b"".join(first), CHUNK)
    assert bound(cache) == pytest.approx(0, abs=10 * CHUNK)
    cache.count(b"".join(first[:500]), CHUNK)
    assert bound(cache) == pytest.approx(500 * CHUNK, abs=10 * CHUNK)


def test_chunks_of_several_sizes_count_with_their_own_tokens() -> None:
    draw = random.Random(2)
    cache = InfiniteCache(0.0)
    small, large = b"".join(fresh(draw, 1000)), b"".join(fresh(draw, 1000))
    for _ in range(3):
        cache.count(small, CHUNK)
    cache.count(large, 16 * CHUNK)
    assert bound(cache) == pytest.approx(2000 * CHUNK, abs=200 * CHUNK)


def test_it_is_within_two_points_of_exact_counts_with_half_a_million_chunks_behind_it() -> None:
    draw = random.Random(3)
    cache = InfiniteCache(0.0)
    for _ in range(50):
        cache.count(draw.randbytes(32 * 10_000), CHUNK)
    known = fresh(draw, 2000)
    cache.count(b"".join(known), CHUNK)
    before = bound(cache)
    for _ in range(400):  # 60 of 100 chunks were there before
        cache.count(b"".join(draw.choices(known, k=60)) + draw.randbytes(32 * 40), CHUNK)
    assert (bound(cache) - before) / (40_000 * CHUNK) == pytest.approx(0.6, abs=0.02)


def test_it_never_falls_nor_below_what_was_found_and_what_engines_have_is_not_in_it() -> None:
    draw = random.Random(4)
    cache = InfiniteCache(0.0)
    known = b"".join(fresh(draw, 1000))
    told = [0]
    for _ in range(20):
        cache.count(known, CHUNK)
        told.append(bound(cache))
        cache.subtract(500 * CHUNK)  # which the engine tells later
        told.append(bound(cache))
        cache.count(b"".join(fresh(draw, 200)), CHUNK)
        told.append(bound(cache, found=told[-1]))
    assert told == sorted(told)
    assert told[-1] == pytest.approx(19 * 1000 * CHUNK - 20 * 500 * CHUNK, rel=0.1)
    assert bound(cache, found=2 * told[-1]) == 2 * told[-1]


def test_lookups_without_chunks_are_nothing() -> None:
    cache = InfiniteCache(100.0)
    cache.count(b"", CHUNK)
    cache.tick(101.0)
    assert cache.bound(0) == 0


def test_a_chunk_is_remembered_for_a_day_and_forgotten_after_two() -> None:
    draw = random.Random(5)
    known = b"".join(fresh(draw, 500))

    def again_after(days: float) -> float:
        """The share that an infinite cache has when all are looked up again."""
        cache = InfiniteCache(0.0)
        now = 0.5 * DAY_S
        cache.tick(now)
        cache.count(known, CHUNK)
        end = now + days * DAY_S
        while now < end:
            now = min(now + 0.1 * DAY_S, end)
            cache.tick(now)
        before = bound(cache)
        cache.count(known, CHUNK)
        return (bound(cache) - before) / (500 * CHUNK)

    assert again_after(1.0) == pytest.approx(1.0, abs=0.02)
    assert again_after(2.5) == pytest.approx(0.0, abs=0.02)


def test_without_the_library_there_is_no_upper_bound_and_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasketches", None)
    cache = InfiniteCache(0.0)
    cache.count(bytes(64), CHUNK)
    cache.tick(1.0)
    assert cache.bound(7) is None
