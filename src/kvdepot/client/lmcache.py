"""The public client API: what an inference engine calls.

The names and signatures are those of the client contract that vLLM 0.15 to 0.17 documents for its LMCache multi-process
integration; code written against it runs on these. One `LMCacheMPSchedulerAdapter` an engine asks what is
cached; one `LMCacheMPWorkerAdapter` a rank moves bytes. Neither ever waits for the server in a call that an engine
makes every step. The one law: what failed is said (0 tokens, failed block ids), never left to be decoded over.

`submit_lookup` and `submit_shards` are the same calls for a caller that has made its chunk hashes itself (with a salt,
a LoRA adapter, images), as the vLLM connector does.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq

from kvdepot.client import contract
from kvdepot.client.contract import (
    IPCCacheEngineKey,
    KVCacheHandle,
    LoadStoreOp,
    RequestType,
    get_response_class,
    striding_block_hashes,
    wrap_kv_caches,
)
from kvdepot.client.device_events import EventQueue, happened
from kvdepot.client.operation import Began, Operation
from kvdepot.client.socket import CONNECT_S, MessageQueueClient, MessagingFuture
from kvdepot.errors import BadRequest, DeadlineExceeded, KVDepotError, Unavailable, UnknownRequest
from kvdepot.protocol import wire
from kvdepot.protocol.keys import HASH_BYTES, engine_hash
from kvdepot.protocol.layout import Layout, build_layout, find_block_axes

if TYPE_CHECKING:
    import torch

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

log = logging.getLogger(__name__)

LOOKUP_S = 1.0
"""A lookup without an answer by then, and the time that the server's tiers have, counts as a miss for now."""
_SHUTDOWN_S = 5.0


def send_lmcache_request(
    mq_client: MessageQueueClient, request_type: RequestType, payloads: list[Any]
) -> MessagingFuture[Any]:
    """Submit one request, get a future. Raises BadRequest for payloads that are not of the type's kind."""
    return mq_client.submit_request(request_type, payloads, get_response_class(request_type))


def get_lmcache_chunk_size(mq_client: MessageQueueClient) -> int:
    """The server's chunk size in tokens. Blocks 5 s at most; raises Unavailable without a server."""
    return mq_client.learn_chunk_size(CONNECT_S)


def _blocks_in_chunk(chunk_size: int, vllm_block_size: int) -> int:
    if vllm_block_size < 1 or chunk_size % vllm_block_size:
        raise BadRequest(
            f"the engine's block size {vllm_block_size} does not divide the server's chunk size {chunk_size}: "
            f"start the server with a --chunk-size that is a multiple of {vllm_block_size}"
        )
    return chunk_size // vllm_block_size


def _connect(
    server_url: str, context: zmq.Context[Any], client: MessageQueueClient | None
) -> tuple[MessageQueueClient, int]:
    client = client or MessageQueueClient(server_url, context)
    try:
        return client, client.learn_chunk_size(CONNECT_S)
    except KVDepotError:
        client.close()
        raise


@dataclass(slots=True)
class _Lookup:
    """One request's lookup, and what is known of its answer."""

    request: wire.Lookup
    began: Began
    heard: int  # how often a server had been heard when it was asked
    boot: bytes = b""  # whose answer there is
    is_told: bool = False  # its watcher has been told
    is_unanswered: bool = False  # it has ended without an answer
    was_held: bool = False  # its caller was told to come back
    is_second: bool = False  # it took the place of one whose caller was told to come back

    @property
    def chunks(self) -> int:
        return len(self.request.hashes) // HASH_BYTES


