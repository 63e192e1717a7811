"""A real vLLM engine's time to first token, with the connector and without.

Two engines of the same random-weight model run side by side, one with the connector, and are measured alternately, so
that drifts of the machine affect both; while one computes, the other sleeps. A third one decodes what the connected one
has computed. The time is that from before the request
is added until the step that returns its first token. Prompts end a few tokens behind a chunk, so that the depot and the
engine's own cache hold the same part of each. The models are a Llama, and two hybrid ones: with sliding windows beside
full attention, like Gemma 3, and with states beside it, like Qwen3-Next.

    python engine.py MODEL_DIR TOKENS DTYPE DEPOT_URL ROLE     one engine, which takes commands on its stdin
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import zmq
from common import EngineProcess, Scale, Serve, say, transfer_config
from report import Figure, at_least, at_most

from kvdepot.client import MessageQueueClient
from kvdepot.protocol import wire

__all__ = ["LLAMA", "Depot", "PromptEngine", "fastest_dtype", "run", "write_config"]

_TAIL_TOKENS = 17
_BATCH = 4
"""Prompts at once, of a quarter of the tokens each, where the throughput is measured."""
_DECODED_TOKENS = 32
"""Of each prompt in a batch."""
_VOCABULARY = 32000
_COMMON: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_KV_NUMBERS = 2 * 8 * 128
"""Elements of KV per token and layer: keys and values of 8 heads of 128."""
_RECURRENT_BYTES = 4
"""Of an element of a recurrent state, which vLLM keeps in float32 on CPUs."""


@dataclass(frozen=True)
class _Model:
    """title: in figures. config: all but `_COMMON`. kinds: of layers, repeated. dtype: empty for the fastest here.
    bar: of a first token from the depot.
    """

    title: str
    config: dict[str, Any]
    kinds: tuple[str, ...] = ("full_attention",)
    dtype: str = ""
    bar: float = 1.1

    def layers(self, count: int) -> list[str]:
        """The kind of each of about `count` layers: whole repetitions."""
        return list(self.kinds) * max(1, count // len(self.kinds))

    def content(self, kinds: list[str], tokens: int, chunk_tokens: int, item_bytes: int) -> int:
        """Bytes that a prompt must leave behind so that others can be resumed at its boundaries: all tokens of full
        attention; of a window, at its end and after every 16 chunks, all tokens of it but one; the states at its end.
        """
        total = kinds.count("full_attention") * tokens * _KV_NUMBERS * item_bytes
        if "sliding_attention" in kinds:
            boundaries = {tokens, *range(16 * chunk_tokens, tokens, 16 * chunk_tokens)}
            held = sum(min(end, self.config["sliding_window"] - 1) for end in boundaries)
            total += kinds.count("sliding_attention") * held * _KV_NUMBERS * item_bytes
        if "linear_attention" in kinds:
            keys = self.config["linear_num_key_heads"] * self.config["linear_key_head_dim"]
            values = self.config["linear_num_value_heads"] * self.config["linear_value_head_dim"]
            convolution = (2 * keys + values) * (self.config["linear_conv_kernel_dim"] - 1)
            recurrent = values * self.config["linear_key_head_dim"]
            total += kinds.count("linear_attention") * (convolution * item_bytes + recurrent * _RECURRENT_BYTES)
        return total


LLAMA = _Model("", {"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
_WINDOWS = _Model(
    ", windows",
    {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 1024,
        "query_pre_attn_scalar": 128, "hidden_activation": "gelu_pytorch_tanh", "rope_local_base_freq": 10000.0,
        "tie_word_embeddings": True,
    },
    ("sliding_attention", "sliding_attention", "sliding_attention", "full_attention"),
    "float32", 1.15,
)  # fmt: skip
_STATES = _Model(
    ", states",
    {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 4,
        "linear_num_value_heads": 8, "decoder_sparse_step": 1, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256, "norm_topk_prob": True,
    },
    ("linear_attention", "linear_attention", "linear_attention", "full_attention"),
    "bfloat16", 1.15,
)  # fmt: skip


def run(scale: Scale, notes: list[str]) -> list[Figure]:
    """For each model, figures for cold prompts, the engine's own cache hit, a hit in the depot, and what is stored."""
    return [figure for model in (LLAMA, _WINDOWS, _STATES) for figure in _run(model, scale, notes)]


