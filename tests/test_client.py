"""A connection to a server that stops answering: what was sent ends only when nothing can touch its blocks any more."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import zmq

from kvdepot import connection, wire
from kvdepot.adapters import LMCacheMPWorkerAdapter, LoadStoreOp
from kvdepot.connection import Connection, Watch
from kvdepot.errors import Busy, Unavailable

from .conftest import StartDepot, eventually


def test_a_client_that_cannot_watch_the_server_is_told_so_and_sends_no_copy() -> None:
    """Else nobody could tell whether blocks may be given back when the server falls silent."""
    frames: list[bytes] = []

    def send(frame: bytes) -> bool:
        frames.append(frame)
        return True

    def watch(arena: str, boot: bytes) -> Watch:
        raise Busy("too many open files")

    connection = Connection("ipc:///nowhere", "card", send, watch, time.monotonic)
    answers: list[Any] = []
    connection.ask(wire.Store(1, 1, []), answers.append)
    (hello,) = frames
    connection.take(wire.encode_answer(hello[: wire.ID_BYTES], b"bootboot", wire.Welcome(wire.VERSION, "arena", 256)))
    (answer,) = answers
    assert isinstance(answer, Unavailable) and "too many open files" in str(answer)
    assert len(frames) == 1 and not connection.welcomed


@pytest.mark.faults
@pytest.mark.parametrize("is_store", [True, False], ids=["store", "retrieve"])
def test_a_copy_sent_to_a_stopped_server_does_not_end_before_the_server_answers(
    is_store: bool, start_depot: StartDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    depot = start_depot()
    monkeypatch.setattr(connection, "_STALE_S", 0.2)
    monkeypatch.setattr(connection, "_HELLO_S", 0.2)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    worker = LMCacheMPWorkerAdapter(depot.url, context, "stopped", 1, 0, 64)
    worker.register_kv_caches({"layer": torch.zeros(16, 64, 1, 8)})
    os.kill(depot.process.pid, signal.SIGSTOP)
    op = LoadStoreOp([1, 2, 3, 4], token_ids=list(range(256)), start=0, end=256)
    if is_store:
        worker.submit_store_request("r", op, None)
    else:
        worker.submit_retrieve_request("r", op, None)
    futures = worker.store_futures if is_store else worker.retrieve_futures
    (transfer,) = futures["r"]
    # Long enough for several suspicions and hellos that nobody answers.
    assert not worker.mq_client.wait(transfer.done, 2.0), "given back while the sleeping server may still copy"
    os.kill(depot.process.pid, signal.SIGCONT)
    eventually(transfer.done)
    stored, loaded = worker.get_finished({"r"})
    assert (stored if is_store else loaded) == {"r"}
    worker.shutdown()
    context.term()
