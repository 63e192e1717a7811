"""`kvdepot serve`: time to the first answer, time from a kill until its chunks are found again, and resident memory."""

from __future__ import annotations

import subprocess
import time
import uuid
from pathlib import Path
from typing import Any

import lookups
import numpy as np
import zmq
from common import READY_S, Scale, Serve, new_url, say
from report import Figure, at_most, below

from kvdepot.adapters import LMCacheMPSchedulerAdapter
from kvdepot.client import MessageQueueClient
from kvdepot.client.launch import Embedded
from kvdepot.keys import HASH_BYTES
from kvdepot.processes import code_command

__all__ = ["run"]

_IMPORTS = "import zmq, msgspec, numpy"
_STEP_S = 0.001
"""Interval at which an idle engine polls."""


def run(scale: Scale, notes: list[str]) -> list[Figure]:
    """All figures; the lower bound is a process that only imports."""
    say("serve: from launch to the first answer")
    context: zmq.Context[Any] = zmq.Context()
    starts, own, sizes, import_times, import_sizes = [], [], [], [], []
    for number in range(-1, scale.start_runs):  # the first reads files from the disk
        begun = time.perf_counter()
        subprocess.run(code_command(_IMPORTS), check=True)
        imported_s = time.perf_counter() - begun
        server = Serve()
        try:
            answered_s = server.wait_first_answer(context)
            resident = server.resident_bytes()
        finally:
            server.close()
        own_s = _start_embedded(context)
        if number >= 0:
            own.append(own_s * 1000)
            starts.append(answered_s * 1000)
            import_times.append(imported_s * 1000)
            sizes.append(resident / 1e6)
            import_sizes.append(_import_bytes() / 1e6)
    back = _recover(scale, context)
    context.term()
    return [
        at_most("kvdepot serve, launch to first answer", "ms", starts, import_times, 4),
        at_most("embedded server, launch to first answer", "ms", own, starts, 1.2),
        below("kill -9 to hits again, 100k chunks", "ms", back, starts, 1000),
        below("kvdepot serve, resident without the arena", "MB", sizes, import_sizes, 120),
    ]


def _start_embedded(context: zmq.Context[Any]) -> float:
    """Seconds until an engine's own server answers."""
    begun = time.perf_counter()
    server = Embedded(new_url(), f"bench-{uuid.uuid4().hex[:12]}")
    try:
        client = MessageQueueClient(server.url, context)
        try:
            client.learn_chunk_size(READY_S)
            return time.perf_counter() - begun
        finally:
            client.close()
    finally:
        server.close()


def _recover(scale: Scale, context: zmq.Context[Any]) -> list[float]:
    """Milliseconds from killing a server to a hit on the next one, which is launched at once."""
    say(f"serve: killing a server with {scale.recovered_chunks} chunks")
    gib = scale.recovered_chunks * 16384 * 1.02 / 2**30 + 0.002  # a record for each chunk
    server = Serve(arena_gib=gib, chunk_size=lookups.BLOCK_TOKENS)
    times: list[float] = []
    try:
        server.wait_populated(context)
        prompts = lookups.fill(context, server.url, scale.recovered_chunks, np.random.default_rng(5))
        scheduler = LMCacheMPSchedulerAdapter(server.url, context, lookups.MODEL, 1, 0, lookups.BLOCK_TOKENS)
        for number in range(scale.recovery_runs):
            begun = time.perf_counter()
            server.kill()
            server = Serve(arena_gib=gib, chunk_size=lookups.BLOCK_TOKENS, before=server)
            while not _found(scheduler, f"{number}", prompts[number]):
                time.sleep(_STEP_S)
            times.append((time.perf_counter() - begun) * 1000)
            lost = sum(not _found(scheduler, f"{number} all {i}", hashes) for i, hashes in enumerate(prompts))
            if lost:
                raise RuntimeError(f"{lost} of {len(prompts)} prompts are gone")
        scheduler.shutdown()
    finally:
        server.close()
    return times


def _found(scheduler: LMCacheMPSchedulerAdapter, request: str, hashes: bytes) -> bool:
    """Whether a whole prompt is cached; polls for the answer once per step, like an engine."""
    scheduler.submit_lookup(request, hashes)
    while (found := scheduler.wait_lookup_result(request, 5.0)) is None:
        time.sleep(_STEP_S)
    scheduler.cleanup_lookup_result(request)
    scheduler.end_session(request)
    return found == len(hashes) // HASH_BYTES * lookups.BLOCK_TOKENS


def _import_bytes() -> int:
    """Resident memory of a process that only imports."""
    child = subprocess.Popen(
        code_command(f"{_IMPORTS}; print(flush=True); input()"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdout.readline()
        for line in Path(f"/proc/{child.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Rss:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("no Rss in smaps_rollup")
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
