"""Real vLLM engines on a model with states beside full attention: what comes from the depot equals the engine's own
prefix-cache hit.

Blocks, and so chunks, have 640 tokens: vLLM makes a page of attention as large as a state. Steps have at most 1,024
tokens, so each ends at the end of a block, where vLLM keeps the state.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tests.conftest import HANG_S, Depot, StartDepot, eventually, suspend
from tests.vllm.conftest import StartEngine
from tests.vllm.engines import nothing_is_held, output, prompt, run_preempted, same_as_own, spoil_a_part

CHUNK = 640
STATES: dict[str, Any] = {"enable_prefix_caching": True, "num_gpu_blocks_override": 64}


def test_prompts_come_back_bit_for_bit_in_another_engine(
    vllm_depot: Depot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    one = start_engine(models["states"], vllm_depot.url, **STATES)
    two = start_engine(models["states"], vllm_depot.url, **STATES)
    one.wait_started(), two.wait_started()
    short = prompt(600, 500)
    assert output(one.run(short)) == output(two.run(short))
    for chunks in (1, 2, 5):
        tokens = prompt(600 + chunks, chunks * CHUNK + 17)
        cold = one.run_fresh(tokens)
        assert cold["cached"] == 0
        same_as_own(two, tokens, chunks * CHUNK)
        assert two.run_fresh(tokens)["tokens"] == cold["tokens"]
    # A prompt that goes on behind another's end, whose beginning the engine has itself.
    longer = [*tokens, *prompt(610, 700)]
    two.run_fresh(tokens[: 2 * CHUNK + 30])
    assert two.run(longer)["cached"] == 5 * CHUNK
    same_as_own(one, longer[: 6 * CHUNK + 5], 6 * CHUNK)
    # One of whole chunks: the last one is computed.
    exact = tokens[: 3 * CHUNK]
    one.run_fresh(exact)
    assert two.run_fresh(exact)["cached"] == 2 * CHUNK
    one.stop(), two.stop()
    eventually(lambda: nothing_is_held(vllm_depot.status()))


def test_states_are_stored_at_the_ends_of_prompts_and_every_so_many_chunks(
    start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    depot = start_depot(arena_mib=64)
    engine = start_engine(
        models["states"],
        depot.url,
        extra={"kvdepot.boundary_chunks": 2},
        prefix_cache_retention_interval=None,
        **STATES,
    ).wait_started()
    tokens = prompt(620, 5 * CHUNK + 17)
    engine.run(tokens)
    (model,) = depot.status()["namespaces"]
    assert [group["chunks"] for group in model["groups"]] == [5, 3, 3, 3]
    assert [group["reach"] for group in model["groups"]] == [0, 1, 1, 1]
    same_as_own(engine, [*tokens[: 4 * CHUNK], 5, 6, 7], 4 * CHUNK)
    assert engine.run_fresh([*tokens[: 3 * CHUNK], 5, 6, 7])["cached"] == 2 * CHUNK
    engine.stop()


def test_states_are_not_used_again_before_they_are_stored(
    start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    """The server stands still while the engine goes on, in so little space that it soon uses every free block."""
    depot = start_depot(arena_mib=64)
    engine = start_engine(
        models["states"], depot.url, extra={"kvdepot.boundary_chunks": 1}, prefix_cache_retention_interval=None,
        **STATES | {"num_gpu_blocks_override": 20},
    ).wait_started()  # fmt: skip
    tokens = prompt(650, 6 * CHUNK - 100)
    engine.tell("add", request=engine.request(tokens))
    suspend(depot.process.pid)
    for _ in range(8):
        engine.tell("step")
    os.kill(depot.process.pid, signal.SIGCONT)
    engine.tell("finish")
    for chunks in range(1, 6):  # whichever of them could be stored
        parted = [*tokens[: chunks * CHUNK], 5, 6, 7]
        assert engine.run_fresh(parted)["tokens"] == engine.run_fresh(parted, salt=f"computed {chunks}")["tokens"]
    same_as_own(engine, tokens, 5 * CHUNK)
    engine.stop()


def test_preemption_leaves_no_wrong_state(
    start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    depot = start_depot(arena_mib=256)
    options = STATES | {"num_gpu_blocks_override": 24, "max_model_len": 2560}
    engine = start_engine(models["states"], depot.url, extra={"kvdepot.save_decode": True}, **options).wait_started()
    prompts = [prompt(630 + i, CHUNK + 500 + i) for i in range(4)]
    run_preempted(engine, prompts, max_tokens=900)
    for tokens in prompts:
        from_depot = engine.run_fresh(tokens)
        own = engine.run(tokens)
        assert from_depot["cached"] == own["cached"] == CHUNK
        assert output(from_depot) == output(own)
        assert from_depot["tokens"] == engine.run_fresh(tokens, salt="computed")["tokens"]
    engine.stop()
    eventually(lambda: nothing_is_held(depot.status()))


def test_a_load_that_fails_is_computed_as_if_nothing_had_been_promised(
    start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    depot = start_depot("--verify", "always", arena_mib=64)
    engine = start_engine(models["states"], depot.url, **STATES).wait_started()
    tokens = prompt(640, 3 * CHUNK + 11)
    cold = engine.run(tokens)
    spoil_a_part(depot)
    recomputed = engine.run_fresh(tokens)
    assert depot.status()["counters"]["corrupt_chunks"] == 1
    assert engine.tell("failed_chunks") == 1
    assert output(recomputed) == output(cold)
    same_as_own(engine, tokens, 3 * CHUNK)  # what was recomputed was stored again
    engine.tell("reset")
    engine.tell("add", request=engine.request(tokens))  # the lookup says three chunks ...
    instances = depot.status()["instances"]
    depot.process.kill()
    depot.process.wait(HANG_S)
    (recomputed,) = engine.tell("finish").values()  # ... and then they are gone
    assert engine.tell("failed_chunks") == 1 + 3 + 3
    assert output(recomputed) == output(cold)
    again = start_depot(url=depot.url, arena_mib=64)  # another arena
    eventually(lambda: again.status()["instances"] == instances)
    engine.tell("meet")
    assert output(engine.run_fresh(tokens)) == output(cold)
    same_as_own(engine, tokens, 3 * CHUNK)
    again.process.kill()
    again.process.wait(HANG_S)
    assert output(engine.run_fresh(tokens)) == output(cold)  # without a server at all
    engine.stop()


def test_without_vllms_prefix_cache_the_engine_is_refused_with_what_to_do(
    vllm_depot: Depot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    said = start_engine(models["states"], vllm_depot.url, enable_prefix_caching=False).start_error()
    assert "kvdepot cannot serve KV cache group" in said and "--enable-prefix-caching" in said
