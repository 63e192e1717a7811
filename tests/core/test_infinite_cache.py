"""The online upper bound against exact counts."""

from __future__ import annotations

import random
import sys

import pytest

from kvdepot.core.infinite_cache import InfiniteCache, words

DAY_S = 86400.0
CHUNK = 16


def fresh(draw: random.Random, count: int) -> list[bytes]:
    return [draw.randbytes(32) for _ in range(count)]


def count(cache: InfiniteCache, chunks: list[bytes] | bytes, chunk_tokens: int = CHUNK, held: int = 0) -> None:
    """Count a prompt of which the engine or the depot had the first `held` tokens."""
    cache.count(words(chunks if isinstance(chunks, bytes) else b"".join(chunks)), chunk_tokens, held)


def missed(cache: InfiniteCache) -> int:
    told = cache.missed
    assert told is not None
    return told


def test_it_has_the_tokens_of_all_chunks_looked_up_before_of_any_size() -> None:
    draw = random.Random(2)
    cache = InfiniteCache(0.0)
    small, large = fresh(draw, 1000), fresh(draw, 1000)
    count(cache, small)
    assert missed(cache) == pytest.approx(0, abs=10 * CHUNK)
    for _ in range(2):
        count(cache, small)
    count(cache, large, 16 * CHUNK)
    assert missed(cache) == pytest.approx(2000 * CHUNK, abs=200 * CHUNK)


def test_it_is_within_two_points_of_exact_counts_after_half_a_million_chunks() -> None:
    draw = random.Random(3)
    cache = InfiniteCache(0.0)
    for _ in range(50):
        count(cache, draw.randbytes(32 * 10_000))
    known = fresh(draw, 2000)
    count(cache, known)
    before = missed(cache)
    for _ in range(400):  # 60 of 100 chunks were there before
        count(cache, b"".join(draw.choices(known, k=60)) + draw.randbytes(32 * 40))
    assert (missed(cache) - before) / (40_000 * CHUNK) == pytest.approx(0.6, abs=0.02)


def test_what_was_held_is_not_missed_and_the_count_never_falls() -> None:
    draw = random.Random(4)
    cache = InfiniteCache(0.0)
    known = fresh(draw, 1000)
    count(cache, known)
    seen = [missed(cache)]
    for _ in range(20):
        count(cache, known + fresh(draw, 200), held=500 * CHUNK + CHUNK // 4)  # a part of a chunk is held, too
        seen.append(missed(cache))
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(20 * (500 * CHUNK - CHUNK // 4), rel=0.02)
    count(cache, fresh(draw, 1000), held=1000 * CHUNK)  # chunks that nobody has looked up before
    assert missed(cache) == pytest.approx(seen[-1], abs=10 * CHUNK)


def test_a_chunk_is_remembered_for_a_day_and_forgotten_after_two() -> None:
    draw = random.Random(5)
    known = b"".join(fresh(draw, 500))

    def again_after(days: float) -> float:
        """The share that an infinite cache has when all are looked up again."""
        cache = InfiniteCache(0.0)
        now = 0.5 * DAY_S
        cache.tick(now)
        count(cache, known)
        end = now + days * DAY_S
        while now < end:
            now = min(now + 0.1 * DAY_S, end)
            cache.tick(now)
        before = missed(cache)
        count(cache, known)
        return (missed(cache) - before) / (500 * CHUNK)

    assert again_after(1.0) == pytest.approx(1.0, abs=0.02)
    assert again_after(2.5) == pytest.approx(0.0, abs=0.02)


def test_without_the_library_there_is_no_upper_bound_and_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasketches", None)
    cache = InfiniteCache(0.0)
    count(cache, bytes(64))
    cache.tick(1.0)
    assert cache.missed is None
