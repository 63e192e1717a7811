"""One request: what besides its tokens determines its KV (cache salt, LoRA adapter, images, audio), and its progress.

Used by scheduler.py. What is fixed for an engine is in identity.py.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

from kvdepot.client.transfer import Transfer, pack_block_ids
from kvdepot.integrations.vllm.hints import NO_HINTS, Hints
from kvdepot.integrations.vllm.lora import Adapters
from kvdepot.integrations.vllm.plan import Piece
from kvdepot.protocol import wire
from kvdepot.protocol.keys import ChunkChain, derive_root, salt_tag

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

__all__ = ["Load", "Prompt", "Roots", "Tracked", "names_are_contents"]

log = logging.getLogger(__name__)

_Parts: TypeAlias = "tuple[tuple[str, str], ...]"
_MOST_OWNERS = 65536
"""Keys of vLLM's own cache that are remembered, the last ones used. It has no blocks of a key for long that this many
others have been used after."""


def names_are_contents(vllm_config: VllmConfig) -> bool:
    """Whether vLLM names images and audio by a hash of their contents, or as the caller does (`multi_modal_uuids`).

    With both of its caches off it numbers them instead, and a number looks like a caller's name.
    """
    multimodal = vllm_config.model_config.multimodal_config
    caches_inputs = multimodal is None or multimodal.mm_processor_cache_gb > 0
    return caches_inputs or bool(vllm_config.cache_config.enable_prefix_caching)


class Roots:
    """The parents of requests' first chunks, from their cache salt and LoRA adapter, and which requests have none.

    vLLM's own prefix cache may hand a request blocks that another one computed. Its key says less than ours: up to vLLM
    0.30 the name of an adapter, which may also be a salt, and since then its path, but never its files. So with
    adapters, each of its keys must stand for one of ours as long as this engine runs, whether or not it has a server.
    From the second one on, requests are not cached: they may read, and compute from, what belongs to the first.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.adapters = Adapters()
        self.epoch = ""
        """Names weights that only this engine has; empty for those on disk."""
        has_both = vllm_config.lora_config is not None and bool(vllm_config.cache_config.enable_prefix_caching)
        self._owners: OrderedDict[tuple[Any, ...], _Parts | None] | None = OrderedDict() if has_both else None

    def __repr__(self) -> str:
        return f"<Roots {self.adapters!r}>"

    def root(self, request: Request) -> bytes | None:
        """Parent of the request's first chunk; None if it must not be cached.

        Raises OSError for an adapter that cannot be read, ValueError for a name that is not valid text.
        """
        parts = None
        try:
            parts = self._parts(request)
        finally:
            is_owner = self._is_owner(request, parts)
        if parts is None or not is_owner:
            return None
        return derive_root(*([("epoch", self.epoch)] if self.epoch else []), *parts)

    def _parts(self, request: Request) -> _Parts | None:
        salt = (("salt", request.cache_salt),) if request.cache_salt else ()
        if request.lora_request is None:
            return salt
        adapter = self.adapters.parts(request.lora_request)
        return None if adapter is None else salt + adapter

    def _is_owner(self, request: Request, parts: _Parts | None) -> bool:
        """Whether all that vLLM's own cache has under this request's key was computed with these parts."""
        if self._owners is None:
            return True
        key = generate_block_hash_extra_keys(request, 0, 1, 0)[0] or ()
        owner = self._owners.setdefault(key, parts)
        if owner is not None and owner != parts:
            log.warning(
                "requests with the LoRA adapter or cache salt %r are not cached until this engine is restarted: vLLM's "
                "own prefix cache takes them for those with another adapter. Give each version of an adapter a name "
                "and a folder of its own",
                request.lora_request.lora_name if request.lora_request is not None else request.cache_salt,
            )
            owner = self._owners[key] = None
        self._owners.move_to_end(key)
        if len(self._owners) > _MOST_OWNERS:
            self._owners.popitem(last=False)
        return owner is not None


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
