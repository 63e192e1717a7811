"""Minimal engines with real tensors: on the adapters of the contract, and on the native clients below them."""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvdepot.adapters import (
    LMCacheMPSchedulerAdapter,
    LMCacheMPWorkerAdapter,
    LoadStoreOp,
    MessageQueueClient,
    RequestType,
)
from kvdepot.client.scheduler import Cached, Pending, SchedulerClient
from kvdepot.client.socket import Client
from kvdepot.client.transfer import Origin, ShardSpec, Transfer
from kvdepot.client.worker import WorkerClient
from kvdepot.devices import describe, open_blocks
from kvdepot.errors import KVDepotError
from kvdepot.keys import ChunkChain
from kvdepot.protocol.layout import build_layout
from tests.conftest import HANG_S, Depot, eventually

CHUNK = 256
BLOCK = 64
PER_CHUNK = CHUNK // BLOCK
_seeds = itertools.count(1)


def make_caches(blocks: int = 32, width: int = 4, block: int = BLOCK) -> dict[str, torch.Tensor]:
    """Two layers of random bytes, one with the K/V axis in front of the block axis."""
    random = torch.Generator().manual_seed(next(_seeds))
    return {
        "layer.0": torch.randint(0, 256, (2, blocks, block, width), dtype=torch.uint8, generator=random),
        "layer.1": torch.randint(0, 256, (blocks, block, 2 * width), dtype=torch.uint8, generator=random),
    }


def read_blocks(caches: dict[str, torch.Tensor], ids: Sequence[int]) -> list[bytes]:
    """The bytes of blocks of `make_caches`."""
    return [caches["layer.0"][:, i].numpy().tobytes() + caches["layer.1"][i].numpy().tobytes() for i in ids]


class Later:
    """An event that happens when the test says so, or fails with `error`; `asked` is set by its first query."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.there = False
        self.queries = 0
        self.asked = threading.Event()

    def query(self) -> bool:
        self.queries += 1
        self.asked.set()
        if self.error is not None and self.queries > 2:
            raise self.error
        return self.there


class Engine:
    """A scheduler, one worker per rank, and their tensors: by default one layer of `block_bytes` a block."""

    def __init__(
        self,
        depot: Depot,
        block_bytes: int = 256,
        blocks: int = 16,
        model: str = "",
        *,
        ranks: Sequence[int] = (0,),
        caches: list[dict[str, torch.Tensor]] | None = None,
        block_size: int = BLOCK,
        key: str = "",
    ) -> None:
        """ranks: which shard each worker holds. key: file of the clients' key."""
        self.model = model or f"model-{uuid.uuid4().hex[:8]}"

        def shape(rank: int) -> tuple[Any, ...]:
            return depot.url, depot.context, self.model, max(ranks) + 1, rank, block_size

        def client() -> MessageQueueClient:
            return MessageQueueClient(depot.url, depot.context, key=key)

        self.scheduler = LMCacheMPSchedulerAdapter(*shape(0), client=client())
        self.workers = [LMCacheMPWorkerAdapter(*shape(rank), client=client()) for rank in ranks]
        size = (blocks, BLOCK, block_bytes // BLOCK)
        self.caches = caches or [{"layer": torch.randint(0, 256, size, dtype=torch.uint8)} for _ in ranks]
        for worker, tensors in zip(self.workers, self.caches, strict=True):
            worker.register_kv_caches(tensors)

    @property
    def worker(self) -> LMCacheMPWorkerAdapter:
        return self.workers[0]

    @property
    def cache(self) -> torch.Tensor:
        return self.caches[0]["layer"]

    def wait_connected(self) -> None:
        """Wait until all adapters are connected to the current server."""

        def answers(client: MessageQueueClient) -> bool:
            try:
                return bool(client.submit_request(RequestType.NOOP, []).result(5.0) == "ok")
            except KVDepotError:
                return False

        for adapter in (self.scheduler, *self.workers):
            eventually(lambda adapter=adapter: answers(adapter.mq_client))

    def store(self, what: list[int] | LoadStoreOp, blocks: Sequence[int] = (), rank: int = 0) -> None:
        """Store tokens, or an operation, and wait until that has ended."""
        request_id, worker = uuid.uuid4().hex, self.workers[rank]
        op = what if isinstance(what, LoadStoreOp) else LoadStoreOp(list(blocks), token_ids=what)
        worker.submit_store_request(request_id, op, None)
        eventually(lambda: request_id in (worker.get_finished({request_id})[0] or ()))

    def retrieve(
        self, what: list[int] | LoadStoreOp, blocks: Sequence[int] = (), rank: int = 0, request_id: str = ""
    ) -> set[int]:
        """Retrieve, and wait until that has ended. Returns the ids of blocks that failed."""
        request_id, worker = request_id or uuid.uuid4().hex, self.workers[rank]
        op = what if isinstance(what, LoadStoreOp) else LoadStoreOp(list(blocks), token_ids=what)
        worker.submit_retrieve_request(request_id, op, None)
        eventually(lambda: request_id in (worker.get_finished(set())[1] or ()))
        return worker.get_block_ids_with_load_errors()

    def lookup(self, tokens: list[int] | None = None, request_id: str = "", **what: Any) -> int:
        """Tokens that a lookup of `tokens`, or of `block_hashes=...`, finds."""
        request_id = request_id or uuid.uuid4().hex
        if tokens is not None:
            what["token_ids"] = tokens
        self.scheduler.maybe_submit_lookup_request(request_id, **what)
        eventually(lambda: self.scheduler.wait_lookup_result(request_id, 1.0) is not None)
        found = self.scheduler.check_lookup_result(request_id)
        assert found is not None
        return found

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()


class NativeEngine:
    """A scheduler's and a worker's client with one tensor `[blocks, ...]` for each KV cache group of `spec`."""

    def __init__(self, depot: Depot, spec: ShardSpec, caches: list[torch.Tensor], topic: str = "") -> None:
        self.scheduler = SchedulerClient(Client(depot.url, depot.context), spec)
        self.worker = WorkerClient(Client(depot.url, depot.context), spec, unpins=False, origin=Origin(topic))
        self.scheduler.client.learn_chunk_size(HANG_S)
        self.caches = caches
        layouts = [build_layout([describe(cache, f"layer.{group}")], [0]) for group, cache in enumerate(caches)]
        try:
            self.worker.register(
                layouts, [open_blocks(layout, [cache]) for layout, cache in zip(layouts, caches, strict=True)]
            )
        except KVDepotError:
            self.close()
            raise

    def store(self, parts: list[Transfer]) -> None:
        request_id = parts[0].request_id
        self.worker.submit_store([request_id], parts, None)
        eventually(lambda: request_id in self.worker.poll({request_id}).stored)

    def retrieve(self, parts: list[Transfer]) -> set[str]:
        """Returns the ids of requests of which a part failed."""
        request_id = parts[0].request_id
        self.worker.submit_retrieve([request_id], parts, None)
        eventually(lambda: request_id in self.worker.poll(set()).retrieved)
        return self.worker.take_failed_requests()

    def found(self, chain: ChunkChain) -> int | None:
        """Tokens that a lookup finds; None if it was not answered."""
        request_id = uuid.uuid4().hex
        self.scheduler.submit_lookup(request_id, bytes(chain.hashes), 1)
        eventually(lambda: not isinstance(self.scheduler.check_lookup(request_id), Pending))
        outcome = self.scheduler.check_lookup(request_id)
        self.scheduler.end_session(request_id)
        return outcome.tokens if isinstance(outcome, Cached) else None

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()


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


MakeEngine = Callable[..., Engine]
