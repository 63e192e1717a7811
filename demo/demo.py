"""The main use, end to end, on this machine's CPU: `make demo`.

Starts `kvdepot serve`. Then, for each of two models with random weights (a Llama, and a hybrid model like Gemma 3 with
sliding windows beside full attention), runs a vLLM engine on a few prompts and stops it, and runs a fresh engine on the
same prompts. Prints what the depot saved, and whether tokens and logprobs are bit for bit those of the engine's own
prefix-cache hit. Unless `--lengths` chooses other prompts, a Llama's prompts are also computed by one engine and
decoded by another (apart.py). Unless `--model` or `--lengths` narrows it, its second half serves multi-turn chats with
the depot and without (multi_turn.py). Exit code 1 if outputs differ or nothing was retrieved. `--url` uses a running
server, which can be watched; `--json` writes the figures for plots.py, `--plots` also draws them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apart
import multi_turn
import torch
import zmq
from safetensors.torch import save_file

from kvdepot.adapters import MessageQueueClient, get_lmcache_chunk_size
from kvdepot.cli.output import Progress, progress
from kvdepot.client import admin
from kvdepot.config import load
from kvdepot.errors import KVDepotError
from kvdepot.processes import module_command

HERE = Path(__file__).parent
FEWEST_TOKENS, MOST_TOKENS = 257, 8432
"""Limits of a prompt's length: a chunk plus a token that must be computed; the model's context without its output."""
ENGINE_S = 900.0
"""Limit for all runs of an engine."""


@dataclass(frozen=True)
class Model:
    """A model with random weights. lengths: of its prompts, unless --lengths gives others."""

    title: str
    config: dict[str, Any]
    lengths: tuple[int, ...]

    def __str__(self) -> str:
        config = self.config
        kind = {"bfloat16": "bf16"}.get(config["torch_dtype"], config["torch_dtype"])
        return (
            f"a random-weight {self.title}, {config['num_hidden_layers']} layers, "
            f"{config['num_key_value_heads']} KV heads of {config['head_dim']}, {kind}"
        )


# Lengths just past a chunk's end, so that the engine's own cache and the depot hold the same tokens of each.
LLAMA = Model(
    "Llama",
    {
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
    },
    (2048 + 17, 2048 + 33, 8192 + 17, 8192 + 49),
)
WINDOWS = Model(
    "hybrid like Gemma 3 (sliding windows of 1,024 tokens beside full attention)",
    {
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
    },
    (4096 + 17, 4096 + 49),  # four windows long: resuming needs the last one only
)
MODELS = {"llama": LLAMA, "windows": WINDOWS}


@dataclass(frozen=True)
class Measured:
    """What the two engines of one of MODELS did. cold, warm: the runs of each prompt."""

    name: str
    prompts: dict[str, list[int]]
    cold: dict[str, Any]
    warm: dict[str, Any]


def write_model(folder: Path, model: Model) -> None:
    """A Llama or Gemma 3 with random weights, grouped-query attention."""
    folder.mkdir(parents=True)
    config = model.config
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


def start_server(url: str, *flags: str, inside: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start `kvdepot serve` and wait until it answers. inside: a prefix of the command, e.g. `ip netns exec NAME`."""
    server = subprocess.Popen(
        [
            *inside, *module_command("kvdepot.cli", "serve", "--url", url), "--arena-gib", "2",
            "--log-level", "warning", "--http", "off", *flags,
        ]
    )  # fmt: skip
    context: zmq.Context[Any] = zmq.Context()
    client = MessageQueueClient(url, context)
    try:
        get_lmcache_chunk_size(client)  # waits for an answer, or raises
    finally:
        client.close()
        context.term()
    return server


def run_engine(folder: Path, url: str, mode: str, inside: Sequence[str] = ()) -> dict[str, Any]:
    """Run the prompts on an engine in a process of its own; returns its measurements."""
    out, log, steps = folder / f"{mode}.json", folder / f"{mode}.log", folder / f"{mode}.steps"
    with (
        progress() as told,
        log.open("wb") as written,
        subprocess.Popen(
            [
                *inside, sys.executable, str(HERE / "engine.py"), str(folder / "model"), url,
                str(folder / "prompts.json"), str(out), mode, str(steps),
            ],
            env=os.environ | engine_environ(), stdout=written, stderr=subprocess.STDOUT,
        ) as engine,
    ):  # fmt: skip
        try:
            wait_for(engine, steps, told)
        finally:
            engine.kill()
    if engine.returncode or not out.exists():
        said = log.read_text(errors="replace")[-12000:]
        sys.exit(f"{said}\nthe {mode} engine failed; what it said last is above")
    results: dict[str, Any] = json.loads(out.read_text())
    return results


