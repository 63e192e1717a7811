"""vLLM engines in processes of their own, each driven by JSON lines: one command in, one answer out.

Run as `python -m tests.vllm.child FD`: vLLM is imported once, which takes longer than to start an engine. Then each
message on a connection to the socket FD forks a process (`fork`), or waits for one that has ended (`wait`). An engine
reads its commands from the socket that came with its message, logs to the file that came with it, and keeps a locked
file as long as one of its processes is there. It ends with its connection, and this process with the last one.

Commands: run (a list of requests, together), add (one request, and wait until its depot lookup has ended), step
(one), abort (a request), ask (as add, with vLLM's own LMCacheMPConnector), add only, finish (step until all are
done), meet (wait until the scheduler and the worker know of a server that is there), link (wait until both have found
their first server), reset (the engine's own prefix cache), reset all (and what the depot has for it), reload (weights
from a folder), version (of the weights, as a trainer says), stretch positions (as another rope factor does),
preemptions, metrics (the connector's, by name: values, and of histograms counts), external (vLLM's own count of
tokens that connectors were asked for, and of those that they had), speculation (tokens drafted so far, and those that
were accepted), failed_chunks (retrieved in vain so far), adapter (the file of the connector's adapter), stop.

The engine core and its workers have processes of their own, as by default. Between add and finish, the core makes no
step but by command.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib.metadata
import json
import logging.config
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from tests.programs import die_with_parent
from tests.vllm import insides, preloaded

MESSAGE_BYTES = 1 << 20
USED = (
    "kvdepot.client.admin", "kvdepot.client.launch", "kvdepot.client.scheduler", "kvdepot.client.worker",
    "kvdepot.devices.self_test", "vllm.entrypoints.launchers.cli_args", "vllm.lora.worker_manager",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.models.deepseek_mtp", "vllm.model_executor.models.deepseek_v2",
    "vllm.model_executor.models.gemma3", "vllm.model_executor.models.llama", "vllm.model_executor.models.llama_eagle",
    "vllm.model_executor.models.llama_eagle3", "vllm.model_executor.models.qwen3_next",
    "vllm.model_executor.warmup.kernel_warmup", "vllm.models.deepseek_v4", "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler", "vllm.v1.worker.cpu_model_runner", "vllm.v1.worker.cpu_worker",
)  # fmt: skip
"""What an engine imports when it starts; one that is missing here, or gone from vLLM, costs time only."""


class Child:
    """vLLM's front end (`LLM`), with an engine core and workers in processes of their own."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**arguments)
        self.engine = self.llm.llm_engine
        self.results: dict[str, Any] = {}
        self.core = self.engine.engine_core

    def inside(self, name: str, *arguments: Any) -> Any:
        """Have the engine core do what vLLM has no call for (see insides.py), then take what it put out before."""
        answer = self.core.call_utility(f"test_{name}", *arguments)
        while not self.core.outputs_queue.empty():
            self.take()
        return answer

    def take(self) -> None:
        """Wait for the output of one step of the engine core."""
        for output in self.engine.step():
            if output.finished:
                self.results[output.request_id.rsplit("-", 1)[0]] = result_of(output)

    def add(self, request: dict[str, Any]) -> None:
        from vllm.lora.request import LoRARequest

        lora = LoRARequest(*request["lora"]) if request.get("lora") else None
        self.engine.add_request(request["id"], prompt_of(request), params_of(request), lora_request=lora)

    def finish(self) -> dict[str, Any]:
        self.inside("hold", False)
        while self.engine.has_unfinished_requests():
            self.take()
        # Blocks that wait for a store are freed by steps with nothing scheduled, whose metrics count, too.
        deadline = time.monotonic() + 60
        while not self.inside("is_alone"):
            assert time.monotonic() < deadline, "requests were never freed"
        results, self.results = self.results, {}
        return results

    def close(self) -> None:
        self.core.shutdown()

    def handle(self, command: dict[str, Any]) -> Any:
        match command["do"]:
            case "run":  # in batches that do not depend on when the requests arrive
                self.inside("hold", True)
                for request in command["requests"]:
                    self.add(request)
                return self.finish()
            case "add":
                self.inside("hold", True)
                self.add(command["request"])
                return self.inside("look_up")
            case "ask":  # as "add", with vLLM 0.15 to 0.17's own connector, which looks up in a step
                self.inside("hold", True)
                self.add(command["request"])
                self.inside("step")
                return self.inside("look_up")
            case "add only":
                return self.add(command["request"])
            case "abort":
                return self.engine.abort_request([command["id"]])
            case "step" | "link" | "meet" | "failed_chunks" | "adapter" as inside:
                return self.inside(inside)
            case "finish":
                return self.finish()
            case "reset":
                assert self.llm.reset_prefix_cache(), "blocks are still in use"
                return None
            case "reset all":
                return self.llm.reset_prefix_cache(reset_connector=True)
            case "version":
                return self.llm.llm_engine.set_weight_version(command["version"])
            case "reload":
                return self.llm.collective_rpc("reload_weights", kwargs={"weights_path": command["folder"]})
            case "stretch positions":
                return self.inside("stretch", command.get("first", 0))
            case "metrics":
                found = [m for m in self.llm.get_metrics() if m.name.startswith("vllm:kvdepot_")]
                return {m.name: m.count if hasattr(m, "count") else m.value for m in found}
            case "external":
                found = {m.name: m.value for m in self.llm.get_metrics() if hasattr(m, "value")}
                return [int(found[f"vllm:external_prefix_cache_{what}"]) for what in ("queries", "hits")]
            case "speculation":
                found = {m.name: m.value for m in self.llm.get_metrics() if hasattr(m, "value")}
                return [int(found[f"vllm:spec_decode_num_{what}_tokens"]) for what in ("draft", "accepted")]
            case "preemptions":
                return sum(m.value for m in self.llm.get_metrics() if m.name == "vllm:num_preemptions")
        raise ValueError(command)


