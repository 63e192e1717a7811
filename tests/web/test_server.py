"""Readers that are slow, idle or numerous lose their own connections, and keep nobody out."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from tests.conftest import eventually
from tests.web.conftest import Web, connect, open_connections

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
