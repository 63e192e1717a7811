"""The versions of vLLM that kvdepot serves, and all that differs between them. No other file knows version numbers.

| what | since | before |
|---|---|---|
| `unregister_kv_caches`, `restore_kv_caches`: notices of sleep | 0.33 | none, so sleep mode is refused |
| `CacheHitSource`: external hits have a source | 0.32 | none |
| `KVCacheConfig.kv_tp_replicas`: ranks that hold the same KV heads | 0.31 | every rank stores its own |
| `VllmConfig.num_prefill_lookahead_tokens`: tokens after a position that a drafter reads | 0.31 | computed here |

To serve a new release: look at what it changes in the code that writes KV, in the classes of its configuration
(`NEUTRAL` in fields.py), in the arithmetic of models (`_CORRECTIONS`) and in its environment variables
(environment.py), add it to `KV_FORMATS`, run `make test-versions`, and remove a release at the other end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import vllm

from kvdepot.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

KV_FORMATS: Mapping[str, int] = {"0.30": 1, "0.31": 1, "0.32": 1, "0.33": 1}
"""The releases that are served, each with our number (the compatibility id) for what its code alone decides about the
bytes of KV: what a kernel writes where, for the same configuration, layout and backend. Releases with equal numbers
share KV of keys and values in full precision, on CPUs and CUDA; the rest is shared within a release (identity.py). A
release that changes the bytes of KV gets the next number. On a CPU, paged_kv.py detects such a change by a trial."""

_CORRECTIONS: Mapping[str, Callable[[ModelConfig], bool]] = {
    # 0.30 scales MLA's rotary embedding although the model asks for a factor of 1 (models/deepseek_v2.py and others).
    "0.31": lambda model: model.use_mla and _rope(model).get("attention_factor") == 1.0
}
"""Releases that correct the arithmetic of some models, and which. The KV of these models is shared only among releases
before the correction, and among releases with it."""


def refuse_other_versions(installed: str | None = None) -> None:
    """Raise ConfigError unless the installed vLLM is one that kvdepot serves. installed: for tests."""
    installed = vllm.__version__ if installed is None else installed
    if _release(installed) not in KV_FORMATS:
        oldest, newest = next(iter(KV_FORMATS)), list(KV_FORMATS)[-1]
        raise ConfigError(
            f"kvdepot supports vLLM {oldest} to {newest}, but vLLM {installed} is installed. Install a supported "
            f"version (pip install 'vllm=={newest}.*'), or a version of kvdepot that supports yours (docs/vllm.md)"
        )


def installed_release() -> str:
    """Major and minor number of the installed vLLM."""
    return _release(vllm.__version__)


def _release(version: str) -> str:
    """Major and minor number; empty for a version without them."""
    found = re.match(r"v?(\d+\.\d+)(?!\d)", version)
    return found[1] if found else ""


refuse_other_versions()  # before anything is imported that another version may not have

HOST_HITS: Any = None
"""The source that vLLM's metrics name for tokens from the depot; None: its metrics have no sources."""

if installed_release() not in ("0.30", "0.31"):
    HOST_HITS = import_module("vllm.v1.metrics.cache_hit_source").CacheHitSource.HOST


def corrections(model: ModelConfig) -> list[str]:
    """The corrections that the installed vLLM has, of those that concern this model."""
    releases = list(KV_FORMATS)
    installed = releases.index(installed_release())
    return [since for since, concerns in _CORRECTIONS.items() if releases.index(since) <= installed and concerns(model)]


def _rope(model: ModelConfig) -> Mapping[str, Any]:
    rope: Mapping[str, Any] = getattr(model.hf_text_config, "rope_parameters", None) or {}
    return rope


def notifies_of_sleep() -> bool:
    """Whether vLLM notifies connectors before it frees the KV's memory, and when it has other memory."""
    return installed_release() not in ("0.30", "0.31", "0.32")


def takes_loads_back(vllm_config: VllmConfig) -> bool:
    """Whether vLLM can drop what a step has computed on top of loaded blocks, when that step reports their load as
    failed: not if another step is under way by then (async scheduling, pipelines), nor in runner V2 (its workers go on
    from the tokens that they have computed)."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_load_failure_policy != "recompute":
        return False
    is_ahead = vllm_config.scheduler_config.async_scheduling or vllm_config.parallel_config.pipeline_parallel_size > 1
    return not (is_ahead or vllm_config.use_v2_model_runner or vllm_config.speculative_config is not None)


def tensor_replicas(kv_cache_config: KVCacheConfig) -> int:
    """The number of tensor-parallel ranks that hold the same KV; their shards are stored once."""
    return int(getattr(kv_cache_config, "kv_tp_replicas", 1))


def lookahead_tokens(vllm_config: VllmConfig) -> int:
    """The number of tokens after a position that the KV of its drafter depends on: see `ChunkChain`."""
    if hasattr(vllm_config, "num_prefill_lookahead_tokens"):
        return int(vllm_config.num_prefill_lookahead_tokens)
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.use_eagle():
        return 0
    return int(speculative.num_speculative_tokens if speculative.use_multi_module_mtp() else 1)
