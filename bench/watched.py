"""The cost of the web page and metrics for lookups, and the time of a status.

One server with a large index and its web process; a separate process makes the requests of ten open pages and a
scraper. Rounds with and without these readers alternate, and every lookup of a round counts.
"""

from __future__ import annotations

import gc
import os
import subprocess
import time
import urllib.request
from typing import Any

import numpy as np
import zmq
from common import READY_S, Echo, Peer, Scale, Serve, free_port, say
from lookups import BLOCK_TOKENS, MODEL, fill
from report import Figure, at_most, below

from kvdepot.adapters import LMCacheMPSchedulerAdapter
from kvdepot.client import MessageQueueClient
from kvdepot.keys import HASH_BYTES
from kvdepot.processes import code_command, module_command
from kvdepot.protocol import wire

__all__ = ["run"]

_PAGES = 10
_REST_S = 0.001
_Times = tuple[list[float], list[float]]
"""Milliseconds of each lookup and each bare round trip of a round."""


def run(scale: Scale, notes: list[str]) -> list[Figure]:
    """Lookups with readers beside lookups without, and the time of a status."""
    context: zmq.Context[Any] = zmq.Context()
    chunks = scale.index_chunks[-1]
    gib = (chunks + 64) * 4096 * 1.02 / 2**30
    port = free_port()
    server = Serve("--http", f"127.0.0.1:{port}", arena_gib=gib, chunk_size=BLOCK_TOKENS)
    readers = None
    echo = Echo(context)
    try:
        say(f"watched: filling an index with {chunks} chunks")
        server.wait_populated(context)
        prompts = fill(context, server.url, chunks, np.random.default_rng(17))
        status = _status(context, server.url, echo, scale.watched_runs)
        command = _command(server.url, scale.watched_runs)
        _wait_for_status(port)
        readers = Peer("readers", str(port), str(_PAGES))
        if readers.hear() != "ready":
            raise RuntimeError("the readers do not begin")
        say("watched: lookups with and without readers")
        alone, watched, asked = _rounds(context, server.url, prompts, readers, echo, scale)
        if asked < scale.watched_answers:
            raise RuntimeError(f"{_PAGES} pages and a scraper had {asked:.1f} answers a second")
    finally:
        if readers is not None:
            readers.close()
        echo.close()
        server.close()
        context.term()
    notes.append(
        f"watched: {asked:.0f} answers a second for {_PAGES} pages and a scraper; of {len(alone)} rounds each the p50 "
        f"{np.median([np.percentile(times, 50) for times, _ in alone]):.3f} ms without readers, "
        f"{np.median([np.percentile(times, 50) for times, _ in watched]):.3f} ms with"
    )
    late = [[float(np.percentile(times, 99)) for times, _ in rounds] for rounds in (watched, alone)]
    bare = [np.median([np.percentile(times, 99) for _, times in rounds]) for rounds in (watched, alone)]
    notes.append(f"watched: p99 of bare round trips in between {bare[1]:.3f} ms without readers, {bare[0]:.3f} ms with")
    return [
        at_most("lookup p99, 10 pages open and metrics scraped", "ms", *late, 1.05),
        below("status with 1M chunks, asked by a client", "ms", *status, 100),
        below("status with 1M chunks, kvdepot status --json", "ms", *command, 100),
    ]


def _wait_for_status(port: int) -> None:
    """Wait until the web process, which has listened before it has asked the server, serves a status."""
    deadline = time.monotonic() + READY_S
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/status", timeout=READY_S).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _rounds(
    context: zmq.Context[Any], url: str, prompts: list[bytes], readers: Peer, echo: Echo, scale: Scale
) -> tuple[list[_Times], list[_Times], float]:
    """Alternate rounds without and with readers; also returns the readers' answers per second."""
    scheduler = LMCacheMPSchedulerAdapter(url, context, MODEL, 1, 0, BLOCK_TOKENS)
    rounds: tuple[list[_Times], list[_Times]] = ([], [])
    answers = seconds = 0.0
    gc.collect()
    gc.freeze()
    try:
        for number in range(-1, 2 * scale.watched_rounds):  # the first warms up
            is_watched = number % 2
            if is_watched:
                readers.tell(str(scale.watched_seconds))
            times = _lookups(scheduler, prompts, echo, scale.watched_seconds)
            if is_watched:
                done, took = readers.hear()
                answers += done
                seconds += took
            if number >= 0:
                rounds[is_watched].append(times)
    finally:
        gc.unfreeze()
        scheduler.shutdown()
    return *rounds, answers / seconds


def _lookups(scheduler: LMCacheMPSchedulerAdapter, prompts: list[bytes], echo: Echo, seconds: float) -> _Times:
    """One lookup after another, with pauses like a scheduler's steps, each with a bare round trip."""
    times: list[float] = []
    bare: list[float] = []
    end = time.perf_counter() + seconds
    while (begun := time.perf_counter()) < end:
        request = str(len(times))
        hashes = prompts[len(times) % len(prompts)]
        scheduler.submit_lookup(request, hashes)
        while (found := scheduler.check_lookup_result(request)) is None:
            os.sched_yield()
        times.append((time.perf_counter() - begun) * 1000)
        if found != len(hashes) // HASH_BYTES * BLOCK_TOKENS:
            raise RuntimeError(f"{found} tokens found")
        scheduler.cleanup_lookup_result(request)
        scheduler.end_session(request)
        time.sleep(_REST_S)
        begun = time.perf_counter()
        echo.round_trip(b"0123456789abcdef")
        bare.append((time.perf_counter() - begun) * 1000)
        time.sleep(_REST_S)
    return times, bare


def _status(context: zmq.Context[Any], url: str, echo: Echo, runs: int) -> tuple[list[float], list[float]]:
    """Milliseconds of a status, and of a bare round trip."""
    client = MessageQueueClient(url, context)
    values, floors = [], []
    try:
        for _ in range(runs):
            begun = time.perf_counter()
            client.ask(wire.GetStatus()).result(10.0)
            values.append((time.perf_counter() - begun) * 1000)
            begun = time.perf_counter()
            echo.round_trip(b"0123456789abcdef")
            floors.append((time.perf_counter() - begun) * 1000)
    finally:
        client.close()
    return values, floors


def _command(url: str, runs: int) -> tuple[list[float], list[float]]:
    """Milliseconds of the whole command, and of a Python with the imports of any command that contacts a server."""
    environ = dict(os.environ)
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # what is installed has been compiled; a checkout is in the first run
    values, floors = [], []
    for number in range(-1, runs):
        times = []
        for command in (
            module_command("kvdepot.cli", "status", "--json", "--url", url),
            code_command("import zmq, msgspec, click"),
        ):
            begun = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environ)
            times.append((time.perf_counter() - begun) * 1000)
        if number >= 0:
            values.append(times[0])
            floors.append(times[1])
    return values, floors
