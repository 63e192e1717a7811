"""The server's prefix families and leases, for HTTP: asked for when wanted, unlike the status, and kept for a moment.

Used by app.py on its threads. Invariant: however many ask, the server gets one request at a time, and the same one
again only after `_FRESH_S`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from kvdepot.client import admin
from kvdepot.client.socket import Client
from kvdepot.errors import Busy
from kvdepot.protocol.leases import LeaseStatus
from kvdepot.protocol.prefixes import Prefix

__all__ = ["Prefixes"]

_FRESH_S = 2.0
_MOST_WAITING = 8
"""HTTP requests that wait for an answer; each occupies a thread."""
_MOST_KEPT = 16
"""Answers to different questions that are kept."""


class Prefixes:
    """Answers of one server."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._waiting = threading.BoundedSemaphore(_MOST_WAITING)
        self._asking = threading.Lock()
        self._kept: dict[object, tuple[float, list[Any]]] = {}

    def __repr__(self) -> str:
        return f"<Prefixes {len(self._kept)} answers>"

    def get(self, model: str, sort: str, most: int) -> list[Prefix]:
        """The families, as of the last two seconds; see admin.prefixes, also for errors. Blocks. Raises Busy if too
        many wait."""
        return self._limited((model, sort, most), lambda: admin.prefixes(self._client, model, sort, most))

    def leases(self) -> list[LeaseStatus]:
        """The leases, as of the last two seconds. Blocks. Raises as `get` does."""
        return self._limited("leases", lambda: admin.leases(self._client))

    def _limited(self, asked: object, ask: Callable[[], list[Any]]) -> list[Any]:
        if not self._waiting.acquire(blocking=False):
            raise Busy(f"{_MOST_WAITING} requests for lists are waiting: retry later")
        try:
            with self._asking:
                return self._get(asked, ask)
        finally:
            self._waiting.release()

    def _get(self, asked: object, ask: Callable[[], list[Any]]) -> list[Any]:
        if asked in self._kept and time.monotonic() - self._kept[asked][0] < _FRESH_S:
            return self._kept[asked][1]
        found = ask()
        self._kept.pop(asked, None)
        while len(self._kept) >= _MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[asked] = time.monotonic(), found
        return found
