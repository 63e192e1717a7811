"""Readers that wait for the next status, and the bytes that all of them get: encoded once a turn, told together.

poll.py's thread says when it has asked once more; all else runs on the event loop. So ten pages run beside the engines
once a second, and not twenty times. The one law: who waits hears of a depot that does not answer as soon as whoever
does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from typing import TYPE_CHECKING

import msgspec

from kvdepot.errors import Unavailable
from kvdepot.protocol.counters import losses
from kvdepot.protocol.status import Loss, Status
from kvdepot.web.guard import App, Receive, Scope, Send
from kvdepot.web.poll import STALE_S, Poll

if TYPE_CHECKING:
    from kvdepot.web.connections import Connection

__all__ = ["Short", "StatusNow", "Turns"]

_AFTER = re.compile(rb"after=(\d{1,18})")


class StatusNow(Status, frozen=True, kw_only=True):
    """All that the depot says of itself; in which turn of asking it, and what is wrong although it has answered.

    turn: to be given as `after`. trouble: what `/healthz` says, empty when it finds nothing wrong. losses: what left,
    failed or was refused, in words.
    """

    turn: int
    trouble: str
    losses: list[Loss]


class Turns:
    """Makes readers of a poll's answers wait for the next one. Never blocks; on the event loop, but for `_told`."""

    def __init__(self, poll: Poll) -> None:
        self._poll = poll
        self._loop: asyncio.AbstractEventLoop | None = None  # set before anybody waits
        self._waiting: set[asyncio.Future[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._ending = False
        self._encoded = -1, b""  # of which turn, and what
        poll.on_turn = self._told

    def __repr__(self) -> str:
        return f"<Turns {self._poll.turn.number}, {len(self._waiting)} wait>"

    def now(self) -> StatusNow:
        """Raises Unavailable, as the poll's latest answer."""
        number = self._poll.turn.number  # first: of what comes meanwhile a reader is told once more, never not at all
        status = self._poll.latest().status
        return StatusNow(
            **msgspec.structs.asdict(status), turn=number, trouble=self._poll.trouble(), losses=losses(status)
        )

    def encoded(self) -> bytes:
        """The same, as JSON. Raises Unavailable."""
        self._poll.latest()
        if self._encoded[0] != self._poll.turn.number:
            now = self.now()
            self._encoded = now.turn, msgspec.json.encode(now)
        return self._encoded[1]

    async def wait(self, number: int, connection: Connection) -> None:
        """Until the turn is another one than that, the last answer is too old to be told, or the client has gone."""
        self._loop = asyncio.get_running_loop()
        # After the loop is known: a turn from now on is told to it. Again where one is told that was seen already.
        while not (self._ending or connection.transport.is_closing()):
            turn = self._poll.turn
            if turn.number != number or turn.answer is None:
                return
            stale_at = turn.answer.at + STALE_S
            if stale_at <= time.monotonic():
                return
            if self._timer is None:
                self._timer = self._loop.call_at(stale_at, self._wake)  # whose clock is ours
            woken = connection.wakes = self._loop.create_future()
            self._waiting.add(woken)
            try:
                await woken
            finally:
                connection.wakes = None
                self._waiting.discard(woken)

    def end(self) -> None:
        """Nobody waits from now on."""
        self._ending = True
        self._wake()

    def _told(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: we are ending
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for woken in self._waiting:
            if not woken.done():
                woken.set_result(None)
        self._waiting.clear()


class Short:
    """Around the application: answers what open pages ask once a second each without going all its way."""

    def __init__(self, app: App, turns: Turns) -> None:
        self._app = app
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = scope["path"] == "/v1/status" and scope["method"] == "GET" and _AFTER.fullmatch(scope["query_string"])
        if asked:
            await self._turns.wait(int(asked[1]), scope["state"]["connection"])
            try:
                body = self._turns.encoded()
            except Unavailable:
                pass  # told as every error is
            else:
                headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": body})
                return
        await self._app(scope, receive, send)
