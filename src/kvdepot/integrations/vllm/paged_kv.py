"""A worker's paged KV: how its blocks are described, so that they can be copied and compared with others'.

connector.py calls it. Every release that is served (versions.py) settles the layout in the engine core, once, for all
workers and KV cache groups; it is part of the namespace (identity.py).

Shapes do not say which code writes a block or, on a CPU, in which order. vLLM's CPU attention packs keys and values for
an instruction set that it chooses, under one name and with the same shapes. (0.31 changed it on ARM.) So fixed keys and
values are written into two spare blocks by the very function that writes the real ones, and a hash of the bytes that
arrive there is part of the described type of elements: engines with different hashes do not share KV. vLLM's version is
no part of the hash. Invariant: no byte of the engine's own KV is written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from blake3 import blake3
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.logger import init_logger

from kvdepot.devices import describe
from kvdepot.errors import ConfigError
from kvdepot.integrations.vllm.groups import CacheGroup
from kvdepot.integrations.vllm.versions import installed_release
from kvdepot.protocol.layout import Layout, build_layout

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = init_logger(__name__)

_EIGHT_BITS = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""The data types of KV that vLLM keeps as bytes."""
_SPARE_BLOCKS = 2
_LARGEST = 128
"""Whole numbers up to this are exact in every type of KV, 8-bit floats excepted, which round them alike."""


def describe_paged_kv(
    vllm_config: VllmConfig, groups: Sequence[CacheGroup], kv_caches: dict[str, torch.Tensor], num_blocks: int
) -> list[Layout]:
    """Describe the paged KV by KV cache group. num_blocks: the number of blocks of each group. Raises ConfigError,
    LayoutError."""
    writers = _describe_writers(vllm_config, kv_caches)
    numbers = {name: _number_types(vllm_config, name, cache, num_blocks) for name, cache in kv_caches.items()}
    return [describe_kv(_of_group(kv_caches, group), num_blocks, writers, numbers) for group in groups]


def _number_types(
    vllm_config: VllmConfig, name: str, cache: torch.Tensor, num_blocks: int
) -> tuple[tuple[str, int], ...]:
    """The data types of a block's bytes (layout.TensorView), where the tensor's own type does not tell them."""
    layer = vllm_config.compilation_config.static_forward_context.get(name)
    if hasattr(layer, "get_state_shape"):
        if vllm_config.speculative_config is not None:
            return (("unknown", 0),)  # blocks with room for drafts may hold leftovers of any type
        states = zip(layer.get_state_shape(), layer.get_state_dtype(), strict=True)
        parts = [(str(dtype).removeprefix("torch."), math.prod(shape) * dtype.itemsize) for shape, dtype in states]
        rest = cache[0].nbytes * cache.shape[0] // num_blocks - sum(size for _, size in parts)
        return (*parts, ("padding", rest)) if rest > 0 else tuple(parts)
    if cache.dtype is torch.uint8:
        return ((_EIGHT_BITS.get(vllm_config.cache_config.cache_dtype, "bytes"), 0),)
    return ()


def _of_group(kv_caches: dict[str, torch.Tensor], group: CacheGroup) -> dict[str, torch.Tensor]:
    """The tensors of one KV cache group. Raises ConfigError if this rank has none."""
    found = {name: kv_caches[name] for name in group.layers if name in kv_caches}
    if not found:
        raise ConfigError(
            f"kvdepot cannot serve KV cache group {group.number} of this model ({group.kind}): this pipeline stage has "
            "none of its layers. Choose another --pipeline-parallel-size"
        )
    return found


def describe_kv(
    kv_caches: dict[str, torch.Tensor],
    num_blocks: int,
    writers: str,
    numbers: Mapping[str, tuple[tuple[str, int], ...]] = MappingProxyType({}),
) -> Layout:
    """Describe vLLM's paged KV. writers: who fills the blocks. numbers: the data types of a block's bytes, by name,
    where tensors do not tell them. Raises ConfigError, LayoutError.

    vLLM's views are [blocks, heads, tokens, content], whatever the order in memory, without the padding of a page.
    Where kernels use smaller blocks, several of those make one of the scheduler's. Layers of several KV cache groups
    are views of the same memory: a block belongs to one group at a time.
    """
    views, seen = [], set()
    for name, cache in kv_caches.items():
        if cache.shape[0] % num_blocks:
            raise ConfigError(f"kvdepot: {name} has shape {list(cache.shape)}, which {num_blocks} blocks do not divide")
        if cache.shape[0] != num_blocks:
            cache = cache.unflatten(0, (num_blocks, -1))
        view = describe(cache, name)
        place = (view.mapping, view.offset, view.shape, view.strides)
        if place in seen:
            continue  # a layer that shares the KV of another
        seen.add(place)
        views.append(view._replace(dtype=f"{view.dtype} {writers}", numbers=numbers.get(name, ())))
    return build_layout(views, [0] * len(views))


# -- what blocks mean


def _describe_writers(vllm_config: VllmConfig, kv_caches: Mapping[str, torch.Tensor]) -> str:
    """The attention backends, the shapes of states and, on a CPU, a hash of the bytes that layers write.

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
    """The bytes that the layer writes into spare blocks of the same form as its own.

    A layer that cannot be tried, for whatever reason, shares with no other release of vLLM.
    """
    try:
        spare = torch.zeros((_SPARE_BLOCKS, *layer.kv_cache.shape[1:]), dtype=layer.kv_cache.dtype)
        _write(layer, spare, dtype)
    except Exception as exc:  # noqa: BLE001 - an engine must not fail by this
        log.warning(
            "kvdepot: cannot probe the block format of %s, so this engine shares KV only with engines of the same vLLM "
            "release: %s: %s", name, type(exc).__name__, exc,
        )  # fmt: skip
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
