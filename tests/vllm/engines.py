"""Tiny random models, and real vLLM engines on them."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import itertools
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kvdepot.memory.arena_header import ArenaHeader
from kvdepot.memory.records import NamespaceRecord, Records, ShardRecord
from tests.conftest import SHM, Depot, eventually

ROOT = Path(__file__).parents[2]
START_S = 600
ANSWER_S = 300
END_S = 120
ENVIRON = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "INFO", "VLLM_NO_USAGE_STATS": "1", "OMP_WAIT_POLICY": "passive",
    "TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip
"""One thread each, on any core: threads of several engines that wait for each other on two cores take four times as
long.
"""
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
"""For vLLM's runner V2, which is written in Triton: its kernels are interpreted, as Triton cannot compile for CPUs."""
BLOCKS = 512
"""Of 128 tokens, or of 16 with MLA: prompts have less than 2,048 tokens here, and mostly run one at a time."""

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WIDE: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 256}
"""8 KiB of KV a token and layer in float32, 4 KiB in bfloat16: 32 tokens of the models here are worth a chunk."""
MLA: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 256,
    "intermediate_size": 512, "moe_intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 2,
    "moe_layer_freq": 1, "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "vocab_size": 1000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "torch_dtype": "bfloat16", "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "scoring_func": "softmax", "topk_method": "greedy", "routed_scaling_factor": 1.0, "norm_topk_prob": False,
}  # fmt: skip
WINDOWS: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000,
    "max_position_embeddings": 4096, "sliding_window": 512, "rms_norm_eps": 1e-6, "torch_dtype": "float32",
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 64, "hidden_activation": "gelu_pytorch_tanh", "bos_token_id": 1, "eos_token_id": 2,
    "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip
"""Sliding windows beside full attention: a group of one layer with all tokens, and three of one layer with windows."""
STATES: dict[str, Any] = LLAMA | {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 4, "rms_norm_eps": 1e-6,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "decoder_sparse_step": 1, "mlp_only_layers": [0, 1, 2], "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "norm_topk_prob": True,
}  # fmt: skip
"""States (gated delta net) beside full attention; vLLM runs it on processors in bfloat16 only."""
EXPERTS: dict[str, Any] = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 8,
    "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}  # fmt: skip
"""A mixture of experts: rounding decides between experts that are about as good."""


_commands = itertools.count(1)
_OLDER_S = 3.0
"""Files that changed in the last two seconds before an engine's start may be newer than the engine: not shared."""
_written = 0.0  # when this process last wrote a model or an adapter


def _note_written() -> None:
    global _written
    _written = time.time()


def write_model(folder: Path, config: dict[str, Any], seed: int = 0) -> Path:
    """A model with random weights, large enough that every token depends on the whole prompt."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden)}
    norms = {"model.norm": hidden}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        norms |= {f"{name}.input_layernorm": hidden, f"{name}.post_attention_layernorm": hidden}
        if config["model_type"] == "gemma3_text":
            norms |= {f"{name}.{part}_feedforward_layernorm": hidden for part in ("pre", "post")}
            norms |= {f"{name}.self_attn.{part}_norm": config["head_dim"] for part in "qk"}
        shapes |= {f"{name}.mlp.{part}_proj": (inner, hidden) for part in ("gate", "up")}
        shapes[f"{name}.mlp.down_proj"] = (hidden, inner)
        if config["model_type"] == "qwen3_next":
            _add_qwen3_next(config, layer, name, shapes, norms)
            continue
        attention = f"{name}.self_attn"
        if config["model_type"] == "qwen3_moe":
            norms |= {f"{attention}.{part}_norm": config["head_dim"] for part in "qk"}
            _add_experts(config, name, shapes)
        if config["model_type"].startswith("deepseek"):
            latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
            plain, value = config["qk_nope_head_dim"], config["v_head_dim"]
            norms[f"{attention}.kv_a_layernorm"] = latent
            shapes |= {
                f"{attention}.q_proj": (heads * (plain + rope), hidden),
                f"{attention}.kv_a_proj_with_mqa": (latent + rope, hidden),
                f"{attention}.kv_b_proj": (heads * (plain + value), latent),
                f"{attention}.o_proj": (hidden, heads * value),
            }
        else:
            width = config["head_dim"]
            shapes |= {f"{attention}.{part}_proj": (config["num_key_value_heads"] * width, hidden) for part in "kv"}
            shapes |= {f"{attention}.q_proj": (heads * width, hidden), f"{attention}.o_proj": (hidden, heads * width)}
    if config["tie_word_embeddings"]:
        del shapes["lm_head"]
    weights = draw(shapes, norms, config, seed)
    dtype = weights["model.norm.weight"].dtype
    for name in [name for name in norms if name.endswith("linear_attn.norm")]:  # a state that forgets slowly
        decay = torch.full((config["linear_num_value_heads"],), -4.0)
        weights |= {name.replace("norm", "A_log"): decay, name.replace("norm", "dt_bias"): decay.to(dtype)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _note_written()
    return folder


def draw(
    shapes: dict[str, tuple[int, ...]], norms: dict[str, int], config: dict[str, Any], seed: int = 0
) -> dict[str, torch.Tensor]:
    """Random weights of these shapes, and norms that change nothing."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if config["torch_dtype"] == "float32" else torch.bfloat16
    weights = {f"{name}.weight": torch.ones(size, dtype=dtype) for name, size in norms.items()}
    for name, shape in shapes.items():
        weights[f"{name}.weight"] = (torch.randn(*shape, generator=generator) * 0.1).to(dtype)
    return weights


