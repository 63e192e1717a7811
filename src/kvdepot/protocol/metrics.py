"""What the server counts while it works: how long requests take, and what has happened lately. Increments only.

`Latencies` and `Journal` are server/loop.py's and core/report.py's, on the deciding thread; what they hold is rendered
by others, elsewhere, from a Status (protocol/status.py), `percentile` too. The one law: to count costs a microsecond at
most, and what is kept has a bound.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

import msgspec

__all__ = ["BOUNDS_S", "Event", "Journal", "Latencies", "Latency", "percentile"]

BOUNDS_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
"""Upper ends of the buckets that times fall into, inclusive; one more is for what took longer."""
_MOST_EVENTS = 100
_MOST_TEXT = 200


class Latency(msgspec.Struct):
    """Times of one kind of request, from its receipt to its answer."""

    request: str
    count: int = 0
    errors: int = 0
    sum_s: float = 0.0
    buckets: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    """Requests in each bucket alone; see BOUNDS_S."""


class Latencies:
    """Requests under way, and how long those took that have been answered."""

    def __init__(self) -> None:
        self._kinds: dict[str, Latency] = {}
        self._asked: dict[bytes, dict[bytes, tuple[str, float]]] = {}  # by client and number: kind, when

    def __repr__(self) -> str:
        return f"<Latencies of {sum(kind.count for kind in self._kinds.values())} requests>"

    def begin(self, client: bytes, number: bytes, kind: str, now: float) -> None:
        """A request has come in."""
        self._asked.setdefault(client, {})[number] = kind, now

    def end(self, client: bytes, number: bytes, failed: bool, now: float) -> None:
        """It is answered. What never began (it could not be read, say) is not counted."""
        asked = self._asked.get(client, {})
        kind, began = asked.pop(number, ("", 0.0))
        if not asked:  # or those who never say who they are would stay for ever
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
        """What this client still waits for will not be answered."""
        self._asked.pop(client, None)

    def figures(self) -> list[Latency]:
        """One a kind of request that was ever answered, by name."""
        return [self._kinds[kind] for kind in sorted(self._kinds)]


def percentile(buckets: Sequence[int], share: float) -> float:
    """The time (s) within which this share of requests was answered, as even within a bucket; NaN: of none.

    Of what took longer than the last bound nobody knows how much longer: that bound.
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
    """Something that people may want to know of: when (seconds since 1970), its kind, and a sentence."""

    wall_s: float
    kind: str
    text: str


class Journal:
    """The latest events, oldest first."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=_MOST_EVENTS)

    def __repr__(self) -> str:
        return f"<Journal of {len(self._events)} events>"

    def note(self, wall_s: float, kind: str, text: str) -> None:
        """Keep an event; the oldest goes when there are too many."""
        self._events.append(Event(wall_s, kind, text[:_MOST_TEXT]))

    def events(self) -> list[Event]:
        """All that are kept."""
        return list(self._events)
