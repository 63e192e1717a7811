"""KV events about the depot's chunks, for routers: an engine publishes them itself, or has its server do it.

Used by scheduler.py. An engine that names a topic (`kvdepot.events_topic`), and a server that publishes KV events under
topics, use `Descriptions`: the server lacks the token ids of chunks, which only engines know. It takes them only for
prompts that depend on their tokens alone: without a cache salt, a LoRA adapter or private weights, and up to the first
image.

Otherwise, if vLLM publishes KV events (`kv_events_config`), `KnownChunks` are published as vLLM's own (`take_events`).
Blocks have the engine's own hashes and tokens, so routers treat them like the engine's, with the medium "CPU". The
scheduler learns of chunks from what its engine stores and looks up, and that one is gone only when a lookup misses it.
Of a model with several KV cache groups, events are about the first that is stored, and name it. Invariant: a chunk
published as stored was stored on every rank or found by a lookup.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvdepot.client.scheduler import SchedulerClient
from kvdepot.client.transfer import Transfer
from kvdepot.integrations.vllm.groups import EventGroup
from kvdepot.integrations.vllm.messages import WorkerReport
from kvdepot.protocol.keys import HASH_BYTES, ROOT, ChunkChain, pack_ids

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import ExternalBlockHash
    from vllm.v1.request import Request

__all__ = ["ChunkEvents", "Descriptions", "KnownChunks"]

_MOST_KNOWN = 1 << 16
_MOST_ORDERED = 1 << 14
"""Chunks that workers may be storing; a bound, as some are never reported."""


class ChunkEvents:
    """The scheduler's reports about chunks, for routers; this one publishes nothing."""

    def ordered(self, request: Request, chain: ChunkChain, chunks: range, stores: Sequence[Transfer]) -> None:
        """Workers were ordered to store these chunks of a request, as far as `stores` has them."""

    def stored(self, report: WorkerReport) -> None:
        """Workers have reported chunks as stored."""

    def found(self, request: Request, chain: ChunkChain, found: int, asked: int) -> None:
        """A lookup for the first `asked` chunks of a prompt found the first `found`, and not the next."""

    def lost(self, keys: bytes) -> None:
        """Chunks could not be loaded. keys: 32 bytes each."""

    def clear(self) -> None:
        """The depot has forgotten all chunks."""

    def restarted(self) -> None:
        """Another server answers, which knows no descriptions."""

    def take(self) -> Iterable[KVCacheEvent]:
        """The events for vLLM to publish since the last call."""
        return ()


