"""What changes a request's KV beside its tokens: cache salt, LoRA adapter, images and audio.

KVDepotConnector (vllm.py) calls it in the scheduler. What is fixed for an engine is in identity.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdepot.integrations.vllm.lora import Adapters
from kvdepot.protocol.keys import ChunkChain, derive_root

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

__all__ = ["Prompt", "names_are_contents", "root"]


def names_are_contents(vllm_config: VllmConfig) -> bool:
    """Whether vLLM names images and audio by a hash of their contents, or as the caller does (`multi_modal_uuids`).

    With both of its caches off it computes no hash, and counts; a counter looks like a caller's name.
    """
    multimodal = vllm_config.model_config.multimodal_config
    caches_inputs = multimodal is None or multimodal.mm_processor_cache_gb > 0
    return caches_inputs or bool(vllm_config.cache_config.enable_prefix_caching)


def root(request: Request, adapters: Adapters, epoch: str = "") -> bytes | None:
    """Parent of the request's first chunk: its cache salt and LoRA adapter; None where it must not be cached.

    epoch: of weights that only this engine has. Raises OSError for an adapter that cannot be read, ValueError for a
    name that is no text.
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
    """A request's chunks, by what its tokens and items are now: an update of a streaming session may change both.

    named: whether items have the names of their contents. Where not, chunks end before the first item.
    """

    def __init__(self, request: Request, chunk_size: int, root: bytes, named: bool) -> None:
        self._request = request
        self._named = named
        self._items: list[tuple[int, bytes]] = []  # that are hashed into the chain
        self.chain = ChunkChain(chunk_size, root)

    def __repr__(self) -> str:
        return f"<Prompt {self._request.request_id} {len(self.chain)} chunks>"

    def hash(self) -> ChunkChain:
        """The chain of all tokens so far. Raises BadRequest for what is no token id, ValueError for an item's name."""
        tokens, size = self._request.all_token_ids, self.chain.chunk_size
        items = [(item.mm_position.offset, item.identifier.encode()) for item in self._request.mm_features]
        if items and not self._named:
            tokens = tokens[: min(position for position, _ in items)]
        end = len(self.chain) * size
        if [item for item in items if item[0] < end] != self._items:
            self.chain = ChunkChain(size, self.chain.root)
        self.chain.extend(tokens, items)
        end = len(self.chain) * size
        self._items = [item for item in items if item[0] < end]
        return self.chain
