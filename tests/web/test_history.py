"""The history: percentiles, rates, and which points are kept for how long."""

from __future__ import annotations

import math

import pytest

from kvdepot.metrics import BOUNDS_S, Latency, percentile
from kvdepot.protocol.status import Histogram
from kvdepot.status import Saved, Status, TierStatus, TokenCounts
from kvdepot.web.history import History, measure


def status(**facts: object) -> Status:
    counts = dict.fromkeys(
        (
            "chunk_size_tokens", "capacity_bytes", "used_bytes", "chunks", "reserved_shards", "holds",
            "evicted_chunks", "record_slots", "record_slots_used", "unrecorded_shards", "operations", "clients",
            "sessions", "instances",
        ),
        0,
    )  # fmt: skip
    return Status(**{**counts, **facts})  # type: ignore[arg-type]


def buckets(*times_s: float) -> list[int]:
    made = [0] * (len(BOUNDS_S) + 1)
    for time_s in times_s:
        made[next((i for i, bound in enumerate(BOUNDS_S) if time_s <= bound), len(BOUNDS_S))] += 1
    return made


def test_a_percentile_lies_in_the_bucket_that_holds_it() -> None:
    quick = buckets(*[0.0004] * 99, 0.4)
    assert 0.00025 <= percentile(quick, 0.5) <= 0.0005
    assert 0.00025 <= percentile(quick, 0.99) <= 0.0005
    assert 0.25 <= percentile(quick, 0.995) <= 0.5
    assert percentile(buckets(99.0), 0.5) == BOUNDS_S[-1]
    assert math.isnan(percentile(buckets(), 0.5))


def test_the_total_of_a_rate_covers_the_last_seconds_and_leaves_out_what_is_unknown() -> None:
    history = History()
    for second, rate in enumerate((7.0, 5.0, 3.0, math.nan, 2.0)):
        history.add(1000.0 + second, {"dropped_chunks_s": rate})
    assert history.total("dropped_chunks_s", 2.0) == 3 + 2
    assert history.total("dropped_chunks_s", 300.0) == 5 + 3 + 2  # nobody knows how long the first one lasted
    assert history.total("no such series", 300.0) == 0


def test_a_point_holds_what_happened_since_the_one_before() -> None:
    before = status(
        stored_bytes=1000, evicted_chunks=1, counters={"lookup_chunks": 10, "hit_chunks": 5},
        latencies=[Latency("Lookup", 1, 0, 9.0, buckets(9.0))],
    )  # fmt: skip
    now = status(
        stored_bytes=5000, retrieved_bytes=200, evicted_chunks=7, used_bytes=42, saved=Saved(512, 1.5),
        tokens=TokenCounts(2048, 1024, 512, 1536), histograms=[Histogram("saved_seconds", "s", [1.0], [2, 1], 1.5)],
        counters={"lookup_chunks": 20, "hit_chunks": 8, "dropped_chunks": 4},
        latencies=[Latency("Lookup", 2, 0, 9.01, buckets(9.0, 0.008)), Latency("Retrieve", 1, 0, 0.2, buckets(0.2))],
        tiers=[TierStatus("disk:///kv", "through", "up", 1, 77, None, 0, 0, {})],
    )  # fmt: skip
    point = measure(before, now, 2.0)
    assert point["stored_bytes_s"] == 2000
    assert point["retrieved_bytes_s"] == 100
    assert point["evicted_chunks_s"] == 3
    assert point["dropped_chunks_s"] == 2
    assert point["used_bytes"] == 42
    assert (point["asked_tokens"], point["saved_requests"]) == (2048, 3)
    assert (point["saved_tokens"], point["saved_prefill_s"]) == (512, 1.5)
    assert (point["reuse_rate"], point["hit_rate"], point["ceiling"]) == (0.25, 0.5, 0.75)
    assert point["tier_bytes.disk:///kv"] == 77
    assert 0.005 <= point["lookup_p50_s"] <= 0.01
    assert 0.1 <= point["retrieve_p99_s"] <= 0.25


def test_a_restart_is_no_negative_rate() -> None:
    before = status(boot="a", stored_bytes=5000, evicted_chunks=7, counters={"dropped_chunks": 4})
    now = status(boot="b", stored_bytes=10, latencies=[Latency("Lookup", 1, 0, 0.1, buckets(0.1))])
    assert measure(before, now, 1.0).keys() == measure(None, now, 1.0).keys()
    after = measure(now, status(boot="b", stored_bytes=30), 2.0)
    assert after["stored_bytes_s"] == 10


def test_times_rise_also_where_the_clock_is_set_back() -> None:
    history = History()
    for second in (*range(100, 200), *range(150, 170)):
        history.add(float(second), {"used_bytes": float(second)})
    figures = history.figures()
    assert figures.times_s == [float(second) for second in range(100, 170)]
    assert figures.series["used_bytes"] == figures.times_s


def test_where_nothing_was_looked_up_there_is_no_share() -> None:
    idle = measure(status(), status(), 1.0)
    assert math.isnan(idle["hit_rate"]) and math.isnan(idle["reuse_rate"])


def test_history_keeps_a_quarter_of_an_hour_by_the_second_and_hours_by_ten_seconds() -> None:
    history = History()
    for second in range(30_000):
        history.add(float(second), {"used_bytes": float(second)})
    figures = history.figures()
    times = figures.times_s
    assert times == sorted(set(times))
    assert times[-1] == 29_999
    assert 2900 - 100 <= len(times) <= 2900 + 130  # seconds overlap the latest tens
    by_second = [b - a for a, b in zip(times[-900:], times[-899:], strict=False)]
    assert set(by_second) == {1.0}
    assert times[0] < 29_999 - 18_000
    values = figures.series["used_bytes"]
    assert len(values) == len(times)
    assert values[-1] == 29_999
    assert values[0] == pytest.approx(times[0] - 4.5, rel=1e-4)  # the mean of its ten seconds


def test_what_is_not_known_is_null_and_new_series_begin_late() -> None:
    history = History()
    history.add(1.0, {"hit_rate": float("nan")})
    history.add(2.0, {"hit_rate": 0.5, "tier_bytes.x": 3.0})
    assert history.figures().series == {"hit_rate": [None, 0.5], "tier_bytes.x": [None, 3.0]}


def test_the_number_of_series_has_a_bound() -> None:
    history = History()
    for i in range(1000):
        history.add(float(i), {f"tier_bytes.{i}": 1.0})
    assert len(history.figures().series) == 64


@pytest.mark.parametrize("count", [1_234_567, 123_456_789_123])
def test_counters_are_kept_exactly_for_a_rounded_one_falls_when_the_next_status_is_shown(count: int) -> None:
    history = History()
    boot = "5f0123456789abcd"
    for second in range(2000):  # the older half is kept by ten seconds
        saved = Saved(count + second, count / 7 + second)
        history.add(float(second), measure(None, status(boot=boot, saved=saved), 0.0))
    figures = history.figures()
    assert len(figures.times_s) < 1500
    for time_s, tokens, seconds, run in zip(
        figures.times_s,
        figures.series["saved_tokens"],
        figures.series["saved_prefill_s"],
        figures.series["boot"],
        strict=True,
    ):
        assert (tokens, seconds, run) == (count + time_s, count / 7 + time_s, 0x5F0123456789)
