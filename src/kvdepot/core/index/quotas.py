"""Changes of quotas: which account each chunk belongs to afterwards. Used by index.py on the deciding thread.

Invariant: a change that is refused has changed nothing. accounts.py says what accounts are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvdepot.core.index.accounts import Account, Accounts
from kvdepot.core.index.ages import Ages
from kvdepot.core.index.chunk import Chunk, Namespace
from kvdepot.core.index.namespaces import Namespaces
from kvdepot.errors import BadRequest, Busy
from kvdepot.protocol.keys import tenant_salt
from kvdepot.protocol.quotas import Quota

__all__ = ["MOST_MOVED", "Quotas"]

MOST_MOVED = 1 << 17
"""Chunks that change their account, or whose ages are noted, in one step of some tenths of a second."""


class Quotas:
    """The quotas of one index."""

    def __init__(self, accounts: Accounts, namespaces: Namespaces, note_age: Callable[[Chunk], None]) -> None:
        """note_age: notes the age of a chunk in all queues that it expires by."""
        self._accounts = accounts
        self._namespaces = namespaces
        self._note_age = note_age

    def __repr__(self) -> str:
        return f"<Quotas of {self._accounts}>"

    def set(self, tenant: str, quota: Quota | None, tag: bytes) -> None:
        """See Index.set_quota."""
        accounts = self._accounts
        if quota is not None and (fault := accounts.fault(tenant, tag, quota)):
            raise BadRequest(fault)
        old = accounts.of(tenant, tenant_salt(tenant, tag))
        is_own = (old.tenant, old.tag) == (tenant, tag)
        if quota is None:
            if is_own and old is not accounts.rest:
                self._close(old)
        elif is_own:
            self._change(old, quota)
        else:
            self._open(old, tenant, tag, quota)

    def queue(self, chunks: list[Chunk]) -> None:
        """Insert chunks into the policies of their accounts, which do not know them, in their order so far."""
        chunks.sort(key=lambda chunk: (chunk.order, chunk.used))
        for chunk in chunks:
            chunk.queued = chunk.place = chunk.uses = 0  # of another policy
        for chunk in chunks:
            chunk.account.policy.insert(chunk)
            if chunk.sealed:  # otherwise it has no age yet
                self._note_age(chunk)
        for chunk in chunks:
            if self._accounts.spared.could_go(chunk):
                chunk.account.policy.add(chunk)

    def _of_tenant(self, tenant: str) -> list[Namespace]:
        return [each for each in self._namespaces.all() if each.tenant == tenant]

    def _change(self, account: Account, quota: Quota) -> None:
        """Give an account another quota. If chunks did not expire and now do, their ages are noted."""
        aging: list[Chunk] = []
        if quota.ttl_s and not account.quota.ttl_s:
            # A tenant's limit also holds for chunks in the accounts of its salts, which its queue by age does not have.
            known = account if account.ages.ttl_s else None
            aging = [
                chunk
                for chunk in _all_chunks(self._of_tenant(account.tenant))
                if chunk.account is not known and (chunk.account is account or not account.tag)
            ]
            _refuse_many(len(aging))
        account.set(quota)
        _note_all(account.ages, aging)

    def _open(self, source: Account, tenant: str, tag: bytes, quota: Quota) -> None:
        """Open an account for chunks that belong to `source`."""
        salt, of_tenant = tenant_salt(tenant, tag), self._of_tenant(tenant)
        named = [chunk for chunk in _all_chunks(of_tenant) if not tag or chunk.salt == salt]
        own = [chunk for chunk in named if chunk.account is source]
        aging = [chunk for chunk in named if chunk.account is not source] if quota.ttl_s else []  # in salts' accounts
        _refuse_many((source.chunks if own else 0) + len(aging))
        left: list[Chunk] = []
        if own:  # a queue cannot give up chunks that are still there, so those that stay get a new one
            moved = set(map(id, own))
            there = self._namespaces.all() if source is self._accounts.rest else of_tenant
            left = [each for each in _all_chunks(there) if each.account is source and id(each) not in moved]
        self._accounts.spared.put_all_back()
        new = self._accounts.open(tenant, tag, quota)
        for namespace in of_tenant:
            namespace.account = self._accounts.of(tenant)
        self._move(own, _detached(of_tenant, new), source, new)
        if own:
            self._accounts.renew(source)
        self.queue(own + left)
        _note_all(new.ages, aging)

    def _close(self, account: Account) -> None:
        """Move an account's chunks to the one that they would belong to without it, and remove it."""
        _refuse_many(account.chunks)
        of_tenant = self._of_tenant(account.tenant)
        own = [chunk for chunk in _all_chunks(of_tenant) if chunk.account is account]
        self._accounts.spared.put_all_back()
        detached = _detached(of_tenant, account)
        self._accounts.detach(account)
        new = self._accounts.of(account.tenant)
        for namespace in of_tenant:
            namespace.account = new
        self._move(own, detached, account, new)
        self.queue(own)
        assert not account.used and not account.chunks, account

    def _move(self, chunks: list[Chunk], detached: int, source: Account, new: Account) -> None:
        """Give chunks another account, and the bytes of shards that no chunk has any more."""
        size = detached + sum(chunk.bytes for chunk in chunks)
        for chunk in chunks:
            chunk.account = new
        for account, sign in ((source, -1), (new, 1)):
            account.charge(sign * size)
            account.chunks += sign * len(chunks)


def _all_chunks(namespaces: Iterable[Namespace]) -> list[Chunk]:
    return [chunk for namespace in namespaces for chunk in namespace.chunks.values()]


def _detached(namespaces: Iterable[Namespace], account: Account) -> int:
    """Bytes of an account in shards that are still being loaded but no longer belong to a chunk."""
    return sum(
        size
        for namespace in namespaces
        for salt, size in namespace.detached.items()
        if namespace.account_of(salt) is account
    )


def _note_all(ages: Ages, chunks: Iterable[Chunk]) -> None:
    for chunk in chunks:
        if chunk.sealed:  # otherwise it has no age yet
            ages.note(chunk)


def _refuse_many(chunks: int) -> None:
    """Raise Busy if these are too many chunks to change in one step."""
    if chunks > MOST_MOVED:
        raise Busy(
            f"{chunks} chunks would have to be moved, more than {MOST_MOVED} at once: set the quota in the settings "
            "file and restart the server, or forget chunks first"
        )
