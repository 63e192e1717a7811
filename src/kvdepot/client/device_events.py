"""Requests that must not be sent before an event has happened: what the GPU was asked to do before, mostly.

Used by client/worker.py (events of its caller) and client/socket.py (a GPU's whole work). The one law: each request is
let go or fails, once, whatever its event does, and nobody waits here who does not want to.

Events are asked again and again, all of them in each round, so that a retrieve never waits behind a later store's
event. Whoever polls for outcomes asks too (`look`): what an engine's own thread sends needs no hand-over between
threads. A thread of our own sees to the rest. Rejected: blocking in the driver until an event happens. That
waits for one event at a time, has no deadline and no end when the engine shuts down, and burns a core for every event
that its maker did not mark as blocking.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvdepot.errors import BadRequest, DeadlineExceeded, KVDepotError, Unavailable

__all__ = ["EVENT_S", "DeviceEvent", "EventQueue", "happened"]

log = logging.getLogger(__name__)

EVENT_S = 60.0
"""A request whose event has not happened by then fails."""
_MAX_WAITING = 4096
_FIRST_PAUSE_S = 0.0001
_LONGEST_PAUSE_S = 0.001
"""Between two rounds of our thread: it doubles while nothing happens. Each round takes the GIL from the engine."""
_STOP_S = 5.0


class DeviceEvent(Protocol):
    """What a request may wait for: a CUDA event, or anything else that can be asked whether it has happened."""

    def query(self) -> bool: ...


def happened(event: DeviceEvent | None) -> bool:
    """Whether an event (None: nothing to wait for) has happened.

    Raises BadRequest for what is no event, KVDepotError for one that failed: a CUDA event does once its GPU is lost.
    """
    try:
        return event is None or bool(event.query())
    except KVDepotError:
        raise
    except AttributeError as exc:
        raise BadRequest(f"{event!r:.80} is no event: it has no query()") from exc
    except Exception as exc:
        raise KVDepotError(f"the event failed: {exc!r}") from exc


@dataclass(slots=True, eq=False)
class _Waiting:
    event: DeviceEvent | None
    go: Callable[[], None]
    fail: Callable[[KVDepotError], None]
    born: float = field(default_factory=time.monotonic)


class EventQueue:
    """Requests that wait for events. `stop` it; what still waits fails then."""

    def __init__(self, name: str, prepare: Callable[[], None] = lambda: None) -> None:
        """name: of its thread, which begins with the first request and calls `prepare` first."""
        self._name = name
        self._prepare = prepare
        self._numbers = itertools.count()
        self._waiting: dict[int, _Waiting] = {}  # added to under the lock; whoever takes one out ends it
        self._woken = threading.Event()
        self._lock = threading.Lock()  # of the next two: one thread is started, and nothing is added after `stop`
        self._stopping = False
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<EventQueue {self._name}, {len(self._waiting)} waiting>"

    def put(self, event: DeviceEvent | None, go: Callable[[], None], fail: Callable[[KVDepotError], None]) -> None:
        """Call `go` once `event` has happened, or `fail` with the reason why it will not. Never blocks.

        Both are called on our thread or on one that looks.
        """
        refusal = self._add(_Waiting(event, go, fail))
        if refusal is not None:
            fail(refusal)

    def _add(self, waiting: _Waiting) -> KVDepotError | None:
        """Take it in; or why not."""
        with self._lock:
            if self._stopping:
                return Unavailable("this client is closed")
            if len(self._waiting) >= _MAX_WAITING:
                return DeadlineExceeded(f"{_MAX_WAITING} requests already wait for their events")
            self._waiting[next(self._numbers)] = waiting
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._woken.set()
        return None

    def look(self) -> None:
        """Let go what may go. Blocks only where an event's `query` does. Several threads may be at it.

        No lock keeps them apart: who waits for the GIL with it would keep the others from what they could do at once.
        """
        # Asked once each, for what waits now: the answer may not cover what is added meanwhile.
        # A copy is made at once; going through the dictionary itself fails where another thread adds to it.
        waiting_now = self._waiting.copy()
        answers: dict[int, bool | KVDepotError] = {}
        for number, waiting in waiting_now.items():
            answer = answers.get(id(waiting.event))
            if answer is None:
                answer = answers[id(waiting.event)] = _ask(waiting.event)
            if answer is False and time.monotonic() - waiting.born > EVENT_S:
                answer = DeadlineExceeded(f"the event did not happen within {EVENT_S:g} s")
            if answer is not False and self._waiting.pop(number, None) is not None:
                _end(waiting, answer)

    def stop(self) -> None:
        """Fail what waits and end the thread. Blocks 5 s at most, for an event that does not answer. Safe twice."""
        with self._lock:
            self._stopping = True
            thread = self._thread
        self._woken.set()
        if thread is not None:
            thread.join(_STOP_S)
        for number in list(self._waiting):
            waiting = self._waiting.pop(number, None)
            if waiting is not None:
                _end(waiting, Unavailable("this client is closed"))

    def _run(self) -> None:
        try:
            self._prepare()
        except Exception:  # events say themselves what they cannot do
            log.exception("could not set up the device-event thread")
        pause = _FIRST_PAUSE_S
        while not self._stopping:
            before = len(self._waiting)
            self.look()
            if not self._waiting:
                self._woken.wait()
                pause = _FIRST_PAUSE_S
            elif len(self._waiting) < before or self._woken.wait(pause):
                pause = _FIRST_PAUSE_S
            else:
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            self._woken.clear()


def _ask(event: DeviceEvent | None) -> bool | KVDepotError:
    try:
        return happened(event)
    except KVDepotError as exc:
        return exc


def _end(waiting: _Waiting, answer: bool | KVDepotError) -> None:
    try:
        if isinstance(answer, KVDepotError):
            waiting.fail(answer)
        else:
            waiting.go()
    except KVDepotError as exc:
        waiting.fail(exc)
    except Exception as exc:  # nobody may be left waiting, and others wait behind this one
        log.exception("a request that waited for a device event failed")
        waiting.fail(KVDepotError(f"it could not go on after its event: {exc!r}"))
