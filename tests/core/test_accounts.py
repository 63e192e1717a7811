"""Quotas of tenants and salts: floors, caps and weights, compared with sums over all chunks; changes of accounts."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any, TypeAlias

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvdepot.core.index import matching
from kvdepot.core.index.chunk import Chunk, Namespace, Shard, is_evictable
from kvdepot.core.index.excess import expire, trim
from kvdepot.core.index.index import Index
from kvdepot.core.index.recovery import restore
from kvdepot.core.index.runs import Refusal, Reservation, Run
from kvdepot.core.index.states import ChunkState
from kvdepot.errors import BadRequest
from kvdepot.eviction import POLICIES, Lru
from kvdepot.memory.allocator import PAGE, Allocator
from kvdepot.memory.records import SLOT_BYTES, Records
from kvdepot.protocol.keys import salt_tag, tenant_salt
from kvdepot.protocol.quotas import MOST_QUOTAS, Quota
from kvdepot.protocol.wire import Group
from tests.core.shelf import key_of
from tests.core.test_quotas import pages

TENANTS = ["", "a", "b", "c"]
SIZES = {"": 2 * PAGE, "a": PAGE, "b": 3 * PAGE - 1, "c": 2 * PAGE}
"""Bytes of a tenant's chunks."""
TAGS = [b"", salt_tag("x"), salt_tag("y")]

Owner: TypeAlias = tuple[str, bytes]
"""A tenant and the tag of a salt, or no tag."""
OWNERS: list[Owner] = [(tenant, tag) for tenant in TENANTS for tag in TAGS]
OF_PATHS = st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple)


class House:
    """An index in which each tenant has a model."""

    def __init__(self, capacity: int, policy: str = "lru", records: Records | None = None, **options: Any) -> None:
        self.index = Index(Allocator(0, capacity * PAGE), POLICIES[policy], records, **options)
        self.namespaces = {tenant: self.namespace(tenant) for tenant in TENANTS}
        self._names = itertools.count()

    def namespace(self, tenant: str) -> Namespace:
        (namespace,) = self.index.namespaces.find_groups("m", 1, 0, [Group(0, 1, 0, bytes(32))], tenant)
        namespace.live = 1
        return namespace

    def reserve(
        self, tenant: str, path: tuple[int, ...], size: int, is_load: bool = False, tag: bytes = b""
    ) -> Reservation:
        parent = key_of(path[:-1]) if len(path) > 1 else b"root"
        namespace = self.namespaces[tenant]
        run = Run(key_of(path), size, parent, len(path), tenant_salt(tenant, tag))
        return self.index.reserve(namespace, 0, run, None if is_load else 0)

    def store(
        self, tenant: str, path: tuple[int, ...] | None = None, size: int = PAGE, tag: bytes = b"", born: int = 0
    ) -> Chunk | None:
        """Store a chunk, by default one of a new prompt; None where there is no room."""
        made = self.reserve(tenant, path or (1_000_000 + next(self._names),), size, tag=tag)
        if not made.chunks:
            return None
        (chunk,) = made.chunks
        self.index.seal(chunk, 0, born=born)
        return chunk

    def fill(self, *tenants: str, chunks: int = 100) -> None:
        for _ in range(chunks):
            for tenant in tenants:
                assert self.store(tenant) is not None

    def used(self, tenant: str, tag: bytes | None = None) -> int:
        """Pages of a tenant, or of one salt of it, counted by its chunks' extents."""
        salts = None if tag is None else tenant_salt(tenant, tag)
        chunks = [each for each in self.namespaces[tenant].chunks.values() if salts in (None, each.salt)]
        return sum(size for chunk in chunks for shard in chunk.shards.values() for _, size in shard.extents) // PAGE


