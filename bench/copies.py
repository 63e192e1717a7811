"""Stores and retrieves through the worker adapter, beside one thread that copies the same bytes with numpy.

One thread of the worker, its lane, copies between the engine's blocks and the arena; once, the server's threads did, so
older figures of two copy threads have no successor. The time is that from `submit_*` until `get_finished` reports it,
as an engine sees it. The lower bound for shuffled block ids is `np.take` of the same blocks, for adjacent ones a
contiguous copy of the same size; each is measured right before its pair. Chunks are cleared in between, so every store
moves all its bytes; all pages of the arena are allocated.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zmq
from common import Scale, Serve, say
from report import Figure, at_least

from kvdepot.adapters import LMCacheMPWorkerAdapter, LoadStoreOp, RequestType, send_lmcache_request
from kvdepot.client.worker import Submitted

__all__ = ["Engine", "make_caches", "run", "side_by_side"]

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.intp]

BLOCK_TOKENS = 16
_DEADLINE_S = 60.0


def run(scale: Scale, notes: list[str]) -> list[Figure]:
    """Figures of one worker, and of what checksums cost it."""
    say("copies: filling the engine's KV")
    caches = make_caches(scale)
    engine = Engine(scale, caches)
    context: zmq.Context[Any] = zmq.Context()
    say("copies: waiting for the arena to have its memory")
    server = Serve(arena_gib=scale.copy_arena_gib)
    worker = None
    try:
        server.wait_populated(context)
        worker = LMCacheMPWorkerAdapter(server.url, context, "bench", 1, 0, BLOCK_TOKENS)
        worker.register_kv_caches(caches)
        say("copies: measuring")
        figures = engine.measure(worker)
    finally:
        if worker is not None:
            worker.shutdown()
        server.close()
    figures += _verified(scale, engine, context, caches)
    context.term()
    return figures


def _verified(scale: Scale, engine: Engine, context: zmq.Context[Any], caches: dict[str, torch.Tensor]) -> list[Figure]:
    """The cost of checksums: the longest prompt with each setting alternately, beside the same without."""
    say("copies: with checksums")
    modes = ("off", "sampled", "always")
    options = [(["--verify", mode], 256) for mode in modes]
    speeds = side_by_side(scale, engine, context, caches, options)
    return [
        at_least(f"{what} 8k tokens, --verify {mode}", "GB/s", speeds[number, what], speeds[0, what], bar)
        for number, mode, bar in ((1, "sampled", 0.95), (2, "always", 0.5))
        for what in ("store", "retrieve")
    ]


def side_by_side(
    scale: Scale,
    engine: Engine,
    context: zmq.Context[Any],
    caches: dict[str, torch.Tensor],
    options: Sequence[tuple[Sequence[str], int]],
) -> dict[tuple[int, str], list[float]]:
    """GB/s of the longest prompt, by server and direction. options: flags and chunk size of each server."""
    servers: list[Serve] = []
    workers: list[LMCacheMPWorkerAdapter] = []
    try:
        for flags, chunk_size in options:
            servers.append(Serve(*flags, arena_gib=scale.copy_arena_gib / 2, chunk_size=chunk_size))
            servers[-1].wait_populated(context)
            workers.append(LMCacheMPWorkerAdapter(servers[-1].url, context, "bench", 1, 0, BLOCK_TOKENS))
            workers[-1].register_kv_caches(caches)
        return engine.measure_side_by_side(workers)
    finally:
        for worker in workers:
            worker.shutdown()
        for server in servers:
            server.close()


def make_caches(scale: Scale) -> dict[str, torch.Tensor]:
    """The KV of an engine, by layer: random bytes."""
    shape = (scale.blocks, BLOCK_TOKENS, 2, 8, 128)
    caches = {f"layers.{i}": torch.empty(shape, dtype=torch.bfloat16) for i in range(scale.layers)}
    for tensor in caches.values():
        tensor.view(torch.int16).random_()
    return caches


class Engine:
    """The engine's KV tensors, and plain buffers for the lower bounds."""

    def __init__(self, scale: Scale, caches: dict[str, torch.Tensor]) -> None:
        self._scale = scale
        self._rng = np.random.default_rng(7)
        self._caches = caches
        self.block_bytes = next(iter(caches.values()))[0].nbytes
        most = max(scale.copy_tokens) // BLOCK_TOKENS
        self._source: Bytes = np.ones(scale.layers * most * self.block_bytes, np.uint8)
        self._target: Bytes = np.ones(scale.layers * most * self.block_bytes, np.uint8)

    def measure(self, worker: LMCacheMPWorkerAdapter) -> list[Figure]:
        layers = [t.view(torch.uint8).numpy().reshape(self._scale.blocks, -1) for t in self._caches.values()]
        gained: dict[tuple[int, str, str], list[float]] = {}
        for number in range(-1, self._scale.copy_runs):  # the first warms everything up
            for tokens in self._scale.copy_tokens:
                for order in ("shuffled", "adjacent"):
                    source, target = self._blocks(tokens // BLOCK_TOKENS, order)
                    size = len(source) * len(layers) * self.block_bytes
                    floor_s = self._take(layers, source) if order == "shuffled" else self._copy(size)
                    ids = self._rng.integers(0, 1 << 17, tokens).tolist()
                    store_s = self._store(worker, f"store {number} {tokens} {order}", ids, source)
                    retrieve_s = self._retrieve(worker, f"retrieve {number} {tokens} {order}", ids, target)
                    if number < 0:
                        if not all(np.array_equal(layer[source], layer[target]) for layer in layers):
                            raise RuntimeError("what was retrieved is not what was stored")
                    else:
                        for what, seconds in (("floor", floor_s), ("store", store_s), ("retrieve", retrieve_s)):
                            gained.setdefault((tokens, order, what), []).append(size / seconds / 1e9)
                    send_lmcache_request(worker.mq_client, RequestType.CLEAR, []).result()
        figures = []
        for order, bar in (("shuffled", 0.85), ("adjacent", 0.80)):
            for what in ("store", "retrieve"):
                for tokens, name in zip(self._scale.copy_tokens, ("2k", "8k"), strict=True):
                    title = f"{what} {name} tokens, {order} blocks, 1 copy thread"
                    values, floors = gained[tokens, order, what], gained[tokens, order, "floor"]
                    figures.append(at_least(title, "GB/s", values, floors, bar))
        return figures

    def measure_side_by_side(self, workers: list[LMCacheMPWorkerAdapter]) -> dict[tuple[int, str], list[float]]:
        """GB/s of the longest prompt, shuffled, by worker and direction."""
        speeds: dict[tuple[int, str], list[float]] = {}
        tokens = max(self._scale.copy_tokens)
        for run in range(-1, self._scale.copy_runs * 2):
            source, target = self._blocks(tokens // BLOCK_TOKENS, "shuffled")
            size = len(source) * len(self._caches) * self.block_bytes
            ids = self._rng.integers(0, 1 << 17, tokens).tolist()
            for number, worker in enumerate(workers):
                times = {"store": self._store(worker, f"store {run}", ids, source)}
                times["retrieve"] = self._retrieve(worker, f"retrieve {run}", ids, target)
                send_lmcache_request(worker.mq_client, RequestType.CLEAR, []).result()
                for what, seconds in times.items() if run >= 0 else ():
                    speeds.setdefault((number, what), []).append(size / seconds / 1e9)
        return speeds

    def _blocks(self, count: int, order: str) -> tuple[Ids, Ids]:
        """Blocks to store, and the same number of others to retrieve into."""
        if order == "shuffled":
            ids = self._rng.permutation(self._scale.blocks)
            return ids[:count], ids[count : 2 * count]
        half = self._scale.blocks // 2
        first = int(self._rng.integers(0, half - count + 1))
        return np.arange(first, first + count), np.arange(half + first, half + first + count)

    # -- the lower bounds: one thread, buffers that are allocated and larger than the CPU's cache

    def _take(self, layers: list[Bytes], ids: Ids) -> float:
        size = len(ids) * self.block_bytes
        outs = [self._target[i * size : (i + 1) * size].reshape(len(ids), -1) for i in range(len(layers))]
        begun = time.perf_counter()
        for layer, out in zip(layers, outs, strict=True):
            np.take(layer, ids, axis=0, out=out, mode="clip")
        return time.perf_counter() - begun

    def _copy(self, size: int) -> float:
        begun = time.perf_counter()
        np.copyto(self._target[:size], self._source[:size])
        return time.perf_counter() - begun

    # -- the figures

    def _store(self, worker: LMCacheMPWorkerAdapter, request: str, ids: list[int], blocks: Ids) -> float:
        op = LoadStoreOp(blocks.tolist(), token_ids=ids, start=0, end=len(ids))
        begun = time.perf_counter()
        worker.submit_store_request(request, op, None)
        stored, _ = worker.get_finished({request})
        if not stored:
            _until_done(worker, worker.store_futures[request])
            stored, _ = worker.get_finished(set())
        seconds = time.perf_counter() - begun
        if stored != {request} or worker.counters["stores_dropped"]:
            raise RuntimeError("a store was dropped")
        return seconds

    def _retrieve(self, worker: LMCacheMPWorkerAdapter, request: str, ids: list[int], blocks: Ids) -> float:
        op = LoadStoreOp(blocks.tolist(), token_ids=ids, start=0, end=len(ids))
        begun = time.perf_counter()
        worker.submit_retrieve_request(request, op, None)
        _until_done(worker, worker.retrieve_futures[request])
        _, retrieved = worker.get_finished(set())
        seconds = time.perf_counter() - begun
        if retrieved != {request} or worker.get_block_ids_with_load_errors():
            raise RuntimeError("a retrieve failed")
        return seconds


def _until_done(worker: LMCacheMPWorkerAdapter, submitted: Sequence[Submitted[Any]]) -> None:
    """Sleep until they have ended: a busy loop would take the GIL from the thread that copies."""
    if not worker.lane.wait(lambda: all(each.done() for each in submitted), _DEADLINE_S):
        raise TimeoutError("a copy did not end")
