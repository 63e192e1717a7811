"""The history: what a point has, and which points are kept for how long."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from kvdepot.metrics import BOUNDS_S, Latency
from kvdepot.protocol.status import Histogram, TokenCounts
from kvdepot.status import Saved, Status, TierStatus
from kvdepot.web.history import History, measure
from tests.web.site import empty_status


def status(boot: str = "a", **facts: Any) -> Status:
    return replace(empty_status(), boot=boot, **facts)


def buckets(*times_s: float) -> list[int]:
    made = [0] * (len(BOUNDS_S) + 1)
    for time_s in times_s:
        made[next((i for i, bound in enumerate(BOUNDS_S) if time_s <= bound), len(BOUNDS_S))] += 1
    return made


def test_a_point_has_counters_and_the_percentiles_since_the_one_before() -> None:
    before = status(latencies=[Latency("Lookup", 1, 0, 9.0, buckets(9.0))])
    now = status(
        stored_bytes=5000, retrieved_bytes=200, used_bytes=42, saved=Saved(512, 1.5),
        tokens=TokenCounts(2048, 1024, 512), histograms=[Histogram("saved_seconds", "s", [1.0], [2, 1], 1.5)],
        counters={"evicted_chunks": 7, "dropped_chunks": 4, "lookups": 9},
        latencies=[Latency("Lookup", 2, 0, 9.01, buckets(9.0, 0.008)), Latency("Retrieve", 1, 0, 0.2, buckets(0.2))],
        tiers=[TierStatus("disk:///kv", "through", "up", 1, 77, None, 0, 0, {}),
               TierStatus("redis://h", "through", "up", 1, None, None, 0, 0, {})],
    )  # fmt: skip
    point = measure(before, now, 8.0)
    assert (point["time_s"], point["stored_bytes"], point["retrieved_bytes"], point["memory_used_bytes"]) == (
        8,
        5000,
        200,
        42,
    )
    assert [point[f"{name}_tokens"] for name in ("asked", "found", "reused")] == [2048, 1024, 512]
    assert (point["saved_prefill_seconds"], point["saved_requests"]) == (1.5, 3)
    assert (point["evicted_chunks"], point["dropped_chunks"], point["expired_chunks"]) == (7, 4, 0)
    assert "lookups" not in point, "no chart shows it"
    assert point["tier_bytes.disk:///kv"] == 77 and "tier_bytes.redis://h" not in point
    assert 0.005 <= point["lookup_p50_s"] <= 0.01
    assert 0.1 <= point["retrieve_p99_s"] <= 0.25
    restarted = measure(before, status("b", latencies=now.latencies), 9.0)
    assert "lookup_p50_s" not in restarted and restarted["boot"] != point["boot"]


def test_an_increase_is_of_the_last_seconds_and_of_one_boot() -> None:
    history = History()
    assert history.increase("dropped_chunks", 300.0) == 0
    for second, dropped in enumerate((7, 12, 15, 15, 17)):
        history.add(1000.0 + second, status(counters={"dropped_chunks": dropped}))
    assert history.increase("dropped_chunks", 2.0) == 2
    assert history.increase("dropped_chunks", 300.0) == 10
    history.add(1005.0, status("b", counters={"dropped_chunks": 100}))
    assert history.increase("dropped_chunks", 300.0) == 0


def test_points_after_a_clock_that_was_set_back_are_removed() -> None:
    history = History()
    for second in (*range(100, 200), *range(150, 170)):
        history.add(float(second), status(used_bytes=second))
    series = history.series()
    assert series.times_s == [float(second) for second in range(100, 170)]
    assert series.series["memory_used_bytes"] == series.times_s
    assert history.latest()["memory_used_bytes"] == 169


@pytest.mark.parametrize("count", [0, 123_456_789_123])
def test_history_keeps_15_minutes_by_the_second_and_hours_by_ten_seconds(count: int) -> None:
    history, now = History(), status()
    for second in range(24_000):
        history.add(float(second), replace(now, tokens=TokenCounts(count + second)))
    series = history.series()
    times = series.times_s
    assert times == sorted(set(times)) and times[-1] == 23_999 and times[0] < 23_999 - 18_000
    assert {b - a for a, b in pairwise(times[-900:])} == {1.0}
    assert {b - a for a, b in pairwise(times[:1900])} == {10.0}
    assert series.series["asked_tokens"] == [count + time_s for time_s in times], "exact, however large"