def _run(model: _Model, scale: Scale, notes: list[str]) -> list[Figure]:
    context: zmq.Context[Any] = zmq.Context()
    dtype, item_bytes = (model.dtype, 4 if model.dtype == "float32" else 2) if model.dtype else fastest_dtype()
    kinds = model.layers(scale.engine_layers)
    kv_bytes = scale.engine_tokens * len(kinds) * _KV_NUMBERS * item_bytes  # at most: windows and states take less
    prompts = 2 * (scale.cold_runs + 1) + scale.batch_runs + 1  # alone, on two engines, and in batches
    server = Serve(arena_gib=(kv_bytes * prompts + (256 << 20)) / 2**30)
    engines: list[PromptEngine] = []
    client = None
    with tempfile.TemporaryDirectory(prefix="kvdepot-bench-") as folder:
        write_config(Path(folder), model, kinds)
        try:
            server.wait_populated(context)
            client = MessageQueueClient(server.url, context)
            roles = [("", ""), (server.url, "kv_both"), (server.url, "kv_consumer")][: 3 if model is LLAMA else 2]
            say(f"engine{model.title}: starting vLLM {len(roles)} times")
            engines = [PromptEngine(folder, scale.engine_tokens, dtype, url, role) for url, role in roles]
            for engine in engines:
                engine.hear()
            notes.append(
                f"engine: {model.config['model_type']} of {len(kinds)} layers, hidden size {_COMMON['hidden_size']}, "
                f"8 KV heads of 128, {dtype}"
            )
            depot = Depot(client)
            figures = _measure(model, item_bytes, scale, engines[0], engines[1], depot, notes)
            return [*figures, *(_measure_apart(scale, *engines, depot) for _ in engines[2:])]
        finally:
            for engine in engines:
                engine.close()
            if client is not None:
                client.close()
            server.close()
            context.term()


def write_config(folder: Path, model: _Model, kinds: list[str]) -> None:
    """The model's config.json; weights are random."""
    config = {**_COMMON, **model.config, "num_hidden_layers": len(kinds)}
    if len(model.kinds) > 1:
        config["layer_types"] = kinds
    (folder / "config.json").write_text(json.dumps(config))


def fastest_dtype() -> tuple[str, int]:
    """The model's dtype and its size: on x86 without AVX-512, bf16 products are 6 times as slow."""
    slow = platform.machine() == "x86_64" and " avx512f " not in Path("/proc/cpuinfo").read_text()
    return ("float32", 4) if slow else ("bfloat16", 2)


class Depot:
    """The server's status."""

    def __init__(self, client: MessageQueueClient) -> None:
        self._client = client

    def wait_idle(self) -> None:
        while self.status()["operations"]:
            time.sleep(0.01)

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._client.ask(wire.GetStatus()).result(10.0)
        return answer


