"""The pressure stage of `kvdepot certify`: storms of requests at an engine with a small cache, and their verdict.

All requests of a storm arrive at once, with prompts that the depot has and the engine's own cache has not. Storms with
the depot and storms that compute everything take turns on one engine, and the better figures of each side count, as a
machine may be busy with other things. Invariant: a storm with the depot passes if no answer differs by more than the
certificate allows, and no figure is beyond its bar beside the storm without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from operator import truediv
from typing import TYPE_CHECKING

import msgspec

from kvdepot.cli.completions import MOST, ROOM, Case, Completion, Source, difference
from kvdepot.cli.output import Progress, duration
from kvdepot.values import plural

if TYPE_CHECKING:
    from rich.console import Console

_LEAST_REQUESTS, _MOST_REQUESTS, _MOST_PROMPT = 30, 500, 2048
_BAR = 1.1
"""The slowest first tokens with the depot may take this many times as long as those without."""
_STORM_S = 8.0
"""Computing the prompts of a storm takes about this long."""
_ROUNDS = 2
_CACHED_PROMPTS = 4


class Storm(msgspec.Struct, frozen=True):
    """The figures of the storms of one side. ttft_p50_s, ttft_p99_s: seconds to the first token, of half of the
    requests and of 99 % of them at most. tokens_s: prompt and answer tokens per second, from the arrival to the last
    token. computed: prompt tokens that the engine computed."""

    ttft_p50_s: float
    ttft_p99_s: float
    tokens_s: float
    computed: int


class Pressure(msgspec.Struct, frozen=True):
    """The result of the stage. cache_tokens: size of the engine's own cache. prompt_tokens: length of each prompt.
    answers: with the depot; `identical` of them are equal to one without. difference: of logprobs, the largest."""

    requests: int
    prompt_tokens: int
    cache_tokens: int
    without: Storm
    depot: Storm
    answers: int
    identical: int
    difference: float
    faults: list[str]

    def print(self, out: Console) -> None:
        from kvdepot.cli.view import Listing

        out.print(
            f"\nPressure: {plural(self.requests, 'request')} of {plural(self.prompt_tokens, 'token')} arrive at once, "
            f"at an engine with room for {plural(self.cache_tokens, 'token')}. Better of {_ROUNDS} storms each.",
            soft_wrap=True,
        )
        rows = [
            [name, duration(each.ttft_p50_s), duration(each.ttft_p99_s), f"{each.tokens_s:,.0f}", f"{each.computed:,}"]
            for name, each in (("computed", self.without), ("depot", self.depot))
        ]
        heads = ("from", ">first token, p50", ">p99", ">tokens/s", ">prompt tokens computed")
        out.print(Listing(heads, rows).table(out.width))
        out.print(f"{self.identical:,} of {plural(self.answers, 'answer')} identical to one without the depot.")


def shape_storm(prefill_tokens_s: float, held_tokens: int, longest_prompt: int, chunk: int) -> tuple[int, int]:
    """The number of requests of a storm and the tokens of each prompt, of which the last chunk is not whole.

    held_tokens: that the depot's memory should hold. longest_prompt: that the engine takes.
    """
    tokens = min(_STORM_S * prefill_tokens_s, held_tokens)
    prompt = min(_MOST_PROMPT, longest_prompt, max(2 * chunk, int(tokens / _LEAST_REQUESTS)))
    return min(_MOST_REQUESTS, max(_LEAST_REQUESTS, int(tokens / prompt))), prompt


def small_cache(longest: int, prompt: int, block: int, groups: int) -> int:
    """The blocks of a cache that holds the longest request that vLLM must be able to run, and a few of a storm's."""
    return groups * max(-(-longest // block), _CACHED_PROMPTS * -(-prompt // block)) + 1


def run_storms(
    run: Callable[[Source], list[Completion]], settle: Callable[[], object], cases: Sequence[Case], update: Progress
) -> tuple[list[list[Completion]], list[list[Completion]]]:
    """The answers of each storm that computes everything, and of each one with the depot. run: has the engine answer
    all prompts at once. settle: waits until all is stored."""
    update(f"pressure: storing {plural(len(cases), 'prompt')}", 0, 0)
    run("computing")
    settle()
    without, depot = list[list[Completion]](), list[list[Completion]]()
    sides: list[tuple[Source, list[list[Completion]]]] = [("nothing", without), ("depot", depot)]
    for number in range(_ROUNDS):
        for place, (source, answers) in enumerate(sides):
            update(f"pressure: {plural(len(cases), 'request')} at once", 2 * number + place, 2 * _ROUNDS)
            answers.append(run(source))
    return without, depot


def judge(
    cache_tokens: int, cases: Sequence[Case], without: list[list[Completion]], depot: list[list[Completion]],
    rounding: float,
) -> Pressure:  # fmt: skip
    """The verdict on storms. rounding: the largest difference of logprobs that was seen without the depot. Storms
    without it add theirs, as other batches round in other ways."""
    for answers in zip(*without, strict=True):
        rounding = max(rounding, *(difference(*pair)[0] for pair in combinations(answers, 2)))
    faults, identical, most = list[str](), 0, 0.0
    for number, (case, computed) in enumerate(zip(cases, without[0], strict=True)):
        others = [storm[number] for storm in without]
        for answer in (storm[number] for storm in depot):
            found, where = min(difference(other, answer) for other in others)
            identical += not where
            most = max(most, found)
            if (found > ROOM * rounding or found == MOST) and len(faults) < 3:
                faults.append(f"pressure, prompt {case.name}: {difference(computed, answer)[1] or where}")
    one, other = _figures(cases, without), _figures(cases, depot)
    if not any(answer.loaded for storm in depot for answer in storm):
        faults.append("pressure: nothing came from the depot")
    if other.ttft_p99_s > _BAR * one.ttft_p99_s:
        slow, bar = duration(other.ttft_p99_s), duration(one.ttft_p99_s)
        faults.append(f"pressure: the slowest first tokens took {slow} with the depot, and {bar} without")
    if other.tokens_s < one.tokens_s:
        faults.append(f"pressure: {other.tokens_s:,.0f} tokens/s with the depot, and {one.tokens_s:,.0f} without")
    return Pressure(
        len(cases), len(cases[0].tokens), cache_tokens, one, other, len(cases) * len(depot), identical, most, faults
    )


def _figures(cases: Sequence[Case], storms: list[list[Completion]]) -> Storm:
    """The better figures of a side's storms."""
    prompts = sum(len(case.tokens) for case in cases)
    times = [sorted(answer.ttft_s for answer in answers) for answers in storms]
    tokens = [prompts + sum(len(answer.tokens) for answer in answers) for answers in storms]
    took_s = [max(answer.took_s for answer in answers) for answers in storms]
    return Storm(
        min(each[len(each) // 2] for each in times),
        min(each[min(len(each) - 1, len(each) * 99 // 100)] for each in times),
        max(map(truediv, tokens, took_s)),
        prompts - max(sum(answer.cached for answer in answers) for answers in storms),
    )