def make(arguments: dict[str, Any]) -> Any:
    """An engine, or vLLM's asynchronous front end with engines (`is_async`)."""
    sys.argv = [__file__, arguments.pop("command")]
    if arguments.pop("is_async", False):
        from tests.vllm.async_child import AsyncChild

        return AsyncChild(arguments)
    return Child(arguments)


def prompt_of(request: dict[str, Any]) -> dict[str, Any]:
    """vLLM's prompt: token ids; `embeds` rows of random embeddings (its seed and number); `images` (seed, width and
    height each) where the tokens have placeholders."""
    import torch

    if "embeds" in request:
        seed, rows, width = request["embeds"]
        return {"prompt_embeds": torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 0.1}
    prompt: dict[str, Any] = {"prompt_token_ids": request["tokens"]}
    if request.get("salt"):
        prompt["cache_salt"] = request["salt"]
    if "images" in request:
        prompt["multi_modal_data"] = {"image": [image_of(*each) for each in request["images"]]}
    return prompt


def image_of(seed: int, width: int, height: int) -> Any:
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def params_of(request: dict[str, Any]) -> Any:
    """vLLM's parameters. Of a request with `pool`, the task of a pooling model; `sampling` has any others of ours."""
    from vllm import PoolingParams, SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    if "pool" in request:
        return PoolingParams(task=request["pool"])
    options = {
        "max_tokens": request.get("max_tokens", 8), "temperature": 0, "logprobs": 3, "detokenize": False,
        "ignore_eos": True,
        "extra_args": {"kv_transfer_params": request["transfer"]} if "transfer" in request else None,
    } | request.get("sampling", {})  # fmt: skip
    if "regex" in request:
        options["structured_outputs"] = StructuredOutputsParams(regex=request["regex"])
    if options.get("n", 1) > 1:
        options["output_kind"] = RequestOutputKind.FINAL_ONLY  # all answers together
    return SamplingParams(**options)


def result_of(output: Any) -> dict[str, Any]:
    if not hasattr(output.outputs, "__len__"):  # of a pooling model
        return {"pooled": output.outputs.data.tolist(), "cached": output.num_cached_tokens}
    only = output.outputs[0]
    result = {
        "tokens": list(only.token_ids),
        "logprobs": [sorted((t, p.logprob) for t, p in step.items()) for step in only.logprobs],
        "cached": output.num_cached_tokens,
    }
    if output.kv_transfer_params is not None:
        result["told"] = output.kv_transfer_params
    if len(output.outputs) > 1:
        result["all"] = sorted(list(each.token_ids) for each in output.outputs)
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = [
            sorted((t, p.logprob) for t, p in step.items()) for step in output.prompt_logprobs[1:]
        ]
    return result


def serve(channel: socket.socket, arguments: dict[str, Any]) -> None:
    """One engine, until it is told to stop or its channel ends. Raises what it failed with, which it has told."""

    def say(answer: Any) -> None:
        channel.sendall(json.dumps(answer).encode() + b"\n")

    try:
        child = make(arguments)
    except Exception as exc:
        say({"error": f"{type(exc).__name__}: {exc}"})
        raise
    say({"ok": "started"})
    for line in channel.makefile("r"):
        command = json.loads(line)
        if command["do"] == "stop":
            break
        try:
            say({"ok": child.handle(command)})
        except Exception as exc:
            say({"error": f"{type(exc).__name__}: {exc}"})
            raise
    with contextlib.suppress(Exception):
        child.close()
    say({"ok": "stopped"})


