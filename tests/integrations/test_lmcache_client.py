"""The contract's client below vLLM's own adapter: failures are answers."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvdepot.adapters import IPCCacheEngineKey, KVCacheHandle, RequestType
from kvdepot.errors import LayoutError
from kvdepot.integrations.lmcache.client import GuardedClient
from tests.conftest import HANG_S, Depot

CHUNK, BLOCK, BLOCKS = 256, 128, 24


class Worker:
    """What an adapter does."""

    def __init__(self, depot: Depot) -> None:
        self.model = f"guarded-{uuid.uuid4().hex[:8]}"
        self.client = GuardedClient(f"{depot.url}:5555", depot.context)
        self.cache = torch.randn(2, BLOCKS, 3, BLOCK, 4)
        self.ask(RequestType.REGISTER_KV_CACHE, 7, [KVCacheHandle(self.cache)])

    def ask(self, kind: RequestType, *payloads: Any) -> Any:
        return self.client.submit_request(kind, list(payloads)).to_cuda_future().result(HANG_S)

    def key(self, tokens: list[int], start: int = 0, end: int = 0) -> IPCCacheEngineKey:
        return IPCCacheEngineKey(self.model, 1, 0, tuple(tokens), start, end or len(tokens), request_id="r")

    def store(self, key: IPCCacheEngineKey, blocks: list[int]) -> Any:
        return self.ask(RequestType.STORE, [key], 7, blocks, b"")

    def retrieve(self, keys: list[IPCCacheEngineKey], blocks: list[int]) -> Any:
        return self.ask(RequestType.RETRIEVE, keys, 7, blocks, b"")

    def hit(self, key: IPCCacheEngineKey) -> Any:
        return self.ask(RequestType.LOOKUP, [key.no_worker_id_version()])


@pytest.fixture
def worker(depot: Depot) -> Iterator[Worker]:
    made = Worker(depot)
    yield made
    made.client.close()


def test_the_port_that_vllm_appends_to_a_unix_socket_is_left_out(depot: Depot) -> None:
    for url in (depot.url, f"{depot.url}:5555", f"{depot.url}:"):
        client = GuardedClient(url, depot.context)
        assert client.server_url == depot.url
        assert client.submit_request(RequestType.GET_CHUNK_SIZE, []).result() == CHUNK
        client.close()


def test_tensors_of_which_the_block_axis_is_unclear_are_refused_with_their_shapes(worker: Worker) -> None:
    with pytest.raises(LayoutError, match=r"\[2, 2, 3, 128, 4\]"):
        worker.ask(RequestType.REGISTER_KV_CACHE, 8, [KVCacheHandle(torch.randn(2, 2, 3, BLOCK, 4))])


def test_leading_blocks_can_be_left_out(worker: Worker) -> None:
    tokens, missing = list(range(CHUNK)), list(range(9, 9 + CHUNK))
    worker.store(worker.key(tokens), [0, 1])
    before = worker.cache.clone()
    worker.client.skip_blocks = [1, 1]
    assert worker.retrieve([worker.key(tokens), worker.key(missing)], [10, 11, 12, 13]) == [True, False]
    assert torch.equal(worker.cache[:, 10], before[:, 10])
    assert torch.equal(worker.cache[:, 11], before[:, 1])
    assert worker.client.take_failed_blocks() == {13}
    assert worker.retrieve([worker.key(tokens)], [10, 11]) == [True]  # the next one leaves out nothing
    assert torch.equal(worker.cache[:, 10], before[:, 0])


def test_a_lookup_of_vllm_0_15_gets_one_answer_per_key(worker: Worker) -> None:
    hashes = [os.urandom(32) for _ in range(3)]
    keys = [IPCCacheEngineKey(worker.model, 1, 0, chunk_hash=each) for each in hashes]
    worker.ask(RequestType.STORE, keys[:2], 7, [0, 1, 2, 3], b"")
    assert worker.ask(RequestType.LOOKUP, keys, True) == [True, True, False]
    assert worker.ask(RequestType.LOOKUP, [], True) == []
    assert worker.retrieve(keys, [10, 11, 12, 13, 14, 15]) == [True, True, False]
    assert worker.client.take_failed_blocks() == {14, 15}


def test_bad_payloads_are_failures_too(worker: Worker) -> None:
    assert worker.retrieve([worker.key(list(range(CHUNK)))], [1, 2, 3]) == [False]
    assert worker.client.take_failed_blocks() == {1, 2, 3}
    assert worker.store(worker.key(list(range(CHUNK))), []) is False


@pytest.mark.faults
def test_without_its_server_everything_is_answered() -> None:
    depot = Depot().wait_ready()
    worker = Worker(depot)
    try:
        key = worker.key(list(range(CHUNK)))
        assert worker.store(key, [0, 1]) is True
        depot.process.kill()
        depot.process.wait()
        assert worker.hit(key) == 0
        assert worker.store(key, [0, 1]) is False
        assert worker.retrieve([key], [10, 11]) == [False]
        assert worker.client.take_failed_blocks() == {10, 11}
        assert worker.ask(RequestType.END_SESSION, "r") is None
        assert worker.ask(RequestType.UNREGISTER_KV_CACHE, 7) is None
    finally:
        worker.client.close()
        depot.close()
    assert worker.ask(RequestType.UNREGISTER_KV_CACHE, 7) is None


def test_a_store_that_takes_too_long_never_becomes_visible() -> None:
    depot = Depot().wait_ready()
    worker = Worker(depot)
    try:
        late, later = worker.key(list(range(CHUNK))), worker.key(list(range(1, CHUNK + 1)))
        depot.process.send_signal(signal.SIGSTOP)
        stored = worker.client.submit_request(RequestType.STORE, [[late], 7, [0, 1], b""])
        worker.client.end_stores(0.05)  # the engine may write to blocks 0 and 1 now
        depot.process.send_signal(signal.SIGCONT)
        assert stored.result(HANG_S) is False
        assert worker.hit(late) == 0
        assert worker.store(later, [0, 1]) is True
        worker.client.end_stores(30.0)
        assert worker.hit(later) == 1
    finally:
        worker.client.close()
        depot.close()
