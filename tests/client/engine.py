"""A minimal engine: a scheduler and a worker on the adapters, with real tensors."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvdepot.adapters import (
    LMCacheMPSchedulerAdapter,
    LMCacheMPWorkerAdapter,
    LoadStoreOp,
    MessageQueueClient,
    RequestType,
)
from kvdepot.errors import KVDepotError
from tests.conftest import Depot, eventually

CHUNK = 256
BLOCK = 64
PER_CHUNK = CHUNK // BLOCK


class Engine:
    """A scheduler and a worker with tensors of `block_bytes` a block."""

    def __init__(self, depot: Depot, block_bytes: int = 256, blocks: int = 16, model: str = "") -> None:
        self.model = model or f"model-{uuid.uuid4().hex[:8]}"
        shape = (depot.url, depot.context, self.model, 1, 0, BLOCK)
        self.scheduler, self.worker = LMCacheMPSchedulerAdapter(*shape), LMCacheMPWorkerAdapter(*shape)
        self.cache = torch.randint(0, 256, (blocks, BLOCK, block_bytes // BLOCK), dtype=torch.uint8)
        self.worker.register_kv_caches({"layer": self.cache})

    def wait_connected(self) -> None:
        """Wait until both adapters are connected to the current server."""

        def answers(client: MessageQueueClient) -> bool:
            try:
                return bool(client.submit_request(RequestType.NOOP, []).result(5.0) == "ok")
            except KVDepotError:
                return False

        for adapter in (self.scheduler, self.worker):
            eventually(lambda adapter=adapter: answers(adapter.mq_client))

    def store(self, tokens: list[int], blocks: list[int]) -> None:
        request_id = uuid.uuid4().hex
        self.worker.submit_store_request(request_id, LoadStoreOp(blocks, token_ids=tokens), None)
        eventually(lambda: self.worker.get_finished({request_id})[0])

    def retrieve(self, tokens: list[int], blocks: list[int]) -> set[int]:
        self.worker.submit_retrieve_request(uuid.uuid4().hex, LoadStoreOp(blocks, token_ids=tokens), None)
        eventually(lambda: self.worker.get_finished(set())[1])
        return self.worker.get_block_ids_with_load_errors()

    def lookup(self, tokens: list[int]) -> int | None:
        request_id = uuid.uuid4().hex
        self.scheduler.maybe_submit_lookup_request(request_id, token_ids=tokens)
        eventually(lambda: self.scheduler.wait_lookup_result(request_id, 1.0) is not None)
        return self.scheduler.check_lookup_result(request_id)

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


@contextmanager
def engine_with_a_chunk(depot: Depot) -> Iterator[Engine]:
    """An engine that has stored one chunk, of tokens 1, and pins nothing."""
    engine = Engine(depot)
    engine.store([1] * CHUNK, [0, 1, 2, 3])
    yield engine
    engine.close()


def works(depot: Depot) -> bool:
    """Whether a server stores bytes and gives them back."""
    engine, tokens = Engine(depot), list(range(CHUNK))
    engine.store(tokens, [0, 1, 2, 3])
    good = engine.lookup(tokens) == CHUNK and engine.retrieve(tokens, [7, 6, 5, 4]) == set()
    good = good and torch.equal(engine.cache[[7, 6, 5, 4]], engine.cache[:4])
    engine.close()
    return good
