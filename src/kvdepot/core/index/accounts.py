"""Accounts: the shares of the arena (eviction/shares.py) of tenants and cache salts with a quota, and of the rest.

Used by core/index/index.py on the deciding thread; pure. Invariant: the accounts' bytes add up to the arena's used
bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvdepot.core.index.chunk import Account, Chunk
from kvdepot.eviction import Policy, Victim
from kvdepot.eviction.ages import Ages
from kvdepot.eviction.shares import victim_for
from kvdepot.protocol.quotas import Quota, fault_of, name_of, shortest


class Accounts:
    """The accounts of one index, and the ages of its chunks."""

    def __init__(
        self, capacity: int, policy: Callable[[], Policy], ttl_s: int = 0, salt_ttls: Mapping[bytes, int] | None = None
    ) -> None:
        """capacity: of the arena, bytes. policy: makes an account's policy. ttl_s: of all chunks; 0 = never. salt_ttls:
        of chunks with these salts, if that is sooner."""
        self._capacity = capacity
        self._policy = policy
        self.ttl_s = ttl_s
        self.salt_ttls = dict(salt_ttls or {})
        self.ages: Ages[Chunk] = Ages(self.ttl_of)
        self.has_ttls = bool(ttl_s or self.salt_ttls)
        self.rest = self._new(("", b""), Quota())
        self._all = [self.rest]
        self._by_owner: dict[tuple[str, bytes], Account] = {}  # by tenant, and the salt of chunks; empty: the tenant's

        self.given_up: dict[int, tuple[str, bytes, int]] = {}
        """Tenant, salt and bytes of loads that stores have overtaken, by id() of the shard, until they end."""

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
        return self._by_owner.get((tenant, salt)) or self._by_owner.get((tenant, b""), self.rest)

    def victim(self, by: Account | None, size: int) -> Chunk | None:
        """The chunk to evict next for a reservation of `size` bytes by an account; see `shares.victim_for`.

        The caller removes the chunk, or holds it; `Index.release` then returns it to the policy.
        """
        victim = victim_for(by, size, self._all, _bytes_of)
        assert victim is None or isinstance(victim, Chunk)
        return victim

    def over_cap(self) -> list[Account]:
        """The accounts above their caps."""
        return [account for account in self._all if account.used > account.cap]

    def ttl_of(self, chunk: Chunk) -> int:
        """Seconds after which a chunk expires: the shortest limit of server, tenant and salt; 0: never."""
        if not self.has_ttls:
            return 0
        quota, tenants = chunk.account.quota, self.of(chunk.namespace.tenant).quota
        return shortest(self.ttl_s, quota.ttl_s, tenants.ttl_s, self.salt_ttls.get(chunk.salt, 0))

    # -- quotas; quotas.py moves the chunks

    def fault(self, tenant: str, tag: bytes, quota: Quota) -> str:
        """Why a tenant or a salt of it cannot have this quota beside the others'; empty if it can."""
        if not tenant and not tag:
            return "clients without a tenant cannot have a quota"
        quotas = {(each.tenant, each.tag): each.quota for each in self._all if each is not self.rest}
        quotas[tenant, tag] = quota
        return fault_of([(name_of(*owner), each) for owner, each in quotas.items()], self._capacity)

    def set(self, account: Account, quota: Quota) -> None:
        """Change an account's quota."""
        account.set(quota)
        self.has_ttls |= quota.ttl_s > 0

    def open(self, tenant: str, tag: bytes, quota: Quota) -> Account:
        """A new, empty account of a tenant or a salt that has none."""
        account = self._new((tenant, tag), quota)
        self._by_owner[tenant, account.salt] = account
        self._all.append(account)
        return account

    def detach(self, account: Account) -> None:
        """Remove an account; the caller moves its chunks."""
        del self._by_owner[account.tenant, account.salt]
        self._all.remove(account)

    def renew(self, account: Account) -> None:
        """Give an account a new policy, which knows no chunk."""
        account.policy = self._policy()

    def _new(self, owner: tuple[str, bytes], quota: Quota) -> Account:
        self.has_ttls |= quota.ttl_s > 0
        return Account(owner, quota, self._policy(), self._capacity)


def _bytes_of(victim: Victim) -> int:
    assert isinstance(victim, Chunk)
    return victim.bytes
