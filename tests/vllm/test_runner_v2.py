"""The connector below both of vLLM's runners, with a drafter and without, in real engines.

And below runner V2 step by step (by_hand.py), which needs none of vLLM's compiled code: so also with releases that have
no wheel for processors.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvdepot.integrations.vllm import process
from tests.conftest import HANG_S, Depot, StartDepot, eventually
from tests.tiers.servers import RedisServer, need
from tests.vllm import drafters
from tests.vllm.by_hand import BATCH, CHUNK, check, lose_server, prompt
from tests.vllm.conftest import StartByHand, StartEngine
from tests.vllm.engines import nothing_is_held, output, run_preempted


@pytest.fixture(scope="module")
def paths(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("drafter")
    return {"target": target, "drafter": drafters.write_drafter(folder / "drafter", "eagle", drafters.TARGET)}


in_turn = pytest.mark.parametrize("steps", [1, 2])
"""Whether steps are built ahead."""


@pytest.mark.faults
def test_a_deep_queue_loads_each_prompt_from_a_slow_tier_in_its_turn(
    start_depot: StartDepot, start_by_hand: StartByHand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    need(commands=["redis-server"], modules=["redis"])
    monkeypatch.setattr("kvdepot.integrations.vllm.stats.PrefillSpeed.speed", 0.0)  # or computing would be faster
    monkeypatch.setattr("kvdepot.integrations.vllm.scheduler.PATIENCE_S", HANG_S)
    prompts = [prompt(1000 + i, 3 * CHUNK + 5) for i in range(500)]
    with ExitStack() as stack:
        store = RedisServer(tmp_path)
        stack.callback(store.kill)
        tier = f"redis://127.0.0.1:{store.port}/0?queue_mib=1024"
        for loaded in 0, 3 * CHUNK:  # the second server begins with nothing
            depot = start_depot("--tiers", tier, "--lookup-s", "8", arena_mib=1, chunk_size=CHUNK)
            engine = start_by_hand(url=depot.url)
            made = [engine.add(f"r{i}", tokens) for i, tokens in enumerate(prompts)]
            while engine.scheduler.has_requests():
                store.cli("client", "pause", "20")
                for _ in range(50):
                    engine.step()
                status = depot.status()
                assert status["waiting_bytes"] <= 3 * status["capacity_bytes"] // 8
            assert {engine.worker.begun[request.request_id][-1] for request in made} == {loaded}
            for request in made:
                check(request)
            eventually(lambda depot=depot: not depot.status()["tiers"][0]["queued_bytes"])
        found = depot.status()["counters"] | depot.status()["tiers"][0]["counters"]
    assert (found["loaded_chunks"], found["dropped_chunks"], found["shortened_lookups"]) == (1500, 0, 0)


@in_turn
def test_a_load_that_fails_is_reported_once_and_computed(
    steps: int, depot: Depot, start_depot: StartDepot, start_by_hand: StartByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdepot.integrations.vllm.in_step._STEP_BYTES", 0)  # such loads do not fail
    tokens = prompt(2, 3 * CHUNK + 9)
    start_by_hand(steps=steps).run("first", tokens)
    engine = start_by_hand(steps=steps)
    engine.add("decoding", prompt(3, 40), says=60)  # so that there is something to compute meanwhile
    engine.step()
    lost = engine.add("lost", tokens)
    lose_server(engine, depot, "lost")
    engine.finish()
    check(lost)
    assert engine.worker.begun["lost"] == [0]
    again = start_depot(url=depot.url, arena_mib=64, chunk_size=CHUNK)
    eventually(lambda: again.status()["instances"] == 1)
    engine = start_by_hand(steps=steps)
    assert engine.run("second", tokens) == 0
    engine = start_by_hand(steps=steps)
    assert engine.run("third", tokens) == 3 * CHUNK


@in_turn
@pytest.mark.parametrize("pauses", [False, True])
def test_caches_can_be_reset_while_a_prompt_is_computed_and_its_blocks_are_held(
    steps: int, pauses: bool, start_by_hand: StartByHand
) -> None:
    """Paused as by vLLM's /pause?mode=keep, it resets the caches once there is nothing left to do."""
    from vllm.v1.core.sched.interface import PauseState

    engine = start_by_hand(steps=steps, window=100 if pauses else 0)
    kept = engine.add("kept", prompt(5, 9 * CHUNK))
    while kept.num_computed_tokens < 3 * BATCH:
        engine.step()
    assert kept.num_computed_tokens < len(kept.prompt_token_ids)
    if pauses or steps > 1:  # vLLM refuses a reset while a step is under way
        engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        engine.work()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.finish()
    check(kept)


