"""Lists that the server makes on request, prefixes and leases. app.py has one object for each kind, on its threads.

Invariant: however many ask, the server gets one request of a kind at a time, and the same one again only after
`_FRESH_S`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from kvdepot.errors import Busy

_FRESH_S = 2.0
_MOST_WAITING = 8
"""HTTP requests that wait for an answer; each occupies a thread."""
_MOST_KEPT = 16

T = TypeVar("T")


class CachedLists:
    """The latest answers of one server for one kind of list, by question."""

    def __init__(self) -> None:
        self._waiting = threading.BoundedSemaphore(_MOST_WAITING)
        self._asking = threading.Lock()
        self._kept: dict[object, tuple[float, Any]] = {}

    def get(self, question: object, ask: Callable[[], T]) -> T:
        if not self._waiting.acquire(blocking=False):
            raise Busy(f"{_MOST_WAITING} requests for this list are waiting: retry later")
        try:
            with self._asking:
                asked, answer = self._kept.pop(question, (0.0, None))
                if not asked or time.monotonic() - asked >= _FRESH_S:
                    asked, answer = time.monotonic(), ask()
                while len(self._kept) >= _MOST_KEPT:
                    del self._kept[next(iter(self._kept))]
                self._kept[question] = asked, answer
                found: T = answer
                return found
        finally:
            self._waiting.release()
