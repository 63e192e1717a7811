"""Chats on a real vLLM engine: the total of prompt tokens that it computes while its server is killed.

Ten chats share a system prompt. Each turn submits all their prompts at once to an engine whose own cache holds about
half of them and which runs four at a time, so most prompts wait, and most reused tokens come from the depot. It counts
tokens, not seconds: those scheduled within a prompt, including repetitions after failed loads and preemptions. Prompts
follow from a seed and the engine's answers, so two runs with the same answers have the same prompts.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from common import Scale, Serve, say, transfer_config
from comparison.engine import CONFIG, Batch, Engine, kv_bytes, write_model
from report import Figure, at_most

__all__ = ["BLOCKS", "MODEL", "Outcome", "Restarting", "converse", "run"]

MODEL: dict[str, Any] = {**CONFIG, "num_key_value_heads": 4}
BLOCKS = 190
"""Of the engine's own cache, of 128 tokens each."""
_SYSTEM_TOKENS = 1024
_USER_TOKENS = (600, 1200)
"""Minimum and maximum length of a user's message."""
_ANSWER_TOKENS = 32
_ARENA_GIB = 1.0
"""Enough for everything: ten chats of four turns have 0.4 GiB of KV."""
_KILL_EVERY_S = 5.0


def run(scale: Scale, notes: list[str]) -> list[Figure]:
    """Figures for a server that is killed and restarted under the engine, beside one that is not."""
    with tempfile.TemporaryDirectory(prefix="kvdepot-bench-") as name:
        folder = write_model(Path(name), MODEL)
        say("chats: a server that is not killed")
        with Restarting() as server, Engine(folder, transfer_config(server.url), BLOCKS) as engine:
            undisturbed = converse(engine, scale.chats, scale.turns)
        say("chats: a server that is killed as each turn's prompts arrive")
        with Restarting() as server, Engine(folder, transfer_config(server.url), BLOCKS) as engine:
            arriving = converse(engine, scale.chats, scale.turns, server.restart)
        say(f"chats: a server that is killed every {_KILL_EVERY_S:g} s")
        with (
            Restarting() as server,
            Engine(folder, transfer_config(server.url), BLOCKS) as engine,
            server.restarted_every(_KILL_EVERY_S),
        ):
            often = converse(engine, scale.chats, scale.turns)
    for what, outcome in (("as prompts arrived", arriving), (f"every {_KILL_EVERY_S:g} s", often)):
        if outcome.answers != undisturbed.answers:
            raise RuntimeError(f"chats: answers differ where the server was killed {what}")
    notes.append(
        f"chats: {undisturbed.seconds:.0f} s undisturbed, {arriving.seconds:.0f} s with a kill a turn, "
        f"{often.seconds:.0f} s with one every {_KILL_EVERY_S:g} s; {undisturbed.prompt_tokens} prompt tokens in all, "
        f"{undisturbed.prompt_tokens * kv_bytes(MODEL) / 2**30:.2f} GiB of KV; answers were the same"
    )
    floor = [undisturbed.computed]
    return [
        at_most("prompt tokens computed, server killed each turn", "tokens", [arriving.computed], floor, 1.15),
        at_most("prompt tokens computed, server killed every 5 s", "tokens", [often.computed], floor, 1.5),
    ]


# -- the depot


class Restarting:
    """A server that can be killed (kill -9) and restarted in its place."""

    def __init__(self, arena_gib: float = _ARENA_GIB) -> None:
        self._arena_gib = arena_gib
        self._server = Serve(arena_gib=arena_gib)
        self.url = self._server.url

    def __enter__(self) -> Restarting:
        context: zmq.Context[Any] = zmq.Context()
        self._server.wait_populated(context)
        context.term()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.close()

    def restart(self) -> None:
        """Kill it and start another; returns before the new one serves."""
        self._server.kill()
        self._server = Serve(arena_gib=self._arena_gib, before=self._server)

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
    """The results of all turns of all chats; lists are by turn."""

    prompts: list[list[list[int]]] = field(default_factory=list)
    """The tokens of each chat's prompt."""
    batches: list[Batch] = field(default_factory=list)

    @property
    def computed(self) -> int:
        """Prompt tokens that the engine computed."""
        return sum(self.by_turn)

    @property
    def by_turn(self) -> list[int]:
        return [batch.computed for batch in self.batches]

    @property
    def answers(self) -> list[list[list[int]]]:
        """By turn and chat."""
        return [batch.answers for batch in self.batches]

    @property
    def seconds(self) -> float:
        return sum(batch.seconds for batch in self.batches)

    @property
    def prompt_tokens(self) -> int:
        """Distinct prompt tokens in the last turn: the shared system prompt counts once."""
        return sum(map(len, self.prompts[-1])) - (len(self.prompts[-1]) - 1) * _SYSTEM_TOKENS


def converse(engine: Engine, chats: int, turns: int, before_turn: Callable[[], None] = lambda: None) -> Outcome:
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
        batch = engine.batch(prompts, _ANSWER_TOKENS)
        outcome.prompts.append(prompts)
        outcome.batches.append(batch)
        prompts = [prompt + answer for prompt, answer in zip(prompts, batch.answers, strict=True)]
    return outcome
