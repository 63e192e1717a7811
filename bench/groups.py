"""Lookups of a model with two KV cache groups, full attention and a window of three chunks, beside one with one group.

Both models are on one server, have the same prompt, and are asked in turn; the floor is the lookup with one group.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import zmq
from common import Scale, Serve, say
from report import Figure, at_most

from kvdepot.client import Client
from kvdepot.client.scheduler import Cached, Pending, SchedulerClient
from kvdepot.client.transfer import GroupSpec, ShardSpec, Transfer, pack_block_ids
from kvdepot.client.worker import WorkerClient
from kvdepot.devices import describe, open_blocks
from kvdepot.keys import ChunkChain
from kvdepot.protocol.layout import build_layout

__all__ = ["two_groups"]

_CHUNK_TOKENS = 256
_REACHES = ((0,), (0, 3))
_NAMES = {"8k": 32, "128k": 512}
"""Chunks of the prompts."""
_DEADLINE_S = 60.0
_REST_S = 0.001


def two_groups(scale: Scale, context: zmq.Context[Any]) -> list[Figure]:
    """A figure for each length."""
    say("lookups: two KV cache groups")
    server = Serve(arena_gib=1 / 16, chunk_size=_CHUNK_TOKENS)
    models: list[_Model] = []
    times: dict[str, list[list[float]]] = {name: [[], []] for name in _NAMES}
    try:
        server.wait_populated(context)
        models += [_Model(server.url, context, reaches) for reaches in _REACHES]
        chain = ChunkChain(_CHUNK_TOKENS)
        chain.extend(range(max(_NAMES.values()) * _CHUNK_TOKENS))
        for model in models:
            model.store(chain)
        for number in range(-1, 4 * scale.lookup_runs):  # the first warms up
            for name, chunks in _NAMES.items():
                hashes = bytes(chain.slice(0, chunks))
                for which in (0, 1) if number % 2 else (1, 0):
                    seconds = models[which].lookup(f"{number} {name}", hashes, chunks)
                    if number >= 0:
                        times[name][which].append(seconds * 1000)
    finally:
        for model in models:
            model.close()
        server.close()
    return [at_most(f"lookup {name} tokens, two groups", "ms", two, one, 1.2) for name, (one, two) in times.items()]


class _Model:
    """A scheduler and a worker of one model; every chunk has one block in each group."""

    def __init__(self, url: str, context: zmq.Context[Any], reaches: tuple[int, ...]) -> None:
        self._groups = tuple(GroupSpec(reach, 1) for reach in reaches)
        spec = ShardSpec(f"bench-{len(reaches)}-groups", 1, 0, _CHUNK_TOKENS, 1, self._groups)
        self._scheduler = SchedulerClient(Client(url, context), spec)
        self._worker = WorkerClient(Client(url, context), spec, unpins=False)
        blocks = max(_NAMES.values())
        caches = [torch.zeros((blocks, _CHUNK_TOKENS, 4), dtype=torch.uint8) for _ in reaches]
        layouts = [build_layout([describe(cache, f"layer.{i}")], [0]) for i, cache in enumerate(caches)]
        memories = [open_blocks(layout, [cache]) for layout, cache in zip(layouts, caches, strict=True)]
        self._worker.register(layouts, memories)

    def store(self, chain: ChunkChain) -> None:
        blocks = pack_block_ids(list(range(len(chain))))
        hashes = bytes(chain.slice(0, len(chain)))
        parts = [Transfer("fill", chain.parent(0), 0, hashes, blocks, group=i) for i in range(len(self._groups))]
        self._worker.submit_store(["fill"], parts, None)
        deadline = time.monotonic() + _DEADLINE_S
        while "fill" not in self._worker.poll({"fill"}).stored:
            if time.monotonic() > deadline:
                raise TimeoutError("a store did not end")
            time.sleep(0.0005)

    def lookup(self, request: str, hashes: bytes, chunks: int) -> float:
        """Seconds until the answer, which must be that all chunks are there."""
        begun = time.perf_counter()
        self._scheduler.submit_lookup(request, hashes, 1)
        while isinstance(found := self._scheduler.check_lookup(request), Pending):
            os.sched_yield()  # without it, this loop keeps the socket's own thread from the processor
        seconds = time.perf_counter() - begun
        if not isinstance(found, Cached) or found.tokens != chunks * _CHUNK_TOKENS:
            raise RuntimeError(f"{found} where {chunks} chunks are stored")
        self._scheduler.forget_lookup(request)
        self._scheduler.end_session(request)
        time.sleep(_REST_S)
        return seconds

    def close(self) -> None:
        self._worker.close()
        self._scheduler.close()
