"""Tiny random drafters for speculative decoding, beside the models of engines.py.

The vocabulary is so small that random drafters are right now and then: how often depends on all of their KV.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.vllm import engines
from tests.vllm.engines import LLAMA, MLA, STATES

VOCABULARY = 16
TARGET: dict[str, Any] = LLAMA | {"vocab_size": VOCABULARY, "torch_dtype": "float32"}
DEEPSEEK: dict[str, Any] = MLA | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 24, "torch_dtype": "float32",
    "num_nextn_predict_layers": 1, "first_k_dense_replace": 3, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
}  # fmt: skip
QWEN3_NEXT: dict[str, Any] = STATES | {"vocab_size": VOCABULARY, "mlp_only_layers": [1, 2]}


def write_mtp(folder: Path, config: dict[str, Any]) -> Path:
    """A model with a module for multi-token prediction. config: `DEEPSEEK` or `QWEN3_NEXT`."""
    engines.write_model(folder, config)
    # A module is a decoder layer, with what makes its input: such a layer of another model of this kind.
    other = engines.write_model(folder / "other", config | {"layer_types": ["full_attention"] * 4})
    layer, hidden = "model.layers.0.", config["hidden_size"]
    weights = {
        name.removeprefix(layer): weight
        for name, weight in load_file(other / "model.safetensors").items()
        if name.startswith(layer)
    }
    dtype = next(iter(weights.values())).dtype
    if config is QWEN3_NEXT:
        prefix, norms, shapes = "mtp.layers.0.", ["norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"], ["fc"]
        outer = "mtp."
    else:
        prefix = outer = f"model.layers.{config['num_hidden_layers']}."
        norms, shapes = ["enorm", "hnorm", "shared_head.norm"], ["eh_proj"]
    made = {f"{prefix}{name}": weight for name, weight in weights.items()}
    made |= {f"{outer}{name}.weight": torch.ones(hidden, dtype=dtype) for name in norms}
    generator = torch.Generator().manual_seed(2)
    for name in shapes:
        made[f"{outer}{name}.weight"] = (torch.randn(hidden, 2 * hidden, generator=generator) * 0.1).to(dtype)
    if config is not QWEN3_NEXT:
        target = load_file(folder / "model.safetensors")
        made[f"{outer}embed_tokens.weight"] = target["model.embed_tokens.weight"]
        made[f"{outer}shared_head.head.weight"] = target["lm_head.weight"]
    save_file(made, folder / "mtp.safetensors", metadata={"format": "pt"})
    shutil.rmtree(other)
    engines._note_written()
    return folder


def write_drafter(folder: Path, kind: str, config: dict[str, Any]) -> Path:
    """A head for `TARGET`. kind: eagle, eagle3."""
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    width = config["head_dim"]
    first = "midlayer" if kind == "eagle3" else "layers.0"
    seen = 2 * hidden if kind == "eagle3" else hidden
    shapes = {
        "fc": (hidden, 2 * hidden),
        **{f"{first}.self_attn.{part}_proj": (config["num_key_value_heads"] * width, seen) for part in "kv"},
        f"{first}.self_attn.q_proj": (heads * width, seen), f"{first}.self_attn.o_proj": (hidden, heads * width),
        **{f"{first}.mlp.{part}_proj": (inner, hidden) for part in ("gate", "up")},
        f"{first}.mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    norms = [f"{first}.post_attention_layernorm"]
    if kind == "eagle3":
        shapes["lm_head"] = (config["vocab_size"], hidden)
        norms += ["norm", f"{first}.input_layernorm", f"{first}.hidden_norm"]
    generator = torch.Generator().manual_seed(1)
    weights = {f"{name}.weight": torch.ones(hidden) for name in norms}
    weights |= {f"{name}.weight": torch.randn(*shape, generator=generator) * 0.1 for name, shape in shapes.items()}
    folder.mkdir(parents=True, exist_ok=True)
    architecture = "LlamaForCausalLMEagle3" if kind == "eagle3" else "LlamaForCausalLM"
    (folder / "config.json").write_text(
        json.dumps(config | {"architectures": [architecture], "num_hidden_layers": 1, "num_aux_hidden_states": 2})
    )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    engines._note_written()
    return folder
