"""Accounts: how much of the arena each tenant has, and whose chunk is evicted when space is needed.

Used by core/index/index.py on the deciding thread; pure. Each tenant with a quota has an account, and so has each cache
salt of a tenant with a quota; the salt's chunks do not count for its tenant then. All others share one account, "the
rest". An account has a policy of its own, so that a victim is found among its chunks alone.

Invariants: the accounts' bytes add up to the arena's used bytes. A reservation by one account takes no other below its
floor. No account is above its cap, except after its quota was lowered or a restart, until `Index.trim` has evicted the
excess.

**Who gives up space.** An account that would exceed its cap evicts its own chunks. Otherwise the account with the
highest level does: the bytes above its floor, divided by its weight, where the account that reserves counts the bytes
that it asks for. So what is above the floors is divided in proportion to the weights among those that want it, and what
some tenants do not use (because they are idle, or at their caps) goes to the others in the same proportion. This is
weighted max-min fairness (Bertsekas and Gallager, "Data Networks", 1992).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from kvdepot.core.index.ages import Ages
from kvdepot.core.index.chunk import Chunk, is_evictable
from kvdepot.core.index.spared import Out, Spared
from kvdepot.eviction import Policy
from kvdepot.protocol.keys import tenant_salt
from kvdepot.protocol.quotas import Quota, fault_of, name_of, shortest

__all__ = ["Account", "Accounts"]


class Account:
    """The chunks and bytes of one tenant with a quota, of one cache salt with a quota, or of all others."""

    __slots__ = (
        "_capacity", "_spared", "_ttl_s", "ages", "cap", "capped", "chunks", "evicted", "evicted_bytes", "floor",
        "is_capped", "leaving", "out", "out_bytes", "policy", "quota", "salt", "spare", "tag", "tenant", "used",
        "weight",
    )  # fmt: skip

    def __init__(
        self, tenant: str, tag: bytes, policy: Policy, capacity: int, ttl_s: int, quota: Quota, spared: Spared
    ) -> None:
        """tenant, tag (keys.salt_tag): both are empty for the rest. capacity: of the arena, bytes. ttl_s: the
        server's; 0: chunks never expire."""
        self.tenant = tenant
        self.tag = tag
        self.salt = tenant_salt(tenant, tag)  # under which its chunks are stored
        self.policy = policy
        self.ages = Ages(ttl_s)
        self.used = 0  # bytes of the arena, including reserved ones
        self.leaving = 0  # bytes of chunks that are being saved in tiers, to be evicted then
        self.spare = 0  # bytes above the floor, without those leaving; negative below it
        self.chunks = 0
        self.evicted = 0  # chunks
        self.evicted_bytes = 0
        self.out: deque[Out] = deque()  # what would have been evicted first without leases; spared.py
        self.out_bytes = 0
        self.capped = 0  # shards not stored because of the cap
        self._capacity = capacity
        self._ttl_s = ttl_s
        self._spared = spared
        self.set(quota)

    def __repr__(self) -> str:
        return f"<Account of {self.name or 'the rest'}: {self.used} bytes in {self.chunks} chunks, {self.quota}>"

    @property
    def name(self) -> str:
        """Whose it is, for people; empty for the rest."""
        return name_of(self.tenant, self.tag)

    def set(self, quota: Quota) -> None:
        """Change the quota. If chunks did not expire and now do, the caller notes their ages."""
        self.quota = quota
        self.floor = quota.floor_bytes
        self.spare = self.used - self.leaving - self.floor
        self.is_capped = 0 < quota.cap_bytes < self._capacity
        self.cap = quota.cap_bytes if self.is_capped else self._capacity
        self.weight = quota.weight
        self.ages.ttl_s = self.ttl_with(quota)

    def ttl_with(self, quota: Quota) -> int:
        """Seconds after which chunks expire with this quota and the server's own limit; 0: never."""
        return shortest(self._ttl_s, quota.ttl_s)

    def is_over_cap_with(self, size: int) -> bool:
        """Whether `size` bytes more would exceed its cap; without a cap, never."""
        return self.is_capped and self.used + size > self.cap

    def charge(self, size: int) -> None:
        """Add `size` bytes, or subtract them if negative."""
        self.used += size
        self.spare += size

    def lets_go(self, size: int) -> None:
        """Note that `size` bytes are leaving, or if negative, that so many have left or stay."""
        self.leaving += size
        self.spare -= size

    def is_nearly_full(self) -> bool:
        """Whether less than an eighth of its cap is left, not counting what is leaving."""
        return self.is_capped and self.used - self.leaving > self.cap - (self.cap >> 3)

    def victim(self) -> Chunk | None:
        """Its chunk to evict next, taken out of the policy's queue; see `Policy.victim`."""
        if self._spared.held:
            return self._spared.victim(self)
        victim = self.policy.victim(is_evictable)
        assert victim is None or isinstance(victim, Chunk)
        return victim


