"""Pages of SGLang: reads and writes of 128 pages beside one copy of the same bytes, and a query of 512 keys.

What SGLang calls is driven as its storage threads do it (`PageStore`, on which the backend's methods are one line
each), with a host pool of the same layout; SGLang itself need not be installed. Each write is of keys that are new, so
it moves all its bytes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import zmq
from common import Echo, Scale, Serve, say
from lookups import REST_S
from report import Figure, at_least, at_most

from kvdepot.client.calls import OwnClient
from kvdepot.integrations.sglang.pages import KV, PagePool, PageStore

__all__ = ["run"]

_PAGES, _KEYS, _LAYERS = 128, 512, 8
_ROW = 2 * 8 * 128
"""Numbers of one token in one layer: 8 heads of 128, keys and values."""


class HostPool:
    """SGLang's MHATokenToKVPoolHost in its layout page_first: `kv` is int16[2, tokens, layers, heads x size]."""

    layout, dtype = "page_first", torch.int16  # random numbers of bf16 need not equal themselves

    def __init__(self, pages: int, page_size: int) -> None:
        self.page_size, self.size, self.size_per_token = page_size, pages * page_size, _LAYERS * _ROW * 2
        self.kv = torch.zeros((2, self.size, _LAYERS, _ROW // 2), dtype=self.dtype)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        starts = [half[at].data_ptr() for at in indices[:: self.page_size].tolist() for half in self.kv]
        return starts, [self.page_size * self.size_per_token // 2] * len(starts)

    def clear(self) -> None: ...


def run(scale: Scale, notes: list[str]) -> list[Figure]:
    """All figures of SGLang."""
    pool = HostPool(2 * _PAGES, 2 * scale.layers)  # pages of 64 tokens, 2 MiB each
    context: zmq.Context[Any] = zmq.Context()
    server, echo = Serve(arena_gib=3 * pool.kv.nbytes / 2**30), None
    gained: dict[str, list[float]] = {name: [] for name in ("copy", "get", "set", "exists", "round trip")}
    try:
        say("sglang: waiting for the arena to have its memory")
        server.wait_populated(context)
        echo = Echo(context)
        store = PageStore(OwnClient(server.url, engine="bench"), lambda pool, epoch: f"bench {pool.name}", lambda: None)
        try:
            say("sglang: reads, writes and queries")
            _measure(store, pool, echo, scale, gained)
        finally:
            store.close()
    finally:
        if echo is not None:
            echo.close()
        server.close()
        context.term()
    return [
        at_least("SGLang's batch_get_v1 of 128 pages", "GB/s", gained["get"], gained["copy"], 0.85),
        at_least("SGLang's batch_set_v1 of 128 pages", "GB/s", gained["set"], gained["copy"], 0.85),
        at_most("SGLang's batch_exists of 512 keys", "ms", gained["exists"], gained["round trip"], 2.0),
    ]


def _measure(store: PageStore, pool: HostPool, echo: Echo, scale: Scale, gained: dict[str, list[float]]) -> None:
    """Add GB/s of copies, reads and writes, and milliseconds of queries and of bare round trips."""
    store.add(PagePool(pool, KV, (1, 0)))
    half = _PAGES * pool.page_size
    pool.kv.random_()
    size, first, second = half * pool.size_per_token, torch.arange(half), torch.arange(half, 2 * half)
    for number in range(-1, scale.copy_runs):  # the first warms everything up
        keys = _keys(_PAGES, f"run {number}")
        seconds = {
            "copy": _timed(lambda: [np.copyto(part[half:], part[:half]) for part in pool.kv.numpy()]),
            "set": _timed(lambda keys=keys: _all(store.set(KV, keys, first, []))),
        }
        pool.kv[:, half:].zero_()
        seconds["get"] = _timed(lambda keys=keys: _all(store.get(KV, keys, second)))
        if number < 0 and not torch.equal(pool.kv[:, :half], pool.kv[:, half:]):
            raise RuntimeError("what was loaded is not what was stored")
        store.clear()
        for name, value in seconds.items() if number >= 0 else ():
            gained[name].append(size / value / 1e9)
    keys = _keys(_KEYS, "query")
    for at in range(0, _KEYS, _PAGES):  # SGLang stores a prompt in parts
        _all(store.set(KV, keys[at : at + _PAGES], first, keys[:at]))
    for number in range(-10, scale.lookup_runs):
        time.sleep(REST_S)
        bare = _timed(lambda: echo.round_trip(b"0123456789abcdef"))
        time.sleep(REST_S)
        query = _timed(lambda: _all([store.exists(KV, keys, []) == _KEYS]))
        if number >= 0:
            gained["round trip"].append(1e3 * bare)
            gained["exists"].append(1e3 * query)


def _keys(count: int, seed: str) -> list[str]:
    """Keys like SGLang's: SHA-256 in hexadecimal."""
    return [hashlib.sha256(f"{seed} {number}".encode()).hexdigest() for number in range(count)]


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _all(done: list[bool]) -> None:
    if not all(done):
        raise RuntimeError(f"only {sum(done)} of {len(done)} pages")
