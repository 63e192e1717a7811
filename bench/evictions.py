"""Storing a chunk in a full arena, which evicts another: with a quota for each of 8 tenants, beside no quota.

Both indexes have the same size, tenants and chunks, and take turns; the floor is the index without quotas.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from common import Scale, say
from report import Figure, at_most

from kvdepot.core.index.index import Index
from kvdepot.core.index.runs import Run
from kvdepot.eviction import POLICIES
from kvdepot.memory.allocator import PAGE, Allocator
from kvdepot.memory.records import SLOT_BYTES, Records
from kvdepot.protocol.keys import ROOT
from kvdepot.protocol.quotas import Quota
from kvdepot.protocol.wire import Group

__all__ = ["run"]

_TENANTS = 8
_ROUND = 256
"""Chunks stored in one measurement."""
_SLOTS_A_CHUNK = 4
"""Slots of the table of records: enough for a chunk and its part of the namespaces."""


def run(scale: Scale, notes: list[str]) -> list[Figure]:
    """One figure: the time of a store that evicts."""
    say("evictions: with and without quotas")
    pages = scale.evicting_chunks
    quota = Quota(floor_bytes=pages * PAGE // (2 * _TENANTS), cap_bytes=pages * PAGE // 2)
    full = _Full(pages, None), _Full(pages, quota)
    times: tuple[list[float], list[float]] = [], []
    for number in range(-1, scale.eviction_rounds):  # the first warms up
        for which in (0, 1) if number % 2 else (1, 0):
            seconds = full[which].store(_ROUND)
            if number >= 0:
                times[which].append(seconds / _ROUND * 1e6)
    evicted = [account.evicted for account in full[1].index.accounts.all()[1:]]
    notes.append(f"evictions: {min(evicted)} to {max(evicted)} chunks of each of {_TENANTS} tenants with a quota")
    return [at_most(f"a store that evicts, quotas for {_TENANTS} tenants", "us", times[1], times[0], 1.1)]


class _Full:
    """An index that is full of chunks of all tenants."""

    def __init__(self, pages: int, quota: Quota | None) -> None:
        records = Records(memoryview(bytearray(_SLOTS_A_CHUNK * pages * SLOT_BYTES)))
        self.index = Index(Allocator(0, pages * PAGE), POLICIES["lru"], records)
        names = [f"tenant-{number}" for number in range(_TENANTS)]
        for name in names:
            self.index.set_quota(name, quota)
        group, known = Group(0, 1, 0, bytes(32)), self.index.namespaces
        self._namespaces = [known.find_groups("m", 1, 0, [group], name)[0] for name in names]
        for namespace in self._namespaces:
            namespace.live = 1
        self._keys = _keys()
        self.store(pages)

    def store(self, count: int) -> float:
        """Seconds for `count` chunks, one tenant after the other."""
        index, namespaces = self.index, self._namespaces
        keys = [next(self._keys) for _ in range(count)]
        begun = time.perf_counter()
        for number, key in enumerate(keys):
            made = index.reserve(namespaces[number % _TENANTS], 0, Run(key, PAGE, ROOT, 1), 0)
            if not made.chunks:
                raise RuntimeError(f"{made.refusal} where a chunk can be evicted")
            index.seal(made.chunks[0], 0)
            index.events.clear()
        return time.perf_counter() - begun


def _keys() -> Iterator[bytes]:
    number = 0
    while True:
        number += 1
        yield number.to_bytes(32, "little")
