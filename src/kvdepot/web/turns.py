"""Long polls for the next status. The response is encoded once per turn and sent to all waiting readers together.

poll.py's thread signals each turn; the rest runs on the event loop. So ten open pages wake the process once a second,
not twenty times. Invariant: a waiting reader learns that the server does not answer as soon as one that does not wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import time
from typing import TYPE_CHECKING

import msgspec

from kvdepot.config import default_url
from kvdepot.protocol.counters import losses
from kvdepot.protocol.health import RECENT_S, Health, judge
from kvdepot.protocol.status import Loss, Status
from kvdepot.web.poll import STALE_S, Poll

if TYPE_CHECKING:
    from kvdepot.web.connections import Connection

__all__ = ["StatusNow", "Turns", "engine_flag"]


class StatusNow(Status, frozen=True, kw_only=True):
    """The server's status, with the number of the turn and what is wrong.

    turn: for the parameter `after`. trouble: the error of `/healthz`; empty if healthy. health: the same and all other
    problems, with what to do. losses: evictions, failures and refusals, as text. engine_flag: the option of vLLM that
    connects an engine of this host to this server.
    """

    turn: int
    trouble: str
    health: Health
    losses: list[Loss]
    engine_flag: str = ""


class Turns:
    """Lets readers wait for a poll's next turn. Runs on the event loop, except `_notify`."""

    def __init__(self, poll: Poll) -> None:
        self._poll = poll
        self._loop: asyncio.AbstractEventLoop | None = None  # set by the first reader that waits
        self._waiting: set[asyncio.Future[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._ending = False
        self._flag = engine_flag(poll.client.server_url)
        self._encoded = -1, b""  # the number of a turn, and its status as JSON
        poll.on_turn = self._notify

    def __repr__(self) -> str:
        return f"<Turns {self._poll.turn.number}, {len(self._waiting)} wait>"

    def now(self) -> StatusNow:
        """The current status. Raises Unavailable if it is too old."""
        number = self._poll.turn.number  # read first: a reader may then get a turn twice, but never misses one
        status, health = self.judged()
        return StatusNow(
            **msgspec.structs.asdict(status), turn=number, trouble=self._poll.trouble(), health=health,
            losses=losses(status), engine_flag=self._flag,
        )  # fmt: skip

    def judged(self) -> tuple[Status, Health]:
        """The current status and its health, on any thread. Raises Unavailable if it is too old."""
        status = self._poll.latest().status
        return status, judge(status, self._poll.trouble(), self._poll.history.total("dropped_chunks_s", RECENT_S))

    def encoded(self) -> bytes:
        """`now` as JSON. Raises Unavailable."""
        self._poll.latest()
        if self._encoded[0] != self._poll.turn.number:
            now = self.now()
            self._encoded = now.turn, msgspec.json.encode(now)
        return self._encoded[1]

    async def wait(self, number: int, connection: Connection) -> None:
        """Wait until the turn is not `number` any more, the last answer is too old, or the client has gone."""
        self._loop = asyncio.get_running_loop()
        # Check only once `_notify` can reach the loop, or a turn could be missed. Again, as it may report an old one.
        while not (self._ending or connection.transport.is_closing()):
            turn = self._poll.turn
            if turn.number != number or turn.answer is None:
                return
            stale_at = turn.answer.at + STALE_S
            if stale_at <= time.monotonic():
                return
            if self._timer is None:
                self._timer = self._loop.call_at(stale_at, self._wake)  # the loop's clock is time.monotonic
            woken = connection.wakes = self._loop.create_future()
            self._waiting.add(woken)
            try:
                await woken
            finally:
                connection.wakes = None
                self._waiting.discard(woken)

    def end(self) -> None:
        """Wake all waiting readers; no reader waits from now on."""
        self._ending = True
        self._wake()

    def _notify(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, because we are ending
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for woken in self._waiting:
            if not woken.done():
                woken.set_result(None)
        self._waiting.clear()


def engine_flag(url: str) -> str:
    """The option of vLLM that connects an engine to the server at `url`; the default one needs no url."""
    connector: dict[str, object] = {"kv_connector": "KVDepotConnector", "kv_role": "kv_both"}
    if url != default_url():
        connector["kv_connector_extra_config"] = {"kvdepot.url": url}
    return f"--kv-transfer-config {shlex.quote(json.dumps(connector, separators=(',', ':')))}"
