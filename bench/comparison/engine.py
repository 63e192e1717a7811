"""A vLLM engine that serves workloads: its model, and this side of its process (served.py)."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import EngineProcess

from comparison.workloads import VOCABULARY, Workload

__all__ = ["CONFIG", "Batch", "Engine", "kv_bytes", "write_model"]

_SCRIPT = Path(__file__).with_name("served.py")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def kv_bytes(config: dict[str, Any] = CONFIG) -> int:
    """Bytes of KV per token: keys and values, in float32."""
    numbers: int = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return 4 * numbers


def write_model(folder: Path, config: dict[str, Any] = CONFIG) -> Path:
    """Write a Llama's files: random weights, large enough that every token depends on the whole prompt."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden)}
    norms = ["model.norm"]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        norms += [f"{name}.input_layernorm", f"{name}.post_attention_layernorm"]
        shapes |= {
            f"{name}.mlp.gate_proj": (inner, hidden),
            f"{name}.mlp.up_proj": (inner, hidden),
            f"{name}.mlp.down_proj": (hidden, inner),
            f"{name}.self_attn.q_proj": (queries, hidden),
            f"{name}.self_attn.k_proj": (keys, hidden),
            f"{name}.self_attn.v_proj": (keys, hidden),
            f"{name}.self_attn.o_proj": (hidden, queries),
        }
    weights = {f"{name}.weight": torch.ones(hidden) for name in norms}
    for name, shape in shapes.items():
        weights[f"{name}.weight"] = torch.randn(*shape, generator=generator) * 0.1
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@dataclass(frozen=True)
class Batch:
    """Prompts that were run at once. Lists are in the order of the prompts."""

    computed: int
    """Prompt tokens scheduled, repetitions included."""
    seconds: float
    first_s: list[float]
    """From the beginning to each prompt's first token."""
    own: list[int]
    """Tokens of each prompt that the engine's own cache had; 0 without a connector."""
    places: list[int]
    """Each prompt's place in the order in which all of its tokens were scheduled, from 0."""
    answers: list[list[int]]


class Engine(EngineProcess):
    """The engine's process, a context manager. transfer: vLLM's `kv_transfer_config`; None: no connector. blocks: of
    its own cache, of `block_tokens` tokens each."""

    def __init__(self, folder: Path, transfer: dict[str, Any] | None, blocks: int, block_tokens: int = 128) -> None:
        self._begun = time.perf_counter()
        super().__init__(str(_SCRIPT), str(folder), json.dumps(transfer), str(blocks), str(block_tokens))

    def __enter__(self) -> Engine:
        self.hear()
        self.start_s = time.perf_counter() - self._begun
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def prompt(self, number: int, tokens: int, loads: int) -> dict[str, Any]:
        """Run prompt number `number` of `tokens` tokens in each way: see served.py. Blocks."""
        found: dict[str, Any] = self.ask(["prompt", number, tokens, loads])
        return found

    def batch(self, prompts: list[list[int]], answer: int) -> Batch:
        """Run prompts at once, with answers of `answer` tokens. Blocks."""
        return Batch(**self.ask(["batch", prompts, answer]))

    def reset(self) -> None:
        """Empty its own cache, when what is stored from it has been stored. Blocks."""
        self.ask(["reset"])

    def serve(self, workload: Workload) -> dict[str, Any]:
        """Serve a workload; returns its length in seconds, the prompt tokens computed, and each request."""
        found: dict[str, Any] = self.ask(["serve", [[asdict(one) for one in client] for client in workload]])
        return found
