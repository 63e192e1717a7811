"""Small loads within the step that computes the rest of the prompt, where a worker checks each byte that it reads."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvdepot import locks
from kvdepot.client import admin
from kvdepot.errors import Unavailable
from kvdepot.memory.arena_view import ArenaView
from kvdepot.protocol import wire
from tests.conftest import HANG_S, SHM, Depot, StartDepot, eventually
from tests.vllm.by_hand import BATCH, CHUNK, Engine, check, prompt
from tests.vllm.conftest import StartByHand, StartEngine
from tests.vllm.engines import nothing_is_held, output, spoil_a_part

TOKENS = 3 * CHUNK + 9
in_turn = pytest.mark.parametrize("steps", [1, 2])  # 2: they are built ahead


@pytest.fixture
def start(start_by_hand: StartByHand) -> Callable[..., Engine]:
    """Start an engine whose worker has mapped the arena, as it does in its first step."""

    def begin(*stored: list[int], **options: Any) -> Engine:
        """stored: prompts that an engine before it computes."""
        if stored:
            before = start_by_hand()
            for number, tokens in enumerate(stored):
                before.run(f"stored {number}", tokens)
        engine = start_by_hand(**options)
        engine.run("first", prompt(999, 20))
        return engine

    return begin


def loads(engine: Engine) -> list[Any]:
    """What the engine's worker is told to copy from now on."""
    copied, copies = list[Any](), engine.worker.connector._worker._copies
    copy = copies.copy
    copies.copy = lambda load, rank: copied.append(load) or copy(load, rank)
    return copied