class QuotaMachine(RuleBasedStateMachine):
    """Stores, loads, pins and changes of quotas by tenants and salts, with a quota or without.

    A client may say another salt for a chunk than for the one before it. Nothing but its word says which salt it has.
    """

    @initialize(capacity=st.integers(8, 40), policy=st.sampled_from(sorted(POLICIES)))
    def begin(self, capacity: int, policy: str) -> None:
        self.house = House(capacity, policy)
        self.capacity = capacity
        self.index = self.house.index
        self.quotas: dict[Owner, Quota] = {}
        self.over: dict[Owner, int] = {}  # those above a cap that was lowered, and the pages that they may have at most
        self.open: list[Chunk] = []
        self.pins: list[list[Chunk]] = []
        self.late: list[tuple[Owner, Shard]] = []  # loads that a store has overtaken

    def account(self, owner: Owner) -> Owner:
        """Whose quota an owner's chunks count for; ("", b""): nobody's."""
        tenants = owner[0], b""
        return owner if owner in self.quotas else tenants if tenants in self.quotas else ("", b"")

    def owner_of(self, chunk: Chunk) -> Owner:
        tenant = chunk.namespace.tenant
        return next((tenant, tag) for tag in TAGS if tenant_salt(tenant, tag) == chunk.salt)

    def used(self) -> Counter[Owner]:
        """Pages by account, from the chunks, and from loads that a store has overtaken."""
        used: Counter[Owner] = Counter()
        for owner in OWNERS:
            used[self.account(owner)] += self.house.used(*owner)
        for owner, shard in self.late:
            used[self.account(owner)] += sum(size for _, size in shard.extents) // PAGE
        return used

    @rule(owner=st.sampled_from(OWNERS), path=OF_PATHS, is_load=st.booleans(), seals=st.booleans())
    def store(self, owner: Owner, path: tuple[int, ...], is_load: bool, seals: bool) -> None:
        tenant, tag = owner
        before, size = self.used(), SIZES[tenant]
        old = self.house.namespaces[tenant].chunks.get(key_of(path))
        loading = old.shards[0] if old is not None else None
        owner = owner if old is None else self.owner_of(old)
        made = self.house.reserve(tenant, path, size, is_load, tag)
        if made.chunks and loading is not None and loading.state is ChunkState.FREED:
            self.late.append((owner, loading))
            made.chunks.clear()
        after = self.used()
        for other in self.quotas.keys() - {self.account(owner)}:
            floor = self.quotas[other].floor_bytes / PAGE
            assert after[other] == before[other] or after[other] >= floor, f"{owner} took {other} below its floor"
        if made.refusal is not None:
            self.check_refusal(owner, path, -(-size // PAGE), made.refusal is Refusal.OVER_CAP)
        self.open += made.chunks
        if made.chunks and seals:
            self.seal(self.open.pop())

    def check_refusal(self, owner: Owner, path: tuple[int, ...], size: int, is_capped: bool) -> None:
        """A store is refused only if nothing may be evicted for it."""
        used, index, account = self.used(), self.index, self.account(owner)
        cap = self.quotas.get(account, Quota()).cap_bytes / PAGE or self.capacity
        assert is_capped == (used[account] + size > cap and cap < self.capacity)
        if used[account] > cap or size > min(cap, self.capacity):
            return
        needed = self.house.namespaces[owner[0]].chunks.get(key_of(path[:-1]))
        evictable = [
            chunk
            for namespace in index.namespaces.all()
            for chunk in namespace.chunks.values()
            if is_evictable(chunk) and chunk is not needed
        ]
        assert not any(self.account(self.owner_of(chunk)) == account for chunk in evictable)
        fits_alone = used[account] + size <= self.capacity  # else what others have would not suffice
        for chunk in evictable if fits_alone and not is_capped else []:
            other = self.account(self.owner_of(chunk))
            floor = self.quotas.get(other, Quota()).floor_bytes / PAGE
            assert used[other] - chunk.bytes // PAGE < floor, "somebody could have spared a chunk"

    def seal(self, chunk: Chunk) -> None:
        self.index.seal(chunk, 0)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), fails=st.booleans())
    def end_a_store(self, data: st.DataObject, fails: bool) -> None:
        chunk = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        if fails:
            self.index.discard(chunk, 0)
        else:
            self.seal(chunk)

    @precondition(lambda self: self.late)
    @rule()
    def end_a_load_that_was_given_up(self) -> None:
        self.index.give_back(self.late.pop()[1])

    @rule(tenant=st.sampled_from(TENANTS), path=OF_PATHS)
    def pin(self, tenant: str, path: tuple[int, ...]) -> None:
        hashes = b"".join(key_of(path[: i + 1]) for i in range(len(path)))
        chunks = matching.match(self.house.namespaces[tenant], hashes).chunks
        self.index.hold(chunks)
        self.pins.append(chunks)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.index.release(self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1))))

    @rule(
        owner=st.sampled_from(OWNERS[1:]),
        floor=st.integers(0, 12),
        cap=st.integers(0, 30),
        weight=st.sampled_from([0.5, 1.0, 4.0]),
    )
    def set_a_quota(self, owner: Owner, floor: int, cap: int, weight: float) -> None:
        (tenant, tag), quota = owner, pages(floor, max(floor, cap) if cap else 0, weight)
        floors = floor + sum(each.floor_bytes // PAGE for name, each in self.quotas.items() if name != owner)
        if floors > self.capacity:
            with pytest.raises(BadRequest):
                self.index.set_quota(tenant, quota, tag)
            return
        self.index.set_quota(tenant, quota, tag)
        self.quotas[owner] = quota
        self.over[owner] = self.used()[owner]

    @rule(owner=st.sampled_from(OWNERS[1:]))
    def end_a_quota(self, owner: Owner) -> None:
        tenant, tag = owner
        self.index.set_quota(tenant, None, tag)
        self.quotas.pop(owner, None)
        self.over.pop(owner, None)
        if (tenant, b"") in self.quotas:  # a salt's chunks may be too many for their tenant's cap
            self.over[tenant, b""] = self.used()[tenant, b""]

    @rule(most=st.integers(1, 4))
    def trim(self, most: int) -> None:
        before = self.index.evicted
        goes_on = trim(self.index, most)
        assert self.index.evicted - before <= most
        for owner, quota in self.quotas.items() if not goes_on else ():
            if quota.cap_bytes and self.used()[owner] * PAGE > quota.cap_bytes:
                chunks = self.house.namespaces[owner[0]].chunks.values()
                own = [chunk for chunk in chunks if self.account(self.owner_of(chunk)) == owner]
                assert not any(map(is_evictable, own)), "somebody is above a cap, and the chunks could go"

    @invariant()
    def sums_agree_and_nobody_is_above_a_cap(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.validate()
        used = self.used()
        for owner, quota in self.quotas.items():
            tenant, tag = owner
            assert self.index.accounts.of(tenant, tenant_salt(tenant, tag)).used == used[owner] * PAGE
            if quota.cap_bytes:
                limit = max(quota.cap_bytes // PAGE, self.over[owner])
                assert used[owner] <= limit, f"{owner} has {used[owner]} pages, and may have {limit}"
                self.over[owner] = used[owner]
        assert self.index.accounts.rest.used == used["", b""] * PAGE

    def teardown(self) -> None:
        for pins in getattr(self, "pins", []):
            self.index.release(pins)
        for chunk in getattr(self, "open", []):
            self.index.discard(chunk, 0)
        for _, shard in getattr(self, "late", []):
            self.index.give_back(shard)
        if hasattr(self, "index"):
            self.index.validate()
            assert not any(is_evictable(chunk) and not chunk.queued for n in self.index.namespaces.all()
                           for chunk in n.chunks.values())  # fmt: skip


TestQuotas = QuotaMachine.TestCase
TestQuotas.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


# -- changes at run time


def test_floors_beyond_the_arena_are_refused_and_change_nothing() -> None:
    house = House(16)
    house.index.set_quota("b", pages(8))
    with pytest.raises(BadRequest, match="more than the arena"):
        house.index.set_quota("a", pages(9))
    assert [account.tenant for account in house.index.accounts.all()] == ["", "b"]


def test_at_most_so_many_tenants_have_a_quota_and_never_those_without_a_name() -> None:
    index = House(16).index
    for number in range(MOST_QUOTAS):
        index.set_quota(f"t{number}", pages(cap=1))
    with pytest.raises(BadRequest, match=str(MOST_QUOTAS)):
        index.set_quota("one more", pages())
    with pytest.raises(BadRequest, match="without a tenant"):
        index.set_quota("", pages())


# -- salts


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_chunk_with_another_salt_than_the_one_before_it_is_no_part_of_its_chain(policy: str) -> None:
    table = memoryview(bytearray(256 * SLOT_BYTES))
    house, x = House(16, policy, Records(table)), TAGS[1]
    house.index.set_quota("a", pages(), x)
    assert house.store("a", (1,)) is not None
    other = house.store("a", (1, 2), tag=x)
    assert other is not None and (other.parent, other.position) == (None, 0)
    house.index.set_quota("a", pages(), TAGS[2])
    for number in range(40):
        house.store("a", (number, 3), tag=x)
    house.index.validate()
    index = Index(Allocator(0, 16 * PAGE), Lru, Records(table))
    restore(index)
    index.validate()


def test_quotas_that_come_and_go_leave_no_entries_in_the_queues_of_ages() -> None:
    house = House(64, ttl_s=1000)
    for number in range(20):
        house.store("a", (number,), tag=TAGS[number % 2])
    for _ in range(50):
        house.index.set_quota("a", pages(), TAGS[1])
        house.index.set_quota("a", None, TAGS[1])
    assert len(house.index.accounts.ages) <= 2 * 20 + 64


# -- expiry


def test_the_shortest_ttl_of_server_tenant_and_salt_applies() -> None:
    house = House(16, ttl_s=100)
    x, y = TAGS[1:]
    house.index.set_quota("a", pages(ttl_s=20), x)
    house.index.set_quota("a", pages(ttl_s=90), y)
    for tag in (x, y, b""):
        house.store("a", tag=tag)
    house.index.set_quota("a", pages(ttl_s=50))  # also for what is in the accounts of salts
    assert [expire(house.index, wall) for wall in (19, 20, 49, 50)] == [0, 1, 0, 2]
    chunk = house.store("a", tag=y, born=50)
    assert chunk is not None
    assert house.index.accounts.ttl_of(chunk) == 50
    assert [expire(house.index, wall) for wall in (99, 100)] == [0, 1]
    house.store("a", tag=y, born=100)
    house.index.set_quota("a", None)
    assert [expire(house.index, wall) for wall in (189, 190)] == [0, 1]


# -- a restart


def test_a_restart_puts_chunks_into_their_accounts_and_trims_to_a_lower_cap() -> None:
    table = memoryview(bytearray(256 * SLOT_BYTES))
    house = House(64, records=Records(table))
    house.index.set_quota("a", pages(cap=20))
    house.fill("a", "", chunks=20)
    index = Index(Allocator(0, 64 * PAGE), Lru, Records(table))
    index.set_quota("a", pages(cap=8))
    index.set_quota("b", pages(4))
    restore(index)
    index.validate()
    assert [account.chunks for account in index.accounts.all()] == [20, 20, 0]
    assert trim(index, 5) and index.accounts.of("a").chunks == 15
    assert not trim(index, 100)
    assert [account.used // PAGE for account in index.accounts.all()] == [20, 8, 0]
    index.validate()
