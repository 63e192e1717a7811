"""Accounts of a disk tier: how much of it each tenant has, and whose object is evicted when space is needed.

Used by ledger.py under its lock; no system calls. As in memory (core/index/accounts.py), each tenant and each salt with
a quota has an account, all others share "the rest", and the account with the highest level gives up an object: its
bytes above its floor, divided by its weight. An owner is one salt of one tenant (`rules.owner_of`).

Invariant: no reservation takes another account's objects below its floor, or its own account above its cap. A floor
counts objects alone; a cap also counts what is being written, and what is removed but still being read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from kvdepot.eviction import Policy
from kvdepot.protocol.quotas import Quota
from kvdepot.tiers.disk.entry import Entry, is_unread
from kvdepot.tiers.rules import tenant_of

__all__ = ["Account", "Accounts"]


class Account:
    """The bytes of one tenant or salt with a quota, or of all others."""

    __slots__ = ("objects", "policy", "quota", "used")

    def __init__(self, quota: Quota, policy: Policy) -> None:
        self.quota = quota
        self.policy = policy
        self.used = 0  # bytes that are counted for it
        self.objects = 0  # bytes of its objects alone

    def __repr__(self) -> str:
        return f"<Account {self.objects} of {self.used} bytes in objects, {self.quota.words}>"

    def is_over_cap_with(self, size: int) -> bool:
        """Whether `size` bytes more would exceed its cap."""
        return 0 < self.quota.disk_cap_bytes < self.used + size

    def level(self, size: int) -> float:
        """With `size` bytes more: those above its floor, divided by its weight."""
        return (self.objects + size - self.quota.disk_floor_bytes) / self.quota.weight

    def victim(self) -> Entry | None:
        """The object to evict next, taken out of the policy's queue; None if there is none without readers."""
        victim = self.policy.victim(is_unread)
        assert victim is None or isinstance(victim, Entry)
        return victim


class Accounts:
    """The accounts of one ledger, and the bytes of every owner, with a quota or without."""

    def __init__(self, policy: Callable[[], Policy], quotas: Mapping[str, Quota]) -> None:
        """policy: makes an account's policy. quotas: by `owner_prefix`."""
        self.number = 0
        self.used: Counter[str] = Counter()  # by owner
        self.objects: Counter[str] = Counter()
        self._policy = policy
        self._by_prefix: dict[str, Account] = {}
        self.open(quotas)

    def __repr__(self) -> str:
        return f"<Accounts {self._rest}, {self._by_prefix}>"

    def open(self, quotas: Mapping[str, Quota]) -> None:
        """New accounts for these quotas and the rest. Their policies know no object; `rank` follows for each."""
        self.number += 1
        self._rest = Account(Quota(), self._policy())
        self._by_prefix = {prefix: Account(quota, self._policy()) for prefix, quota in quotas.items()}
        for owner in self.used:
            account = self.of(owner)
            account.used += self.used[owner]
            account.objects += self.objects[owner]

    def set(self, quotas: Mapping[str, Quota]) -> bool:
        """Change the quotas; False if others have one now, and `open` must follow."""
        if quotas.keys() != self._by_prefix.keys():
            return False
        for prefix, quota in quotas.items():
            self._by_prefix[prefix].quota = quota
        return True

    def of(self, owner: str) -> Account:
        """The account of an owner: the salt's, the tenant's, or the rest."""
        return self._by_prefix.get(owner) or self._by_prefix.get(tenant_of(owner), self._rest)

    def used_by_prefix(self) -> dict[str, int]:
        """The bytes that are counted for each quota."""
        return {prefix: account.used for prefix, account in self._by_prefix.items()}

    # -- bytes

    def charge(self, owner: str, size: int) -> None:
        """Count `size` bytes more; fewer if negative."""
        self.of(owner).used += size
        self.used[owner] += size
        if not self.used[owner]:
            del self.used[owner]

    def count(self, entry: Entry, sign: int) -> None:
        """An entry has become an object (1), or is none any more (-1)."""
        self.of(entry.owner).objects += sign * entry.charge
        self.objects[entry.owner] += sign * entry.charge
        if not self.objects[entry.owner]:
            del self.objects[entry.owner]

    # -- the policies

    def rank(self, entry: Entry) -> None:
        """An object may be evicted from now on; if its policy does not know it yet, it is the most recently used."""
        policy = self.of(entry.owner).policy
        if entry.ranked != self.number:
            entry.ranked, entry.key = self.number, entry.name.encode()
            entry.queued = entry.place = entry.uses = 0  # of another policy
            policy.insert(entry)
        if is_unread(entry):
            policy.add(entry)

    def use(self, entry: Entry) -> None:
        if entry.ranked == self.number:
            self.of(entry.owner).policy.use(entry)

    def drop(self, entry: Entry, evicted: bool) -> None:
        """An entry that was taken out is gone for good."""
        if entry.ranked == self.number:
            self.of(entry.owner).policy.remove(entry, evicted)

    # -- who gives up space

    def victim(self, owner: str | None, size: int) -> Entry | None:
        """The object to evict next for `size` bytes of an owner, taken out of its queue; None if there is none.

        owner: None: for nobody, so that every floor holds.
        """
        by = None if owner is None else self.of(owner)
        if by is not None and by.is_over_cap_with(size):
            return by.victim()
        accounts = [self._rest, *self._by_prefix.values()]
        accounts.sort(key=lambda each: each.level(size if each is by else 0), reverse=True)
        for account in accounts:
            victim = account.victim()
            if victim is None:
                continue
            if account is by or account.objects - victim.charge >= account.quota.disk_floor_bytes:
                return victim
            account.policy.add(victim)
        return None

    def over_cap(self) -> Iterable[Account]:
        """Those above their caps."""
        return [account for account in self._by_prefix.values() if account.is_over_cap_with(0)]
