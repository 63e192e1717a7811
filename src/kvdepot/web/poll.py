"""The web process's one client: asks its depot once a second how it is, and keeps the last answer.

A thread of its own asks; whoever serves HTTP reads what it left. The one law: nothing that is asked over HTTP makes the
depot be asked (but what people change).
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Any

import zmq

from kvdepot import wire
from kvdepot.client import MessageQueueClient
from kvdepot.curve import Key
from kvdepot.errors import InternalError, KVDepotError, Unavailable
from kvdepot.status import Status, read
from kvdepot.web.history import History, measure

__all__ = ["Answer", "Poll"]

log = logging.getLogger(__name__)

POLL_S = 1.0
_ANSWER_S = 5.0
STALE_S = 4.0
"""A depot that has not answered for so long is not well."""
BEHIND_S = 1.0
"""Nor is one whose loop took so long to get to a request that needs no work."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a depot said, when (monotonic), and how long its loop took to get to a request."""

    status: Status
    at: float
    lag_s: float


class Poll:
    """Asks one depot. `close` it."""

    def __init__(self, url: str, key: Key | None) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self.client = MessageQueueClient(url, self._context, key=key or "")
        self.history = History()
        self._answer: Answer | None = None  # the thread replaces it, whole
        self._problem = "not asked yet"
        self._began = time.monotonic()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvdepot-poll", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Poll {self.client.server_url}: {self.trouble() or 'well'}>"

    def trouble(self) -> str:
        """Why the depot is not well; empty when it is. Strangers may hear it: the log has the particulars."""
        answer = self._answer
        silent_s = time.monotonic() - (answer.at if answer is not None else self._began)
        if self._problem:
            return f"the depot does not answer: {self._problem}"
        if silent_s > STALE_S:
            return f"the depot has not answered for {silent_s:.1f} s"
        if answer is not None and answer.lag_s > BEHIND_S:
            return f"the depot is behind: its last answer took {answer.lag_s:.1f} s"
        return ""

    def latest(self) -> Answer:
        """What the depot said last. Raises Unavailable where that was too long ago."""
        answer = self._answer
        if answer is None or time.monotonic() - answer.at > STALE_S:
            raise Unavailable(self.trouble() or "the depot has not answered yet")
        return answer

    def _run(self) -> None:
        due = time.monotonic()
        while not self._stopping.is_set():
            problem = ""
            try:
                self._ask()
            except KVDepotError as exc:
                problem = exc.code
                if problem != self._problem:
                    log.info("the depot does not answer the web process: %s", exc)
            except Exception:
                problem = InternalError.code
                if problem != self._problem:
                    log.exception("the web process cannot make sense of the depot's answer")
            self._problem = problem
            due = max(due + POLL_S, time.monotonic())
            self._stopping.wait(due - time.monotonic())

    def _ask(self) -> None:
        began = time.monotonic()
        self.client.ask(wire.Noop(), deadline_s=_ANSWER_S).result(_ANSWER_S)
        lag_s = time.monotonic() - began
        status = read(self.client.ask(wire.Status(), deadline_s=_ANSWER_S).result(_ANSWER_S))
        before, self._answer = self._answer, Answer(status, time.monotonic(), lag_s)
        took_s = self._answer.at - before.at if before is not None else 0.0
        self.history.add(time.time(), measure(before.status if before is not None else None, status, took_s))

    def close(self) -> None:
        """Blocks for some seconds at most."""
        self._stopping.set()
        self.client.close()
        self._thread.join(_ANSWER_S)
        self._context.term()
