"""The other depots of a fleet, asked for one page that shows all of them (setting `fleet`).

`Fleet.now` runs on the web process's threads for requests. It asks all depots at once, at most every few seconds and
only while somebody looks. Other web processes answer it from their last poll: no depot notices.
"""

from __future__ import annotations

import http.client
import io
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from socket import socket
from urllib.parse import urlsplit

import msgspec

from kvdepot.protocol.health import Health, judge
from kvdepot.protocol.status import Status

__all__ = ["Depot", "Fleet", "FleetNow", "Load"]

_KEEP_S = 4.0
"""How long an answer is good enough."""
_CONNECT_S = 2.0
"""Time to connect to one of a depot's addresses."""
_ANSWER_S = 4.0
"""Time for a depot's whole answer, from the start of the request. An answer that takes longer is given up."""
_ALL_S = 5.0
"""Time for all depots together. Those that have not answered then, for example because the resolver of names hangs,
count as unreachable, and are not asked again until that request ends."""
_MOST_BODY = 16 << 20
_MOST_REASON = 200


class Load(msgspec.Struct, frozen=True):
    """What one depot does, or several together. The tokens per second are those of the last minute; asked_tokens,
    reused_tokens and saved_s (prefill time) count since each server's start."""

    asked_tokens_s: float = 0.0
    reused_tokens_s: float = 0.0
    asked_tokens: int = 0
    reused_tokens: int = 0
    saved_s: float = 0.0
    used_bytes: int = 0
    capacity_bytes: int = 0
    tiers: int = 0
    tiers_up: int = 0
    engines: int = 0


class Depot(msgspec.Struct, frozen=True):
    """One depot. url: empty for the one that answers. level: `good`, `look` or `bad`. load: None if it is `bad`."""

    url: str
    level: str
    headline: str
    host: str = ""
    version: str = ""
    uptime_s: float = 0.0
    load: Load | None = None


class FleetNow(msgspec.Struct, frozen=True):
    """All depots, this one first, and the sum of those that answered."""

    depots: list[Depot]
    total: Load


class _Told(Status, frozen=True, kw_only=True):
    """What another depot's `/v1/status` says; older versions do not say `health`."""

    trouble: str = ""
    health: Health | None = None


# Made once, at import: msgspec crashes if two threads are the first to decode a type at the same time.
_TOLD = msgspec.json.Decoder(_Told)
_REFUSAL = msgspec.json.Decoder(dict[str, str])


class Fleet:
    """Asks the depots at `urls`. token: sent to all of them; empty: none."""

    def __init__(self, urls: Sequence[str], token: str) -> None:
        self._urls = urls
        self._token = token
        self._lock = threading.Lock()  # held by the one thread that asks
        self._at = -_KEEP_S
        self._requests: list[Future[Depot] | None] = [None] * len(urls)  # the last one to each
        self._others = [Depot(url, "wait", "Not polled yet") for url in urls]

    def __repr__(self) -> str:
        return f"<Fleet of {len(self._urls)} other depots>"

    def now(self, status: Callable[[], tuple[Status, Health]]) -> FleetNow:
        """All depots; status: of this one. Blocks for some seconds at most; only the first of several callers at a time
        asks, and the others get what was said before. Raises what `status` raises."""
        if self._lock.acquire(blocking=False):
            try:
                if self._urls and time.monotonic() - self._at >= _KEEP_S:
                    try:
                        self._others = self._ask_all()
                    finally:
                        self._at = time.monotonic()
            finally:
                self._lock.release()
        depots = [_depot("", *status()), *self._others]
        return FleetNow(depots, _total(depot.load for depot in depots if depot.load is not None))

    def _ask_all(self) -> list[Depot]:
        threads = ThreadPoolExecutor(len(self._urls), thread_name_prefix="kvdepot-fleet")
        started = []
        for place, url in enumerate(self._urls):
            last = self._requests[place]
            if last is None or last.done():
                self._requests[place] = request = threads.submit(_ask, url, self._token)
                started.append(request)
        wait(started, _ALL_S)
        threads.shutdown(wait=False)
        late = f"Not reachable: no answer within {_ALL_S:g} s"
        return [
            request.result() if request is not None and request.done() else Depot(url, "bad", late)
            for url, request in zip(self._urls, self._requests, strict=True)
        ]


class _Timely(io.RawIOBase):
    """A connection as http.client uses it, whose reads end at a time however slowly the other side sends."""

    def __init__(self, connection: socket, until: float) -> None:
        self._connection = connection
        self._until = until

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # what BufferedReader gives
        self._hurry()
        return self._connection.recv_into(buffer)

    def sendall(self, data: bytes) -> None:
        self._hurry()
        self._connection.sendall(data)

    def close(self) -> None:
        """Of the file; `_ask` closes the connection."""

    def _hurry(self) -> None:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._connection.settimeout(left)


def _ask(url: str, token: str) -> Depot:
    """The depot at a URL. Blocks for `_ANSWER_S`, and as long as names are resolved. Raises nothing that a setting, a
    server or a network can cause."""
    try:
        status, body = _get(url, token)
    except (OSError, http.client.HTTPException, ValueError) as exc:  # ValueError: what cannot be a host, path or token
        return Depot(url, "bad", f"Not reachable: {str(exc) or type(exc).__name__}"[:_MOST_REASON])
    if status == 401:
        return Depot(url, "bad", "Refused: it has a different token")
    try:
        if status != 200:
            said = _REFUSAL.decode(body)
            return Depot(url, "bad", f"Not answering: {said.get('message', status)}"[:_MOST_REASON])
        told = _TOLD.decode(body)
        return _depot(url, told, told.health or judge(told, told.trouble))
    except (msgspec.DecodeError, ValueError, RecursionError, ArithmeticError):
        # Also what is not UTF-8, is nested without end, or has numbers that no depot can have.
        return Depot(url, "bad", f"Not a depot of this version (HTTP {status})")


def _get(url: str, token: str) -> tuple[int, bytes]:
    """Status code and body of a depot's `/v1/status`. Raises OSError, HTTPException, and ValueError if `url` or `token`
    cannot be sent."""
    until = time.monotonic() + _ANSWER_S
    parts = urlsplit(url)
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = connect(parts.netloc, timeout=min(_CONNECT_S, _ANSWER_S))
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    connection.connect()
    with connection.sock as plain:
        connection.sock = _Timely(plain, until)
        connection.request("GET", parts.path.rstrip("/") + "/v1/status", headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(_MOST_BODY)


def _depot(url: str, status: Status, health: Health) -> Depot:
    minute = status.reuse[0] if status.reuse else None
    load = Load(
        asked_tokens_s=minute.asked_tokens / minute.window_s if minute else 0.0,
        reused_tokens_s=minute.reused_tokens / minute.window_s if minute else 0.0,
        asked_tokens=status.asked_tokens,
        reused_tokens=status.saved.tokens,
        saved_s=status.saved.prefill_s,
        used_bytes=status.used_bytes,
        capacity_bytes=status.capacity_bytes,
        tiers=len(status.tiers),
        tiers_up=sum(tier.state == "up" for tier in status.tiers),
        engines=status.engine_count,
    )
    return Depot(url, health.level, health.headline, status.host, status.version, status.uptime_s, load)


def _total(loads: Iterable[Load]) -> Load:
    each = [msgspec.structs.astuple(load) for load in loads]
    return Load(*map(sum, zip(*each, strict=True)))
