"""Remembers the chunks that left memory lately, and when. A reader of the index's events; trails.py asks it.

Invariant: at most twice `_MOST` chunks are remembered.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvdepot.core.index.chunk import Namespace
from kvdepot.core.index.events import IndexEvent, Reason, Removed
from kvdepot.protocol.status import Status

_MOST = 1 << 15
"""The number of latest chunks that are remembered; up to as many chunks before these are, too."""


class Departures:
    def __init__(self) -> None:
        self._left: dict[int, int] = {}  # by `_short`: twice the seconds since 1970, plus one if evicted
        self._left_before: dict[int, int] = {}

    def read(self, events: Sequence[IndexEvent], wall: int) -> None:
        """Note when chunks left memory that had been stored."""
        for event in events:
            if type(event) is Removed and event.reason is not Reason.FAILED:
                left = wall * 2 + (event.reason is Reason.EVICTED)
                self._left[_short(event.chunk.namespace, event.chunk.key)] = left
        if len(self._left) > _MOST:
            self._left_before, self._left = self._left, {}

    def fill(self, status: Status) -> None:
        """It has no figures."""

    def of(self, namespace: Namespace, key: bytes) -> tuple[str, int | None]:
        """Why a chunk is not in memory (absent: not known), and when it left (seconds since 1970)."""
        short = _short(namespace, key)
        left = self._left.get(short, self._left_before.get(short))
        return ("absent", None) if left is None else ("evicted" if left % 2 else "removed", left // 2)


def _short(namespace: Namespace, key: bytes) -> int:
    return hash(key) ^ namespace.number
