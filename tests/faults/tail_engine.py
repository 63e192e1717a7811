"""An engine of a model with states, whose prompts are whole chunks and a tail; killed by tests, as the toy engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import zmq
from blake3 import blake3

from kvdepot.client.scheduler import Cached, Pending
from kvdepot.client.transfer import GroupSpec, PromptChunks, ShardSpec, Transfer, pack_block_ids
from kvdepot.keys import ROOT, ChunkChain
from kvdepot.protocol import wire
from tests.client.engine import NativeEngine
from tests.conftest import eventually

TOKENS, CHUNKS = 64, 2
"""Tokens of a chunk, and whole chunks before each tail."""
SPEC = ShardSpec("tails", 1, 0, TOKENS, 1, (GroupSpec(0, 1), GroupSpec(1, 1)))
_PROMPT = list(range((CHUNKS + 1) * TOKENS))


class TailEngine:
    """One engine of full attention and a state. Its tails, by their tokens, follow the same whole chunks."""

    def __init__(self, url: str, widths: list[int]) -> None:
        """widths: bytes of a block, by group."""
        self.caches = [torch.zeros((8, 1, width), dtype=torch.uint8) for width in widths]
        place: Any = SimpleNamespace(url=url, context=zmq.Context())
        self.native = NativeEngine(place, SPEC, self.caches)
        self.worker = self.native.worker
        self.chain = ChunkChain(TOKENS, ROOT)
        self.chain.extend(_PROMPT[: CHUNKS * TOKENS])

    def key(self, tokens: int) -> bytes:
        return self.chain.tail(_PROMPT, CHUNKS * TOKENS + tokens)

    def _bytes(self, group: int, key: bytes) -> torch.Tensor:
        piece = torch.frombuffer(bytearray(blake3(key + bytes([group])).digest(4096)), dtype=torch.uint8)
        return piece.repeat(self.caches[group].shape[-1] // 4096)

    def _part(self, name: str, group: int, key: bytes, number: int, continues: bytes = b"") -> Transfer:
        """One chunk's part in block `number`; a chunk behind the whole ones is a tail."""
        place = self.chain.parent(number), number
        return Transfer(name, *place, key, pack_block_ids([number]), group=group, continues=continues)

    def _written(self, name: str, group: int, key: bytes, number: int, continues: bytes = b"") -> Transfer:
        self.caches[group][number] = self._bytes(group, key)
        return self._part(name, group, key, number, continues)

    def store_whole(self) -> None:
        """Store the chunks before the tails, and the state behind them."""
        parts = [(group, i) for group in range(2) for i in range(CHUNKS) if not group or i == CHUNKS - 1]
        self.native.store([self._written("whole", group, self.chain.slice(i, i + 1), i) for group, i in parts])

    def begin_store(self, tokens: int, continues: int = 0) -> str:
        """Store a tail's parts, one message for each group."""
        name, before = f"{tokens}", self.key(continues) if continues else b""
        parts = [self._written(name, group, self.key(tokens), CHUNKS, before) for group in range(2)]
        self.worker.submit_store([name], parts, None)
        return name

    def end_store(self, request_id: str) -> bool:
        """Wait for a tail's store; returns whether it arrived."""
        dropped = self.worker.counters["stores_dropped"]
        eventually(lambda: request_id in self.worker.poll({request_id}).stored)
        return self.worker.counters["stores_dropped"] == dropped

    def store(self, tokens: int, continues: int = 0) -> bool:
        return self.end_store(self.begin_store(tokens, continues))

    def under_way(self) -> list[str]:
        self.worker.client.pump()
        return [name for name, stores in self.worker.store_futures.items() if not all(each.done() for each in stores)]

    def found(self, tails: list[int]) -> int:
        """Look up the prompt with these tails, load the end of what is found and check it; returns its tokens."""
        scheduler, name = self.native.scheduler, "lookup"
        named = tuple(wire.Tail(CHUNKS, self.key(tokens)) for tokens in tails)
        scheduler.submit(name, PromptChunks(SPEC, bytes(self.chain.hashes), b"", True, named), 1)
        eventually(lambda: not isinstance(scheduler.wait_lookup(name, 1.0), Pending))
        outcome = scheduler.check_lookup(name)
        assert isinstance(outcome, Cached)
        number = outcome.tokens // TOKENS - (outcome.tail is None)
        if number >= 0:
            key = self.chain.slice(number, number + 1) if outcome.tail is None else self.key(tails[outcome.tail])
            assert self.native.retrieve([self._part(name, group, key, number) for group in range(2)]) == set()
            assert all(torch.equal(self.caches[group][number, 0], self._bytes(group, key)) for group in range(2))
        scheduler.forget_lookup(name)
        scheduler.end_session(name)
        return outcome.tokens if outcome.tail is None else outcome.tokens + tails[outcome.tail]
