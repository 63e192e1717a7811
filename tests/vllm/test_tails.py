"""Chats with a model of long blocks and states, on vLLM's real scheduler and KV cache manager (by_hand.py).

They need none of vLLM's compiled code: so also with releases that have no wheel for processors.
"""

from __future__ import annotations

import mmap
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from kvdepot.memory.arena_header import ArenaHeader
from tests.conftest import HANG_S, SHM, Depot, StartDepot, eventually
from tests.vllm.by_hand import Engine, Text, check, lose_server, prompt
from tests.vllm.conftest import StartByHand, StartEngine
from tests.vllm.engines import nothing_is_held

LONG = 544
"""Tokens of a block, as vLLM fits them to Qwen3-Next's states."""
TURNS, MESSAGE, ANSWER, STOP = 12, 75, 25, 3


@pytest.fixture
def depot(start_depot: StartDepot) -> Depot:
    return start_depot(arena_mib=64)


variants = pytest.mark.parametrize(("steps", "unit"), [(1, LONG), (2, LONG), (1, 16), (2, 16)])
"""One step at a time or two; tokens of vLLM's hashes, with `--prefix-match-unit` fewer than those of a block."""


def turn(engine: Engine, number: int, history: list[int], says: int = ANSWER, stops: tuple[int, ...] = ()) -> list[int]:
    """Answer another message. Returns what is known then."""
    made = engine.add(f"{number}", [*history, *prompt(100 + number, MESSAGE)], says, stops)
    engine.finish()
    assert list(made.all_token_ids) == Text(made.prompt_token_ids).until(made.num_tokens).tokens[: made.num_tokens]
    return list(made.all_token_ids)


@variants
def test_a_turn_computes_its_new_tokens(steps: int, unit: int, depot: Depot, start_by_hand: StartByHand) -> None:
    engine, history, computed = start_by_hand(steps=steps, states=(LONG, unit)), list[int](), 0
    for number in range(TURNS):
        known, history = len(history), turn(engine, number, history)
        (begun,) = engine.worker.begun[f"{number}"]
        assert begun >= known - 1  # the last token of an answer was never computed
        computed += known + MESSAGE - begun
        assert engine.scheduler.reset_prefix_cache()
    assert computed <= 1.25 * TURNS * MESSAGE
    eventually(lambda: nothing_is_held(depot.status()))


@variants
def test_another_engine_finds_answers_by_their_stop_tokens(steps: int, unit: int, start_by_hand: StartByHand) -> None:
    history: list[int] = []
    for number in range(TURNS):
        engine = start_by_hand(steps=steps, states=(LONG, unit))
        known, history = len(history), turn(engine, number, history, 200, (STOP,))
        assert history[-1] == STOP and engine.worker.begun[f"{number}"][0] >= known - 1


@pytest.mark.parametrize("steps", [1, 2])
def test_another_server_finds_answers_in_a_tier(
    steps: int, start_depot: StartDepot, start_by_hand: StartByHand, tmp_path: Path
) -> None:
    history = list[int]()
    for number in range(3):
        depot = start_depot("--tiers", f"disk://{tmp_path}?capacity_gib=1", "--lookup-s", "8", arena_mib=8)
        engine = start_by_hand(url=depot.url, steps=steps, states=(LONG, LONG))
        known, history = len(history), turn(engine, number, history or prompt(1, LONG), 200, (STOP,))
        assert engine.worker.begun[f"{number}"][0] >= known - 1
        engine.close()
        eventually(lambda depot=depot: nothing_is_held(depot.status()))
        assert depot.stop() == 0  # once the tier has what it was to save


@variants
def test_a_tail_goes_on_from_whole_blocks_in_the_engines_own_cache(
    steps: int, unit: int, start_by_hand: StartByHand
) -> None:
    engine = start_by_hand(steps=steps, states=(LONG, unit))
    history = turn(engine, 0, prompt(1, 2 * LONG + 100))
    loaded = engine.add("r", [*history, *prompt(2, LONG)])
    engine.finish()
    check(loaded)
    assert engine.worker.begun["r"] == [len(history) - 1]


def test_no_more_tokens_are_loaded_than_a_request_asks_for(depot: Depot, start_by_hand: StartByHand) -> None:
    engine = start_by_hand(states=(LONG, LONG))
    history = turn(engine, 0, prompt(1, LONG + 100))
    for name, most, cached in (("less", len(history) - 2, LONG), ("as many", len(history) - 1, len(history) - 1)):
        assert engine.scheduler.reset_prefix_cache()
        hints = {"kvdepot": {"max_load_tokens": most}}
        engine.add(name, [*history, *prompt(2, 9)], hints=hints)
        engine.finish()
        assert engine.worker.begun[name] == [cached]
    eventually(lambda: nothing_is_held(depot.status()))
    assert not depot.status()["counters"]["errors"], "the engine's report was refused"


