"""Comparing blocks with stored chunks, beside loading these chunks: the same bytes, read twice instead of once."""

from __future__ import annotations

import time
from typing import Any

import torch
import zmq
from common import Scale, Serve, say
from report import Figure, at_least

from kvdepot.client import Client
from kvdepot.client.contract import wrap_kv_caches
from kvdepot.client.transfer import ShardSpec, Transfer, pack_block_ids
from kvdepot.client.worker import CompareTerms, Submitted, WorkerClient
from kvdepot.devices import open_blocks
from kvdepot.keys import ChunkChain
from kvdepot.protocol.layout import build_layout

__all__ = ["run"]

_CHUNK_TOKENS = 256
_HEAD_VALUES = 2 * 8 * 128
"""Keys and values of 8 heads of 128, of a token and layer."""
_DEADLINE_S = 60.0


def run(scale: Scale, notes: list[str]) -> list[Figure]:
    """Figures for bytes that are equal, and for numbers that were rounded otherwise."""
    say("comparing 8k tokens")
    context: zmq.Context[Any] = zmq.Context()
    layers, chunks = min(16, scale.layers), scale.copy_tokens[-1] // _CHUNK_TOKENS
    server = Serve("--verify-hits", "1", arena_gib=min(0.75, scale.copy_arena_gib), chunk_size=_CHUNK_TOKENS)
    spec = ShardSpec("bench-verify", 1, 0, _CHUNK_TOKENS, 1)
    caches = {f"layer.{i}": torch.randn(chunks, _CHUNK_TOKENS, _HEAD_VALUES).to(torch.bfloat16) for i in range(layers)}
    chain = ChunkChain(_CHUNK_TOKENS)
    chain.extend(range(chunks * _CHUNK_TOKENS))
    blocks = pack_block_ids(list(range(chunks)))
    parts = [Transfer("r", chain.parent(0), 0, bytes(chain.slice(0, chunks)), blocks)]
    size_mb = sum(each.nbytes for each in caches.values()) / 1e6
    loads: list[float] = []
    compared: dict[str, list[float]] = {"equal": [], "rounded": []}
    worker = None
    try:
        server.wait_populated(context)
        worker = WorkerClient(Client(server.url, context), spec, unpins=False)
        layout = build_layout([each.view for each in wrap_kv_caches(caches)], [0] * layers)
        worker.register([layout], [open_blocks(layout, caches.values())])
        _wait(worker, worker.submit_store(["r"], parts, None))
        for number in range(-1, scale.cold_runs):
            for what, speeds in compared.items():
                worker.submit_retrieve(["r"], parts, None)
                (load,) = worker.retrieve_futures["r"]
                load_s = _wait(worker, load)
                if what == "rounded":
                    for layer in caches.values():
                        layer.mul_(1 + 2**-7)
                comparison = worker.submit_compare(parts, None, CompareTerms(0.1, is_sample=True))
                compare_s = _wait(worker, comparison)
                (found,) = comparison.outcome()  # type: ignore[misc]
                if found.chunks != chunks or (found.worst == 0.0) != (what == "equal"):
                    raise RuntimeError(f"{found} for {what} bytes")
                if number >= 0:
                    speeds.append(size_mb / compare_s)
                    loads.append(size_mb / load_s)
    finally:
        if worker is not None:
            worker.close()
        server.close()
        context.term()
    return [at_least(f"compare 8k tokens, {what}", "MB/s", speeds, loads, 0.4) for what, speeds in compared.items()]


def _wait(worker: WorkerClient, submitted: Submitted[Any]) -> float:
    """Seconds until it has ended; without a busy loop, which would take the GIL from the thread that copies."""
    begun = time.perf_counter()
    if not worker.lane.wait(submitted.done, _DEADLINE_S):
        raise TimeoutError("a copy did not end")
    seconds = time.perf_counter() - begun
    worker.poll(set())
    return seconds
