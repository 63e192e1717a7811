"""Lookups: latency, rate, and the effect of the index's size.

Every lookup hits in full. The chunks are really stored, but with a few bytes of KV per token.
"""

from __future__ import annotations

import gc
import os
import time
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import zmq
from blake3 import blake3
from common import Echo, Peer, Scale, Serve, say
from groups import two_groups
from report import Figure, at_least, at_most, below

from kvdepot.adapters import LMCacheMPSchedulerAdapter, LMCacheMPWorkerAdapter, LoadStoreOp
from kvdepot.client.transfer import Transfer
from kvdepot.keys import HASH_BYTES, ROOT, ChunkChain
from kvdepot.protocol import wire

__all__ = [
    "BLOCK_TOKENS",
    "MODEL",
    "REST_S",
    "count_lookups",
    "fill",
    "fresh_floor",
    "look_up",
    "register",
    "run",
    "store_prompt",
]

MODEL = "bench"
BLOCK_TOKENS = 16
_CHUNK_TOKENS = 256
_DEADLINE_S = 60.0
_PROMPT_CHUNKS = 32
_MESSAGE_PROMPTS = 128
_NAMES = ("1k", "8k", "32k", "128k")
REST_S = 0.001
"""Pause between two measurements, in which the server finishes the work of the last one."""


def run(scale: Scale, notes: list[str]) -> list[Figure]:
    """All lookup figures."""
    context: zmq.Context[Any] = zmq.Context()
    gc.collect()
    gc.freeze()  # keep the garbage collector from scanning this process's imports, which an engine does not have
    server = Serve(arena_gib=1 / 16, chunk_size=_CHUNK_TOKENS)
    try:
        server.wait_populated(context)
        worker = LMCacheMPWorkerAdapter(server.url, context, MODEL, 1, 0, BLOCK_TOKENS)
        try:
            tokens = max(scale.lookup_tokens) + _CHUNK_TOKENS
            prompt = np.random.default_rng(11).integers(0, 1 << 17, tokens)
            store_prompt(worker, prompt.tolist())
            figures = _times(scale, context, server.url, prompt)
            figures.append(_rate(scale, server.url, prompt.tolist()))
        finally:
            worker.shutdown()
    finally:
        server.close()
    figures += two_groups(scale, context)
    figures += _index(scale, context, notes)
    context.term()
    gc.unfreeze()
    return figures


def register(worker: LMCacheMPWorkerAdapter, blocks: int) -> None:
    """One layer of 64 bytes per block."""
    worker.register_kv_caches({"layer": torch.zeros((blocks, BLOCK_TOKENS, 4), dtype=torch.uint8)})


def _wait(worker: LMCacheMPWorkerAdapter, request: str) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    stored, _ = worker.get_finished({request})
    while not stored:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{request} did not finish")
        time.sleep(0.0005)
        stored, _ = worker.get_finished(set())
    if worker.counters["stores_dropped"]:
        raise RuntimeError("the depot dropped a store")


def store_prompt(worker: LMCacheMPWorkerAdapter, ids: list[int]) -> None:
    """Register a few bytes of KV per token, and store a prompt."""
    blocks = len(ids) // BLOCK_TOKENS
    register(worker, blocks)
    worker.submit_store_request("fill", LoadStoreOp(list(range(blocks)), token_ids=ids, start=0, end=len(ids)), None)
    _wait(worker, "fill")


# -- one lookup


