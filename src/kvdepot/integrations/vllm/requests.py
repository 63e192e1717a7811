"""One request: what besides its tokens determines its KV (cache salt, LoRA adapter, images, audio), and its progress.

Used by scheduler.py. What is fixed for an engine is in identity.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdepot.client.transfer import Transfer, pack_block_ids
from kvdepot.integrations.vllm.hints import NO_HINTS, Hints
from kvdepot.integrations.vllm.lora import Adapters
from kvdepot.integrations.vllm.plan import Piece
from kvdepot.protocol import wire
from kvdepot.protocol.keys import ChunkChain, derive_root, salt_tag

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

__all__ = ["Load", "Prompt", "Tracked", "names_are_contents", "root"]


def names_are_contents(vllm_config: VllmConfig) -> bool:
    """Whether vLLM names images and audio by a hash of their contents, or as the caller does (`multi_modal_uuids`).

    With both of its caches off it numbers them instead, and a number looks like a caller's name.
    """
    multimodal = vllm_config.model_config.multimodal_config
    caches_inputs = multimodal is None or multimodal.mm_processor_cache_gb > 0
    return caches_inputs or bool(vllm_config.cache_config.enable_prefix_caching)


def root(request: Request, adapters: Adapters, epoch: str = "") -> bytes | None:
    """Parent of the request's first chunk, from its cache salt and LoRA adapter; None if it must not be cached.

    epoch: names weights that only this engine has; may be empty. Raises OSError for an adapter that cannot be read,
    ValueError for a name that is not valid text.
    """
    parts = []
    if epoch:
        parts.append(("epoch", epoch))
    if request.cache_salt:
        parts.append(("salt", request.cache_salt))
    if request.lora_request is not None:
        adapter = adapters.parts(request.lora_request)
        if adapter is None:
            return None
        parts += adapter
    return derive_root(*parts)


class Prompt:
    """A request's chunks, from its current tokens and items: an update of a streaming session may change both.

    named: whether items are named by their contents. If not, chunks end before the first item. lookahead: as of
    `ChunkChain`.
    """

    def __init__(self, request: Request, chunk_size: int, root: bytes, named: bool, lookahead: int = 0) -> None:
        self._request = request
        self._named = named
        self._items: list[tuple[int, bytes]] = []  # hashed into the chain
        self.chain = ChunkChain(chunk_size, root, lookahead)

    def __repr__(self) -> str:
        return f"<Prompt {self._request.request_id} {len(self.chain)} chunks>"

    def hash(self) -> ChunkChain:
        """The chain of all tokens so far. Raises BadRequest for a bad token id, ValueError for an item's bad name."""
        tokens, chain = self._request.all_token_ids, self.chain
        items = [(item.mm_position.offset, item.identifier.encode()) for item in self._request.mm_features]
        if items and not self._named:
            tokens = tokens[: min(position for position, _ in items)]
        if [item for item in items if item[0] < chain.covered] != self._items:
            chain = self.chain = ChunkChain(chain.chunk_size, chain.root, chain.lookahead)
        chain.extend(tokens, items)
        self._items = [item for item in items if item[0] < chain.covered]
        return chain


@dataclass
class Load:
    """Chunks of a request that workers will load or are loading."""

    transfers: list[Transfer]
    """One per KV cache group that needs any."""
    blocks: frozenset[int]
    """The blocks that it fills."""
    tokens: int
    has_failed: bool = False
    """On some rank; the last rank may end it some steps later."""


@dataclass
class Tracked:
    """The scheduler's state of one request."""

    request: Request
    prompt: Prompt
    hints: Hints = NO_HINTS
    is_cached: bool = True
    """If not, it is neither looked up nor stored any more."""
    preemptions: int = 0
    local_tokens: int = 0
    """In the engine's own cache, when vLLM last asked for matched tokens."""
    saved_chunks: int = 0
    """Chunks from the start that are in the depot or being stored."""
    read_tokens: int | None = None
    """Tokens that it did not compute itself since its blocks were allocated; None until its first step."""
    may_load: bool = True
    load: Load | None = None
    """The load that has not ended."""
    has_pins: bool = False
    """A lookup may have pinned chunks for it."""
    saved_tokens: int = 0
    """Tokens that loads saved it from computing, not reported yet."""
    saved_s: float = 0.0
    offered: wire.Asked | None = None
    """What it was last told about its tokens, until vLLM schedules it."""
    asked: wire.Asked = wire.NOTHING_ASKED
    """What it asked for each time it was scheduled, not reported yet."""
    stores_open: bool = False
    """Whether a worker stores its blocks, or may yet."""

    @property
    def salt(self) -> bytes:
        """The tag of its cache salt on the wire."""
        return salt_tag(self.request.cache_salt or "")

    def count_asked(self) -> None:
        """Count what it was last told about its tokens: vLLM schedules it with that."""
        if self.offered is not None:
            before, new = self.asked, self.offered
            self.asked = wire.Asked(before.tokens + new.tokens, before.found + new.found, before.own + new.own)
            self.offered = None

    def take_report(self) -> tuple[int, float, wire.Asked]:
        """The tokens and seconds saved, and what was asked, since the last call."""
        report = self.saved_tokens, self.saved_s, self.asked
        self.saved_tokens, self.saved_s, self.asked = 0, 0.0, wire.NOTHING_ASKED
        return report

    def transfer(self, piece: Piece, is_traced: bool = False) -> Transfer:
        """Chunks of one KV cache group and their blocks. is_traced: with the request's trace headers."""
        request, chain = self.request, self.prompt.chain
        headers = dict(request.trace_headers) if is_traced and request.trace_headers else None
        return Transfer(
            request.request_id, chain.parent(piece.first), piece.first, chain.slice(piece.first, piece.end),
            pack_block_ids(piece.blocks), piece.skip, self.salt, headers, piece.group,
        )  # fmt: skip
