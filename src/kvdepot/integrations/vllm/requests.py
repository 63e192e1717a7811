"""One request: the hashes of its chunks, from its tokens, images and audio, and its progress.

Used by scheduler.py. lora.py adds the request's cache salt and LoRA adapter to them; facts that are fixed for an engine
are in identity.py.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from random import random
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from msgspec.structs import astuple

from kvdepot.client.reuse import NOTHING_REUSED, Reuse
from kvdepot.client.transfer import Transfer, pack_block_ids
from kvdepot.integrations.vllm.hints import NO_HINTS, Hints
from kvdepot.integrations.vllm.messages import Terms
from kvdepot.integrations.vllm.phases import NEXT, RequestPhase
from kvdepot.integrations.vllm.plan import Piece
from kvdepot.protocol import wire
from kvdepot.protocol.keys import ChunkChain, salt_tag

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


def names_are_contents(vllm_config: VllmConfig) -> bool:
    """Whether vLLM names images and audio by a hash of their contents, or as the caller does (`multi_modal_uuids`).

    With both of its caches off it numbers them instead, and a number looks like a caller's name.
    """
    multimodal = vllm_config.model_config.multimodal_config
    caches_inputs = multimodal is None or multimodal.mm_processor_cache_gb > 0
    return caches_inputs or bool(vllm_config.cache_config.enable_prefix_caching)


class ChunkRules(NamedTuple):
    """The lengths and names by which an engine cuts prompts into chunks.

    names_contents: whether images and audio are named by their contents. If not, chunks end before the first one.
    lookahead: number of tokens behind a chunk that its hash includes, too.
    """

    chunk_tokens: int
    names_contents: bool = True
    lookahead: int = 0


class RequestChunks:
    """A request's chunks, from its current tokens and items: an update of a streaming session may change both."""

    def __init__(self, request: Request, root: bytes, rules: ChunkRules) -> None:
        self._request = request
        self._rules = rules
        self._items: list[tuple[int, bytes]] = []  # the items that are hashed into the chain
        self.chain = ChunkChain(rules.chunk_tokens, root, rules.lookahead)

    def hash(self) -> ChunkChain:
        """The chain of all tokens so far. Raises BadRequest for a bad token id, ValueError for an item's bad name."""
        tokens, chain, items = self._request.all_token_ids, self.chain, self._all_items()
        if items and not self._rules.names_contents:
            tokens = tokens[: min(position for position, _ in items)]
        if [item for item in items if item[0] < chain.covered] != self._items:
            chain = self.chain = ChunkChain(chain.chunk_size, chain.root, chain.lookahead)
        (chain.grow if self._request.streaming_queue is None else chain.extend)(tokens, items)
        self._items = [item for item in items if item[0] < chain.covered]
        return chain

    def _all_items(self) -> list[tuple[int, bytes]]:
        return [(item.mm_position.offset, item.identifier.encode()) for item in self._request.mm_features]

    def tail(self, end: int) -> bytes:
        """The key of the tokens between the last whole chunk before `end` and `end`; the chain must reach that far."""
        return self.chain.tail(self._request.all_token_ids, end, self._all_items())

    def is_named(self, end: int) -> bool:
        """Whether the first `end` tokens have hashes, as all of their items are named by their contents."""
        return self._rules.names_contents or all(position >= end for position, _ in self._all_items())


class PromptEnd(NamedTuple):
    """The end of a prefix within a chunk. tokens: number of tokens from the prompt's start. chunks: number of whole
    chunks before the end. key: the key of the tokens that are in no whole chunk.
    """

    tokens: int
    chunks: int
    key: bytes


Report: TypeAlias = tuple[int, float, wire.Asked, tuple[int, int]]
"""The arguments of `SchedulerClient.end_session` for a request."""


class Promise(NamedTuple):
    """The load that the answer to a request's lookup allows. local_tokens: number of tokens in the engine's own cache.
    tail: the tail at which the load ends; None: it ends with a whole chunk. writers: writers whose chunks may be
    loaded; empty: any. is_unproven: whether the first step that computes is to prove the load. held: places of chunks
    to load within the step that is being scheduled; None: the lane loads them."""

    local_tokens: int = 0
    tail: PromptEnd | None = None
    writers: tuple[str, ...] = ()
    is_unproven: bool = False
    held: wire.Places | None = None


NO_PROMISE = Promise()


@dataclass
class RequestLoad:
    """Chunks of a request that workers load, and afterwards what is to be proved of them."""

    blocks: frozenset[int]
    """The blocks that it fills."""
    tokens: int
    """Tokens that the request does not compute because of the load."""
    end: int
    """The tokens from the prompt's start to the load's end."""
    is_unproven: bool = False
    """Whether the step that begins to compute is to prove it."""
    step: int = 0
    """The step that copies or proves it."""
    has_failed: bool = False
    """Whether the load has failed on some rank; the last rank may end its part some steps later."""
    saved: tuple[int, float] = (0, 0.0)
    """Tokens and seconds that were counted as saved by it."""


