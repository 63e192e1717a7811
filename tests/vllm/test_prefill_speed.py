from __future__ import annotations

import pytest

from kvdepot.integrations.vllm.stats import PrefillSpeed


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
