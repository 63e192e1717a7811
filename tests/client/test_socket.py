"""A client's socket on real servers, and its futures."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest
import zmq

from kvdepot.client import connection
from kvdepot.client import socket as client
from kvdepot.errors import ProtocolError, VersionMismatch
from kvdepot.protocol import wire
from tests.conftest import HANG_S, StartDepot, eventually


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
