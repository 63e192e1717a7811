"""What changes a request's KV beside its tokens: cache salt, LoRA adapter, images and audio.

KVDepotConnector (vllm.py) calls it in the scheduler. What is fixed for an engine is in vllm_identity.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdepot.integrations.weight_files import find_weights
from kvdepot.keys import derive_root

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["extras", "root"]


def root(request: Request) -> bytes:
    """Parent of the request's first chunk: its cache salt and LoRA adapter."""
    parts = []
    if request.cache_salt:
        parts.append(("salt", request.cache_salt))
    lora = request.lora_request
    if lora is not None:
        parts.append(("lora", lora.lora_name))
        found = find_weights(lora.lora_path)
        parts.append(("lora path", f"{lora.lora_path} {found.digest if found else ''}"))
    return derive_root(*parts)


def extras(request: Request) -> list[tuple[int, bytes]]:
    """Where images, audio and the like begin, and their full hashes."""
    return [(item.mm_position.offset, item.identifier.encode()) for item in request.mm_features]
