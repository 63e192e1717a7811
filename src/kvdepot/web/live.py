"""The latest status as JSON, encoded once for all readers. Runs on the event loop."""

from __future__ import annotations

import json
import shlex

import msgspec

from kvdepot.config import default_url
from kvdepot.protocol.counters import losses
from kvdepot.protocol.health import RECENT_S, Health, judge
from kvdepot.protocol.metrics import BOUNDS_S
from kvdepot.protocol.status import Loss, Status
from kvdepot.web.poll import Poll


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
    """The status of the latest turn, encoded."""

    def __init__(self, poll: Poll) -> None:
        self._poll = poll
        self._flag = engine_flag(poll.client.server_url)
        self._encoded = -1, b""  # the number of a turn, and its status as JSON

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


def engine_flag(url: str) -> str:
    """The option of vLLM that connects an engine to the server at `url`; the default one needs no url."""
    connector: dict[str, object] = {"kv_connector": "KVDepotConnector", "kv_role": "kv_both"}
    if url != default_url():
        connector["kv_connector_extra_config"] = {"kvdepot.url": url}
    return f"--kv-transfer-config {shlex.quote(json.dumps(connector, separators=(',', ':')))}"
