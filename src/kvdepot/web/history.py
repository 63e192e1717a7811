"""The status over time, for charts: a point per second, and one per ten seconds for older times. Its size is bounded.

A point has counters as they stood and percentiles since the point before. Written by poll.py's thread, read by others.
"""

from __future__ import annotations

import threading
from collections import deque
from math import isnan
from typing import TypeAlias

import msgspec

from kvdepot.protocol.counters import SERVER
from kvdepot.protocol.figures import figures
from kvdepot.protocol.metrics import BOUNDS_S, percentile
from kvdepot.protocol.status import Status

_SECONDS, _TENS = 900, 2000
"""Number of points kept, for each interval."""
_TEN = 10
_LOST = tuple(counted.name for counted in SERVER if counted.where == "Memory")
"""Counters of chunks that memory lost or did not take."""
_KEPT = [figure for figure in figures(Status) if figure.kind != "gauge"]
"""Figures that a point has, under the names of their metrics."""
_NONE = [0] * (len(BOUNDS_S) + 1)

Point: TypeAlias = dict[str, float]
"""Values by name, without those that are unknown. `time_s`: seconds since 1970. `boot`: identifies the server's run."""


class TimeSeries(msgspec.Struct, frozen=True):
    """All points, oldest first: their times (seconds since 1970), and the values of each series; null = no value."""

    times_s: list[float]
    series: dict[str, list[float | None]]


class History:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: deque[Point] = deque(maxlen=_SECONDS)
        self._tens: deque[Point] = deque(maxlen=_TENS)
        self._last: Status | None = None
        self._tenth: Status | None = None  # the status of the last point of ten seconds
        self._since_tenth = 0

    def add(self, time_s: float, status: Status) -> None:
        """Add a point, about a second after the last. If the clock was set back, removes the points after `time_s`."""
        with self._lock:
            for points in (self._seconds, self._tens):
                while points and points[-1]["time_s"] >= time_s:
                    points.pop()
            self._seconds.append(measure(self._last, status, time_s))
            self._last = status
            self._since_tenth += 1
            if self._since_tenth == _TEN:
                self._tens.append(measure(self._tenth, status, time_s))
                self._tenth, self._since_tenth = status, 0

    def latest(self) -> Point:
        with self._lock:
            return self._seconds[-1] if self._seconds else {}

    def increase(self, counter: str, range_s: float) -> float:
        """The rise of a counter of this boot in the last `range_s` seconds (15 minutes at most)."""
        last = self.latest()
        with self._lock:
            recent = [point for point in self._seconds if point["time_s"] >= last["time_s"] - range_s]
        first = next((point for point in recent if point["boot"] == last["boot"]), last)
        return last.get(counter, 0.0) - first.get(counter, 0.0)

    def series(self) -> TimeSeries:
        """All points: one per ten seconds for times before the first second, then one per second."""
        with self._lock:
            first = self._seconds[0]["time_s"] if self._seconds else 0.0
            points = [*(point for point in self._tens if point["time_s"] < first), *self._seconds]
        names = sorted({name for point in points for name in point} - {"time_s"})
        return TimeSeries(
            [point["time_s"] for point in points], {name: [point.get(name) for point in points] for name in names}
        )


def measure(before: Status | None, now: Status, time_s: float) -> Point:
    """The point of a status; percentiles are of the requests since the status `before` of the same boot."""
    point = {
        "time_s": time_s,
        "boot": float(int(now.boot[:12] or "0", 16)),  # 48 bits, which a double holds exactly
        "saved_requests": sum(sum(each.counts) for each in now.histograms if each.name == "saved_seconds"),
        **{figure.metric: figure.of(now) for figure in _KEPT},
        **{name: now.counters.get(name, 0) for name in _LOST},
    }
    point |= {f"tier_bytes.{tier.name}": tier.bytes for tier in now.tiers if tier.bytes is not None}
    if before is None or before.boot != now.boot:
        return point
    old, new = ({each.request: each.buckets for each in status.latencies} for status in (before, now))
    for kind in ("Lookup", "Retrieve"):
        counts = [b - a for a, b in zip(old.get(kind, _NONE), new.get(kind, _NONE), strict=True)]
        for part in (0.5, 0.99):
            if not isnan(value := percentile(counts, part)):
                point[f"{kind.lower()}_p{part * 100:.0f}_s"] = value
    return point
