"""A worker's extension with which vLLM's attention on CPUs takes one more layout: all layers of a block side by side.

Its kernels read it, by strides, and give the same bits; vLLM only does not declare it. An engine gets it by
`worker_extension_cls`; its workers say which layouts they support, and vLLM takes one of those.
"""

from __future__ import annotations

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_layout import KVCacheLayout


class BlockMajor:
    """Methods of the worker: none."""


def _layouts(cls: type[CPUAttentionBackend]) -> tuple[KVCacheLayout, ...]:
    return KVCacheLayout.LBHNC, KVCacheLayout.BLHNC


CPUAttentionBackend.supported_kv_cache_layouts = classmethod(_layouts)  # type: ignore[method-assign,assignment]
