"""Engines whose chunks other front ends read and write, under the name in `kvdepot.share_as`.

process.py calls it: in the scheduler and in each worker for the namespace, in the worker for the format of its blocks.
The engine copies as always; only the names of its model and layout differ. Invariants: two engines of one such
namespace may have other configurations and weights, for which the user vouches, but not another release, processor or
environment, on which the format depends; no byte of the engine's own KV is written.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, iter_layer_specs

from kvdepot.devices import share
from kvdepot.integrations.shared_layout import BlockFormat, find_format, refusal, shared_name
from kvdepot.integrations.vllm.environment import describe_environment, platform_facts
from kvdepot.integrations.vllm.groups import describe_groups
from kvdepot.integrations.vllm.versions import installed_release

if TYPE_CHECKING:
    import numpy.typing as npt
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvdepot.protocol.layout import Layout

_BASE = 128
"""Whole numbers up to this are exact in every type of KV that is shared."""


def shared_namespace(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, name: str) -> str:
    """The engine's namespace under a shared name, equal in all its processes. Raises ConfigError, and says why, for an
    engine that cannot share."""
    _refuse_unshared(vllm_config, kv_cache_config)
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    facts = [
        str(model.dtype),
        [model.get_total_num_hidden_layers(), model.get_num_kv_heads(parallel), model.get_head_size()],
        installed_release(),
        platform_facts(),
        describe_environment(),
        describe_groups(kv_cache_config),
        vllm_config.cache_config.kv_cache_layout,
    ]
    return shared_name(name, facts)


def _refuse_unshared(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size * parallel.decode_context_parallel_size
    if ranks > 1:
        raise refusal(f"each of its {ranks} ranks has a part of the KV only, and chunks are shared whole")
    if vllm_config.speculative_config is not None:
        raise refusal("speculative decoding adds the KV of a drafter, or keys that depend on later tokens")
    groups = kv_cache_config.kv_cache_groups
    specs = [spec for group in groups for spec in iter_layer_specs(group.kv_cache_spec)]
    kinds = {type(spec) for spec in specs}
    if len(groups) != 1 or kinds != {FullAttentionSpec}:
        named = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise refusal(f"full attention in all layers is shared, and this model has {len(groups)} groups of {named}")
    dtype = vllm_config.model_config.dtype
    if any(getattr(spec, "dtype", None) != dtype for spec in specs):
        raise refusal(f"its KV is quantized, and keys and values are shared as the model computes them ({dtype})")


def describe_blocks(vllm_config: VllmConfig, kv_caches: dict[str, torch.Tensor], layout: Layout) -> BlockFormat:
    """The format of a worker's blocks. layout: of `kv_caches`. Raises ConfigError if it cannot be described."""
    layers = vllm_config.compilation_config.static_forward_context
    numbers = {name: re.findall(r"\.(\d+)\.", name) for name in kv_caches}
    names = sorted(kv_caches, key=lambda name: list(map(int, numbers[name])))
    if [numbers[name] for name in names] != [[str(i)] for i in range(len(names))]:
        raise refusal(f"the names of its layers do not number them: {', '.join(names[:4])}")
    dtype, starts = vllm_config.model_config.dtype, []
    first: npt.NDArray[np.int64] | None = None
    for name in names:
        try:
            ids = _write_numbers(layers[name], kv_caches[name], layout.num_blocks, dtype)
        except Exception as exc:
            raise refusal(f"the order of values in {name} cannot be probed ({type(exc).__name__}: {exc})") from exc
        shape = 2, ids.shape[0] * ids.shape[-2], layers[name].num_kv_heads, layers[name].head_size
        places = _find_places(name, kv_caches[name], ids, layout).reshape(shape)
        starts.append(int(places.min()))
        first = places if first is None else first
        if not np.array_equal(places - starts[-1], first - starts[0]):
            raise refusal(f"{name} has its values in another order than {names[0]}")
    assert first is not None
    segment = layout.segments[0].size // dtype.itemsize
    return find_format(str(dtype).removeprefix("torch."), first - starts[0], [at - starts[0] for at in starts], segment)


def _write_numbers(
    layer: AttentionLayerBase, cache: torch.Tensor, num_blocks: int, dtype: torch.dtype
) -> npt.NDArray[np.int64]:
    """The number of the key or value that the layer writes to each place of a block, which may be several of a kernel.

    Keys and values are numbered together, in the order `[tokens, heads, dims]`. A type of few exact numbers takes
    several writes, each of a digit.
    """
    blocks = cache.shape[0] // num_blocks
    spare = torch.empty_strided((blocks, *cache.shape[1:]), cache.stride(), dtype=cache.dtype, device=cache.device)
    slots = torch.arange(blocks * cache.shape[-2], device=cache.device)
    shape = 2, len(slots), layer.num_kv_heads, layer.head_size
    numbers = torch.arange(math.prod(shape), device=cache.device).reshape(shape)
    found = torch.zeros(spare.shape, dtype=torch.int64)
    for digit in range(math.ceil(math.log(numbers.numel(), _BASE))):
        keys, values = (numbers // _BASE**digit % _BASE + 1).to(dtype)
        layer.impl.do_kv_cache_update(layer, keys, values, spare.zero_(), slots)
        found += (spare.cpu().long() - 1) * _BASE**digit
    ids: npt.NDArray[np.int64] = found.numpy()
    return ids


def _find_places(name: str, cache: torch.Tensor, ids: npt.NDArray[np.int64], layout: Layout) -> npt.NDArray[np.int64]:
    """The places of all keys and values in a block, in the order of their numbers. ids: the number at each place.

    Raises ConfigError unless each is found exactly once.
    """
    sizes = {segment.size for segment in layout.segments}
    if len(sizes) != 1:
        raise refusal(f"the segments of its blocks have {len(sizes)} sizes")
    size, view = sizes.pop(), share(cache, name)
    address = np.full(ids.shape, view.offset)
    for axis, length in enumerate(ids.shape):
        address += view.strides[axis] * np.arange(length).reshape([-1 if i == axis else 1 for i in range(ids.ndim)])
    own = [i for i, each in enumerate(layout.segments) if layout.mappings[each.mapping].name == view.mapping]
    own.sort(key=lambda i: layout.segments[i].offset)
    offsets = np.array([layout.segments[i].offset for i in own])
    at = np.searchsorted(offsets, address, "right") - 1
    places = np.empty(ids.size, np.int64)
    if not np.array_equal(np.sort(ids, axis=None), np.arange(ids.size)):
        raise refusal(f"{name} does not keep each key and value once, as it was written")
    places[ids.reshape(-1)] = ((np.array(own)[at] * size + address - offsets[at]) // view.item_bytes).reshape(-1)
    return places
