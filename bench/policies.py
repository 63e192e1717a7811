"""Hit rates of `adaptive` beside the best of the simpler policies, on traces made to defeat it; and their speed.

`bench.py --trace` adds a trace of your own, in any format of `kvdepot simulate`. Hit rates are percentages of block
references; only the speed depends on the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

from common import Scale, say
from report import Figure, at_least, below

from kvdepot.eviction import POLICIES
from kvdepot.simulate.replay import replay
from kvdepot.simulate.traces import Trace, load
from kvdepot.testing import traces

__all__ = ["run"]

SIMPLER = ("lru", "s3fifo")
MADE: dict[str, Callable[[int, int], traces.Prompts]] = {
    "scans": traces.scan_heavy,
    "a loop": traces.loop,
    "agents": traces.agents,
    "a shifting mix": traces.shifting,
}
"""Traces meant to defeat a policy that learns."""
_SEED = 23

Rates: TypeAlias = dict[str, float]
"""Hit rate by policy, in percent."""


def run(scale: Scale, notes: list[str]) -> list[Figure]:
    """Hit rates and speed of all policies."""
    if "adaptive" not in POLICIES:
        notes.append("policies: left out, there is no `adaptive` yet")
        return []
    works = {name: Trace(make(_SEED, scale.policy_requests), name) for name, make in MADE.items()}
    if scale.trace:
        works["the trace given"] = load(scale.trace)
    figures: list[Figure] = []
    points: list[Rates] = []
    for name, trace in works.items():
        sizes = [capacity for capacity in scale.policy_capacities if capacity < trace.unique]
        rates = [_rates(name, trace, capacity, notes) for capacity in sizes]
        worst = min(rates, key=lambda of: of["adaptive"] - _best(of))
        found, best = [worst["adaptive"]], [_best(worst)]
        figures.append(at_least(f"adaptive on {name}, at its worst beside the best", "%", found, best, 1, -0.3))
        points += rates
    adaptive, lru = (sum(of[policy] for of in points) / len(points) for policy in ("adaptive", "lru"))
    figures.append(at_least("adaptive on average beside LRU", "%", [adaptive], [lru], 1, 1.0))
    return [*figures, _speed(scale)]


def _rates(name: str, trace: Trace, capacity: int, notes: list[str]) -> Rates:
    say(f"policies: {name}, {len(trace.blocks)} references to {trace.unique} blocks, room for {capacity}")
    found = {policy: 100 * replay(trace, policy, capacity).hit_rate for policy in ("adaptive", *SIMPLER, "infinite")}
    listed = ", ".join(f"{policy} {rate:.1f} %" for policy, rate in found.items())
    notes.append(f"policies: {name}, room for {capacity} of {trace.unique} blocks: {listed}")
    return found


def _best(rates: Rates) -> float:
    return max(rates[policy] for policy in SIMPLER)


def _speed(scale: Scale) -> Figure:
    """Seconds that the slowest policy needs for this number of block references."""
    made: list[tuple[float, list[int]]] = []
    left = scale.simulated_references
    for request in traces.shifting(_SEED):
        made.append(request)
        left -= len(request[1])
        if left <= 0:
            break
    trace = Trace(made)
    seconds: dict[str, float] = {}
    for policy in POLICIES:
        say(f"policies: {len(trace.blocks)} references, {policy}")
        begun = time.perf_counter()
        replay(trace, policy, max(1, trace.unique // 8))
        seconds[policy] = time.perf_counter() - begun
    slowest = max(seconds, key=lambda policy: seconds[policy])
    return below("1M block references, the slowest policy", "s", [seconds[slowest]], [seconds["lru"]], 10)
