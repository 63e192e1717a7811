"""A tier for tests, which keeps objects in a dict, and whose calls fail as a test says (`inject`).

Thread-safe. Every injected fault is counted, so that a test can check that it happened.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from kvdepot.errors import TierError
from kvdepot.tiers import Blob, TierUsage
from kvdepot.tiers.codec import fill
from kvdepot.tiers.rules import Rules

FAULTS = {
    "down": "a call raises TierError, with nothing done",
    "late": "a call raises TierError, with everything done",
    "hide": "find answers False for an object, and read None",
    "promise": "find answers True for an object that may not exist",
    "refuse": "write answers False, with nothing done",
    "lose": "write answers True, with nothing done",
    "corrupt": "read returns an object with one bit changed",
    "truncate": "read returns an object without its end, and its shorter size",
    "swell": "read answers that an object is larger than the buffers",
}
"""Faults by name. The rate of a fault is the fraction of calls, or of objects in calls, that it affects."""


class Area:
    """An arena without a file."""

    def __init__(self, size: int) -> None:
        self.bytes = np.zeros(size, np.uint8)

    def ensure(self, offset: int, size: int) -> bool:
        return True


class MemoryTier:
    """Keeps objects in a dict. With `capacity_bytes`, it evicts the oldest ones. It enforces times to live alone.

    The same seed, rates and calls give the same faults.
    """

    def __init__(self, capacity_bytes: int | None = None, seed: int = 0) -> None:
        self.capacity_bytes = capacity_bytes
        self.objects: dict[str, bytes] = {}
        self.born: dict[str, int] = {}
        self.counters: Counter[str] = Counter()
        self.injected: Counter[str] = Counter()
        self.is_counted = True  # else it does not know yet how many objects it has
        self._bytes = 0
        self._rates: dict[str, float] = {}
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<MemoryTier {len(self.objects)} objects, {self._bytes} bytes, injected {dict(self.injected)}>"

    def inject(self, **rates: float) -> None:
        """Set the rates of all faults, e.g. `inject(corrupt=0.1, hide=0.1)`; those not named get 0."""
        assert rates.keys() <= FAULTS.keys(), rates
        self._rates = rates

    def _strikes(self, fault: str) -> bool:
        rate = self._rates.get(fault, 0.0)
        with self._lock:
            struck = rate > 0 and self._random.random() < rate
            self.injected[fault] += struck
        return struck

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        if self._strikes("down"):
            raise TierError("injected: the store is unavailable")
        yield
        if self._strikes("late"):
            raise TierError("injected: the store's answer was lost")

    def attach(self, memory: Sequence[memoryview]) -> None:
        """Nothing to prepare."""

    def find(self, names: Sequence[str]) -> list[bool]:
        with self._call(), self._lock:
            found = [name in self.objects for name in names]
        return [self._strikes("promise") or (there and not self._strikes("hide")) for there in found]

    def read(self, blobs: Sequence[Blob]) -> list[int | None]:
        with self._call(), self._lock:
            found = [self.objects.get(blob.name) for blob in blobs]
        return [self._fill(blob, data) for blob, data in zip(blobs, found, strict=True)]

    def _fill(self, blob: Blob, data: bytes | None) -> int | None:
        if data is None or self._strikes("hide"):
            return None
        size = len(data)
        if size > blob.size:
            return size
        if self._strikes("corrupt"):
            place = self._random.randrange(size)
            data = data[:place] + bytes([data[place] ^ 1 << self._random.randrange(8)]) + data[place + 1 :]
        fill(blob.buffers, [data])
        if self._strikes("truncate"):
            return self._random.randrange(size)
        return blob.size + 1 if self._strikes("swell") else size

    def write(self, blobs: Sequence[Blob]) -> list[bool]:
        refused = [self._strikes("refuse") for _ in blobs]
        lost = [self._strikes("lose") for _ in blobs]
        with self._call():
            return [
                not no and (gone or self.put(blob.name, b"".join(blob.buffers), blob.born))
                for blob, no, gone in zip(blobs, refused, lost, strict=True)
            ]

    def put(self, name: str, data: bytes, born: int = 0) -> bool:
        """Write one object, without faults."""
        with self._lock:
            if self.capacity_bytes is not None:
                if len(data) > self.capacity_bytes:
                    return False
                self._drop(name)
                while self._bytes + len(data) > self.capacity_bytes:
                    self._drop(next(iter(self.objects)))
                    self.counters["evicted"] += 1
            self._drop(name)
            self.objects[name] = data
            self.born[name] = born
            self._bytes += len(data)
        return True

    def _drop(self, name: str) -> None:
        self._bytes -= len(self.objects.pop(name, b""))

    def remove(self, names: Sequence[str]) -> None:
        with self._call(), self._lock:
            for name in names:
                self._drop(name)

    def forget(self, salt: str, space: str) -> int:
        with self._call(), self._lock:
            gone = [name for name in self.objects if name.startswith(salt) and name[33:65].startswith(space)]
            for name in gone:
                self._drop(name)
        return len(gone)

    def enforce(self, rules: Rules, wall: float) -> bool:
        with self._call(), self._lock:
            for name in list(self.objects):
                ttl_s, born = rules.ttl_of(name), self.born.get(name, 0)
                if ttl_s and born and born + ttl_s <= wall:
                    self._drop(name)
                    self.counters["expired"] += 1
        return False

    def usage(self) -> TierUsage:
        with self._call(), self._lock:
            counts = (len(self.objects), self._bytes) if self.is_counted else (None, None)
            return TierUsage(*counts, self.capacity_bytes, dict(self.counters))

    def close(self) -> None:
        """The objects stay."""
