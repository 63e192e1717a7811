"""The public client API: what an inference engine calls.

Names and signatures are those of the client contract that vLLM 0.15 to 0.17 documents for its LMCache multi-process
integration; code written against that runs here unchanged. The adapters are the native clients (client/scheduler.py,
client/worker.py) under the contract's names. They decide nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import zmq

from kvdepot.client.contract import (
    IPCCacheEngineKey,
    KVCacheHandle,
    LoadStoreOp,
    MessageQueueClient,
    RequestType,
    get_response_class,
    open_tested,
    striding_block_hashes,
    wrap_kv_caches,
)
from kvdepot.client.scheduler import Cached, LookupOutcome, SchedulerClient, Unanswered
from kvdepot.client.socket import CONNECT_S, Client, MessagingFuture
from kvdepot.client.transfer import ShardSpec, Transfer, pack_block_ids
from kvdepot.client.worker import WorkerClient
from kvdepot.devices.blocks import DeviceEvent
from kvdepot.errors import BadRequest, KVDepotError, LayoutError
from kvdepot.protocol.keys import HASH_BYTES, engine_hash
from kvdepot.protocol.layout import build_layout, find_block_axes

if TYPE_CHECKING:
    import torch

    from kvdepot.devices.blocks import BlockMemory

__all__ = [
    "IPCCacheEngineKey",
    "KVCacheHandle",
    "LMCacheMPSchedulerAdapter",
    "LMCacheMPWorkerAdapter",
    "LoadStoreOp",
    "MessageQueueClient",
    "MessagingFuture",
    "RequestType",
    "get_lmcache_chunk_size",
    "get_response_class",
    "send_lmcache_request",
    "striding_block_hashes",
    "wrap_kv_caches",
]


def send_lmcache_request(
    mq_client: MessageQueueClient, request_type: RequestType, payloads: list[Any]
) -> MessagingFuture[Any]:
    """Submit one request, get a future. Raises BadRequest for payloads that do not fit the request type."""
    return mq_client.submit_request(request_type, payloads, get_response_class(request_type))


def get_lmcache_chunk_size(mq_client: MessageQueueClient) -> int:
    """The server's chunk size in tokens. Blocks 5 s at most; raises Unavailable without a server."""
    return mq_client.learn_chunk_size(CONNECT_S)


def _of_spec(field: str) -> Any:
    """A field of an adapter's `spec` under the contract's name. Setting it replaces the spec."""

    def change(adapter: _Adapter, value: Any) -> None:
        adapter.spec = replace(adapter.spec, **{field: value})

    return property(attrgetter(f"spec.{field}"), change)


class _Adapter:
    """The contract's part that both adapters have, before one of the native clients. Setting an attribute affects what
    is sent afterwards."""

    client: Client
    spec: ShardSpec
    model_name: str = _of_spec("model")
    world_size: int = _of_spec("world_size")
    worker_id: int = _of_spec("rank")
    """The KV rank."""
    chunk_size: int = _of_spec("chunk_tokens")
    """Tokens per chunk."""
    blocks_in_chunk: int = _of_spec("blocks_in_chunk")

    def __init__(
        self,
        server_url: str,
        context: zmq.Context[zmq.Socket[bytes]],
        model_name: str,
        world_size: int,
        kv_rank: int,
        vllm_block_size: int,
        *,
        client: MessageQueueClient | None = None,
    ) -> None:
        """Read the server's chunk size; blocks 5 s at most. A `client` that is given becomes the adapter's own.

        Raises Unavailable when no server answers, BadRequest when the block size does not divide the chunk size.
        """
        client = client or MessageQueueClient(server_url, context)
        try:
            chunk_tokens = client.learn_chunk_size(CONNECT_S)
            spec = ShardSpec.of_blocks(model_name, world_size, kv_rank, chunk_tokens, vllm_block_size)
        except KVDepotError:
            client.close()
            raise
        super().__init__(client, spec)  # type: ignore[call-arg]  # the native client's

    @property
    def mq_client(self) -> MessageQueueClient:
        assert isinstance(self.client, MessageQueueClient)
        return self.client

    @mq_client.setter
    def mq_client(self, client: MessageQueueClient) -> None:
        if not isinstance(client, MessageQueueClient):
            raise BadRequest(f"mq_client must be a MessageQueueClient, not a {type(client).__name__}")
        self.client = client

    def num_blocks_per_chunk(self) -> int:
        return self.spec.blocks_in_chunk

    def _hash_keys(self, block_hashes: list[bytes] | None) -> bytes:
        """The keys of the whole chunks of these blocks, in hash mode."""
        return b"".join(map(engine_hash, striding_block_hashes(block_hashes or [], self.blocks_in_chunk)))