def _add_qwen3_next(
    config: dict[str, Any], layer: int, name: str, shapes: dict[str, Any], norms: dict[str, int]
) -> None:
    """The weights of one layer."""
    hidden, width, heads = config["hidden_size"], config["head_dim"], config["num_attention_heads"]
    if config["layer_types"][layer] == "linear_attention":
        key = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        value = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        shapes |= {
            f"{name}.linear_attn.in_proj_qkvz": (2 * key + 2 * value, hidden),
            f"{name}.linear_attn.in_proj_ba": (2 * config["linear_num_value_heads"], hidden),
            f"{name}.linear_attn.conv1d": (2 * key + value, 1, config["linear_conv_kernel_dim"]),
            f"{name}.linear_attn.out_proj": (hidden, value),
        }
        norms[f"{name}.linear_attn.norm"] = config["linear_value_head_dim"]
    else:
        attention = f"{name}.self_attn"
        shapes |= {f"{attention}.{part}_proj": (config["num_key_value_heads"] * width, hidden) for part in "kv"}
        shapes |= {f"{attention}.q_proj": (2 * heads * width, hidden), f"{attention}.o_proj": (hidden, heads * width)}
        norms |= {f"{attention}.{part}_norm": width for part in "qk"}
    if layer not in config["mlp_only_layers"]:
        _add_experts(config, name, shapes, "shared_expert")
        shapes[f"{name}.mlp.shared_expert_gate"] = (1, hidden)


def _add_experts(config: dict[str, Any], name: str, shapes: dict[str, Any], *shared: str) -> None:
    """Experts in place of one layer's MLP."""
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    for part in ("gate", "up", "down"):
        del shapes[f"{name}.mlp.{part}_proj"]
    for expert in (*shared, *(f"experts.{i}" for i in range(config["num_experts"]))):
        shapes |= {f"{name}.mlp.{expert}.{part}_proj": (inner, hidden) for part in ("gate", "up")}
        shapes[f"{name}.mlp.{expert}.down_proj"] = (hidden, inner)
    shapes[f"{name}.mlp.gate"] = (config["num_experts"], hidden)


