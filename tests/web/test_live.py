"""The stream of status: readers get each turn once, together, also if there is no new status."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import shlex
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from kvdepot.config import default_url
from kvdepot.web.live import engine_flag
from tests.conftest import HANG_S, eventually, suspend
from tests.web.conftest import StartWeb, Web, connect, open_connections

pytestmark = pytest.mark.faults  # a server and a web process each


STREAM = b"GET /v1/stream HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    suspend(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def stream(web: Web) -> Iterator[Iterator[tuple[str, Any]]]:
    """The events of a stream, as kind and data."""
    connection = http.client.HTTPConnection(web.host, web.port, timeout=HANG_S)
    try:
        connection.request("GET", "/v1/stream")
        answer = connection.getresponse()
        assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream")

        def events() -> Iterator[tuple[str, Any]]:
            kind = "message"
            while line := answer.readline().decode():
                if line.startswith("event: "):
                    kind = line.removeprefix("event: ").strip()
                elif line.startswith("data: "):
                    yield kind, json.loads(line.removeprefix("data: "))
                    kind = "message"

        yield events()
    finally:
        connection.close()


def test_a_stream_has_each_turn_once_and_what_the_status_has(web: Web) -> None:
    with stream(web) as events:
        statuses = [next(events) for _ in range(4)]
    assert {kind for kind, _ in statuses} == {"message"}
    turns = [status["turn"] for _, status in statuses]
    assert turns == list(range(turns[0], turns[0] + 4))
    times = [status["point"]["time_s"] for _, status in statuses]
    assert times == sorted(set(times))
    assert statuses[-1][1].keys() == web.latest().keys()
    assert web.ask("HEAD", "/v1/stream").body == b""


def test_the_flag_for_engines_names_this_server_unless_it_is_the_default_one(web: Web) -> None:
    option, given = shlex.split(web.latest()["engine_flag"])
    assert option == "--kv-transfer-config"
    connector = {"kv_connector": "KVDepotConnector", "kv_role": "kv_both"}
    assert json.loads(given) == {**connector, "kv_connector_extra_config": {"kvdepot.url": web.depot.url}}
    assert json.loads(shlex.split(engine_flag(default_url()))[1]) == connector


def test_a_stream_has_events_when_the_depot_stops_answering_and_answers_again(start_web: StartWeb) -> None:
    web = start_web()
    with stream(web) as events:
        next(events)
        with stopped(web.depot.process.pid):
            _, data = next(event for event in events if event[0] == "problem")
            assert data["code"] == "unavailable" and "has not answered" in data["message"]
            assert web.get("/v1/status").status == 503
        assert next(event for event in events if event[0] == "message")


def test_a_stream_reports_a_status_that_grows_too_old_before_its_turn_ends() -> None:
    from kvdepot.web.live import LiveStatus
    from kvdepot.web.poll import STALE_S, Poll, PolledStatus, Turn
    from tests.web.site import empty_status

    poll = Poll("ipc:///nowhere", None)
    poll.close()  # so no other turn follows
    poll.turn = Turn(1, PolledStatus(empty_status(), time.monotonic() - STALE_S + 1.0, 0.0), "")
    events = LiveStatus(poll).events()

    async def problem() -> bytes:
        while not (event := await asyncio.wait_for(anext(events), HANG_S)).startswith(b"event: problem"):
            pass
        return event

    assert b"the server has not answered for" in asyncio.run(problem())


def test_128_streams_are_served_and_a_probe_takes_the_place_of_one(web: Web) -> None:
    with contextlib.ExitStack() as crowd:
        readers = [crowd.enter_context(connect(web)) for _ in range(128)]
        eventually(lambda: open_connections(web) == 128)
        for reader in readers:
            reader.sendall(STREAM)
        assert web.get("/healthz").status == 200
        served = 0
        for reader in readers:
            with contextlib.suppress(ConnectionError):
                served += reader.recv(64).startswith(b"HTTP/1.1 200 ")
        assert served >= 126
    eventually(lambda: open_connections(web) == 0)


def test_a_server_that_ends_does_not_wait_for_streams(start_web: StartWeb) -> None:
    web = start_web()
    with contextlib.ExitStack() as crowd:
        for _ in range(10):
            crowd.enter_context(connect(web)).sendall(STREAM)
        eventually(lambda: open_connections(web) == 10)
        assert web.depot.stop() == 0
    assert not re.search("Traceback|Cancel|ERROR|WARNING", web.depot.logged())


def test_a_stream_that_is_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvdepot.web import server as http
    from kvdepot.web.dispatch import Dispatch, get
    from kvdepot.web.guard import Guard

    async def large(state: object) -> AsyncIterator[bytes]:
        while True:
            yield b"data: %b\n\n" % (b"x" * (1 << 20))

    monkeypatch.setattr(http, "_READ_S", 1.0)
    app = Dispatch([get("/v1/stream")(large)], {}, None, Guard("", is_local=False, reads_free=True, open_paths=()))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = http.HttpServer(app, int)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        with socket.create_connection(listener.getsockname(), 10.0) as reader:
            reader.sendall(STREAM)
            eventually(lambda: server.server_state.connections)
            eventually(lambda: not server.server_state.connections and not server.server_state.tasks)
        server.end()
        thread.join(HANG_S)
        assert not thread.is_alive()
