"""Accounts: the shares of the arena (eviction/shares.py) of tenants and cache salts with a quota, and of the rest.

Used by core/index/index.py on the deciding thread; pure. eviction/shares.py says what a quota does. Invariants: the
accounts' bytes add up to the arena's used bytes; a change of a quota that is refused has changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter

from kvdepot.core.index.chunk import Account, Chunk, Namespace, Shard, is_evictable
from kvdepot.core.index.runs import Refusal
from kvdepot.core.index.wants import Wants
from kvdepot.errors import BadRequest, Busy
from kvdepot.eviction import Policy
from kvdepot.eviction.ages import Ages
from kvdepot.eviction.shares import victim_for
from kvdepot.protocol.keys import tenant_salt
from kvdepot.protocol.quotas import Quota, fault_of, shortest

MOST_MOVED = 1 << 17
"""The most chunks that change their account, or whose ages are recorded, in one step (tenths of a second)."""


class Accounts:
    def __init__(
        self, capacity: int, policy: Callable[[], Policy], ttl_s: int = 0, salt_ttls: Mapping[bytes, int] | None = None
    ) -> None:
        """capacity: bytes of the arena. policy: makes an account's policy. ttl_s: seconds after which chunks expire; 0:
        never. salt_ttls: the same for chunks with these salts, if that is sooner."""
        self._capacity = capacity
        self._policy = policy
        self.ttl_s = ttl_s
        self.salt_ttls = dict(salt_ttls or {})
        self.ages: Ages[Chunk] = Ages(self.ttl_of)
        self.has_ttls = bool(ttl_s or self.salt_ttls)
        self.wants = Wants()
        self.rest = self._new(("", b""), Quota())
        self._all = [self.rest]
        self._by_owner: dict[tuple[str, bytes], Account] = {}  # by tenant and salt; empty salt: the tenant's own

        self.given_up: dict[int, tuple[str, bytes, int]] = {}
        """Tenant, salt and bytes of each lent shard, by its id(); for example of a load that a store has overtaken."""

    def lend(self, shard: Shard, tenant: str = "", salt: bytes = b"") -> None:
        """Keep the memory of a shard in no chunk until `Index.give_back`: somebody may still write to it."""
        taken = sum(size for _, size in shard.extents)
        self.given_up[id(shard)] = tenant, salt, taken
        self.of(tenant, salt).charge(taken)

    def all(self) -> list[Account]:
        """The accounts: the rest first, then those of tenants and salts with a quota."""
        return list(self._all)

    @property
    def above_floors(self) -> int:
        """Bytes of the arena above all floors."""
        return self._capacity - sum(account.floor for account in self._all)

    def lease_budget(self, account: Account) -> int:
        """The bytes that leases of an account's prompts may hold: its floor and half of the arena above all floors, but
        at most half of its cap, or its floor if that is more."""
        return min(account.floor + self.above_floors // 2, max(account.cap // 2, account.floor))

    def of(self, tenant: str, salt: bytes = b"") -> Account:
        """The account of a tenant's chunks that are stored under a salt: the salt's own, the tenant's, or the rest."""
        return self._by_owner.get((tenant, salt)) or self._by_owner.get((tenant, b""), self.rest)

    def victim(self, by: Account | None, size: int, depth: float | None = None) -> Chunk | None:
        """The chunk to evict next for a reservation of `size` bytes by an account; see `shares.victim_for`. depth: that
        of the request which waits for these bytes (wants.py); infinity: no request does; None: no wanted chunk may go.

        The caller removes the chunk, or holds it; `Index.release` then returns it to the policy.
        """
        victim = victim_for(by, size, self._all, attrgetter("bytes"), depth)
        assert victim is None or isinstance(victim, Chunk)
        return victim

    def refusal(self, account: Account, size: int) -> Refusal:
        """Why a reservation of `size` bytes by an account found no room."""
        if account.used <= account.cap and self.wants.victim(account, -1.0) is not None:
            return Refusal.WANTED
        return Refusal.OVER_CAP if account.is_over_cap_with(size) else Refusal.NO_ROOM

    def ttl_of(self, chunk: Chunk) -> int:
        """Seconds after which a chunk expires: the shortest limit of server, tenant and salt; 0: never."""
        if not self.has_ttls:
            return 0
        quota, tenants = chunk.account.quota, self.of(chunk.namespace.tenant).quota
        return shortest(self.ttl_s, quota.ttl_s, tenants.ttl_s, self.salt_ttls.get(chunk.salt, 0))

    def fault(self, tenant: str, tag: bytes, quota: Quota) -> str:
        """Why a tenant, or one of its salts, cannot have this quota beside the existing quotas; empty if it can."""
        if not tenant and not tag:
            return "clients without a tenant cannot have a quota"
        quotas = {(each.tenant, each.tag): each.quota for each in self._all if each is not self.rest}
        quotas[tenant, tag] = quota
        return fault_of(quotas.values(), self._capacity)

    def set_quota(self, namespaces: Sequence[Namespace], owner: tuple[str, bytes], quota: Quota | None) -> None:
        """Set, change or (None) remove the quota of `owner` (tenant, tag), and move its chunks to the account that they
        then belong to. namespaces: all of the index. Raises BadRequest or Busy, and then changes nothing."""
        tenant, tag = owner
        if quota is not None and (fault := self.fault(tenant, tag, quota)):
            raise BadRequest(fault)
        salt = tenant_salt(tenant, tag)
        old = self.of(tenant, salt)
        has_account = (old.tenant, old.tag) == owner and old is not self.rest
        if quota is None and not has_account:
            return
        self.wants.disarrange()
        of_tenant = [each for each in namespaces if each.tenant == tenant]
        named = [chunk for chunk in _chunks_in(of_tenant) if not tag or chunk.salt == salt]
        aging: list[Chunk] = []
        if quota is not None and quota.ttl_s and not (has_account and 0 < old.quota.ttl_s <= quota.ttl_s):
            aging = [chunk for chunk in named if chunk.sealed]  # chunks without a sealed shard have no age yet
        if quota is not None and has_account:
            _refuse_many(len(aging))
            old.set(quota)
            self.has_ttls |= quota.ttl_s > 0
        else:
            moved = [chunk for chunk in named if chunk.account is old]
            stay_sealed = sum(chunk.account is not old for chunk in aging)
            _refuse_many((old.chunks if moved else 0) + stay_sealed)
            left: list[Chunk] = []
            if quota is not None and moved:  # a policy cannot give up chunks, so the chunks that stay get a new policy
                ids = set(map(id, moved))
                known = namespaces if old is self.rest else of_tenant
                left = [each for each in _chunks_in(known) if each.account is old and id(each) not in ids]
            size = sum(chunk.bytes for chunk in moved)
            for each, each_salt, late in self.given_up.values():
                is_named = each == tenant and (not tag or each_salt == salt)
                size += late if is_named and self.of(each, each_salt) is old else 0
            self._move(old, owner, quota, moved, size)
            if quota is not None and moved:
                old.policy = self._policy()
            queue(moved + left)
            assert quota is not None or (not old.used and not old.chunks), old
        for chunk in aging:
            self.ages.record(chunk)

    def _move(
        self, old: Account, owner: tuple[str, bytes], quota: Quota | None, chunks: list[Chunk], size: int
    ) -> None:
        """Open an account, or remove the old one if there is no quota, and move chunks and bytes out of the old one."""
        if quota is None:
            del self._by_owner[old.tenant, old.salt]
            self._all.remove(old)
            new = self.of(old.tenant)
        else:
            new = self._new(owner, quota)
            self._by_owner[new.tenant, new.salt] = new
            self._all.append(new)
        for chunk in chunks:
            chunk.account = new
        for account, sign in ((old, -1), (new, 1)):
            account.charge(sign * size)
            account.chunks += sign * len(chunks)

    def _new(self, owner: tuple[str, bytes], quota: Quota) -> Account:
        self.has_ttls |= quota.ttl_s > 0
        return Account(owner, quota, self._policy(), self._capacity, self.wants.victim)


def queue(chunks: list[Chunk]) -> None:
    """Insert chunks into the policies of their accounts, which do not have them, in their order of eviction."""
    chunks.sort(key=lambda chunk: (chunk.order, chunk.used))
    for chunk in chunks:
        chunk.queued, chunk.place = False, 0  # these belong to the old policy
    for chunk in chunks:
        chunk.account.policy.insert([chunk])
    for chunk in chunks:
        if is_evictable(chunk):
            chunk.account.policy.add(chunk)


def _chunks_in(namespaces: Iterable[Namespace]) -> list[Chunk]:
    return [chunk for namespace in namespaces for chunk in namespace.chunks.values()]


def _refuse_many(chunks: int) -> None:
    if chunks > MOST_MOVED:
        raise Busy(
            f"{chunks} chunks would have to be moved, more than {MOST_MOVED} at once: set the quota in the settings "
            "file and restart the server, or forget chunks first"
        )
