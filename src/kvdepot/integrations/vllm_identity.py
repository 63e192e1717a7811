"""What tells one engine's KV apart from another's, and what of an engine's configuration is refused.

KVDepotConnector (vllm.py) calls it in the scheduler and in every worker when it is made. What differs from request to
request is in vllm_requests.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
from blake3 import blake3
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from kvdepot.config import default_url
from kvdepot.errors import ConfigError
from kvdepot.integrations.weight_files import describe

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["namespace", "read_settings", "refuse_unserved"]

_PREFIX = "kvdepot."
_SETTINGS = {"url": str, "key": str, "save_decode": bool, "weights_revision": str}


def read_settings(extra: dict[str, Any]) -> dict[str, Any]:
    """Our keys of kv_connector_extra_config. Raises ConfigError for unknown ones and wrong types."""
    settings: dict[str, Any] = {"url": default_url(), "key": "", "save_decode": False, "weights_revision": ""}
    for key, value in extra.items():
        name = key.removeprefix(_PREFIX)
        if name == key:
            continue  # somebody else's
        if name not in _SETTINGS:
            raise ConfigError(f"{key} is no setting of kvdepot: there are {', '.join(_PREFIX + s for s in _SETTINGS)}")
        if not isinstance(value, _SETTINGS[name]):
            raise ConfigError(f"{key} is {value!r}, not a {_SETTINGS[name].__name__}")
        settings[name] = value
    return settings


def refuse_unserved(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise ConfigError for what would be cached wrongly or not at all."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise ConfigError(
            f"kvdepot serves models with one KV cache group so far; this one has {len(groups)} "
            f"({kinds}). "
            "Hybrid models (sliding window or state space beside full attention) cannot use KVDepotConnector yet"
        )
    spec = groups[0].kv_cache_spec
    if not isinstance(spec, FullAttentionSpec | MLAAttentionSpec) or getattr(spec, "sliding_window", None):
        raise ConfigError(f"kvdepot serves full attention and MLA so far, not {type(spec).__name__}: {spec}")
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ConfigError(
            "kvdepot does not serve context parallelism yet: ranks would hold different tokens of a block"
        )
    if vllm_config.model_config.enable_sleep_mode:
        raise ConfigError(
            "kvdepot does not serve sleep mode: a sleeping engine gives its KV's memory away and wakes with other "
            "memory, while the server still has the old. Start without --enable-sleep-mode"
        )
    if vllm_config.weight_transfer_config is not None:
        raise ConfigError(
            "kvdepot does not serve engines whose weights are replaced while they run (weight_transfer_config): it is "
            "not told of it, and would mix the KV of old and new weights"
        )
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.use_eagle():
        raise ConfigError(
            f"kvdepot does not serve speculative decoding by {speculative.method} yet: the draft's KV of a "
            "loaded prefix would miss the target's hidden states"
        )


def namespace(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, weights_revision: str) -> str:
    """All that is fixed for an engine and changes KV bytes, as a readable name with a hash.

    Equal in the scheduler and every worker, and after a restart with the same weights.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    facts = {
        "vllm": vllm.__version__,
        "model": model.model,
        "revision": [model.revision, model.code_revision, getattr(model.hf_config, "_commit_hash", None)],
        "weights": weights_revision or describe(Path(model.model)),
        "load": [str(vllm_config.load_config.load_format), model.seed],
        "config": model.hf_config.to_dict(),
        "dtype": [str(model.dtype), str(cache.cache_dtype), str(model.quantization)],
        "parallel": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size],
        "spec": str(kv_cache_config.kv_cache_groups[0].kv_cache_spec),
    }
    digest = blake3(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]
    return f"{Path(model.model).name}@{digest}"
