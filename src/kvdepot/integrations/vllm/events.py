"""The chunks that the connector's scheduler believes to be in the depot, published as vLLM's own KV events.

Enabled by vLLM's `kv_events_config` (`take_events`). Blocks have the engine's own hashes and tokens, so routers treat
them like the engine's, with the medium "CPU". The scheduler learns of chunks from what its engine stores and looks up,
and that one is gone only when a lookup misses it. To learn of every eviction at once, or of what other engines store,
subscribe to the depot itself (`kvdepot serve --kv-events`). Of a model with several KV cache groups, events tell of the
first that is stored, and name it. Invariant: a chunk published as stored was stored on every rank or found by a lookup.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvdepot.integrations.vllm.groups import EventGroup
from kvdepot.integrations.vllm.messages import WorkerReport
from kvdepot.protocol.keys import HASH_BYTES, ChunkChain

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import ExternalBlockHash
    from vllm.v1.request import Request

__all__ = ["Known"]

_MOST_KNOWN = 1 << 16
_MOST_ORDERED = 1 << 14
"""Chunks that workers may be storing; a bound, as some are never reported."""


class Known:
    """Chunks believed to be in the depot, and the events not taken yet."""

    def __init__(
        self,
        ranks: int,
        chunk_tokens: int,
        block_tokens: int,
        group: EventGroup = EventGroup(),  # noqa: B008 - immutable
        most: int = _MOST_KNOWN,
    ) -> None:
        """block_tokens: of the engine's block hashes. group: whose chunks these are; empty: of the only one."""
        self._group = group
        self._ranks = ranks
        self._chunk_tokens = chunk_tokens
        self._block_tokens = block_tokens
        self._most = most
        self._hashes: OrderedDict[bytes, list[ExternalBlockHash]] = OrderedDict()  # by chunk key, most recent last
        self._ordered: OrderedDict[bytes, BlockStored] = OrderedDict()
        self._stored: dict[bytes, set[int]] = {}  # ranks that have stored an ordered chunk
        self._events: list[KVCacheEvent] = []

    def __repr__(self) -> str:
        return f"<Known {len(self._hashes)} chunks, {len(self._ordered)} being stored>"

    def ordered(self, request: Request, chain: ChunkChain, first: int, end: int) -> None:
        """Workers were ordered to store chunks `[first, end)` of a request."""
        for i in range(first, end):
            event = self._describe(request, i)
            if event is not None:
                key = chain.slice(i, i + 1)
                self._stored.pop(key, None)
                self._ordered[key] = event
                self._ordered.move_to_end(key)
        while len(self._ordered) > _MOST_ORDERED:
            self._stored.pop(self._ordered.popitem(last=False)[0], None)

    def stored(self, report: WorkerReport) -> None:
        """Workers have reported chunks as stored."""
        for key, ranks in report.keys.items():
            if key in self._ordered:
                by = self._stored.setdefault(key, set())
                by |= ranks
                if len(by) >= self._ranks:
                    del self._stored[key]
                    self._add(key, self._ordered.pop(key))

    def looked_up(self, request: Request, chain: ChunkChain, found: int, asked: int | None = None) -> None:
        """A lookup for the first `asked` chunks of a prompt (None: all) found the first `found`, and not the next."""
        reach = self._group.reach or found
        for i in range(max(0, found - reach), len(chain) if asked is None else asked):
            key = chain.slice(i, i + 1)
            if i >= found:
                self._remove(key)
            elif key in self._hashes:
                self._hashes.move_to_end(key)
            elif (event := self._describe(request, i)) is not None:
                self._add(key, event)

    def lost(self, keys: bytes) -> None:
        """Chunks could not be loaded. keys: 32 bytes each."""
        for i in range(0, len(keys), HASH_BYTES):
            self._remove(keys[i : i + HASH_BYTES])

    def clear(self) -> None:
        """The depot has forgotten all chunks."""
        self._ordered.clear()
        self._stored.clear()
        self.lost(b"".join(self._hashes))

    def take(self) -> Iterable[KVCacheEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def _describe(self, request: Request, chunk: int) -> BlockStored | None:
        """The event for a chunk, as vLLM publishes its own blocks; None if vLLM does not hash them."""
        start, end = chunk * self._chunk_tokens, (chunk + 1) * self._chunk_tokens
        first, last = start // self._block_tokens, end // self._block_tokens
        hashes = request.block_hashes
        if last > len(hashes):
            return None
        lora = request.lora_request
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(each) for each in hashes[first:last]],
            parent_block_hash=maybe_convert_block_hash(hashes[first - 1]) if first else None,
            token_ids=list(request.all_token_ids[start:end]),
            block_size=self._block_tokens,
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