class Accounts:
    """The accounts of one index."""

    def __init__(self, capacity: int, policy: Callable[[], Policy], ttl_s: int = 0) -> None:
        """capacity: of the arena, bytes. policy: makes an account's policy. ttl_s: of all chunks; 0 = never."""
        self._capacity = capacity
        self._policy = policy
        self.ttl_s = ttl_s
        self.spared = Spared()
        self.rest = self._new("", b"", Quota())
        self._all = [self.rest]
        self._by_tenant: dict[str, Account] = {}
        self._by_salt: dict[str, dict[bytes, Account]] = {}  # by tenant, then by the salt that chunks are stored under

    def __repr__(self) -> str:
        return f"<Accounts {self._all}>"

    def __len__(self) -> int:
        return len(self._all)

    def all(self) -> list[Account]:
        """The rest, then those of tenants and salts with a quota."""
        return list(self._all)

    @property
    def above_floors(self) -> int:
        """Bytes of the arena above all floors."""
        return self._capacity - sum(account.floor for account in self._all)

    def lease_budget(self, account: Account) -> int:
        """The bytes that leases of an account's prompts may hold: its floor and half of what is above all floors, but
        at most half of its cap, unless its floor is more than that."""
        return min(account.floor + self.above_floors // 2, max(account.cap // 2, account.floor))

    @property
    def leaving(self) -> int:
        """Bytes of all accounts' chunks that are being saved in tiers, to be evicted then."""
        return sum(account.leaving for account in self._all)

    def of(self, tenant: str, salt: bytes = b"") -> Account:
        """The account of a tenant's chunks that are stored under a salt: the salt's own, the tenant's, or the rest."""
        return self._by_salt.get(tenant, {}).get(salt) or self._by_tenant.get(tenant, self.rest)

    def salted(self, tenant: str) -> dict[bytes, Account]:
        """The accounts of a tenant's salts, by the salts that chunks are stored under; changes with the quotas."""
        return self._by_salt.setdefault(tenant, {})

    # -- quotas

    def fault(self, tenant: str, tag: bytes, quota: Quota) -> str:
        """Why a tenant or a salt of it cannot have this quota beside the others'; empty if it can."""
        if not tenant and not tag:
            return "clients without a tenant cannot have a quota"
        quotas = {(each.tenant, each.tag): each.quota for each in self._all if each is not self.rest}
        quotas[tenant, tag] = quota
        return fault_of([(name_of(*whose), each) for whose, each in quotas.items()], self._capacity)

    def open(self, tenant: str, tag: bytes, quota: Quota) -> Account:
        """A new, empty account of a tenant or a salt that has none."""
        account = self._new(tenant, tag, quota)
        if tag:
            self.salted(tenant)[account.salt] = account
        else:
            self._by_tenant[tenant] = account
        self._all.append(account)
        return account

    def detach(self, account: Account) -> None:
        """Remove an account; the caller moves its chunks."""
        if account.tag:
            del self._by_salt[account.tenant][account.salt]
        else:
            del self._by_tenant[account.tenant]
        self._all.remove(account)

    def renew(self, account: Account) -> None:
        """Give an account a new policy, which knows no chunk."""
        account.policy = self._policy()

    def _new(self, tenant: str, tag: bytes, quota: Quota) -> Account:
        return Account(tenant, tag, self._policy(), self._capacity, self.ttl_s, quota, self.spared)

    # -- who gives up space

    def victim(self, by: Account | None, size: int) -> Chunk | None:
        """The chunk to evict next for a reservation of `size` bytes by an account, taken out of its policy's queue.

        None if there is none that may be evicted for it. by: None: for nobody, so that every floor holds. The caller
        removes the chunk, or holds it; `Index.release` then returns it to the policy.
        """
        if len(self._all) == 1:
            return self.rest.victim()
        highest, level = by, 0.0
        if by is not None:
            if by.used + size > by.cap:
                return by.victim()
            above = by.spare + size
            if above > 0:
                level = above / by.weight
        for each in self._all:  # this loop is most of what quotas cost
            if each.spare > level * each.weight:
                highest, level = each, each.spare / each.weight
        victim = self._spared(highest, by)
        return victim if victim is not None else self._other_victim(by, size, highest)

    def _other_victim(self, by: Account | None, size: int, tried: Account | None) -> Chunk | None:
        """A victim of the accounts besides `tried`, those with the highest levels first."""
        levels = [
            ((each.spare + (size if each is by else 0)) / each.weight, number)
            for number, each in enumerate(self._all)
            if each is not tried and (each is by or each.spare > 0)
        ]
        for _, number in sorted(levels, reverse=True):
            victim = self._spared(self._all[number], by)
            if victim is not None:
                return victim
        return None

    def _spared(self, account: Account | None, by: Account | None) -> Chunk | None:
        """The next victim of an account, unless that would take it below its floor for somebody else."""
        victim = None if account is None else account.victim()
        if account is None or victim is None or account is by or account.spare >= victim.bytes:
            return victim
        account.policy.add(victim)
        return None

    def over_cap(self) -> Iterable[Account]:
        """Those above their caps."""
        return [account for account in self._all if account.used > account.cap]
