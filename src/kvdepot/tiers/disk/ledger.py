"""The ledger of a disk tier: its objects, their owners, and which object is evicted first. Any thread; no system calls.

Invariant: every byte in the store is counted, from before it is written until after it is gone. So bytes are counted in
three ways: as reserved for a write (`reserve`), as an object (`enter`), and as an object that was taken out (`take`,
`victim`, `excess`, `expired`), which is counted until `settle`, or until its last reader is done. A floor
counts objects alone; a cap counts all three (eviction/shares.py).
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict
from operator import attrgetter
from typing import cast

from kvdepot.eviction import POLICIES, Victim
from kvdepot.eviction.ages import Ages, WallClock
from kvdepot.eviction.shares import FairShare, victim_for
from kvdepot.protocol.quotas import Quota
from kvdepot.tiers.rules import NO_RULES, Rules, owner_of, tenant_of


class Entry(Victim, gc=False):
    """One object, or other bytes that count for an owner."""

    name: str = ""
    """Empty for bytes that are no object, which no policy knows."""
    owner: str = ""
    """The tenant or salt that the bytes count for (tiers/rules.py); for an object, its name says so."""
    charge: int = 0
    dated: float = 0.0
    """When the object was last used according to its file: seconds since 1970."""
    born: float = 0.0
    """When its contents were computed: seconds since 1970."""
    ranked: int = 0
    """The generation of policies that knows the object; 0: none."""
    readers: int = 0
    settled: bool = False
    """Whether the file is gone, so that the bytes are free once the last reader is done."""

    def __post_init__(self) -> None:
        if self.name:
            self.owner = sys.intern(owner_of(self.name))  # one string for the many objects of an owner


class Ledger:
    """Objects of a tier of `capacity_bytes`."""

    def __init__(self, capacity_bytes: int, policy: str, rules: Rules = NO_RULES) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.ranked = False
        """Whether objects of earlier servers are in order of use; until then only reads are allowed."""
        self._lock = threading.RLock()
        self._policy = POLICIES[policy]
        self._rules = rules
        self._entries: dict[str, Entry] = {}
        self._used: Counter[str] = Counter()  # counted bytes, by owner
        self._ages = Ages(self._ttl_of)
        self._clock = WallClock()
        self._generation = 0
        self._open_shares()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    # -- rules

    def set_rules(self, rules: Rules) -> None:
        """Change quotas and times to live. Objects above a cap, or expired now, stay until they are taken out.

        If other owners have quotas than before, the policies start again, with all objects in the order of their dates.
        """
        with self._lock:
            before, self._rules = self._rules, rules
            for entry in self._entries.values() if rules.ages != before.ages else ():
                self._ages.record(entry)
            if rules.quotas.keys() != before.quotas.keys():
                self._open_shares()
                if self.ranked:
                    self.rank()
            for prefix, quota in rules.quotas.items():
                self._shares[prefix].set_bounds(quota.disk_floor_bytes, quota.disk_cap_bytes, quota.weight)

    def _ttl_of(self, entry: Entry) -> int:
        return self._rules.ttl_of(entry.name)

    def _open_shares(self) -> None:
        """New shares for the quotas and the rest. Their policies know no object; `rank` follows."""
        self._generation += 1
        self._rest = self._new_share(Quota())
        self._shares = {prefix: self._new_share(quota) for prefix, quota in self._rules.quotas.items()}
        for owner, size in self._used.items():
            self._share_of(owner).charge(size)
            self._share_of(owner).mark_leaving(size)
        for entry in self._entries.values():
            self._share_of(entry.owner).mark_leaving(-entry.charge)

    def _new_share(self, quota: Quota) -> FairShare:
        share = FairShare(self._policy(), _is_unread, self.capacity_bytes)
        share.set_bounds(quota.disk_floor_bytes, quota.disk_cap_bytes, quota.weight)
        return share

    def _share_of(self, owner: str) -> FairShare:
        return self._shares.get(owner) or self._shares.get(tenant_of(owner), self._rest)

    def used_by_quota(self) -> dict[str, int]:
        with self._lock:
            return {prefix: share.used for prefix, share in self._shares.items()}

    # -- objects that an earlier server has left

    def add_found(self, entry: Entry) -> None:
        """Count an object that was there at the start. `rank` follows once all are counted."""
        with self._lock:
            self._charge(entry.owner, entry.charge)
            self._put(entry)

    def rank(self) -> None:
        with self._lock:
            for entry in sorted(self._entries.values(), key=lambda entry: entry.dated):
                self._rank(entry)
            self.ranked = True

    def _rank(self, entry: Entry) -> None:
        """Let an object be evicted from now on. One that is new to its policy counts as the most recently used."""
        policy = self._share_of(entry.owner).policy
        if entry.ranked != self._generation:
            entry.ranked, entry.key = self._generation, entry.name.encode()
            entry.queued, entry.place = False, 0  # its place was in another policy
            policy.insert([entry])
        if not entry.readers:
            policy.add(entry)

    # -- bytes

    def _charge(self, owner: str, size: int) -> None:
        """Count `size` more bytes that no eviction would free; negative: fewer."""
        self.used_bytes += size
        share = self._share_of(owner)
        share.used += size
        share.leaving += size  # so the evictable bytes above the floor stay the same
        self._used[owner] += size
        if not self._used[owner]:
            del self._used[owner]

    def reserve(self, size: int, owner: str) -> bool:
        """Reserve bytes for an owner. Returns whether that many were free."""
        with self._lock:
            if self.used_bytes + size > self.capacity_bytes or self._share_of(owner).is_over_cap_with(size):
                return False
            self._charge(owner, size)
            return True

    def free(self, size: int, owner: str) -> None:
        with self._lock:
            assert 0 <= size <= self._used[owner], f"{size} of {self.used_bytes} bytes freed"
            self._charge(owner, -size)

    def can_ever_hold(self, size: int, owner: str) -> bool:
        """Whether there is room for `size` bytes of an owner if all objects are evicted."""
        return size <= self._share_of(owner).cap

    # -- objects

    def _put(self, entry: Entry) -> None:
        self._entries[entry.name] = entry
        self._share_of(entry.owner).mark_leaving(-entry.charge)
        self._ages.record(entry)

    def _pop(self, victim: Victim | None) -> Entry | None:
        entry = cast("Entry | None", victim)
        if entry is not None:
            assert self._entries.pop(entry.name) is entry
            self._share_of(entry.owner).mark_leaving(entry.charge)
            entry.gone = True
        return entry

    def enter(self, entry: Entry) -> None:
        """Reserved bytes have become an object. It replaces the object of the same name, whose file is gone by now."""
        with self._lock:
            if (old := self.take(entry.name)) is not None:
                self.settle(old)
            self._put(entry)
            self._rank(entry)

    def keep(self, entry: Entry) -> None:
        with self._lock:
            entry.gone = False
            self._put(entry)
            if self.ranked:
                self._rank(entry)

    def hold(self, name: str) -> Entry | None:
        """Begin to read an object, which counts as a use; end with `release`. None: there is no such object."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is not None:
                entry.readers += 1
                if entry.ranked == self._generation:
                    self._share_of(entry.owner).policy.use(entry)
            return entry

    def release(self, entry: Entry) -> None:
        with self._lock:
            entry.readers -= 1
            if entry.readers:
                return
            if entry.settled:
                self.free(entry.charge, entry.owner)
            elif self.ranked and not entry.gone:
                self._rank(entry)

    def take(self, name: str) -> Entry | None:
        """Take an object out; its bytes are counted until `settle`. None: there is no such object."""
        with self._lock:
            return self._pop(self._entries.get(name))

    def lose(self, entry: Entry) -> bool:
        """The file of an object is missing: take the object out and settle it. False: it was taken out before."""
        with self._lock:
            if entry.gone:
                return False
            self._pop(entry)
            self.settle(entry)
            return True

    def victim(self, owner: str | None, size: int) -> Entry | None:
        """Take out the object to evict for `size` bytes of an owner. owner None: for no owner, so all floors hold.
        Returns None if all objects are being read."""
        with self._lock:
            by = None if owner is None else self._share_of(owner)
            return self._pop(victim_for(by, size, [self._rest, *self._shares.values()], attrgetter("charge")))

    def excess(self) -> Entry | None:
        """Take out an object of an owner above its cap, or of any owner above the capacity. None: no excess."""
        with self._lock:
            for share in self._shares.values():
                if share.is_over_cap_with(0) and (victim := share.victim()) is not None:
                    return self._pop(victim)
            return self.victim(None, 0) if self.used_bytes > self.capacity_bytes else None

    def date(self, now: float, wall: float) -> None:
        """Set the dates of objects that seem to be computed after `wall`, because the clock was ahead. now: of a
        monotonic clock."""
        with self._lock:
            is_first, back = self._clock.is_new, self._clock.set_back(now, wall)
            for entry in self._entries.values() if is_first or back else ():
                entry.born = min(entry.born - back, wall)
                self._ages.record(entry)

    def expired(self, wall: float) -> Entry | None:
        """Take out an object that has expired at `wall` (seconds since 1970), even while it is read. None: none has."""
        with self._lock:
            return self._pop(next(self._ages.due(wall), None))

    def spaces(self, salt: str, space: str) -> dict[str, list[Entry]]:
        """The objects whose names' parts begin with `salt` and `space` (Tier.forget), by `salt/space`."""
        found: dict[str, list[Entry]] = defaultdict(list)
        with self._lock:
            for name, entry in self._entries.items():
                if name.startswith(salt) and name.startswith(space, 33):
                    found[name[:65]].append(entry)
        return found

    def settle(self, entry: Entry, evicted: bool = False) -> None:
        """The file of an entry that was taken out is gone; readers may still have it open."""
        with self._lock:
            if entry.ranked == self._generation:
                self._share_of(entry.owner).policy.remove(entry, evicted)
            entry.settled = True
            if not entry.readers:
                self.free(entry.charge, entry.owner)


def _is_unread(victim: Victim) -> bool:
    return not cast(Entry, victim).readers