@dataclass
class Tracked:
    """The scheduler's state of one request."""

    request: Request
    prompt: RequestChunks
    hints: Hints = NO_HINTS
    is_cached: bool = True
    """Whether it is looked up and stored; once False, it stays so."""
    preemptions: int = 0
    phase: RequestPhase = RequestPhase.LOOKING
    waits_since: float = 0.0
    """The time.monotonic() since which it is AWAITED while vLLM has a seat for it; 0.0: not yet."""
    promise: Promise = NO_PROMISE
    load: RequestLoad | None = None
    """The load while the request is LOADING, LOADED, COPYING or PROVING."""
    saved_chunks: int = 0
    """Chunks from the start that are in the depot or being stored."""
    tails: list[PromptEnd] = field(default_factory=list)
    """The tails that were looked up."""
    read_tokens: int | None = None
    """Tokens that it did not compute itself since its blocks were allocated; None until its first step."""
    check: Terms | None = None
    """The terms on which chunks that it computes are compared with the chunks found; None: no comparison."""
    draw: float = field(default_factory=random)
    """A random number that decides whether its hit is sampled: the same each time that vLLM asks."""
    has_pins: bool = False
    """Whether a lookup may have pinned chunks for it."""
    saved_tokens: int = 0
    """Tokens that it did not compute because of loads, and that are not reported yet."""
    saved_s: float = 0.0
    offered: wire.Asked | None = None
    """The tokens of the latest answer to vLLM, until vLLM schedules the request."""
    asked: wire.Asked = wire.NOTHING_ASKED
    """Tokens that it asked for each time it was scheduled, not reported yet."""
    reuse: Reuse | None = None
    """The sums of its reports; None: it was never scheduled with an answer of the depot."""
    copied: tuple[int, int] = (0, 0)
    """Shards that it has loaded within steps, not reported yet, and their bytes."""
    stores_open: bool = False
    """Whether a worker stores its blocks, or may yet."""
    has_stored_output: bool = False
    """Whether chunks with decoded tokens were given to workers to store."""

    def enter(self, phase: RequestPhase) -> None:
        """Change the phase. Raises KeyError for a change that the table lacks."""
        if phase is not self.phase:
            if phase not in NEXT[self.phase]:
                raise KeyError(f"request {self.request.request_id[:64]!r}: {self.phase} is followed by {phase}")
            self.phase = phase

    @property
    def salt(self) -> bytes:
        return salt_tag(self.request.cache_salt or "")

    def count_asked(self) -> None:
        """Count the tokens of the latest answer to vLLM, as vLLM schedules the request with them."""
        if self.offered is not None:
            before, new = self.asked, self.offered
            sums = zip(astuple(before), astuple(new), strict=True)
            self.asked = wire.Asked(*(one + other for one, other in sums))
            self.reuse = self.reuse or NOTHING_REUSED
            self.offered = None

    def take_report(self) -> Report:
        """The tokens and seconds saved, what was asked, and what was copied within steps, since the last call."""
        report = self.saved_tokens, self.saved_s, self.asked, self.copied
        if self.reuse is not None:
            self.reuse += Reuse(self.asked.found, self.saved_tokens, self.asked.compared, self.saved_s)
        self.saved_tokens, self.saved_s, self.asked, self.copied = 0, 0.0, wire.NOTHING_ASKED, (0, 0)
        return report

    def unsaved_chunks(self, end: int) -> range:
        """The chunks up to `end` that are neither in the depot nor being stored, as far as they have hashes."""
        chain = self.prompt.chain
        if end > len(chain) or self.request.streaming_queue is not None:
            before = chain.parent(self.saved_chunks)
            chain = self.prompt.hash()
            if chain.parent(self.saved_chunks) != before:
                self.saved_chunks = 0  # an update of its streaming session has replaced tokens
        return range(self.saved_chunks, min(end, len(chain)))

    def decoded_hashes(self) -> bytes:
        """The hashes of the chunks that it decoded, at least in part; empty if it is not cached, or hashes fail."""
        request, chain = self.request, self.prompt.chain
        first, end = request.num_prompt_tokens // chain.chunk_size, (request.num_tokens - 1) // chain.chunk_size
        if end <= first or not (self.is_cached and self.hints.stores):
            return b""
        with suppress(Exception):  # errors in a caller's tokens or items must never end the engine
            chain = self.prompt.hash()
        return chain.slice(first, end)

    def transfer(self, piece: Piece, tail: bytes = b"", continues: bytes = b"") -> Transfer:
        """Chunks of one KV cache group and their blocks. tail: the key of the last one, if it is a tail. continues: see
        wire.Shards."""
        chain = self.prompt.chain
        hashes = chain.slice(piece.first, piece.end - 1) + tail if tail else chain.slice(piece.first, piece.end)
        return Transfer(
            self.request.request_id, chain.parent(piece.first), piece.first, hashes, pack_block_ids(piece.blocks),
            piece.skip, self.salt, piece.group, continues,
        )  # fmt: skip
