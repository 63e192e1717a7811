"""Puts and gets of the Python library, beside one numpy copy of the same bytes; and what importing it costs.

Each process of a program copies by itself, so glibc's thresholds for copies in it matter: puts and gets are measured in
two child processes, with glibc's own and with those that kvdepot's server sets for itself. Every sequence is new, and
deleted after its gets, so every put moves all its bytes; all pages of the arena and of the arrays are allocated.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import zmq
from common import Echo, Scale, Serve, say
from report import Figure, at_least, at_most

import kvdepot

__all__ = ["run"]

_SMALL_TOKENS = 256
_TUNABLES = "glibc.cpu.x86_rep_movsb_threshold=0x10000000:glibc.cpu.x86_non_temporal_threshold=0x8000"
"""Copies of 32 KiB or more bypass the CPU's cache (docs/library.md, "Speed")."""
_TIMES = "get", "get floor"
_TIMEOUT_S = 600.0


def run(scale: Scale, notes: list[str]) -> list[Figure]:
    """All figures of the library."""
    context: zmq.Context[Any] = zmq.Context()
    server = Serve(arena_gib=scale.copy_arena_gib)
    figures: list[Figure] = []
    try:
        say("library: waiting for the arena to have its memory")
        server.wait_populated(context)
        sizes = scale.layers, max(scale.copy_tokens), scale.copy_runs
        for name, tunables in (("", ""), (", glibc tuned", _TUNABLES)):
            say(f"library: puts and gets{name}")
            gained = _in_a_child(tunables, server.url, *sizes)
            for what in ("put", "get_into"):
                figures.append(at_least(f"{what} 8k tokens{name}", "GB/s", gained[what], gained["copy"], 0.85))
            figures.append(at_most(f"get {_SMALL_TOKENS} tokens{name}", "ms", gained["get"], gained["get floor"], 2.0))
    finally:
        server.close()
        context.term()
    say("library: importing")
    times: dict[str, list[float]] = {"": [], "import kvdepot": []}
    for number in range(-1, scale.start_runs):  # the first reads files from the disk
        for code, values in times.items():
            seconds = _timed(lambda code=code: subprocess.run([sys.executable, "-c", code], check=True))
            if number >= 0:
                values.append(seconds * 1e3)
    figures.append(at_most("import kvdepot, beside Python's start", "ms", times["import kvdepot"], times[""], 1, 30))
    return figures


def _in_a_child(tunables: str, *arguments: object) -> dict[str, list[float]]:
    environ = {**os.environ, "GLIBC_TUNABLES": tunables} if tunables else dict(os.environ)
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, timeout=_TIMEOUT_S, check=True)
    gained: dict[str, list[float]] = json.loads(done.stdout)
    return gained


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _measure(url: str, layers: int, count: int, runs: int) -> dict[str, list[float]]:
    """GB/s of copies, puts and gets; milliseconds of small gets and of their floor: a round trip, and a copy into new
    memory, as a get returns it."""
    shape = kvdepot.Shape(layers=layers, heads=8, head_dim=128)
    kv = np.random.default_rng(7).integers(0, 1 << 16, (layers, 2, count, 8, 128), np.uint16)
    target, small = np.ones_like(kv), np.ascontiguousarray(kv[:, :, :_SMALL_TOKENS])
    gained: dict[str, list[float]] = {name: [] for name in ("copy", "put", "get_into", "get", "get floor")}
    context: zmq.Context[Any] = zmq.Context()
    echo = Echo(context)
    with kvdepot.connect(url) as depot:
        ns = depot.namespace(model="bench", revision="1", dtype="bfloat16", shape=shape)
        for number in range(-1, runs):  # the first warms everything up
            tokens = np.random.default_rng(number + 1).integers(0, 1 << 17, count)
            seconds = {
                "copy": _timed(lambda: np.copyto(target, kv)),
                "put": _timed(lambda tokens=tokens: _all(ns.put(tokens, kv), count)),
            }
            target[:] = 0
            seconds["get_into"] = _timed(lambda tokens=tokens: _all(ns.get_into(tokens, target), count))
            if number < 0 and not np.array_equal(kv, target):
                raise RuntimeError("what was loaded is not what was stored")
            few = tokens[:_SMALL_TOKENS]
            seconds["get floor"] = _timed(lambda: (echo.round_trip(b"floor"), small.copy()))
            seconds["get"] = _timed(lambda few=few: _all(ns.get(few)[1], len(few)))
            ns.delete(tokens)
            for name, value in seconds.items() if number >= 0 else ():
                gained[name].append(value * 1e3 if name in _TIMES else kv.nbytes / value / 1e9)
    echo.close()
    context.term()
    return gained


def _all(found: int, count: int) -> None:
    if found != count:
        raise RuntimeError(f"{found} of {count} tokens")


if __name__ == "__main__":
    json.dump(_measure(sys.argv[1], *map(int, sys.argv[2:])), sys.stdout)
