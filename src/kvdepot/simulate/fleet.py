"""Traffic replayed through a fleet: hosts with memory, a router before them, and a shared tier behind them.

Called by simulate/capacity.py, tests and the benchmark. It is a model of its own, not the server's index: LRU alone,
whole prefixes alone, small enough for a thousand hosts and ten million requests. With one host and no tier it has
exactly the hits of `replay(trace, "lru", capacity)`.

**A request** goes to one host, which looks up its prompt and stores the rest. If a part was missing, the tier is asked
for it, and what it has follows the prefix in memory; then the tier stores what it did not have (`write=through`). A
prompt that is whole in memory does not reach the tier. Requests do not overlap, and every cache begins empty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvdepot.simulate.memory import Memory
from kvdepot.simulate.routing import ROUTINGS
from kvdepot.simulate.traffic import Ints, Traffic

__all__ = ["Counts", "Fleet", "replay_fleet"]


@dataclass(frozen=True)
class Fleet:
    """What is to be replayed through."""

    hosts: int
    routing: str
    """A name in routing.ROUTINGS."""
    capacity_blocks: int
    """Memory of each host."""
    tier_blocks: int = 0
    """Room in the shared tier; 0 = there is none."""


@dataclass(frozen=True)
class Counts:
    """What happened at each host, in int64[hosts]."""

    requests: Ints
    blocks: Ints
    """Of all prompts."""
    memory_hits: Ints
    """Blocks found in the host's memory."""
    tier_hits: Ints
    """Blocks loaded from the tier."""
    tier_loads: Ints
    """Requests that loaded from the tier."""
    tier_writes: Ints
    """Blocks written to the tier."""


def replay_fleet(traffic: Traffic, fleet: Fleet, progress: Callable[[int], None] | None = None) -> Counts:
    """Send all requests through a fleet whose caches are empty.

    progress: called with the requests that are done, now and then. Blocks for microseconds per request.
    """
    memories = [Memory(fleet.capacity_blocks) for _ in range(fleet.hosts)]
    routing = ROUTINGS[fleet.routing](memories, traffic.trace)
    tier = Memory(fleet.tier_blocks)
    counts = np.zeros((6, fleet.hosts), np.int64)
    for batch in traffic.batches():
        hosts: list[int] = []
        in_memory: list[int] = []
        in_tier: list[int] = []  # blocks of the prompt's beginning that the tier had; -1 = it was not asked
        for host, (runs, sizes, blocks) in zip(routing.hosts(batch), batch, strict=True):
            hits = memories[host].use(runs, sizes, blocks)
            hosts.append(host)
            in_memory.append(hits)
            in_tier.append(tier.use(runs, sizes, blocks) if hits < blocks and tier.capacity else -1)
        counts += _counted(fleet, hosts, batch.blocks, in_memory, in_tier)
        if progress is not None:
            progress(batch.first + len(hosts))
    return Counts(*counts)


def _counted(fleet: Fleet, hosts: list[int], blocks: list[int], in_memory: list[int], in_tier: list[int]) -> Ints:
    """int64[6, hosts]: the fields of `Counts`."""
    size, hits, found = np.array(blocks, np.int64), np.array(in_memory, np.int64), np.array(in_tier, np.int64)
    loaded = np.maximum(found - hits, 0)
    written = np.where(found < 0, 0, np.maximum(np.minimum(size, fleet.tier_blocks) - found, 0))
    rows = (np.ones_like(size), size, hits, loaded, loaded > 0, written)
    return np.array([np.bincount(hosts, row, fleet.hosts) for row in rows]).astype(np.int64)
