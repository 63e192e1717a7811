"""Prompts that all hit and come at once, in engines whose own cache is small, beside the same engines without a depot.

First a storm: one engine gets 30 prompts at once. It loads within its steps, and then beside them, as engines on GPUs
do. Then two engines share a depot. One floods it: its queue has prompts that hit and new ones, more than the depot's
memory holds. The other one gets a few prompts at a time meanwhile. Each engine has one half of the processors, so that
they do not wait for each other's threads. The engines without a depot are measured alternately with the others.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from common import Scale, Serve, say, transfer_config
from comparison.engine import Batch, Engine
from comparison.workloads import VOCABULARY
from report import Figure, at_least, at_most

__all__ = ["run"]

_BLOCKS = 66
"""Of an engine's own cache, of 128 tokens each: eight prompts, and little more than vLLM takes for the longest one."""
_TOKENS, _ANSWER_TOKENS = 1000, 4
_ARENA_GIB = 0.125
"""45 prompts: all those of the storm, and half of the flood."""
_BESIDE_STEPS = "--verify", "always"
"""Flags of a server that lets no engine copy within a step, since that checks nothing."""
_FEW, _ROUNDS = 4, 3
"""Prompts at a time, and how often, of the engine beside the flood."""
_BAR = 1.1


def run(folder: Path, scale: Scale, notes: list[str]) -> list[Figure]:
    """Times to first tokens, and prompts per second. folder: of the model."""
    say("crowds: starting four engines")
    context: zmq.Context[Any] = zmq.Context()
    server = Serve(arena_gib=_ARENA_GIB)
    cpus = sorted(os.sched_getaffinity(0))
    halves = cpus[: (len(cpus) + 1) // 2], cpus[len(cpus) // 2 :]
    try:
        server.wait_populated(context)
        engines = []
        for half in halves:
            with _on(half):
                engines += [Engine(folder, transfer_config(server.url), _BLOCKS), Engine(folder, None, _BLOCKS)]
        with contextlib.ExitStack() as stack:
            depot, plain, flooding, flooding_plain = [stack.enter_context(engine) for engine in engines]
            prompts = _prompts(1, scale.storm_prompts)
            for engine in (depot, plain):
                engine.batch(prompts, _ANSWER_TOKENS)
            figures = _storm("loads within steps", (depot, plain), prompts, scale, notes)
            figures += _flood(((depot, flooding), (plain, flooding_plain)), prompts, scale, notes)
            server.kill()
            server = Serve(*_BESIDE_STEPS, arena_gib=_ARENA_GIB, before=server)
            server.wait_populated(context)
            for _ in range(2):  # the server may have lost what the flood was storing
                depot.reset()
                depot.batch(prompts, _ANSWER_TOKENS)
            return [*figures, *_storm("loads beside steps", (depot, plain), prompts, scale, notes)]
    finally:
        server.close()
        context.term()


def _storm(
    title: str, both: tuple[Engine, Engine], prompts: list[list[int]], scale: Scale, notes: list[str]
) -> list[Figure]:
    """All prompts at once, in an engine with a depot that has them and in one without."""
    say(f"crowds: {len(prompts)} prompts at once, {title}")
    late: dict[Engine, list[float]] = {engine: [] for engine in both}
    rates: dict[Engine, list[float]] = {engine: [] for engine in both}
    computed: list[int] = []
    for number in range(scale.storm_rounds):
        for engine in both if number % 2 else both[::-1]:
            engine.reset()
            batch = engine.batch(prompts, _ANSWER_TOKENS)
            late[engine].append(_p99_ms(batch.first_s))
            rates[engine].append(len(prompts) / batch.seconds)
            if engine is both[0]:
                computed.append(batch.computed)
    notes.append(f"crowds: {title}, computed {computed} of {_TOKENS * len(prompts)} prompt tokens")
    title = f"{len(prompts)} hits at once, {title}"
    return [
        at_most(f"{title}, first token p99", "ms", *(late[engine] for engine in both), _BAR),
        at_least(title, "prompts/s", *(rates[engine] for engine in both), 1.0),
    ]


def _flood(
    pairs: tuple[tuple[Engine, Engine], ...], prompts: list[list[int]], scale: Scale, notes: list[str]
) -> list[Figure]:
    """Of each pair, the second engine floods, and the first one gets a few prompts at a time meanwhile."""
    say("crowds: an engine beside one that floods")
    few, known = prompts[: _FEW * _ROUNDS], _prompts(2, scale.flooding_prompts)
    late, own_late, rates = [], [], []
    for engine, flooding in pairs:
        flooding.batch(known[::2], 1)
        engine.reset()
        flooding.reset()
        done: list[Batch] = []
        thread = threading.Thread(target=lambda: done.append(flooding.batch(known, _ANSWER_TOKENS)))  # noqa: B023
        thread.start()
        rounds = [engine.batch(few[first : first + _FEW], _ANSWER_TOKENS) for first in range(0, len(few), _FEW)]
        thread.join()
        late.append(_p99_ms([seconds for batch in rounds for seconds in batch.first_s]))
        own_late.append(_p99_ms(done[0].first_s))
        seconds = max(done[0].seconds, sum(batch.seconds for batch in rounds))
        rates.append((len(few) + len(known)) / seconds)
        notes.append(
            f"crowds: beside a flood, {sum(batch.computed for batch in rounds)} of {_TOKENS * len(few)} prompt tokens "
            f"were computed, and {done[0].computed} of the flood's {_TOKENS * len(known)}"
        )
    return [
        at_most("engine beside one that floods, first token p99", "ms", late[:1], late[1:], _BAR),
        at_most("engine that floods, first token p99", "ms", own_late[:1], own_late[1:], _BAR),
        at_least("both engines, one floods", "prompts/s", rates[:1], rates[1:], 1.0),
    ]


def _prompts(seed: int, count: int) -> list[list[int]]:
    found: list[list[int]] = np.random.default_rng(seed).integers(3, VOCABULARY, (count, _TOKENS)).tolist()
    return found


def _p99_ms(seconds: list[float]) -> float:
    return float(np.percentile(seconds, 99)) * 1000


@contextlib.contextmanager
def _on(cpus: list[int]) -> Iterator[None]:
    """Start processes on these processors, for the length of the `with` statement."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
