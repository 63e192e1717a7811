"""Access control for HTTP, and limits of sizes; dispatch.py asks for both.

On a loopback address everybody on this host may read, and the Host header must name this host (against DNS rebinding);
requests that change something need the token, and must not come from another site's page. On any other address, and if
the server's clients need keys (a tenant must not read about others), everything needs the token except the page's
static files and the two probes, which only say whether the server works.

A request may be answered before its body has come, because it is refused or too large. The rest of the body is then
read and discarded within bounds: closing a connection with unread data resets it, and the client would see that instead
of the answer.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

import msgspec

from kvdepot.protocol.curve import is_loopback

Scope = MutableMapping[str, Any]  # of a connection, or one message, as ASGI has them
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_MOST_BODY = 8 << 20
MOST_HEADERS = 16 << 10
"""Most bytes of a request's headers. server.py's limit of this size holds only for a head that arrives in pieces."""
_MOST_LINE = 8 << 10
"""Most bytes of a request's method and target."""
_DISCARDED = 32 << 20
"""Most bytes of a body that are discarded after the answer; the connection ends at once if more are announced."""
_PROBES = ("/healthz", "/readyz")
_READING = ("GET", "HEAD", "OPTIONS")
HEADERS = [
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
"""Headers of every response."""


class Problem(msgspec.Struct, frozen=True):
    """An error: a stable code, and a sentence."""

    code: str
    message: str


class Refused(Exception):
    """A request that the HTTP layer refuses, by a status and a Problem."""

    def __init__(self, status: int, code: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.problem = Problem(code, message)
        self.headers = headers


class Gone(Exception):
    """The client has closed the connection."""


class Guard:
    """Refuses forbidden requests."""

    def __init__(self, token: str, is_local: bool, reads_free: bool, open_paths: Collection[str]) -> None:
        """is_local: whether only this host can reach us. reads_free: whether reading needs no token. open_paths: paths
        that never need one."""
        self._token = token.encode()
        self._is_local = is_local
        self._reads_free = reads_free
        self._open = {*open_paths, *_PROBES}

    def check(self, scope: Scope) -> None:
        """Raises Refused."""
        if sum(map(len, (scope["method"], scope["raw_path"], scope["query_string"]))) > _MOST_LINE:
            raise Refused(414, "too_large", f"the request line is larger than {_MOST_LINE >> 10} KiB")
        if sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > MOST_HEADERS:
            raise Refused(431, "too_large", f"the request's headers are larger than {MOST_HEADERS >> 10} KiB")
        host = _header(scope, b"host")
        if self._is_local and not _is_this_host(host):
            raise Refused(403, "forbidden", "the Host header names another host; use localhost or a loopback address")
        is_change = scope["method"] not in _READING
        origin = _header(scope, b"origin")
        if is_change and origin is not None and origin.partition("://")[2] != host:
            raise Refused(403, "forbidden", "pages of other sites must not change anything here")
        if is_change or not (self._reads_free or scope["path"] in self._open):
            given = _header(scope, b"authorization") or ""
            scheme, _, token = given.partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode("latin-1"), self._token):
                message = (
                    "this needs the header `Authorization: Bearer TOKEN`; `kvdepot status --http` prints the token"
                )
                raise Refused(401, "unauthorized", message, **{"www-authenticate": "Bearer"})


class RequestBody:
    """The body of one request, which may be answered before all of it has come."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        length = _header(scope, b"content-length") or ""
        self._announced = int(length) if length.isdecimal() else 0
        # A client that waits for `100 Continue` sends no body after another answer.
        self.is_left = bool(self._announced or _header(scope, b"transfer-encoding")) and not _header(scope, b"expect")
        """Whether some of it has not been read."""

    async def read(self) -> bytes:
        """All of it. Raises Refused if it is too large, without reading the rest, and Gone."""
        body = bytearray()
        while True:
            if max(self._announced, len(body)) > _MOST_BODY:
                raise Refused(413, "too_large", f"the body is larger than {_MOST_BODY >> 20} MiB")
            message = await self._next()
            if message["type"] == "http.disconnect":
                raise Gone
            body += message["body"]
            if not message["more_body"]:
                return bytes(body)

    async def discard(self) -> None:
        """Read the rest of it, unless there is too much; server.py limits the time."""
        discarded = 0
        while self.is_left and max(self._announced, discarded) <= _DISCARDED:
            discarded += len((await self._next()).get("body", b""))

    async def _next(self) -> Scope:
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message["more_body"]:
            self.is_left = False
        return message


def _header(scope: Scope, name: bytes) -> str | None:
    """The header's value, None if it was not sent; if it was sent several times, all values joined by commas."""
    found = [value for key, value in scope["headers"] if key == name]
    return b", ".join(found).decode("latin-1") if found else None


def _is_this_host(host: str | None) -> bool:
    """Whether a Host header names this host, with any port, because a tunnel may use another one."""
    return host is not None and is_loopback(f"tcp://{host.lower()}")
