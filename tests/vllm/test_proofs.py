"""Loads that nothing has proved yet, in engines of by_hand.py: what follows from them is heard only once the step that
computes on top of them has compared. The worker says wrong tokens wherever it has read another engine's wrong KV."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from kvdepot.integrations.vllm.phases import RequestPhase
from tests.conftest import Depot, eventually
from tests.vllm.by_hand import BATCH, CHUNK, Engine, check, lose_server, prompt
from tests.vllm.conftest import StartByHand
from tests.vllm.engines import nothing_is_held

TOKENS = 3 * CHUNK + 9
EARNED = {"kvdepot.trust": "earned"}
equally = pytest.mark.parametrize("weights", [b"", b"others"], ids=["equal", "other weights"])
ways = pytest.mark.parametrize("bytes_in_step", [0, 1 << 20], ids=["loaded before", "loaded in the step"])


@pytest.fixture
def start(start_by_hand: StartByHand, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Start an engine, A, that meets what another, B, has stored."""

    def begin(*stored: list[int], weights: bytes = b"", bytes_in_step: int = 0, **options: Any) -> Engine:
        """stored: prompts that B computes, with these weights."""
        monkeypatch.setattr("kvdepot.integrations.vllm.in_step._STEP_BYTES", bytes_in_step)
        other = start_by_hand(writer="b B", runner="0", **EARNED)
        other.worker.weights = weights
        for number, tokens in enumerate(stored):
            other.run(f"stored {number}", tokens)
        engine = start_by_hand(writer="a A", runner="0", **EARNED, **options)
        engine.worker.may_read_wrong = True
        engine.run("first", prompt(999, 20))
        return engine

    return begin


def compared(depot: Depot) -> tuple[int, int]:
    counters = depot.status()["counters"]
    return counters["compared_chunks"], counters["differing_chunks"]


@ways
def test_the_last_chunk_of_a_hit_is_computed_and_compared(
    depot: Depot, start: Callable[..., Engine], bytes_in_step: int
) -> None:
    long = prompt(2, TOKENS + 10 * CHUNK)
    engine = start(prompt(1, TOKENS), long, long[: 12 * CHUNK + 1], bytes_in_step=bytes_in_step)
    assert engine.run("proves", prompt(1, TOKENS)) == 2 * CHUNK
    assert compared(depot) == (1, 0)
    assert engine.run("four times as long", long[: 12 * CHUNK + 1]) == 12 * CHUNK
    assert engine.scheduler.reset_prefix_cache()
    assert engine.run("longer than that", long) == 12 * CHUNK
    assert compared(depot) == (2, 0)
    assert engine.scheduler.reset_prefix_cache()
    assert engine.run("the same", long) == 13 * CHUNK
    assert compared(depot) == (2, 0)
    eventually(lambda: nothing_is_held(depot.status()))


@ways
def test_tokens_that_follow_from_a_wrong_load_never_leave_the_engine(
    depot: Depot, start: Callable[..., Engine], bytes_in_step: int
) -> None:
    tokens = prompt(3, TOKENS)
    engine = start(tokens, weights=b"others", bytes_in_step=bytes_in_step)
    decoding = engine.ask("decoding", prompt(4, 40), says=60)
    while "decoding" not in engine.worker.begun:
        engine.step()
    pair = [engine.ask(name, tokens) for name in ("one", "two")]  # in one step, if they can be
    engine.finish()
    for each in (decoding, *pair):
        check(each)
    assert compared(depot)[1] > 0
    engine.run("later", tokens)
    eventually(lambda: nothing_is_held(depot.status()))


@ways
@equally
def test_a_step_that_completes_no_chunk_takes_the_load_back(
    depot: Depot, start: Callable[..., Engine], bytes_in_step: int, weights: bytes
) -> None:
    tokens, others = prompt(5, TOKENS), [prompt(60 + number, BATCH - CHUNK // 2) for number in range(2)]
    engine = start(tokens, weights=weights, bytes_in_step=bytes_in_step)
    made = [engine.ask(f"miss {number}", each) for number, each in enumerate(others)]
    made.append(engine.ask("hit", tokens))
    engine.finish()
    for each in made:
        check(each)
    engine.run("has it compared", prompt(62, 20))
    eventually(lambda: compared(depot)[0])
    engine.run("learns of it", prompt(62, 20))
    assert engine.scheduler.reset_prefix_cache()
    assert engine.run("the same", tokens) == (0 if weights else 3 * CHUNK)


@pytest.mark.parametrize("options", [{"steps": 2}, {"runner": "1"}], ids=["async scheduling", "runner V2"])
def test_an_engine_that_cannot_take_a_load_back_computes_everything(
    depot: Depot, start_by_hand: StartByHand, options: dict[str, Any]
) -> None:
    tokens = prompt(7, TOKENS)
    options = {"runner": "0", **options, **EARNED}
    start_by_hand(writer="b B", **options).run("stored", tokens)
    engine = start_by_hand(writer="a A", **options)
    assert engine.run("computes", tokens) == 0
    assert engine.run("has it compared", prompt(8, 20)) == 0
    eventually(lambda: compared(depot) == (3, 0))
    assert engine.run("learns of it", prompt(8, 20)) == 0
    assert engine.scheduler.reset_prefix_cache()
    assert engine.run("loads", tokens) >= 3 * CHUNK - 1


@ways
@equally
def test_an_abort_during_a_comparison_leaves_no_wrong_byte(
    depot: Depot, start: Callable[..., Engine], bytes_in_step: int, weights: bytes
) -> None:
    tokens = prompt(9, TOKENS)
    engine = start(tokens, weights=weights, bytes_in_step=bytes_in_step)
    engine.ask("aborted", tokens)
    while "aborted" not in engine.worker.begun:
        planned = engine.scheduler.schedule()
        output = engine.worker.step(planned)
        if "aborted" in engine.worker.begun:  # its comparison has ended, and vLLM takes aborts before outputs
            engine.scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
        engine.scheduler.update_from_output(planned, output)
    engine.run("after it", tokens)
    assert compared(depot)[0] > 0


@ways
def test_a_server_that_is_killed_before_the_comparison_costs_a_computation(
    depot: Depot, start: Callable[..., Engine], bytes_in_step: int
) -> None:
    tokens = prompt(10, TOKENS)
    engine = start(tokens, bytes_in_step=bytes_in_step)
    made = engine.add("hit", tokens)
    if not bytes_in_step:  # its load ends first
        half = engine.scheduler.connector._scheduler
        while "hit" not in half._tracked or half._tracked["hit"].phase is not RequestPhase.LOADED:
            engine.step()
        depot.process.kill(), depot.process.wait()
    else:
        lose_server(engine, depot, "hit")
    engine.finish()
    check(made)


@ways
def test_engines_short_of_blocks_hear_nothing_wrong(
    depot: Depot, start: Callable[..., Engine], bytes_in_step: int
) -> None:
    chance = random.Random(11)
    stored = [prompt(seed, CHUNK * chance.randrange(2, 6) + chance.randrange(CHUNK)) for seed in range(6)]
    engine = start(*stored, weights=b"others", bytes_in_step=bytes_in_step, blocks=24)
    for turn in range(6):
        made = [engine.add(f"{turn} {number}", tokens, says=40) for number, tokens in enumerate(stored[turn // 2 :])]
        engine.finish()
        for each in made:
            check(each)
    assert compared(depot)[1] > 0