class LMCacheMPSchedulerAdapter:
    """The scheduler's side: what of a prompt is cached. Used by one thread."""

    def __init__(
        self,
        server_url: str,
        context: zmq.Context[Any],
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
        self.mq_client, self.chunk_size = _connect(server_url, context, client)
        self.model_name = model_name
        self.world_size = world_size
        self.worker_id = kv_rank
        try:
            self.blocks_in_chunk = _blocks_in_chunk(self.chunk_size, vllm_block_size)
        except BadRequest:
            self.mq_client.close()
            raise
        self.lookup_futures: dict[str, MessagingFuture[int]] = {}
        self.watch: Callable[[Operation], None] | None = None  # told of each lookup when its answer is asked for
        self._lookups: dict[str, _Lookup] = {}

    def maybe_submit_lookup_request(
        self, request_id: str, block_hashes: list[bytes] | None = None, token_ids: list[int] | None = None
    ) -> None:
        """Start a lookup for this request unless one is under way. Never blocks.

        token_ids: looks up the chunk-aligned head; fewer tokens than a chunk send nothing. block_hashes: looks up
        the last block's hash of each full chunk. A hit is pinned for this request until it has been retrieved or its
        session ends. Raises BadRequest unless exactly one of the two is given.
        """
        if (block_hashes is None) == (token_ids is None):
            raise BadRequest("a lookup needs token_ids or block_hashes, and not both")
        if request_id in self.lookup_futures:
            return
        if token_ids is not None:
            chunks = len(token_ids) // self.chunk_size
            hashes = b""
            if chunks:
                _, hashes = self.mq_client.chains.name(request_id, token_ids, self.chunk_size, 0, chunks)
        else:
            assert block_hashes is not None
            hashes = b"".join(map(engine_hash, striding_block_hashes(block_hashes, self.blocks_in_chunk)))
        self.submit_lookup(request_id, hashes, chained=token_ids is not None)

    def submit_lookup(
        self, request_id: str, hashes: bytes, readers: int = 0, chained: bool = True, salt: bytes = b""
    ) -> None:
        """Start a lookup of chunk hashes (32 bytes each) that the caller made. Never blocks.

        readers: how many ranks will retrieve each chunk; 0 = world_size. chained, salt: see wire.Lookup.
        """
        if request_id in self.lookup_futures:
            return
        if not hashes:
            self.lookup_futures[request_id] = MessagingFuture.resolved(0)
            return
        request = wire.Lookup(
            self.model_name,
            self.world_size,
            self.blocks_in_chunk,
            request_id,
            readers or self.world_size,
            hashes,
            chained,
            salt,
        )
        self._ask(request_id, request)

    def _ask(self, request_id: str, request: wire.Lookup, is_second: bool = False) -> None:
        client = self.mq_client
        lookup = self._lookups[request_id] = _Lookup(request, Began.now(), client.heard, is_second=is_second)

        def take(value: Any) -> int:
            lookup.boot = client.boot
            return contract.check_type(value, int)

        self.lookup_futures[request_id] = client.ask(request, take, deadline_s=LOOKUP_S)

    def check_lookup_result(self, request_id: str) -> int | None:
        """Tokens in the longest cached prefix, or None while the answer is pending. Never blocks.

        0 also where the server failed, is gone or did not answer in time. Raises UnknownRequest for a request id
        without a lookup.
        """
        future = self.lookup_futures.get(request_id)
        if future is None:
            raise UnknownRequest(f"no lookup was submitted for request {request_id[:64]!r}")
        if not future.query():
            return None
        lookup = self._lookups.get(request_id)
        try:
            found, error = future.result(), ""
        except KVDepotError as exc:
            log.info("lookup of %s counts as a miss: %s", request_id[:64], exc)
            self.lookup_futures[request_id] = MessagingFuture.resolved(0)
            found, error = 0, f"{exc.code}: {exc}"
            if lookup is not None:
                lookup.is_unanswered = isinstance(exc, Unavailable | DeadlineExceeded)
        if lookup is not None and not lookup.is_told:
            lookup.is_told = True
            if self.watch is not None:
                took_s = time.monotonic() - lookup.began.at_s
                self.watch(Operation("lookup", [request_id], lookup.began, took_s, lookup.chunks, found, error=error))
        return found * self.chunk_size

    def wait_lookup_result(self, request_id: str, timeout_s: float) -> int | None:
        """Like `check_lookup_result`, but waits up to `timeout_s` for an answer that is under way, and asks again.

        For a caller that can still use an answer. Asked again is a lookup that was not answered, once a server has been
        heard since; and one that was answered by a server which another has replaced. None while it is under way, and
        once more where that ended without an answer but a server was heard meanwhile; then 0, until the caller comes
        anew. A server that stays away, or hangs, is not heard, so nobody waits for it longer than LOOKUP_S and the
        tiers' time, and later nobody waits at all.
        """
        client = self.mq_client
        tokens = self.check_lookup_result(request_id)
        lookup = self._lookups.get(request_id)
        if tokens is not None and lookup is not None and not (lookup.was_held and lookup.is_second):
            client.pump()
            is_outdated = lookup.boot not in (b"", client.boot)
            if is_outdated or (lookup.is_unanswered and lookup.heard != client.heard):
                self._ask(request_id, lookup.request, is_second=lookup.was_held)
                tokens = None
        if tokens is None and client.is_welcomed:
            client.wait(self.lookup_futures[request_id].query, timeout_s)
        tokens = self.check_lookup_result(request_id)
        if (lookup := self._lookups.get(request_id)) is not None:
            lookup.was_held = tokens is None
        return tokens

    def known_tokens(self, request_id: str) -> int:
        """Tokens of the request's prompt that the server which is there now has said to have. Never blocks."""
        lookup = self._lookups.get(request_id)
        tokens = self.check_lookup_result(request_id) if lookup is not None else 0
        return tokens or 0 if lookup is not None and lookup.boot == self.mq_client.boot else 0

    def is_answered(self, request_id: str) -> bool:
        """Whether a server has answered the request's lookup: else its 0 tokens mean that nobody knows."""
        lookup = self._lookups.get(request_id)
        return lookup is not None and lookup.boot != b""

    def num_blocks_per_chunk(self) -> int:
        """Engine blocks in a chunk."""
        return self.blocks_in_chunk

    def cleanup_lookup_result(self, request_id: str) -> None:
        """Forget the local lookup state of a request; unknown ids are fine."""
        self.lookup_futures.pop(request_id, None)
        self._lookups.pop(request_id, None)

    def end_session(self, request_id: str, saved_tokens: int = 0, saved_s: float = 0.0) -> None:
        """Tell the server that the request is over: pins it still holds are released. Fire and forget.

        saved_tokens, saved_s: see wire.EndSession.
        """
        self.mq_client.chains.drop(request_id)
        self.mq_client.ask(
            wire.EndSession(request_id, saved_tokens, saved_s), deadline_s=None
        )  # a living server must hear it, however late
        self.mq_client.pump()

    def shutdown(self) -> None:
        """Close the connection; every pin of this engine goes with it. Safe twice."""
        self.mq_client.close()

    def _create_key(
        self, token_ids: Sequence[int], start: int = 0, end: int = 0, request_id: str | None = None
    ) -> IPCCacheEngineKey:
        return IPCCacheEngineKey(
            self.model_name, self.world_size, self.worker_id, tuple(token_ids), start, end, None, request_id
        )

    def _create_hash_key(self, chunk_hash: bytes, request_id: str | None = None) -> IPCCacheEngineKey:
        return IPCCacheEngineKey(self.model_name, self.world_size, None, chunk_hash=chunk_hash, request_id=request_id)


@dataclass
class _Transfer:
    """One submitted store or retrieve, of one or several requests."""

    request_ids: list[str]
    shards: list[wire.Shards]
    blocks_in_chunk: int
    is_store: bool
    ticket: int
    future: MessagingFuture[Any] | None = None  # None: it waits for its event
    error: KVDepotError | None = None
    began: Began = field(default_factory=Began.now)

    def fail(self, error: KVDepotError) -> None:
        self.error = error

    def done(self) -> bool:
        return self.error is not None or (self.future is not None and self.future.query())


class LMCacheMPWorkerAdapter:
    """A rank's side: moves blocks into the depot and chunks back. Used by one thread."""

    def __init__(
        self,
        server_url: str,
        context: zmq.Context[Any],
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
        self.mq_client, self.chunk_size = _connect(server_url, context, client)
        self.model_name = model_name
        self.world_size = world_size
        self.worker_id = kv_rank
        self._block_tokens = vllm_block_size
        try:
            self.blocks_in_chunk = _blocks_in_chunk(self.chunk_size, vllm_block_size)
        except BadRequest:
            self.mq_client.close()
            raise
        self.instance_id = secrets.randbits(62)  # a process id would collide between containers
        self.kv_caches: dict[str, torch.Tensor] = {}
        # request id -> its transfers under way; a batch stands under each of its requests
        self.store_futures: dict[str, list[_Transfer]] = {}
        self.retrieve_futures: dict[str, list[_Transfer]] = {}
        self.finished_stores: set[str] = set()  # reported finished by the engine, store still in flight
        self.previously_finished: set[str] = set()  # returned by get_finished and reported again ever since
        self.counters: Counter[str] = Counter()
        self.watch: Callable[[Operation], None] | None = None  # told of each store and retrieve when it has ended
        self.unpins = True  # as chunks are retrieved; False where whoever looked them up ends its sessions itself
        self._block_bytes = 0
        self._failed_blocks: set[int] = set()
        self._tickets = itertools.count(1)
        self._last_ticket = 0
        self._events = EventQueue("kvdepot-events", self._choose_device)

    # -- registering

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor], block_axes: Sequence[int] | None = None) -> None:
        """Share the paged KV tensors (layer name -> tensor) with the server; returns when it has mapped them.

        CPU tensors' storage moves into shared memory; see KVCacheHandle for what stays valid. block_axes names each
        tensor's block axis; without it, it must be plain from the shapes (`[num_blocks, ...]`, or
        `[2, num_blocks, ...]`). Blocks up to 30 s. Raises LayoutError, with the shapes, for tensors it can't describe
        or share.
        """
        views = [handle.view for handle in wrap_kv_caches(kv_caches)]
        axes = find_block_axes(views, self._block_tokens) if block_axes is None else list(block_axes)
        self.register_layout(build_layout(views, axes))
        self.kv_caches = kv_caches

    def register_layout(self, layout: Layout) -> None:
        """Register tensors that are shared already. Blocks up to 30 s."""
        self.mq_client.ask(
            wire.Register(
                self.instance_id,
                layout,
                self.model_name,
                self.world_size,
                self.worker_id,
                self.blocks_in_chunk,
            )
        ).result()
        self._block_bytes = layout.block_bytes

    def _choose_device(self) -> None:
        """On the thread that asks events: else CUDA's runtime would make a context on the first GPU of the host."""
        device = next((tensor.device for tensor in self.kv_caches.values()), None)
        if device is not None and device.type == "cuda":
            import torch

            torch.cuda.set_device(device)

    # -- moving bytes

    def submit_store_request(self, request_id: str, op: LoadStoreOp, event: Any) -> None:
        """Copy `op.block_ids` into the depot under the op's keys. Never blocks.

        event: what must have happened before the bytes may be read: a CUDA event, or on the CPU None or any
        object with `query()`. Raises BadRequest for an op whose tokens, hashes and blocks do not agree.
        """
        self.batched_submit_store_requests([request_id], [op], event)

    def submit_retrieve_request(self, request_id: str, op: LoadStoreOp, event: Any) -> None:
        """Copy the chunks under the op's keys into `op.block_ids`, after `event`. Never blocks."""
        self.batched_submit_retrieve_requests([request_id], [op], event)

    def batched_submit_store_requests(self, request_ids: list[str], ops: list[LoadStoreOp], event: Any) -> None:
        """Store for several requests in one message; they are reported finished together."""
        self.submit_shards(request_ids, self._shards(request_ids, ops), event, is_store=True)

    def batched_submit_retrieve_requests(self, request_ids: list[str], ops: list[LoadStoreOp], event: Any) -> None:
        """Retrieve for several requests in one message; they are reported finished together."""
        self.submit_shards(request_ids, self._shards(request_ids, ops), event, is_store=False)

    def submit_shards(self, request_ids: Sequence[str], shards: list[wire.Shards], event: Any, is_store: bool) -> None:
        """Store or retrieve chunks whose hashes the caller made. Never blocks."""
        may_go = happened(event)
        self._last_ticket = next(self._tickets)
        transfer = _Transfer(list(request_ids), shards, self.blocks_in_chunk, is_store, self._last_ticket)
        futures = self.store_futures if is_store else self.retrieve_futures
        self.previously_finished.difference_update(request_ids)
        for request_id in request_ids:
            futures.setdefault(request_id, []).append(transfer)
        if not shards:
            transfer.future = MessagingFuture.resolved(True if is_store else [])
        elif may_go:
            self._send(transfer)
        else:
            self._events.put(event, partial(self._send, transfer), transfer.fail)

    def _send(self, transfer: _Transfer) -> None:
        if transfer.error is not None:
            return  # given up while it waited for its event
        request: wire.Store | wire.Retrieve
        if transfer.is_store:
            request = wire.Store(self.instance_id, transfer.ticket, transfer.shards)
        else:
            request = wire.Retrieve(self.instance_id, transfer.shards, self.unpins)
        transfer.future = self.mq_client.ask(request)

    def _shards(self, request_ids: list[str], ops: list[LoadStoreOp]) -> list[wire.Shards]:
        if len(request_ids) != len(ops):
            raise BadRequest(f"{len(request_ids)} request ids for {len(ops)} ops")
        shards = []
        for request_id, op in zip(request_ids, ops, strict=True):
            parent, depth = b"", 0
            if op.token_ids is not None:
                end = op.end or len(op.token_ids)
                first, last = contract.chunk_range(op.start, end, len(op.token_ids), self.chunk_size)
                parent, hashes = self.mq_client.chains.name(request_id, op.token_ids, self.chunk_size, first, last)
                depth = first
            else:
                assert op.block_hashes is not None
                hashes = b"".join(map(engine_hash, striding_block_hashes(op.block_hashes, self.blocks_in_chunk)))
            blocks = len(hashes) // HASH_BYTES * self.blocks_in_chunk
            if not blocks <= len(op.block_ids) < blocks + self.blocks_in_chunk:
                raise BadRequest(
                    f"request {request_id[:64]!r}: {len(op.block_ids)} block ids for "
                    f"{blocks // self.blocks_in_chunk} chunks of {self.blocks_in_chunk} blocks"
                )
            if blocks:
                packed = contract.pack_block_ids(op.block_ids[:blocks])
                shards.append(self.shards(request_id, parent, depth, hashes, packed))
        return shards

    def shards(
        self,
        request_id: str,
        parent: bytes,
        depth: int,
        hashes: bytes,
        block_ids: bytes,
        skip_blocks: int = 0,
        salt: bytes = b"",
    ) -> wire.Shards:
        """This rank's shards of chunks `depth ..` of a prompt; see wire.Shards."""
        return wire.Shards(
            request_id,
            self.model_name,
            self.world_size,
            self.worker_id,
            parent,
            depth,
            hashes,
            block_ids,
            skip_blocks,
            salt,
        )

    # -- hearing what became of it

    def get_finished(self, finished_req_ids_from_engine: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Polled every engine step; never blocks.

        First set: ids that the engine has reported finished (now or earlier) and that have no store in flight; each at
        most once. Second set: requests whose retrieve has completed, successfully or not. None for an empty set.

        An id may be used again: what counts as a repeated report is one in the calls that directly follow the id's
        return. Once a call does not report the id, or a store or retrieve is submitted under it, it is a new request.
        """
        self._events.look()
        self.mq_client.pump()
        self._settle(self.store_futures, self._store_ended)
        loaded = self._settle(self.retrieve_futures, self._retrieve_ended)
        # Asynchronous scheduling repeats a report in steps that it scheduled before it heard of the id's return. A new
        # request of the same id is scheduled after those, in a step that does not report it.
        repeated = self.previously_finished & finished_req_ids_from_engine
        self.finished_stores |= finished_req_ids_from_engine - repeated
        stored = {request_id for request_id in self.finished_stores if request_id not in self.store_futures}
        self.finished_stores -= stored
        self.previously_finished = repeated | stored
        for request_id in stored:
            self.mq_client.chains.drop(request_id)
        return stored or None, loaded or None

    def _settle(self, futures: dict[str, list[_Transfer]], ended: Any) -> set[str]:
        """Take out transfers that are done; the ids that have none left."""
        done: set[str] = set()
        settled: set[int] = set()
        # Asked once each: an answer that comes in meanwhile must not end a batch for some of its requests only.
        ended_now = {id(t): t.done() for transfers in futures.values() for t in transfers}
        for request_id, transfers in list(futures.items()):
            left = []
            for transfer in transfers:
                if not ended_now[id(transfer)]:
                    left.append(transfer)
                elif id(transfer) not in settled:
                    settled.add(id(transfer))
                    ended(transfer)
            if left:
                futures[request_id] = left
            else:
                del futures[request_id]
                done.add(request_id)
        return done

    def _outcome(self, transfer: _Transfer) -> Any:
        if transfer.error is not None:
            return transfer.error
        assert transfer.future is not None
        try:
            return transfer.future.result()
        except KVDepotError as exc:
            return exc

    def _store_ended(self, transfer: _Transfer) -> None:
        outcome = self._outcome(transfer)
        if outcome is not True:
            self.counters["stores_dropped"] += 1
            log.info("store for %s dropped: %s", transfer.request_ids[:4], outcome or "no space, or a copy failed")
        blocks = sum(len(part.block_ids) // 4 for part in transfer.shards) if outcome is True else 0
        self._tell(transfer, blocks // transfer.blocks_in_chunk, blocks, outcome)

    def _retrieve_ended(self, transfer: _Transfer) -> None:
        said = outcome = self._outcome(transfer)
        chunks = sum(len(part.hashes) // HASH_BYTES for part in transfer.shards)
        if not isinstance(outcome, list) or len(outcome) != chunks:
            log.warning("retrieve for %s failed: %s", transfer.request_ids[:4], outcome)
            outcome = [False] * chunks
        position = blocks = 0
        for part in transfer.shards:
            for i in range(len(part.hashes) // HASH_BYTES):
                if outcome[position] is not True:
                    first = 4 * i * transfer.blocks_in_chunk
                    if i == 0:
                        first += 4 * part.skip_blocks
                    ids = part.block_ids[first : 4 * (i + 1) * transfer.blocks_in_chunk]
                    self._failed_blocks.update(memoryview(ids).cast("I"))
                    self.counters["chunks_failed"] += 1
                else:
                    blocks += transfer.blocks_in_chunk - (part.skip_blocks if i == 0 else 0)
                position += 1
        self._tell(transfer, outcome.count(True), blocks, said)

    def _tell(self, transfer: _Transfer, done: int, blocks: int, outcome: Any) -> None:
        """blocks: that were moved."""
        if self.watch is not None and transfer.shards:
            kind, began = "store" if transfer.is_store else "retrieve", transfer.began
            chunks = sum(len(part.hashes) // HASH_BYTES for part in transfer.shards)
            error = f"{outcome.code}: {outcome}" if isinstance(outcome, KVDepotError) else ""
            took_s = time.monotonic() - began.at_s
            size = blocks * self._block_bytes
            stored = b"".join(part.hashes for part in transfer.shards) if transfer.is_store and done else b""
            self.watch(Operation(kind, transfer.request_ids, began, took_s, chunks, done, size, error, stored))

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose retrieve failed since the last call; the engine must recompute them."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def give_up_stores(self, request_ids: set[str], timeout_s: float) -> None:
        """Make sure that nothing stores blocks of these requests any more: the engine is about to reuse them.

        Waits up to `timeout_s` for their stores; what is still under way then will never become visible (see
        memory/shm.py).
        """
        transfers = [t for request_id in request_ids for t in self.store_futures.get(request_id, ())]
        if not transfers:
            return
        if not self.mq_client.wait(lambda: all(t.done() for t in transfers), timeout_s):
            given_up = [t for t in transfers if not t.done()]
            self.counters["stores_given_up"] += len(given_up)
            self.mq_client.lease.raise_fence(self._last_ticket)
            for transfer in given_up:
                if transfer.future is None:
                    transfer.fail(KVDepotError("its blocks were taken away before its event happened"))

    def wait_any(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for a retrieve under way to end; for an engine with nothing else to do."""
        transfers = [t for transfers in self.retrieve_futures.values() for t in transfers]
        if transfers:
            self.mq_client.wait(lambda: any(t.done() for t in transfers), timeout_s)

    def num_blocks_per_chunk(self) -> int:
        """Engine blocks in a chunk."""
        return self.blocks_in_chunk

    def shutdown(self) -> None:
        """Unregister and close. Safe twice and without a server; blocks 5 s at most."""
        self._events.stop()
        try:
            self.mq_client.ask(wire.Unregister(self.instance_id)).result(_SHUTDOWN_S)
        except KVDepotError as exc:
            log.debug("not unregistered: %s", exc)
        self.mq_client.close()