def write_lora(folder: Path, seed: int) -> Path:
    """A LoRA adapter of `LLAMA` with random weights."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LLAMA["num_hidden_layers"]):
        for name, width in (("q_proj", 256), ("v_proj", 128)):
            base = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{base}.lora_A.weight"] = torch.randn(8, 256, generator=generator) * 0.1
            weights[f"{base}.lora_B.weight"] = torch.randn(width, 8, generator=generator) * 0.1
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "peft_type": "LORA"})
    )
    _note_written()
    return folder


def prompt(seed: int, tokens: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, 1000) for _ in range(tokens)]


class Nursery:
    """The process that has imported vLLM, of the environment with this Python, and forks engines (see child.py)."""

    def __init__(self, python: str, model_runner: str) -> None:
        """Connect to the one of this test run, whose workers share it; start it if there is none."""
        self._runner = V2 if model_runner == "V2" else {}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
        address = f"\0kvdepot-test-nursery-{run}-{model_runner}-{zlib.crc32(python.encode())}"  # not a file
        self._channel = eventually(lambda: self._connect(address) or self._start(address, python), START_S)

    def _connect(self, address: str) -> socket.socket | None:
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.settimeout(START_S)
        with contextlib.suppress(ConnectionError):
            channel.connect(address)
            if channel.recv(16):
                return channel
        channel.close()
        return None

    def _start(self, address: str, python: str) -> None:
        assert not (self._process and self._process.poll()), "it has failed"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(address)
            except OSError:  # another worker is about to start it, or it is about to end
                return
            listener.listen()
            self._process = subprocess.Popen(  # ends with its last connection
                [python, "-m", "tests.vllm.child", str(listener.fileno())], stdin=subprocess.DEVNULL, cwd=ROOT,
                env=self._environ() | {"OPENBLAS_NUM_THREADS": "1"},  # a process that forks must have one thread
                pass_fds=[listener.fileno()],
            )  # fmt: skip

    def _environ(self) -> dict[str, str]:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        return os.environ | ENVIRON | {"PYTHONPATH": path} | self._runner

    def fork(self, arguments: dict[str, Any], fds: list[int]) -> int:
        """Fork an engine with vLLM's `arguments` and this process's environment. Returns its process id.

        fds: its channel, its log, and the file that it keeps.
        """
        message = json.dumps({"do": "fork", "arguments": arguments, "environ": self._environ()}).encode()
        with self._lock:
            socket.send_fds(self._channel, [message], fds)
            return int(json.loads(self._channel.recv(64)))

    def wait(self, pid: int) -> int:
        """The exit code of an engine that has ended, or is about to."""
        with self._lock:
            self._channel.send(json.dumps({"do": "wait", "pid": pid}).encode())
            return int(json.loads(self._channel.recv(64)))

    def close(self) -> None:
        self._channel.close()
        if self._process:
            with contextlib.suppress(subprocess.TimeoutExpired):  # others go on
                self._process.wait(END_S)


@functools.cache
def nursery(python: str = sys.executable, model_runner: str = "V1") -> Nursery:
    """This process's one for an environment, and one of vLLM's runners."""
    made = Nursery(python, model_runner)
    atexit.register(made.close)
    return made


class Engine:
    """One vLLM engine with `KVDepotConnector`: its front end, engine core and workers in processes of their own."""

    def __init__(
        self, model: Path, url: str, role: str = "kv_both", extra: dict[str, Any] | None = None,
        python: str = sys.executable, model_runner: str = "V1", **arguments: Any,
    ) -> None:  # fmt: skip
        """Start one. By default it loads its first hit, as tests of what is loaded start fresh engines for single
        prompts; test_trust.py has the others.

        python: of the environment with vLLM. model_runner: V1, or V2, which GPUs have by default.

        arguments: vLLM's, and `command`, the command line by which its name as a writer differs (by default unlike any
        other's). Its processes are forked from one that has imported vLLM.
        """
        options = {
            "model": str(model), "skip_tokenizer_init": True, "enforce_eager": True, "num_gpu_blocks_override": BLOCKS,
            "max_model_len": 4096, "max_num_seqs": 8, "max_num_batched_tokens": 1024, "disable_log_stats": False,
            "command": f"engine {os.getpid()}-{next(_commands)}",
            "mamba_ssm_cache_dtype": "float32",  # else it, and with it the length of blocks, depends on the processor
            "kv_transfer_config": {
                "kv_connector": "KVDepotConnector",
                "kv_role": role,
                "kv_connector_extra_config": {"kvdepot.url": url, "kvdepot.trust": "given", **(extra or {})},
            },
        } | arguments  # fmt: skip
        eventually(lambda: time.time() > _written + _OLDER_S)
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self._channel, theirs = socket.socketpair()
        self._nursery = nursery(python, model_runner)
        file = Path(f"/proc/self/fd/{self.log.fileno()}")
        with theirs, file.open("ab", buffering=0) as log, file.open("ab", buffering=0) as alive:
            fcntl.flock(alive, fcntl.LOCK_SH)  # until the last of the engine's processes has ended
            self.pid = self._nursery.fork(options, [theirs.fileno(), log.fileno(), alive.fileno()])
        self._process = os.pidfd_open(self.pid)
        self._lines = self._channel.makefile("r")
        self._exit_code: int | None = None
        self.number = 0

    def wait_started(self) -> Engine:
        self._answer(START_S)
        return self

    def _answer(self, timeout_s: float) -> Any:
        self._channel.settimeout(timeout_s)
        try:
            line = self._lines.readline()
        except (TimeoutError, ConnectionError):
            line = ""
        answer = json.loads(line) if line else {"error": "the engine died, or did not answer in time"}
        if "error" in answer:
            raise EngineError(f"{answer['error']}\n{self.logged()[-60000:]}")
        return answer["ok"]

    def logged(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def tell(self, do: str, **command: Any) -> Any:
        self._channel.sendall(json.dumps({"do": do, **command}).encode() + b"\n")
        return self._answer(ANSWER_S)

    def request(self, tokens: list[int], **options: Any) -> dict[str, Any]:
        self.number += 1
        return {"id": f"r{self.number}", "tokens": tokens, **options}

    def run(self, tokens: list[int], **options: Any) -> dict[str, Any]:
        """One request: its tokens, logprobs, and how many of its prompt tokens were cached."""
        request = self.request(tokens, **options)
        (result,) = self.tell("run", requests=[request]).values()
        return dict(result)

    def run_fresh(self, tokens: list[int], **options: Any) -> dict[str, Any]:
        """The same with the engine's own prefix cache emptied before."""
        self.tell("reset")
        return self.run(tokens, **options)

    def wait(self) -> int:
        """Wait until the process has ended by itself. Returns its exit code."""
        if self._exit_code is None:
            assert select.select([self._process], [], [], END_S)[0], f"still there:\n{self.logged()[-4000:]}"
            self._exit_code = self._nursery.wait(self.pid)
        return self._exit_code

    def is_gone(self) -> bool:
        """Whether all of its processes have ended."""
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self.log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def stop(self) -> None:
        self.tell("stop")
        assert self.wait() == 0, self.logged()[-4000:]
        eventually(self.is_gone)
        assert "disagree" not in self.logged(), "the engine's processes describe it differently"

    def close(self) -> None:
        if not self.is_gone():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.wait()
            eventually(self.is_gone)
        os.close(self._process)
        self._lines.close()
        self._channel.close()
        self.log.close()


