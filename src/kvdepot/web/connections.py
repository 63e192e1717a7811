"""HTTP connections that end: uvicorn's protocol and server, with a time for each thing that a client can be slow at.

On the event loop; uvicorn makes the connections, the server looks at all of them together once a second. uvicorn waits
for ever for a first request, for the rest of one, and for an answer to be read. One connection too many takes the place
of that which has stayed where it is for longest: idlers keep no probe out. The one law: there are at most so many, and
none stays where it is for longer than its time.
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
"""From a connection, or an answer's end, to the end of the next request's headers; then again to its body's end."""
_READ_S = 20.0
"""An answer that has not been read to its end within so long is given up."""


class Connection(H11Protocol):
    """One client's connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "connection": self}  # a request's `scope["state"]`
        self.wakes: asyncio.Future[None] | None = None
        """What the request under way waits for, if it waits: done, too, when its client has gone."""
        self._at: Any = None  # what it waits for, as it was when we looked last
        self._since = self.loop.time()
        others: list[Any] = [each for each in self.connections if each is not self and not each.transport.is_closing()]
        if len(others) >= MOST_CONNECTIONS:
            min(others, key=lambda each: each._since).transport.abort()

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP. Where a request's head has been read, uvicorn would answer that twice."""
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
        """End it if it has stayed where it is for too long. now: of the loop's clock."""
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
            at = ("work", cycle)  # ours to do: it has deadlines of its own
            self._since = now
        if at != self._at:
            self._at, self._since = at, now
        if now - self._since > most_s:
            self.transport.abort()


class Server(uvicorn.Server):
    """uvicorn's, but that looks once a second and not ten times: each time it wakes may be beside a lookup."""

    def __init__(
        self, config: uvicorn.Config, ended: threading.Event, on_look: Callable[[], None], on_end: Callable[[], None]
    ) -> None:
        """ended: whether it is to end. on_look: called, on the loop, each second. on_end: when it begins to end."""
        super().__init__(config)
        self._ended = ended
        self._on_look = on_look
        self._on_end = on_end

    async def main_loop(self) -> None:
        loop = asyncio.get_running_loop()
        end: asyncio.Future[None] = loop.create_future()
        threading.Thread(target=self._await_end, args=(loop, end), daemon=True).start()
        while not await self.on_tick(0):  # which notes the date of answers, too
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