def wait_for(engine: subprocess.Popen[bytes], steps: Path, told: Progress) -> None:
    """Wait until it has ended; shows its progress, from the file of steps that it writes."""
    deadline = time.monotonic() + ENGINE_S
    told("vLLM starts", 0, 0)
    while True:
        try:
            engine.wait(0.2)
            return
        except subprocess.TimeoutExpired:
            done, _, total = steps.read_text().partition(" ") if steps.exists() else ("", "", "")
            if total:
                told("prompts", int(done), int(total))
        if time.monotonic() > deadline:
            sys.exit(f"the engine has not ended in {ENGINE_S:.0f} s")


def engine_environ() -> dict[str, str]:
    """What an engine's environment has besides ours: all processors, unless they were chosen."""
    return {"VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", all_cpus())}


def all_cpus() -> str:
    return ",".join(map(str, sorted(os.sched_getaffinity(0))))


def difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    """The difference between two runs of a prompt."""
    if one["tokens"] == other["tokens"] and one["logprobs"] == other["logprobs"]:
        return "none"
    same = next((i for i, (a, b) in enumerate(zip(one["tokens"], other["tokens"], strict=True)) if a != b), None)
    gaps = [
        abs(a[token] - b[token])
        for a, b in zip(one["logprobs"][: same or None], other["logprobs"][: same or None], strict=True)
        for token in a.keys() & b.keys()
    ]
    where = "" if same is None else f", token {same} differs"
    return f"logprobs by {max(gaps, default=0.0):.4f}{where}"


def prompt_length(text: str) -> int:
    """Parse a value of --lengths."""
    if not (text.isascii() and text.isdigit() and FEWEST_TOKENS <= int(text) <= MOST_TOKENS):
        raise argparse.ArgumentTypeError(
            f"a prompt has {FEWEST_TOKENS} tokens (a chunk, and one more) to {MOST_TOKENS}, not {text!r}"
        )
    return int(text)


def prepare(folder: Path, model: Model, lengths: Sequence[int] | None) -> dict[str, list[int]]:
    """Write model and prompts into a new `folder`; returns the prompts by name. Without lengths: the model's own."""
    generator = random.Random(2026)
    prompts = {
        f"{i + 1}: {length} tokens": [generator.randrange(3, model.config["vocab_size"]) for _ in range(length)]
        for i, length in enumerate(lengths or model.lengths)
    }
    write_model(folder / "model", model)
    (folder / "prompts.json").write_text(json.dumps(prompts))
    print(f"model: {model}", flush=True)
    return prompts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", choices=MODELS, help="only this model: llama, or windows (sliding windows beside full attention)"
    )
    parser.add_argument(
        "--lengths", type=prompt_length, metavar="N", nargs="+", help="prompt lengths in tokens, for each model"
    )
    parser.add_argument(
        "--url",
        nargs="?",
        const="",
        help="use the server that runs there (without a value: KVDEPOT_URL's, or this user's)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there, for plots.py")
    parser.add_argument(
        "--plots", type=Path, metavar="FOLDER", help="write the numbers (demo.json) and pictures of them there"
    )
    args = parser.parse_args()
    load = os.getloadavg()[0]
    measured, between, talked = [], [], None
    with tempfile.TemporaryDirectory(prefix="kvdepot-demo-") as name, serving(Path(name), args.url) as url:
        print_machine()
        for kind in [args.model] if args.model else MODELS:
            folder = Path(name, kind)
            prompts = prepare(folder, MODELS[kind], args.lengths)
            print("engine A: cold prefill, stores its KV", flush=True)
            cold = run_engine(folder, url, "cold")
            print("engine A stopped; engine B: the same prompts from the depot", flush=True)
            warm = run_engine(folder, url, "warm")
            measured.append(Measured(kind, prompts, cold, warm))
            if kind == "llama" and not args.lengths:
                print("engine B stopped; engine C computes prompts, engine D decodes them", flush=True)
                between = apart.measure(folder, url, engine_environ())
        if not args.model and not args.lengths:
            talked = multi_turn.measure(url)
    shown = figures(measured, load)
    if between:
        shown["apart"] = [vars(each) for each in between]
    if talked:
        shown["chats"] = talked.figures()
    code = report(measured)
    if between and not apart.report(between):
        print("FAILED: an output differs, or the decoder computed what the prefill engine had")
        code = 1
    if talked and not multi_turn.report(talked):
        print("FAILED: an answer differs, or the depot saved nothing")
        code = 1
    if args.json:
        args.json.write_text(json.dumps(shown, indent=2) + "\n")
    if args.plots:
        write_plots(shown, args.plots)
    return code


