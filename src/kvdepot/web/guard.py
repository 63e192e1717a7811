"""Access control for HTTP: an ASGI application around the others.

On a loopback address everybody on this host may read, and the Host header must name this host (against DNS rebinding);
requests that change something need the token, and must not come from another site's page. On any other address, and if
the server's clients need keys (a tenant must not read about others), everything needs the token except the page's
static files and the two probes, which only say whether the server works.

Limits of sizes are here, too. A request may be answered before its body has come, because it is refused or too large.
The rest of the body is then read and discarded within bounds: closing a connection with unread data resets it, and the
client would see that instead of the answer.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from typing import Any

import msgspec

Scope = MutableMapping[str, Any]  # of a connection, or one message, as ASGI has them
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_BODY = 8 << 20
_MOST_HEADERS = 16 << 10
"""Most bytes of a request's headers. uvicorn's limit of this size holds only for a head that arrives in pieces."""
_DISCARDED = 32 << 20
"""Most bytes of a body that are discarded after the answer; the connection ends at once if more are announced."""
_PROBES = ("/healthz", "/readyz")
_READING = ("GET", "HEAD", "OPTIONS")
_HEADERS = [
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


class Problem(msgspec.Struct, frozen=True):
    """An error: a stable code, and a sentence."""

    code: str
    message: str


class Guard:
    """Refuses forbidden requests; passes on the others."""

    def __init__(self, app: App, token: str, is_local: bool, reads_free: bool, open_paths: Collection[str]) -> None:
        """is_local: whether only this host can reach us. reads_free: whether reading needs no token. open_paths: paths
        that never need one."""
        self._app = app
        self._token = token.encode()
        self._is_local = is_local
        self._reads_free = reads_free
        self._open = {*open_paths, *_PROBES}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        body = _RequestBody(scope, receive)

        async def send_guarded(message: Scope) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *_HEADERS]
                if body.is_left:
                    message["headers"].append((b"connection", b"close"))
            elif body.is_left:
                await send({**message, "more_body": True})
                await body.discard()
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        refused = self._refusal(scope)
        if refused is None:
            await self._app(scope, body.receive, send_guarded)
            return
        status, problem = refused
        answer = msgspec.json.encode(problem)
        headers = {"content-type": "application/json", "content-length": str(len(answer)), "connection": "close"}
        await send_guarded(head(status, headers | ({"www-authenticate": "Bearer"} if status == 401 else {})))
        await send_guarded({"type": "http.response.body", "body": answer})

    def _refusal(self, scope: Scope) -> tuple[int, Problem] | None:
        if sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > _MOST_HEADERS:
            return 431, Problem("too_large", f"the request's headers are larger than {_MOST_HEADERS >> 10} KiB")
        host = _header(scope, b"host")
        if self._is_local and not _is_this_host(host):
            return 403, Problem("forbidden", "the Host header names another host; use localhost or a loopback address")
        is_change = scope["method"] not in _READING
        origin = _header(scope, b"origin")
        if is_change and origin is not None and origin.partition("://")[2] != host:
            return 403, Problem("forbidden", "pages of other sites must not change anything here")
        if is_change or not (self._reads_free or scope["path"] in self._open):
            given = _header(scope, b"authorization") or ""
            scheme, _, token = given.partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode("latin-1"), self._token):
                message = (
                    "this needs the header `Authorization: Bearer TOKEN`; `kvdepot status --http` prints the token"
                )
                return 401, Problem("unauthorized", message)
        return None


class _RequestBody:
    """The body of one request, which may be answered before all of it has come."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        length = _header(scope, b"content-length") or ""
        self._announced = int(length) if length.isdecimal() else 0
        # A client that waits for `100 Continue` sends no body after another answer.
        self.is_left = bool(self._announced or _header(scope, b"transfer-encoding")) and not _header(scope, b"expect")
        """Whether some of it has not been read."""

    async def receive(self) -> Scope:
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message["more_body"]:
            self.is_left = False
        return message

    async def discard(self) -> None:
        """Read the rest of it, unless there is too much; server.py limits the time."""
        discarded = 0
        while self.is_left and max(self._announced, discarded) <= _DISCARDED:
            discarded += len((await self.receive()).get("body", b""))


def head(status: int, headers: Mapping[str, str]) -> Scope:
    """The message that begins a response."""
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": encoded}


def _header(scope: Scope, name: bytes) -> str | None:
    """The header's value, None if it was not sent; if it was sent several times, all values joined by commas."""
    found = [value for key, value in scope["headers"] if key == name]
    return b", ".join(found).decode("latin-1") if found else None


def _is_this_host(host: str | None) -> bool:
    """Whether a Host header names this host, with any port, because a tunnel may use another one."""
    if host is None:
        return False
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