def _times(scale: Scale, context: zmq.Context[Any], url: str, prompt: Any) -> list[Figure]:
    """New lookups and repeated ones, each beside its lower bound."""
    say("lookups: time of one")
    scheduler = LMCacheMPSchedulerAdapter(url, context, MODEL, 1, 0, BLOCK_TOKENS)
    echo = Echo(context)
    gained: dict[tuple[str, int], list[float]] = {}

    def note(what: str, tokens: int, seconds: float) -> None:
        if number >= 0:
            gained.setdefault((what, tokens), []).append(seconds * 1000)

    try:
        for number in range(-1, scale.lookup_runs):  # the first warms up
            for tokens in scale.lookup_tokens:
                request = f"{number} {tokens}"
                ids: list[int] = prompt[:tokens].tolist()  # objects of their own, as a new prompt's are
                more: list[int] = prompt[tokens : tokens + _CHUNK_TOKENS].tolist()
                if number % 2:  # neither always finds what the other has put into the cache
                    note("fresh", tokens, look_up(scheduler, request, ids))
                    note("floor", tokens, fresh_floor(echo, ids, _CHUNK_TOKENS))
                else:
                    note("floor", tokens, fresh_floor(echo, ids, _CHUNK_TOKENS))
                    note("fresh", tokens, look_up(scheduler, request, ids))
                ids += more
                time.sleep(REST_S)
                note("round trip", tokens, _round_trip(echo))
                time.sleep(REST_S)
                note("again", tokens, look_up(scheduler, request, ids))
                scheduler.end_session(request)
                time.sleep(REST_S)
    finally:
        scheduler.shutdown()
        echo.close()
    figures = []
    for tokens, name in zip(scale.lookup_tokens, _NAMES, strict=True):
        figures.append(
            at_most(f"lookup {name} tokens, all hit", "ms", gained["fresh", tokens], gained["floor", tokens], 3)
        )
    for tokens, name in zip(scale.lookup_tokens, _NAMES, strict=True):
        values, floors = gained["again", tokens], gained["round trip", tokens]
        figures.append(at_most(f"lookup {name} tokens repeated with 256 more", "ms", values, floors, 3))
    return figures


def look_up(scheduler: LMCacheMPSchedulerAdapter, request: str, ids: list[int]) -> float:
    """Seconds of a lookup that must find all of a prompt."""
    begun = time.perf_counter()
    scheduler.maybe_submit_lookup_request(request, token_ids=ids)
    while (found := scheduler.check_lookup_result(request)) is None:
        os.sched_yield()  # without it, this loop keeps the socket's own thread from the processor
    seconds = time.perf_counter() - begun
    if found != len(ids):
        raise RuntimeError(f"{found} of {len(ids)} tokens found")
    scheduler.cleanup_lookup_result(request)
    return seconds


def fresh_floor(echo: Echo, ids: list[int], chunk_tokens: int) -> float:
    """Ids to bytes, their BLAKE3 chain, one round trip."""
    begun = time.perf_counter()
    data = memoryview(array("I", ids).tobytes())
    digest: bytes = ROOT
    for offset in range(0, len(data), 4 * chunk_tokens):
        digest = blake3(digest + data[offset : offset + 4 * chunk_tokens]).digest()
    echo.round_trip(digest)
    return time.perf_counter() - begun


def _round_trip(echo: Echo) -> float:
    begun = time.perf_counter()
    echo.round_trip(b"0123456789abcdef")
    return time.perf_counter() - begun


# -- lookups per second


