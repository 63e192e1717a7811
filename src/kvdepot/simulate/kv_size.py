"""The KV bytes per token of a model, from its configuration (`config.json`). Pure; used by `kvdepot size`.

The formula of docs/memory.md: per layer and token, 2 x KV heads x head size x bytes per element, or with MLA (latent +
rotary size) x bytes per element. Tensor and pipeline parallelism divide it among ranks, whose bytes all come to the
host's depot, so they do not matter. Layers with a window or a state need no KV of all tokens.

A published configuration may leave out what transformers fills in by model_type, above all inside text_config, whose
defaults it does not write. `DEFAULTS` has those that decide about KV. A field that is null is not filled in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvdepot.errors import ConfigError

__all__ = ["DEFAULTS", "KvSize", "kv_size"]

ModelConfig: TypeAlias = Mapping[str, Any]
"""The contents of a `config.json`, whose fields have any JSON type."""

KV_DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes per element."""
_BOUNDARY_CHUNKS = 16
"""Chunks between two boundaries at which the vLLM connector stores windows, by default; at least four windows."""
_MOST = 1 << 20  # of any number in a configuration

_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}


def _shape(layers: int, heads: int, kv_heads: int, head: int, **others: object) -> dict[str, object]:
    return {
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head,
        **others,
    }  # fmt: skip


def _shape_of(layers: int, heads: int, kv_heads: int, hidden: int, **others: object) -> dict[str, object]:
    """The shape of a model whose heads divide the hidden size."""
    return {
        "num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": hidden,
        **({"num_key_value_heads": kv_heads} if kv_heads != heads else {}), **others,
    }  # fmt: skip


DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "llama": _shape_of(32, 32, 32, 4096),
    "llama4": _shape(48, 40, 8, 128, attention_chunk_size=8192, no_rope_layer_interval=4),
    "mistral": _shape_of(32, 32, 8, 4096, sliding_window=4096),
    "ministral3": _shape(34, 32, 8, 128),
    "mixtral": _shape_of(32, 32, 8, 4096),
    "qwen2": _shape_of(32, 32, 32, 4096, **_QWEN),
    "qwen2_moe": _shape_of(24, 16, 16, 2048, use_sliding_window=False, max_window_layers=28),
    "qwen2_vl": _shape_of(80, 64, 8, 8192, use_sliding_window=False),
    "qwen2_5_vl": _shape_of(80, 64, 8, 8192, use_sliding_window=False),
    "qwen3": _shape(32, 32, 32, 128, **_QWEN),
    "qwen3_moe": _shape_of(24, 32, 4, 2048, use_sliding_window=False),
    "qwen3_vl": _shape(32, 32, 32, 128),
    "qwen3_next": _shape(48, 16, 2, 256, full_attention_interval=4),
    "qwen3_5": _shape(32, 16, 4, 256, full_attention_interval=4),
    "qwen3_5_moe": _shape(40, 16, 2, 256, full_attention_interval=4),
    "gemma": _shape(28, 16, 16, 256),
    "gemma2": _shape(26, 8, 4, 256, sliding_window=4096, sliding_window_pattern=2),
    "gemma3": _shape(26, 8, 4, 256, sliding_window=4096, sliding_window_pattern=6),
    "gemma3n": _shape(35, 8, 2, 256, sliding_window=512, sliding_window_pattern=5, num_kv_shared_layers=15),
    "gemma4": _shape(30, 8, 4, 256, sliding_window=512, sliding_window_pattern=6, global_head_dim=512),
    "cohere2": _shape_of(40, 64, 64, 8192, sliding_window=4096, sliding_window_pattern=4),
    "deepseek_v2": {"num_hidden_layers": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "deepseek_v3": {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "deepseek_v32": {
        "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128,
    },
    "gpt_oss": _shape(36, 64, 8, 64, sliding_window=128, sliding_window_pattern=2),
    "phi": _shape_of(24, 32, 32, 2048),
    "phi3": _shape_of(32, 32, 32, 3072),
    "phi4_multimodal": _shape_of(32, 32, 8, 3072),
}  # fmt: skip
"""Fields by model_type, without `_text` at its end, as transformers 5.19 takes them if a configuration leaves them out
(the configuration_*.py of each model; a test compares them where transformers is installed)."""

_FULL = (
    "full_attention", "attention", "*", "global_attention", "indexed_attention", "deepseek_sparse_attention",
)  # fmt: skip
_WINDOWS = ("sliding_attention", "chunked_attention")
_STATES = ("linear_attention", "mamba", "mamba2", "conv", "M", "recurrent")
_NO_KV = ("mlp", "moe", "-", "E")


@dataclass(frozen=True)
class KvSize:
    """KV of one model. token_bytes: of the layers that need all tokens. windows: bytes per token by window, in tokens.

    states: layers with a state instead of KV per token, which is not counted.
    """

    model: str
    layers: int
    dtype: str
    token_bytes: int
    windows: Mapping[int, int] = field(default_factory=dict)
    states: int = 0

    def prompt_bytes(self, tokens: int, chunk_tokens: int = 256) -> int:
        """Bytes in the depot of one prompt, in whole chunks, with the default distance between stored windows."""
        chunks = tokens // chunk_tokens
        total = self.token_bytes * chunks * chunk_tokens
        for window, token_bytes in self.windows.items():
            needed = -(-window // chunk_tokens)
            whole, rest = divmod(chunks, max(_BOUNDARY_CHUNKS, 4 * needed))
            total += token_bytes * (whole * needed + min(rest, needed)) * chunk_tokens
        return total


def kv_size(config: ModelConfig, dtype: str = "auto") -> KvSize:
    """The KV of the model with this configuration. dtype: one of KV_DTYPES, or auto: as the configuration says.

    Raises ConfigError if its KV is not known from that.
    """
    whole, given = config, _text_of(config)
    name = str(whole.get("model_type") or given.get("model_type") or "model")[:80]
    model_type = str(given.get("model_type") or name).removesuffix("_text")
    config = {**DEFAULTS.get(model_type, {}), **given}
    if config.get("is_encoder_decoder"):
        raise _unknown(name, "it is an encoder and a decoder")
    layers = _number(config, name, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    kinds = _kinds(config, name, layers)
    shared = _number(config, name, "num_kv_shared_layers", least=0, default=0)
    kinds = kinds[: max(0, layers - shared)]  # the last ones use the KV of layers before them
    called, element = _element(whole, config, name, dtype)
    layer_bytes = _layer_bytes(config, name, element) if any(kind != "state" for kind in kinds) else 0
    full_bytes = _layer_bytes(_global_heads(config), name, element) if "full" in kinds else 0
    counts = Counter(kinds)
    windows: Counter[int] = Counter()
    for kind in kinds:
        if isinstance(kind, int):
            windows[kind] += layer_bytes
    return KvSize(name, layers, called, counts["full"] * full_bytes, dict(windows), counts["state"])


def _unknown(name: str, why: str) -> ConfigError:
    return ConfigError(f"the KV size of {name!r} is not known: {why}; give --bytes-per-token")


def _text_of(config: ModelConfig) -> ModelConfig:
    """The part about the language model."""
    for part in ("text_config", "llm_config", "language_config", "thinker_config"):
        inner = config.get(part)
        if isinstance(inner, Mapping):
            return _text_of(inner)
    return config


def _number(config: ModelConfig, name: str, *keys: str, least: int = 1, default: int | None = None) -> int:
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
            raise _unknown(name, f"{key} is {str(value)[:40]}")
        return value
    if default is None:
        raise _unknown(name, f"its configuration has no {keys[0]}")
    return default


def _kinds(config: ModelConfig, name: str, layers: int) -> list[str | int]:
    """The kind of each layer: full, state, none, or the tokens of its window."""
    window = _number(config, name, "sliding_window", "attention_chunk_size", "window_size", least=0, default=0)
    if config.get("use_sliding_window") is False:
        window = 0
    listed = config.get("layer_types") or config.get("layers_block_type") or config.get("hybrid_override_pattern")
    if listed is not None:
        if not isinstance(listed, list | str) or len(listed) != layers:
            raise _unknown(name, f"it has {layers} layers and a list of another length of what they are")
        return [_kind(each, name, window) for each in listed]
    every = _number(config, name, "full_attention_interval", "attn_layer_period", default=0)
    if every:  # one layer of so many has attention, the others a state
        offset = _number(config, name, "attn_layer_offset", least=0, default=every - 1)
        return ["full" if number % every == offset % every else "state" for number in range(layers)]
    if any(key.startswith(("mamba_", "ssm_", "linear_num_", "attn_type_list")) for key in config):
        raise _unknown(name, "it has layers with states, and no layer_types")
    if window and config.get("attention_chunk_size") == window and (wide := _no_rope(config, name, layers)):
        return ["full" if is_wide else window for is_wide in wide]
    every = _number(config, name, "sliding_window_pattern", default=0)
    if window and every:
        return ["full" if number % every == every - 1 else window for number in range(layers)]
    if window and "max_window_layers" in config:
        first = _number(config, name, "max_window_layers", least=0)
        return ["full" if number < first else window for number in range(layers)]
    return [window or "full"] * layers


def _no_rope(config: ModelConfig, name: str, layers: int) -> list[bool]:
    """Whether each layer has no rotary embedding, and so full attention (Llama 4); empty if that is not said."""
    listed = config.get("no_rope_layers")
    if listed:  # 0: has none
        if not isinstance(listed, list):
            raise _unknown(name, f"no_rope_layers is {str(listed)[:40]}")
        if len(listed) < layers:
            raise _unknown(name, f"no_rope_layers has {len(listed)} layers of {layers}")
        return [not has_rope for has_rope in listed[:layers]]
    every = _number(config, name, "no_rope_layer_interval", default=0)
    return [number % every == every - 1 for number in range(layers)] if every else []


def _global_heads(config: ModelConfig) -> ModelConfig:
    """The configuration with the heads of its layers with full attention, where they differ (Gemma 4)."""
    changed: dict[str, object] = {}
    if config.get("global_head_dim") is not None:
        changed["head_dim"] = config["global_head_dim"]
    if config.get("num_global_key_value_heads") is not None and config.get("attention_k_eq_v"):
        changed["num_key_value_heads"] = config["num_global_key_value_heads"]
    return {**config, **changed} if changed else config


def _kind(kind: object, name: str, window: int) -> str | int:
    if kind in _FULL or (kind in _WINDOWS and not window):
        return "full"
    if kind in _WINDOWS:
        return window
    if kind in _STATES:
        return "state"
    if kind in _NO_KV:
        return "none"
    raise _unknown(name, f"a layer is {str(kind)[:40]!r}")


def _layer_bytes(config: ModelConfig, name: str, element: int) -> int:
    """Bytes per token of a layer with attention."""
    if config.get("kv_lora_rank"):  # MLA: one latent vector for all heads
        size = _number(config, name, "kv_lora_rank") + _number(config, name, "qk_rope_head_dim", least=0, default=0)
        index = _number(config, name, "index_head_dim", least=0, default=0)  # of sparse attention: fp8 and scales
        return size * element + index + index // 128 * 4
    heads = _number(config, name, "num_attention_heads", "n_head", "n_heads", "num_heads")
    default = _attn_config_heads(config, name, heads) or (1 if config.get("multi_query") else heads)
    kv_heads = _number(config, name, "num_key_value_heads", "num_kv_heads", "multi_query_group_num", default=default)
    if config.get("head_dim") is not None:
        head = _number(config, name, "head_dim")
    else:
        head = _number(config, name, "hidden_size", "n_embd", "d_model") // heads
    return kv_heads * (head + _number(config, name, "v_head_dim", default=head)) * element


def _attn_config_heads(config: ModelConfig, name: str, heads: int) -> int:
    """The KV heads according to `attn_config`, which DBRX and MPT have; 0 if there is none."""
    given = config.get("attn_config")
    if given is None:
        return 0
    if not isinstance(given, Mapping):
        raise _unknown(name, f"attn_config is {str(given)[:40]}")
    for key, value in given.items():
        is_about_kv = "window" in key or "reuse_kv" in key or key.startswith(("kv_", "head_"))
        if is_about_kv and key != "kv_n_heads" and value not in (None, -1):
            raise _unknown(name, f"attn_config has {key[:40]!r}")
    kind = given.get("attn_type")
    default = {"multihead_attention": heads, "multiquery_attention": 1}.get(str(kind))
    if default is None and kind not in (None, "grouped_query_attention"):
        raise _unknown(name, f"attn_type is {str(kind)[:40]!r}")
    return _number(given, name, "kv_n_heads", default=default)


def _element(whole: ModelConfig, config: ModelConfig, name: str, dtype: str) -> tuple[str, int]:
    """The name of the KV's type, and bytes per element."""
    if dtype != "auto":
        return dtype, KV_DTYPES[dtype]
    quantized = whole.get("quantization_config") or {}
    scheme = quantized.get("kv_cache_scheme") if isinstance(quantized, Mapping) else None
    if isinstance(scheme, Mapping) and scheme.get("num_bits") == 8:
        return "fp8", 1
    for given in (config, whole):
        text = str(given.get("dtype") or given.get("torch_dtype") or "").removeprefix("torch.")
        if text in ("bfloat16", "float16", "float32"):
            # vLLM's --dtype auto computes float32 models in 16 bits.
            return ("bf16" if text == "bfloat16" else "fp16"), 2
        if text:
            raise ConfigError(f"the KV type of {name!r} is not known: its dtype is {text[:40]!r}; give --kv-dtype")
    return "16 bits, assumed", 2