def _measure(
    model: _Model,
    item_bytes: int,
    scale: Scale,
    plain: PromptEngine,
    connected: PromptEngine,
    depot: Depot,
    notes: list[str],
) -> list[Figure]:
    both = (plain, connected)
    cold: dict[PromptEngine, list[float]] = {plain: [], connected: []}
    own: dict[PromptEngine, list[float]] = {plain: [], connected: []}
    served: list[float] = []
    floors: list[float] = []
    say("engine: nothing cached")
    tokens = scale.engine_tokens
    for number in range(-1, scale.cold_runs):  # the first warms up, and says how long a chunk is
        for engine in both if number % 2 else both[::-1]:
            engine.reset()
            time.sleep(scale.engine_idle_s)
            seconds, cached = engine.first_token(number, tokens)
            depot.wait_idle()
            _expect(cached, 0)
            if number >= 0:
                cold[engine].append(seconds * 1000)
        if number < 0:
            connected.reset()  # what it still stores
            (namespace,) = depot.status()["namespaces"]
            chunk_tokens = namespace["chunk_tokens"]
            tokens = scale.engine_tokens // chunk_tokens * chunk_tokens
            before = depot.status()["stored_bytes"]
    connected.reset()
    stored = (depot.status()["stored_bytes"] - before) / scale.cold_runs
    content = model.content(model.layers(scale.engine_layers), tokens, chunk_tokens, item_bytes)
    say("engine: everything in its own cache")
    last = scale.cold_runs - 1
    for number in range(-1, scale.warm_runs):
        for engine in both if number % 2 else both[::-1]:
            time.sleep(scale.engine_idle_s)
            seconds, cached = engine.first_token(last, tokens)
            _expect(cached, tokens)
            if number >= 0:
                own[engine].append(seconds * 1000)
    say("engine: everything in the depot")
    copies = []
    for number in range(-1, scale.warm_runs):
        connected.reset()
        before = depot.status()["retrieved_bytes"]
        time.sleep(scale.engine_idle_s)
        seconds, cached = connected.first_token(last, tokens)
        _expect(cached, tokens)
        retrieved = depot.status()["retrieved_bytes"] - before
        time.sleep(scale.engine_idle_s)
        own_s, cached = plain.first_token(last, tokens)
        _expect(cached, tokens)
        source, target = np.ones(retrieved, np.uint8), np.ones(retrieved, np.uint8)
        begun = time.perf_counter()
        np.copyto(target, source)
        copy_s = time.perf_counter() - begun
        if number >= 0:
            served.append(seconds * 1000)
            floors.append((own_s + copy_s) * 1000)
            copies.append(retrieved / copy_s / 1e9)
    rates = _throughput(scale, both, depot)
    notes.append(
        f"engine{model.title}: {tokens} tokens are {retrieved / 2**20:.1f} MiB to resume at; "
        f"one numpy copy of them runs at {median(copies):.1f} GB/s"
    )
    title = f"8k tokens{model.title}"
    cold_bar = 1.02 if len(model.kinds) > 1 else 1.03
    return [
        at_most(f"vLLM first token, {title}, nothing cached", "ms", cold[connected], cold[plain], cold_bar),
        at_least(f"vLLM throughput, {_BATCH} x 2k tokens{model.title}, nothing cached", "tokens/s", *rates, 1 / 1.02),
        at_most(f"vLLM first token, {title} in its own cache", "ms", own[connected], own[plain], 1.1, 0.5),
        at_most(f"vLLM first token, {title} from the depot", "ms", served, floors, model.bar),
        at_most(f"vLLM stored, {title}", "MiB", [stored / 2**20], [content / 2**20], 1.05),
    ]


def _throughput(scale: Scale, both: tuple[PromptEngine, PromptEngine], depot: Depot) -> tuple[list[float], list[float]]:
    """Tokens computed per second with the connector and without, for batches of new prompts."""
    say("engine: batches with nothing cached")
    tokens = scale.engine_tokens // _BATCH
    rates: dict[PromptEngine, list[float]] = {engine: [] for engine in both}
    for number in range(-1, scale.batch_runs):  # the first warms up
        for engine in both if number % 2 else both[::-1]:
            engine.reset()
            time.sleep(scale.engine_idle_s)
            seconds = engine.batch(2000 + (number + 1) * _BATCH, tokens)
            depot.wait_idle()
            if number >= 0:
                rates[engine].append(_BATCH * (tokens + _TAIL_TOKENS + _DECODED_TOKENS) / seconds)
    plain, connected = both
    return rates[connected], rates[plain]


