"""An upgrade of vLLM keeps its cache: what an engine of this release stored is loaded by a newer one.

KVDEPOT_NEWER_VLLM names the newer one's Python (`make test-versions` does).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import StartDepot
from tests.vllm.conftest import StartEngine
from tests.vllm.engines import prompt, same_as_own

NEWER = os.environ.get("KVDEPOT_NEWER_VLLM", "")

pytestmark = pytest.mark.skipif(not NEWER, reason="needs two releases: make test-versions has them, and runs this")


@pytest.mark.parametrize("kind", ["gqa", "mla", "windows"])
def test_a_newer_release_loads_chunks_that_equal_what_it_computes(
    kind: str, start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    depot = start_depot(arena_mib=64)
    older = start_engine(models[kind], depot.url)
    newer = start_engine(models[kind], depot.url, python=NEWER)
    older.wait_started(), newer.wait_started()
    tokens = prompt(900, 4 * 256 + 17)
    before = older.run(tokens)
    assert older.run_fresh(tokens)["cached"] == 4 * 256
    older.stop()
    same_as_own(newer, tokens, 4 * 256)
    assert newer.run_fresh(tokens)["tokens"] == before["tokens"]
    assert len(depot.status()["namespaces"]) == 1
    newer.stop()


def test_states_are_not_shared_with_a_newer_release(
    start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    depot = start_depot(arena_mib=64)
    engines = [
        start_engine(models["states"], depot.url, enable_prefix_caching=True, num_gpu_blocks_override=64, **where)
        for where in ({}, {"python": NEWER})
    ]
    tokens = prompt(901, 1500)
    for engine in engines:
        engine.wait_started()
        assert engine.run(tokens)["cached"] == 0
        engine.stop()
    assert len(depot.status()["namespaces"]) == 2
