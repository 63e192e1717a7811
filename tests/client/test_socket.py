"""A client's socket on real servers, and its futures."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import zmq

import kvdepot
from kvdepot.adapters import LMCacheMPWorkerAdapter, LoadStoreOp
from kvdepot.client import connection
from kvdepot.client import socket as client
from kvdepot.client.scheduler import Cached, Pending, SchedulerClient
from kvdepot.errors import ProtocolError, VersionMismatch
from kvdepot.protocol import wire
from tests.conftest import HANG_S, StartDepot, eventually, suspend


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients do not look at what is overdue: what they notice at once has woken them."""
    for module in (connection, client):
        monkeypatch.setattr(module, "CHECK_S", 60.0)


def refuse(server: zmq.Socket[bytes]) -> None:
    """Wait for a hello, and refuse it."""
    assert server.poll(10_000), "no hello before the next look at what is overdue"
    identity, hello = server.recv_multipart()
    number, request = wire.decode_request(hello)
    assert isinstance(request, wire.Hello)
    server.send_multipart((identity, wire.encode_failure(number, b"bootboot", VersionMismatch("another"))))


@pytest.mark.usefixtures("quiet")
def test_who_waits_for_a_connection_says_hello_as_soon_as_there_is_one(tmp_path: Path) -> None:
    url = f"ipc://{tmp_path}/s"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        asking = client.Client(url, context)
        future = asking.ask(wire.ChunkSize())
        waiting = threading.Thread(target=asking.wait, args=(future.query, 30.0))
        waiting.start()
        server.bind(url)
        refuse(server)
        waiting.join(HANG_S)
        assert not waiting.is_alive()
        with pytest.raises(VersionMismatch, match="another"):
            future.result(0.0)
        asking.close()


@pytest.mark.usefixtures("quiet")
def test_a_thread_that_waits_is_woken_by_a_descriptor_of_its_own_and_by_answers(tmp_path: Path) -> None:
    url, wake = f"ipc://{tmp_path}/s", os.eventfd(0, os.EFD_NONBLOCK)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.bind(url)
        asking = client.Client(url, context)
        looks: list[int] = []

        def is_woken() -> bool:
            with contextlib.suppress(BlockingIOError):
                looks.append(os.eventfd_read(wake))
            return len(looks) == 2

        future = asking.ask(wire.ChunkSize())
        waiting = threading.Thread(target=lambda: asking.wait(is_woken, HANG_S, wake) and asking.wait(future.query, 30))
        waiting.start()
        for number in (1, 2):
            os.eventfd_write(wake, number)
            eventually(lambda number=number: len(looks) == number)
        assert looks == [1, 2]
        refuse(server)
        waiting.join(HANG_S)
        assert not waiting.is_alive() and future.query()
        asking.close()
    os.close(wake)


def test_a_client_hears_at_once_of_its_servers_end_and_of_the_next(
    start_depot: StartDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even though no request is sent and no periodic check runs."""
    depot = start_depot()
    with zmq.Context() as context:
        asking = client.Client(depot.url, context)
        asking.learn_chunk_size(HANG_S)
        for name in ("CHECK_S", "_GONE_CHECK_S", "_STALE_S"):
            monkeypatch.setattr(connection, name, 3600.0)

        def is_welcomed() -> bool:
            asking.pump()
            return asking.is_welcomed

        incarnation = asking.incarnation
        assert is_welcomed()
        depot.process.kill()
        eventually(lambda: not is_welcomed())
        start_depot(url=depot.url, name=depot.name)
        eventually(is_welcomed)
        assert asking.incarnation != incarnation
        asking.close()


def test_an_answer_of_the_wrong_kind_ends_its_future_with_an_error() -> None:
    """Whatever the converter raises: a future that never ends would block its caller."""
    for error in (ProtocolError("none of ours"), ValueError("no number")):

        def convert(value: object, error: Exception = error) -> int:
            raise error

        future = client.MessagingFuture(None, convert)
        future._finish("odd")
        assert future.query()
        with pytest.raises(ProtocolError):
            future.result()


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
    suspend(depot.process.pid)
    op = LoadStoreOp([1, 2, 3, 4], token_ids=list(range(256)), start=0, end=256)
    if is_store:
        worker.submit_store_request("r", op, None)
    else:
        worker.submit_retrieve_request("r", op, None)
    futures = worker.store_futures if is_store else worker.retrieve_futures
    (transfer,) = futures["r"]
    # Long enough for several suspicions and hellos that nobody answers.
    assert not worker.mq_client.wait(transfer.done, 1.0), "nobody would complete what the server is about to place"
    os.kill(depot.process.pid, signal.SIGCONT)
    eventually(transfer.done)
    stored, loaded = worker.get_finished({"r"})
    assert (stored if is_store else loaded) == {"r"}
    worker.shutdown()
    context.term()


def test_lookups_that_wait_longer_than_answers_usually_take_find_what_memory_has(
    start_depot: StartDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client asks again, and the server takes that for the same request."""
    depot, shape = start_depot(arena_mib=16, chunk_size=16), kvdepot.Shape(layers=8, heads=8, head_dim=64)
    sent, send = Counter[bytes](), client.Client._send

    def count(self: client.Client, frame: bytes) -> bool:
        sent[frame[: wire.ID_BYTES]] += 1
        return send(self, frame)

    with kvdepot.connect(depot.url) as link, zmq.Context() as context:
        model = link.namespace(model="queued", revision="1", dtype="float16", shape=shape, chunk_tokens=16)
        prompts = {f"r{number}": [number, *range(1, 256)] for number in range(3)}
        for tokens in prompts.values():  # each a quarter of memory, so the second lookup waits for room
            assert model.put(tokens, np.zeros((8, 2, 256, 8, 64), np.float16)) == 256
        monkeypatch.setattr(connection, "_STALE_S", 0.1)
        monkeypatch.setattr(client.Client, "_send", count)
        scheduler = SchedulerClient(client.Client(depot.url, context), model._spec, reports=True)
        with contextlib.closing(scheduler):
            for request, tokens in prompts.items():
                scheduler.submit_lookup(request, bytes(model._chain(tokens).hashes))
            eventually(lambda: scheduler.client.pump() or sent.total() > len(sent))  # something is asked again
            found = []
            for request in prompts:
                scheduler.client.ask(wire.Noop()).result(HANG_S)  # what was asked again has been handled
                eventually(lambda request=request: scheduler.check_lookup(request) != Pending())
                found.append(scheduler.check_lookup(request))
                scheduler.end_session(request)
            assert found == [Cached(256)] * 3
            assert scheduler.client.welcomes == 1, "it took a server that answers for lost"