def end(run: Callable[..., None], *arguments: Any) -> NoReturn:
    """End this process with `run`, but without taking all of vLLM's modules apart, which takes longer than a test."""
    code = 0
    try:
        run(*arguments)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def import_vllm() -> None:
    """All that an engine imports but our connector, which notes when it was imported: an engine's start, to it."""
    if os.environ.get("TRITON_INTERPRET"):  # see engines.V2
        from triton.backends import backends

        backends["cpu"] = backends["nvidia"]  # vLLM looks whether there is one, and the interpreter for none
    gc.disable()  # nearly all that is made here stays
    from tests import bfloat16

    bfloat16.multiply_in_32_bits()
    points = importlib.metadata.entry_points()  # which engines would read from hundreds of files, several times each
    importlib.metadata.entry_points = points.select
    import vllm

    assert vllm.LLM
    for name in USED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert "kvdepot.integrations" not in sys.modules
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a process with threads cannot be forked"
    insides.install()
    _do_not_spin()
    _do_once()
    gc.collect()
    gc.freeze()  # an engine's start and end collect garbage several times
    gc.unfreeze = lambda: None  # type: ignore[assignment]
    gc.enable()


def _do_not_spin() -> None:
    """Have cores and workers sleep until there is a message from each other: for a second, vLLM only yields."""
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(0.0002)
    wait = shm_broadcast.SpinCondition.wait

    def wait_asleep(condition: Any, timeout_ms: int | None = None) -> None:
        last, is_busy = condition.last_read, time.monotonic() <= condition.last_read + condition.busy_loop_s
        condition.last_read = -math.inf  # long ago
        wait(condition, 5 if is_busy else timeout_ms)
        condition.last_read = last

    shm_broadcast.SpinCondition.wait = wait_asleep


def _do_once() -> None:
    """What each of an engine's processes would do again, which takes a second of CPU time per engine."""
    import torch._dynamo.trace_rules as rules
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    registry._run_in_subprocess = lambda function: function()  # which would import vLLM to look at a class of a model

    rules.get_torch_obj_rule_map()
    # Loggers below vLLM's: each process gives them the level that they have.
    logging.config._handle_existing_loggers = lambda *_: None  # type: ignore[attr-defined]
    platform = type(current_platform)
    if hasattr(platform, "register_triton_kernel_overrides"):  # 0.30 has no such kernels
        platform.register_triton_kernel_overrides()
        platform.register_triton_kernel_overrides = lambda *_: None  # type: ignore[method-assign]


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    import_vllm()
    end_server = preloaded.start_server(listener)
    clients: dict[socket.socket, set[int]] = {}  # with their engines
    is_wanted = True
    while is_wanted:
        for ready in select.select([listener, *clients], [], [])[0]:
            if ready is listener:
                client = listener.accept()[0]
                clients[client] = set()
                answer(client, "ready")
            elif asked := receive(ready):
                serve_client(ready, *asked, clients[ready], [listener, *clients])
            else:
                ready.close()
                for pid in clients.pop(ready):
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                is_wanted = bool(clients)
    end_server()
    os._exit(0)  # whoever has connected meanwhile gets no answer, and starts another


def receive(client: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    with contextlib.suppress(ConnectionError):
        message, fds, _, _ = socket.recv_fds(client, MESSAGE_BYTES, 3)
        if message:
            return json.loads(message), fds
    return None


def answer(client: socket.socket, value: Any) -> None:
    with contextlib.suppress(ConnectionError):  # it has ended
        client.send(json.dumps(value).encode())


def serve_client(
    client: socket.socket, asked: dict[str, Any], fds: list[int], engines: set[int], unwanted: list[socket.socket]
) -> None:
    """Do what a client asks for. unwanted: what an engine has to close."""
    if asked["do"] == "wait":
        _, status = os.waitpid(asked["pid"], 0)
        engines.remove(asked["pid"])
        answer(client, os.waitstatus_to_exitcode(status))
        return
    sys.stdout.flush()
    me = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent(me)
        os.setpgid(0, 0)  # its test ends the group
        for each in unwanted:
            each.close()
        channel, log, alive = fds
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        preloaded.keep(alive)
        os.environ.clear()
        os.environ.update(asked["environ"])
        end(serve, socket.socket(fileno=channel), asked["arguments"])
    for fd in fds:
        os.close(fd)
    engines.add(pid)
    answer(client, pid)


if __name__ == "__main__":
    main()
