"""What a disk tier holds, whose it is, and which object goes first: names and bytes only. Any thread; no system calls.

Invariant: every byte in the store is counted, from before it is written until after it is gone. So there are three ways
to be counted: as bytes reserved for a write (`reserve`), as an object (`enter`), and as an object that was taken out
(`take`, `victim`, `excess`, `expired`, `forget`), which is counted until `settle`, or until its last reader is done.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable

from kvdepot.eviction import POLICIES
from kvdepot.tiers.disk.accounts import Accounts
from kvdepot.tiers.disk.entry import Entry
from kvdepot.tiers.disk.expiry import Expiry
from kvdepot.tiers.rules import Rules

__all__ = ["Ledger"]


class Ledger:
    """Objects of a tier of `capacity_bytes`."""

    def __init__(self, capacity_bytes: int, policy: str, rules: Rules | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.ranked = False
        """Whether earlier objects are in order of use; until then only reads are allowed."""
        self._lock = threading.RLock()
        self._rules = rules or Rules()
        self._accounts = Accounts(POLICIES[policy], self._rules.quotas)
        self._expiry = Expiry()
        self._expiry.set(self._rules, ())
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
            self._charge(entry.owner, entry.charge)
            if is_object:
                self._put(entry)

    def rank(self) -> None:
        """Everything that was there is noted: order it by its last use."""
        with self._lock:
            for entry in sorted(self._entries.values(), key=lambda entry: entry.dated):
                self._accounts.rank(entry)
            self.ranked = True

    def set_rules(self, rules: Rules) -> None:
        """Change quotas and times to live. Objects above a cap, or expired now, stay until they are taken out.

        If other owners have quotas than before, the policies begin anew, with all objects in the order of their dates.
        That, or another time to live, takes some microseconds an object.
        """
        with self._lock:
            if rules == self._rules:
                return
            self._rules = rules
            self._expiry.set(rules, self._entries.values())
            if not self._accounts.set(rules.quotas):
                self._accounts.open(rules.quotas)
                if self.ranked:
                    self.rank()

    # -- bytes

    def _charge(self, owner: str, size: int) -> None:
        self.used_bytes += size
        self._accounts.charge(owner, size)

    def reserve(self, size: int, owner: str) -> bool:
        """Reserve bytes; whether there were as many, for this owner."""
        with self._lock:
            if self.used_bytes + size > self.capacity_bytes or self._accounts.of(owner).is_over_cap_with(size):
                return False
            self._charge(owner, size)
            return True

    def free(self, size: int, owner: str) -> None:
        """Undo `reserve`."""
        with self._lock:
            assert 0 <= size <= self._accounts.used[owner], f"{size} of {self.used_bytes} bytes freed"
            self._charge(owner, -size)

    def can_have(self, size: int, others: Iterable[Entry], owner: str) -> bool:
        """Whether there is room for `size` bytes if all objects are evicted. others: what is no object, and stays."""
        with self._lock:
            account = self._accounts.of(owner)
            total = own = size
            for entry in others:
                total += entry.charge
                own += entry.charge if self._accounts.of(entry.owner) is account else 0
            return total <= self.capacity_bytes and own <= (account.quota.disk_cap_bytes or own)

    def owners(self) -> dict[str, int]:
        """Bytes that are counted for each quota, by `rules.owner_prefix`."""
        with self._lock:
            return self._accounts.used_by_prefix()

    # -- objects

    def _put(self, entry: Entry) -> None:
        self._entries[entry.name] = entry
        self._accounts.count(entry, 1)
        self._expiry.note(entry)

    def _pop(self, entry: Entry) -> None:
        assert self._entries.pop(entry.name) is entry
        self._accounts.count(entry, -1)
        entry.gone = True

    def enter(self, entry: Entry) -> None:
        """Reserved bytes have become an object. It replaces the one of its name, whose file is gone by now."""
        with self._lock:
            if (old := self.take(entry.name)) is not None:
                self.settle(old)
            self._put(entry)
            self._accounts.rank(entry)

    def keep(self, entry: Entry) -> None:
        """Undo `take`."""
        with self._lock:
            entry.gone = False
            self._put(entry)
            if self.ranked:
                self._accounts.rank(entry)

    def hold(self, name: str) -> Entry | None:
        """Begin to read an object, which counts as a use; `release` follows. None if there is no such object."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is not None:
                entry.readers += 1
                self._accounts.use(entry)
            return entry

    def release(self, entry: Entry) -> None:
        """A reader is done."""
        with self._lock:
            entry.readers -= 1
            if entry.readers:
                return
            if entry.settled:
                self.free(entry.charge, entry.owner)
            elif self.ranked and not entry.gone:
                self._accounts.rank(entry)

    def take(self, name: str) -> Entry | None:
        """Take an object out; its bytes are counted until `settle`. None if there is no such object."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is not None:
                self._pop(entry)
            return entry

    def lose(self, entry: Entry) -> bool:
        """The file of an object is not there: take it out and settle it. False if it was taken out before."""
        with self._lock:
            if entry.gone:
                return False
            self.take(entry.name)
            self.settle(entry)
            return True

    def victim(self, owner: str | None, size: int) -> Entry | None:
        """Take out the object to evict for `size` bytes of an owner. None if there is none without readers.

        owner: None: for nobody, so that all floors hold.
        """
        with self._lock:
            entry = self._accounts.victim(owner, size)
            if entry is not None:
                self._pop(entry)
            return entry

    def excess(self) -> Entry | None:
        """Take out an object of an owner above its cap, or of any while the capacity is exceeded; None if none is."""
        with self._lock:
            for account in self._accounts.over_cap():
                entry = account.victim()
                if entry is not None:
                    self._pop(entry)
                    return entry
            return self.victim(None, 0) if self.used_bytes > self.capacity_bytes else None

    def expired(self, wall: float) -> Entry | None:
        """Take out an object that has expired at `wall` (seconds since 1970), even if it is read; None if none has."""
        with self._lock:
            entry = self._expiry.due(wall)
            if entry is not None:
                self._pop(entry)
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
            self._accounts.drop(entry, evicted)
            entry.settled = True
            if not entry.readers:
                self.free(entry.charge, entry.owner)
