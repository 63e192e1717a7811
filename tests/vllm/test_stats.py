"""What an engine measures of itself: metrics, and the speed of prefill."""

from __future__ import annotations

from typing import Any

import pytest

from kvdepot.client.transfer import Operation
from kvdepot.errors import DeadlineExceeded
from kvdepot.integrations.vllm.stats import KVDepotStats, PrefillSpeed


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


def warmed_up() -> PrefillSpeed:
    """The speed of an engine whose first step is over."""
    prefill = PrefillSpeed()
    step(prefill, 1, [2048], -100.0, -50.0)
    return prefill


def step(prefill: PrefillSpeed, number: int, tokens: list[int], begun: float, ended: float) -> None:
    prefill.built(number, tokens, begun)
    prefill.output(number, ended)


def test_the_first_step_of_an_engine_does_not_count_for_the_speed_of_prefill() -> None:
    # As seen of the demo's second engine, on two cores: it computes one prompt of 2,050 tokens, cold, and loads the
    # rest. 4,096 loaded tokens were said to save 27.9 s, where computing 2,065 takes 8.1 s.
    prefill, now = PrefillSpeed(), 100.0
    step(prefill, 1, [2048], now, now + 13.95)
    for number, tokens in enumerate((2, *[1] * 15), 2):  # the prompt's end, and what it generates
        step(prefill, number, [tokens], now + 14.0, now + 14.1)
    assert prefill.speed == 0.0  # nothing is known yet: what is loaded now counts as tokens, not as time
    step(prefill, 20, [2048], now + 20.0, now + 28.0)
    assert 4096 / prefill.speed == pytest.approx(16.0)


@pytest.mark.parametrize(
    ("calls", "speed"),
    [
        # built: tokens and time, of the steps 1, 2, ...; output: the number of a step, or 0, and time
        ([("built", 8192, 10.0), ("built", 4097, 10.003), ("output", 1, 10.8)], 8192 / 0.8),  # the second is ahead
        ([("built", 8192, 10.0), ("built", 4097, 10.003), ("output", 1, 10.8), ("output", 2, 11.2)], 4097 / 0.4),
        ([("built", 1000, 0.0), ("output", 1, 1.0), ("built", 1000, 60.0), ("output", 2, 61.0)], 1000),  # a pause
        ([("built", 512, 0.0), ("built", 1000, 10.0), ("output", 0, 10.5), ("output", 2, 12.5)], 500),  # 1 never came
        ([("built", 1000, 0.0), ("output", 1, 2.0), ("output", 1, 2.1), ("output", 99, 2.2)], 500),  # twice; no step's
        ([("built", 1000, 0.0), ("output", 1, 2.0), ("built", 700, 20.0), ("output", 2, 20.0)], 500),  # no time at all
    ],
)  # fmt: skip
def test_a_step_lasts_from_its_build_or_the_output_before_to_its_own_output(calls: list[Any], speed: float) -> None:
    prefill, last = warmed_up(), 1
    for call, what, at in calls:
        if call == "built":
            last += 1
            prefill.built(last, [what], at)
        else:
            prefill.output(what and what + 1, at)
    assert prefill.speed == pytest.approx(speed)


def test_steps_that_only_decode_or_are_small_are_not_measured() -> None:
    prefill = warmed_up()
    for number, tokens in enumerate(([], [255], [1] * 512), 2):
        step(prefill, number, tokens, 1.0, 2.0)
    assert prefill.speed == 0.0


def test_steps_whose_output_never_comes_are_forgotten() -> None:
    prefill = warmed_up()
    for number in range(2, 10_002):
        prefill.built(number, [300], float(number))
    prefill.output(2, 10_002.0)
    assert prefill.speed == 0.0
    prefill.output(10_001, 10_003.0)
    assert prefill.speed == 300  # since the output before it


def test_no_single_step_makes_the_speed_and_old_ones_are_forgotten() -> None:
    prefill, now, number = warmed_up(), 0.0, 1

    def steps(count: int, took_s: float) -> None:
        nonlocal now, number
        for _ in range(count):
            number += 1
            step(prefill, number, [1000], now, now + took_s)
            now += took_s

    steps(1, 20.0)  # compiles
    steps(5, 0.125)
    steps(1, 0.001)  # its output before it was late
    assert prefill.speed == pytest.approx(8000)
    steps(40, 0.5)  # the GPU is shared from now on
    assert prefill.speed == pytest.approx(2000)
