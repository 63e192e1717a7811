"""A server with tiers: their cost for lookups of chunks in memory, also if a tier hangs, and the time of a restart.

The tier that hangs is a real redis-server stopped with SIGSTOP. Each server with a tier is compared with one without,
by the same requests, alternately.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lookups
import numpy as np
import zmq
from common import Scale, Serve, free_port, listening, say
from report import Figure, at_most, below

from kvdepot.adapters import LMCacheMPSchedulerAdapter, LMCacheMPWorkerAdapter
from kvdepot.client import MessageQueueClient
from kvdepot.keys import HASH_BYTES
from kvdepot.protocol import wire

__all__ = ["run"]

PROMPT_CHUNKS = 32
"""Chunks of 8k tokens."""
PROMPTS = 32
LOOKUP_S = 0.2
_SAVED_S = 300.0
_MISS_EVERY = 20
_SERVED_S = 60.0


def run(scale: Scale, notes: list[str]) -> list[Figure]:
    """All figures of servers with tiers."""
    context: zmq.Context[Any] = zmq.Context()
    figures: list[Figure] = []
    if shutil.which("redis-server") is None:
        notes.append("tiers: what a hung tier costs is left out, redis-server is missing")
    else:
        figures += _beside_redis(scale, context, notes)
    figures += _restart(scale, context, notes)
    context.term()
    return figures


# -- lookups with a tier behind memory


class _Depot:
    """A server whose memory holds PROMPTS prompts, and the lookups that are sent to it."""

    def __init__(self, context: zmq.Context[Any], *flags: str) -> None:
        self.hits: list[float] = []
        self.misses: list[float] = []
        self._rng = np.random.default_rng(17)
        self._number = 0
        self._pending: dict[str, float] = {}
        self.server = Serve(*flags, arena_gib=1 / 16, chunk_size=lookups.BLOCK_TOKENS)
        self.server.wait_populated(context)
        self._prompts = lookups.fill(context, self.server.url, PROMPTS * PROMPT_CHUNKS, self._rng)
        self._scheduler = LMCacheMPSchedulerAdapter(self.server.url, context, lookups.MODEL, 1, 0, lookups.BLOCK_TOKENS)

    def hit(self, number: int) -> None:
        """Look up a prompt that is in memory; returns ms."""
        hashes = self._prompts[number % len(self._prompts)]
        request = self._begin(hashes)
        while (found := self._scheduler.check_lookup_result(request)) is None:
            os.sched_yield()
        self.hits.append((time.perf_counter() - self._pending.pop(request)) * 1000)
        if found != PROMPT_CHUNKS * lookups.BLOCK_TOKENS:
            raise RuntimeError(f"{found} tokens found of what is in memory")
        self._end(request)

    def miss(self) -> None:
        """Look up a prompt that is nowhere; `collect` takes the answer."""
        self._begin(self._rng.bytes(PROMPT_CHUNKS * HASH_BYTES))

    def collect(self) -> int:
        """Take the answers that have arrived; returns how many are missing."""
        for request, begun in list(self._pending.items()):
            if (found := self._scheduler.check_lookup_result(request)) is not None:
                self.misses.append((time.perf_counter() - begun) * 1000)
                if found:
                    raise RuntimeError(f"{found} tokens found that nobody stored")
                del self._pending[request]
                self._end(request)
        return len(self._pending)

    def _begin(self, hashes: bytes) -> str:
        self._number += 1
        request = str(self._number)
        self._pending[request] = time.perf_counter()
        self._scheduler.submit_lookup(request, hashes)
        return request

    def _end(self, request: str) -> None:
        self._scheduler.cleanup_lookup_result(request)
        self._scheduler.end_session(request)

    def close(self) -> None:
        self._scheduler.shutdown()
        self.server.close()


def _beside_redis(scale: Scale, context: zmq.Context[Any], notes: list[str]) -> list[Figure]:
    port = free_port()
    depots: list[_Depot] = []
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    with listening(command, port) as redis:
        try:
            say("tiers: filling two depots, one with a tier")
            depots.append(_Depot(context))
            depots.append(_Depot(context, "--tiers", f"redis://127.0.0.1:{port}", "--lookup-s", str(LOOKUP_S)))
            _wait_saved(depots[1].server.url, context, PROMPTS * PROMPT_CHUNKS)
            say("tiers: lookups of what is in memory")
            _ask(depots, scale.tier_lookups, 0)
            alone, tiered = (depot.hits[len(depot.hits) // 10 :] for depot in depots)
            figures = [at_most("lookup 8k tokens in memory, a tier behind it", "ms", tiered, alone, 1.1)]
            for depot in depots:
                depot.hits.clear()
            say("tiers: the same while the tier hangs")
            with _stopped(redis):
                _ask(depots, scale.hung_lookups, _MISS_EVERY)
            return figures + _hung(depots, notes)
        finally:
            for depot in depots:
                depot.close()


def _ask(depots: list[_Depot], count: int, miss_every: int) -> None:
    """Send the same lookups to all servers, alternately. miss_every: hits between two misses; 0: no misses."""
    for number in range(count):
        for depot in depots[:: 1 if number % 2 else -1]:  # neither always comes first
            if miss_every and number % miss_every == 0:
                depot.miss()
            depot.hit(number)
            depot.collect()
    deadline = time.monotonic() + _SERVED_S
    while sum(depot.collect() for depot in depots):
        if time.monotonic() > deadline:
            raise TimeoutError("lookups that miss were never answered")
        os.sched_yield()


def _hung(depots: list[_Depot], notes: list[str]) -> list[Figure]:
    alone, hung = depots
    waited = [ms for ms in hung.misses if ms > LOOKUP_S * 900]
    if not waited:
        raise RuntimeError("no lookup waited for the tier that hangs")
    notes.append(
        f"tiers: of {len(hung.misses)} lookups that missed while the tier hung, {len(waited)} waited for it; "
        f"median of those {np.median(waited):.1f} ms, of all {np.median(hung.misses):.2f} ms"
    )
    late = [[float(np.percentile(depot.hits, 99))] for depot in (hung, alone)]
    return [
        at_most("lookup that misses, the tier hangs, worst", "ms", [max(hung.misses)], [LOOKUP_S * 1000], 1, 5),
        at_most("lookup p99 in memory, the tier hangs", "ms", *late, 1.2),
    ]


@contextlib.contextmanager
def _stopped(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Stop a process for the length of the `with` statement."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


# -- a directory full of chunks


def _restart(scale: Scale, context: zmq.Context[Any], notes: list[str]) -> list[Figure]:
    """The time from launch to the first answer, and until chunks of all prompts are found, with a new arena."""
    chunks = scale.tier_chunks
    gib = chunks * 4096 * 1.02 / 2**30 + 0.01  # a page a chunk
    served: list[float] = []
    bare: list[float] = []
    complete: list[float] = []
    with tempfile.TemporaryDirectory(prefix="kvdepot-bench-") as folder:
        disk = f"disk://{Path(folder) / 'kv'}?capacity_gib={chunks * 16384 / 2**30 + 0.1}"
        say(f"tiers: writing {chunks} chunks to a disk")
        server = Serve("--tiers", disk, arena_gib=gib, chunk_size=lookups.BLOCK_TOKENS)
        try:
            server.wait_populated(context)
            prompts = lookups.fill(context, server.url, chunks, np.random.default_rng(19))
            _wait_saved(server.url, context, chunks)
        finally:
            server.close()
        say("tiers: restarts")
        wanted = prompts[:: max(1, len(prompts) // scale.tier_prompts)]
        room = 2 * len(wanted) * PROMPT_CHUNKS * 4096 * 1.02 / 2**30 + 0.01
        for _ in range(scale.recovery_runs):
            server = Serve(arena_gib=room, chunk_size=lookups.BLOCK_TOKENS)
            try:
                bare.append(server.wait_first_answer(context) * 1000)
            finally:
                server.close()
            server = Serve("--tiers", disk, arena_gib=room, chunk_size=lookups.BLOCK_TOKENS)
            try:
                served.append(server.wait_first_answer(context) * 1000)
                _find_all(context, server.url, wanted)
                complete.append((time.perf_counter() - server.started) * 1000)
            finally:
                server.close()
    listed = ", ".join(f"{ms / 1000:.1f} s" for ms in complete)
    notes.append(f"tiers: launch to hits of all of {chunks} chunks on disk: {listed}")
    return [
        at_most("launch to first answer, 100k chunks on disk", "ms", served, bare, 1.25),
        below("launch to hits of all of 100k chunks on disk", "ms", complete, bare, 5000),
    ]


def _find_all(context: zmq.Context[Any], url: str, prompts: list[bytes]) -> None:
    """Wait until every prompt has been found completely."""
    worker = LMCacheMPWorkerAdapter(url, context, lookups.MODEL, 1, 0, lookups.BLOCK_TOKENS)
    scheduler = LMCacheMPSchedulerAdapter(url, context, lookups.MODEL, 1, 0, lookups.BLOCK_TOKENS)
    try:
        lookups.register(worker, 1)  # before, nobody knows how long its chunks are
        deadline = time.monotonic() + _SERVED_S
        left, number = list(prompts), 0
        while left:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(left)} of {len(prompts)} prompts were not found")
            missed = []
            for hashes in left:
                request, number = str(number), number + 1
                scheduler.submit_lookup(request, hashes)
                found = scheduler.wait_lookup_result(request, 5.0)
                scheduler.cleanup_lookup_result(request)
                scheduler.end_session(request)
                if found != PROMPT_CHUNKS * lookups.BLOCK_TOKENS:
                    missed.append(hashes)
            left = missed
    finally:
        scheduler.shutdown()
        worker.shutdown()


def _wait_saved(url: str, context: zmq.Context[Any], chunks: int) -> None:
    """Wait until the only tier has this number of chunks."""
    client = MessageQueueClient(url, context)
    try:
        deadline = time.monotonic() + _SAVED_S
        while (counters := _tier_counters(client)).get("saved_chunks", 0) < chunks:
            lost = counters.get("dropped_chunks", 0) + counters.get("refused_chunks", 0)
            if lost or time.monotonic() > deadline:
                raise RuntimeError(f"not every chunk was saved: {counters}")
            time.sleep(0.02)
    finally:
        client.close()


def _tier_counters(client: MessageQueueClient) -> dict[str, int]:
    status: dict[str, Any] = client.ask(wire.GetStatus()).result(10.0)
    counters: dict[str, int] = status["tiers"][0]["counters"]
    return counters
