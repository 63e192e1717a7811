"""500 prompts in the queue of one engine, in a depot whose memory has room for a few, before a slow tier that has all.

The engine is a client with the lookups, loads and seats of one, and without a model. It looks all prompts up when they
come, and takes them in order. The tier is a real redis-server, behind a line of a fixed speed. The floor of the time is
that line's: the bytes of all prompts divided by its speed.
"""

from __future__ import annotations

import selectors
import shutil
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import load
import zmq
from common import Scale, Serve, free_port, listening, say
from report import Figure, at_least, at_most

from kvdepot.client import admin
from kvdepot.client.scheduler import Cached, Pending, SchedulerClient
from kvdepot.client.transfer import PromptChunks

__all__ = ["run"]

_CHUNKS, _CHUNK_BYTES = 4, 64 << 10
"""Of a prompt."""
_ARENA_GIB = 1 / 64
"""64 of the prompts."""
_BYTES_S = 32e6
_SEATS = 4
_TOGETHER = 16
"""Prompts that are stored before the tier is waited for: memory would lose them before they are saved."""
_DEADLINE_S = 300.0


def run(scale: Scale, notes: list[str]) -> list[Figure]:
    """Chunks found of those stored, and the time until the last prompt is loaded."""
    if shutil.which("redis-server") is None:
        notes.append("queued: left out, redis-server is missing")
        return []
    say(f"queued: {scale.queued_prompts} prompts before a slow tier")
    port, chunks = free_port(), scale.queued_prompts * _CHUNKS
    with (
        listening(["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""], port),
        _line(port) as url,
    ):
        server, context = Serve("--tiers", url, arena_gib=_ARENA_GIB, chunk_size=256), zmq.Context[Any]()
        try:
            server.wait_populated(context)
            found, seconds = _ask(server, scale.queued_prompts)
        finally:
            server.close()
            context.term()
    floor_s = chunks * _CHUNK_BYTES / _BYTES_S
    return [
        at_least(f"{scale.queued_prompts} queued prompts before a slow tier, found", "chunks", [found], [chunks], 1.0),
        at_most(f"{scale.queued_prompts} queued prompts before a slow tier", "s", [seconds], [floor_s], 1.5),
    ]


def _ask(server: Serve, prompts: int) -> tuple[int, float]:
    """Store all prompts, look all up at once, and load them in order; returns the chunks found, and the seconds."""
    plan = load.Plan(server.url, "", "queued", prompts, 0, _CHUNKS, _CHUNK_BYTES)
    with load.registered(plan) as worker, admin.connect(server.url) as client:
        engine, scheduler = load.LoadClient(plan, worker), SchedulerClient(client, worker.spec, reports=True)
        transfers = [engine.transfer(number) for number in range(prompts)]
        for first in range(0, prompts, _TOGETHER):
            stored = [engine.store(transfer) for transfer in transfers[first : first + _TOGETHER]]
            if not all(stored):
                raise RuntimeError("a prompt was not stored")
            _wait_saved(scheduler, min(prompts, first + _TOGETHER) * _CHUNKS)
        begun = time.perf_counter()
        for transfer in transfers:
            scheduler.submit(transfer.request_id, PromptChunks(worker.spec, transfer.hashes))
        found, waiting = 0, deque(transfers)
        while waiting:
            for transfer in list(waiting)[:_SEATS]:
                outcome = scheduler.wait_lookup(transfer.request_id, 0.001)
                if isinstance(outcome, Pending):
                    if time.perf_counter() - begun > _DEADLINE_S:
                        raise TimeoutError(f"{len(waiting)} of {prompts} prompts still wait")
                    continue
                tokens = outcome.tokens if isinstance(outcome, Cached) else 0
                found += tokens // worker.spec.chunk_tokens
                if tokens == _CHUNKS * worker.spec.chunk_tokens and not engine.retrieve(transfer):
                    raise RuntimeError("chunks that were promised could not be loaded")
                scheduler.forget_lookup(transfer.request_id)
                scheduler.end_session(transfer.request_id)
                waiting.remove(transfer)
        return found, time.perf_counter() - begun


def _wait_saved(scheduler: SchedulerClient, chunks: int) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while (saved := admin.status(scheduler.client).tiers[0].counters.get("saved_chunks", 0)) < chunks:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{saved} of {chunks} chunks were saved")
        time.sleep(0.005)


# -- the line


@contextmanager
def _line(port: int) -> Iterator[str]:
    """The URL of the Redis at `port` behind a line that brings its answers, all together, at `_BYTES_S`."""
    with socket.create_server(("127.0.0.1", 0)) as listener, selectors.DefaultSelector() as selector:
        ends, end = socket.socketpair()
        selector.register(listener, selectors.EVENT_READ)
        selector.register(end, selectors.EVENT_READ)
        thread = threading.Thread(target=_carry, args=(selector, listener, end, port))
        thread.start()
        try:
            yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            ends.close()
            thread.join()
            end.close()


def _carry(selector: selectors.BaseSelector, listener: socket.socket, end: socket.socket, port: int) -> None:
    """Carry bytes between clients and the store until `end` is readable."""
    free_at = time.perf_counter()  # when the line is free again
    while True:
        for key, _ in selector.select():
            source = key.fileobj
            if source is end:
                for each in list(selector.get_map().values()):
                    if each.data is not None:
                        each.data[0].close()
                return
            if source is listener:
                client, store = listener.accept()[0], socket.create_connection(("127.0.0.1", port))
                selector.register(client, selectors.EVENT_READ, (store, False))
                selector.register(store, selectors.EVENT_READ, (client, True))
                continue
            assert isinstance(source, socket.socket)
            target, is_answer = key.data
            data = source.recv(1 << 18)
            if not data:
                for each in (source, target):
                    selector.unregister(each)
                    each.close()
                break
            if is_answer:
                free_at = max(free_at, time.perf_counter()) + len(data) / _BYTES_S
                time.sleep(max(0.0, free_at - time.perf_counter()))
            target.sendall(data)
