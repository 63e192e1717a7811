"""HTTP connections with limits: uvicorn's protocol and server, plus a timeout for every state of a connection.

Runs on the event loop; uvicorn creates the connections, and the server checks all of them once a second. uvicorn's own
timeout covers only the time between a response and the next request: it waits forever for the first request, for the
rest of one, and for the client to read a response. A connection beyond the maximum replaces the one that has been in
its state for longest, so idle connections cannot keep a health probe out.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from socket import socket
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["MOST_CONNECTIONS", "Connection", "Server"]

MOST_CONNECTIONS = 128
_LOOK_S = 1.0
_REQUEST_S = 10.0
"""Time for a request's headers, from the connection or the last response; then again for its body."""
_READ_S = 20.0
"""Time for the client to read a response."""


class Connection(H11Protocol):
    """One client's connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "connection": self}  # a request's `scope["state"]`
        self.wakes: asyncio.Future[None] | None = None
        """The future that the current request waits for, if any; it is also done when the client has gone."""
        self._at: Any = None  # its state at the last check
        self._since = self.loop.time()
        others: list[Any] = [each for each in self.connections if each is not self and not each.transport.is_closing()]
        if len(others) >= MOST_CONNECTIONS:
            min(others, key=lambda each: each._since).transport.abort()

    def send_400_response(self, msg: str) -> None:
        """The data is not HTTP. If a request's head was already read, uvicorn would send two responses."""
        if self.conn.our_state is h11.IDLE:
            super().send_400_response(msg)
        else:
            if self.cycle is not None:
                self.cycle.disconnected = True
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.wakes is not None and not self.wakes.done():
            self.wakes.set_result(None)

    def look(self, now: float) -> None:
        """Abort the connection if it has been in its state for too long. now: by the loop's clock."""
        cycle = self.cycle
        most_s = _REQUEST_S
        if self.transport.get_write_buffer_size():
            at: Any = ("answer", cycle)
            most_s = _READ_S
        elif cycle is None or cycle.response_complete:
            at = ("request", cycle)
        elif cycle.more_body:
            at = ("body", cycle)
        else:
            at = ("work", cycle)  # our handler runs, which has deadlines of its own
            self._since = now
        if at != self._at:
            self._at, self._since = at, now
        if now - self._since > most_s:
            self.transport.abort()


class Server(uvicorn.Server):
    """uvicorn's server, but it wakes once a second instead of ten times, because each time may disturb a lookup."""

    def __init__(
        self, config: uvicorn.Config, ended: threading.Event, on_look: Callable[[], None], on_end: Callable[[], None]
    ) -> None:
        """ended: set to end the server. on_look: called each second on the loop. on_end: called when the end begins."""
        super().__init__(config)
        self._ended = ended
        self._on_look = on_look
        self._on_end = on_end

    async def main_loop(self) -> None:
        loop = asyncio.get_running_loop()
        end: asyncio.Future[None] = loop.create_future()
        threading.Thread(target=self._await_end, args=(loop, end), daemon=True).start()
        while not await self.on_tick(0):  # also updates the Date header of responses
            self._on_look()
            await asyncio.wait([end], timeout=_LOOK_S)
            now = loop.time()
            connections: list[Any] = list(self.server_state.connections)
            for connection in connections:
                connection.look(now)

    def _await_end(self, loop: asyncio.AbstractEventLoop, end: asyncio.Future[None]) -> None:
        self._ended.wait()
        self.should_exit = True
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(end.set_result, None)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        self._on_end()
        await super().shutdown(sockets)