@in_turn
@pytest.mark.parametrize("is_small", [True, False])
def test_a_small_hit_costs_a_busy_engine_no_step_and_a_large_one_that_of_its_load(
    steps: int, is_small: bool, depot: Depot, start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(11, TOKENS)
    if not is_small:
        monkeypatch.setattr("kvdepot.integrations.vllm.in_step._STEP_BYTES", 0)
    engine = start(tokens, steps=steps)
    copied, lane = loads(engine), engine.worker.connector._worker._depot
    engine.worker.computing = lambda _: lane.wait_any(HANG_S)  # a step takes longer than loads that have begun
    engine.ask("decoding", prompt(12, 40), says=60)
    while "decoding" not in engine.worker.begun:
        engine.step()
    taken = dict.fromkeys(("loaded", "its own"), 0)
    for name in taken:
        made = engine.ask(name, tokens, says=2)
        while name not in engine.worker.begun:
            engine.step()
            taken[name] += 1
        while made.request_id in engine.scheduler.requests:
            engine.step()
        check(made)
        assert engine.worker.begun[name] == [3 * CHUNK]
    assert taken == {"loaded": 1 if is_small else 1 + steps, "its own": 1}
    assert [(load.request_id, load.skip) for load in copied] == [("loaded", 0)] * is_small
    engine.finish()
    eventually(lambda: depot.status()["counters"]["retrieved_chunks"] == 3)
    eventually(lambda: nothing_is_held(depot.status()))


@in_turn
def test_a_hit_of_the_whole_prompt_computes_its_last_token(steps: int, start: Callable[..., Engine]) -> None:
    tokens = prompt(13, 3 * CHUNK)
    engine = start(tokens, steps=steps)
    copied = loads(engine)
    assert engine.run("whole", tokens) == 3 * CHUNK - 1 and len(copied) == 1


def test_blocks_of_the_engines_own_cache_are_not_written(start: Callable[..., Engine]) -> None:
    tokens = prompt(14, 4 * CHUNK + 9)
    engine = start(tokens)
    engine.run("a part of it", tokens[: CHUNK + CHUNK // 2])  # a block and a half of the second chunk
    copied = loads(engine)
    assert engine.run("all of it", tokens) == 4 * CHUNK
    assert [(len(load.ranks[0]), load.skip) for load in copied] == [(3, 1)]


def test_a_step_copies_a_bounded_number_of_bytes(start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [prompt(20 + number, TOKENS) for number in range(3)]
    engine = start(*prompts)
    copied = loads(engine)
    monkeypatch.setattr("kvdepot.integrations.vllm.in_step._STEP_BYTES", 0)
    engine.run("counted from the next step on", prompt(30, 20))
    for number, tokens in enumerate(prompts):
        engine.ask(f"r{number}", tokens)
    engine.finish()
    assert not copied
    assert [engine.worker.begun[f"r{number}"] for number in range(3)] == [[3 * CHUNK]] * 3


@in_turn
def test_a_server_that_is_killed_and_replaced_fails_no_promised_load(
    steps: int, depot: Depot, start_depot: StartDepot, start: Callable[..., Engine]
) -> None:
    """Its successor keeps the chunks that the step loads, and gives their memory to nobody until it has."""
    tokens = prompt(15, TOKENS)
    engine = start(tokens, steps=steps)
    made = engine.ask("promised", tokens)
    planned = engine.scheduler.schedule()
    depot.process.kill()
    depot.process.wait(HANG_S)
    again = start_depot(url=depot.url, name=depot.name, arena_mib=64, chunk_size=CHUNK)
    found = again.status()
    assert found["chunks"] == TOKENS // CHUNK and "empty" not in again.logged()
    assert found["holds"] == 3, "those that are loaded"
    engine.scheduler.update_from_output(planned, engine.worker.step(planned))
    engine.finish()
    check(made)
    assert engine.worker.begun["promised"] == [3 * CHUNK]
    eventually(lambda: nothing_is_held(again.status()))


def test_the_arena_is_in_use_until_the_only_worker_has_copied(depot: Depot, start: Callable[..., Engine]) -> None:
    tokens = prompt(151, TOKENS)
    engine = start(tokens)
    made = engine.ask("copied", tokens)
    planned = engine.scheduler.schedule()
    fd = os.open(f"/dev/shm/{depot.name}", os.O_RDONLY)
    size = os.fstat(fd).st_size
    assert sum(length for _, length in locks.uses(fd, 0, size)) == depot.status()["used_bytes"], "three chunks"
    output = engine.worker.step(planned)
    assert not locks.uses(fd, 0, size), "long before the step's output is back"
    os.close(fd)
    engine.scheduler.update_from_output(planned, output)
    engine.finish()
    check(made)


def test_chunks_of_an_aborted_request_stay_until_its_step_is_over(depot: Depot, start: Callable[..., Engine]) -> None:
    from vllm.v1.request import RequestStatus

    tokens = prompt(16, TOKENS)
    engine = start(tokens, steps=2)
    aborted = engine.ask("aborted", tokens)
    planned = engine.scheduler.schedule()
    engine.scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
    half = engine.scheduler.connector._scheduler
    assert half._ending_later
    half.on_new_request(aborted)  # another one with its id, whose lookup would end the session
    assert not half._tracked
    half._uncached.clear()
    assert depot.status()["holds"] > 0
    engine.scheduler.update_from_output(planned, engine.worker.step(planned))
    engine.finish()
    eventually(lambda: nothing_is_held(depot.status()))
    assert engine.run("again", tokens) == 3 * CHUNK


def test_chunks_that_are_forgotten_after_they_were_found_are_not_copied(
    depot: Depot, start: Callable[..., Engine]
) -> None:
    tokens = prompt(162, TOKENS)
    engine = start(tokens)
    copied = loads(engine)
    made = engine.ask("found", tokens)
    with admin.connect(depot.url) as client:
        client.ask(wire.ForgetChunks()).result(HANG_S)
    engine.finish()
    check(made)
    assert not copied and engine.worker.begun["found"] == [0]


def test_engines_do_not_keep_the_memory_of_an_arena_that_is_gone(depot: Depot, start: Callable[..., Engine]) -> None:
    engine = start(prompt(163, TOKENS))
    view = ArenaView(SHM, *engine.worker.connector._worker._depot.client.arena)
    assert os.fstat(view._fd).st_blocks > 0
    depot.process.terminate()
    depot.process.wait(HANG_S)
    assert os.fstat(view._fd).st_blocks == 0
    with pytest.raises(Unavailable), view.use([(len(view.bytes) - 1, 1)]):
        pass


def test_a_chunk_without_its_checksum_is_found_and_computed(depot: Depot, start: Callable[..., Engine]) -> None:
    tokens = prompt(17, 24 * CHUNK + 9)  # one chunk in 16 has a checksum
    engine = start(tokens)
    copied = loads(engine)
    spoil_a_part(depot, lambda part: part.checksum)
    made = engine.ask("spoilt", tokens)
    engine.finish()
    check(made)
    assert not copied
    assert depot.status()["counters"]["corrupt_chunks"] > 0


def test_in_a_real_engine_of_two_processes_a_small_hit_changes_no_token(
    depot: Depot, target: Path, start_engine: StartEngine
) -> None:
    options = {"tensor_parallel_size": 2, "dtype": "float32", "block_size": 32, "max_num_batched_tokens": BATCH}
    tokens = prompt(18, TOKENS)
    engine = start_engine(target, depot.url, **options).wait_started()
    computed = engine.run(tokens)
    before = depot.status()
    loaded = engine.run_fresh(tokens)
    assert (computed["cached"], loaded["cached"]) == (0, 3 * CHUNK)
    assert output(loaded) == output(computed)
    eventually(lambda: depot.status()["counters"]["retrieved_chunks"] == before["counters"]["retrieved_chunks"] + 6)
    engine.stop()
    eventually(lambda: nothing_is_held(depot.status()))
