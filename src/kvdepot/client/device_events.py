"""Requests that must not be sent before an event has happened: mostly, before the GPU has done its queued work.

Used by client/worker.py (events of its caller) and client/contract.py (all work queued on a GPU). Invariant: each
request is sent or failed, once, whatever its event does.

Events are polled, all of them in each round, so that no retrieve waits behind a later store's event; also by who polls
for outcomes (`poll`), so that what the engine's own thread sends needs no switch of threads. Rejected: blocking in the
driver until an event happens, one at a time, without a deadline or an end when the engine shuts down.
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

log = logging.getLogger(__name__)

EVENT_S = 60.0
"""A request fails if its event has not happened after this long."""
_MAX_WAITING = 4096
_FIRST_PAUSE_S = 0.0001
_LONGEST_PAUSE_S = 0.001
"""The pause between two rounds of the thread doubles while nothing happens: each takes the GIL from the engine."""
_STOP_S = 5.0


class DeviceEvent(Protocol):
    """An event that a request may wait for: CUDA's, or any object whose `query` says whether it has happened."""

    def query(self) -> bool: ...


def happened(event: DeviceEvent | None) -> bool:
    """Whether an event (None: nothing to wait for) has happened. Raises BadRequest for an object that is no event,
    KVDepotError for one that failed, as a CUDA event does once its GPU is lost."""
    try:
        return event is None or bool(event.query())
    except KVDepotError:
        raise
    except AttributeError as exc:
        raise BadRequest(f"{event!r:.80} is not an event: it has no query()") from exc
    except Exception as exc:
        raise KVDepotError(f"the event failed: {exc!r}") from exc


@dataclass(slots=True, eq=False)
class _HeldRequest:
    event: DeviceEvent | None
    go: Callable[[], None]
    fail: Callable[[KVDepotError], None]
    born: float = field(default_factory=time.monotonic)


class EventQueue:
    """Requests that wait for events. `stop` ends it and fails those that still wait."""

    def __init__(self, name: str, prepare: Callable[[], None] = lambda: None) -> None:
        """name: of its thread, which starts with the first request and calls `prepare` first."""
        self._name = name
        self._prepare = prepare
        self._numbers = itertools.count()
        self._waiting: dict[int, _HeldRequest] = {}  # added to under the lock; the code that removes a request ends it
        self._woken = threading.Event()
        self._lock = threading.Lock()  # guards the next two: one thread is started, and nothing is added after `stop`
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()  # set when the thread ends: two threads must not join one in CPython 3.11

    def put(self, event: DeviceEvent | None, go: Callable[[], None], fail: Callable[[KVDepotError], None]) -> None:
        """Call `go` once `event` has happened, or `fail` with the error, on the queue's thread or one that calls
        `poll`. Never blocks."""
        refusal: KVDepotError | None = None
        with self._lock:
            if self._stopping:
                refusal = Unavailable("this client is closed")
            elif len(self._waiting) >= _MAX_WAITING:
                refusal = DeadlineExceeded(f"{_MAX_WAITING} requests already wait for their events")
            else:
                self._waiting[next(self._numbers)] = _HeldRequest(event, go, fail)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()
                self._woken.set()
        if refusal is not None:
            fail(refusal)

    def poll(self) -> None:
        """Send the requests whose events have happened. Blocks only where an event's `query` does. Several threads may
        call it at once; no lock keeps them apart, because a thread that waited for the GIL while holding it would keep
        the others from sending."""
        # Each event is queried once, for the requests that wait now: the answer may not cover those added meanwhile.
        # The copy is atomic; iterating over the dictionary itself fails where another thread adds to it.
        waiting_now = self._waiting.copy()
        answers: dict[int, bool | KVDepotError] = {}
        for number, waiting in waiting_now.items():
            answer = answers.get(id(waiting.event))
            if answer is None:
                try:
                    answer = happened(waiting.event)
                except KVDepotError as exc:
                    answer = exc
                answers[id(waiting.event)] = answer
            if answer is False and time.monotonic() - waiting.born > EVENT_S:
                answer = DeadlineExceeded(f"the event did not happen within {EVENT_S:g} s")
            if answer is not False and self._waiting.pop(number, None) is not None:
                _end(waiting, answer)

    def stop(self) -> None:
        """Fail the requests that wait, and end the thread. Blocks 5 s at most, for an event that blocks. Safe twice."""
        with self._lock:
            self._stopping = True
            thread = self._thread
        self._woken.set()
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            self._ended.wait(_STOP_S)
        for number in list(self._waiting):
            waiting = self._waiting.pop(number, None)
            if waiting is not None:
                _end(waiting, Unavailable("this client is closed"))

    def _run(self) -> None:
        try:
            self._prepare()
        except Exception:  # the events will fail themselves, with a reason
            log.exception("could not set up the device-event thread")
        pause = _FIRST_PAUSE_S
        try:
            while not self._stopping:
                before = len(self._waiting)
                self.poll()
                if not self._waiting:
                    self._woken.wait()
                    pause = _FIRST_PAUSE_S
                elif len(self._waiting) < before or self._woken.wait(pause):
                    pause = _FIRST_PAUSE_S
                else:
                    pause = min(2 * pause, _LONGEST_PAUSE_S)
                self._woken.clear()
        finally:
            self._ended.set()


def _end(waiting: _HeldRequest, answer: bool | KVDepotError) -> None:
    try:
        if isinstance(answer, KVDepotError):
            waiting.fail(answer)
        else:
            waiting.go()
    except KVDepotError as exc:
        waiting.fail(exc)
    except BaseException as exc:  # the request must end, and others wait behind it
        log.exception("a request that waited for a device event failed")
        waiting.fail(KVDepotError(f"could not be sent after its event: {exc!r}"))
