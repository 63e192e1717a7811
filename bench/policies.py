"""Hit rates of `learned` beside LRU and a clairvoyant policy, on traces made to defeat it; its speed and memory.

`bench.py --trace` adds a trace of your own, in any format of replay.py. Hit rates are percentages of block
references; only the speed depends on the machine.
"""

from __future__ import annotations

import hashlib
import time
import tracemalloc
from collections.abc import Callable
from typing import TypeAlias

import traces
from common import Scale, say
from replay import Trace, load, replay
from report import Figure, at_least, below

from kvdepot.eviction import POLICIES, Victim

__all__ = ["run"]

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
    """Hit rates, speed and memory."""
    works = {name: Trace(make(_SEED, scale.policy_requests), name) for name, make in MADE.items()}
    if scale.trace:
        works["the trace given"] = load(scale.trace)
    figures: list[Figure] = []
    points: list[Rates] = []
    for name, trace in works.items():
        sizes = [capacity for capacity in scale.policy_capacities if capacity < trace.unique]
        rates = [_rates(name, trace, capacity, notes) for capacity in sizes]
        worst = min(rates, key=lambda of: of["learned"] - of["lru"])
        found, floor = [worst["learned"]], [worst["lru"]]
        figures.append(at_least(f"learned on {name}, at its worst beside LRU", "%", found, floor, 1, -0.3))
        points += rates
    learned, lru = (sum(of[policy] for of in points) / len(points) for policy in ("learned", "lru"))
    figures.append(at_least("learned on average beside LRU", "%", [learned], [lru], 1, 1.0))
    shares = [_share(of) for of in points if of["belady"] > of["lru"]]
    share = sum(shares) / max(1, len(shares))
    figures.append(at_least("learned, of the distance from LRU to the bound", "%", [share], [100.0], 0.2))
    return [*figures, _speed(scale), *_cost(scale), _memory(scale)]


def _share(rates: Rates) -> float:
    return 100 * (rates["learned"] - rates["lru"]) / (rates["belady"] - rates["lru"])


def _rates(name: str, trace: Trace, capacity: int, notes: list[str]) -> Rates:
    say(f"policies: {name}, {len(trace.blocks)} references to {trace.unique} blocks, room for {capacity}")
    found = {policy: 100 * replay(trace, policy, capacity).hit_rate for policy in ("learned", "lru", "belady")}
    listed = ", ".join(f"{policy} {rate:.1f} %" for policy, rate in found.items())
    notes.append(f"policies: {name}, room for {capacity} of {trace.unique} blocks: {listed}")
    return found


def _speed(scale: Scale) -> Figure:
    """The time that `learned` and the index need for this number of block references."""
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
    return below("1M block references, learned", "s", [seconds["learned"]], [seconds["lru"]], 10)


class _Full:
    """A policy that knows `chunks` chunks, in runs of a length, and evicts before each run that comes."""

    def __init__(self, policy: str, chunks: int, length: int) -> None:
        self.policy = POLICIES[policy]()
        self._length = length
        self._children: dict[int, int] = {}
        self._serial = 0
        for run in self._made(chunks):
            self._insert(run)

    def replace(self, chunks: int) -> float:
        """Microseconds for each of `chunks` new chunks in place of old ones."""
        runs = self._made(chunks)
        begun = time.perf_counter()
        for run in runs:
            for _ in run:
                self._evict()
            self._insert(run)
        return (time.perf_counter() - begun) / len(runs) / self._length * 1e6

    def _made(self, chunks: int) -> list[list[Victim]]:
        runs = []
        for _ in range(chunks // self._length):
            run: list[Victim] = []
            for _ in range(self._length):
                self._serial += 1
                key = hashlib.sha256(str(self._serial).encode()).digest()
                run.append(Victim(key=key, parent=run[-1] if run else None))
            runs.append(run)
        return runs

    def _insert(self, run: list[Victim]) -> None:
        for chunk in run[:-1]:
            self._children[id(chunk)] = 1
        self.policy.insert(run)
        self.policy.add(run[-1])

    def _evict(self) -> None:
        victim = self.policy.victim(lambda chunk: id(chunk) not in self._children)
        assert victim is not None
        victim.gone = True
        before = victim.parent
        self.policy.remove(victim, evicted=True)
        if before is not None:
            del self._children[id(before)]
            self.policy.add(before)


def _cost(scale: Scale) -> list[Figure]:
    """What a new chunk in place of an old one costs, in long runs, and alone."""
    chunks = max(512, scale.simulated_references // 20)
    each: dict[tuple[str, int], float] = {}
    for policy in ("lru", "learned"):
        for length in (16, 1):
            say(f"policies: {chunks} chunks in runs of {length}, {policy}")
            each[policy, length] = _Full(policy, chunks, length).replace(2 * chunks)
    return [
        below("a chunk in runs of 16, learned", "us", [each["learned", 16]], [each["lru", 16]], 5),
        below("a run of 1 chunk, learned", "us", [each["learned", 1]], [each["lru", 1]], 20),
    ]


def _memory(scale: Scale) -> Figure:
    """Bytes per chunk of `learned` where each chunk is a run, which takes most; the floor is LRU's."""
    count = max(500, scale.simulated_references // 50)
    taken: dict[str, float] = {}
    for name in ("lru", "learned"):
        here = tracemalloc.Filter(True, "*/kvdepot/eviction/*")
        tracemalloc.start()
        try:
            full = _Full(name, count, 1)
            full.replace(4 * count)
            found = tracemalloc.take_snapshot().filter_traces([here]).statistics("filename")
        finally:
            tracemalloc.stop()
        taken[name] = sum(each.size for each in found) / count
    return below("memory per chunk, learned", "B", [taken["learned"]], [taken["lru"]], 512)
