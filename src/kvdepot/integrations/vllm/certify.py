"""The engine's side of `kvdepot certify`: one vLLM engine with a depot, driven by lines of JSON.

    python -m kvdepot.integrations.vllm.certify URL [vLLM's own arguments]

Standard input is a socket. A line that arrives is a command of cli/completions.py; a line that is sent is its answer,
or `{"error": ...}`; the first one describes the engine. The engine ends when its input does, also while it starts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time
from typing import NoReturn, TextIO

import msgspec
import vllm
from vllm import LLM, EngineArgs, SamplingParams, TokensPrompt
from vllm.config import KVTransferConfig
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvdepot.cli.completions import Completion, Description, Encode, Generate, Source
from kvdepot.errors import ConfigError, DeadlineExceeded

_RESET_S = 120.0
_HINTS: dict[Source, dict[str, bool]] = {
    "nothing": {"load": False, "store": False},
    "computing": {"load": False},
    "own cache": {"load": False, "store": False},
    "depot": {"store": False},
}
_NO_RESULT = {"kvdepot": {"loaded": 0}}
"""Stands for the result of a request that arrived before the engine found the server."""
_FAILED = "vllm:kvdepot_retrieve_failed_shards"


def _parse(words: list[str]) -> argparse.Namespace:
    """vLLM's own arguments, and the model and adapters as `vllm serve` names them. Raises ConfigError."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(add_help=False))
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--lora-modules", nargs="+", default=[])

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"vLLM: {message}")

    parser.error = refuse
    given: argparse.Namespace = parser.parse_args(words)
    if given.data_parallel_size > 1:
        raise ConfigError("certify runs one replica: leave out --data-parallel-size")
    given.model, given.disable_log_stats = given.model_tag or given.model, False
    return given


def _adapter(text: str, number: int) -> LoRARequest:
    """An adapter, as NAME=PATH or as JSON. Raises ConfigError."""
    try:
        found = json.loads(text) if text.startswith("{") else None
        name, path = (found["name"], found["path"]) if found else text.split("=", 1)
    except (ValueError, KeyError) as exc:
        raise ConfigError(f"--lora-modules: {text!r} is not NAME=PATH") from exc
    return LoRARequest(name, number, path)


class PromptRunner:
    """vLLM's front end; the engine core and the workers are processes of their own."""

    def __init__(self, url: str, words: list[str]) -> None:
        """words: vLLM's arguments. Blocks until the model is loaded. Raises ConfigError, and what vLLM raises."""
        given = _parse(words)
        transfer = given.kv_transfer_config = given.kv_transfer_config or KVTransferConfig(kv_role="kv_both")
        transfer.kv_connector = transfer.kv_connector or "KVDepotConnector"
        transfer.kv_connector_extra_config = {**transfer.kv_connector_extra_config, "kvdepot.url": url}
        self._adapters = [None, *(_adapter(text, number) for number, text in enumerate(given.lora_modules, 1))]
        self._llm = LLM.from_engine_args(EngineArgs.from_cli_args(given))

    def describe(self) -> Description:
        config = self._llm.llm_engine.vllm_config
        model, parallel, speculation = config.model_config, config.parallel_config, config.speculative_config
        names = [each.lora_name for each in self._adapters if each]
        sizes = {"tensor": parallel.tensor_parallel_size, "pipeline": parallel.pipeline_parallel_size}
        tried = {
            "vLLM": vllm.__version__, "dtype": str(model.dtype).removeprefix("torch."),
            "KV dtype": config.cache_config.cache_dtype, "quantization": model.quantization or "",
            "GPU": current_platform.get_device_name() if current_platform.is_cuda() else "",
            **{f"{name} parallelism": str(size) if size > 1 else "" for name, size in sizes.items()},
            "speculative decoding": speculation.method if speculation else "", "LoRA adapters": ", ".join(names),
        }  # fmt: skip
        return Description(
            model.model, tried, names, config.cache_config.block_size, model.max_model_len, model.get_vocab_size(),
            not model.skip_tokenizer_init, config.cache_config.num_gpu_blocks or 0,
        )  # fmt: skip

    def handle(self, command: Generate | Encode) -> list[Completion] | list[int]:
        if isinstance(command, Encode):
            return list(self._llm.get_tokenizer().encode(command.text))
        deadline = time.monotonic() + _RESET_S
        while command.source != "own cache" and not self._llm.reset_prefix_cache():
            if time.monotonic() > deadline:  # blocks that are being stored are in use
                raise DeadlineExceeded(f"the engine's prefix cache was in use for {_RESET_S:g} s")
            time.sleep(0.01)
        params = SamplingParams(
            temperature=0, max_tokens=command.new_tokens, logprobs=5, ignore_eos=True, detokenize=False,
            extra_args={"kv_transfer_params": {"kvdepot": _HINTS[command.source]}},
        )  # fmt: skip
        prompts = [TokensPrompt(prompt_token_ids=tokens) for tokens in command.prompts]
        failed = -self._failed()
        outputs = self._llm.generate(prompts, params, use_tqdm=False, lora_request=self._adapters[command.adapter])
        failed += self._failed()
        return [
            Completion(
                output.metrics.first_token_latency, list(output.outputs[0].token_ids),
                [{str(token): p.logprob for token, p in step.items()} for step in output.outputs[0].logprobs],
                output.num_cached_tokens or 0, (output.kv_transfer_params or _NO_RESULT)["kvdepot"]["loaded"], failed,
                output.metrics.first_token_latency + output.metrics.last_token_ts - output.metrics.first_token_ts,
            )
            for output in outputs
        ]  # fmt: skip

    def _failed(self) -> int:
        return sum(int(each.value) for each in self._llm.get_metrics() if each.name == _FAILED)

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def _listen(lines: TextIO, commands: queue.Queue[str]) -> None:
    for line in lines:
        commands.put(line)
    os.kill(os.getpid(), signal.SIGINT)  # ends the main thread, whatever it does


def main() -> None:
    lines, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(0), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the standard input of processes that this one spawns

    def answer(value: object) -> None:
        print(json.dumps(msgspec.to_builtins(value)), file=answers, flush=True)  # msgspec's own JSON has no inf

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
    commands: queue.Queue[str] = queue.Queue(1)
    threading.Thread(target=_listen, args=(lines, commands), daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        try:
            with contextlib.closing(PromptRunner(sys.argv[1], sys.argv[2:])) as runner:
                answer(runner.describe())
                while True:
                    answer(runner.handle(msgspec.json.decode(commands.get(), type=Generate | Encode)))
        except Exception as exc:
            answer({"error": str(exc) or type(exc).__name__})
            raise


if __name__ == "__main__":
    main()
