"""An adapter as somebody else would write it, against the contract's module functions and nothing else of ours.

One `Lookups` on the scheduler's side and one `Transfers` on the worker's, in token mode or in hash mode.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import zmq

from kvdepot.adapters import (
    IPCCacheEngineKey,
    KVCacheHandle,
    MessageQueueClient,
    MessagingFuture,
    RequestType,
    get_lmcache_chunk_size,
    send_lmcache_request,
    striding_block_hashes,
    wrap_kv_caches,
)


@dataclass
class Names:
    """Makes keys of one engine: of tokens `[start, end)`, or of an engine's own block hashes."""

    model: str
    world_size: int
    rank: int
    chunk_size: int
    block_size: int

    def of_tokens(self, request_id: str, token_ids: Sequence[int], start: int = 0) -> list[IPCCacheEngineKey]:
        end = len(token_ids) - len(token_ids) % self.chunk_size
        if end <= start:
            return []
        tokens = tuple(token_ids[:end])
        return [
            IPCCacheEngineKey(
                self.model, self.world_size, self.rank, token_ids=tokens, start=start, end=end, request_id=request_id
            )
        ]

    def of_hashes(self, request_id: str, block_hashes: list[bytes]) -> list[IPCCacheEngineKey]:
        return [
            IPCCacheEngineKey(self.model, self.world_size, self.rank, chunk_hash=chunk_hash, request_id=request_id)
            for chunk_hash in striding_block_hashes(block_hashes, self.chunk_size // self.block_size)
        ]


class Lookups:
    """The scheduler's side."""

    def __init__(self, url: str, context: zmq.Context[Any], model: str, world_size: int, block_size: int) -> None:
        self.client = MessageQueueClient(url, context)
        self.names = Names(model, world_size, 0, get_lmcache_chunk_size(self.client), block_size)

    def hit_tokens(self, keys: list[IPCCacheEngineKey]) -> int:
        if not keys:
            return 0
        bare = [key.no_worker_id_version() for key in keys]
        chunks: int = send_lmcache_request(self.client, RequestType.LOOKUP, [bare]).result(timeout=10.0)
        return chunks * self.names.chunk_size

    def end(self, request_id: str) -> None:
        send_lmcache_request(self.client, RequestType.END_SESSION, [request_id]).result(timeout=10.0)

    def close(self) -> None:
        self.client.close()


@dataclass
class Transfers:
    """One worker's side. Futures are polled, as an engine's step does."""

    url: str
    context: zmq.Context[Any]
    model: str
    world_size: int
    rank: int
    block_size: int
    instance_id: int = field(default_factory=os.getpid)
    under_way: dict[str, MessagingFuture[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.client = MessageQueueClient(self.url, self.context)
        chunk_size = get_lmcache_chunk_size(self.client)
        self.names = Names(self.model, self.world_size, self.rank, chunk_size, self.block_size)

    def register(self, caches: dict[str, torch.Tensor]) -> None:
        self._register(wrap_kv_caches(caches))

    def register_unnamed(self, tensors: list[torch.Tensor]) -> None:
        self._register([KVCacheHandle(tensor) for tensor in tensors])

    def _register(self, handles: list[KVCacheHandle]) -> None:
        payloads = [self.instance_id, handles]
        send_lmcache_request(self.client, RequestType.REGISTER_KV_CACHE, payloads).result(timeout=10.0)

    def store(self, name: str, keys: list[IPCCacheEngineKey], block_ids: list[int]) -> None:
        self._submit(name, RequestType.STORE, keys, block_ids)

    def retrieve(self, name: str, keys: list[IPCCacheEngineKey], block_ids: list[int]) -> None:
        self._submit(name, RequestType.RETRIEVE, keys, block_ids)

    def _submit(self, name: str, kind: RequestType, keys: list[IPCCacheEngineKey], block_ids: list[int]) -> None:
        future = send_lmcache_request(self.client, kind, [keys, self.instance_id, block_ids, b""])
        self.under_way[name] = future.to_cuda_future()

    def poll(self) -> dict[str, Any]:
        """The answers of what has ended since the last call."""
        done = [name for name, future in self.under_way.items() if future.query()]
        return {name: self.under_way.pop(name).result() for name in done}

    def close(self) -> None:
        send_lmcache_request(self.client, RequestType.UNREGISTER_KV_CACHE, [self.instance_id]).result(timeout=10.0)
        self.client.close()
