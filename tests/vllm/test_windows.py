"""Real vLLM engines on models with sliding windows: what comes from the depot equals the engine's own prefix-cache hit.

Prompts end just past a chunk, as in test_engine.py. Steps have at most 1,024 tokens, so longer prompts are computed in
several, and vLLM takes blocks that have left a window from its request between them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import HANG_S, Depot, StartDepot, eventually
from tests.vllm import engines
from tests.vllm.conftest import StartEngine
from tests.vllm.engines import nothing_is_held, output, prompt, run_preempted, same_as_own, spoil_a_part
from tests.vllm.test_beside import beside

FLOAT32: dict[str, Any] = {"dtype": "float32"}
"""So that a batch of another shape gives the same tokens."""
CHUNKS = (1, 2, 3, 8)
"""Of prompts that are shorter than the window of two chunks, as long as it, and longer."""


@pytest.mark.parametrize("kind", ["windows", "mistral"])
def test_prompts_of_any_length_come_back_bit_for_bit_in_another_engine(
    kind: str, vllm_depot: Depot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    one = start_engine(models[kind], vllm_depot.url, **FLOAT32)
    two = start_engine(models[kind], vllm_depot.url, **FLOAT32)
    one.wait_started(), two.wait_started()
    prompts = {chunks: prompt(300 + chunks, chunks * 256 + 17) for chunks in CHUNKS}
    cold = {chunks: one.run_fresh(tokens) for chunks, tokens in prompts.items()}
    assert [result["cached"] for result in cold.values()] == [0] * len(CHUNKS)
    for chunks, tokens in prompts.items():
        same_as_own(two, tokens, chunks * 256)
        assert two.run(tokens)["tokens"] == cold[chunks]["tokens"]
    # A prompt of whole chunks: the last one is computed, and so is the last token of the same prompt.
    exact = prompts[8][:1024]
    one.run_fresh(exact)
    assert two.run_fresh(exact)["cached"] == 768
    same_as_own(two, [*exact, 5, 6, 7], 1024)
    # A prompt that goes on where another one ended, with a part of it in the engine's own cache.
    longer = [*prompts[3], *prompt(400, 700)]
    two.run_fresh(prompts[3][:400])
    assert two.run(longer)["cached"] == 768
    same_as_own(one, longer[: 5 * 256 + 9], 5 * 256, exact=False)
    one.stop(), two.stop()
    eventually(lambda: nothing_is_held(vllm_depot.status()))


@pytest.mark.parametrize(("window", "block"), [(100, 32), (640, 128)])
def test_windows_that_are_no_whole_chunks_come_back_bit_for_bit(
    window: int, block: int, vllm_depot: Depot, start_engine: StartEngine, tmp_path: Path
) -> None:
    model = engines.write_model(tmp_path / "windows", engines.WINDOWS | {"sliding_window": window})
    engine = start_engine(model, vllm_depot.url, block_size=block, **FLOAT32).wait_started()
    for chunks in CHUNKS:
        tokens = prompt(500 + chunks, chunks * 256 + 17)
        engine.run(tokens)
        same_as_own(engine, tokens, chunks * 256)
    # Its own cache ends within a chunk.
    tokens = prompt(508, 8 * 256 + 17)
    engine.run_fresh(tokens[: 7 * 256 + block + 3])
    from_both = engine.run(tokens)
    assert from_both["cached"] == 8 * 256 and output(from_both) == output(engine.run(tokens))
    engine.stop()


def test_windows_that_vllm_keeps_whole_are_one_group(
    vllm_depot: Depot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    engine = start_engine(
        models["windows"], vllm_depot.url, disable_hybrid_kv_cache_manager=True, **FLOAT32
    ).wait_started()
    tokens = prompt(310, 6 * 256 + 17)
    engine.run(tokens)
    same_as_own(engine, tokens, 6 * 256)
    same_as_own(engine, [*tokens[: 3 * 256], 5, 6, 7], 3 * 256, exact=False)  # every chunk is a boundary
    assert "KV cache group" not in engine.logged()
    engine.stop()


def test_prompts_that_part_resume_at_boundaries_without_blocks_used_again(
    start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    """Without a prefix cache, the blocks that have just left a window are the first that the next step gets."""
    depot = start_depot(arena_mib=128)
    tokens = prompt(320, 8 * 256 + 17)
    options: dict[str, Any] = {"extra": {"kvdepot.boundary_chunks": 4}, "max_model_len": 2304} | FLOAT32
    storing = start_engine(models["windows"], depot.url, enable_prefix_caching=False, **options)
    engine = start_engine(models["windows"], depot.url, role="kv_consumer", **options)
    storing.wait_started().run(tokens)
    storing.stop()
    engine.wait_started()
    stored = (0, 4, 8)
    for chunks in range(8, 0, -1):
        boundary = max(each for each in stored if each <= chunks)
        parted = [*tokens[: chunks * 256], 5, 6, 7]
        if chunks == boundary:
            same_as_own(engine, parted, chunks * 256, exact=False)
        else:
            assert engine.run_fresh(parted)["cached"] == boundary * 256
    engine.stop()


def test_preemption_leaves_no_wrong_byte_in_a_window(
    start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    depot = start_depot(arena_mib=128)
    engine = start_engine(
        models["windows"], depot.url, extra={"kvdepot.save_decode": True}, num_gpu_blocks_override=76,
        max_model_len=2048, **FLOAT32,
    ).wait_started()  # fmt: skip
    prompts = [prompt(340 + i, 3 * 256 + 17 + i) for i in range(4)]
    run_preempted(engine, prompts, max_tokens=700)
    for tokens in prompts:
        same_as_own(engine, tokens, 768, exact=False)
    tokens = prompt(345, 2 * 256 + 200)
    decoded = engine.run(tokens, max_tokens=400)["tokens"]
    same_as_own(engine, tokens + decoded[:70], 3 * 256, exact=False)  # decoded chunks are boundaries, too
    same_as_own(engine, tokens + decoded[:330], 4 * 256, exact=False)
    engine.stop()
    eventually(lambda: nothing_is_held(depot.status()))


@pytest.mark.parametrize(("kind", "parts"), [("windows", 9), ("mistral", 2)])
def test_a_load_that_fails_is_computed_as_if_nothing_had_been_promised(
    kind: str, parts: int, start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    depot = start_depot("--verify", "always", arena_mib=64)
    engine = start_engine(models[kind], depot.url, **FLOAT32).wait_started()
    tokens = prompt(350, 3 * 256 + 11)
    cold = engine.run(tokens)
    spoil_a_part(depot)  # one part that is not what was stored fails the load as a whole
    recomputed = engine.run_fresh(tokens)
    assert depot.status()["counters"]["corrupt_chunks"] == 1
    assert engine.tell("failed_chunks") == 1
    assert recomputed["tokens"] == cold["tokens"]
    same_as_own(engine, tokens, 768)
    engine.tell("reset")
    engine.tell("add", request=engine.request(tokens))  # the lookup says 768 tokens ...
    instances = depot.status()["instances"]
    depot.process.kill()
    depot.process.wait(HANG_S)
    (recomputed,) = engine.tell("finish").values()  # ... and then they are gone
    assert engine.tell("failed_chunks") == 1 + parts
    assert output(recomputed) == output(cold)
    again = start_depot(url=depot.url, arena_mib=64)  # another arena
    eventually(lambda: again.status()["instances"] == instances)
    engine.tell("meet")
    assert output(engine.run_fresh(tokens)) == output(cold)
    same_as_own(engine, tokens, 768)  # what was computed anew was stored
    again.process.kill()
    again.process.wait(HANG_S)
    assert engine.run_fresh(tokens)["tokens"] == cold["tokens"]  # without a server at all
    engine.stop()


def test_below_multiconnector_a_failed_load_is_recomputed_too(
    start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    depot = start_depot(arena_mib=64)
    transfer = beside(depot.url, kv_load_failure_policy="recompute")
    engine = start_engine(models["windows"], depot.url, kv_transfer_config=transfer, **FLOAT32).wait_started()
    tokens = prompt(355, 3 * 256 + 11)
    cold = engine.run(tokens)
    same_as_own(engine, tokens, 768)
    engine.tell("reset")
    engine.tell("add", request=engine.request(tokens))
    instances = depot.status()["instances"]
    depot.process.kill()
    depot.process.wait(HANG_S)
    (recomputed,) = engine.tell("finish").values()
    assert engine.tell("metrics")["vllm:kvdepot_retrieve_failed_shards"] == 9
    assert output(recomputed) == output(cold)
    again = start_depot(url=depot.url, arena_mib=64)
    eventually(lambda: again.status()["instances"] == instances)
    engine.tell("meet")
    assert output(engine.run_fresh(tokens)) == output(cold)
    same_as_own(engine, tokens, 768)
    engine.stop()


def test_parts_in_the_middle_are_evicted_first_and_the_whole_prompt_still_hits(
    start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    depot = start_depot(arena_mib=12)
    engine = start_engine(models["windows"], depot.url, extra={"kvdepot.boundary_chunks": 1}, **FLOAT32).wait_started()
    tokens, other = prompt(370, 8 * 256 + 17), prompt(371, 3 * 256 + 17)
    cold = engine.run(tokens)  # 32 parts of 256 KiB
    assert depot.status()["counters"].get("dropped_chunks", 0) == 0
    warm = engine.run_fresh(tokens)
    assert warm["cached"] == 8 * 256
    engine.run_fresh(other)
    engine.run_fresh(prompt(372, 3 * 256 + 17))
    assert depot.status()["evicted_chunks"] > 0
    again = engine.run_fresh(tokens)
    assert again["cached"] == 8 * 256 and output(again) == output(warm)
    parted = [*tokens[: 4 * 256], 5, 6, 7]
    assert engine.run_fresh(parted)["cached"] < 4 * 256
    assert engine.run_fresh(tokens)["tokens"] == cold["tokens"]
    engine.stop()
