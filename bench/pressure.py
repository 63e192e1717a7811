"""More than fits: chats in depots too small for them, storms of hits, a flooding engine, and a long queue.

The chats of chats.py need about 0.44 GiB. Here they run with a model of a quarter of the KV, which computes faster, in
depots of a quarter of the sizes that the figures name: as many chunks. A depot with room for all is the lower bound of
the prompt tokens that the engine computes. The second bound is a depot of the same size that knows the queue in advance
(clairvoyant.py), under the same engine: its own cache, and the order in which it ran the prompts. Tokens are counted,
so other load on the machine hardly matters. The other figures are in crowds.py, storms.py and queued.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chats
import crowds
import queued
import storms
import zmq
from chats import BLOCKS, Outcome, Restarting, converse
from clairvoyant import Names, Queued, reaches
from common import Scale, Serve, say, transfer_config
from comparison.engine import CONFIG, Engine, kv_bytes, write_model
from report import Figure, at_most

__all__ = ["MODEL", "run"]

MODEL: dict[str, Any] = {
    **CONFIG,
    "num_hidden_layers": 2,
    "hidden_size": 192,
    "intermediate_size": 192,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
}
_SCALE = kv_bytes(MODEL) / kv_bytes(chats.MODEL)
_BLOCK_TOKENS = 128
"""Tokens of a block of the engine, which is a chunk of the depot."""
_ROOM_GIB = 1.0
_BARS = {0.25: 1.3, 0.3: 1.2, 0.4: 1.0, 0.6: 1.0}
"""By size in GiB, before it is scaled: the bar beside a depot with room."""
_CLAIRVOYANT_BAR = 1.1
_KILLED_GIB, _KILLED_BAR = 0.25, 1.1


def run(scale: Scale, notes: list[str]) -> Iterator[Figure]:
    """All figures, each part as soon as it is measured."""
    with tempfile.TemporaryDirectory(prefix="kvdepot-bench-") as name:
        folder = write_model(Path(name), MODEL)
        yield from _chats(folder, scale, notes)
        yield from crowds.run(folder, scale, notes)
        yield from storms.run(scale, notes)
        yield from queued.run(scale, notes)


def _chats(folder: Path, scale: Scale, notes: list[str]) -> Iterator[Figure]:
    """Tokens computed at each size, beside room for all and beside the clairvoyant depot; then with a killed server."""
    say("pressure: chats, room for all")
    roomy = _converse(folder, _ROOM_GIB, scale)
    notes.append(
        f"pressure: chats of {roomy.prompt_tokens * kv_bytes(chats.MODEL) / 2**30:.2f} GiB of KV; computed by turn "
        f"{roomy.by_turn} with {_ROOM_GIB:g} GiB in {roomy.seconds:.0f} s"
    )
    pressed: dict[float, Outcome] = {}
    for gib, bar in _BARS.items():
        say(f"pressure: chats, {gib:g} GiB")
        pressed[gib] = found = _converse(folder, gib, scale)
        best = _clairvoyant(found, gib)
        notes.append(f"pressure: computed by turn {found.by_turn} with {gib:g} GiB; {best} by a clairvoyant depot")
        title = f"chats in {gib:g} GiB, prompt tokens computed"
        yield at_most(f"{title}, beside room", "tokens", [found.computed], [roomy.computed], bar)
        floor = [sum(best)]
        yield at_most(f"{title}, beside clairvoyant", "tokens", [found.computed], floor, _CLAIRVOYANT_BAR)
    say(f"pressure: chats, {_KILLED_GIB:g} GiB, a server that is killed as each turn's prompts arrive")
    with Restarting(_KILLED_GIB * _SCALE) as server, Engine(folder, transfer_config(server.url), BLOCKS) as engine:
        killed = converse(engine, scale.chats, scale.turns, server.restart)
    if any(found.answers != roomy.answers for found in (killed, *pressed.values())):
        raise RuntimeError("pressure: answers differ")
    title = f"chats in {_KILLED_GIB:g} GiB, server killed each turn"
    floor = [pressed[_KILLED_GIB].computed]
    yield at_most(title, "tokens", [killed.computed], floor, _KILLED_BAR)


def _converse(folder: Path, arena_gib: float, scale: Scale) -> Outcome:
    server = Serve(arena_gib=arena_gib * _SCALE)
    context: zmq.Context[Any] = zmq.Context()
    try:
        server.wait_populated(context)
        with Engine(folder, transfer_config(server.url), BLOCKS) as engine:
            return converse(engine, scale.chats, scale.turns)
    finally:
        server.close()
        context.term()


def _clairvoyant(outcome: Outcome, gib: float) -> list[int]:
    """The prompt tokens that the engine would have computed in each turn with the best depot of this size.

    A chunk is a block, so tokens that are not computed are whole chunks, in the engine's own cache or in the depot. The
    arena's own needs count nothing. The last token of a prompt is always computed, and of an answer it is not stored.
    """
    names, queue, lengths = Names(_BLOCK_TOKENS), list[Queued](), list[int]()
    for prompts, batch in zip(outcome.prompts, outcome.batches, strict=True):
        for number in sorted(range(len(prompts)), key=batch.places.__getitem__):
            prompt, answer = prompts[number], batch.answers[number]
            asked, own = (len(prompt) - 1) // _BLOCK_TOKENS, batch.own[number] // _BLOCK_TOKENS
            queue.append(Queued(names.of(prompt + answer[:-1]), asked, own))
            lengths.append(len(prompt))
    reached = reaches(queue, int(gib * _SCALE * 2**30) // (_BLOCK_TOKENS * kv_bytes(MODEL)))
    computed = [length - _BLOCK_TOKENS * chunks for length, chunks in zip(lengths, reached, strict=True)]
    each = len(outcome.prompts[0])
    return [sum(computed[first : first + each]) for first in range(0, len(computed), each)]
