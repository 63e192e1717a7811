"""Consistency check of an index, for tests and `kvdepot check`. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable

from kvdepot.core.index import states
from kvdepot.core.index.accounts import Accounts
from kvdepot.core.index.chunk import Chunk, Namespace, is_evictable, is_unwanted
from kvdepot.memory.allocator import Allocator

_OF_SHARDS = {states.RESERVED, states.LOADING, states.SEALED, states.CORRUPT}
_OF_CHUNKS = {states.FILLING, states.WHOLE, states.CHAINED, states.PENDING_REMOVAL}


def check(
    namespaces: Iterable[Namespace], allocator: Allocator, accounts: Accounts, totals: tuple[int, int, int]
) -> None:
    """Raise AssertionError unless every count, link and state agrees; O(n). totals: the index's own counts of chunks,
    of reserved shards and of holds."""
    allocator.validate()
    used = chunks = reserved = held = 0
    children: dict[int, int] = {}
    by_account = {id(account): [0, 0] for account in accounts.all()}  # chunks, bytes
    for namespace in namespaces:
        assert namespace.groups[namespace.group] is namespace
        total = 0
        for key, chunk in namespace.chunks.items():
            assert key == chunk.key and chunk.namespace is namespace and chunk.shards
            _check_states(chunk)
            opened = sum(shard.is_open for shard in chunk.shards.values())
            assert chunk.bytes == sum(n for s in chunk.shards.values() for _, n in s.extents)
            assert namespace.slot is not None or not any(s.slot is not None for s in chunk.shards.values())
            assert chunk.holds >= opened
            if chunk.parent is not None:
                assert chunk.parent.salt == chunk.salt
                assert chunk.parent.account is chunk.account or chunk.parent.gone  # a reservation that failed
                children[id(chunk.parent)] = children.get(id(chunk.parent), 0) + 1
            if is_unwanted(chunk):
                assert chunk.queued, f"{key.hex()} can be evicted but no policy knows it"
            assert chunk.account is accounts.of(namespace.tenant, chunk.salt)
            by_account[id(chunk.account)][0] += 1
            by_account[id(chunk.account)][1] += chunk.bytes
            total += chunk.bytes
            reserved += opened
            held += chunk.holds
        assert total == namespace.bytes
        used += total
        chunks += len(namespace.chunks)
    for namespace in namespaces:
        for chunk in namespace.chunks.values():
            assert chunk.children == children.get(id(chunk), 0)
    for tenant, salt, size in accounts.given_up.values():
        used += size
        by_account[id(accounts.of(tenant, salt))][1] += size
    for account in accounts.all():
        assert [account.chunks, account.used] == by_account[id(account)], account
        assert account.leaving >= 0 and account.spare == account.used - account.leaving - account.floor, account
    assert used == allocator.capacity - allocator.free_bytes, (used, allocator)
    assert (chunks, reserved, held) == totals
    accounts.wants.check(namespaces)


def _check_states(chunk: Chunk) -> None:
    shards, before = chunk.shards.values(), chunk.parent
    assert chunk.state in _OF_CHUNKS and not chunk.gone and all(shard.state in _OF_SHARDS for shard in shards)
    assert all(shard.sealed for shard in shards if shard.slot is not None), "a shard is recorded but not sealed"
    assert chunk.sealed == sum(shard.sealed for shard in shards)
    if chunk.state is not states.PENDING_REMOVAL:
        assert (chunk.state is states.FILLING) == (chunk.sealed < chunk.namespace.world_size)
    else:
        assert not is_evictable(chunk), "a chunk that is pending removal could be removed"
    if chunk.namespace.reach:
        assert not chunk.position and chunk.state is not states.CHAINED, "a part of a bounded group is in a chain"
        assert before is None or (before.key == chunk.key and before.namespace is chunk.namespace.trunk)
        return
    is_behind_a_chain = chunk.position == 1 or (before is not None and before.state is states.CHAINED)
    if chunk.state is states.CHAINED:
        assert is_behind_a_chain or (before is not None and before.broken)
    if chunk.state is states.WHOLE:
        assert not (chunk.position and is_behind_a_chain), "a whole chunk behind a chain is not chained"
    if before is not None:
        assert before.position == chunk.position - 1
