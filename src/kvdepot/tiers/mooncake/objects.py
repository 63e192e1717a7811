"""The objects of a call, their memory, and the groups in which the library can take them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvdepot.tiers import Blob, Tally
from kvdepot.tiers.mooncake.library import Matrix
from kvdepot.tiers.mooncake.membership import Membership, address_of

PREFIX = "kvdepot/"
"""The beginning of our objects' names; others may use the pool, too."""
MOST_SPANS = 256
"""The most pieces of memory in one call; objects with more pieces are staged."""


@dataclass(slots=True)
class PoolObject:
    """One object of a call: its key in the pool, and the memory for it."""

    index: int
    key: str
    spans: list[tuple[int, int]]
    """(address, bytes), none adjacent to the one before."""
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = sum(size for _, size in self.spans)

    def cut(self, size: int) -> PoolObject:
        spans = []
        for address, length in self.spans:
            if size <= 0:
                break
            spans.append((address, min(length, size)))
            size -= length
        return PoolObject(self.index, self.key, spans)

    def gather(self, target: int) -> None:
        for address, size in self.spans:
            ctypes.memmove(target, address, size)
            target += size

    def scatter(self, source: int) -> None:
        for address, size in self.spans:
            ctypes.memmove(address, source, size)
            source += size


class Batch(NamedTuple):
    """Objects for one call of the library, no two with the same key: the library (0.3.13) would fill only one and
    answer for both. stages: whether the bytes move through the staging memory."""

    objects: list[PoolObject]
    stages: bool


def batches_of(
    objects: list[PoolObject], is_direct: Callable[[PoolObject], bool], staged_bytes: int
) -> Iterator[Batch]:
    """Objects in batches of at most MOST_SPANS pieces of memory, or of about `staged_bytes` if they are staged."""
    open_batches: dict[bool, dict[str, PoolObject]] = {False: {}, True: {}}  # by `stages`, then by key
    weights = {False: 0, True: 0}
    for entry in objects:
        stages = not is_direct(entry)
        batch, weight, most = open_batches[stages], len(entry.spans), MOST_SPANS
        if stages:
            weight, most = entry.size, staged_bytes
        if batch and (weights[stages] + weight > most or entry.key in batch):
            yield Batch(list(batch.values()), stages)
            batch.clear()
            weights[stages] = 0
        weights[stages] += weight
        batch[entry.key] = entry
    yield from (Batch(list(batch.values()), stages) for stages, batch in open_batches.items() if batch)


class Staging:
    """Memory in place of memory that the transport cannot access, allocated when it is first needed. Any thread; one at
    a time."""

    def __init__(self, pool: Membership, least_bytes: int, tally: Tally) -> None:
        self._pool = pool
        self._least_bytes = least_bytes
        self._tally = tally
        self._lock = threading.Lock()
        self._area = np.zeros(0, np.uint8)
        """Used only with _lock held."""

    @contextmanager
    def placed(self, batch: Batch) -> Iterator[list[PoolObject]]:
        """The objects of a batch with the memory that the library is to use. Other staged batches wait meanwhile.
        Raises TierError."""
        if not batch.stages or not batch.objects:
            yield batch.objects
            return
        total = sum(entry.size for entry in batch.objects)
        with self._lock:
            if total > len(self._area):
                area = np.zeros(max(total, self._least_bytes), np.uint8)
                self._pool.register(area.data)
                self._pool.unregister(self._area.data)
                self._area = area
            at = address_of(self._area.data)
            moved = []
            for entry in batch.objects:
                moved.append(PoolObject(entry.index, entry.key, [(at, entry.size)]))
                at += entry.size
            self._tally("staged_bytes", total)
            yield moved


def objects_of(blobs: Sequence[Blob]) -> list[PoolObject]:
    """The objects of a call, adjacent buffers joined."""
    return [PoolObject(index, PREFIX + blob.name, _spans(blob)) for index, blob in enumerate(blobs)]


def memory_of(objects: Sequence[PoolObject]) -> tuple[list[str], Matrix, Matrix]:
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