def _measure_apart(
    scale: Scale, plain: PromptEngine, prefill: PromptEngine, decoder: PromptEngine, depot: Depot
) -> Figure:
    """The decoder is asked as soon as the prefill engine has answered, and its first token counts."""
    say("engine: prefill and decode apart")
    apart: list[float] = []
    floors: list[float] = []
    tokens = scale.engine_tokens // 256 * 256
    for number in range(-1, scale.cold_runs):
        for engine in (plain, prefill, decoder):
            engine.reset()
        time.sleep(scale.engine_idle_s)
        alone_s, cached = plain.first_token(1000 + number, tokens)
        _expect(cached, 0)
        before = depot.status()["retrieved_bytes"]
        time.sleep(scale.engine_idle_s)
        prefill_s, cached = prefill.first_token(1000 + number, tokens)
        _expect(cached, 0)
        decode_s, cached = decoder.first_token(1000 + number, tokens)
        _expect(cached, tokens if number >= 0 else 0)  # its first hit is computed and compared
        copied = depot.status()["retrieved_bytes"] - before
        source, target = np.ones(copied, np.uint8), np.ones(copied, np.uint8)
        begun = time.perf_counter()
        np.copyto(target, source)
        np.copyto(source, target)
        if number >= 0:
            apart.append((prefill_s + decode_s) * 1000)
            floors.append((alone_s + time.perf_counter() - begun) * 1000)
        depot.wait_idle()
    return at_most("vLLM first token, 8k tokens, prefill and decode apart", "ms", apart, floors, 1.15)


def _expect(found: int, wanted: int) -> None:
    if found != wanted:
        raise RuntimeError(f"{found} where {wanted} should be cached or retrieved")


class PromptEngine(EngineProcess):
    """An engine that runs numbered prompts of random tokens. url: the depot's; empty: no connector."""

    def __init__(self, folder: str, tokens: int, dtype: str, url: str = "", role: str = "kv_both") -> None:
        super().__init__(__file__, folder, str(tokens), dtype, url, role)

    def reset(self) -> None:
        """Empty its own prefix cache."""
        self.ask(["reset"])

    def first_token(self, prompt: int, tokens: int) -> tuple[float, int]:
        """Run prompt number `prompt` with `tokens` tokens and a few more; returns seconds to the first token, and how
        many of its tokens were cached.
        """
        seconds, cached = self.ask(["run", prompt, tokens])
        return seconds, cached

    def batch(self, first: int, tokens: int) -> float:
        """Run prompts number `first` and the next ones at once; returns seconds until all of them have ended."""
        seconds: float = self.ask(["batch", first, tokens])
        return seconds


# -- the engine's process


def _serve(folder: str, tokens: int, dtype: str, url: str, role: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints

    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        load_format="dummy",
        dtype=dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=True,  # off by default where a model has states
        max_model_len=tokens + 256,
        max_num_seqs=4,
        max_num_batched_tokens=2048,
        **({"kv_transfer_config": transfer_config(url, role)} if url else {}),
    )
    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False, ignore_eos=True)
    decoding = SamplingParams(max_tokens=_DECODED_TOKENS, temperature=0, detokenize=False, ignore_eos=True)
    serial = 0

    def prompt(number: int, tokens: int) -> list[int]:
        ids: list[int] = np.random.default_rng(1000 + number).integers(3, _VOCABULARY, tokens + _TAIL_TOKENS).tolist()
        return ids

    def first_token(ids: list[int]) -> tuple[float, int]:
        nonlocal serial
        serial += 1
        engine = llm.llm_engine
        first, cached = 0.0, 0
        begun = time.perf_counter()
        engine.add_request(f"bench-{serial}", {"prompt_token_ids": ids}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if not first and output.outputs[0].token_ids:
                    first = time.perf_counter() - begun
                    cached = output.num_cached_tokens or 0
        return first, cached

    def batch(prompts: list[list[int]]) -> float:
        nonlocal serial
        engine = llm.llm_engine
        begun = time.perf_counter()
        for ids in prompts:
            serial += 1
            engine.add_request(f"bench-{serial}", {"prompt_token_ids": ids}, decoding)
        while engine.has_unfinished_requests():
            engine.step()
        return time.perf_counter() - begun

    def reset() -> bool:
        for _ in range(1000):
            if llm.reset_prefix_cache():
                return True
            time.sleep(0.01)  # stores in progress hold blocks
        raise RuntimeError("the engine does not give its blocks back")

    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        result: Any
        if command[0] == "reset":
            result = reset()
        elif command[0] == "batch":
            result = batch([prompt(command[1] + index, command[2]) for index in range(_BATCH)])
        else:
            result = first_token(prompt(command[1], command[2]))
        print(json.dumps(result), file=answers, flush=True)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
