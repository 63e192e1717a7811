"""Chats on a real vLLM engine whose depot is too small for them: the number of prompt tokens that it computes.

The chats of chats.py need about 0.4 GiB; here the depot has 0.25, with the default policy and settings. The lower bound
is what the same engine computes if everything fits.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import zmq
from chats import BLOCKS, MODEL, Outcome, converse
from common import Scale, Serve, say, transfer_config
from comparison.engine import Engine, kv_bytes, write_model
from report import Figure, at_most

__all__ = ["run"]

_ROOM_GIB = 1.0
_SMALL_GIB = 0.25


def run(scale: Scale, notes: list[str]) -> list[Figure]:
    """One figure: tokens computed under pressure, beside those computed with room for everything."""
    with tempfile.TemporaryDirectory(prefix="kvdepot-bench-") as name:
        folder = write_model(Path(name), MODEL)
        say("pressure: room for all chats")
        roomy = _converse(folder, _ROOM_GIB, scale)
        say(f"pressure: {_SMALL_GIB} GiB")
        pressed = _converse(folder, _SMALL_GIB, scale)
    kv_gib = roomy.prompt_tokens * kv_bytes(MODEL) / 2**30
    notes.append(
        f"pressure: {kv_gib:.2f} GiB of KV; computed by turn {roomy.by_turn} with "
        f"{_ROOM_GIB:g} GiB, {pressed.by_turn} with {_SMALL_GIB:g} GiB"
    )
    computed, floor = [pressed.computed], [roomy.computed]
    return [at_most("prompt tokens computed, 0.25 GiB for chats of 0.4", "tokens", computed, floor, 1.35)]


def _converse(folder: Path, arena_gib: float, scale: Scale) -> Outcome:
    server = Serve(arena_gib=arena_gib)
    context: zmq.Context[Any] = zmq.Context()
    try:
        server.wait_populated(context)
        with Engine(folder, transfer_config(server.url), BLOCKS) as engine:
            return converse(engine, scale.chats, scale.turns)
    finally:
        server.close()
        context.term()
