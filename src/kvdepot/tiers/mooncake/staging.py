"""Staging memory, for bytes in memory that the transport does not know. Any thread, one at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kvdepot.tiers.mooncake.membership import Membership
from kvdepot.tiers.mooncake.objects import PoolObject, address_of
from kvdepot.tiers.tally import Tally

__all__ = ["Staging"]


class Staging:
    """An area that is allocated when it is first needed."""

    def __init__(self, pool: Membership, least_bytes: int, registers: bool, tally: Tally) -> None:
        """registers: whether the transport must know the area."""
        self._pool = pool
        self._least_bytes = least_bytes
        self._registers = registers
        self._tally = tally
        self._lock = threading.Lock()
        self._area = np.zeros(0, np.uint8)
        """Used by whoever holds _lock."""

    @contextmanager
    def staged(self, objects: list[PoolObject]) -> Iterator[list[PoolObject]]:
        """The same objects with memory in the area. Blocks others meanwhile. Raises TierError."""
        total = sum(entry.size for entry in objects)
        with self._lock:
            if total > len(self._area):
                self._enlarge(total)
            at = address_of(self._area.data)
            moved = []
            for entry in objects:
                moved.append(PoolObject(entry.index, entry.key, [(at, entry.size)]))
                at += entry.size
            self._tally("staged_bytes", total)
            yield moved

    def _enlarge(self, size: int) -> None:
        area = np.zeros(max(size, self._least_bytes), np.uint8)
        if self._registers:
            self._pool.register(address_of(area.data), len(area))
            if len(self._area):
                self._pool.unregister(address_of(self._area.data))
        self._area = area