class KnownChunks(ChunkEvents):
    """Chunks believed to be in the depot, and the events not taken yet."""

    def __init__(self, ranks: int, chunk_tokens: int, group: EventGroup, most: int = _MOST_KNOWN) -> None:
        """group: whose chunks these are."""
        self._group = group
        self._ranks = ranks
        self._chunk_tokens = chunk_tokens
        self._most = most
        self._hashes: OrderedDict[bytes, list[ExternalBlockHash]] = OrderedDict()  # by chunk key, most recent last
        self._ordered: OrderedDict[bytes, BlockStored] = OrderedDict()
        self._stored: dict[bytes, set[int]] = {}  # ranks that have stored an ordered chunk
        self._events: list[KVCacheEvent] = []

    def __repr__(self) -> str:
        return f"<KnownChunks {len(self._hashes)} chunks, {len(self._ordered)} being stored>"

    def ordered(self, request: Request, chain: ChunkChain, chunks: range, stores: Sequence[Transfer]) -> None:
        first_group = [range(store.depth, store.depth + store.chunks) for store in stores if not store.group]
        for i in (chunk for part in first_group for chunk in part):
            event = self._describe(request, i)
            if event is not None:
                key = chain.slice(i, i + 1)
                self._stored.pop(key, None)
                self._ordered[key] = event
                self._ordered.move_to_end(key)
        while len(self._ordered) > _MOST_ORDERED:
            self._stored.pop(self._ordered.popitem(last=False)[0], None)

    def stored(self, report: WorkerReport) -> None:
        for key, ranks in report.keys.items():
            if key in self._ordered:
                by = self._stored.setdefault(key, set())
                by |= ranks
                if len(by) >= self._ranks:
                    del self._stored[key]
                    self._add(key, self._ordered.pop(key))

    def found(self, request: Request, chain: ChunkChain, found: int, asked: int) -> None:
        reach = self._group.reach or found
        for i in range(max(0, found - reach), asked):
            key = chain.slice(i, i + 1)
            if i >= found:
                self._remove(key)
            elif key in self._hashes:
                self._hashes.move_to_end(key)
            elif (event := self._describe(request, i)) is not None:
                self._add(key, event)

    def lost(self, keys: bytes) -> None:
        for i in range(0, len(keys), HASH_BYTES):
            self._remove(keys[i : i + HASH_BYTES])

    def clear(self) -> None:
        self._ordered.clear()
        self._stored.clear()
        self.lost(b"".join(self._hashes))

    def take(self) -> Iterable[KVCacheEvent]:
        events, self._events = self._events, []
        return events

    def _describe(self, request: Request, chunk: int) -> BlockStored | None:
        """The event for a chunk, as vLLM publishes its own blocks; None if vLLM does not hash them."""
        start, end = chunk * self._chunk_tokens, (chunk + 1) * self._chunk_tokens
        first, last = start // self._group.block_tokens, end // self._group.block_tokens
        hashes = request.block_hashes
        if last > len(hashes):
            return None
        lora = request.lora_request
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(each) for each in hashes[first:last]],
            parent_block_hash=maybe_convert_block_hash(hashes[first - 1]) if first else None,
            token_ids=list(request.all_token_ids[start:end]),
            block_size=self._group.block_tokens,
            lora_id=lora.adapter_id if lora is not None else None,
            medium=MEDIUM_CPU,
            lora_name=lora.name if lora is not None else None,
            group_idx=self._group.number,
            kv_cache_spec_kind=self._group.kind,
            kv_cache_spec_sliding_window=self._group.window,
        )

    def _add(self, key: bytes, event: BlockStored) -> None:
        if key in self._hashes:
            return
        self._events.append(event)
        self._hashes[key] = event.block_hashes
        if len(self._hashes) > self._most:
            self._remove(next(iter(self._hashes)))

    def _remove(self, key: bytes) -> None:
        hashes = self._hashes.pop(key, None)
        if hashes is not None:
            self._events.append(BlockRemoved(block_hashes=hashes, medium=MEDIUM_CPU, group_idx=self._group.number))


_MOST_DESCRIBED = 1 << 16
_MOST_TOKENS = 1 << 16
"""Tokens in one message, which has 256 KiB then."""


class Descriptions(ChunkEvents):
    """Describes chunks to the server, each when it is stored, and when it is found for the first time."""

    def __init__(self, client: SchedulerClient, most: int = _MOST_DESCRIBED) -> None:
        """most: chunks that are not described again when they are found again."""
        self._client = client
        self._most = most
        self._described: OrderedDict[bytes, None] = OrderedDict()  # by key, most recent last

    def __repr__(self) -> str:
        return f"<Descriptions of {len(self._described)} chunks>"

    def ordered(self, request: Request, chain: ChunkChain, chunks: range, stores: Sequence[Transfer]) -> None:
        if chain.root != ROOT:
            return
        step = max(1, _MOST_TOKENS // chain.chunk_size)
        for start in range(chunks.start, chunks.stop, step):
            self._describe(request, chain, start, min(start + step, chunks.stop))

    def found(self, request: Request, chain: ChunkChain, found: int, asked: int) -> None:
        first = 0  # perhaps stored by an engine that describes none
        while first < found and chain.slice(first, first + 1) in self._described:
            first += 1
        self.ordered(request, chain, range(first, found), ())

    def restarted(self) -> None:
        self._described.clear()

    def _describe(self, request: Request, chain: ChunkChain, first: int, end: int) -> None:
        size = chain.chunk_size
        tokens = pack_ids(request.all_token_ids[first * size : end * size + chain.lookahead], "token ids")
        self._client.describe(chain.parent(first), chain.slice(first, end), tokens)
        for i in range(first, end):
            key = chain.slice(i, i + 1)
            self._described[key] = None
            self._described.move_to_end(key)
        while len(self._described) > self._most:
            self._described.popitem(last=False)
