"""Changes of quotas: which account each chunk belongs to afterwards. Used by index.py on the deciding thread.

Invariant: a change that is refused has changed nothing. eviction/shares.py says what a quota does.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvdepot.core.index.accounts import Accounts
from kvdepot.core.index.chunk import Chunk, Namespace, is_evictable
from kvdepot.core.index.namespaces import Namespaces
from kvdepot.errors import BadRequest, Busy
from kvdepot.protocol.keys import tenant_salt
from kvdepot.protocol.quotas import Quota

MOST_MOVED = 1 << 17
"""Chunks that change their account, or whose ages are recorded, in one step of some tenths of a second."""


def set_quota(accounts: Accounts, namespaces: Namespaces, owner: tuple[str, bytes], quota: Quota | None) -> None:
    """Give the tenant or the salt of `owner` (tenant, tag) a quota, another one, or none; see Index.set_quota."""
    tenant, tag = owner
    if quota is not None and (fault := accounts.fault(tenant, tag, quota)):
        raise BadRequest(fault)
    salt = tenant_salt(tenant, tag)
    old = accounts.of(tenant, salt)
    has_account = (old.tenant, old.tag) == owner and old is not accounts.rest
    if quota is None and not has_account:
        return
    of_tenant = [each for each in namespaces.all() if each.tenant == tenant]
    named = [chunk for chunk in _chunks_in(of_tenant) if not tag or chunk.salt == salt]
    aging: list[Chunk] = []
    if quota is not None and quota.ttl_s and not (has_account and 0 < old.quota.ttl_s <= quota.ttl_s):
        aging = [chunk for chunk in named if chunk.sealed]  # others have no age yet
    if quota is not None and has_account:
        _refuse_many(len(aging))
        accounts.set(old, quota)
    else:
        moved = [chunk for chunk in named if chunk.account is old]
        stay_sealed = sum(chunk.account is not old for chunk in aging)
        _refuse_many((old.chunks if moved else 0) + stay_sealed)
        left: list[Chunk] = []
        if quota is not None and moved:  # a policy cannot give up chunks, so those that stay get a new one
            ids = set(map(id, moved))
            known = namespaces.all() if old is accounts.rest else of_tenant
            left = [each for each in _chunks_in(known) if each.account is old and id(each) not in ids]
        size = sum(chunk.bytes for chunk in moved)
        for each, each_salt, late in accounts.given_up.values():
            is_named = each == tenant and (not tag or each_salt == salt)
            size += late if is_named and accounts.of(each, each_salt) is old else 0
        if quota is None:
            accounts.detach(old)
        new = accounts.of(tenant) if quota is None else accounts.open(tenant, tag, quota)
        for chunk in moved:
            chunk.account = new
        for account, sign in ((old, -1), (new, 1)):
            account.charge(sign * size)
            account.chunks += sign * len(moved)
        if quota is not None and moved:
            accounts.renew(old)
        queue(moved + left)
        assert quota is not None or (not old.used and not old.chunks), old
    for chunk in aging:
        accounts.ages.record(chunk)


def queue(chunks: list[Chunk]) -> None:
    """Insert chunks into the policies of their accounts, which do not know them, in their order so far."""
    chunks.sort(key=lambda chunk: (chunk.order, chunk.used))
    for chunk in chunks:
        chunk.queued, chunk.place = False, 0  # of another policy
    for chunk in chunks:
        chunk.account.policy.insert([chunk])
    for chunk in chunks:
        if is_evictable(chunk):
            chunk.account.policy.add(chunk)


def _chunks_in(namespaces: Iterable[Namespace]) -> list[Chunk]:
    return [chunk for namespace in namespaces for chunk in namespace.chunks.values()]


def _refuse_many(chunks: int) -> None:
    """Raise Busy if these are too many chunks to change in one step."""
    if chunks > MOST_MOVED:
        raise Busy(
            f"{chunks} chunks would have to be moved, more than {MOST_MOVED} at once: set the quota in the settings "
            "file and restart the server, or forget chunks first"
        )
