"""Real vLLM engines on models with sliding windows; test_oracle.py and test_engine.py have what is common.

Prompts end just past a chunk, as in test_engine.py. Steps have at most 1,024 tokens, so longer prompts are computed in
several, and vLLM takes blocks that have left a window from its request between them.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Depot, StartDepot, suspend
from tests.vllm import engines
from tests.vllm.conftest import StartEngine
from tests.vllm.engines import output, prompt, same_as_own

STATES: dict[str, Any] = {"enable_prefix_caching": True, "num_gpu_blocks_override": 64}
STATE_CHUNK = 640

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


def test_states_are_not_used_again_before_they_are_stored(
    start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    """The server stands still while the engine goes on, in so little space that it soon uses every free block."""
    depot = start_depot(arena_mib=64)
    engine = start_engine(
        models["states"], depot.url, extra={"kvdepot.boundary_chunks": 1}, prefix_cache_retention_interval=None,
        **STATES | {"num_gpu_blocks_override": 20},
    ).wait_started()  # fmt: skip
    tokens = prompt(650, 6 * STATE_CHUNK - 100)
    engine.tell("add", request=engine.request(tokens))
    suspend(depot.process.pid)
    for _ in range(8):
        engine.tell("step")
    os.kill(depot.process.pid, signal.SIGCONT)
    engine.tell("finish")
    for chunks in range(1, 6):  # whichever of them could be stored
        parted = [*tokens[: chunks * STATE_CHUNK], 5, 6, 7]
        assert engine.run_fresh(parted)["tokens"] == engine.run_fresh(parted, salt=f"computed {chunks}")["tokens"]
    same_as_own(engine, tokens, 5 * STATE_CHUNK)
    engine.stop()
