"""A client without a server: it records requests, and the test answers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvdepot.client.socket import MessagingFuture
from kvdepot.protocol import wire


class Answering:
    """Stands in for client.socket.Client. The test answers the oldest open request."""

    def __init__(self) -> None:
        self.incarnation, self.welcomes = b"one", 1
        self.heard = 0
        self.is_welcomed = True
        self.welcome = wire.Welcome(wire.VERSION, 256, max_hint_s=3600, max_hint_priority=50)
        self.arena, self.arena_dir = ("", b""), ""
        self.is_closed = False
        self.asked: list[wire.Request] = []
        self._open: list[Callable[[object], None]] = []

    def ask(
        self, request: wire.Request, convert: Callable[[object], Any] | None = None, deadline_s: float | None = 30.0
    ) -> MessagingFuture[Any]:
        future: MessagingFuture[Any] = MessagingFuture(None, convert)
        self.ask_then(request, future._finish)
        return future

    def ask_then(self, request: wire.Request, done: Callable[[object], None], deadline_s: float | None = 30.0) -> None:
        self.asked.append(request)
        self._open.append(done)

    def answer(self, value: object) -> None:
        """A value, or an error."""
        self._open.pop(0)(value)

    def is_returning(self) -> bool:
        return False

    def pump(self) -> None:
        pass

    def wait(self, done: Callable[[], bool], timeout_s: float, also: int | None = None) -> bool:
        return done()
