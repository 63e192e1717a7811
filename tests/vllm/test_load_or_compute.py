"""Load or compute: the choice beside a model of two machines that tries every part, and on the real scheduler."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus

from kvdepot.client import admin
from kvdepot.integrations.vllm.load_or_compute import LEAST_S, MARGIN, HitPart, Loadable, LoadOrCompute, Times, soonest
from kvdepot.integrations.vllm.messages import LaneTimes, WorkerReport
from kvdepot.integrations.vllm.plan import GroupBlocks, GroupPlan, Piece, PlanRules
from kvdepot.integrations.vllm.stats import PrefillSpeed
from tests.conftest import Depot, eventually
from tests.vllm.by_hand import BLOCK, CHUNK, Engine, check, prompt
from tests.vllm.conftest import StartByHand
from tests.vllm.engines import nothing_is_held

PLAIN = GroupPlan([GroupBlocks(0, 2, 2, 0)], CHUNK, PlanRules())
WINDOWS = GroupPlan([GroupBlocks(0, 2, 2, 0), GroupBlocks(1, 2, 2, 3)], CHUNK, PlanRules())
KINDS = pytest.mark.parametrize("plan", [PLAIN, WINDOWS], ids=["plain", "windows"])


# -- one hit


def played(hit: Loadable, times: Times, loaded: int) -> float:
    """Seconds to the first token, token by token: the lane loads, and the model computes once that is there."""
    there = 0.0
    if loaded:
        there = times.lane_s
        for _ in range(loaded):
            there += times.load_s / hit.tokens
    now = max(there, times.compute_s)
    for _ in range(hit.tokens - loaded + hit.rest):
        now += times.token_s
    return now


def test_no_part_of_a_hit_comes_sooner_than_the_chosen_one_by_more_than_the_margin() -> None:
    chosen = set[str]()
    for seed in range(2000):
        generator = random.Random(seed)
        step = generator.choice([0, 16, 64])
        first = generator.randint(1, step or 1)
        tokens = first + step * generator.randint(0, 12) if step else generator.randint(1, 800)
        hit = Loadable(tokens, first, step, generator.choice([1, 9, 300]))
        token_s = 10 ** generator.uniform(-5, -2)
        load_s = tokens * token_s * 10 ** generator.uniform(-1.5, 1.5)
        queues = [generator.choice([0.0, generator.uniform(0, 2 * tokens * token_s)]) for _ in range(2)]
        times = Times(queues[0], load_s, queues[1], token_s)
        parts = {0, tokens, *(range(first, tokens, step) if step else ())}
        best_s = min(played(hit, times, part) for part in parts)
        found = soonest(hit, times)
        assert found in parts, seed
        assert played(hit, times, found) <= best_s + max(LEAST_S, MARGIN * best_s) + 1e-9, seed
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


def schedule(choice: LoadOrCompute, waiting: Any, tokens: int, in_step: bool = False) -> HitPart:
    """What vLLM does with a request that it schedules: returns what it loads of a hit of so many tokens."""
    load = choice.choose(waiting, 0, HitPart(tokens, in_step))
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


@pytest.mark.parametrize("missing", ["lanes", "prefill"])
def test_without_measurements_all_is_loaded(missing: str) -> None:
    choice = engine(5.0, 0.01)
    if missing == "lanes":
        choice._lanes = {}
    else:
        choice._prefill = PrefillSpeed()
    assert schedule(choice, request("r", 521), 512) == HitPart(512, False)


def test_a_slow_lane_loads_a_part_while_the_model_is_busy_with_others() -> None:
    choice = engine(0.02, 0.01)
    assert schedule(choice, request("first", 521), 512).tokens == 0  # 8 chunks
    assert schedule(choice, request("second", 521), 512).tokens == 4 * CHUNK  # within the 80 ms of the first
    assert schedule(choice, request("third", 521), 512).tokens == 2 * CHUNK  # within the 40 ms of the second
    bounded = engine(0.02, 0.01, WINDOWS)
    assert [schedule(bounded, request(f"{number}", 521), 512).tokens for number in range(3)] == [0, 512, 0]


def test_a_load_within_a_step_costs_the_model_what_it_copies() -> None:
    assert schedule(engine(0.009, 0.01), request("faster", 521), 512, in_step=True) == HitPart(512, True)
    slow = engine(0.02, 0.01)
    assert schedule(slow, request("computed", 521), 512, in_step=True).tokens == 0
    assert schedule(slow, request("beside it", 521), 512, in_step=True) == HitPart(4 * CHUNK, False)


def test_a_request_that_ends_leaves_the_queue_of_the_model() -> None:
    choice, gone = engine(0.02, 0.01), {name: request(name, 521) for name in ("aborted", "preempted", "computed")}
    for each in gone.values():
        schedule(choice, each, 0)
        each.num_computed_tokens = 64
    choice.built()
    assert choice._left_tokens() == 3 * (521 - 64)
    gone["aborted"].status = RequestStatus.FINISHED_ABORTED
    gone["preempted"].num_computed_tokens = 0
    gone["computed"].num_computed_tokens = 521
    choice.built()
    assert choice._left_tokens() == 0 and not choice._prefilling


def test_a_report_counts_the_loads_of_its_step_and_no_later_ones() -> None:
    choice = engine(0.02, 0.02)
    for step in (1, 2):
        choice.ordered(step, [Piece(0, 0, 8, list(range(16)), skip=2)])
    (lane,) = choice._lanes.values()
    assert choice._queued_s(lane, choice._reported_at) == pytest.approx(2 * 14 * 0.01)
    later = LaneTimes(0.5, lane.block_s)
    choice.reported(WorkerReport(step=1, lanes={0: later}))
    assert choice._queued_s(later, choice._reported_at) == pytest.approx(0.5 + 14 * 0.01)
    assert choice._queued_s(later, choice._reported_at + 2.0) == pytest.approx(14 * 0.01)


@KINDS
def test_lanes_that_were_slow_are_tried_again_by_one_request(plan: GroupPlan) -> None:
    choice, smallest = engine(0.2, 0.01, plan), 512 if plan.is_bounded else CHUNK
    assert schedule(choice, request("too soon", 521), 512, in_step=True).tokens == 0
    choice._prefilling.clear()
    choice.built()
    choice._retry_at = 0.0
    assert choice.choose(request("tries", 521), 0, HitPart(512, True)) == HitPart(smallest, False)
    assert choice.choose(request("another", 521), 0, HitPart(512, True)).tokens == 0
    lost_s = choice._retry_at - choice._reported_at
    assert lost_s >= 20 * (smallest / CHUNK) * (0.2 - 0.01) * (0.5 if plan.is_bounded else 1.0) - 1e-3


# -- on vLLM's scheduler


@pytest.fixture
def start(start_by_hand: StartByHand, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Start an engine without loads in steps, behind one that has stored these prompts, with measured speeds."""
    monkeypatch.setattr("kvdepot.integrations.vllm.in_step._STEP_BYTES", 0)

    def begin(*stored: list[int], chunk_s: float, compute_s: float, **options: Any) -> Engine:
        before = start_by_hand(**options | {"writer": "before"} if options.get("writer") else options)
        for number, tokens in enumerate(stored):
            before.run(f"stored {number}", tokens)
        made = start_by_hand(**options)
        made.run("first", prompt(999, 20))
        half, worker = made.scheduler.connector._scheduler, made.worker.connector._worker
        size = CHUNK // BLOCK * worker.blocks[0].layout.block_bytes
        for _ in range(32):
            worker._depot.lane.load_speed.add(size, chunk_s)
        half._prefill._samples.append(CHUNK / compute_s)
        made.run("second", prompt(998, 20))  # whose report has the lane's speed
        return made

    return begin


