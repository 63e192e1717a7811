"""The status over time, for charts: a point per second, and one per ten seconds for older times. Its size is bounded.

Written by poll.py's thread, read by the event loop.
"""

from __future__ import annotations

import math
import threading
from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence

import msgspec

from kvdepot.protocol.metrics import BOUNDS_S, Latency, percentile
from kvdepot.protocol.status import Status

__all__ = ["Figures", "History", "measure"]

_SECONDS, _TENS = 900, 2000
"""Number of points kept, for each interval."""
_TEN = 10
_SPARE = 64
"""The oldest points are dropped together, once there are this many too many."""
_MOST_SERIES = 64
_NAN = float("nan")
_EXACT = frozenset({"asked_tokens", "saved_tokens", "saved_prefill_s", "saved_requests", "boot"})
"""Series that are never rounded, and of which a point of ten seconds has the latest value, not the mean: the boot, and
its counters, which must not fall, because that looks like a restart."""
_BOOT_DIGITS = 12
"""Hex digits of a boot id that are used; page/series.js has the same number."""
_LOST = ("dropped_chunks", "failed_chunks", "expired_chunks")
"""Counters of chunks that were not kept; page/series.js has the same list."""


class Figures(msgspec.Struct, frozen=True):
    """All points, oldest first: their times (seconds since 1970), and the values of each series; null = no value."""

    times_s: list[float]
    series: dict[str, list[float | None]]


class _Points:
    """Columns of equal length."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.times = array("d")
        self.columns: dict[str, array[float]] = {}

    def add(self, time_s: float, values: Mapping[str, float]) -> None:
        if (past := bisect_left(self.times, time_s)) < len(self.times):
            for column in (self.times, *self.columns.values()):
                del column[past:]
        for name in values:
            if name not in self.columns and len(self.columns) < _MOST_SERIES:
                self.columns[name] = array("d", [_NAN]) * len(self.times)
        self.times.append(time_s)
        for name, column in self.columns.items():
            column.append(values.get(name, _NAN))
        if len(self.times) >= self._most + _SPARE:
            for column in (self.times, *self.columns.values()):
                del column[: len(column) - self._most]


class History:
    """The points of the last hours."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds = _Points(_SECONDS)
        self._tens = _Points(_TENS)
        self._ten: list[Mapping[str, float]] = []

    def __repr__(self) -> str:
        return f"<History of {len(self._seconds.times)} seconds and {len(self._tens.times)} tens of seconds>"

    def add(self, time_s: float, values: Mapping[str, float]) -> None:
        """Add a point, about a second after the last. If the clock was set back, removes the points after `time_s`."""
        values = {name: value if name in _EXACT else float(f"{value:.6g}") for name, value in values.items()}
        with self._lock:
            self._seconds.add(time_s, values)
            self._ten.append(values)
            if len(self._ten) == _TEN:
                names = {name for point in self._ten for name in point}
                self._tens.add(time_s, {name: _mean(name, self._ten) for name in names})
                self._ten.clear()

    def total(self, name: str, range_s: float) -> float:
        """The sum of a series of rates over the last `range_s` seconds (15 minutes at most)."""
        with self._lock:
            times, column = self._seconds.times, self._seconds.columns.get(name)
            if column is None or not times:
                return 0.0
            first = max(bisect_left(times, times[-1] - range_s), 1)
            return sum(
                column[i] * (times[i] - times[i - 1]) for i in range(first, len(times)) if not math.isnan(column[i])
            )

    def figures(self) -> Figures:
        """All points: those of ten seconds for times before the first second, then those of seconds."""
        with self._lock:
            first = self._seconds.times[0] if self._seconds.times else math.inf
            older = sum(time_s < first for time_s in self._tens.times)
            times = [*self._tens.times[:older], *self._seconds.times]
            series: dict[str, list[float | None]] = {}
            for name, column in self._seconds.columns.items():
                before = self._tens.columns.get(name)
                old: Sequence[float] = before[:older] if before is not None else [_NAN] * older
                series[name] = [None if math.isnan(value) else value for value in (*old, *column)]
        return Figures(times, series)


def _mean(name: str, points: Sequence[Mapping[str, float]]) -> float:
    known = [value for point in points if not math.isnan(value := point.get(name, _NAN))]
    if known and name in _EXACT:
        return known[-1]
    return float(f"{sum(known) / len(known):.6g}") if known else _NAN


def boot_number(boot: str) -> float:
    """A number that identifies a run of the server: 48 bits of its boot id, which a double holds exactly."""
    return float(int(boot[:_BOOT_DIGITS] or "0", 16))


def measure(before: Status | None, now: Status, took_s: float) -> dict[str, float]:
    """One point of every series. before: the status `took_s` ago, if there was one.

    Rates need two statuses of one boot, because a restart resets all counters.
    """
    point = {
        "boot": boot_number(now.boot),
        "asked_tokens": float(now.tokens.asked),
        "saved_tokens": float(now.saved.tokens),
        "saved_prefill_s": now.saved.prefill_s,
        "saved_requests": float(_requests_that_saved(now)),
        "used_bytes": float(now.used_bytes),
    }
    for tier in now.tiers:
        point[f"tier_bytes.{tier.name}"] = float(tier.bytes) if tier.bytes is not None else _NAN
    if before is None or before.boot != now.boot or took_s <= 0:
        return point
    point["stored_bytes_s"] = (now.stored_bytes - before.stored_bytes) / took_s
    point["retrieved_bytes_s"] = (now.retrieved_bytes - before.retrieved_bytes) / took_s
    point["evicted_chunks_s"] = (now.evicted_chunks - before.evicted_chunks) / took_s
    for name in _LOST:
        point[f"{name}_s"] = (now.counters.get(name, 0) - before.counters.get(name, 0)) / took_s
    asked = now.tokens.asked - before.tokens.asked
    point["reuse_rate"] = _share(now.tokens.reused - before.tokens.reused, asked)
    point["hit_rate"] = _share(now.tokens.found - before.tokens.found, asked)
    if now.tokens.bound is not None:
        point["ceiling"] = _share(now.tokens.bound - (before.tokens.bound or 0), asked)
    for kind in ("Lookup", "Retrieve"):
        buckets = _since(before.latencies, now.latencies, kind)
        for share in (0.5, 0.99):
            point[f"{kind.lower()}_p{share * 100:.0f}_s"] = percentile(buckets, share)
    return point


def _share(part: int, whole: int) -> float:
    return min(part / whole, 1.0) if whole > 0 else _NAN


def _requests_that_saved(status: Status) -> int:
    """Requests that did not have to compute some of their prompt; 0 if the server does not count them."""
    return sum(sum(each.counts) for each in status.histograms if each.name == "saved_seconds")


def _since(before: Sequence[Latency], now: Sequence[Latency], kind: str) -> list[int]:
    """Requests of a kind between two statuses, by bucket."""
    old = next((each.buckets for each in before if each.request == kind), [0] * (len(BOUNDS_S) + 1))
    new = next((each.buckets for each in now if each.request == kind), old)
    return [b - a for a, b in zip(old, new, strict=True)]
