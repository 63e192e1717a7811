"""The latest status as JSON, and a stream of server-sent events with each new one.

poll.py's thread signals each turn; the rest runs on the event loop, and encodes a status once for all readers.
Invariant: a reader of the stream gets the current turn at once and none twice, and learns that the server does not
answer as soon as one that asks for `/v1/status`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
from collections.abc import AsyncIterator

import msgspec

from kvdepot.config import default_url
from kvdepot.errors import Unavailable
from kvdepot.protocol.counters import losses
from kvdepot.protocol.health import RECENT_S, Health, judge
from kvdepot.protocol.metrics import BOUNDS_S
from kvdepot.protocol.status import Loss, Status
from kvdepot.web.guard import Problem
from kvdepot.web.poll import STALE_S, Poll


class StatusNow(Status, kw_only=True):
    """The server's status, and what the page needs beside it.

    turn: number of the poll. point: the latest point of `/v1/history`. trouble: the error of `/healthz`; empty if
    healthy. health: the same and all other problems, with what to do. losses: evictions, failures and refusals, as
    text. bounds_s: upper bounds of the buckets of `latencies`. engine_flag: the option of vLLM that connects an engine
    of this host to this server.
    """

    turn: int
    point: dict[str, float]
    trouble: str
    health: Health
    losses: list[Loss]
    bounds_s: tuple[float, ...] = BOUNDS_S
    engine_flag: str = ""


class LiveStatus:
    """The status of each turn, encoded. Runs on the event loop, except `_notify`."""

    def __init__(self, poll: Poll) -> None:
        self._poll = poll
        self._loop: asyncio.AbstractEventLoop | None = None  # set by the first reader of a stream
        self._turned = asyncio.Event()
        self._is_ending = False
        self._flag = engine_flag(poll.client.server_url)
        self._encoded = -1, b""  # the number of a turn, and its status as JSON
        poll.on_turn = self._notify

    def encoded(self) -> bytes:
        """The latest status as JSON. Raises Unavailable if it is too old."""
        number = self._poll.turn.number  # first: a status that is newer than its number is sent again with the next
        polled = self._poll.latest()
        if self._encoded[0] != number:
            status, trouble = polled.status, self._poll.trouble()
            dropped = self._poll.history.increase("dropped_chunks", RECENT_S)
            now = StatusNow(
                **msgspec.structs.asdict(status), turn=number, point=self._poll.history.latest(), trouble=trouble,
                health=judge(status, trouble, dropped), losses=losses(status), engine_flag=self._flag,
            )  # fmt: skip
            self._encoded = number, msgspec.json.encode(now)
        return self._encoded[1]

    async def events(self) -> AsyncIterator[bytes]:
        """One server-sent event per turn: the status, or as `problem` why there is none, also once the last one is no
        longer fresh. Ends with the server."""
        self._loop = asyncio.get_running_loop()
        seen = -1, False
        while not self._is_ending:
            turn = self._poll.turn
            fresh_s = turn.answer.fresh_s if turn.answer is not None else 0.0
            if seen == (turn.number, fresh_s > 0):
                timer = self._loop.call_later(fresh_s if fresh_s > 0 else STALE_S, self._wake)
                await self._turned.wait()
                timer.cancel()
                continue
            try:
                event = b"data: %b\n\n" % self.encoded()
                seen = self._encoded[0], True
            except Unavailable as exc:
                seen = turn.number, False
                event = b"event: problem\ndata: %b\n\n" % msgspec.json.encode(Problem(exc.code, str(exc)))
            yield event

    def end(self) -> None:
        """End all streams. Any thread may call this."""
        self._is_ending = True
        self._notify()

    def _notify(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, because we are ending
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._turned.set()
        self._turned.clear()


def engine_flag(url: str) -> str:
    """The option of vLLM that connects an engine to the server at `url`; the default one needs no url."""
    connector: dict[str, object] = {"kv_connector": "KVDepotConnector", "kv_role": "kv_both"}
    if url != default_url():
        connector["kv_connector_extra_config"] = {"kvdepot.url": url}
    return f"--kv-transfer-config {shlex.quote(json.dumps(connector, separators=(',', ':')))}"
