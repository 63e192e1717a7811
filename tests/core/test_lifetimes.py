"""How long chunks live in memory, by the traffic that a test drives: ages, idle times, and times until reuse."""

from __future__ import annotations

import bisect

from kvdepot.protocol import wire
from kvdepot.status import Histogram
from tests.core.desk import Desk, lookup, prompt, retrieve, store

WALL = 1_000_000


def new_desk(pages: int) -> Desk:
    desk = Desk(pages=pages)
    desk.hello()
    desk.register(b"one")
    pass_to(desk, 0)
    return desk


def pass_to(desk: Desk, second: int) -> None:
    desk.tick(float(second), float(WALL + second))


def histogram(desk: Desk, name: str) -> Histogram:
    return next(each for each in desk.depot.status().histograms if each.name == name)


def counted(desk: Desk, name: str) -> dict[float, int]:
    """How many values a histogram has, by the upper bound of their bucket."""
    told = histogram(desk, name)
    return {bound: count for bound, count in zip((*told.bounds, float("inf")), told.counts, strict=True) if count}


def bucket(desk: Desk, name: str, value: float) -> float:
    bounds = histogram(desk, name).bounds
    return bounds[bisect.bisect_left(bounds, value)]


def hit(desk: Desk, name: str, chunks: int) -> None:
    for _ in range(2):  # a lookup that is repeated is no other use, nor is a retrieve
        assert desk.ask(b"one", lookup(prompt(name, chunks))) == chunks
    assert desk.ask(b"one", retrieve(prompt(name, chunks))) == [True] * chunks
    desk.ask(b"one", wire.EndSession("r"))


def test_evicted_chunks_tell_their_age_and_how_long_nobody_had_used_them() -> None:
    desk = new_desk(pages=32)
    assert desk.ask(b"one", store(prompt("old", 32))) is True
    pass_to(desk, 400)
    hit(desk, "old", 16)  # the others have been idle since their store
    pass_to(desk, 1000)
    assert desk.depot.status().holds_s is None
    assert desk.ask(b"one", store(prompt("new", 16))) is True
    assert desk.index.evicted == 16
    age, idle = histogram(desk, "eviction_age_seconds"), histogram(desk, "eviction_idle_seconds")
    assert (age.sum, idle.sum) == (1000.0, 1000.0), "one in sixteen is counted"
    assert counted(desk, "eviction_age_seconds") == {1200.0: 1}
    assert desk.depot.status().holds_s == 1000.0
    pass_to(desk, 1200)
    assert desk.ask(b"one", store(prompt("newer", 16))) is True
    assert histogram(desk, "eviction_age_seconds").sum == 1000.0 + 1200.0
    # The chunk of "old" that went last was used when a request hit the prefix that ends 15 chunks behind it.
    assert histogram(desk, "eviction_idle_seconds").sum == 1000.0 + 800.0
    assert desk.depot.status().holds_s == 900.0


def test_a_hit_tells_the_time_since_the_last_use_of_the_same_prompt() -> None:
    desk = new_desk(pages=32)
    assert desk.ask(b"one", store(prompt("a", 4))) is True
    pass_to(desk, 50)
    hit(desk, "a", 4)
    pass_to(desk, 75)
    hit(desk, "a", 4)
    assert histogram(desk, "reuse_after_seconds").sum == 50.0 + 25.0
    hit(desk, "a", 2)  # behind it is more, whose use was one of it, too
    assert sum(histogram(desk, "reuse_after_seconds").counts) == 2


def test_hits_and_savings_are_counted_once_a_request() -> None:
    desk = new_desk(pages=32)
    assert desk.ask(b"one", store(prompt("a", 30))) is True
    assert desk.ask(b"one", lookup(prompt("a", 30))) == 30
    assert desk.ask(b"one", lookup(prompt("b", 30), "r2")) == 0
    desk.ask(b"one", wire.EndSession("r", 30, 0.75))
    desk.ask(b"one", wire.EndSession("r2"))
    assert counted(desk, "hit_tokens") == {bucket(desk, "hit_tokens", 30.0): 1}
    assert counted(desk, "saved_seconds") == {bucket(desk, "saved_seconds", 0.75): 1}
