"""What a worker's blocks mean, as far as shapes do not say it: who writes them, and, on a CPU, what is written where.

Used by worker.py when it registers its KV; the text becomes part of the layout, so that engines whose text differs do
not share. vLLM's version is no part of it: its CPU attention packs keys and values for an instruction set, and which
one it takes, and how, is up to its code, under one name and with the same shapes (0.31 changed it on ARM). So fixed
keys and values are written into two spare blocks by the very function that writes the real ones, and what arrives there
is hashed. Invariant: no byte of the engine's own KV is written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from blake3 import blake3
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.logger import init_logger

from kvdepot.integrations.vllm.versions import installed_release

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["describe_writers"]

log = init_logger(__name__)

_BLOCKS = 2
_LARGEST = 128
"""Whole numbers up to this are exact in every type of KV, 8-bit floats excepted, which round them alike."""


def describe_writers(vllm_config: VllmConfig, kv_caches: Mapping[str, torch.Tensor]) -> str:
    """The attention backends, the shapes of states, and a hash of what is written on a CPU.

    kv_caches: the rank's layers, as vLLM registers them. Equal on all ranks that hold the same KV, and after a restart.
    """
    names = sorted({backend.get_name() for backend in get_current_attn_backends(vllm_config)})
    layers = vllm_config.compilation_config.static_forward_context
    seen = blake3()
    for name, cache in sorted(kv_caches.items()):
        layer = layers.get(name)
        if hasattr(layer, "get_state_shape"):
            states = list(zip(layer.get_state_shape(), layer.get_state_dtype(), strict=True))
            seen.update(f"{name} {states}".encode())
        elif layer is not None and cache.device.type == "cpu":
            seen.update(name.encode() + _try_writing(name, layer, vllm_config.model_config.dtype))
    return ",".join([*names, seen.hexdigest()[:16]])


def _try_writing(name: str, layer: Any, dtype: torch.dtype) -> bytes:
    """What the layer writes into spare blocks like its own. A layer that cannot be tried, for whatever reason, shares
    with no other release of vLLM."""
    try:
        spare = torch.zeros((_BLOCKS, *layer.kv_cache.shape[1:]), dtype=layer.kv_cache.dtype)
        _write(layer, spare, dtype)
    except Exception as exc:  # noqa: BLE001 - an engine must not fail by this
        log.warning(
            "kvdepot: cannot probe the block format of %s, so this engine shares KV only with engines of the same vLLM "
            "release: %s: %s",
            name,
            type(exc).__name__,
            exc,
        )
        return installed_release().encode()
    return bytes(spare.flatten().view(torch.uint8).numpy())


def _write(layer: Any, spare: torch.Tensor, dtype: torch.dtype) -> None:
    """Write keys and values of a block and a half. dtype: of the model's activations."""
    slots = torch.arange(spare.shape[-2] * 3 // 2)
    if hasattr(layer, "kv_lora_rank"):
        latent = _numbers((len(slots), layer.kv_lora_rank), dtype)
        rope = _numbers((len(slots), 1, layer.qk_rope_head_dim), dtype)
        layer.impl.do_kv_cache_update(latent, rope, spare, slots, layer.kv_cache_dtype, layer._k_scale)
    else:
        keys = _numbers((len(slots), layer.num_kv_heads, layer.head_size), dtype)
        layer.impl.do_kv_cache_update(layer, keys, -keys, spare, slots)


def _numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Fixed numbers, each unlike its neighbours."""
    count = torch.arange(math.prod(shape))
    return (count * 7919 % (2 * _LARGEST + 1) - _LARGEST).reshape(shape).to(dtype)
