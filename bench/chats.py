"""Chats on a real vLLM engine: the total of prompt tokens that it computes while its server is killed.

Ten chats share a system prompt. Each turn submits all their prompts at once to an engine whose own cache holds about
half of them and which runs four at a time, so most prompts wait, and most reused tokens come from the depot. It counts
tokens, not seconds: those scheduled within a prompt, including repetitions after failed loads and preemptions. Prompts
follow from a seed and the engine's answers, so two runs with the same answers have the same prompts.

    python chats.py MODEL_DIR KV_TRANSFER_JSON      one engine, which takes commands on its stdin
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from common import EngineProcess, Scale, Serve, say
from comparison.engine import write_model
from report import Figure, at_most

__all__ = ["KV_BYTES", "MODEL", "ChatEngine", "Outcome", "converse", "depot", "run"]

KV_BYTES = 6 * 2 * 4 * 64 * 4
"""Bytes of KV per token: keys and values of 6 layers, 4 heads of 64 numbers in float32."""
_SYSTEM_TOKENS = 1024
_USER_TOKENS = (600, 1200)
"""Minimum and maximum length of a user's message."""
_ANSWER_TOKENS = 32
_ARENA_GIB = 1.0
"""Enough for everything: ten chats of four turns have 0.4 GiB of KV."""
_KILL_EVERY_S = 5.0
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def run(scale: Scale, notes: list[str]) -> list[Figure]:
    """Figures for a server that is killed and restarted under the engine, beside one that is not."""
    with tempfile.TemporaryDirectory(prefix="kvdepot-bench-") as name:
        folder = write_model(Path(name), MODEL)
        say("chats: a server that is not killed")
        with _Restarting() as server, ChatEngine(folder, depot(server.url)) as engine:
            undisturbed = converse(engine, scale.chats, scale.turns)
        say("chats: a server that is killed as each turn's prompts arrive")
        with _Restarting() as server, ChatEngine(folder, depot(server.url)) as engine:
            arriving = converse(engine, scale.chats, scale.turns, server.restart)
        say(f"chats: a server that is killed every {_KILL_EVERY_S:g} s")
        with (
            _Restarting() as server,
            ChatEngine(folder, depot(server.url)) as engine,
            server.restarted_every(_KILL_EVERY_S),
        ):
            often = converse(engine, scale.chats, scale.turns)
    for what, outcome in (("as prompts arrived", arriving), (f"every {_KILL_EVERY_S:g} s", often)):
        if outcome.answers != undisturbed.answers:
            raise RuntimeError(f"chats: answers differ where the server was killed {what}")
    notes.append(
        f"chats: {undisturbed.seconds:.0f} s undisturbed, {arriving.seconds:.0f} s with a kill a turn, "
        f"{often.seconds:.0f} s with one every {_KILL_EVERY_S:g} s; {undisturbed.prompt_tokens} prompt tokens in all, "
        f"{undisturbed.prompt_tokens * KV_BYTES / 2**30:.2f} GiB of KV; answers were the same"
    )
    floor = [undisturbed.computed]
    return [
        at_most("prompt tokens computed, server killed each turn", "tokens", [arriving.computed], floor, 1.15),
        at_most("prompt tokens computed, server killed every 5 s", "tokens", [often.computed], floor, 1.5),
    ]


# -- the depot


def depot(url: str) -> dict[str, Any]:
    """vLLM's `kv_transfer_config` for a kvdepot server."""
    return {
        "kv_connector": "KVDepotConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"kvdepot.url": url},
    }


class _Restarting:
    """A server that can be killed (kill -9) and restarted in its place."""

    def __init__(self) -> None:
        self.kills = 0
        self._server = Serve(arena_gib=_ARENA_GIB)
        self.url = self._server.url

    def __enter__(self) -> _Restarting:
        context: zmq.Context[Any] = zmq.Context()
        self._server.wait_populated(context)
        context.term()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.close()

    def restart(self) -> None:
        """Kill it and start another; returns before the new one serves."""
        self._server.kill()
        self._server = Serve(arena_gib=_ARENA_GIB, before=self._server)
        self.kills += 1

    @contextmanager
    def restarted_every(self, seconds: float) -> Iterator[None]:
        """Restart it at this interval, for the length of the `with` statement."""
        over = threading.Event()

        def trouble() -> None:
            while not over.wait(seconds):
                self.restart()

        thread = threading.Thread(target=trouble)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


