"""Upper bounds on the hits of any eviction policy on a trace, by name, like policies. Invariant: a bound is never below
what any policy reaches at that capacity."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from kvdepot.simulate.traces import Trace


def infinite(trace: Trace, capacity_blocks: int = 0) -> int:
    """Hits of an infinite cache: every reference to a block but the first."""
    return len(trace.blocks) - trace.unique


def belady(trace: Trace, capacity_blocks: int) -> int:
    """The maximum hits of a cache of `capacity_blocks` blocks, given the whole trace in advance.

    This is Belady's MIN with bypass (L. A. Belady, "A study of replacement algorithms for a virtual-storage computer",
    1966), reference by reference: of the cached blocks and the new one, it evicts the one whose next use is furthest
    away, and never stores a block without a next use.

    Why no policy exceeds it: whatever a policy stores and evicts for a request could as well happen reference by
    reference, because a request's hits precede its misses; and MIN has the most hits of all such policies. Policies are
    further limited, because they evict only when a request arrives, and pin its hits.

    Why it counts whole prefixes: a block's predecessor in its prompts is always used again earlier than the block
    itself, so MIN never keeps a block longer than its predecessor.
    """
    blocks = trace.blocks
    count = len(blocks)
    following = np.full(count, count, np.int64)  # where each reference's block is used next; `count`: nowhere
    order = np.argsort(blocks, kind="stable")
    again = blocks[order[1:]] == blocks[order[:-1]]
    following[order[:-1][again]] = order[1:][again]

    names = blocks.tolist()
    cached = bytearray(trace.unique)
    furthest: list[int] = []  # -(next use) of cached blocks; entries of past uses sink and never reach the top
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
