"""Describes an engine's chunks to its server, which publishes them to routers as KV events.

Used by scheduler.py for an engine that names a topic (`kvdepot.events_topic`): the server lacks the token ids of
chunks, which only engines know. It takes them only for prompts that depend on their tokens alone: without a cache salt,
a LoRA adapter or private weights, and up to the first image.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from kvdepot.client.scheduler import SchedulerClient
from kvdepot.protocol.keys import ROOT, ChunkChain, pack_ids

if TYPE_CHECKING:
    from vllm.v1.request import Request

_MOST_DESCRIBED = 1 << 20
_MOST_TOKENS = 1 << 16
"""Tokens in one message, which has 256 KiB then."""


class Descriptions:
    """Describes chunks to the server, each when it is stored, and when it is found for the first time."""

    def __init__(self, client: SchedulerClient, most: int = _MOST_DESCRIBED) -> None:
        """most: chunks that are not described again when they are found again."""
        self._client = client
        self._most = most
        self._described: OrderedDict[bytes, None] = OrderedDict()  # by key, most recent last

    def ordered(self, request: Request, chain: ChunkChain, chunks: range) -> None:
        """Workers were ordered to store these chunks of a request."""
        if chain.root != ROOT:
            return
        step = max(1, _MOST_TOKENS // chain.chunk_size)
        for start in range(chunks.start, chunks.stop, step):
            self._describe(request, chain, start, min(start + step, chunks.stop))

    def found(self, request: Request, chain: ChunkChain, found: int) -> None:
        """A lookup found the first `found` chunks of a prompt."""
        first = 0  # an engine that describes no chunks may have stored these
        while first < found and chain.slice(first, first + 1) in self._described:
            first += 1
        self.ordered(request, chain, range(first, found))

    def restarted(self) -> None:
        """Another server answers, which knows no descriptions."""
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
