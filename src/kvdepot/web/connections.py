"""HTTP connections that end: uvicorn's protocol, with a time for each thing that a client can be slow at.

Made by uvicorn, on the event loop. uvicorn waits for ever for a first request, for the rest of one, and for an answer
to be read. One connection too many takes the place of that which has stayed where it is for longest: idlers keep no
probe out. The one law: there are at most so many, and none stays where it is for longer than its time.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["MOST_CONNECTIONS", "Connection"]

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
        self._at: Any = None  # what it waits for, as it was when we looked last
        self._since = self.loop.time()
        self._look = self.loop.call_later(_LOOK_S, self._turn)
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
        self._look.cancel()
        super().connection_lost(exc)

    def _turn(self) -> None:
        now = self.loop.time()
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
            return
        self._look = self.loop.call_later(_LOOK_S, self._turn)
