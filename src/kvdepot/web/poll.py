"""The web process's client: polls the server's status once a second, on a thread of its own, and keeps the last answer.

Invariant: an HTTP request that only reads never causes a request to the server, except for the list of leases (app.py).
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from kvdepot.client import admin
from kvdepot.client.calls import OwnClient
from kvdepot.errors import DeadlineExceeded, InternalError, KVDepotError, ProtocolError, Unavailable
from kvdepot.protocol import wire
from kvdepot.protocol.curve import Key
from kvdepot.protocol.status import Status
from kvdepot.web.history import History

log = logging.getLogger(__name__)

POLL_S = 1.0
_ANSWER_S = 5.0
STALE_S = 4.0
"""A server that has not answered for this long is unhealthy."""
BEHIND_S = 1.0
"""A server with a longer loop lag is unhealthy."""


_PROBLEMS = {
    DeadlineExceeded.code: f"the server has not answered within {_ANSWER_S:g} s: it is overloaded, stopped or hangs",
    Unavailable.code: "the server cannot be reached: it has stopped, or is starting",
    ProtocolError.code: "the server is of another version than its web process; restart it",
}
"""Texts of errors that anybody may read, by code."""


@dataclass(frozen=True, slots=True)
class PolledStatus:
    """A status, when it came (monotonic), and the loop lag."""

    status: Status
    at: float
    lag_s: float


@dataclass(frozen=True, slots=True)
class Turn:
    """The result of poll number `number`: the last status, and why there is no newer one (empty if there is)."""

    number: int
    answer: PolledStatus | None
    problem: str


class Poll:
    """Polls one server until it is closed."""

    def __init__(self, url: str, key: Key | None) -> None:
        self.client = OwnClient(url, key or "")
        self.history = History()
        self.turn = Turn(0, None, "not polled yet")
        """The latest turn. The thread replaces it as a whole; any thread may read it."""
        self._began = time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvdepot-poll", daemon=True)
        self._thread.start()

    def trouble(self) -> str:
        """Why the server is unhealthy; empty if it is healthy. Anybody may read this; details are in the log only."""
        turn = self.turn
        answer = turn.answer
        silent_s = time.monotonic() - (answer.at if answer is not None else self._began)
        if turn.problem:
            return _PROBLEMS.get(turn.problem, f"the server answers with an error ({turn.problem}); see its log")
        if silent_s > STALE_S:
            return f"the server has not answered for {silent_s:.1f} s"
        if answer is not None and answer.lag_s > BEHIND_S:
            return f"the server lags: its last answer took {answer.lag_s:.1f} s"
        if answer is not None and answer.status.unreachable:
            return f"no new engine can connect: {answer.status.unreachable}"
        return ""

    def latest(self) -> PolledStatus:
        """The last status. Raises Unavailable if it is too old."""
        answer = self.turn.answer
        if answer is None or time.monotonic() - answer.at >= STALE_S:
            raise Unavailable(self.trouble() or "the server has not answered yet")
        return answer

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stopping.is_set():
            before = self.turn
            answer, problem = before.answer, ""
            try:
                answer = self._ask()
                self.history.add(time.time(), answer.status)
            except KVDepotError as exc:
                problem = exc.code
                if problem != before.problem and not self._stopping.is_set():  # `close` fails what is asked
                    log.info("the server does not answer the web process: %s", exc)
            except Exception:
                problem = InternalError.code
                if problem != before.problem:
                    log.exception("the web process cannot parse the server's reply")
            self.turn = Turn(before.number + 1, answer, problem)
            due = max(due + POLL_S, time.monotonic())
            self._stopping.wait(due - time.monotonic())

    def _ask(self) -> PolledStatus:
        began = time.monotonic()
        self.client.ask(wire.Noop(), deadline_s=_ANSWER_S).result(_ANSWER_S)
        between = time.monotonic()
        status = admin.status(self.client, _ANSWER_S)
        now = time.monotonic()
        # The longer of both, because a loop that stutters often answers one of them at once.
        return PolledStatus(status, now, max(between - began, now - between))

    def close(self) -> None:
        self._stopping.set()
        self.client.close()
        self._thread.join(_ANSWER_S)
