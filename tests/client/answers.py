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
        self.wants_tokens = False
        self.lookup_s = 0.0
        self.hint_limits = (3600, 50)
        self.asked: list[wire.Request] = []
        self._futures: list[MessagingFuture[Any]] = []

    def ask(
        self, request: wire.Request, convert: Callable[[object], Any] | None = None, deadline_s: float | None = 30.0
    ) -> MessagingFuture[Any]:
        self.asked.append(request)
        self._futures.append(MessagingFuture(None, convert))
        return self._futures[-1]

    def answer(self, value: object) -> None:
        """A value, or an error."""
        self._futures.pop(0)._finish(value)

    def is_returning(self) -> bool:
        return False

    def pump(self) -> None:
        pass

    def wait(self, done: Callable[[], bool], timeout_s: float, also: int | None = None) -> bool:
        return done()
