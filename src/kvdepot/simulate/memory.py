"""The memory of a host, or a tier, in a fleet: an LRU cache of prefixes, as small as it can be.

Called by simulate/fleet.py; routing.py reads it. Invariant: after any requests it holds the same blocks as the server's
index with the policy `lru`. Each request makes all blocks of its prompt the most recently used ones, its tail less
recently than its head, so the least recently used block is always the end of a prefix.
"""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["Memory"]


class Memory:
    """Room for `capacity` blocks."""

    __slots__ = ("_holders", "_host", "_used", "capacity", "held")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: OrderedDict[int, int] = OrderedDict()
        """Blocks held of each run, from its first; the least recently used run first."""
        self._used = 0
        self._host = 0
        self._holders: dict[int, list[int]] | None = None

    def __repr__(self) -> str:
        return f"<Memory {self._used} of {self.capacity} blocks, {len(self.held)} runs>"

    def watch(self, host: int, holders: dict[int, list[int]]) -> None:
        """From now on, note `host` in `holders` with each run of which something is held."""
        self._host, self._holders = host, holders

    def use(self, runs: list[int], sizes: list[int], blocks: int) -> int:
        """Look up a prompt and store the rest of it; the blocks that were hit, from its first.

        runs, sizes: its runs and their blocks; blocks: their sum. What does not fit is its end.
        """
        held = self.held
        hits = known = 0
        for run, size in zip(runs, sizes, strict=True):
            found = held.get(run)
            if found is None:
                break
            hits += found
            known += 1
            if found < size:
                break
        for run, size in zip(reversed(runs), reversed(sizes), strict=True):
            held[run] = size
            held.move_to_end(run)
        if hits < blocks:
            self._used += blocks - hits
            if self._holders is not None:
                for run in runs[known:]:
                    self._holders.setdefault(run, []).append(self._host)
            if self._used > self.capacity:
                self._evict()
        return hits

    def _evict(self) -> None:
        over = self._used - self.capacity
        self._used = self.capacity
        held, holders = self.held, self._holders
        while over:
            run, found = held.popitem(last=False)
            if found > over:
                held[run] = found - over
                held.move_to_end(run, last=False)
                return
            over -= found
            if holders is not None:
                hosts = holders[run]
                hosts.remove(self._host)
                if not hosts:
                    del holders[run]
