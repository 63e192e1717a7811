"""How much KV a model has per token, from its configuration (`config.json`). Pure; used by `kvdepot size`.

The formula of docs/memory.md: per layer and token, 2 x KV heads x head size x bytes per element, or with MLA (latent +
rotary size) x bytes per element. Tensor and pipeline parallelism divide it among ranks, whose bytes all come to the
host's depot, so they do not matter. Layers with a window or a state need no KV of all tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvdepot.errors import ConfigError

__all__ = ["KvSize", "kv_size"]

KV_DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes per element."""
_BOUNDARY_CHUNKS = 16
"""Chunks between two boundaries at which the vLLM connector stores windows, by default; at least four windows."""
_MOST = 1 << 20  # of any number in a configuration

_FULL = ("full_attention", "attention", "*", "global_attention")
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


def kv_size(config: Mapping[str, Any], dtype: str = "auto") -> KvSize:
    """The KV of the model with this configuration. dtype: one of KV_DTYPES, or auto: as the configuration says.

    Raises ConfigError if its KV is not known from that.
    """
    whole, config = config, _text_of(config)
    name = str(whole.get("model_type") or config.get("model_type") or "model")[:80]
    if config.get("is_encoder_decoder"):
        raise _unknown(name, "it is an encoder and a decoder")
    layers = _number(config, name, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    kinds = _kinds(config, name, layers)
    shared = _number(config, name, "num_kv_shared_layers", least=0, default=0)
    kinds = kinds[: max(0, layers - shared)]  # the last ones use the KV of layers before them
    called, element = _element(whole, config, name, dtype)
    layer_bytes = _layer_bytes(config, name, element) if any(kind != "state" for kind in kinds) else 0
    counts = Counter(kinds)
    windows: Counter[int] = Counter()
    for kind in kinds:
        if isinstance(kind, int):
            windows[kind] += layer_bytes
    return KvSize(name, layers, called, counts["full"] * layer_bytes, dict(windows), counts["state"])


def _unknown(name: str, why: str) -> ConfigError:
    return ConfigError(f"the KV size of {name!r} is not known: {why}; give --bytes-per-token")


def _text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part about the language model."""
    for part in ("text_config", "llm_config", "language_config", "thinker_config"):
        inner = config.get(part)
        if isinstance(inner, Mapping):
            return _text_of(inner)
    return config


def _number(config: Mapping[str, Any], name: str, *keys: str, least: int = 1, default: int | None = None) -> int:
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


def _kinds(config: Mapping[str, Any], name: str, layers: int) -> list[str | int]:
    """Of each layer: full, state, none, or the tokens of its window."""
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
    every = _number(config, name, "sliding_window_pattern", default=2 if name == "gemma2" else 0)
    if window and every:
        return ["full" if number % every == every - 1 else window for number in range(layers)]
    if window and "max_window_layers" in config:
        first = _number(config, name, "max_window_layers", least=0)
        return ["full" if number < first else window for number in range(layers)]
    return [window or "full"] * layers


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


def _layer_bytes(config: Mapping[str, Any], name: str, element: int) -> int:
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


def _attn_config_heads(config: Mapping[str, Any], name: str, heads: int) -> int:
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


def _element(whole: Mapping[str, Any], config: Mapping[str, Any], name: str, dtype: str) -> tuple[str, int]:
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
