"""Chunks of one block (16 tokens) beside chunks of 256 tokens: what handling many small chunks costs.

Stores and retrieves of the longest prompt through the worker adapter, alternately in two servers; new lookups that all
hit, beside hashing and one bare round trip; and lookups per second.
"""

from __future__ import annotations

import os
import statistics
import time
from array import array
from typing import Any

import numpy as np
import torch
import zmq
from blake3 import blake3
from common import Echo, Peer, Scale, Serve, say
from copies import Engine
from lookups import BLOCK_TOKENS, MODEL, count_lookups, register, store_prompt
from report import Figure, at_least, at_most

from kvdepot.adapters import LMCacheMPSchedulerAdapter, LMCacheMPWorkerAdapter
from kvdepot.keys import ROOT, ChunkChain

__all__ = ["run"]

_CHUNKS = (256, BLOCK_TOKENS)


def run(scale: Scale, notes: list[str]) -> list[Figure]:
    """All figures of small chunks."""
    context: zmq.Context[Any] = zmq.Context()
    figures = _copies(scale, context) + _lookups(scale, context)
    context.term()
    return figures


def _copies(scale: Scale, context: zmq.Context[Any]) -> list[Figure]:
    say("small: stores and retrieves with chunks of 16 and 256 tokens")
    shape = (scale.blocks, BLOCK_TOKENS, 2, 8, 128)
    caches = {f"layers.{i}": torch.empty(shape, dtype=torch.bfloat16) for i in range(scale.layers)}
    for tensor in caches.values():
        tensor.view(torch.int16).random_()
    servers = [Serve(arena_gib=scale.copy_arena_gib / 2, chunk_size=size) for size in _CHUNKS]
    workers: list[LMCacheMPWorkerAdapter] = []
    try:
        for server in servers:
            server.wait_populated(context)
            workers.append(LMCacheMPWorkerAdapter(server.url, context, MODEL, 1, 0, BLOCK_TOKENS))
            workers[-1].register_kv_caches(caches)
        speeds = Engine(scale, caches).measure_side_by_side(workers)
    finally:
        for worker in workers:
            worker.shutdown()
        for server in servers:
            server.close()
    return [
        at_least(f"{what} 8k tokens, chunks of 16 beside 256", "GB/s", speeds[1, what], speeds[0, what], 0.95)
        for what in ("store", "retrieve")
    ]


def _lookups(scale: Scale, context: zmq.Context[Any]) -> list[Figure]:
    servers = [Serve(arena_gib=1 / 8, chunk_size=size) for size in _CHUNKS]
    prompt = np.random.default_rng(17).integers(0, 1 << 17, max(scale.lookup_tokens)).tolist()
    workers: list[LMCacheMPWorkerAdapter] = []
    try:
        for server in servers:
            server.wait_populated(context)
            workers.append(LMCacheMPWorkerAdapter(server.url, context, MODEL, 1, 0, BLOCK_TOKENS))
            register(workers[-1], len(prompt) // BLOCK_TOKENS)
            store_prompt(workers[-1], prompt)
        figures = _times(scale, context, servers[1].url, prompt)
        say("small: lookups per second")
        rates: dict[int, list[float]] = {size: [] for size in _CHUNKS}
        for _ in range(scale.rate_runs):
            for server, size in zip(servers, _CHUNKS, strict=True):
                rates[size].append(_rate(scale, server.url, prompt, size))
        title = "lookups a second, 8k tokens, 4 clients, chunks of 16 beside 256"
        figures.append(at_least(title, "1/s", rates[BLOCK_TOKENS], rates[256], 0.7))
    finally:
        for worker in workers:
            worker.shutdown()
        for server in servers:
            server.close()
    return figures


def _times(scale: Scale, context: zmq.Context[Any], url: str, prompt: list[int]) -> list[Figure]:
    """New lookups with chunks of 16, beside ids to bytes, their BLAKE3 chain and one round trip."""
    say("small: time of a lookup")
    scheduler = LMCacheMPSchedulerAdapter(url, context, MODEL, 1, 0, BLOCK_TOKENS)
    echo, gained = Echo(context), dict[tuple[str, int], list[float]]()
    try:
        for number in range(-1, scale.lookup_runs):
            for tokens in scale.lookup_tokens[1::2]:
                ids = list(prompt[:tokens])
                for what in ("floor", "lookup") if number % 2 else ("lookup", "floor"):
                    begun = time.perf_counter()
                    if what == "floor":
                        _floor(echo, ids)
                    else:
                        _lookup(scheduler, f"{number} {tokens}", ids)
                    seconds = time.perf_counter() - begun
                    if number >= 0:
                        gained.setdefault((what, tokens), []).append(seconds * 1000)
                scheduler.end_session(f"{number} {tokens}")
                time.sleep(0.001)
    finally:
        scheduler.shutdown()
        echo.close()
    return [
        at_most(
            f"lookup {name} tokens, all hit, chunks of 16", "ms", gained["lookup", tokens], gained["floor", tokens], 2
        )
        for name, tokens in zip(("8k", "128k"), scale.lookup_tokens[1::2], strict=True)
    ]


def _floor(echo: Echo, ids: list[int]) -> None:
    data = memoryview(array("I", ids).tobytes())
    digest: bytes = ROOT
    for offset in range(0, len(data), 4 * BLOCK_TOKENS):
        digest = blake3(digest + data[offset : offset + 4 * BLOCK_TOKENS]).digest()
    echo.round_trip(digest)


def _lookup(scheduler: LMCacheMPSchedulerAdapter, request: str, ids: list[int]) -> None:
    scheduler.maybe_submit_lookup_request(request, token_ids=ids)
    while (found := scheduler.check_lookup_result(request)) is None:
        os.sched_yield()
    if found != len(ids):
        raise RuntimeError(f"{found} of {len(ids)} tokens found")
    scheduler.cleanup_lookup_result(request)


def _rate(scale: Scale, url: str, prompt: list[int], chunk_tokens: int) -> float:
    chain = ChunkChain(chunk_tokens)
    chain.extend(prompt[: scale.rate_tokens])
    asked = ["depot", url, MODEL, str(BLOCK_TOKENS), str(len(chain)), bytes(chain.hashes).hex()]
    peers = [Peer(*asked) for _ in range(scale.rate_clients)]
    try:
        for peer in peers:
            peer.hear()
        return statistics.median(count_lookups(peers, scale.rate_seconds) for _ in range(2))
    finally:
        for peer in peers:
            peer.close()
