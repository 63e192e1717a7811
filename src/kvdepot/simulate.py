from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from kvdepot.evict import POLICIES
from kvdepot.index import Index
from kvdepot.keys import HASH_BYTES
from kvdepot.space import PAGE, Space
from kvdepot.traces import Request, Trace

__all__ = ["Result", "replay"]


@dataclass(frozen=True)
class Result:
    """How a policy did on a trace at a capacity."""

    policy: str
    capacity_blocks: int
    requests: int
    block_references: int
    hits: int

    @property
    def hit_rate(self) -> float:
        return self.hits / self.block_references if self.block_references else 0.0


def replay(requests: Iterable[Request] | Trace, policy: str, capacity_blocks: int) -> Result:
    trace = requests if isinstance(requests, Trace) else Trace(requests)
    index = Index(Space(0, capacity_blocks * PAGE), POLICIES[policy]())
    space = index.namespace("trace", 1, 0, b"", 1)
    # Keys look like those of real chunks, for a policy may sample by them.
    keys = np.frombuffer(
        blake3(b"kvdepot simulate").digest(length=HASH_BYTES * max(trace.unique, 1)), np.uint64
    ).reshape(-1, 4)
    hits = 0
    for blocks in trace:
        hashes = keys[blocks].tobytes()
        pin = index.match(space, hashes)
        hits += pin.matched
        index.hold(pin.chunks)
        start = pin.matched * HASH_BYTES
        parent = hashes[start - HASH_BYTES : start] if start else b"root"
        stored = []
        position = pin.matched
        for at in range(start, len(hashes), HASH_BYTES):
            key = hashes[at : at + HASH_BYTES]
            position += 1
            chunk = index.reserve(space, 0, key, parent, position, PAGE)
            if chunk is None:
                break
            stored.append(chunk)
            parent = key
        for chunk in stored:
            index.seal(chunk, 0)
        index.touch(stored)
        index.release(pin.chunks)
    return Result(policy, capacity_blocks, len(trace), len(trace.blocks), hits)
