"""The fleet: what one web process says about others, whatever those answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvdepot.protocol.health import judge
from kvdepot.web.fleet import Fleet, FleetNow
from tests.conftest import HANG_S, eventually
from tests.ports import free_port
from tests.web.conftest import StartWeb
from tests.web.site import GIB, empty_status, example_status

A_WINDOW_OF_NO_TIME = msgspec.json.encode(
    msgspec.structs.replace(
        example_status(), reuse=[msgspec.structs.replace(each, window_s=0) for each in example_status().reuse]
    )
)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Depots that answer are waited for, and asked once, however busy this machine is."""
    for limit in ("_KEEP_S", "_CONNECT_S", "_ANSWER_S", "_ALL_S"):
        monkeypatch.setattr(f"kvdepot.web.fleet.{limit}", HANG_S)


@contextmanager
def answering(status: int, body: bytes) -> Iterator[tuple[str, list[str | None]]]:
    """A server that gives every request the same answer; and the tokens that were sent to it."""
    tokens: list[str | None] = []

    class Requests(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            tokens.append(self.headers["Authorization"])
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Requests)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", tokens
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def silent(drip: bytes = b"") -> Iterator[tuple[str, list[socket.socket]]]:
    """A server that never ends an answer: it sends `drip` again and again, or nothing; and its connections."""
    taken: list[socket.socket] = []
    stop = threading.Event()

    def send(connection: socket.socket) -> None:
        with suppress(OSError):
            while drip and not stop.wait(0.02):
                connection.sendall(drip)

    def accept() -> None:
        with suppress(OSError):
            while True:
                taken.append(listener.accept()[0])
                threads.append(threading.Thread(target=send, args=(taken[-1],), daemon=True))
                threads[-1].start()

    listener = socket.create_server(("127.0.0.1", 0))
    threads = [threading.Thread(target=accept, daemon=True)]
    threads[0].start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", taken
    finally:
        stop.set()
        listener.shutdown(socket.SHUT_RDWR)
        threads[0].join()
        for thread in threads[1:]:
            thread.join()
        for each in (listener, *taken):
            each.close()


def asking() -> int:
    """How many threads of this process ask a depot."""
    return sum(thread.name.startswith("kvdepot-fleet") for thread in threading.enumerate())


def now(fleet: Fleet) -> FleetNow:
    status = empty_status(host="here")
    return fleet.now(lambda: (status, judge(status)))


def test_every_depot_has_a_row_and_those_that_answer_are_added_up() -> None:
    body = msgspec.json.encode(msgspec.structs.replace(example_status(), host="there"))
    with answering(200, body) as (url, _):
        said = now(Fleet([url, url], ""))
    here, there, again = said.depots
    assert (here.url, here.host, here.level, here.headline) == ("", "here", "good", "Healthy, no engine is connected")
    assert (there.url, there.host, there.headline) == (url, "there", "Healthy")
    assert there.load is not None and again.load == there.load
    assert there.load.reused_tokens_s == pytest.approx(188_016 / 60)
    assert (there.load.tiers, there.load.tiers_up, there.load.engines) == (2, 2, 5)
    assert said.total.capacity_bytes == (64 + 256 + 256) * GIB
    assert said.total.reused_tokens == 2 * 198_734_336


@pytest.mark.parametrize(
    ("status", "body", "headline"),
    [
        (401, b'{"code": "unauthorized", "message": "no"}', "Refused: it has a different token"),
        (503, b'{"code": "unavailable", "message": "it hangs"}', "Not answering: it hangs"),
        (502, b"<h1>Bad gateway</h1>", "Not a depot of this version (HTTP 502)"),
        (200, b"<h1>Welcome</h1>", "Not a depot of this version (HTTP 200)"),
        (200, b'{"version": "9"}', "Not a depot of this version (HTTP 200)"),
        (200, b"", "Not a depot of this version (HTTP 200)"),
        (200, b'{"version": "\xff"}', "Not a depot of this version (HTTP 200)"),
        (200, b'{"unknown": ' + b"[" * 100_000, "Not a depot of this version (HTTP 200)"),
        (200, A_WINDOW_OF_NO_TIME, "Not a depot of this version (HTTP 200)"),
        (503, b'{"message": "\xff"}', "Not a depot of this version (HTTP 503)"),
    ],
)
def test_a_depot_that_says_nothing_of_use_is_a_bad_row_with_the_reason(status: int, body: bytes, headline: str) -> None:
    with answering(status, body) as (url, _):
        (_, there) = now(Fleet([url], "")).depots
    assert (there.level, there.headline, there.load) == ("bad", headline, None)


