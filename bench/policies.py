"""Hit rates of `adaptive` beside the best of the simpler policies, and a clairvoyant one, on traces made to defeat it;
its speed and memory.

`bench.py --trace` adds a trace of your own, in any format of `kvdepot simulate`. Hit rates are percentages of block
references; only the speed depends on the machine.
"""

from __future__ import annotations

import hashlib
import time
import tracemalloc
from collections.abc import Callable
from typing import TypeAlias

from common import Scale, say
from report import Figure, at_least, below

from kvdepot.eviction import POLICIES, Victim, slots
from kvdepot.eviction.adaptive import Adaptive
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
    shares = [_share(of) for of in points if of["belady"] > of["lru"]]
    share = sum(shares) / max(1, len(shares))
    figures.append(at_least("adaptive, of the distance from LRU to the bound", "%", [share], [100.0], 0.2))
    return [*figures, *_speed(scale), _ghost(scale)]


def _share(rates: Rates) -> float:
    return 100 * (rates["adaptive"] - rates["lru"]) / (rates["belady"] - rates["lru"])


def _rates(name: str, trace: Trace, capacity: int, notes: list[str]) -> Rates:
    say(f"policies: {name}, {len(trace.blocks)} references to {trace.unique} blocks, room for {capacity}")
    found = {
        policy: 100 * replay(trace, policy, capacity).hit_rate
        for policy in ("adaptive", *SIMPLER, "belady", "infinite")
    }
    listed = ", ".join(f"{policy} {rate:.1f} %" for policy, rate in found.items())
    notes.append(f"policies: {name}, room for {capacity} of {trace.unique} blocks: {listed}")
    return found


def _best(rates: Rates) -> float:
    return max(rates[policy] for policy in SIMPLER)


def _speed(scale: Scale) -> list[Figure]:
    """The time that the slowest policy needs for this number of block references, and `adaptive` for one."""
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
    each = {policy: 1e6 * seconds[policy] / len(trace.blocks) for policy in ("adaptive", "lru")}
    return [
        below("1M block references, the slowest policy", "s", [seconds[slowest]], [seconds["lru"]], 10),
        below("a block reference, adaptive", "us", [each["adaptive"]], [each["lru"]], 20),
    ]


def _ghost(scale: Scale) -> Figure:
    """Bytes that `adaptive` allocates for a key whose chunk is gone; the floor is the key."""
    count = max(500, scale.simulated_references // 50)
    keys = [hashlib.sha256(str(number).encode()).digest() for number in range(4 * count)]
    chunks = [Victim(key=key) for key in keys[:count]]
    ghosts = tracemalloc.Filter(True, slots.__file__)  # what else the policy has belongs to chunks that exist
    tracemalloc.start()
    try:
        policy = Adaptive()
        for chunk in chunks:
            policy.insert(chunk)
            policy.add(chunk)
        before = tracemalloc.take_snapshot().filter_traces([ghosts])
        for key in keys[count:]:
            victim = policy.victim(lambda chunk: True)
            assert victim is not None
            victim.gone = True
            policy.remove(victim, evicted=True)
            victim.gone, victim.key = False, key
            policy.insert(victim)
            policy.add(victim)
        after = tracemalloc.take_snapshot().filter_traces([ghosts])
    finally:
        tracemalloc.stop()
    grown = sum(change.size_diff for change in after.compare_to(before, "filename"))
    return below("a ghost, adaptive", "B", [grown / policy.ghosts], [32.0], 64)
