"""Real vLLM engines on models with sliding windows or states; test_oracle.py and test_engine.py have what is common.

Prompts end just past a chunk, as in test_engine.py. Steps have at most 1,024 tokens, so longer prompts are computed in
several, and vLLM takes blocks that have left a window from its request between them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Depot, StartDepot
from tests.vllm import engines
from tests.vllm.conftest import StartEngine
from tests.vllm.engines import output, prompt, same_as_own

FLOAT32: dict[str, Any] = {"dtype": "float32"}
"""So that a batch of another shape gives the same tokens."""
CHUNKS = (1, 2, 3, 8)
"""Of prompts that are shorter than the window of two chunks, as long as it, and longer."""


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


# -- states: blocks, and so chunks, have 640 tokens, as vLLM makes a page of attention as large as a state

STATE_CHUNK = 640
STATES: dict[str, Any] = {"enable_prefix_caching": True, "num_gpu_blocks_override": 64}


def test_states_are_stored_at_the_ends_of_prompts_and_every_so_many_chunks(
    start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    depot = start_depot(arena_mib=64)
    engine = start_engine(
        models["states"], depot.url, extra={"kvdepot.boundary_chunks": 2}, prefix_cache_retention_interval=None,
        **STATES,
    ).wait_started()  # fmt: skip
    tokens = prompt(620, 5 * STATE_CHUNK + 17)
    engine.run(tokens)
    (model,) = depot.status()["namespaces"]
    assert [group["chunks"] for group in model["groups"]] == [6, 4, 4, 4]  # with the tail of its end
    assert [group["reach"] for group in model["groups"]] == [0, 1, 1, 1]
    same_as_own(engine, [*tokens[: 4 * STATE_CHUNK], 5, 6, 7], 4 * STATE_CHUNK)
    assert engine.run_fresh([*tokens[: 3 * STATE_CHUNK], 5, 6, 7])["cached"] == 2 * STATE_CHUNK
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