@in_turn
def test_dummy_runs_captures_and_aborts_between_steps_leave_nothing_behind(
    steps: int, depot: Depot, start_by_hand: StartByHand
) -> None:
    """Runner V2 takes the connector away while it runs a dummy batch, and tells it once it has captured graphs."""
    from vllm.v1.request import RequestStatus

    tokens = prompt(7, 4 * CHUNK + 9)
    engine = start_by_hand(steps=steps)
    engine.add("whole", tokens)
    engine.add("aborted", prompt(8, 4 * CHUNK + 9))
    while engine.scheduler.has_requests():
        engine.step()
        engine.worker.v2.set_disabled(True)
        engine.worker.v2.set_disabled(False)
        engine.worker.v2.reset_capture_state()
        if "aborted" in engine.worker.rows:  # its first chunks are being stored
            engine.scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
    engine.finish()
    engine = start_by_hand(steps=steps)
    assert engine.run("whole", tokens) == 4 * CHUNK
    eventually(lambda: nothing_is_held(depot.status()))


def test_a_worker_that_disagrees_with_its_scheduler_stores_and_loads_nothing(
    depot: Depot, start_by_hand: StartByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, identify, calls = prompt(9, 3 * CHUNK + 9), process.identify, itertools.count()
    start_by_hand().run("stored", tokens)
    before = depot.status()
    assert before["divided_engines"] == 0

    def divided(*arguments: Any) -> Any:
        found = identify(*arguments)
        return found._replace(namespace=f"{found.namespace[:-4]}beef") if next(calls) else found  # the worker's

    monkeypatch.setattr(process, "identify", divided)
    engine = start_by_hand()
    for name in ("found", "again"):
        assert engine.run(name, tokens) == 0
        assert engine.scheduler.reset_prefix_cache()
    after = depot.status()
    assert after["counters"]["hit_chunks"] > before["counters"]["hit_chunks"], "the scheduler finds them"
    for counter in ("stored_chunks", "known_chunks", "retrieved_chunks"):
        assert after["counters"][counter] == before["counters"][counter], counter
    assert after["divided_engines"] == 1


@pytest.mark.parametrize(("runner", "drafter"), [("V1", True), ("V2", False), ("V2", True)])
def test_in_a_real_engine_loads_preemptions_and_failures_change_no_token(
    runner: str, drafter: bool, depot: Depot, start_depot: StartDepot, paths: dict[str, Path],
    start_engine: StartEngine,
) -> None:  # fmt: skip
    speculation = {"method": "eagle", "model": str(paths["drafter"]), "num_speculative_tokens": 2}
    engine = start_engine(
        paths["target"], depot.url, model_runner=runner, dtype="float32", block_size=32, max_num_batched_tokens=BATCH,
        num_gpu_blocks_override=22, max_model_len=640, extra={"kvdepot.save_decode": True},
        speculative_config=speculation if drafter else None,
    ).wait_started()  # fmt: skip
    assert ("Using V2 Model Runner" in engine.logged()) == (runner == "V2")
    tokens = prompt(6, 4 * CHUNK + 9)
    computed = engine.run(tokens)
    from_depot = engine.run_fresh(tokens)
    assert (computed["cached"], from_depot["cached"]) == (0, 4 * CHUNK)
    assert computed["tokens"] == from_depot["tokens"] == engine.run(tokens)["tokens"]

    prompts = [prompt(10 + i, 3 * CHUNK + 5 + i) for i in range(3)]
    run_preempted(engine, prompts, max_tokens=40)
    for number, each in enumerate(prompts):
        loaded = engine.run_fresh(each)
        assert loaded["cached"] == 3 * CHUNK
        assert loaded["tokens"] == engine.run_fresh(each, salt=f"computed {number}")["tokens"]

    engine.tell("reset")
    engine.tell("add", request=engine.request(tokens))  # the lookup finds it ...
    depot.process.kill()
    depot.process.wait(HANG_S)
    (again,) = engine.tell("finish").values()  # ... and it is gone, or the worker copied it before that was noticed
    assert again["tokens"] == computed["tokens"]
    assert (again["cached"], engine.tell("failed_chunks")) in ((0, 4), (4 * CHUNK, 0))
    again = start_depot(url=depot.url, arena_mib=64, chunk_size=CHUNK)
    eventually(lambda: again.status()["instances"] == 1)
    engine.tell("meet")
    assert engine.run_fresh(tokens)["cached"] == 0
    loaded = engine.run_fresh(tokens)
    assert loaded["cached"] == 4 * CHUNK and output(loaded) == output(engine.run(tokens))
    engine.stop()
    eventually(lambda: nothing_is_held(again.status()))


@in_turn
def test_preempted_requests_store_no_wrong_byte_and_end_once(
    steps: int, depot: Depot, start_by_hand: StartByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine, stores take longer than a step that preempts waits for them, and are void then.
    monkeypatch.setattr("kvdepot.integrations.vllm.worker._PREEMPTION_S", HANG_S)
    engine = start_by_hand(steps=steps, blocks=24, **{"kvdepot.save_decode": True})
    prompts = {f"r{i}": prompt(10 + i, 3 * CHUNK + 5 + i) for i in range(3)}
    made = [engine.add(name, tokens, says=130) for name, tokens in prompts.items()]
    engine.finish()
    assert sum(request.num_preemptions for request in made) > 0
    for request in made:
        check(request)
    engine = start_by_hand(steps=steps)
    for name, tokens in prompts.items():
        assert engine.run(name, tokens) == 3 * CHUNK
    eventually(lambda: nothing_is_held(depot.status()))