class EngineError(Exception):
    """The engine's process answered with an error, or not at all."""


def output(result: dict[str, Any]) -> tuple[Any, Any]:
    """The part of an answer that must be equal bit for bit."""
    return result["tokens"], result["logprobs"]


def nothing_is_held(status: dict[str, Any]) -> bool:
    """Whether an idle engine holds no chunk any more; ends of sessions are not answered."""
    return bool(status["reserved_shards"] == status["holds"] == status["operations"] == 0)


def same_as_own(engine: Engine, tokens: list[int], cached: int, exact: bool = True) -> None:
    """An engine without these tokens gets them from the depot, and gives what it gives with blocks that it computed.

    exact: bit for bit, as what is in the depot was computed in the same steps.
    """
    salt = f"never used before {engine.number}"
    assert engine.run_fresh(tokens, salt=salt)["cached"] == 0
    own = engine.run(tokens, salt=salt)
    from_depot = engine.run_fresh(tokens)
    found = from_depot["cached"], own["cached"]
    assert found == (cached, cached), f"{found} tokens came from the depot and the engine's own cache, not {cached}"
    assert from_depot["tokens"] == own["tokens"]
    if exact:
        assert output(from_depot) == output(own)
    else:
        assert_close(from_depot, own)


def assert_close(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Two answers have the same likeliest tokens, which are as likely but for rounding."""
    assert [dict(step).keys() for step in one["logprobs"]] == [dict(step).keys() for step in other["logprobs"]]
    for step, same in zip(one["logprobs"], other["logprobs"], strict=True):
        assert all(abs(mine[1] - theirs[1]) < 1e-3 for mine, theirs in zip(step, same, strict=True))


def run_preempted(engine: Engine, prompts: list[list[int]], max_tokens: int) -> None:
    """Run prompts together on an engine whose KV space is too small for all."""
    engine.tell("run", requests=[engine.request(tokens, max_tokens=max_tokens) for tokens in prompts])
    assert engine.tell("preemptions") > 0, "the KV space was not tiny enough to test anything"


def spoil_a_part(depot: Depot, is_meant: Callable[[ShardRecord], object] = lambda part: True) -> None:
    """Change one byte in the server's memory, of one chunk's part of a window or a state, if the model has any."""
    with (SHM / depot.name).open("r+b") as file:
        header = ArenaHeader.read(file.fileno(), file.name)
        assert header is not None
        table = header.read_table(file.fileno())
        records = [record for _, record in Records(memoryview(table)).read().records]
        reaches = {r.number: r.groups[r.group][0] for r in records if isinstance(r, NamespaceRecord)}
        part = max(
            (r for r in records if isinstance(r, ShardRecord) and is_meant(r)), key=lambda r: reaches[r.namespace]
        )
        place = part.extents[0][0] + 1000
        (value,) = os.pread(file.fileno(), 1, place)
        os.pwrite(file.fileno(), bytes([value ^ 1]), place)