def write_plots(shown: dict[str, Any], folder: Path) -> None:
    """Write the numbers and, if matplotlib is installed, pictures of them."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = folder / "demo.json"
    numbers.write_text(json.dumps(shown, indent=2) + "\n")
    print(f"\n{numbers}", flush=True)
    if importlib.util.find_spec("matplotlib") is None:
        print(f"no pictures: with matplotlib installed, `python {HERE / 'plots.py'} {numbers} {folder}` draws them")
    else:
        subprocess.run([sys.executable, str(HERE / "plots.py"), str(numbers), str(folder)], check=True)


def print_machine() -> None:
    print(f"machine: {cpu_name()}, {os.cpu_count()} cores, Python {platform.python_version()}", flush=True)


@contextmanager
def serving(folder: Path, url: str | None) -> Iterator[str]:
    """The server at `url` (empty: this user's), or, for None, one of our own; yields its endpoint."""
    if url is not None:
        url = load(flags={"url": url or None}).url
        with admin.connect(url):  # fails before an engine is started, which takes a while
            print(f"using the server at {url}", flush=True)
        yield url
        return
    print("starting kvdepot serve", flush=True)
    url = f"ipc://{folder}/depot.sock"
    server = start_server(url)
    try:
        yield url
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def figures(measured: Sequence[Measured], load: float) -> dict[str, Any]:
    """The measurements as plain data: the Llama's, which plots.py draws, beside the machine's; others by their name.

    Times in seconds. load: the machine's load at the start.
    """
    shown: dict[str, Any] = {"processor": cpu_name(), "cores": os.cpu_count(), "load": round(load, 1)}
    for each in measured:
        found = figures_of(each)
        shown |= found if each.name == "llama" else {each.name: found}
    return shown


def figures_of(measured: Measured) -> dict[str, Any]:
    """Those of one model."""
    cold, warm = measured.cold, measured.warm
    return {
        "layers": MODELS[measured.name].config["num_hidden_layers"],
        "prompts": [
            {
                "tokens": len(tokens),
                "cold_s": cold[name]["first"]["ttft"],
                "depot_s": warm[name]["first"]["ttft"],
                "own_s": warm[name]["own"]["ttft"],
                "retrieved_tokens": warm[name]["first"]["cached"],
                "identical": is_identical(warm[name]),
            }
            for name, tokens in measured.prompts.items()
        ],
    }


def is_identical(runs: dict[str, Any]) -> bool:
    """Whether KV from the depot gave the same tokens and logprobs as the engine's own cache."""
    depot, own = runs["first"], runs["own"]
    return bool(depot["tokens"] == own["tokens"] and depot["logprobs"] == own["logprobs"])


def report(measured: Sequence[Measured]) -> int:
    """Print the times; returns the exit code."""
    titles = f"{'prompt':<16} {'TTFT cold':>10} {'depot':>10} {'own cache':>10} {'speed-up':>9} {'retrieved':>10}"
    good = True
    for each in measured:
        print(f"\n{MODELS[each.name]}\n{titles} identical  cold differs by")
        for name in each.prompts:
            first, depot, own = each.cold[name]["first"], each.warm[name]["first"], each.warm[name]["own"]
            identical = is_identical(each.warm[name])
            good &= identical and depot["cached"] > 0
            print(
                f"{name:<16} {first['ttft'] * 1e3:>7.0f} ms {depot['ttft'] * 1e3:>7.0f} ms "
                f"{own['ttft'] * 1e3:>7.0f} ms {first['ttft'] / depot['ttft']:>8.1f}x {depot['cached']:>10} "
                f"{'yes' if identical else 'NO':<9}  {difference(first, own)}"
            )
    print()
    print(
        "identical: tokens and logprobs from the depot equal those of the engine's own prefix-cache hit, bit for bit."
    )
    print(
        "A cold run computes the prompt in other batches, so a random-weight bf16 model may differ from it by rounding."
    )
    if not good:
        print("FAILED: an output differs, or nothing was retrieved")
    return 0 if good else 1


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KVDepotError as exc:
        sys.exit(f"kvdepot: {exc}")
    except KeyboardInterrupt:
        sys.exit(130)
