"""Seconds to replay the traffic of a thousand hosts, beside what one server's index needs for as many requests."""

from __future__ import annotations

import time

from common import Scale, say
from report import Figure, at_most

from kvdepot.simulate.fleet import Fleet, replay_fleet
from kvdepot.simulate.replay import replay
from kvdepot.simulate.traces import Trace
from kvdepot.simulate.traffic import Traffic
from kvdepot.testing import traces

__all__ = ["run"]

_SEED = 29
_CAPACITY_BLOCKS = 1024
"""Of each host: 64 GiB of Llama 3.1 8B."""


def run(scale: Scale, notes: list[str]) -> list[Figure]:
    """The slowest routing, with a tier; the index replays one copy of the trace, and its time is multiplied."""
    trace = Trace(traces.chat(_SEED, scale.fleet_requests))
    begun = time.perf_counter()
    replay(trace, "lru", _CAPACITY_BLOCKS)
    floor_s = (time.perf_counter() - begun) * scale.fleet_copies
    seconds: dict[str, float] = {}
    for routing in ("random", "session", "prefix"):
        say(f"fleets: {scale.fleet_hosts} hosts, {routing}, {len(trace) * scale.fleet_copies} requests")
        fleet = Fleet(scale.fleet_hosts, routing, _CAPACITY_BLOCKS, scale.fleet_hosts * _CAPACITY_BLOCKS)
        begun = time.perf_counter()
        replay_fleet(Traffic(trace, scale.fleet_copies), fleet)
        seconds[routing] = time.perf_counter() - begun
    notes.append("fleets: " + ", ".join(f"{routing} {taken:.1f} s" for routing, taken in seconds.items()))
    return [
        at_most("1,000 hosts, 1M requests, a tier, the slowest routing", "s", [max(seconds.values())], [floor_s], 0.5)
    ]
