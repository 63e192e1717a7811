"""A vLLM engine in a process of its own, driven by JSON lines: one command in on stdin, one answer out.

Run as `python child.py ENGINE_ARGS_JSON`. Commands: run (a list of requests, together), add (one request, and wait
until its depot lookup has ended), step (one), finish (step until all are done), meet (wait until the scheduler and the
worker know of a server that is there), reset (the engine's own prefix cache), reset all
(and what the depot has for it), preemptions, metrics (the connector's, by name: values, and of histograms counts),
failed chunks (retrieved in vain so far), stop.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import Any

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # vLLM prints to stdout; answers must not mix with it

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402


class Child:
    def __init__(self, arguments: dict[str, Any]) -> None:
        self.llm = LLM(**arguments)
        self.engine = self.llm.llm_engine
        self.results: dict[str, Any] = {}

    def add(self, request: dict[str, Any]) -> None:
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
        lookups = connector._scheduler._depot._lookups
        deadline = time.monotonic() + 60
        while not all(lookup.future.query() for lookup in lookups.values()):
            assert time.monotonic() < deadline, "the lookup was not answered"

    def meet(self) -> None:
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
        # Blocks that wait for a store are freed by steps with nothing scheduled.
        deadline = time.monotonic() + 60
        while self.scheduler.requests and time.monotonic() < deadline:
            self.engine.engine_core.get_output()
        assert not self.scheduler.requests, f"never freed: {list(self.scheduler.requests)}"
        results, self.results = self.results, {}
        return results

    def handle(self, command: dict[str, Any]) -> Any:
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


def say(answer: Any) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def main() -> None:
    try:
        child = Child(json.loads(sys.argv[1]))
    except Exception as exc:
        say({"error": f"{type(exc).__name__}: {exc}"})
        raise
    say({"ok": "started"})
    for line in sys.stdin:
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


if __name__ == "__main__":
    main()
