"""Engines whose blocks do not divide the server's chunk size: each uses whole blocks, and one server serves all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Depot, StartDepot
from tests.vllm.conftest import StartEngine
from tests.vllm.engines import output, prompt


@pytest.mark.parametrize(("block", "chunk"), [(96, 288), (544, 544)])
def test_a_chunk_is_the_smallest_number_of_whole_blocks_that_reaches_the_servers_size(
    block: int, chunk: int, vllm_depot: Depot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    tokens = prompt(block, 2 * chunk + 17)
    first = start_engine(models["gqa"], vllm_depot.url, block_size=block).wait_started()
    assert first.run(tokens)["cached"] == 0
    first.stop()
    second = start_engine(models["gqa"], vllm_depot.url, block_size=block).wait_started()
    other = start_engine(models["gqa"], vllm_depot.url).wait_started()
    assert other.run(tokens)["cached"] == 0, "chunks of another length are another engine's"
    from_depot, own = second.run(tokens), second.run(tokens)
    assert from_depot["cached"] == own["cached"] == 2 * chunk
    assert output(from_depot) == output(own)
    assert other.run_fresh(tokens)["cached"] == (2 * chunk + 17) // 256 * 256
    sizes = {namespace["chunk_tokens"] for namespace in vllm_depot.status()["namespaces"]}
    assert {256, chunk} <= sizes
    second.stop(), other.stop()


def test_an_odd_chunk_size_of_the_server_is_rounded_up_to_blocks(
    start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    depot = start_depot(arena_mib=64, chunk_size=100)
    tokens = prompt(7, 3 * 128 + 5)
    first = start_engine(models["gqa"], depot.url).wait_started()
    first.run(tokens)
    first.stop()
    second = start_engine(models["gqa"], depot.url).wait_started()
    assert second.run(tokens)["cached"] == 3 * 128
    second.stop()
    (namespace,) = depot.status()["namespaces"]
    assert namespace["chunk_tokens"] == 128
    assert depot.status()["tokens"]["asked"] == 2 * len(tokens), "what the engine lacks, as vLLM counts it"
