"""One trace replayed through the server's own index, allocator and policies, so the hit rates are those of a server.

**A request** is a lookup and a store, as an engine makes them: the longest cached prefix of its blocks is a hit and is
pinned; the rest is reserved, evicting by the policy, and sealed in order; then the pins are released. A block that
finds no room is dropped with all behind it. Requests do not overlap, and generated tokens are not stored. A block is
one page of an `Allocator` without memory behind it, so the capacity is an exact number of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from kvdepot.core.index import matching
from kvdepot.core.index.index import Index
from kvdepot.core.index.runs import Run
from kvdepot.errors import ConfigError
from kvdepot.eviction import POLICIES
from kvdepot.memory.allocator import PAGE, Allocator
from kvdepot.protocol.keys import HASH_BYTES, ROOT
from kvdepot.simulate.bounds import BOUNDS
from kvdepot.simulate.traces import Request, Trace


@dataclass(frozen=True)
class Result:
    policy: str
    capacity_blocks: int
    requests: int
    block_references: int
    hits: int

    @property
    def hit_rate(self) -> float:
        """Hits divided by block references; 0 if there are none."""
        return self.hits / self.block_references if self.block_references else 0.0


def replay(requests: Iterable[Request] | Trace, policy: str, capacity_blocks: int) -> Result:
    """Send requests through an index of `capacity_blocks` blocks that evicts by `policy`, or compute a bound.

    policy: a name in eviction.POLICIES or bounds.BOUNDS; others raise ConfigError.
    """
    trace = requests if isinstance(requests, Trace) else Trace(requests)
    if capacity_blocks < 1:
        raise ConfigError(f"a capacity must be 1 block or more, not {capacity_blocks}")
    if policy in BOUNDS:
        hits = BOUNDS[policy](trace, capacity_blocks)
    elif policy in POLICIES:
        hits = _hits(trace, Index(Allocator(0, capacity_blocks * PAGE), POLICIES[policy]))
    else:
        raise ConfigError(f"unknown policy {policy!r}; available: {', '.join((*POLICIES, *BOUNDS))}")
    return Result(policy, capacity_blocks, len(trace), len(trace.blocks), hits)


def _hits(trace: Trace, index: Index) -> int:
    namespace = index.namespaces.find("trace", 1, 0, b"", 1)
    # Keys like those of real chunks, because a policy may tell them apart by 32 bits of a hash.
    noise = blake3(b"kvdepot simulate").digest(length=HASH_BYTES * max(trace.unique, 1))
    keys = np.frombuffer(noise, np.uint64).reshape(-1, HASH_BYTES // 8)
    hits = 0
    for blocks in trace:
        hashes = keys[blocks].tobytes()
        pin = matching.match(namespace, hashes)
        index.hold(pin.chunks)
        index.use(pin.chunks)
        hits += pin.matched
        start = pin.matched * HASH_BYTES
        parent = hashes[start - HASH_BYTES : start] if start else ROOT
        run = Run(hashes[start:], PAGE, parent, pin.matched + 1)
        for chunk in index.reserve(namespace, 0, run, 0).chunks:
            index.seal(chunk, 0)
        index.release(pin.chunks)
        index.take_events()
    return hits
