"""How long an engine takes to start with the connector, and to connect to a server that starts after it.

Engines are started in turn, with a server, and without the connector: the floor. Then one starts without a server.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import zmq
from common import READY_S, Scale, Serve, new_url, say
from engine import LLAMA, Depot, PromptEngine, fastest_dtype, write_config
from report import Figure, at_most, below

from kvdepot.client import MessageQueueClient

__all__ = ["run"]

_TOKENS = 1024


def run(scale: Scale, notes: list[str]) -> list[Figure]:
    """Both figures."""
    context: zmq.Context[Any] = zmq.Context()
    dtype, _ = fastest_dtype()
    with tempfile.TemporaryDirectory(prefix="kvdepot-bench-") as folder:
        write_config(Path(folder), LLAMA, LLAMA.layers(scale.engine_layers))
        try:
            return [_starts(scale, context, folder, dtype), _late(scale, context, folder, dtype)]
        finally:
            context.term()


def _starts(scale: Scale, context: zmq.Context[Any], folder: str, dtype: str) -> Figure:
    say("starts: engines with and without the connector")
    server = Serve(arena_gib=1 / 8)
    seconds: dict[str, list[float]] = {"": [], server.url: []}
    try:
        server.wait_populated(context)
        for number in range(-1, scale.engine_starts):  # the first reads files from the disk
            for url in list(seconds) if number % 2 else list(seconds)[::-1]:
                begun = time.perf_counter()
                engine = PromptEngine(folder, _TOKENS, dtype, url)
                try:
                    engine.hear()
                    if number >= 0:
                        seconds[url].append(time.perf_counter() - begun)
                finally:
                    engine.close()
    finally:
        server.close()
    return at_most("vLLM engine start", "s", seconds[server.url], seconds[""], 1.1)


def _late(scale: Scale, context: zmq.Context[Any], folder: str, dtype: str) -> Figure:
    """From the server's first answer to the engine's registered KV."""
    say("starts: servers that start after their engine")
    connected, answered = [], []
    for _ in range(scale.engine_starts):
        server, url = None, new_url()
        engine = PromptEngine(folder, _TOKENS, dtype, url)
        try:
            engine.hear()
            server = Serve(arena_gib=1 / 8, url=url)
            answered.append(server.wait_first_answer(context) * 1000)
            begun = time.perf_counter()
            client = MessageQueueClient(url, context)
            depot = Depot(client)
            while not depot.status()["instances"]:
                if time.perf_counter() - begun > READY_S:
                    raise TimeoutError("the engine does not connect")
                time.sleep(0.005)
            connected.append((time.perf_counter() - begun) * 1000)
            client.close()
        finally:
            engine.close()
            if server is not None:
                server.close()
    return below("late server, first answer to connected engine", "ms", connected, answered, 1000)
