"""Access control for HTTP: tokens, names of this host, pages of other sites, and endless bodies."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdepot.protocol import curve
from kvdepot.web.poll import Poll
from tests.conftest import HANG_S, Depot, StartDepot, eventually
from tests.web.conftest import StartWeb, Web

pytestmark = pytest.mark.faults  # a server and a web process each

CHANGES = ("/v1/forget", "/v1/warm", "/v1/lease", "/v1/release", "/v1/quota")
READS = ("/v1/status", "/v1/history", "/v1/leases")


@pytest.fixture(scope="module")
def public() -> Iterator[Web]:
    """HTTP on an address that other hosts can reach."""
    server = Depot("--http", "0.0.0.0:0").wait_ready()
    try:
        yield Web(server)
    finally:
        server.close()


def raw(web: Web, request: bytes) -> bytes:
    """Everything that is answered to these bytes until the connection ends."""
    with socket.create_connection((web.host, web.port), timeout=HANG_S) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@pytest.mark.parametrize("path", CHANGES)
@pytest.mark.parametrize("said", ["", "Bearer SHORT ", "Basic TOKEN", "TOKEN", "Bearer: TOKEN"])
def test_what_changes_something_needs_the_token(web: Web, path: str, said: str) -> None:
    told = said.replace("SHORT", web.token[:-1]).replace("TOKEN", web.token)
    refused = web.ask("POST", path, {"all": True, "name": "x"}, headers={"Authorization": told} if told else {})
    assert (refused.status, refused.value["code"]) == (401, "unauthorized")
    assert refused.headers["www-authenticate"] == "Bearer"
    assert web.token.encode() not in refused.body


def test_a_token_that_is_sent_twice_is_refused(web: Web) -> None:
    line = f"Authorization: Bearer {web.token}\r\n".encode()
    said = raw(web, b"POST /v1/forget HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n" + line * 2 + b"\r\n")
    assert said.startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("path", [*READS, "/metrics"])
def test_beyond_this_host_reading_needs_the_token_too(public: Web, path: str) -> None:
    assert public.get(path).status == public.get(path, token="wrong").status == 401
    assert public.get(path, token=public.token).status == 200


def test_beyond_this_host_probes_need_no_token(public: Web) -> None:
    assert public.get("/no-such-file").status == 401
    for probe in ("/healthz", "/readyz"):
        assert (public.get(probe).status, public.ask("POST", probe).status) == (200, 401)


def test_where_clients_need_keys_reading_needs_the_token_and_probes_and_page_none(tmp_path: Path) -> None:
    curve.generate(tmp_path / "keys", ["engine"])
    server = Depot("--http", "127.0.0.1:0", "--keys", str(tmp_path / "keys"))
    try:
        guarded = Web(server)
        for path in (*READS, "/metrics"):
            assert guarded.get(path).status == 401
            assert guarded.get(path, token=guarded.token).status == 200
        assert guarded.get("/healthz", headers={"Host": "evil.example"}).status == 403
        assert {guarded.get(path).status for path in ("/healthz", "/readyz", "/")} == {200}
    finally:
        server.close()


def test_a_probe_tells_a_stranger_no_path(start_depot: StartDepot) -> None:
    depot = start_depot()
    poll = Poll(depot.url, None)
    try:
        eventually(lambda: not poll.trouble())
        depot.process.kill()
        trouble = eventually(poll.trouble)
    finally:
        poll.close()
    assert "cannot be reached" in trouble
    assert "/" not in trouble


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "127.0.0.1", "127.0.0.1:9000", "[::1]", "[::1]:7077", "127.9.9.9", "[0::1]:"]
)
def test_on_loopback_the_names_of_this_host_are_answered(web: Web, host: str) -> None:
    assert web.get("/v1/status", headers={"Host": host}).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "8.8.8.8", "", "[::2]:7077", "0.0.0.0",
        "[::1].evil.example", "[::1]x", "[::1]:80.evil.example", "[::1]:80@evil.example", "[::1", "::1", "[::1]]",
        "localhost:80@evil.example", "localhost:80.evil.example", "localhost:x", "localhost:80:80", "me@localhost",
        "localhost, localhost", "[localhost]", "[127.0.0.1]", "[[::1]]", "localhost/", "localhost#:80",
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/status", "/healthz"])
def test_a_name_that_was_made_to_point_to_this_host_is_refused(web: Web, host: str, path: str) -> None:
    refused = web.get(path, headers={"Host": host})
    assert (refused.status, refused.value["code"], refused.headers["connection"]) == (403, "forbidden", "close")


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost:1", "https://127.0.0.1.evil.example"]
)
def test_a_page_of_another_site_changes_nothing_even_with_the_token(web: Web, origin: str) -> None:
    refused = web.ask("POST", "/v1/forget", {"all": True}, web.token, {"Origin": origin})
    assert (refused.status, refused.value["code"]) == (403, "forbidden")
    assert "access-control-allow-origin" not in refused.headers


def test_the_page_itself_may_change_something(web: Web) -> None:
    own = f"http://127.0.0.1:{web.port}"
    assert web.ask("POST", "/v1/forget", {"all": True}, web.token, {"Origin": own}).status == 200


def test_a_body_that_is_too_large_is_refused_before_it_comes(web: Web) -> None:
    head = b"POST /v1/warm HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %b\r\n" % web.token.encode()
    said = raw(web, head + b"Content-Length: 1000000000000\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 413 ")
    assert b'"code":"too_large"' in said


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize(("token", "said"), [("TOKEN", b"413 "), ("wrong", b"401 ")])
def test_a_client_whose_body_is_not_read_still_gets_the_answer(
    web: Web, token: str, said: bytes, is_chunked: bool
) -> None:
    head = f"POST /v1/warm HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token.replace('TOKEN', web.token)}\r\n"
    size = (9 << 20) + 5
    framing = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % size if is_chunked else b"Content-Length: %d\r\n\r\n" % size
    answer = raw(web, head.encode() + framing + b" " * size + (b"\r\n0\r\n\r\n" if is_chunked else b""))
    assert answer.startswith(b"HTTP/1.1 " + said)
    assert answer.count(b"HTTP/1.1") == 1 and answer.endswith(b"}")


@pytest.mark.parametrize(("size", "status"), [(15 << 10, 200), (20 << 10, 431), (60 << 10, 431)])
def test_headers_of_more_than_16_kib_are_refused_even_if_they_come_at_once(web: Web, size: int, status: int) -> None:
    answer = web.get("/healthz", headers={"X": "x" * size})
    assert answer.status == status
    assert status == 200 or answer.value["code"] == "too_large"


@pytest.mark.parametrize("line", ["GET /healthz?SIZE", "GET /SIZE/../healthz", "HEAD /healthz?a=SIZE", "SIZE /healthz"])
@pytest.mark.parametrize("size", [10_000, 70_000, 1_000_000])
def test_a_request_line_that_is_too_large_is_refused(web: Web, line: str, size: int) -> None:
    """At once or in pieces, as it happens to come; the answer arrives even if the rest is still being sent."""
    rest = b"HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    said = raw(web, f"{line.replace('SIZE', 'x' * size)} ".encode() + rest)
    assert said.startswith((b"HTTP/1.1 414 ", b"HTTP/1.1 431 "))
    assert b'"code":"too_large"' in said or line.startswith("HEAD")
    assert b"too_large" not in raw(web, f"{line.replace('SIZE', 'x' * 8000)} ".encode() + rest)


LINES = (
    b"GET / HTTP/1.1", b"GET /v1/status HTTP/1.1", b"POST /v1/warm HTTP/1.1", b"HEAD /metrics HTTP/1.1",
    b"OPTIONS * HTTP/1.1", b"CONNECT a:1 HTTP/1.1", b"GET http://x/ HTTP/1.1", b"GET /%ff%00 HTTP/1.1",
    b"GET /?%ff=\xff HTTP/1.1", b"GET //// HTTP/1.0", b"get / HTTP/1.1", b"DELETE /x HTTP/1.1",
)  # fmt: skip
HEADERS = (
    b"Host: localhost", b"Host: localhost", b"Host: localhost", b"Content-Length: 5", b"Content-Length: 0",
    b"Transfer-Encoding: chunked", b"Connection: close", b"Connection: upgrade\r\nUpgrade: h2c",
    b"Expect: 100-continue", b"Content-Type: application/x-www-form-urlencoded", b"Content-Type: multipart/form-data",
    b"Accept: \xff", b"Accept: text/html;q=z,,;", b"Cookie: a=\xff; ;;=", b"Authorization: Bearer TOKEN",
    b"Origin: \xff",
)  # fmt: skip
BODIES = (b"", b"{}", b"5\r\nhello\r\n0\r\n\r\n", b'{"tokens":[1]}', b"[[[[[[", b"\xff\xfe", b'{"all":true}')


def test_random_http_messages_cause_no_error_of_the_server(start_web: StartWeb) -> None:
    web = start_web()
    draw = random.Random(5)
    for _ in range(600):
        message = b""
        for _ in range(draw.randint(1, 3)):
            head = (draw.choice(LINES), *draw.sample(HEADERS, draw.randint(1, 5)))
            message += b"\r\n".join(head).replace(b"TOKEN", web.token.encode()) + b"\r\n\r\n" + draw.choice(BODIES)
        if draw.random() < 0.3:
            at = draw.randrange(len(message))
            message = message[:at] + draw.randbytes(1) + message[at + 1 :]
        with socket.create_connection((web.host, web.port), timeout=HANG_S) as connection, contextlib.suppress(OSError):
            connection.sendall(message)
            if draw.random() < 0.5:
                connection.shutdown(socket.SHUT_WR)
            if draw.random() < 0.7:
                connection.settimeout(0.02)
                connection.recv(1 << 16)
    assert web.get("/healthz").status == 200
    assert "ERROR" not in web.depot.logged()


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"quota":' * 100_000, b'{"tenant":' + b"[" * 100_000])
def test_a_body_that_is_nested_deeply_is_an_error_of_who_sent_it(web: Web, body: bytes) -> None:
    answer = web.change("/v1/quota", body)
    assert (answer.status, answer.value["code"]) == (400, "bad_request")
    assert "Traceback" not in web.depot.logged()


def test_a_request_without_a_host_is_refused(web: Web) -> None:
    status = raw(web, b"GET /v1/status HTTP/1.0\r\nConnection: close\r\n\r\n").split(maxsplit=2)[1]
    assert status in (b"400", b"403")
