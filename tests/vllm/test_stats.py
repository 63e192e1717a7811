"""What an engine measures of itself: metrics, the log line of a minute, the speed of prefill."""

from __future__ import annotations

from typing import Any

import pytest

from kvdepot.client.transfer import Operation
from kvdepot.errors import DeadlineExceeded
from kvdepot.integrations.vllm.stats import KVDepotStats, Minute, Moved, PrefillSpeed


def test_stats_of_ranks_add_up_and_are_shown_and_empty_when_nothing_has_ended() -> None:
    def operation(kind: str, took_s: float, chunks: int, done: int, size: int = 0, error: Any = None) -> Operation:
        return Operation(kind, ["r"], took_s, chunks, done, size, error)

    one, two = KVDepotStats(), KVDepotStats()
    assert one.is_empty() and one.reduce() == {}
    one.count(operation("lookup", 0.001, 4, 3))
    one.count(operation("lookup", 0.003, 4, 0, error=DeadlineExceeded("late")))
    one.count(operation("retrieve", 0.2, 3, 2, 2000))
    two.count(operation("retrieve", 0.4, 3, 3, 3000))
    two.count(operation("store", 0.5, 2, 0))
    one.aggregate(two)
    assert one.data == {
        "lookup_chunks": 8, "hit_chunks": 3, "lookup_errors": 1, "lookup_seconds": [0.001, 0.003],
        "retrieved_shards": 5, "retrieved_bytes": 5000, "retrieve_failed_shards": 1, "retrieve_seconds": [0.2, 0.4],
        "stored_shards": 0, "stored_bytes": 0, "store_failed_shards": 2, "store_seconds": [0.5],
    }  # fmt: skip
    assert one.reduce() == {
        "lookup_chunks": 8, "hit_chunks": 3, "lookup_errors": 1, "lookups": 2, "lookup_seconds (median)": 0.002,
        "retrieved_shards": 5, "retrieved_bytes": 5000, "retrieve_failed_shards": 1, "retrieves": 2,
        "retrieve_seconds (median)": 0.3, "store_failed_shards": 2, "stores": 1, "store_seconds (median)": 0.5,
    }  # fmt: skip
    one.reset()
    assert one.is_empty()


MIB = 1 << 20


def test_a_minute_in_which_something_moved_is_told_once_it_is_over() -> None:
    minute = Minute(chunk_tokens=256, ranks=2)
    assert minute.line(1000.0) == ""
    minute.requested()
    minute.moved(Moved(stored_chunks=30, stored_bytes=45 * MIB, loaded_bytes=96 * MIB))
    minute.loaded(8192, 3.21)
    minute.requested()
    assert minute.line(1059.9) == ""
    assert minute.line(1060.0) == (
        "last 60 s: 2 requests; stored (or found stored) 3,840 tokens (45.0 MiB), loaded 8,192 tokens (96.0 MiB), "
        "saved about 3.2 s of prefill"
    )
    assert minute.line(1200.0) == "", "told twice"


def test_nothing_is_told_of_a_minute_whose_requests_moved_nothing() -> None:
    minute = Minute(256, 1)
    minute.requested()
    minute.moved(Moved())
    assert minute.line(0.0) == minute.line(100.0) == ""
    minute.requested()
    minute.moved(Moved(stored_chunks=1, stored_bytes=MIB))
    assert minute.line(110.0) == ""
    assert minute.line(500.0) == "last 390 s: 1 request; stored (or found stored) 256 tokens (1.0 MiB)", (
        "an idle engine has no steps"
    )


def test_what_went_wrong_is_told_and_alone_is_enough() -> None:
    minute = Minute(256, 1)
    minute.failed()
    minute.moved(Moved(dropped_stores=2))
    minute.refused()
    assert minute.line(0.0) == ""
    assert minute.line(60.0) == "last 60 s: 0 requests; 1 load failed, 2 stores dropped, 1 request not cached"


