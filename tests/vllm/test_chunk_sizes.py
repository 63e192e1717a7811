"""Engines whose blocks do not divide the server's chunk size: each uses whole blocks, and one server serves all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import StartDepot
from tests.vllm.conftest import StartEngine
from tests.vllm.engines import prompt, same_as_own


@pytest.mark.parametrize(("wanted", "block", "chunk"), [(256, 96, 288), (256, 544, 544), (100, 128, 128)])
def test_a_chunk_is_the_fewest_whole_blocks_that_reach_the_servers_size(
    wanted: int, block: int, chunk: int, start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    depot = start_depot(arena_mib=64, chunk_size=wanted)
    tokens = prompt(block, 2 * chunk + 17)
    engine = start_engine(models["gqa"], depot.url, block_size=block).wait_started()
    assert engine.run(tokens)["cached"] == 0
    same_as_own(engine, tokens, 2 * chunk)
    (namespace,) = depot.status()["namespaces"]
    assert namespace["chunk_tokens"] == chunk
    engine.stop()