def _rate(scale: Scale, url: str, prompt: list[int]) -> Figure:
    """Several client processes at once, with the server and with a bare echo of messages of the same size."""
    say("lookups: how many a second")
    ids = prompt[: scale.rate_tokens]
    chain = ChunkChain(_CHUNK_TOKENS)
    chain.extend(ids)
    hashes = bytes(chain.hashes)
    lookup = wire.Lookup(MODEL, 1, _CHUNK_TOKENS // BLOCK_TOKENS, "request-0000", 1, hashes)
    request_bytes = len(wire.encode_request(1, lookup))
    reply_bytes = len(wire.encode_answer(bytes(wire.ID_BYTES), bytes(wire.BOOT_BYTES), wire.Hit(len(chain))))
    context: zmq.Context[Any] = zmq.Context()
    echo = Echo(context, reply_bytes)
    askers = ["depot", url, MODEL, str(BLOCK_TOKENS), str(len(chain)), hashes.hex()]
    clients = [Peer(*askers) for _ in range(scale.rate_clients)]
    bare = [Peer("bare", echo.url, str(request_bytes)) for _ in range(scale.rate_clients)]
    try:
        for peer in (*clients, *bare):
            peer.hear()
        values, floors = [], []
        for _ in range(scale.rate_runs):
            floors.append(count_lookups(bare, scale.rate_seconds))
            values.append(count_lookups(clients, scale.rate_seconds))
    finally:
        for peer in (*clients, *bare):
            peer.close()
        echo.close()
        context.term()
    return at_least("lookups a second, 8k tokens, 4 clients", "1/s", values, floors, 0.25)


def count_lookups(peers: Sequence[Peer], seconds: float) -> float:
    """Lookups, or round trips, per second of helper processes together."""
    for peer in peers:
        peer.tell(str(seconds))
    total = 0.0
    for peer in peers:
        done, took = peer.hear()
        total += done / took
    return total


# -- a large index


def _index(scale: Scale, context: zmq.Context[Any], notes: list[str]) -> list[Figure]:
    """The same lookups in three servers with different numbers of chunks, alternately."""
    names = ("1k", "100k", "1M")
    servers: list[Serve] = []
    schedulers: list[LMCacheMPSchedulerAdapter] = []
    prompts: list[list[bytes]] = []
    echo = None
    rng = np.random.default_rng(13)
    try:
        for chunks in scale.index_chunks:
            gib = (chunks + _PROMPT_CHUNKS + 64) * 4096 * 1.02 / 2**30  # a page a chunk is the least, and the records
            servers.append(Serve(arena_gib=gib, chunk_size=BLOCK_TOKENS))
        for chunks, server in zip(scale.index_chunks, servers, strict=True):
            say(f"lookups: filling an index with {chunks} chunks")
            server.wait_populated(context)
            prompts.append(fill(context, server.url, chunks, rng))
            schedulers.append(LMCacheMPSchedulerAdapter(server.url, context, MODEL, 1, 0, BLOCK_TOKENS))
        say("lookups: time by size of the index")
        echo = Echo(context)
        bare: list[float] = []
        taken: list[list[float]] = [[] for _ in servers]
        gc.collect()
        for number in range(-100, scale.index_lookups):
            for scheduler, heads, times in zip(schedulers, prompts, taken, strict=True):
                hashes = heads[int(rng.integers(len(heads)))]
                request = str(number)
                begun = time.perf_counter()
                scheduler.submit_lookup(request, hashes)
                while (found := scheduler.check_lookup_result(request)) is None:
                    os.sched_yield()
                seconds = time.perf_counter() - begun
                if found != len(hashes) // HASH_BYTES * BLOCK_TOKENS:
                    raise RuntimeError(f"{found} tokens found")
                scheduler.cleanup_lookup_result(request)
                scheduler.end_session(request)
                if number >= 0:
                    times.append(seconds * 1000)
            bare.append(_round_trip(echo) * 1000)
    finally:
        if echo is not None:
            echo.close()
        for scheduler in schedulers:
            scheduler.shutdown()
        for server in servers:
            server.close()
    notes.append(
        f"lookups: bare round trips in between those by size of the index: p50 {np.percentile(bare, 50):.2f} ms, "
        f"p99.9 {np.percentile(bare, 99.9):.2f} ms"
    )
    figures = []
    middle = [float(np.percentile(times, 50)) for times in taken]
    late = [float(np.percentile(times, 99.9)) for times in taken]
    for name, value in zip(names, middle, strict=True):
        figures.append(at_most(f"lookup p50 with {name} chunks in the index", "ms", [value], [min(middle)], 1.5))
    for name, value in zip(names, late, strict=True):
        figures.append(below(f"lookup p99.9 with {name} chunks in the index", "ms", [value], [min(late)], 5))
    return figures


def fill(context: zmq.Context[Any], url: str, chunks: int, rng: np.random.Generator) -> list[bytes]:
    """Store this number of chunks, as prompts of 32; returns the hashes of each prompt."""
    worker = LMCacheMPWorkerAdapter(url, context, MODEL, 1, 0, BLOCK_TOKENS)
    prompts: list[bytes] = []
    try:
        register(worker, _PROMPT_CHUNKS * _MESSAGE_PROMPTS)
        left = chunks
        while left:
            counts = [_PROMPT_CHUNKS] * min(left // _PROMPT_CHUNKS, _MESSAGE_PROMPTS) or [left]
            transfers = []
            first = 0
            for count in counts:
                hashes = rng.bytes(count * HASH_BYTES)
                blocks = np.arange(first, first + count, dtype="<u4").tobytes()
                transfers.append(Transfer("fill", ROOT, 0, hashes, blocks))
                first += count
                prompts.append(hashes)
            request = f"fill {left}"
            worker.submit_store([request], transfers, None)
            _wait(worker, request)
            left -= sum(counts)
    finally:
        worker.shutdown()
    return [hashes for hashes in prompts if len(hashes) == _PROMPT_CHUNKS * HASH_BYTES]
