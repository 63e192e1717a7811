"""Long polls for the next status: readers are answered together, once a second, also if there is no new status."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvdepot.config import default_url
from kvdepot.web.turns import engine_flag
from tests.conftest import HANG_S, StartDepot, eventually, suspend
from tests.web.conftest import NEEDED, Answer, StartWeb, Web, need
from tests.web.sockets import connect, open_connections

pytestmark = pytest.mark.faults  # a server and a web process each


def wait_after(web: Web, turn: int) -> Answer:
    return web.get(f"/v1/status?after={turn}")


def latest(web: Web) -> int:
    turn: int = web.latest()["turn"]
    return turn


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    suspend(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_who_has_seen_a_turn_is_answered_with_the_next_one(web: Web) -> None:
    def five_in_a_row() -> bool:
        """False where a turn ended before we could wait for it."""
        turns = [wait_after(web, latest(web)).value["turn"]]
        for _ in range(4):
            turns.append(wait_after(web, turns[-1]).value["turn"])
        return turns == list(range(turns[0], turns[0] + 5))

    eventually(five_in_a_row)
    eventually(lambda: web.latest()["trouble"] == "")


def test_the_flag_for_engines_names_this_server_unless_it_is_the_default_one(web: Web) -> None:
    option, given = shlex.split(web.latest()["engine_flag"])
    assert option == "--kv-transfer-config"
    connector = {"kv_connector": "KVDepotConnector", "kv_role": "kv_both"}
    assert json.loads(given) == {**connector, "kv_connector_extra_config": {"kvdepot.url": web.depot.url}}
    assert json.loads(shlex.split(engine_flag(default_url()))[1]) == connector


def test_all_who_wait_are_told_the_same(web: Web) -> None:
    with ThreadPoolExecutor(10) as readers:
        turn = latest(web)
        bodies = list(readers.map(lambda _: wait_after(web, turn).body, range(10)))
    assert len(set(bodies)) == 1


def test_what_is_told_after_a_turn_is_what_is_told_without(web: Web) -> None:
    def both() -> bool:
        turn = latest(web) - 1
        after, plain, long = wait_after(web, turn), web.get("/v1/status"), web.get(f"/v1/status?x=1&after={turn}")
        return after.body == plain.body == long.body and after.headers.keys() == plain.headers.keys()

    eventually(both)  # at once, if no turn ends meanwhile


@pytest.mark.parametrize("after", [0, 10**9, 10**17, 10**30])
def test_a_turn_that_is_none_or_of_another_process_is_not_waited_for(web: Web, after: int) -> None:
    def twice_in_a_turn() -> bool:
        first, second = (wait_after(web, after).value["turn"] for _ in range(2))
        return bool(first == second)  # who waits is never told of the same turn twice

    eventually(twice_in_a_turn)


@pytest.mark.parametrize("after", ["", "x", "-1", "1.5", "%F0%9F", "1&after=x"])
def test_what_is_no_turn_is_refused(web: Web, after: str) -> None:
    answer = web.get(f"/v1/status?after={after}")
    assert answer.status == 400
    assert answer.value["code"] == "bad_request"
    assert "after" in answer.value["message"]


def test_the_head_alone_waits_too(web: Web) -> None:
    turn = latest(web)
    head = web.ask("HEAD", f"/v1/status?after={turn}")
    assert (head.status, head.body) == (200, b"")
    assert latest(web) > turn


def test_a_depot_that_stops_answering_is_told_to_those_who_wait_and_so_is_that_it_answers_again(
    start_web: StartWeb,
) -> None:
    web = start_web()
    with stopped(web.depot.process.pid):
        turn = latest(web)  # the last, but for an answer that is on its way
        answer = wait_after(web, turn)
        while answer.status == 200:
            assert answer.value["turn"] - turn <= 1, "nobody answered"
            answer = wait_after(web, answer.value["turn"])
        assert (answer.status, answer.value["code"]) == (503, "unavailable")
        assert wait_after(web, turn).status == 503
    eventually(lambda: wait_after(web, turn).status == 200)


def test_what_healthz_finds_wrong_stands_in_the_status(start_web: StartWeb) -> None:
    web = start_web()
    done = threading.Event()

    def hold_up() -> None:
        while not done.is_set():
            with stopped(web.depot.process.pid):
                done.wait(1.6)
            done.wait(0.05)

    slow = threading.Thread(target=hold_up)
    slow.start()
    try:
        said = eventually(lambda: (now := web.get("/v1/status")).status == 200 and now.value["trouble"])
        assert "the server lags" in said
    finally:
        done.set()
        slow.join()
    eventually(lambda: web.latest()["trouble"] == "")


def wait_on(connection: socket.socket, turn: int) -> int:
    """The next turn, requested on an open connection."""
    connection.sendall(f"GET /v1/status?after={turn} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    heard = b""
    while not (said := re.search(rb'"turn":(\d+),"trouble":"[^"]*","health":{.*"engine_flag":"[^\n]*"}$', heard)):
        data = connection.recv(1 << 16)
        assert data, heard
        heard += data
    return int(said[1])


def test_as_many_as_there_may_be_wait_and_others_are_answered(web: Web) -> None:
    with contextlib.ExitStack() as crowd:
        waiting = [crowd.enter_context(connect(web)) for _ in range(128)]
        eventually(lambda: open_connections(web) == 128)
        # One of them hears of a turn when it begins, and all have its second to begin to wait for the next.
        turn = wait_on(waiting[0], wait_on(waiting[0], 0))
        for connection in waiting:
            connection.sendall(f"GET /v1/status?after={turn} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert web.get("/healthz").status == 200
        heard = 0
        for connection in waiting:
            with contextlib.suppress(ConnectionError):
                heard += connection.recv(64).startswith(b"HTTP/1.1 200 ")
        assert heard >= 126  # the probe took the place of one
    eventually(lambda: open_connections(web) == 0)


def test_a_server_that_ends_does_not_wait_for_those_who_wait(start_web: StartWeb) -> None:
    web = start_web()
    turn = latest(web)
    with contextlib.ExitStack() as crowd:
        for _ in range(10):
            crowd.enter_context(connect(web)).sendall(
                f"GET /v1/status?after={turn} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
            )
        eventually(lambda: open_connections(web) == 10)
        assert web.depot.stop() == 0
    assert not re.search("Traceback|Cancel|ERROR|WARNING", web.depot.logged())


def test_readers_that_go_while_they_wait_leave_nothing_behind(start_depot: StartDepot) -> None:
    """In this process, where the test can see who waits."""
    need(*NEEDED)
    import uvicorn

    from kvdepot.web.app import make_app
    from kvdepot.web.connections import Connection, Server
    from kvdepot.web.poll import Poll
    from kvdepot.web.turns import Turns

    depot = start_depot("--http", "off")
    poll = Poll(depot.url, None)
    turns = Turns(poll)
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        app = make_app(poll, turns, {"keys": "", "http_token_file": ""}, f"127.0.0.1:{address[1]}", "token")
        server = Server(uvicorn.Config(app, http=Connection, lifespan="off", log_config=None), ended, int, turns.end)
        serving = threading.Thread(target=server.run, args=([listener],))
        serving.start()
        try:
            eventually(lambda: poll.turn.answer)

            def goes_while_it_waits() -> bool:
                """False if a turn ended before it had begun to wait."""
                turn = poll.turn.number
                with stopped(depot.process.pid), socket.create_connection(address, 10.0) as reader:
                    reader.sendall(f"GET /v1/status?after={turn} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                    eventually(lambda: "1 wait" in repr(turns) or select.select([reader], [], [], 0)[0])
                    waits = "1 wait" in repr(turns)
                    if waits:
                        reader.close()
                        eventually(lambda: "0 wait" in repr(turns))
                if not waits:
                    eventually(lambda: poll.turn.number != turn)
                return waits

            for _ in range(20):
                eventually(goes_while_it_waits)
            eventually(lambda: not server.server_state.connections and not server.server_state.tasks)
        finally:
            ended.set()
            serving.join(HANG_S)
            poll.close()
    assert not serving.is_alive()