class LMCacheMPSchedulerAdapter(_Adapter, SchedulerClient):
    """The scheduler's side: how much of a prompt is cached. Used by one thread."""

    @property
    def lookup_futures(self) -> dict[str, MessagingFuture[int]]:
        """A copy of the futures of lookups, by request id: chunks in the longest cached prefix."""
        return {request_id: each.future for request_id, each in self._lookups.items()}

    def maybe_submit_lookup_request(
        self, request_id: str, block_hashes: list[bytes] | None = None, token_ids: list[int] | None = None
    ) -> None:
        """Start a lookup for this request, unless it already has one. Never blocks.

        token_ids: looks up all whole chunks; a prompt shorter than a chunk sends nothing. block_hashes: looks up the
        hash of the last block of each full chunk. A hit pins the matched chunks for this request until they are
        retrieved or its session ends. Raises BadRequest unless exactly one of the two is given.
        """
        if (block_hashes is None) == (token_ids is None):
            raise BadRequest("a lookup needs exactly one of token_ids and block_hashes")
        if request_id in self._lookups:
            return
        if token_ids is not None:
            _, _, hashes = self.mq_client.chains.name(request_id, token_ids, self.chunk_size)
        else:
            hashes = self._hash_keys(block_hashes)
        self.submit_lookup(request_id, hashes, chained=token_ids is not None)

    def check_lookup_result(self, request_id: str) -> int | None:
        """Tokens in the longest cached prefix, or None while the answer is pending. Never blocks.

        Also 0 where the server failed, is gone, or did not answer in time. Raises UnknownRequest for a request without
        a lookup.
        """
        return _tokens(self.check_lookup(request_id))

    def wait_lookup_result(self, request_id: str, timeout_s: float) -> int | None:
        """Like `check_lookup_result`, but waits up to `timeout_s` for a pending answer, and repeats lookups; see
        SchedulerClient.wait_lookup."""
        return _tokens(self.wait_lookup(request_id, timeout_s))

    def cleanup_lookup_result(self, request_id: str) -> None:
        """Forget a request's lookup on this side; unknown ids are fine."""
        self.forget_lookup(request_id)

    def end_session(self, request_id: str, *report: Any, **more: Any) -> None:
        """Tell the server that the request is over, which releases the pins that it still holds. Never blocks. Other
        arguments: see SchedulerClient.end_session."""
        self.mq_client.chains.drop(request_id)
        super().end_session(request_id, *report, **more)

    def shutdown(self) -> None:
        """Close the connection, which releases all pins of this engine. Safe twice."""
        self.close()

    def _create_key(
        self, token_ids: Sequence[int], start: int = 0, end: int = 0, request_id: str | None = None
    ) -> IPCCacheEngineKey:
        return IPCCacheEngineKey(
            self.model_name, self.world_size, self.worker_id, tuple(token_ids), start, end, None, request_id
        )

    def _create_hash_key(self, chunk_hash: bytes, request_id: str | None = None) -> IPCCacheEngineKey:
        return IPCCacheEngineKey(self.model_name, self.world_size, None, chunk_hash=chunk_hash, request_id=request_id)


def _tokens(outcome: LookupOutcome) -> int | None:
    """The contract's answer: None while there is none, and 0 for a lookup that failed."""
    match outcome:
        case Cached():
            return outcome.tokens
        case Unanswered():
            return 0
    return None


