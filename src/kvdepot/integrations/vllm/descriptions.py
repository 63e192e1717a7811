"""What the depot publishes to routers on this engine's behalf: the token ids of chunks, which only engines know.

Used by scheduler.py if the engine names a topic and its server publishes KV events under topics. The server takes token
ids only of prompts that depend on their tokens alone: without a cache salt, a LoRA adapter or private weights, and up
to the first image. The other way is events.py: there the engine publishes what it knows of the depot itself.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from kvdepot.client.scheduler import SchedulerClient
from kvdepot.protocol.keys import ROOT, ChunkChain, pack_ids

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["Descriptions"]

_MOST_TOLD = 1 << 16
_MOST_TOKENS = 1 << 16
"""In one message, which has 256 KiB then."""


class Descriptions:
    """Describes chunks to the server, each when it is stored, and when it is found for the first time."""

    def __init__(self, client: SchedulerClient, most: int = _MOST_TOLD) -> None:
        """most: chunks that are not described again when they are found again."""
        self._client = client
        self._most = most
        self._told: OrderedDict[bytes, None] = OrderedDict()  # by key, most recent last

    def __repr__(self) -> str:
        return f"<Descriptions of {len(self._told)} chunks>"

    def stored(self, request: Request, chain: ChunkChain, first: int, end: int) -> None:
        """Chunks `[first, end)` of a request will be stored."""
        if chain.root != ROOT:
            return
        step = max(1, _MOST_TOKENS // chain.chunk_size)
        for start in range(first, end, step):
            self._describe(request, chain, start, min(start + step, end))

    def found(self, request: Request, chain: ChunkChain, found: int) -> None:
        """A lookup has found the first `found` chunks of a prompt, perhaps stored by an engine that describes none."""
        first = 0
        while first < found and chain.slice(first, first + 1) in self._told:
            first += 1
        self.stored(request, chain, first, found)

    def restarted(self) -> None:
        """Another server answers, which knows no descriptions."""
        self._told.clear()

    def _describe(self, request: Request, chain: ChunkChain, first: int, end: int) -> None:
        size = chain.chunk_size
        tokens = pack_ids(request.all_token_ids[first * size : end * size + chain.lookahead], "token ids")
        self._client.describe(chain.parent(first), chain.slice(first, end), tokens)
        for i in range(first, end):
            key = chain.slice(i, i + 1)
            self._told[key] = None
            self._told.move_to_end(key)
        while len(self._told) > self._most:
            self._told.popitem(last=False)
