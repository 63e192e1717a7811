"""Latencies of requests, and events: core/ records them on the deciding thread, and a status contains them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import msgspec

__all__ = ["BOUNDS_S", "COMMANDS", "ENGINES", "INTERNAL", "Event", "Latencies", "Latency", "percentile"]

BOUNDS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
"""Upper bounds of the latency buckets in seconds, inclusive; one more bucket has the longer latencies."""
INTERNAL = frozenset({"Hello", "Prove", "Noop", "ChunkSize", "GetStatus"})
"""Requests of the protocol itself and of observers of the server. No prompt waits for them, so their latencies are not
measured."""
ENGINES = ("Complete", "EndSession", "Lookup", "Register", "Retrieve", "Store")
"""Requests of running engines. In Prometheus their series begin at 0, and alerts are about them."""
COMMANDS = frozenset(
    {"Count", "Drop", "EndLease", "EndQuarantine", "ForgetChunks", "Inspect"}
    | {"ListLeases", "SetQuota", "TakeLease", "Why"}
)
"""Requests that people make by commands and the web page. They count as an engine's only if an engine makes them."""


class Latency(msgspec.Struct):
    """Latencies of one kind of request, from receipt to answer."""

    request: str
    count: int = 0
    errors: int = 0
    sum_s: float = 0.0
    buckets: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    """The number of requests in each bucket alone; see BOUNDS_S."""


class Latencies:
    """Requests in progress, and the latencies of those that were answered."""

    def __init__(self) -> None:
        self._kinds: dict[str, Latency] = {}
        self._asked: dict[bytes, dict[bytes, tuple[str, float]]] = {}  # by client and request id: kind, start

    def begin(self, client: bytes, number: bytes, kind: str, now: float) -> None:
        """Note a received request. INTERNAL requests are not counted."""
        if kind in INTERNAL:
            return
        self._asked.setdefault(client, {}).setdefault(number, (kind, now))  # it may be sent again

    def end(self, client: bytes, number: bytes, failed: bool, now: float) -> None:
        """Note that a request was answered. Requests without a `begin` (INTERNAL, or not decoded) are not counted."""
        asked = self._asked.get(client, {})
        kind, began = asked.pop(number, ("", 0.0))
        if not asked:  # otherwise clients that never complete the handshake would stay forever
            self._asked.pop(client, None)
        if not kind:
            return
        latency = self._kinds.get(kind)
        if latency is None:
            latency = self._kinds[kind] = Latency(kind)
        took = now - began
        latency.count += 1
        latency.errors += failed
        latency.sum_s += took
        latency.buckets[bisect_left(BOUNDS_S, took)] += 1

    def gone(self, client: bytes) -> None:
        self._asked.pop(client, None)

    def figures(self) -> list[Latency]:
        """The latencies of each kind of request that was ever answered, sorted by name."""
        return [self._kinds[kind] for kind in sorted(self._kinds)]


def percentile(buckets: Sequence[int], share: float) -> float:
    """The seconds within which this share of requests was answered; NaN: there were none.

    Interpolates linearly within a bucket. Times beyond the last bound count as that bound.
    """
    wanted = share * sum(buckets)
    below, low = 0, 0.0
    for high, count in zip(BOUNDS_S, buckets, strict=False):  # buckets has one more
        if count and below + count >= wanted:
            return low + (high - low) * (wanted - below) / count
        below += count
        low = high
    return BOUNDS_S[-1] if sum(buckets) else math.nan


class Event(msgspec.Struct, frozen=True):
    """An event for operators: when (seconds since 1970), its kind, and a sentence."""

    wall_s: float
    kind: str
    text: str