# -- the chats


@dataclass
class Outcome:
    """The results of all turns of all chats."""

    computed: int = 0
    """Prompt tokens that the engine computed."""
    prompt_tokens: int = 0
    """Distinct prompt tokens in the last turn: the shared system prompt counts once."""
    seconds: float = 0.0
    by_turn: list[int] = field(default_factory=list)
    answers: list[list[list[int]]] = field(default_factory=list)
    """By turn and chat."""


def converse(engine: ChatEngine, chats: int, turns: int, before_turn: Callable[[], None] = lambda: None) -> Outcome:
    """Run `chats` chats of `turns` turns; a turn's prompts are submitted together when the previous turn is over.

    before_turn: called right before a turn's prompts are submitted, from the second turn on.
    """
    rng = np.random.default_rng(1)

    def text(tokens: int) -> list[int]:
        return [int(token) for token in rng.integers(3, MODEL["vocab_size"], tokens)]

    system = text(_SYSTEM_TOKENS)
    prompts = [list(system) for _ in range(chats)]
    outcome = Outcome()
    for turn in range(turns):
        for prompt in prompts:
            prompt += text(int(rng.integers(*_USER_TOKENS)))
        if turn:
            before_turn()
        begun = time.monotonic()
        computed, answers = engine.submit(prompts)
        outcome.seconds += time.monotonic() - begun
        outcome.by_turn.append(computed)
        outcome.answers.append(answers)
        outcome.prompt_tokens = sum(map(len, prompts)) - (chats - 1) * _SYSTEM_TOKENS
        for prompt, answer in zip(prompts, answers, strict=True):
            prompt += answer
    outcome.computed = sum(outcome.by_turn)
    return outcome


class ChatEngine(EngineProcess):
    """One engine with a small cache of its own; a context manager."""

    def __init__(self, folder: Path, transfer: dict[str, Any] | None) -> None:
        """transfer: vLLM's `kv_transfer_config`; None: no connector."""
        super().__init__(__file__, str(folder), json.dumps(transfer))

    def __enter__(self) -> ChatEngine:
        self.hear()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def submit(self, prompts: list[list[int]]) -> tuple[int, list[list[int]]]:
        """Run these prompts; returns the prompt tokens computed for all of them, and the answers. Blocks."""
        computed, answers = self.ask(["submit", prompts])
        return computed, answers


# -- the engine's process


def _serve(folder: str, transfer: dict[str, Any] | None) -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints

    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=8192,
        max_num_seqs=4,
        max_num_batched_tokens=2048,
        num_gpu_blocks_override=190,
        disable_log_stats=True,
        **({"kv_transfer_config": transfer} if transfer else {}),
    )
    params = SamplingParams(max_tokens=_ANSWER_TOKENS, temperature=0, detokenize=False, ignore_eos=True)
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    schedule = scheduler.schedule
    computed = serial = 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal computed
        step = schedule(*arguments, **options)
        for request_id, tokens in step.num_scheduled_tokens.items():
            request = scheduler.requests[request_id]
            end = request.num_computed_tokens  # vLLM has added this step's already
            computed += max(0, min(end, request.num_prompt_tokens) - min(end - tokens, request.num_prompt_tokens))
        return step

    scheduler.schedule = counted

    def submit(prompts: list[list[int]]) -> tuple[int, list[list[int]]]:
        nonlocal computed, serial
        computed = 0
        answers: dict[str, list[int]] = {}
        ids = [f"chat-{serial + i}" for i in range(len(prompts))]
        serial += len(prompts)
        for request_id, prompt in zip(ids, prompts, strict=True):
            engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    answers[output.request_id] = list(output.outputs[0].token_ids)
        by_id = {
            request_id.rsplit("-", 1)[0] if request_id not in ids else request_id: answer
            for request_id, answer in answers.items()
        }
        return computed, [by_id[request_id] for request_id in ids]

    print(json.dumps("ready"), file=replies, flush=True)
    for line in sys.stdin:
        (_, prompts) = json.loads(line)
        print(json.dumps(submit(prompts)), file=replies, flush=True)
    engine.engine_core.shutdown()


if __name__ == "__main__":
    _serve(sys.argv[1], json.loads(sys.argv[2]))
