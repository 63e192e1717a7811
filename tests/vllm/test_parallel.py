"""Several ranks of one engine on one depot: what ranks share is stored once, and all of them get it.

Tensor parallel only: this vLLM's runner for processors does not get through a pipeline's first step by itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import StartDepot, eventually
from tests.vllm.conftest import StartEngine
from tests.vllm.engines import output, prompt

CHUNKS = 4


@pytest.mark.parametrize(
    ("kind", "shards"), [("mla", 1), ("gqa", 2)], ids=["MLA: the same on both", "GQA: heads of its own each"]
)
def test_two_ranks_store_each_shard_once_and_both_get_it_back(
    kind: str, shards: int, start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    depot = start_depot(arena_mib=64)
    tokens = prompt(81, CHUNKS * 256 + 17)
    engine = start_engine(models[kind], depot.url, tensor_parallel_size=2).wait_started()
    computed = engine.run(tokens, max_tokens=4)
    assert computed["cached"] == 0
    counters = depot.status()["counters"]
    assert counters["stored_chunks"] == CHUNKS * shards
    assert counters.get("known_chunks", 0) == CHUNKS * (2 - shards)
    from_depot = engine.run_fresh(tokens, max_tokens=4)
    assert from_depot["cached"] == CHUNKS * 256
    assert depot.status()["counters"]["retrieved_chunks"] == 2 * CHUNKS, "every rank got it from the depot"
    if kind == "gqa":
        assert output(from_depot) == output(computed)
    # MLA has no chunked prefill here: computed, all tokens are one batch, and round a little otherwise.
    own, loaded = dict(computed["logprobs"][0]), dict(from_depot["logprobs"][0])
    assert len(own.keys() & loaded.keys()) >= 2
    assert all(abs(own[token] - loaded[token]) < 0.1 for token in own.keys() & loaded.keys())
    engine.stop()
    eventually(lambda: depot.status()["holds"] == 0)


def test_parts_of_another_number_of_ranks_are_never_used(
    start_depot: StartDepot, models: dict[str, Path], start_engine: StartEngine
) -> None:
    """A model with windows: each rank has a part of its own of each KV cache group."""
    depot = start_depot(arena_mib=64)
    tokens = prompt(82, CHUNKS * 256 + 17)
    one = start_engine(models["windows"], depot.url, dtype="float32").wait_started()
    computed = one.run(tokens)
    assert one.run_fresh(tokens)["cached"] == CHUNKS * 256
    two = start_engine(models["windows"], depot.url, dtype="float32", tensor_parallel_size=2).wait_started()
    first = two.run(tokens)
    assert first["cached"] == 0
    from_depot = two.run_fresh(tokens)
    assert from_depot["cached"] == CHUNKS * 256
    own = two.run(tokens)
    assert output(from_depot) == output(own)
    assert computed["tokens"] == first["tokens"] == own["tokens"]
    assert {model["world_size"] for model in depot.status()["namespaces"]} == {1, 2}
    one.stop(), two.stop()
    eventually(lambda: depot.status()["holds"] == 0)
