"""Load or compute: the choice beside a model of two machines that tries every part, and on the real scheduler."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus

from kvdepot.integrations.vllm.load_or_compute import LEAST_S, MARGIN, Load, LoadOrCompute, Offer, Times, soonest
from kvdepot.integrations.vllm.messages import LaneTimes, WorkerReport
from kvdepot.integrations.vllm.plan import GroupBlocks, GroupPlan, Piece, PlanRules
from kvdepot.integrations.vllm.stats import PrefillSpeed
from tests.conftest import Depot, StartDepot, eventually
from tests.vllm.by_hand import CHUNK, Engine, check, prompt
from tests.vllm.conftest import StartByHand
from tests.vllm.engines import nothing_is_held

PLAIN = GroupPlan([GroupBlocks(0, 2, 2, 0)], CHUNK, PlanRules())
WINDOWS = GroupPlan([GroupBlocks(0, 2, 2, 0), GroupBlocks(1, 2, 2, 3)], CHUNK, PlanRules())
KINDS = pytest.mark.parametrize("plan", [PLAIN, WINDOWS], ids=["plain", "windows"])


# -- one hit


def played(offer: Offer, times: Times, loaded: int) -> float:
    """Seconds to the first token, token by token: the lane loads, and the model computes once that is there."""
    there = 0.0
    if loaded:
        there = times.lane_s
        for _ in range(loaded):
            there += times.load_s / offer.tokens
    now = max(there, times.compute_s)
    for _ in range(offer.tokens - loaded + offer.rest):
        now += times.token_s
    return now


def test_no_part_of_a_hit_comes_sooner_than_the_chosen_one_by_more_than_the_margin() -> None:
    chosen = set[str]()
    for seed in range(2000):
        generator = random.Random(seed)
        step = generator.choice([0, 16, 64])
        first = generator.randint(1, step or 1)
        tokens = first + step * generator.randint(0, 12) if step else generator.randint(1, 800)
        offer = Offer(tokens, first, step, generator.choice([1, 9, 300]))
        token_s = 10 ** generator.uniform(-5, -2)
        load_s = tokens * token_s * 10 ** generator.uniform(-1.5, 1.5)
        queues = [generator.choice([0.0, generator.uniform(0, 2 * tokens * token_s)]) for _ in range(2)]
        times = Times(queues[0], load_s, queues[1], token_s)
        parts = {0, tokens, *(range(first, tokens, step) if step else ())}
        best_s = min(played(offer, times, part) for part in parts)
        found = soonest(offer, times)
        assert found in parts, seed
        assert played(offer, times, found) <= best_s + max(LEAST_S, MARGIN * best_s) + 1e-9, seed
        chosen.add("none" if not found else "all" if found == tokens else "a part")
    assert chosen == {"none", "all", "a part"}


# -- the queues of an engine


def measured(tokens_s: float) -> PrefillSpeed:
    prefill = PrefillSpeed()
    for step in (1, 2):
        prefill.built(step, [1000], 10.0 * step)
        prefill.output(step, 10.0 * step + 1000 / tokens_s)
    return prefill


def request(name: str, tokens: int) -> Any:
    return Request(name, [7] * tokens, SamplingParams(max_tokens=1), None)


def engine(chunk_s: float, compute_s: float, plan: GroupPlan = PLAIN, ranks: Sequence[float] = (1.0,)) -> LoadOrCompute:
    """An engine whose lanes take these seconds for a chunk, the slowest of its ranks, and whose model these."""
    choice = LoadOrCompute(measured(CHUNK / compute_s))
    choice.connect(plan, CHUNK)
    groups = 1 + plan.is_bounded
    lanes = {rank: LaneTimes(0.0, (chunk_s * part / 2 / groups,) * groups) for rank, part in enumerate(ranks)}
    choice.reported(WorkerReport(lanes=lanes))
    return choice


def schedule(choice: LoadOrCompute, waiting: Any, tokens: int, in_step: bool = False) -> Load:
    """What vLLM does with a request that it schedules: returns what it loads of a hit of so many tokens."""
    load = choice.choose(waiting, 0, Load(tokens, in_step))
    choice.scheduled(waiting)
    waiting.num_computed_tokens, waiting.status = load.tokens, RequestStatus.RUNNING
    if load.tokens and not load.in_step:
        blocks = choice._plan.load_blocks(0, load.tokens // CHUNK)
        choice.ordered(1, [Piece(group, 0, 1, [1] * number) for group, number in enumerate(blocks)])
    return load


@KINDS
@pytest.mark.parametrize("slower", [0.1, 0.5, 0.95, 1.0, 1.5, 3.0, 20.0])
def test_a_storm_of_hits_ends_as_soon_as_the_better_of_loading_and_computing(slower: float, plan: GroupPlan) -> None:
    """slower: how many times as long a lane takes for a chunk as the model."""
    hits, chunks, compute_s = 30, 8, 0.05
    choice = engine(slower * compute_s, compute_s, plan, ranks=(0.5, 1.0))
    token_s, lane_s, jobs = compute_s / CHUNK, 0.0, list[tuple[float, float]]()
    for number in range(hits):
        load = schedule(choice, request(f"{number}", chunks * CHUNK + 9), chunks * CHUNK)
        if load.tokens:
            parts = choice._plan.load_blocks(0, load.tokens // CHUNK)
            lane_s += sum(parts) * slower * compute_s / 2 / len(parts)
        jobs.append((lane_s if load.tokens else 0.0, (chunks * CHUNK + 9 - load.tokens) * token_s))
    model_s = 0.0
    for ready_s, work_s in sorted(jobs):  # the model computes what is there, first come, first served
        model_s = max(model_s, ready_s) + work_s
    alone_s = compute_s + 9 * token_s
    whole = sum(plan.load_blocks(0, chunks)) / (1 + plan.is_bounded) / 2
    loaded_s, computed_s = hits * whole * slower * compute_s + 9 * token_s, hits * (chunks * compute_s + 9 * token_s)
    assert model_s <= 1.05 * min(loaded_s, computed_s) + alone_s
