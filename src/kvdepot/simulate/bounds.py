"""What no eviction policy can exceed on a trace. Pure; called by simulate/replay.py like a policy, by name.

The one law: a bound is never below what any policy reaches at that capacity, however it chooses.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from kvdepot.simulate.traces import Trace

__all__ = ["BOUNDS", "belady", "infinite"]


def infinite(trace: Trace, capacity_blocks: int = 0) -> int:
    """Hits of a cache that forgets nothing: every reference to a block that was there before."""
    return len(trace.blocks) - trace.unique


def belady(trace: Trace, capacity_blocks: int) -> int:
    """The most hits that `capacity_blocks` blocks of cache can have on a trace that is known beforehand.

    Computed is Belady's MIN with bypass (L. A. Belady, "A study of replacement algorithms for a virtual-storage
    computer", 1966), one reference after the other: of the cached blocks and the new one, that goes whose next
    use is furthest; a block without a next use is never stored.

    Why nothing exceeds it: what a policy stores and evicts for a request, it could as well do reference by reference,
    for its hits come before its misses; and of all ways to do that, MIN has the most hits. It ignores that evictions
    need a request to come first and that its hits are pinned, so policies may be kept further below.

    Why it is not too high for prefixes: the block before another in its prompts is always used again earlier than
    that, hence MIN never keeps a block longer than what is before it. What it counts are hits of whole prefixes.
    """
    blocks = trace.blocks
    count = len(blocks)
    following = np.full(count, count, np.int64)  # where each reference's block is used next; `count`: nowhere
    order = np.argsort(blocks, kind="stable")
    again = blocks[order[1:]] == blocks[order[:-1]]
    following[order[:-1][again]] = order[1:][again]

    names = blocks.tolist()
    cached = bytearray(trace.unique)
    furthest: list[int] = []  # -(next use) of what is cached; what was used meanwhile sinks and is never looked at
    room = capacity_blocks
    hits = 0
    for block, use in zip(names, following.tolist(), strict=True):
        hits += cached[block]
        if use == count:
            room += cached[block]
            cached[block] = 0
        elif cached[block]:
            heapq.heappush(furthest, -use)
        elif room:
            room -= 1
            cached[block] = 1
            heapq.heappush(furthest, -use)
        elif -furthest[0] > use:
            cached[names[-heapq.heapreplace(furthest, -use)]] = 0
            cached[block] = 1
    return hits


BOUNDS: dict[str, Callable[[Trace, int], int]] = {"infinite": infinite, "belady": belady}
