"""The objects of a call, their memory, and the groups in which the library can take them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from kvdepot.tiers import Blob
from kvdepot.tiers.mooncake.library import Matrix
from kvdepot.tiers.mooncake.membership import Membership
from kvdepot.tiers.tally import Tally

__all__ = ["PREFIX", "Batch", "PoolObject", "Staging", "address_of", "memory_of", "objects_of"]

PREFIX = "kvdepot/"
"""The beginning of our objects' names; others may use the pool, too."""


@dataclass(slots=True)
class PoolObject:
    """One object of a call: its key in the pool, and the memory for it."""

    index: int
    """Its place among the answers."""
    key: str
    spans: list[tuple[int, int]]
    """(address, bytes), none adjacent to the one before."""
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = sum(size for _, size in self.spans)

    def cut(self, size: int) -> PoolObject:
        """The first `size` bytes of its memory."""
        spans = []
        for address, length in self.spans:
            if size <= 0:
                break
            spans.append((address, min(length, size)))
            size -= length
        return PoolObject(self.index, self.key, spans)

    def gather(self, target: int) -> None:
        """Copy its memory to an address."""
        for address, size in self.spans:
            ctypes.memmove(target, address, size)
            target += size

    def scatter(self, source: int) -> None:
        """Copy from an address to its memory."""
        for address, size in self.spans:
            ctypes.memmove(address, source, size)
            source += size


class Batch:
    """Objects for one call of the library."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._weight = 0
        self.objects: dict[str, PoolObject] = {}
        """Objects by key: of two with the same key in a call, the library fills one and answers for both (0.3.13)."""

    def is_full(self, entry: PoolObject, weight: int) -> bool:
        return bool(self.objects) and (self._weight + weight > self._most or entry.key in self.objects)

    def add(self, entry: PoolObject, weight: int) -> None:
        self._weight += weight
        self.objects[entry.key] = entry

    def take(self) -> list[PoolObject]:
        """All of it; the group is empty then."""
        taken = list(self.objects.values())
        self.objects = {}
        self._weight = 0
        return taken


class Staging:
    """Memory for bytes elsewhere that the transport cannot access. Allocated when it is first needed.

    Any thread; one at a time.
    """

    def __init__(self, pool: Membership, least_bytes: int, registers: bool, tally: Tally) -> None:
        """registers: whether the transport must know the area."""
        self._pool = pool
        self._least_bytes = least_bytes
        self._registers = registers
        self._tally = tally
        self._lock = threading.Lock()
        self._area = np.zeros(0, np.uint8)
        """Used only with _lock held."""

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


def objects_of(blobs: Sequence[Blob]) -> list[PoolObject]:
    """The objects of a call, adjacent buffers joined."""
    return [PoolObject(index, PREFIX + blob.name, _spans(blob)) for index, blob in enumerate(blobs)]


def address_of(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


def memory_of(objects: Sequence[PoolObject]) -> tuple[list[str], Matrix, Matrix]:
    """Keys, addresses and sizes, as the library takes them."""
    addresses = [[address for address, _ in entry.spans] for entry in objects]
    return [entry.key for entry in objects], addresses, [[size for _, size in entry.spans] for entry in objects]


def _spans(blob: Blob) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    for buffer in blob.buffers:
        address, size = address_of(buffer), buffer.nbytes
        if spans and spans[-1][0] + spans[-1][1] == address:
            spans[-1] = (spans[-1][0], spans[-1][1] + size)
        else:
            spans.append((address, size))
    return spans
