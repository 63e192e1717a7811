"""The KV size of models, by the shapes of their configurations."""

from __future__ import annotations

from typing import Any

import pytest

from kvdepot.errors import ConfigError
from kvdepot.simulate.kv_size import DEFAULTS, kv_size

LLAMA_8B = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
GPT_OSS_20B = {
    "model_type": "gpt_oss", "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 64, "hidden_size": 2880, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}  # fmt: skip

DBRX = {"model_type": "dbrx", "n_layers": 40, "n_heads": 48, "d_model": 6144, "attn_config": {"kv_n_heads": 8}}
MPT = {"model_type": "mpt", "n_layers": 32, "n_heads": 32, "d_model": 4096}


@pytest.mark.parametrize(
    ("config", "token_bytes", "windows", "states"),
    [
        (LLAMA_8B, 128 << 10, {}, 0),
        ({**LLAMA_8B, "num_hidden_layers": 80, "num_attention_heads": 64, "hidden_size": 8192}, 320 << 10, {}, 0),
        (  # DeepSeek V3: one latent and one rotary part a layer
            {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 128},
            61 * 576 * 2, {}, 0,
        ),
        (  # with the index keys of sparse attention
            {"num_hidden_layers": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128},
            576 * 2 + 132, {}, 0,
        ),
        (GPT_OSS_20B, 12 * 2048, {128: 12 * 2048}, 0),
        (  # Gemma 3: five layers with windows, then one without
            {
                "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                "sliding_window": 512, "sliding_window_pattern": 6,
            },
            2 * 4096, {512: 10 * 4096}, 0,
        ),
        ({**LLAMA_8B, "sliding_window": 4096}, 0, {4096: 128 << 10}, 0),
        ({**LLAMA_8B, "sliding_window": 4096, "use_sliding_window": False}, 128 << 10, {}, 0),
        ({**LLAMA_8B, "num_hidden_layers": 4, "full_attention_interval": 4}, 4096, {}, 3),
        ({**LLAMA_8B, "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]}, 4096, {}, 2),
        ({**LLAMA_8B, "num_hidden_layers": 4, "hybrid_override_pattern": "M-*M"}, 4096, {}, 2),
        ({**LLAMA_8B, "num_kv_shared_layers": 16}, 64 << 10, {}, 0),
        ({"model_type": "vision", "text_config": LLAMA_8B}, 128 << 10, {}, 0),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, 12 * 2 * 768 * 2, {}, 0),
        (DBRX, 163_840, {}, 0),
        ({**DBRX, "attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 500_000}}, 163_840, {}, 0),
        ({**MPT, "attn_config": {"attn_type": "multihead_attention", "sliding_window_size": -1}}, 512 << 10, {}, 0),
        ({**MPT, "attn_config": {"attn_type": "multiquery_attention"}}, 16 << 10, {}, 0),
        ({**LLAMA_8B, "quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, 64 << 10, {}, 0),
    ],
)  # fmt: skip
def test_the_kv_of_a_token_follows_from_the_shape(
    config: dict[str, Any], token_bytes: int, windows: dict[int, int], states: int
) -> None:
    found = kv_size(config)
    assert (found.token_bytes, dict(found.windows), found.states) == (token_bytes, windows, states)


QWEN_25_7B = {
    "model_type": "qwen2", "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "hidden_size": 3584, "max_window_layers": 28, "sliding_window": 131072, "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_4_SCOUT = {
    "model_type": "llama4_text", "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8,
    "head_dim": 128, "hidden_size": 5120, "attention_chunk_size": 8192, "no_rope_layers": [],
    "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA_4_31B = {
    "model_type": "gemma4_text", "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16,
    "hidden_size": 5376, "sliding_window": 1024, "attention_k_eq_v": True, "num_global_key_value_heads": 4,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
}  # fmt: skip


def in_text_config(config: dict[str, Any], model_type: str) -> dict[str, Any]:
    """The configuration of a model with images, which has this one for its text."""
    return {"model_type": model_type, "torch_dtype": "bfloat16", "text_config": config}


@pytest.mark.parametrize(
    ("config", "token_bytes", "windows"),
    [  # K and V x layers x KV heads x head size x 2 bytes
        pytest.param(QWEN_25_7B, 2 * 28 * 4 * 128 * 2, {}, id="Qwen 2.5 7B"),
        pytest.param(
            {
                "model_type": "gemma2", "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8,
                "head_dim": 256, "hidden_size": 3584, "sliding_window": 4096,
            },
            2 * 21 * 8 * 256 * 2, {4096: 2 * 21 * 8 * 256 * 2}, id="Gemma 2 9B",
        ),
        pytest.param(
            in_text_config(
                {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024},
                "gemma3",
            ),
            2 * 5 * 4 * 256 * 2, {1024: 2 * 29 * 4 * 256 * 2}, id="Gemma 3 4B",
        ),
        pytest.param(  # the heads of layers with full attention are fewer and larger
            in_text_config(GEMMA_4_31B, "gemma4"),
            2 * 10 * 4 * 512 * 2, {1024: 2 * 50 * 16 * 256 * 2}, id="Gemma 4 31B",
        ),
        pytest.param(
            in_text_config(LLAMA_4_SCOUT, "llama4"),
            2 * 12 * 8 * 128 * 2, {8192: 2 * 36 * 8 * 128 * 2}, id="Llama 4 Scout",
        ),
        pytest.param(
            in_text_config({**LLAMA_4_SCOUT, "no_rope_layers": [1, 1, 1, 0] * 12}, "llama4"),
            2 * 12 * 8 * 128 * 2, {8192: 2 * 36 * 8 * 128 * 2}, id="Llama 4 Scout, with a list",
        ),
        pytest.param(
            {key: GPT_OSS_20B[key] for key in ("model_type", "num_hidden_layers")},
            2 * 12 * 8 * 64 * 2, {128: 2 * 12 * 8 * 64 * 2}, id="GPT-OSS 20B, without what is the default",
        ),
    ],
)  # fmt: skip
def test_the_kv_of_published_models(config: dict[str, Any], token_bytes: int, windows: dict[int, int]) -> None:
    found = kv_size(config)
    assert (found.token_bytes, dict(found.windows), found.states) == (token_bytes, windows, 0)


@pytest.mark.parametrize("model_type", sorted(DEFAULTS))
def test_the_defaults_are_those_of_transformers(model_type: str) -> None:
    pytest.importorskip("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    theirs = CONFIG_MAPPING[model_type]().get_text_config()
    whole = theirs.to_dict()
    assert kv_size({"model_type": theirs.model_type}) == kv_size({**whole, "model_type": theirs.model_type})
    for key, value in DEFAULTS[model_type].items():
        if whole.get(key) is not None:
            assert whole[key] == value, key


@pytest.mark.parametrize(("dtype", "size"), [("fp8", 64), ("bf16", 128), ("fp32", 256), ("auto", 128)])
def test_the_type_of_the_kv_can_be_given(dtype: str, size: int) -> None:
    assert kv_size(LLAMA_8B, dtype).token_bytes == size << 10


def test_windows_are_stored_at_boundaries() -> None:
    found = kv_size(GPT_OSS_20B)
    full, window = found.token_bytes, found.windows[128]
    assert found.prompt_bytes(255) == 0
    assert found.prompt_bytes(256) == 256 * (full + window)
    assert found.prompt_bytes(16 * 256) == 256 * (16 * full + window)
    assert found.prompt_bytes(17 * 256) == 256 * (17 * full + 2 * window)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "no num_hidden_layers"),
        ({"num_hidden_layers": 2}, "no num_attention_heads"),
        ({**LLAMA_8B, "num_hidden_layers": "many"}, "num_hidden_layers is many"),
        ({**LLAMA_8B, "num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000"),
        ({**LLAMA_8B, "layer_types": ["full_attention"]}, "another length"),
        ({**LLAMA_8B, "num_hidden_layers": 1, "layer_types": ["oracle"]}, "a layer is 'oracle'"),
        ({**LLAMA_8B, "mamba_d_state": 16}, "layers with states"),
        ({**DBRX, "attn_config": {}}, "no kv_n_heads"),
        ({**DBRX, "attn_config": "eager"}, "attn_config is eager"),
        ({**DBRX, "attn_config": {"kv_n_heads": 8, "sliding_window_size": 4096}}, "has 'sliding_window_size'"),
        ({**MPT, "attn_config": {"attn_type": "oracle_attention"}}, "attn_type is 'oracle_attention'"),
        ({**MPT, "attn_config": {"attn_type": "grouped_query_attention"}}, "no kv_n_heads"),
        ({**LLAMA_4_SCOUT, "no_rope_layers": [1, 1, 1, 0]}, "no_rope_layers has 4 layers of 48"),
        ({**LLAMA_4_SCOUT, "no_rope_layers": 4}, "no_rope_layers is 4"),
        ({**LLAMA_8B, "is_encoder_decoder": True}, "an encoder and a decoder"),
        ({**LLAMA_8B, "torch_dtype": "int3"}, "give --kv-dtype"),
    ],
)
def test_what_is_not_known_is_said_and_never_guessed(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        kv_size(config)
