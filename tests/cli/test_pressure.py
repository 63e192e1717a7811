"""The verdict on storms of `kvdepot certify --pressure`, on planted answers; test_certify.py has real storms."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvdepot.cli.completions import Case, Completion
from kvdepot.cli.pressure import judge, run_storms, shape_storm, small_cache

COUNT, TOKENS = 40, 100
CASES = [Case(f"{number}", [number] * TOKENS, 0) for number in range(COUNT)]


def storm(slow: float = 1.0, loaded: int = 96, logprob: float = -0.5) -> list[Completion]:
    """The answers to a storm: the n-th first token comes after n seconds, and all is over one second after the last."""
    return [
        Completion(slow * number, [7], [{"7": logprob}], loaded, loaded, 0, slow * COUNT + 1)
        for number in range(1, COUNT + 1)
    ]


COMPUTED = [storm(loaded=0), storm(2.0, loaded=0)]
FAST = storm(0.5)


def test_the_better_figures_of_each_side_are_compared_and_shown() -> None:
    found = judge(4096, CASES, COMPUTED, [FAST, storm(9.0)], rounding=0.0)
    assert found.faults == []
    assert (found.without.ttft_p50_s, found.without.ttft_p99_s) == (21, 40)
    assert (found.depot.ttft_p50_s, found.depot.ttft_p99_s) == (10.5, 20)
    assert (found.without.tokens_s, found.depot.tokens_s) == (COUNT * 101 / 41, COUNT * 101 / 21)
    assert (found.without.computed, found.depot.computed) == (COUNT * TOKENS, COUNT * 4)
    assert (found.requests, found.answers, found.identical) == (COUNT, 2 * COUNT, 2 * COUNT)
    out = Console(file=io.StringIO(), width=110)
    found.print(out)
    said = out.file.getvalue()
    assert all(word in said for word in ("40 requests of 100 tokens", "4,096", "80 of 80 answers", "10.5 s", "4,000"))


@pytest.mark.parametrize(
    ("storms", "said"),
    [
        ([storm(1.2), storm(1.2)], ["the slowest first tokens took 48 s with the depot, and 40 s", "82 tokens/s"]),
        ([storm(1.05)], ["94 tokens/s with the depot, and 99 without"]),
        ([storm(0.5, loaded=0)], ["nothing came from the depot"]),
        ([FAST, storm(0.5, logprob=-0.9)], ["pressure, prompt 0: token 1: the logprob of 7 is -0.9"] + ["prompt"] * 2),
        ([storm(0.5, logprob=-0.6)], []),
    ],
)
def test_a_storm_fails_by_its_slowest_tokens_its_rate_or_its_answers(
    storms: list[list[Completion]], said: list[str]
) -> None:
    faults = judge(4096, CASES, COMPUTED, storms, rounding=0.1).faults
    assert len(faults) == len(said)
    assert all(word in fault for fault, word in zip(faults, said, strict=True))


def test_a_storm_may_differ_as_much_as_storms_without_the_depot() -> None:
    computed = [storm(loaded=0), storm(loaded=0, logprob=-0.75)]
    assert judge(4096, CASES, computed, [storm(0.5, logprob=-0.9)], rounding=0.0).faults == []


def test_storms_take_turns_once_the_prompts_are_stored() -> None:
    ran = list[str]()

    def run(source: str) -> list[Completion]:
        ran.append(source)
        return FAST

    run_storms(run, lambda: ran.append("settled"), CASES, lambda *_: None)
    assert ran == ["computing", "settled", "nothing", "depot", "nothing", "depot"]


@pytest.mark.parametrize(
    ("speed", "held", "longest", "shape"),
    [
        (1e6, 10**9, 10**6, (500, 2048)), (1e6, 200_000, 10**6, (97, 2048)), (10_000, 10**9, 10**6, (39, 2048)),
        (100, 10**9, 10**6, (30, 512)), (1e6, 10**9, 700, (500, 700)), (1e6, 32_768, 4080, (30, 1092)),
    ],
)  # fmt: skip
def test_a_storm_is_as_large_as_eight_seconds_of_prefill_and_memory_allow(
    speed: float, held: int, longest: int, shape: tuple[int, int]
) -> None:
    assert shape_storm(speed, held, longest, 256) == shape


def test_the_small_cache_holds_the_longest_request_and_a_few_of_the_storm() -> None:
    assert small_cache(4096, 1000, 128, 1) == 33
    assert small_cache(4096, 2000, 16, 4) == 4 * 500 + 1
