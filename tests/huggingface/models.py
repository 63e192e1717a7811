"""Small models of random weights, built from configurations."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import transformers

VOCABULARY = 512
CHUNK = 16
_SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None, "initializer_range": 0.2,
}  # fmt: skip
_STATES = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
_LATENT = {
    "head_dim": 8, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 4,
}  # fmt: skip
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
KINDS = {
    "llama": ("Llama", "LlamaConfig", {}),
    "qwen3": ("Qwen3", "Qwen3Config", {}),
    "mistral": ("Mistral", "MistralConfig", {"sliding_window": 40}),
    "gemma3": ("Gemma3", "Gemma3TextConfig", {"sliding_window": 24, "layer_types": _ALTERNATING}),
    "latent": ("DeepseekV3", "DeepseekV3Config", _LATENT),
    "states": ("Qwen3Next", "Qwen3NextConfig", _STATES),
}
HAS_STATES = int(transformers.__version__.split(".")[0]) >= 5
"""Before transformers 5, models with states have caches of their own."""
SERVED = [kind for kind in KINDS if HAS_STATES or kind != "states"]
PLAIN, WINDOWED = ("llama", "qwen3", "latent"), ("mistral", "gemma3")
_seeds = itertools.count(10_000)


def make(kind: str = "llama", seed: int | None = None, **changes: Any) -> Any:
    """A model in evaluation mode. seed: equal ones give equal weights; None: weights of its own."""
    name, config, fields = KINDS[kind]
    torch.manual_seed(next(_seeds) if seed is None else seed)
    values: dict[str, Any] = {**_SHAPE, **fields, **changes}
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, config)(**values)).eval()


def prompt(tokens: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Random token ids, none of them padding."""
    return torch.randint(2, VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def compute(model: Any, ids: torch.Tensor, past: Any, *ends: int) -> torch.Tensor:
    """The logits of one prompt's tokens from `past` on, computed in parts up to these ends and the last."""
    logits, start = [], past.get_seq_length()
    with torch.no_grad():
        for end in (*ends, ids.shape[1]):
            logits.append(model(input_ids=ids[:, start:end], past_key_values=past, use_cache=True).logits)
            start = end
    return torch.cat(logits, 1)
