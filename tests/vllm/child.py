"""vLLM engines in processes of their own, each driven by JSON lines: one command in, one answer out.

Run as `python -m tests.vllm.child FD PARENT`: vLLM is imported once, which takes longer than to start an engine. Then
each message on the socket FD forks a process (`fork`), or waits for one that has ended (`wait`). An engine reads its
commands from the socket that came with its message, and logs to the file that came with it. All die with PARENT.

Commands: run (a list of requests, together), add (one request, and wait until its depot lookup has ended), step (one),
finish (step until all are done), meet (wait until the scheduler and the worker know of a server that is there), link
(wait until both have found their first server), reset (the engine's own prefix cache), reset all (and what the depot
has for it), preemptions, metrics (the connector's, by name: values, and of histograms counts), failed chunks (retrieved
in vain so far), stop.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from tests.programs import die_with_parent

MESSAGE_BYTES = 1 << 20
USED = (
    "vllm.entrypoints.launchers.cli_args",
    "vllm.lora.worker_manager",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.models.deepseek_v2",
    "vllm.model_executor.models.gemma3",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.phi3",
    "vllm.model_executor.models.qwen3_next",
    "vllm.model_executor.warmup.kernel_warmup",
    "vllm.models.deepseek_v4",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
)
"""What vLLM imports when an engine starts; one that is missing here, or gone from vLLM, costs time only."""


class Child:
    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**arguments)
        self.engine = self.llm.llm_engine
        self.results: dict[str, Any] = {}

    def add(self, request: dict[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        prompt: dict[str, Any] = {"prompt_token_ids": request["tokens"]}
        if request.get("salt"):
            prompt["cache_salt"] = request["salt"]
        lora = LoRARequest(*request["lora"]) if request.get("lora") else None
        params = SamplingParams(
            max_tokens=request.get("max_tokens", 8), temperature=0, logprobs=3, detokenize=False, ignore_eos=True,
            extra_args={"kv_transfer_params": request["transfer"]} if "transfer" in request else None,
        )  # fmt: skip
        self.engine.add_request(
            request["id"], prompt, params, lora_request=lora, trace_headers=request.get("trace_headers")
        )

    def add_and_look_up(self, request: dict[str, Any]) -> None:
        self.add(request)
        connector = self.scheduler.connector
        connector = getattr(connector, "sub_connectors", [connector])[-1]  # ours is the last below MultiConnector
        half = connector._scheduler
        lookups = half._depot._lookups if hasattr(half, "_depot") else {}  # it may have no server yet
        deadline = time.monotonic() + 60
        while not all(lookup.future.query() for lookup in lookups.values()):
            assert time.monotonic() < deadline, "the lookup was not answered"

    def link(self) -> None:
        """Wait until the halves in this process have found a server that came after the engine."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        links = [self.scheduler.connector._connector_scheduler]
        if has_kv_transfer_group():
            links.append(get_kv_transfer_group()._connector_worker)
        for link in links:
            assert link._settled.wait(120), "no server was found"

    def meet(self) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        clients = [self.scheduler.connector._scheduler._depot.client, get_kv_transfer_group()._worker._depot.client]
        deadline = time.monotonic() + 30
        for client in clients:
            while not client.is_welcomed:
                assert time.monotonic() < deadline, "no server is there"
                client.pump()

    @property
    def scheduler(self) -> Any:
        return self.engine.engine_core.engine_core.scheduler

    def finish(self) -> dict[str, Any]:
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    only = output.outputs[0]
                    self.results[output.request_id.rsplit("-", 1)[0]] = {
                        "tokens": list(only.token_ids),
                        "logprobs": [sorted((t, p.logprob) for t, p in step.items()) for step in only.logprobs],
                        "cached": output.num_cached_tokens,
                    }
        # Blocks that wait for a store are freed by steps with nothing scheduled, whose metrics count, too.
        deadline = time.monotonic() + 60
        while self.scheduler.requests and time.monotonic() < deadline:
            self.engine.step()
        assert not self.scheduler.requests, f"never freed: {list(self.scheduler.requests)}"
        results, self.results = self.results, {}
        return results

    def handle(self, command: dict[str, Any]) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        match command["do"]:
            case "run":
                for request in command["requests"]:
                    self.add(request)
                return self.finish()
            case "add":
                return self.add_and_look_up(command["request"])
            case "step":
                self.engine.step()
                return None
            case "finish":
                return self.finish()
            case "link":
                return self.link()
            case "meet":
                return self.meet()
            case "reset":
                assert self.llm.reset_prefix_cache(), "blocks are still in use"
                return None
            case "reset all":
                return self.llm.reset_prefix_cache(reset_connector=True)
            case "failed chunks":
                return get_kv_transfer_group()._worker._depot.counters["chunks_failed"]
            case "metrics":
                found = [m for m in self.llm.get_metrics() if m.name.startswith("vllm:kvdepot_")]
                return {m.name: m.count if hasattr(m, "count") else m.value for m in found}
            case "preemptions":
                return sum(m.value for m in self.llm.get_metrics() if m.name == "vllm:num_preemptions")
        raise ValueError(command)


def serve(channel: socket.socket, arguments: dict[str, Any]) -> None:
    """One engine, until it is told to stop or its channel ends. Raises what it failed with, which it has told."""

    def say(answer: Any) -> None:
        channel.sendall(json.dumps(answer).encode() + b"\n")

    try:
        child = Child(arguments)
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
        child.engine.engine_core.shutdown()
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
    """All that an engine imports but kvdepot, which notes when it was imported: an engine's start, to it."""
    import vllm

    assert vllm.LLM
    for name in USED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert "kvdepot.integrations" not in sys.modules
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a process with threads cannot be forked"
    gc.collect()
    gc.freeze()  # an engine's start collects garbage several times


def main() -> None:
    die_with_parent(int(sys.argv[2]))
    requests = socket.socket(fileno=int(sys.argv[1]))
    import_vllm()
    while True:
        message, fds, _, _ = socket.recv_fds(requests, MESSAGE_BYTES, 2)
        if not message:
            return
        asked = json.loads(message)
        if asked["do"] == "wait":
            _, status = os.waitpid(asked["pid"], 0)
            requests.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())
            continue
        sys.stdout.flush()
        me = os.getpid()
        pid = os.fork()
        if pid == 0:
            die_with_parent(me)
            requests.close()
            channel, log = fds
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            os.environ.clear()
            os.environ.update(asked["environ"])
            end(serve, socket.socket(fileno=channel), asked["arguments"])
        for fd in fds:
            os.close(fd)
        requests.send(json.dumps(pid).encode())


if __name__ == "__main__":
    main()
