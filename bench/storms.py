"""Storms of requests that all hit, at a depot whose copies are slower than the engine computes.

The engine's choice between loading and computing, beside the two that it chooses from: an engine that loads all that it
finds, and one without a depot, which computes all. The three have the same model and memory, and serve the same storm
in turn. The loads of the two with a depot are slowed down to a third of the speed of prefill, which the one without
measures first. This process may not change the copies of another, so each engine does it itself.

    python storms.py MODEL_DIR KV_TRANSFER_JSON BLOCKS BLOCK_TOKENS BYTES_PER_SECOND CHOICE     one engine (served.py)
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from common import EngineProcess, Scale, Serve, say, transfer_config
from comparison.engine import CONFIG, kv_bytes, write_model
from comparison.workloads import VOCABULARY
from report import Figure, at_most

__all__ = ["run"]

_MODEL: dict[str, Any] = {**CONFIG, "num_hidden_layers": 2}
_TOKENS, _BLOCK_TOKENS, _BLOCKS = 529, 32, 640
"""Tokens of a prompt; the engine's own cache has room for all requests of a storm at once."""
_ANSWER_TOKENS = 2
_FRESH = 6
"""Prompts that nobody has, by which an engine measures its prefill."""
_SLOWER = 3.0
"""How many times as long the lane takes for a token as the model."""


def run(scale: Scale, notes: list[str]) -> list[Figure]:
    """The time to first token (p99) and the makespan of a storm of hits, beside the better of the two alternatives."""
    storm = _storm(0, scale.storm_prompts)
    rounds: dict[str, list[dict[str, Any]]] = {"computed": [], "loaded": [], "chosen": []}
    engines: dict[str, _Engine] = {}
    server, context = Serve(arena_gib=1.0, chunk_size=64), zmq.Context[Any]()
    try:
        server.wait_populated(context)
        with tempfile.TemporaryDirectory(prefix="kvdepot-bench-") as name:
            folder = write_model(Path(name), _MODEL)
            say("storms: an engine that computes")
            engines["computed"] = _Engine(folder, None, 0.0, "computed")
            engines["computed"].serve(_storm(1, _FRESH))
            seconds = engines["computed"].serve(storm)["seconds"]
            bytes_s = scale.storm_prompts * _TOKENS * kv_bytes(_MODEL) / seconds / _SLOWER
            for number, choice in enumerate(("loaded", "chosen"), 2):
                say(f"storms: {choice}, at {bytes_s / 1e6:.0f} MB/s")
                engines[choice] = _Engine(folder, transfer_config(server.url), bytes_s, choice)
                engines[choice].serve(_storm(number, _FRESH))
                engines[choice].serve(storm)  # the first of them stores all prompts, the other compares a part
            for _ in range(scale.storm_rounds):
                for choice, engine in engines.items():
                    rounds[choice].append(engine.serve(storm))
    finally:
        for engine in engines.values():
            engine.close()
        server.close()
        context.term()
    p99 = {choice: [_p99_s(each) for each in served] for choice, served in rounds.items()}
    whole = {choice: [each["seconds"] for each in served] for choice, served in rounds.items()}
    computed = {choice: [each["computed"] for each in served] for choice, served in rounds.items()}
    notes.append(f"storms: tokens computed {computed}; seconds {_rounded(whole)}; p99 of first tokens {_rounded(p99)}")
    figures = []
    for what, values in (("p99 of first tokens", p99), ("makespan", whole)):
        best = min((values["loaded"], values["computed"]), key=np.median)
        figures.append(
            at_most(f"{scale.storm_prompts} hits at once, slow lane: {what}", "s", values["chosen"], best, 1.05)
        )
    return figures


def _storm(seed: int, requests: int) -> list[list[dict[str, Any]]]:
    """A workload: each client has one request, whose prompt nothing else begins with."""
    tokens = np.random.default_rng([51, seed]).integers(3, VOCABULARY, (requests, _TOKENS)).tolist()
    return [[{"name": "hit", "chat": "", "turn": 0, "tokens": prompt, "answer": _ANSWER_TOKENS}] for prompt in tokens]


class _Engine(EngineProcess):
    def __init__(self, folder: Path, transfer: dict[str, Any] | None, bytes_s: float, choice: str) -> None:
        sizes = str(_BLOCKS), str(_BLOCK_TOKENS)
        super().__init__(__file__, str(folder), json.dumps(transfer), *sizes, str(bytes_s), choice)
        self.hear()

    def serve(self, storm: list[list[dict[str, Any]]]) -> dict[str, Any]:
        """Serve all requests, which come at once, from an empty cache of its own; see served.py. Blocks."""
        found: dict[str, Any] = self.ask(["serve", storm])
        return found


def _p99_s(served: dict[str, Any]) -> float:
    return float(np.percentile([each["first_s"] for each in served["requests"]], 99))


def _rounded(values: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: [round(each, 3) for each in of_one] for name, of_one in values.items()}


def _main(bytes_s: float, choice: str) -> None:
    from kvdepot.devices.blocks import ArenaBytes
    from kvdepot.devices.host import HostBlocks
    from kvdepot.integrations.vllm.load_or_compute import LoadOrCompute

    move = HostBlocks.move

    def slow(blocks: HostBlocks, arena: ArenaBytes, pieces: Any, is_store: bool) -> None:
        begun = time.perf_counter()
        move(blocks, arena, pieces, is_store)
        if not is_store:
            size = sum(len(piece.block_ids) for piece in pieces) * blocks.layout.block_bytes
            time.sleep(max(0.0, begun + size / bytes_s - time.perf_counter()))

    HostBlocks.move = slow  # type: ignore[method-assign]
    if choice == "loaded":
        LoadOrCompute.choose = lambda self, request, own, most: most  # type: ignore[method-assign]


if __name__ == "__main__":
    from comparison.served import main

    _main(float(sys.argv[5]), sys.argv[6])
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
