"""The HTTP server: uvicorn's, plus a timeout for every state of a connection and a bound on their number.

Runs on the event loop, and checks all connections once a second; docs/decisions.md says why. A connection beyond the
maximum replaces the one that has been in its state for longest.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from typing import Any

import h11
import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvdepot.errors import BadRequest
from kvdepot.web.guard import HEADERS, MOST_HEADERS, App, Problem

MOST_CONNECTIONS = 128
_CHECK_S = 1.0
_REQUEST_S = 10.0
"""Time for a request's headers, from the connection or the last response; then again for its body."""
_READ_S = 20.0
"""Time for the client to read a response."""


class HttpConnection(H11Protocol):
    """One client's connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._state: Any = None  # at the last check
        self._since = self.loop.time()
        self._is_refused = False
        others: list[Any] = [each for each in self.connections if each is not self and not each.transport.is_closing()]
        if len(others) >= MOST_CONNECTIONS:
            min(others, key=lambda each: each._since).transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not HTTP, or a head that is too large; h11's error is being handled. If a request's head
        was already read, uvicorn would send two responses."""
        if self.conn.our_state is not h11.IDLE:
            if self.cycle is not None:
                self.cycle.disconnected = True
            self.transport.abort()
            return
        status: int = getattr(sys.exc_info()[1], "error_status_hint", 400)
        problem = Problem(BadRequest.code, msg)
        if status == 431:
            problem = Problem("too_large", f"the request's line and headers are larger than {MOST_HEADERS >> 10} KiB")
        body = msgspec.json.encode(problem)
        head = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        for event in (h11.Response(status_code=status, headers=[*head, *HEADERS]), h11.Data(body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self._is_refused = True
        with contextlib.suppress(OSError):  # the client has closed the connection meanwhile
            self.transport.write_eof()

    def data_received(self, data: bytes) -> None:
        """Discard what follows a refused head until the client closes the connection, or `check` ends it: if we closed
        it with unread data, the client would see that instead of the answer."""
        if not self._is_refused:
            super().data_received(data)

    def check(self, now: float) -> None:
        """Abort the connection if it has been in its state for too long. now: by the loop's clock."""
        cycle = self.cycle
        most_s = _REQUEST_S
        if self.transport.get_write_buffer_size():
            state: Any = ("response", cycle)
            most_s = _READ_S
        elif cycle is None or cycle.response_complete:
            state = ("request", cycle)
        elif cycle.more_body:
            state = ("body", cycle)
        else:
            state = ("work", cycle)  # our handler runs, which has deadlines of its own
            self._since = now
        if state != self._state:
            self._state, self._since = state, now
        if now - self._since > most_s:
            self.transport.abort()


class HttpServer(uvicorn.Server):
    """uvicorn's server, but it wakes once a second instead of ten times, because each time may disturb a lookup; and by
    the loop's clock, because uvicorn's own notification stops when the wall clock is set back."""

    def __init__(self, app: App, on_check: Callable[[], None]) -> None:
        """on_check: called each second on the loop."""
        super().__init__(
            uvicorn.Config(
                app,
                http=HttpConnection,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=MOST_CONNECTIONS,
                timeout_keep_alive=5,
                timeout_graceful_shutdown=1,
                h11_max_incomplete_event_size=MOST_HEADERS,
            )
        )
        self._on_check = on_check
        self._ended = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def end(self) -> None:
        """End the server. Any thread may call this, also before it runs."""
        self.should_exit = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._ended.set)

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        while not await self.on_tick(0):  # also updates the Date header of responses
            self._on_check()
            connections: list[Any] = list(self.server_state.connections)
            for connection in connections:
                connection.check(self._loop.time())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _CHECK_S)
