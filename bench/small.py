"""Chunks of one block (16 tokens) beside chunks of 256 tokens: what handling many small chunks costs.

Stores and retrieves of the longest prompt through the worker adapter, alternately in two servers; new lookups that all
hit, beside hashing and one bare round trip; and lookups per second.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import zmq
from common import Echo, Peer, Scale, Serve, say
from copies import Engine, make_caches, side_by_side
from lookups import BLOCK_TOKENS, MODEL, REST_S, count_lookups, fresh_floor, look_up, store_prompt
from report import Figure, at_least, at_most

from kvdepot.adapters import LMCacheMPSchedulerAdapter, LMCacheMPWorkerAdapter
from kvdepot.keys import ChunkChain

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
    caches = make_caches(scale)
    speeds = side_by_side(scale, Engine(scale, caches), context, caches, [([], size) for size in _CHUNKS])
    return [
        at_least(f"{what} 8k tokens, chunks of 16 beside 256", "GB/s", speeds[1, what], speeds[0, what], 0.95)
        for what in ("store", "retrieve")
    ]


def _lookups(scale: Scale, context: zmq.Context[Any]) -> list[Figure]:
    prompt = np.random.default_rng(17).integers(0, 1 << 17, max(scale.lookup_tokens)).tolist()
    servers: list[Serve] = []
    workers: list[LMCacheMPWorkerAdapter] = []
    try:
        for size in _CHUNKS:
            servers.append(Serve(arena_gib=1 / 8, chunk_size=size))
            servers[-1].wait_populated(context)
            workers.append(LMCacheMPWorkerAdapter(servers[-1].url, context, MODEL, 1, 0, BLOCK_TOKENS))
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
                request = f"{number} {tokens}"
                for what in ("floor", "lookup") if number % 2 else ("lookup", "floor"):
                    is_floor = what == "floor"
                    seconds = fresh_floor(echo, ids, BLOCK_TOKENS) if is_floor else look_up(scheduler, request, ids)
                    if number >= 0:
                        gained.setdefault((what, tokens), []).append(seconds * 1000)
                scheduler.end_session(request)
                time.sleep(REST_S)
    finally:
        scheduler.shutdown()
        echo.close()
    return [
        at_most(
            f"lookup {name} tokens, all hit, chunks of 16", "ms", gained["lookup", tokens], gained["floor", tokens], 2
        )
        for name, tokens in zip(("8k", "128k"), scale.lookup_tokens[1::2], strict=True)
    ]


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
