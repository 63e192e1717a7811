"""One vLLM engine that serves workloads, in a process of its own: see engine.py, which starts it.

    python served.py MODEL_DIR KV_TRANSFER_JSON BLOCKS BLOCK_TOKENS      takes commands on its stdin

The engine runs in this process alone, which counts the tokens that its scheduler schedules and times the scheduler's
lookups. Its own cache has BLOCKS blocks. All times are those that a caller of the engine would see: a request's time to
first token begins when it is added, and includes waiting for other requests.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
_SETTLED_S = 30.0
"""For the engine's blocks to come back."""


class _Served:
    """An engine, whose steps this process takes."""

    def __init__(self, folder: str, transfer: dict[str, Any] | None, blocks: int, block_tokens: int) -> None:
        from vllm import LLM, SamplingParams

        self._params = SamplingParams
        self._vocabulary: int = json.loads(Path(folder, "config.json").read_text())["vocab_size"]
        self._llm = LLM(
            model=folder,
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=8320,
            max_num_seqs=4,
            max_num_batched_tokens=2048,
            num_gpu_blocks_override=blocks,
            block_size=block_tokens,
            disable_log_stats=True,
            **({"kv_transfer_config": transfer} if transfer else {}),
        )
        self._engine = self._llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._serial = 0
        self._computed = 0
        self._lookups: list[float] = []
        self._own: dict[str, int] = {}  # tokens that the engine's own cache had, by request
        self._complete: dict[str, None] = {}  # requests of whose prompts all tokens were scheduled, in order
        self._count_computed()
        if self._scheduler.connector is not None:
            self._time_lookups()

    def prompt(self, number: int, tokens: int, loads: int) -> dict[str, Any]:
        """Run a prompt that nobody has, again from the engine's own cache, and `loads` times from the one behind it.

        cold_s, own_s, cache_s: to the first token. settled_s: from the end of the first run until the engine has its
        blocks back. lookup_s: from the first question for what is cached until the answer. cached: tokens found.
        """
        import numpy as np

        ids = np.random.default_rng(1000 + number).integers(3, self._vocabulary, tokens).tolist()
        self.reset()
        cold = self._run(ids)
        begun = time.perf_counter()
        while self._scheduler.has_requests():
            self._engine.step()
        settled_s = time.perf_counter() - begun
        own = self._run(ids)
        found = {"cold_s": cold["first_s"], "settled_s": settled_s, "own_s": own["first_s"]}
        if self._scheduler.connector is None:
            return found
        cached = []
        self._lookups.clear()
        for _ in range(loads):
            self.reset()
            cached.append(self._run(ids))
        return found | {
            "cache_s": [each["first_s"] for each in cached],
            "cached": [each["cached"] for each in cached],
            "lookup_s": list(self._lookups),
        }

    def batch(self, prompts: list[list[int]], answer: int) -> dict[str, Any]:
        """Run prompts at once, and use what the engine's own cache has; see engine.Batch."""
        self._computed = 0
        self._own.clear()
        self._complete.clear()
        begun = time.perf_counter()
        keys = [self._add(prompt, answer) for prompt in prompts]
        first_s: dict[str, float] = {}
        answers: dict[str, list[int]] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                key = _key(output.request_id)
                if output.outputs[0].token_ids:
                    first_s.setdefault(key, time.perf_counter() - begun)
                if output.finished:
                    answers[key] = list(output.outputs[0].token_ids)
        places = {key: place for place, key in enumerate(self._complete)}
        return {
            "computed": self._computed,
            "seconds": time.perf_counter() - begun,
            "first_s": [first_s[key] for key in keys],
            "own": [self._own.get(key, 0) for key in keys],
            "places": [places[key] for key in keys],
            "answers": [answers[key] for key in keys],
        }

    def serve(self, workload: list[list[dict[str, Any]]]) -> dict[str, Any]:
        """Serve clients that wait for each answer before they go on."""
        self.reset()
        self._computed = 0
        waiting = [list(reversed(client)) for client in workload]
        chats: dict[str, list[int]] = {}
        requests: dict[str, dict[str, Any]] = {}
        clients: dict[str, int] = {}
        begun = time.perf_counter()

        def send(client: int) -> None:
            if not waiting[client]:
                return
            asked = waiting[client].pop()
            prompt = chats.get(asked["chat"], []) + asked["tokens"]
            key = self._add(prompt, asked["answer"])
            clients[key] = client
            requests[key] = {
                "name": asked["name"], "chat": asked["chat"], "turn": asked["turn"], "prompt": prompt,
                "begun": time.perf_counter(), "first_s": 0.0,
            }  # fmt: skip

        for client in range(len(workload)):
            send(client)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                now = time.perf_counter()
                key = _key(output.request_id)
                request = requests[key]
                if not request["first_s"] and output.outputs[0].token_ids:
                    request["first_s"] = now - request["begun"]
                if output.finished:
                    request["answer"] = list(output.outputs[0].token_ids)
                    request["whole_s"] = now - request.pop("begun")
                    request["cached"] = output.num_cached_tokens or 0
                    chats[request["chat"]] = request["prompt"] + request["answer"]
                    chats.pop("", None)
                    request["prompt"] = len(request["prompt"])
                    send(clients[key])
        seconds = time.perf_counter() - begun
        self.reset()
        return {"seconds": seconds, "computed": self._computed, "requests": list(requests.values())}

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    def _add(self, prompt: list[int], answer: int) -> str:
        self._serial += 1
        key = f"request-{self._serial}"
        params = self._params(max_tokens=answer, temperature=0, detokenize=False, ignore_eos=True)
        self._engine.add_request(key, {"prompt_token_ids": prompt}, params)
        return key

    def _run(self, ids: list[int]) -> dict[str, Any]:
        begun, first, cached = time.perf_counter(), 0.0, 0
        self._add(ids, 1)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if not first and output.outputs[0].token_ids:
                    first, cached = time.perf_counter() - begun, output.num_cached_tokens or 0
        return {"first_s": first, "cached": cached}

    def reset(self) -> None:
        """Empty the engine's own cache, when what is stored from it has been stored. Blocks."""
        deadline = time.monotonic() + _SETTLED_S
        while True:
            while self._scheduler.has_requests():
                self._engine.step()
            if self._llm.reset_prefix_cache():
                return
            if time.monotonic() > deadline:
                raise RuntimeError("the engine does not get its blocks back")
            self._engine.step()

    def _count_computed(self) -> None:
        """Count the prompt tokens that are scheduled, repetitions included."""
        schedule = self._scheduler.schedule

        def counted(*arguments: Any, **options: Any) -> Any:
            step = schedule(*arguments, **options)
            for request_id, tokens in step.num_scheduled_tokens.items():
                request = self._scheduler.requests[request_id]
                end, whole = request.num_computed_tokens, request.num_prompt_tokens  # `end` includes this step's
                self._computed += max(0, min(end, whole) - min(end - tokens, whole))
                if end >= whole:
                    self._complete[_key(request_id)] = None
            return step

        self._scheduler.schedule = counted

    def _time_lookups(self) -> None:
        """Measure from the scheduler's first question for a request until the connector answers it."""
        connector = self._scheduler.connector
        matched = connector.get_num_new_matched_tokens
        asked: dict[str, float] = {}

        def timed(request: Any, computed: int) -> Any:
            begun = asked.setdefault(request.request_id, time.perf_counter())
            answer = matched(request, computed)
            if answer[0] is not None:
                self._lookups.append(time.perf_counter() - begun)
                self._own.setdefault(_key(request.request_id), computed)
                del asked[request.request_id]
            return answer

        connector.get_num_new_matched_tokens = timed


def _key(request_id: str) -> str:
    """Ours, of what vLLM makes of it: it may append a suffix of its own."""
    return "-".join(request_id.split("-")[:2])


def main(folder: str, transfer: dict[str, Any] | None, blocks: int, block_tokens: int) -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints
    served = _Served(folder, transfer, blocks, block_tokens)
    commands = {"prompt": served.prompt, "batch": served.batch, "serve": served.serve, "reset": served.reset}
    print(json.dumps("ready"), file=replies, flush=True)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        print(json.dumps(commands[command](*arguments)), file=replies, flush=True)
    served.close()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
