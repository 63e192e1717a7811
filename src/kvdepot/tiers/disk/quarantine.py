"""The last few corrupt objects of a disk tier, kept for inspection. They count into the capacity. Any thread."""

from __future__ import annotations

import contextlib
import os
import threading
from functools import partial

from kvdepot.tiers.disk.capacity import Capacity
from kvdepot.tiers.disk.entry import Entry
from kvdepot.tiers.disk.layout import QUARANTINE, path_of, prune

__all__ = ["Quarantine"]

_MOST_FILES = 8
_SHARE = 16
"""Together they take at most 1/16 of the capacity."""


class Quarantine:
    """The files in `quarantine/`."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._claim = capacity.claim
        self._ledger = capacity.ledger
        self._tally = capacity.claim.tally
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        """By path, the oldest first."""

    def entries(self) -> list[Entry]:
        """What is in it, which no eviction removes."""
        with self._lock:
            return list(self._entries.values())

    def scan(self) -> None:
        """Count what an earlier server has left. Raises OSError."""
        with contextlib.suppress(FileNotFoundError), os.scandir(f"{self._claim.root}/{QUARANTINE}") as files:
            found = [(file.stat(follow_symlinks=False), file.path) for file in files]
            with self._lock:
                for info, path in sorted(found, key=lambda pair: pair[0].st_mtime):
                    self._entries[path] = Entry(charge=self._capacity.charge_of(info))
                    self._ledger.note(self._entries[path], is_object=False)

    def add(self, entry: Entry) -> bool:
        """Move the file of an entry that was taken out here; whether that succeeded. `trim` follows."""
        place = path_of(self._claim.root, entry.name)
        path = f"{self._claim.root}/{QUARANTINE}/{entry.name.replace('/', '_')}"
        try:
            self._claim.with_parents(path, partial(os.rename, place, path))
        except OSError:
            return False
        self._tally("quarantined")
        prune(self._claim.root, place)
        with self._lock:
            old = self._entries.pop(path, None)
            self._entries[path] = entry
        if old is not None:
            self._ledger.settle(old)
        return True

    def trim(self) -> None:
        """Remove the oldest files beyond the limits."""
        while True:
            with self._lock:
                size = sum(entry.charge for entry in self._entries.values())
                if len(self._entries) <= _MOST_FILES and size <= self._ledger.capacity_bytes // _SHARE:
                    return
                path = next(iter(self._entries))
                entry = self._entries.pop(path)
            self._capacity.discard(path, [entry])
