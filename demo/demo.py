"""The main use, end to end, on this machine's CPU: `make demo`.

Runs `kvdepot certify` on two models with random weights (a Llama, and a hybrid model like Gemma 3 with sliding windows
beside full attention). Then a Llama's prompts are computed by one engine and decoded by another (apart.py), and
multi-turn chats are served with the depot and without (multi_turn.py). Exit code 1 if outputs differ or nothing was
loaded. With `--url`, the second half uses a running server, which can be watched.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import apart
import multi_turn
import torch
from safetensors.torch import save_file

from kvdepot.client import admin
from kvdepot.client.launch import Embedded
from kvdepot.config import load
from kvdepot.errors import KVDepotError
from kvdepot.processes import module_command

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOWS: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "sliding_window": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size": 32000,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "torch_dtype": "float32",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {"llama": (LLAMA, "2048,8192"), "windows": (WINDOWS, "4096")}
"""Models and the lengths of their prompts. 4,096 tokens are four windows, of which resuming needs the last one only."""


def write_model(folder: Path, model: dict[str, Any]) -> Path:
    """A Llama or Gemma 3 with random weights, grouped-query attention."""
    folder.mkdir(parents=True)
    config = dict(model)
    dtype = getattr(torch, config["torch_dtype"])
    if (
        dtype == torch.bfloat16
        and platform.machine() == "x86_64"
        and " avx512f " not in Path("/proc/cpuinfo").read_text()
    ):
        config["num_hidden_layers"] = 2  # bf16 without AVX-512 takes 20 s a layer for 8k tokens on two cores
    (folder / "config.json").write_text(json.dumps(config))
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocab, hidden)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head"] = (vocab, hidden)
    norms = {"model.norm": hidden}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        norms |= {name + "input_layernorm": hidden, name + "post_attention_layernorm": hidden}
        if config["model_type"] == "gemma3_text":
            norms |= {f"{name}{part}_feedforward_layernorm": hidden for part in ("pre", "post")}
            norms |= {f"{name}self_attn.{part}_norm": config["head_dim"] for part in "qk"}
        shapes |= {
            name + "self_attn.q_proj": (heads, hidden),
            name + "self_attn.k_proj": (kv, hidden),
            name + "self_attn.v_proj": (kv, hidden),
            name + "self_attn.o_proj": (hidden, heads),
            name + "mlp.gate_proj": (inner, hidden),
            name + "mlp.up_proj": (inner, hidden),
            name + "mlp.down_proj": (hidden, inner),
        }
    torch.manual_seed(0)
    weights = {f"{name}.weight": (torch.randn(*shape) * 0.02).to(dtype) for name, shape in shapes.items()}
    weights |= {f"{name}.weight": torch.ones(size, dtype=dtype) for name, size in norms.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def arguments(model: Path) -> list[str]:
    """vLLM's arguments for one of the models."""
    dtype = json.loads((model / "config.json").read_text())["torch_dtype"]  # "auto" makes bfloat16 of float32
    words = "--skip-tokenizer-init --enforce-eager --max-model-len 8448 --max-num-seqs 4 --max-num-batched-tokens 2048"
    return [str(model), "--dtype", dtype, *words.split()]


def use_all_cpus() -> None:
    """Have vLLM's engines use all processors and little memory, unless the environment says otherwise."""
    cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    for name, value in (
        ("VLLM_CPU_OMP_THREADS_BIND", cpus), ("VLLM_CPU_KVCACHE_SPACE", "1"), ("VLLM_LOGGING_LEVEL", "WARNING"),
        ("HF_HUB_OFFLINE", "1"), ("KVDEPOT_ARENA_GIB", "2"), ("KVDEPOT_LOG_LEVEL", "warning"),
    ):  # fmt: skip
        os.environ.setdefault(name, value)


@contextmanager
def serving(folder: Path, url: str | None) -> Iterator[str]:
    """The server at `url` (empty: this user's), or, for None, one of our own; yields its endpoint."""
    if url is None:
        with closing(Embedded(f"ipc://{folder}/depot.sock", f"demo-{os.getpid()}")) as server:
            yield server.url
        return
    url = load(flags={"url": url or None}).url
    with admin.connect(url):  # fails before an engine is started, which takes a while
        print(f"using the server at {url}", flush=True)
    yield url


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, help="only certify this model, and no second half")
    parser.add_argument("--lengths", metavar="N,...", help="prompt lengths in tokens, for each model")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), metavar="FOLDER", help="write pages there")
    parser.add_argument(
        "--url", nargs="?", const="", help="only the second half, on the server that runs there (without a value: "
        "KVDEPOT_URL's, or this user's)",
    )  # fmt: skip
    args = parser.parse_args()
    if args.url is not None and (args.model or args.lengths):
        parser.error("--url runs the second half only: leave out --model and --lengths")
    use_all_cpus()
    good = True
    with tempfile.TemporaryDirectory(prefix="kvdepot-demo-") as name:
        folder = Path(name)
        for kind in [args.model] if args.model else MODELS if args.url is None else ():
            config, lengths = MODELS[kind]
            args.out.mkdir(parents=True, exist_ok=True)
            model, page = write_model(folder / kind, config), args.out / f"{kind}.html"
            print(f"\nkvdepot certify: a {kind} model with random weights; the page: {page}", flush=True)
            words = ["--prompts", args.lengths or lengths, "--html", str(page), *arguments(model)]
            good &= run(module_command("kvdepot.cli", "certify", *words))
        if not args.model:
            with serving(folder, args.url) as url:
                good &= second_half(folder, url)
    if not good:
        print("FAILED: an output differs, or the depot saved nothing")
    return 0 if good else 1


def run(command: list[str]) -> bool:
    """Run a command; whether it succeeds. After an interrupt, which it gets, too, wait until it has cleaned up."""
    process = subprocess.Popen(command)
    try:
        return process.wait() == 0
    except KeyboardInterrupt:
        process.wait()
        raise


def second_half(folder: Path, url: str) -> bool:
    """Prefill and decode apart, and the chats; returns whether all is as it should be."""
    print("\nengine C computes prompts, engine D decodes them", flush=True)
    model = folder / "llama" if (folder / "llama").exists() else write_model(folder / "llama", LLAMA)
    between = apart.measure(folder, url, arguments(model))
    good = apart.report(between)
    return multi_turn.report(multi_turn.measure(url)) and good


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KVDepotError as exc:
        sys.exit(f"kvdepot: {exc}")
    except KeyboardInterrupt:
        sys.exit(130)