def test_a_depot_that_is_not_there_does_not_keep_the_others_from_being_shown() -> None:
    with answering(200, msgspec.json.encode(example_status())) as (url, _):
        (_, gone, there) = now(Fleet([f"http://127.0.0.1:{free_port()}", url], "")).depots
    assert gone.level == "bad" and gone.headline.startswith("Not reachable: ")
    assert there.level == "good"


@pytest.mark.parametrize(
    ("url", "token"),
    [
        ("http://depot-2..kv:7077", ""),
        (f"http://{'a' * 64}:7077", ""),
        ("http://[:::::]:7077", ""),
        ("http://127.0.0.1:7077/ü", ""),
        ("http://127.0.0.1:7077", "κλειδί"),
    ],
)
def test_a_depot_that_cannot_be_asked_is_a_bad_row_and_the_others_are_shown(url: str, token: str) -> None:
    with answering(200, msgspec.json.encode(example_status())) as (good, _):
        (_, bad) = now(Fleet([url], token)).depots
        (_, _, there) = now(Fleet([url, good], "")).depots
    assert (bad.url, bad.level, bad.load) == (url, "bad", None)
    assert bad.headline.startswith("Not reachable: ")
    assert there.level == "good"


@pytest.mark.parametrize("drip", [b"H", b"HTTP/1.1 100 Continue\r\n\r\n", b""])
def test_a_depot_that_never_ends_its_answer_is_given_up_and_leaves_no_thread(
    drip: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdepot.web.fleet._ANSWER_S", 0.2)
    with silent(drip) as (url, _):
        (_, there) = now(Fleet([url], "")).depots
        assert (there.level, there.headline) == ("bad", "Not reachable: timed out")
        eventually(lambda: not asking())


def test_a_depot_that_is_still_being_asked_is_not_asked_again_until_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdepot.web.fleet._KEEP_S", 0.0)
    monkeypatch.setattr("kvdepot.web.fleet._ALL_S", 0.1)
    monkeypatch.setattr("kvdepot.web.fleet._ANSWER_S", 60.0)
    with silent() as (slow, taken), answering(200, msgspec.json.encode(example_status())) as (good, tokens):
        fleet = Fleet([slow, good], "")
        for number in (1, 2, 3):
            late, _ = eventually(lambda: (said := now(fleet).depots[1:])[1].level == "good" and said)
            assert (late.level, late.headline) == ("bad", "Not reachable: no answer within 0.1 s")
            assert len(tokens) >= number
        eventually(lambda: asking() == 1)
        assert len(eventually(lambda: taken)) == 1
        taken[0].shutdown(socket.SHUT_RDWR)
        eventually(lambda: not asking())
        now(fleet)
        assert len(eventually(lambda: taken[1:])) == 1
        taken[1].shutdown(socket.SHUT_RDWR)
        eventually(lambda: not asking())


def test_many_readers_cost_the_others_one_request() -> None:
    with answering(200, msgspec.json.encode(example_status())) as (url, tokens):
        fleet = Fleet([url], "")
        for _ in range(10):
            now(fleet)
    assert tokens == [None]


@pytest.mark.faults
def test_a_server_sends_the_others_the_token_of_its_file_and_never_one_that_it_made(
    start_web: StartWeb, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("a-token-that-all-of-them-have\n")
    file.chmod(0o600)
    with answering(200, msgspec.json.encode(example_status())) as (url, tokens):
        own = start_web("--fleet", url)
        assert len(own.get("/v1/fleet").value["depots"]) == 2
        eventually(lambda: tokens == [None])
        shared = start_web("--fleet", url, "--http-token-file", str(file))
        assert len(shared.get("/v1/fleet").value["depots"]) == 2
        eventually(lambda: tokens == [None, "Bearer a-token-that-all-of-them-have"])


@pytest.mark.faults
def test_a_server_shows_another_one_until_it_is_gone(start_web: StartWeb) -> None:
    other = start_web()
    web = start_web("--fleet", f"http://127.0.0.1:{other.port}")

    def seen(level: str) -> Callable[[], Any]:
        return lambda: (said := web.get("/v1/fleet").value["depots"][1])["level"] == level and said

    assert eventually(seen("good"))["load"]["capacity_bytes"] == other.status()["capacity_bytes"]
    other.depot.process.kill()
    assert "Not reachable" in eventually(seen("bad"))["headline"]
