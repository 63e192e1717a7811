"""A tier's own counters (`Usage.counters`). Any thread."""

from __future__ import annotations

import threading
from collections import Counter

__all__ = ["Tally"]


class Tally:
    """`tally("evicted")` counts one; the names are those of `protocol.counters.TIER`."""

    def __init__(self, *names: str) -> None:
        """names: counters that are shown from the start, at 0."""
        self._lock = threading.Lock()
        self._counters = Counter(dict.fromkeys(names, 0))

    def __repr__(self) -> str:
        return ", ".join(f"{name} {count}" for name, count in self.counts().items())

    def __call__(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counters[name] += count

    def counts(self) -> dict[str, int]:
        """A copy."""
        with self._lock:
            return dict(self._counters)