@pytest.mark.parametrize("steps", [1, 2])
def test_answers_that_are_not_stored_leave_no_tail(steps: int, start_by_hand: StartByHand) -> None:
    engine = start_by_hand(steps=steps, states=(LONG, LONG), **{"kvdepot.save_decode": "off"})
    history = turn(engine, 0, prompt(1, LONG + 100))
    one = prompt(3, LONG + 50)
    engine.add("one", one, says=1)  # of which the end is that of its prompt
    engine.finish()
    assert engine.scheduler.reset_prefix_cache()
    turn(engine, 1, history)
    turn(engine, 2, one)
    assert engine.worker.begun["1"] == [LONG] and engine.worker.begun["2"] == [len(one)]


@pytest.mark.parametrize("steps", [1, 2])
def test_aborted_and_preempted_requests_leave_tails_of_known_tokens_alone(
    steps: int, depot: Depot, start_by_hand: StartByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.request import RequestStatus

    monkeypatch.setattr("kvdepot.integrations.vllm.worker._PREEMPTION_S", HANG_S)  # or stores are void when it is busy
    engine = start_by_hand(steps=steps, blocks=8, states=(LONG, LONG))
    made = [engine.add(f"r{number}", prompt(number, LONG - 40), 90) for number in range(3)]
    while made[0].num_output_tokens < 60:
        engine.step()
    engine.scheduler.finish_requests("r0", RequestStatus.FINISHED_ABORTED)
    engine.finish()
    assert sum(request.num_preemptions for request in made) > 0
    assert engine.scheduler.reset_prefix_cache()
    for request in made:
        known = list(request.all_token_ids)
        again = engine.add(f"{request.request_id} again", [*known, *prompt(9, 5)])
        engine.finish()
        check(again)
        assert engine.worker.begun[f"{request.request_id} again"][-1] in (len(known) - 1, len(known))
        assert engine.scheduler.reset_prefix_cache()
    eventually(lambda: nothing_is_held(depot.status()))


def test_a_request_aborted_in_a_load_after_its_preemption_leaves_no_tail(
    start_depot: StartDepot, start_by_hand: StartByHand
) -> None:
    """vLLM counts the tokens of the load, more than those of the prompt, before they are there."""
    from vllm.v1.request import RequestStatus

    depot = start_depot("--verify", "always", arena_mib=8)
    engine = start_by_hand(url=depot.url, steps=2, states=(LONG, LONG), plans_ahead=False)
    known = turn(engine, 0, prompt(1, 50))
    eventually(lambda: nothing_is_held(depot.status()))
    damage(depot)
    engine.add("other", prompt(2, 50), 100)  # so that each step computes something
    aborted = engine.add("aborted", known[: 50 + MESSAGE], 100)
    while aborted.num_output_tokens < 2 * ANSWER:
        engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    tracked = engine.scheduler.connector._scheduler._tracked["aborted"]
    while tracked.load is None:
        engine.step()
    assert aborted.num_computed_tokens == len(known) - 1 and aborted.num_preemptions == 1
    engine.scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
    engine.finish()
    assert depot.status()["counters"]["corrupt_chunks"] > 0
    turn(engine, 1, known)
    assert engine.worker.begun["1"] == [0]


def damage(depot: Depot) -> None:
    """Flip bits of all chunks in a server's arena."""
    with (SHM / depot.name).open("r+b") as file:
        header = ArenaHeader.read(file.fileno(), SHM / depot.name)
        assert header is not None
        area = np.frombuffer(mmap.mmap(file.fileno(), header.size), np.uint8)[header.chunks_start :]
        area ^= 0x55


def test_a_streaming_session_leaves_no_tail(start_by_hand: StartByHand) -> None:
    """Its state may be one token ahead of what vLLM counts when it ends."""
    engine = start_by_hand(states=(LONG, LONG))
    made = engine.add("session", prompt(1, LONG + 100), 20)
    made.streaming_queue = deque()
    engine.finish()
    assert engine.scheduler.reset_prefix_cache()
    turn(engine, 1, list(made.all_token_ids))
    assert engine.worker.begun["1"] == [LONG]


def test_a_tail_that_is_lost_is_computed(depot: Depot, start_by_hand: StartByHand) -> None:
    engine = start_by_hand(states=(LONG, LONG))
    history = turn(engine, 0, prompt(1, LONG + 100))
    assert engine.scheduler.reset_prefix_cache()
    lost = engine.add("lost", [*history, *prompt(2, 9)])
    lose_server(engine, depot, "lost")
    engine.finish()
    check(lost)
    assert engine.worker.begun["lost"] == [0]


def test_in_a_real_engine_an_answer_goes_on_as_if_it_had_never_ended(
    depot: Depot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    engine = start_engine(models["states"], depot.url, enable_prefix_caching=True).wait_started()
    for length in (100, 615, 640, 1275):  # below a block of 640 tokens, above, and across its end
        tokens = prompt(length, length)
        whole = engine.run_fresh(tokens, salt="never ended", max_tokens=40)
        begun = engine.run_fresh(tokens, max_tokens=30)
        rest = engine.run_fresh([*tokens, *begun["tokens"]], max_tokens=10)
        assert rest["cached"] == length + 29
        assert (begun["tokens"] + rest["tokens"], rest["logprobs"]) == (whole["tokens"], whole["logprobs"][30:])
    engine.stop()
    eventually(lambda: nothing_is_held(depot.status()))
