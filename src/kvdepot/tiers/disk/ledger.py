"""What a disk tier holds, and which object is evicted first: names and bytes only. Any thread; no system calls.

Invariant: every byte in the store is counted, from before it is written until after it is gone. So there are three ways
to be counted: as bytes reserved for a write (`reserve`), as an object (`enter`), and as an object that was taken out
(`take`, `victim`, `forget`), which is counted until `settle`, or until its last reader is done.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

from kvdepot.eviction import POLICIES, Victim

__all__ = ["Entry", "Ledger"]


class Entry(Victim, gc=False):
    """One object."""

    name: str = ""
    """Empty if it is not an object; the policy does not know it then."""
    charge: int = 0
    """Bytes it takes."""
    dated: float = 0.0
    """When it was last used according to the store: seconds since 1970."""
    readers: int = 0
    settled: bool = False
    """Its bytes are free once its last reader is done."""


class Ledger:
    """Objects of a tier of `capacity_bytes`."""

    def __init__(self, capacity_bytes: int, policy: str) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.ranked = False
        """Whether earlier objects are in order of use; until then only reads are allowed."""
        self._lock = threading.RLock()
        self._policy = POLICIES[policy]()
        self._entries: dict[str, Entry] = {}

    def __repr__(self) -> str:
        return f"<Ledger {len(self)} objects, {self.used_bytes} of {self.capacity_bytes} bytes>"

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    # -- what an earlier server has left

    def note(self, entry: Entry, is_object: bool = True) -> None:
        """Count what was there at the start."""
        with self._lock:
            self.used_bytes += entry.charge
            if is_object:
                self._entries[entry.name] = entry

    def rank(self) -> None:
        """Everything that was there is noted: order it by its last use."""
        with self._lock:
            for entry in sorted(self._entries.values(), key=lambda entry: entry.dated):
                self._insert(entry)
            self.ranked = True

    def _insert(self, entry: Entry) -> None:
        entry.key = entry.name.encode()
        self._policy.insert(entry)
        self._policy.add(entry)

    # -- bytes

    def reserve(self, size: int) -> bool:
        """Reserve bytes; whether there were as many."""
        with self._lock:
            if self.used_bytes + size > self.capacity_bytes:
                return False
            self.used_bytes += size
            return True

    def free(self, size: int) -> None:
        """Undo `reserve`."""
        with self._lock:
            assert 0 <= size <= self.used_bytes, f"{size} of {self.used_bytes} bytes freed"
            self.used_bytes -= size

    # -- objects

    def enter(self, entry: Entry) -> None:
        """Reserved bytes have become an object. It replaces the one of its name, whose file is gone by now."""
        with self._lock:
            if (old := self.take(entry.name)) is not None:
                self.settle(old)
            self._entries[entry.name] = entry
            self._insert(entry)

    def keep(self, entry: Entry) -> None:
        """Undo `take`."""
        with self._lock:
            entry.gone = False
            self._entries[entry.name] = entry
            self._policy.add(entry)

    def hold(self, name: str) -> Entry | None:
        """Begin to read an object, which counts as a use; `release` follows. None if there is no such object."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is not None:
                entry.readers += 1
                if self.ranked:
                    self._policy.use(entry)
            return entry

    def release(self, entry: Entry) -> None:
        """A reader is done."""
        with self._lock:
            entry.readers -= 1
            if entry.readers:
                return
            if entry.settled:
                self.free(entry.charge)
            elif self.ranked and not entry.gone:
                self._policy.add(entry)

    def take(self, name: str) -> Entry | None:
        """Take an object out; its bytes are counted until `settle`. None if there is no such object."""
        with self._lock:
            entry = self._entries.pop(name, None)
            if entry is not None:
                entry.gone = True
            return entry

    def lose(self, entry: Entry) -> bool:
        """The file of an object is not there: take it out and settle it. False if it was taken out before."""
        with self._lock:
            if entry.gone:
                return False
            self.take(entry.name)
            self.settle(entry)
            return True

    def victim(self) -> Entry | None:
        """Take out the object to evict. None if there is none without readers."""
        with self._lock:
            entry = self._policy.victim(_is_unread)
            if entry is None:
                return None
            assert isinstance(entry, Entry) and self._entries.pop(entry.name) is entry
            entry.gone = True
            return entry

    def forget(self, salt: str, space: str, but: Collection[str] = ()) -> list[Entry]:
        """Take out all objects whose names begin so (kvdepot.tiers.Tier.forget).

        but: `salt/space` of objects to keep.
        """
        with self._lock:
            names = [name for name in self._entries if name.startswith(salt) and name.startswith(space, 33)]
            taken = [self.take(name) for name in names if name[:65] not in but]
            return [entry for entry in taken if entry is not None]

    def settle(self, entry: Entry, evicted: bool = False) -> None:
        """The file of what was taken out is gone; readers may still have it open."""
        with self._lock:
            if self.ranked and entry.name:
                self._policy.remove(entry, evicted)
            entry.settled = True
            if not entry.readers:
                self.free(entry.charge)


def _is_unread(entry: Victim) -> bool:
    assert isinstance(entry, Entry)
    return not entry.readers