class LMCacheMPWorkerAdapter(_Adapter, WorkerClient):
    """A worker's side: stores blocks of one rank and retrieves chunks into them. Used by one thread."""

    kv_caches: Mapping[str, torch.Tensor] = MappingProxyType({})
    """The registered tensors, by layer."""
    _opened: Sequence[BlockMemory] = ()
    """Their blocks."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor], block_axes: Sequence[int] | None = None) -> None:
        """Register the paged KV tensors (layer name -> tensor): this process copies them from now on.

        block_axes: each tensor's block axis; without it, the shapes must show it (`[num_blocks, ...]` or
        `[2, num_blocks, ...]`). Blocks 30 s at most. Raises LayoutError, with the shapes, for tensors that cannot be
        described or have fewer blocks than a chunk. If their device fails in a test of the copies, this logs a warning,
        and the engine runs without a cache.
        """
        views = [handle.view for handle in wrap_kv_caches(kv_caches)]
        axes = find_block_axes(views, self.spec.block_tokens) if block_axes is None else list(block_axes)
        layout = build_layout(views, axes)
        if layout.num_blocks < self.blocks_in_chunk:
            shapes = ", ".join(f"{view.name} {list(view.shape)}" for view in views[:8])
            raise LayoutError(
                f"the block axis is taken to be axis {axes[0]} of {shapes}, so the number of blocks is "
                f"{layout.num_blocks}, and no chunk of {self.blocks_in_chunk} blocks could be stored. Name the block "
                "axis (block_axes=...), or register tensors with more blocks"
            )
        before, (self._opened, fault) = self._opened, open_tested(layout, kv_caches.values())
        self.kv_caches = kv_caches
        self.register([layout], self._opened, fault)
        for each in before:
            each.close()

    def submit_store_request(self, request_id: str, op: LoadStoreOp, event: DeviceEvent | None) -> None:
        """Copy `op.block_ids` into the depot under the op's keys. Never blocks.

        event: must happen before the bytes may be read: a CUDA event, or on the CPU None or any object with `query()`.
        Raises BadRequest for an op whose tokens, hashes and blocks do not agree.
        """
        self.batched_submit_store_requests([request_id], [op], event)

    def submit_retrieve_request(self, request_id: str, op: LoadStoreOp, event: DeviceEvent | None) -> None:
        """Copy the chunks under the op's keys into `op.block_ids`, after `event`. Never blocks."""
        self.batched_submit_retrieve_requests([request_id], [op], event)

    def batched_submit_store_requests(
        self, request_ids: list[str], ops: list[LoadStoreOp], event: DeviceEvent | None
    ) -> None:
        """Store for several requests in one message; they are reported finished together."""
        self.submit_store(request_ids, self._transfers(request_ids, ops), event)

    def batched_submit_retrieve_requests(
        self, request_ids: list[str], ops: list[LoadStoreOp], event: DeviceEvent | None
    ) -> None:
        """Retrieve for several requests in one message; they are reported finished together."""
        self.submit_retrieve(request_ids, self._transfers(request_ids, ops), event)

    def _transfers(self, request_ids: list[str], ops: list[LoadStoreOp]) -> list[Transfer]:
        """One transfer for each op that has a whole chunk. Raises BadRequest."""
        if len(request_ids) != len(ops):
            raise BadRequest(f"{len(request_ids)} request ids for {len(ops)} ops")
        transfers = [self._transfer(request_id, op) for request_id, op in zip(request_ids, ops, strict=True)]
        return [transfer for transfer in transfers if transfer.hashes]

    def _transfer(self, request_id: str, op: LoadStoreOp) -> Transfer:
        parent, depth = b"", 0
        if op.token_ids is not None:
            chains, where = self.mq_client.chains, (op.start, op.end)
            parent, depth, hashes = chains.name(request_id, op.token_ids, self.chunk_size, *where)
        else:
            hashes = self._hash_keys(op.block_hashes)
        blocks = len(hashes) // HASH_BYTES * self.blocks_in_chunk
        if not blocks <= len(op.block_ids) < blocks + self.blocks_in_chunk:
            raise BadRequest(
                f"request {request_id[:64]!r}: {len(op.block_ids)} block ids for "
                f"{blocks // self.blocks_in_chunk} chunks of {self.blocks_in_chunk} blocks"
            )
        return Transfer(request_id, parent, depth, hashes, pack_block_ids(op.block_ids[:blocks]) if blocks else b"")

    def get_finished(self, finished_req_ids_from_engine: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Polled every engine step; never blocks.

        First set: ids that the engine has reported finished (now or earlier) and that have no store under way; each at
        most once. Second set: requests whose retrieve has completed, successfully or not. None for an empty set. An id
        may be reused: see WorkerClient.poll.
        """
        stored, retrieved = self.poll(finished_req_ids_from_engine)
        for request_id in stored:
            self.mq_client.chains.drop(request_id)
        return stored or None, retrieved or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Ids of blocks that a retrieve failed to fill since the last call; the engine must recompute them."""
        return self.take_failed_blocks()

    def shutdown(self) -> None:
        """End all copies, unregister and close the connection. Safe twice and without a server; blocks 10 s at most."""
        self.close()
        for each in self._opened if self.client.is_closed else ():
            each.close()
