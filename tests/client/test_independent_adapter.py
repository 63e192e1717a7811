"""An adapter that someone else wrote for the contract runs on our client and server."""

from __future__ import annotations

import ast
import itertools
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvdepot.adapters import LMCacheMPSchedulerAdapter, LMCacheMPWorkerAdapter, LoadStoreOp
from tests.client import independent_adapter
from tests.client.engine import make_caches, read_blocks
from tests.client.independent_adapter import Lookups, Transfers
from tests.conftest import HANG_S, Depot, eventually

CHUNK = 256
BLOCK = 128
PER_CHUNK = CHUNK // BLOCK
BLOCKS = 24
_tokens = itertools.count(1)


class Engine:
    def __init__(self, depot: Depot, model: str = "", world_size: int = 1) -> None:
        self.model = model or f"independent-{uuid.uuid4().hex[:8]}"
        self.lookups = Lookups(depot.url, depot.context, self.model, world_size, BLOCK)
        self.workers = [
            Transfers(depot.url, depot.context, self.model, world_size, rank, BLOCK) for rank in range(world_size)
        ]
        self.caches = [make_caches(BLOCKS, 3, BLOCK) for _ in range(world_size)]
        for worker, caches in zip(self.workers, self.caches, strict=True):
            worker.register(caches)

    def finish(self, rank: int = 0) -> dict[str, Any]:
        """Poll until nothing is under way. Returns the answers by name."""
        worker, answers = self.workers[rank], {}
        eventually(lambda: answers.update(worker.poll()) or not worker.under_way)
        return answers

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.lookups.close()


@pytest.fixture
def engine(depot: Depot) -> Iterator[Engine]:
    made = Engine(depot)
    yield made
    made.close()


def name_chunks(engine: Engine, mode: str, chunks: int, rank: int = 0) -> list[Any]:
    names = engine.workers[rank].names
    if mode == "tokens":
        first = next(_tokens) * 1_000_000
        return names.of_tokens(f"r{first}", range(first, first + chunks * CHUNK + 9))
    return names.of_hashes("r", [os.urandom(16) for _ in range(chunks * PER_CHUNK + 1)])


def test_it_imports_nothing_of_ours_but_the_adapters() -> None:
    tree = ast.parse(Path(independent_adapter.__file__).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {module for module in modules if module and module.startswith("kvdepot")} == {"kvdepot.adapters"}


@pytest.mark.parametrize("mode", ["tokens", "hashes"])
def test_it_stores_looks_up_and_retrieves(engine: Engine, mode: str) -> None:
    worker, caches = engine.workers[0], engine.caches[0]
    keys = name_chunks(engine, mode, 3)
    source, targets = [4, 1, 0, 3, 7, 6], [20, 10, 11, 15, 14, 23]
    assert engine.lookups.hit_tokens(keys) == 0
    worker.store("s", keys, source)
    assert engine.finish() == {"s": True}
    assert engine.lookups.hit_tokens(keys) == 3 * CHUNK
    others = sorted(set(range(BLOCKS)) - set(targets))
    stored, neighbours = read_blocks(caches, source), read_blocks(caches, others)
    worker.retrieve("r", keys, targets)
    assert engine.finish() == {"r": [True] * len(keys)}
    assert read_blocks(caches, targets) == stored
    assert read_blocks(caches, others) == neighbours


def test_layers_without_names_may_be_registered_one_by_one(depot: Depot) -> None:
    engine = Engine(depot)
    worker, tensors = engine.workers[0], [torch.randn(BLOCKS, BLOCK, 2), torch.randn(BLOCKS, BLOCK, 5)]
    worker.register_unnamed(tensors)
    keys = name_chunks(engine, "tokens", 1)
    worker.store("s", keys, [0, 1])
    assert engine.finish() == {"s": True}
    worker.retrieve("r", keys, [6, 5])
    assert engine.finish() == {"r": [True]}
    for tensor in tensors:
        assert torch.equal(tensor[6], tensor[0])
        assert torch.equal(tensor[5], tensor[1])
    engine.close()


@pytest.mark.parametrize("direction", ["its chunks to our adapters", "our adapters' chunks to it"])
def test_it_shares_chunks_with_our_adapters_of_the_same_model(depot: Depot, engine: Engine, direction: str) -> None:
    shape = (depot.url, depot.context, engine.model, 1, 0, BLOCK)
    scheduler, ours = LMCacheMPSchedulerAdapter(*shape), LMCacheMPWorkerAdapter(*shape)
    caches = make_caches(BLOCKS, 3, BLOCK)
    ours.register_kv_caches(caches)
    worker = engine.workers[0]
    first = next(_tokens) * 1_000_000
    tokens = list(range(first, first + CHUNK))
    keys = worker.names.of_tokens("r", tokens)
    if direction.startswith("its"):
        worker.store("s", keys, [0, 1])
        assert engine.finish() == {"s": True}
        scheduler.maybe_submit_lookup_request("r", token_ids=tokens)
        assert scheduler.wait_lookup_result("r", HANG_S) == CHUNK
        ours.submit_retrieve_request("r", LoadStoreOp([5, 4], token_ids=tokens), None)
        eventually(lambda: ours.get_finished(set())[1])
        assert ours.get_block_ids_with_load_errors() == set()
        assert read_blocks(caches, [5, 4]) == read_blocks(engine.caches[0], [0, 1])
    else:
        ours.submit_store_request("r", LoadStoreOp([0, 1], token_ids=tokens), None)
        eventually(lambda: ours.get_finished({"r"})[0])
        assert engine.lookups.hit_tokens(keys) == CHUNK
        worker.retrieve("r", keys, [5, 4])
        assert engine.finish() == {"r": [True]}
        assert read_blocks(engine.caches[0], [5, 4]) == read_blocks(caches, [0, 1])
    ours.shutdown()
    scheduler.shutdown()