def test_a_load_of_unknown_worth_is_logged_and_the_end_of_an_engine_does_not_wait() -> None:
    minute = Minute(256, 1)
    minute.loaded(512, 0.0)
    minute.moved(Moved(loaded_bytes=MIB // 2))
    assert minute.line(0.0) == ""
    assert minute.last_line(7.0) == "last 7 s: 0 requests; loaded 512 tokens (0.5 MiB)"
    assert minute.last_line(8.0) == ""


def warmed_up() -> PrefillSpeed:
    """The speed of an engine whose first step is over."""
    prefill = PrefillSpeed()
    prefill.output(prefill.built([2048], -100.0), -50.0)
    return prefill


def test_the_first_step_of_an_engine_does_not_price_what_it_loads() -> None:
    # As seen of the demo's second engine, on two cores: it computes one prompt of 2,050 tokens, cold, and loads the
    # rest. 4,096 loaded tokens were said to save 27.9 s, where computing 2,065 takes 8.1 s.
    prefill, now = PrefillSpeed(), 100.0
    prefill.output(prefill.built([2048], now), now + 13.95)
    for tokens in (2, *[1] * 15):  # the prompt's end, and what it generates
        step = prefill.built([tokens], now + 14.0)
        assert step == 0
        prefill.output(step, now + 14.1)
    assert prefill.speed == 0.0  # nothing is known yet: what is loaded now counts as tokens, not as time
    prefill.output(prefill.built([2048], now + 20.0), now + 28.0)
    assert 4096 / prefill.speed == pytest.approx(16.0)


def test_a_first_step_whose_output_never_came_is_not_measured_either() -> None:
    prefill = PrefillSpeed()
    prefill.built([2048], 0.0)
    prefill.output(prefill.built([2048], 10.0), 11.0)
    assert prefill.speed == 2048


def test_a_step_lasts_until_its_output_not_until_the_next_is_built() -> None:
    prefill = warmed_up()
    first = prefill.built([8192], 10.0)
    second = prefill.built([4096, 1], 10.003)  # ahead, while the first still runs
    assert prefill.speed == 0.0
    prefill.output(first, 10.8)
    assert prefill.speed == pytest.approx(8192 / 0.8)
    prefill.output(second, 11.2)  # it began when the first had ended
    assert prefill.speed == pytest.approx(4097 / 0.4)


def test_a_step_after_a_pause_does_not_last_since_the_output_before_it() -> None:
    prefill = warmed_up()
    prefill.output(prefill.built([1000], 0.0), 1.0)
    prefill.output(prefill.built([1000], 60.0), 61.0)
    assert prefill.speed == 1000


def test_steps_that_only_decode_or_are_small_are_not_measured() -> None:
    prefill = warmed_up()
    for tokens in ([], [255], [1] * 512):
        step = prefill.built(tokens, 1.0)
        assert step == 0
        prefill.output(step, 2.0)
    assert prefill.speed == 0.0


def test_outputs_that_never_come_or_say_no_step_shift_no_other() -> None:
    prefill = warmed_up()
    prefill.built([512], 0.0)  # its output never comes
    second = prefill.built([1000], 10.0)
    prefill.output(0, 10.5)  # of a step without tokens
    prefill.output(second, 12.5)
    assert prefill.speed == 500
    prefill.output(second, 12.6)  # twice
    prefill.output(99, 12.7)  # of nobody
    assert prefill.speed == 500
    third = prefill.built([700], 20.0)
    prefill.output(third, 20.0)  # no time at all
    assert prefill.speed == 500


def test_steps_whose_output_never_comes_are_forgotten() -> None:
    prefill = warmed_up()
    steps = [prefill.built([300], float(i)) for i in range(10_000)]
    prefill.output(steps[0], 10_000.0)
    assert prefill.speed == 0.0
    prefill.output(steps[-1], 10_001.0)
    assert prefill.speed == 300  # since the output before it


def test_no_single_step_makes_the_speed_and_old_ones_are_forgotten() -> None:
    prefill, now = warmed_up(), 0.0

    def steps(count: int, took_s: float) -> None:
        nonlocal now
        for _ in range(count):
            step = prefill.built([1000], now)
            now += took_s
            prefill.output(step, now)

    steps(1, 20.0)  # compiles
    steps(5, 0.125)
    steps(1, 0.001)  # its output before it was late
    assert prefill.speed == pytest.approx(8000)
    steps(40, 0.5)  # the GPU is shared from now on
    assert prefill.speed == pytest.approx(2000)
