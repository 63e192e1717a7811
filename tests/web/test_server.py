"""Readers that are slow, idle or numerous: they lose their own connections, and never delay the depot's answers."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from kvdepot.client import MessageQueueClient
from kvdepot.client.calls import answer
from kvdepot.keys import ROOT
from kvdepot.protocol import wire
from tests.conftest import HANG_S, eventually
from tests.web.conftest import StartWeb, Web, connect, open_connections

pytestmark = pytest.mark.faults


def wait_for_end(connection: socket.socket) -> None:
    """Wait until the other side has closed a connection, on which it must not answer any more."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass


def test_requests_and_bodies_that_never_end_are_cut_off(web: Web) -> None:
    head = b"GET /v1/status HTTP/1.1\r\nHost: localhost\r\nX: "
    token = f"Authorization: Bearer {web.token}"
    body = f"POST /v1/warm HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n{token}\r\n\r\n".encode()
    stopping = threading.Event()

    def dribble(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not stopping.wait(0.2):
                connection.sendall(b"x")

    with contextlib.ExitStack() as slow:  # at once, for each takes its time
        connections = {said: slow.enter_context(connect(web)) for said in (b"", head[:10], head, body, head + b"x")}
        for said, connection in connections.items():
            connection.sendall(said)
        sender = threading.Thread(target=dribble, args=(connections[head + b"x"],))
        sender.start()
        try:
            for connection in connections.values():
                wait_for_end(connection)
        finally:
            stopping.set()
            sender.join()


def test_answers_that_nobody_reads_are_given_up(web: Web) -> None:
    with connect(web) as connection:
        eventually(lambda: open_connections(web) == 1)  # or a slow machine has it wait to be taken all the while
        try:  # as many answers as it takes until no more fit anywhere
            connection.settimeout(1.0)
            for _ in range(5000):
                connection.sendall(b"GET /style.css HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10)
        except TimeoutError:
            pass
        assert open_connections(web) >= 1
        eventually(lambda: open_connections(web) == 0)
    assert web.get("/healthz").status == 200


def test_a_crowd_of_connections_is_bounded_and_keeps_nobody_out(web: Web) -> None:
    with contextlib.ExitStack() as crowd:
        for _ in range(400):
            crowd.enter_context(connect(web))
        eventually(lambda: open_connections(web) == 128)
        for _ in range(20):
            assert web.get("/healthz").status == 200
        eventually(lambda: open_connections(web) <= 128)  # one that is shut for another is there an instant longer
    eventually(lambda: open_connections(web) == 0)


@contextlib.contextmanager
def crowd_of_readers(web: Web) -> Iterator[None]:
    """Ten readers that poll once a second like pages, and twenty that request much and read nothing."""
    stopping = threading.Event()
    counted = [0] * 10

    def poll(i: int) -> None:
        while not stopping.wait(1.0 if counted[i] else 0.0):
            assert web.get("/v1/status").status == 200
            assert web.get("/metrics").status == 200
            counted[i] += 1

    threads = [threading.Thread(target=poll, args=(i,)) for i in range(10)]
    with contextlib.ExitStack() as slow:
        for _ in range(20):
            slow.enter_context(connect(web)).sendall(b"GET /v1/history HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)
        for thread in threads:
            thread.start()
        eventually(lambda: all(counted))
        try:
            yield
        finally:
            stopping.set()
            for thread in threads:
                thread.join()


def test_no_lookup_waits_for_slow_readers_or_ten_pages(start_web: StartWeb) -> None:
    """All lookups are answered while slow readers read nothing. The benchmark measures what pages cost lookups."""
    web = start_web()
    client = MessageQueueClient(web.depot.url, web.depot.context)

    def answered_before_they_are_given_up() -> bool:
        with crowd_of_readers(web):
            for i in range(600):
                assert answer(client, wire.Lookup("m", 1, 1, f"r{i}", 1, ROOT * 64), wire.Hit, HANG_S) == wire.MISS
            return open_connections(web) > 10  # more than the pages

    try:
        eventually(answered_before_they_are_given_up, HANG_S)
    finally:
        client.close()
    assert web.status()["counters"]["lookups"] % 600 == 0