def told(engine: Engine, request_id: str) -> dict[str, int]:
    """What the server has heard of a request's tokens."""
    client = engine.scheduler.connector._scheduler._depot.client
    eventually(lambda: "needed" in admin.why(client, request_id).engine)
    return admin.why(client, request_id).engine


@pytest.mark.parametrize("runner", ["0", "1"])
def test_tokens_that_come_sooner_by_computing_are_computed_and_all_are_right(
    runner: str, depot: Depot, start: Callable[..., Engine]
) -> None:
    tokens, other = prompt(11, 3 * CHUNK + 9), prompt(12, 3 * CHUNK + 9)
    engine = start(tokens, other, chunk_s=0.2, compute_s=0.1, runner=runner)
    stored = depot.status()["counters"]["stored_chunks"]
    assert engine.run("hit", tokens) == 0
    needed = {"needed": 3 * CHUNK + 9, "found here": 3 * CHUNK}
    assert told(engine, "hit") == needed | {"computed as that was sooner": 3 * CHUNK}
    # Behind a request that computes 150 tokens, the lanes have the time for one chunk.
    engine.ask("busy", prompt(13, 150 - 9), says=1)
    part = engine.ask("in part", other)
    engine.finish()
    check(part)
    assert engine.worker.begun["in part"] == [CHUNK]
    assert told(engine, "in part") == needed | {"loaded": CHUNK, "computed as that was sooner": 2 * CHUNK}
    eventually(lambda: nothing_is_held(depot.status()))
    assert depot.status()["counters"]["stored_chunks"] == stored + 2  # of the busy one alone


def test_requests_of_one_step_queue_for_the_lanes_and_the_model(start: Callable[..., Engine]) -> None:
    prompts = [prompt(20 + number, 3 * CHUNK + 9) for number in range(2)]
    engine = start(*prompts, chunk_s=0.08, compute_s=0.1)
    for number, tokens in enumerate(prompts):
        engine.ask(f"{number}", tokens)
    engine.finish()
    assert [engine.worker.begun[f"{number}"] for number in range(2)] == [[3 * CHUNK], [0]]


def test_a_hit_that_is_to_be_proved_is_loaded_as_trust_decides(start: Callable[..., Engine]) -> None:
    tokens = prompt(30, 3 * CHUNK + 9)
    engine = start(tokens, chunk_s=0.2, compute_s=0.1, runner="0", writer="another", **{"kvdepot.trust": "earned"})
    assert engine.run("unproven", tokens) == 2 * CHUNK
    assert told(engine, "unproven")["compared"] == CHUNK
