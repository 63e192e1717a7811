"""Who may ask what over HTTP: in front of everything else that answers.

An ASGI application around another. On a loopback address reading is free for whoever is on this host, and the Host
header must name this host (a page of another site whose name was made to point here sends its own); what changes
something needs the token, and comes from no other site's page. On any other address, and where the depot's clients need
keys (a tenant's must not read of other tenants), everything needs the token but the page's own files, which hold
nothing, and the two probes, which say no more than whether it works. The one law: what is refused reads no body.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

import msgspec

__all__ = ["Guard", "Problem"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Any, Any, Any], Awaitable[None]]

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
"""Of every answer."""


class Problem(msgspec.Struct, frozen=True):
    """The one way an error is said: a code that stays, and a sentence."""

    code: str
    message: str


class Guard:
    """Refuses what may not be asked; hands on the rest."""

    def __init__(self, app: App, token: str, is_local: bool, reads_free: bool, open_paths: Collection[str]) -> None:
        """is_local: whether only this host can reach us. open_paths: what can be read without a token in any case."""
        self._app = app
        self._token = token.encode()
        self._is_local = is_local
        self._reads_free = reads_free
        self._open = {*open_paths, *_PROBES}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *_HEADERS]
            await send(message)

        refused = self._refusal(scope)
        if refused is None:
            # Who asks for the head alone gets that of the whole: uvicorn leaves the body out.
            inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self._app(inner, receive, send_guarded)
            return
        status, problem = refused
        body = msgspec.json.encode(problem)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        if status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await send_guarded({"type": "http.response.start", "status": status, "headers": headers})
        await send_guarded({"type": "http.response.body", "body": body})

    def _refusal(self, scope: Scope) -> tuple[int, Problem] | None:
        host = _header(scope, b"host")
        if self._is_local and not _is_this_host(host):
            return 403, Problem("forbidden", "ask by the name localhost, or by a loopback address")
        is_change = scope["method"] not in _READING
        origin = _header(scope, b"origin")
        if is_change and origin is not None and origin.partition("://")[2] != host:
            return 403, Problem("forbidden", "a page of another site may change nothing here")
        if is_change or not (self._reads_free or scope["path"] in self._open):
            given = _header(scope, b"authorization") or ""
            scheme, _, token = given.partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode("latin-1"), self._token):
                message = "this needs the header `Authorization: Bearer TOKEN`; `kvdepot token` prints the token"
                return 401, Problem("unauthorized", message)
        return None


def _header(scope: Scope, name: bytes) -> str | None:
    """The header's value, if it was sent; all of them, with commas between, where it was sent more than once."""
    found = [value for key, value in scope["headers"] if key == name]
    return b", ".join(found).decode("latin-1") if found else None


def _is_this_host(host: str | None) -> bool:
    """Whether a Host header names this host, on whichever port: a tunnel may end at another."""
    if host is None:
        return False
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
