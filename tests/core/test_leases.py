"""Leases: what they hold and for how long, their budget beside quotas, growth, drops, and a machine against a model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvdepot.core.index import matching
from kvdepot.core.index.chunk import Account, Chunk, Namespace
from kvdepot.core.leases import Lease
from kvdepot.core.tiering.forgetting import DroppedErase, Erasures, Unsaved
from kvdepot.core.tiering.tier import TierState, facts_of
from kvdepot.errors import BadRequest, Busy
from kvdepot.keys import ChunkChain, derive_root
from kvdepot.memory.allocator import PAGE
from kvdepot.protocol import wire
from kvdepot.protocol.keys import salt_tag, tenant_salt
from kvdepot.tiers import parse
from kvdepot.tiers.worker import Erased
from tests.core.desk import PER_CHUNK, Desk, group_stores, lookup, prompt, shards, store
from tests.core.host import look, new_host
from tests.core.test_quotas import engine, pages
from tests.tiers.faulty import MemoryTier


def lease(chain: ChunkChain, name: str = "l", kind: str = "retain", **options: Any) -> wire.TakeLease:
    return wire.TakeLease(name, kind, "m", 1, PER_CHUNK, bytes(chain.hashes), **options)


def drop(chain: ChunkChain, **options: Any) -> wire.Drop:
    return wire.Drop("m", 1, PER_CHUNK, bytes(chain.hashes), **options)


def branch(name: str, shared: int, own: int) -> ChunkChain:
    """A prompt that begins like all other branches of `name`, and ends like those with the same number `own`."""
    chain = ChunkChain(1, derive_root(("salt", name)))
    chain.extend([*range(shared), *range(1000 * own, 1000 * own + 3)])
    return chain


def has(desk: Desk, client: bytes, chain: ChunkChain) -> int:
    """How many chunks of a prompt memory has, without a use."""
    tenant = desk.depot.client(client)
    assert tenant is not None
    namespaces = matching.for_lookup(desk.index.namespaces, (tenant.tenant, "m", 1), PER_CHUNK)
    return max((matching.match(each, bytes(chain.hashes)).matched for each in namespaces), default=0)


def names(desk: Desk, tenant: str = "") -> set[str]:
    return {each.name for each in desk.depot.leases.listed(tenant, desk.now)}


@pytest.fixture
def desk() -> Desk:
    desk = Desk(pages=32)
    desk.tick(0.0, 1000.0)
    desk.hello(b"admin")
    return desk


# -- holding


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "keep"}, {"priority": 101}, {"priority": -1}, {"ttl_s": -1}, {"kind": "expire"}, {"salt": b"short"},
        {"name": "n" * 5000},
    ],
)  # fmt: skip
def test_a_lease_that_makes_no_sense_is_refused(desk: Desk, wrong: dict[str, Any]) -> None:
    blue = engine(desk, "blue")
    desk.ask(blue, store(prompt("a", 1)))
    assert isinstance(desk.ask(blue, lease(prompt("a", 1), **wrong)), BadRequest)
    assert desk.depot.leases.totals("") == (0, 0)


def test_leases_beyond_the_most_are_refused_and_counted_but_names_can_be_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvdepot.core.leases.MOST_LEASES", 20)
    desk = Desk(pages=64)
    desk.tick(0.0, 1000.0)
    blue = engine(desk, "blue")
    chain = prompt("a", 1)
    desk.ask(blue, store(chain))
    answers = [desk.ask(blue, lease(chain, f"{number}")) for number in range(30)]
    assert answers[:20] == [1] * 20 and all(isinstance(each, Busy) for each in answers[20:])
    assert desk.depot.counters["leases_refused"] == 10
    assert desk.ask(blue, lease(chain, "7")) == 1


def test_counters_say_what_leases_held_for_how_long_and_what_lookups_found_of_it(desk: Desk) -> None:
    blue = engine(desk, "blue")
    chain = prompt("a", 4)
    desk.ask(blue, store(chain))
    desk.ask(blue, lease(prompt("a", 2)))
    desk.tick(10.0, 1010.0)
    desk.ask(blue, lease(chain))
    desk.tick(15.0, 1015.0)
    counters = desk.depot.counters
    assert (counters["leases_begun"], counters["lease_byte_seconds"]) == (2, (10 * 2 + 5 * 4) * PAGE)
    desk.ask(blue, lease(prompt("a", 3)))
    for number, chunks in enumerate((4, 3, 1)):
        desk.ask(blue, lookup(prompt("a", chunks), f"{number}"))
    assert counters["leased_hit_tokens"] == 3 + 3 + 1
    desk.ask(blue, wire.EndLease("l"))
    desk.ask(blue, lookup(chain, "more"))
    assert counters["leased_hit_tokens"] == 7


def test_a_leased_chain_that_a_failed_store_breaks_is_leased_no_more_before_the_gap(desk: Desk) -> None:
    blue = engine(desk, "blue")
    chain = prompt("a", 4)
    desk.ask(blue, store(chain))
    desk.ask(blue, lease(chain))
    (namespace,) = desk.index.namespaces.all()
    leased = [namespace.chunks[chain.slice(i, i + 1)] for i in range(4)]
    desk.index.mark_corrupt(leased[2], 0)
    desk.send(blue, store(chain))
    desk.finish(desk.copies[0], False)
    assert leased[2].gone
    desk.ask(blue, wire.EndLease("l"))
    assert [chunk.leases for chunk in leased] == [0, 0, 0, 0]


# -- growth


def test_a_lease_of_a_prompt_that_nobody_has_stored_yet_waits_for_a_minute(desk: Desk) -> None:
    blue = engine(desk, "blue")
    first, late = prompt("a", 2), prompt("b", 2)
    assert desk.ask(blue, lease(first, "first")) == desk.ask(blue, lease(late, "late")) == 0
    desk.tick(59.0, 1059.0)
    desk.ask(blue, store(first))
    desk.tick(61.0, 1061.0)
    desk.ask(blue, store(late))
    assert names(desk) == {"first"}
    assert desk.depot.leases.totals("") == (1, 2 * PAGE)


# -- the budget


def test_a_lease_that_cannot_grow_within_its_budget_keeps_what_it_has(desk: Desk) -> None:
    blue = engine(desk, "blue")
    chain = prompt("a", 20)
    desk.ask(blue, store(chain, end=10))
    assert desk.ask(blue, lease(chain)) == 10
    desk.ask(blue, store(chain, first=10, end=20))
    desk.tick(1.0, 1001.0)
    assert desk.depot.leases.totals("") == (1, 10 * PAGE)
    assert desk.depot.counters["lease_growths_refused"] == 1 and desk.depot.counters["leases_refused"] == 0


@pytest.mark.parametrize(("reach", "parts", "grown"), [(2, [3, 4], 5), (1, [2], 3)], ids=["window", "state"])
def test_a_lease_grows_to_each_boundary_that_all_groups_have(reach: int, parts: list[int], grown: int) -> None:
    desk = Desk()
    desk.hello()
    desk.register_groups((0, reach))
    chain = prompt("a", 5)
    assert desk.ask(b"one", lease(chain)) == 0
    for each in group_stores((0, reach), chain, [range(5), parts]):
        desk.ask(b"one", each)
    for second in (1.0, 62.0):
        desk.tick(second, 1000.0 + second)
        assert [each.chunks for each in desk.depot.leases.listed("", 0.0)] == [grown]


def test_leases_beyond_those_that_one_tick_looks_up_grow_later(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdepot.core.leases._MOST_MATCHED", 1)
    blue = engine(desk, "blue")
    for name in "xyz":
        assert desk.ask(blue, lease(prompt("a", 3), name, ttl_s=100)) == 0
    desk.ask(blue, store(prompt("a", 2)))
    sizes = []
    for second in range(1, 4):
        desk.tick(float(second), 1000.0 + second)
        sizes.append(sorted(each.chunks for each in desk.depot.leases.listed("blue", desk.now)))
    assert sizes == [[0, 0, 2], [0, 2, 2], [2, 2, 2]]


def test_a_lease_that_has_grown_whole_keeps_no_hashes(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdepot.core.leases.MOST_HASHES", 4)
    blue = engine(desk, "blue")
    for second, name in enumerate("xyz", 1):  # hashes of two would be too many
        assert desk.ask(blue, lease(prompt(name, 3), name)) == 0
        desk.ask(blue, store(prompt(name, 3)))
        desk.tick(float(second), 1000.0 + second)
    assert [each.chunks for each in desk.depot.leases.listed("blue", desk.now)] == [3, 3, 3]


def test_a_refused_lease_loses_no_reply_to_one_of_its_name_that_waits(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdepot.core.leases.MOST_HASHES", 4)
    blue = engine(desk, "blue")
    chain = prompt("a", 5)
    desk.send(blue, store(chain))
    waiting = desk.send(blue, lease(chain, "n"))
    assert waiting not in desk.answers
    refused = desk.send(blue, lease(chain, "n", kind="expire", ttl_s=10))
    assert isinstance(desk.answers[refused], Busy) and waiting not in desk.answers
    desk.settle()
    assert desk.answers[waiting] == 5


def test_another_tenants_forget_ends_no_lease_of_chunks_that_have_expired() -> None:
    desk = Desk(pages=64, settings={"ttl_s": 100})
    desk.tick(0.0, 1000.0)
    blue, red = engine(desk, "blue"), engine(desk, "red")
    chain = prompt("a", 3)
    desk.ask(blue, store(chain))
    assert desk.ask(blue, lease(chain)) == 3
    desk.tick(101.0, 1101.0)
    desk.ask(red, wire.ForgetChunks("nothing"))
    assert names(desk, "blue") == {"l"}
    desk.ask(blue, store(chain))
    assert has(desk, blue, chain) == 3
    desk.ask(blue, wire.ForgetChunks())
    assert names(desk, "blue") == set()
    desk.assert_empty()


# -- drops


def test_a_drop_of_a_prompt_with_windows_whose_trunk_has_expired_removes_both() -> None:
    desk = Desk(settings={"ttl_s": 100})
    desk.hello()
    desk.tick(0.0, 1000.0)
    desk.register_groups((0, 2))
    chain = prompt("a", 3)
    stores = list(group_stores((0, 2), chain))
    of_trunk, of_windows = stores[:-2], stores[-2:]
    for each in of_trunk:
        desk.ask(b"one", each)
    desk.tick(10.0, 1010.0)
    for each in of_windows:
        desk.ask(b"one", each)
    desk.tick(101.0, 1101.0)
    assert desk.ask(b"one", drop(chain)) > 0
    desk.assert_empty()


def test_while_too_much_is_being_dropped_more_is_refused(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdepot.core.forgetting._MOST_HASHES", 2)
    blue = engine(desk, "blue")
    chain = prompt("a", 3)
    desk.ask(blue, store(chain))
    assert desk.ask(blue, lease(chain, "held")) == 3
    assert desk.ask(blue, lease(chain, "l", kind="expire", ttl_s=9)) == 3
    assert desk.send(blue, wire.EndLease("l", drops=True)) in desk.answers
    for request in (drop(chain), wire.EndLease("held", drops=True), lease(chain, "m", kind="expire", ttl_s=9)):
        assert isinstance(desk.answers[desk.send(blue, request)], Busy)
    desk.settle()
    assert desk.ask(blue, wire.EndLease("held", drops=True)) is True
    desk.settle()
    desk.assert_empty()


def test_a_chunk_that_is_being_demoted_is_waited_for_and_its_tier_loses_it() -> None:
    tier = MemoryTier()
    host = new_host(("disk:///d?write=on_evict", tier), pages=16)
    chains = [prompt(f"p{i}", 1) for i in range(15)]
    for chain in chains[:14]:
        host.find(b"one", store(chain))
    host.send(b"one", store(chains[14]))
    host.settle()
    assert host.kinds() == ["Save"]
    asked = host.send(b"one", drop(chains[0]))
    assert asked not in host.answers, "the demotion would leave it in the tier"
    host.work()
    host.tick(1.0, 1001.0)
    while asked not in host.answers or host.tier_tasks:
        host.expire()
        host.rest()
    assert not tier.objects and host.find(b"one", look(chains[0])) == 0
    host.assert_quiet()


def test_a_drop_waits_for_a_save_for_thirty_seconds_and_ends_there() -> None:
    host = new_host(MemoryTier())
    host.send(b"one", store(prompt("a", 2)))
    while host.copies:
        host.finish(host.copies[0])
    assert "Save" in host.kinds()
    asked = host.send(b"one", drop(prompt("a", 2)))
    for second in (10.0, 29.0, 31.0):
        assert asked not in host.answers
        host.tick(second, 1000.0 + second)
        host.expire()
    assert host.answers[asked] == 0 and host.index.chunks == 2
    host.rest()
    host.assert_quiet()


def test_a_tier_that_cannot_erase_is_counted() -> None:
    tier = MemoryTier()
    host = new_host(tier)
    host.find(b"one", store(prompt("a", 4)))
    asked = host.send(b"one", drop(prompt("a", 4)))
    (erase,) = host.tier_tasks
    host.tier_tasks.clear()
    host.finished(erase, Busy("no"))
    assert host.answers[asked] == 4
    assert host.depot.status().tiers[0].counters["unreleased_chunks"] == 4
    host.assert_quiet()


def test_the_objects_erased_at_once_are_bounded_for_any_ranks_and_chunks() -> None:
    tier = TierState(0, parse("redis://localhost:1"))
    erasures = Erasures([tier])
    namespace = Namespace(1, "", "m", 200, 1)
    namespace.layouts = {rank: bytes(32) for rank in range(200)}
    keys = [bytes([number]) * 32 for number in range(256)]
    erasures.add(Unsaved(namespace, key, b"") for key in keys)
    erases = erasures.dispatch()
    assert [len(erase.names) for erase in erases] == [64] and not erasures.dispatch()
    assert len(namespace.facts) == 64, "no names were made that are not needed yet"
    names: list[str] = []
    while erases:
        (erase,) = erases
        names += erase.names
        assert len(erase.names) <= 64 and isinstance(erase, DroppedErase) and erasures
        erases = erasures.ended(erase, Erased())
    assert names == [facts_of(namespace, rank).name(b"", key) for key in keys for rank in range(200)]
    assert not erasures


# -- a machine against a plain model


_TENANTS = ("blue", "red", "")
_ARENA = 24


def salted(chain: ChunkChain, salt: bytes = b"") -> wire.Store:
    return wire.Store(1, [msgspec.structs.replace(shards(chain), salt=salt)])


_TAG = salt_tag("user")
_QUOTAS = [("blue", b""), ("red", b""), ("blue", _TAG), ("", _TAG)]


def salt_of(what: str) -> bytes:
    """Half of the prompts have a salt."""
    return _TAG if what in "cd" else b""


class LeaseMachine(RuleBasedStateMachine):
    """Leases, stores and quotas of three tenants and a salt; the model knows names, chunks and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.desk: Desk = Desk(pages=_ARENA)
        self.desk.tick(0.0, 1000.0)
        self.desk.hello(b"admin")
        self.clients = {tenant: engine(self.desk, tenant) for tenant in _TENANTS}
        self.model: dict[tuple[str, str], tuple[str, int, float, int]] = {}  # prompt, chunks, end, priority
        self.expiring: dict[tuple[str, str], int] = {}  # of those, the leases of kind expire: chunks of their prompts
        self.floors: dict[tuple[str, bytes], int] = {}

    def account(self, tenant: str, what: str) -> Account:
        return self.desk.index.accounts.of(tenant, tenant_salt(tenant, salt_of(what)))

    @rule(tenant=st.sampled_from(_TENANTS), name=st.sampled_from("abcd"), chunks=st.integers(1, 6))
    def store(self, tenant: str, name: str, chunks: int) -> None:
        salted = msgspec.structs.replace(shards(prompt(name, chunks)), salt=salt_of(name))
        self.desk.ask(self.clients[tenant], wire.Store(1, [salted]))

    @rule(
        tenant=st.sampled_from(_TENANTS), name=st.sampled_from("xyz"), what=st.sampled_from("abcd"),
        chunks=st.integers(1, 6), ttl_s=st.sampled_from([0, 3, 50]), priority=st.sampled_from([0, 50, 100]),
        kind=st.sampled_from(["retain", "retain", "expire"]),
    )  # fmt: skip
    def lease(self, tenant: str, name: str, what: str, chunks: int, ttl_s: int, priority: int, kind: str) -> None:
        before = dict(self.model)
        options = {"kind": kind, "ttl_s": ttl_s or (3 if kind == "expire" else 0), "priority": priority}
        request = lease(prompt(what, chunks), name, salt=salt_of(what), **options)
        matched = has(self.desk, self.clients[tenant], prompt(what, chunks))
        answer = self.desk.ask(self.clients[tenant], request)
        there = names(self.desk, tenant) if tenant else self._names("")
        if isinstance(answer, Busy):
            assert there == {key[1] for key in before if key[0] == tenant}, "a refused lease changes something"
            return
        assert answer == matched
        end = self.desk.now + request.ttl_s if request.ttl_s else float("inf")
        self.model[tenant, name] = (what, matched if kind == "retain" else 0, end, priority)
        self.expiring.pop((tenant, name), None)
        if kind == "expire":
            self.expiring[tenant, name] = chunks
        for key in [key for key in self.model if key[0] == tenant and key[1] not in there]:
            gone = self.model.pop(key)
            assert gone[2] < float("inf") and gone[3] <= priority, "this lease need not make room"
            assert self.account(tenant, gone[0]) is self.account(tenant, what), "it gave up another account's room"

    def _prompt(self, lease: Lease) -> str:
        return self.model[lease.tenant, lease.request.name][0]

    def _names(self, tenant: str) -> set[str]:
        return set(self.desk.depot.leases._by_tenant.get(tenant, {}))

    @rule(tenant=st.sampled_from(_TENANTS), name=st.sampled_from("xyz"), drops=st.booleans())
    def end(self, tenant: str, name: str, drops: bool) -> None:
        lease = self.desk.depot.leases._by_tenant.get(tenant, {}).get(name)
        ended, client = self.model.pop((tenant, name), None), self.clients[tenant]
        self.expiring.pop((tenant, name), None)
        before = 0 if ended is None else has(self.desk, client, prompt(ended[0], 6))
        keys = 0 if lease is None else len(lease.keys()) // 32
        assert self.desk.ask(client, wire.EndLease(name, drops)) is (ended is not None)
        self.desk.settle()
        if ended is not None:
            left = has(self.desk, client, prompt(ended[0], 6))
            is_whole = drops and keys >= before
            assert left == (self._held(tenant, ended[0]) if is_whole else before), "only a lease keeps what is dropped"

    def _held(self, tenant: str, what: str) -> int:
        """The chunks of a prompt that the leases left hold."""
        leases = self.desk.depot.leases._by_tenant.get(tenant, {}).values()
        first = bytes(prompt(what, 1).hashes)
        return max((each.chunks for each in leases if each.keys()[:32] == first and each.holds), default=0)

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds: int) -> None:
        now = self.desk.now + seconds
        over = [key for key in self.expiring if key in self.model and self.model[key][2] <= now]
        expired = {(key[0], self.model[key][0], self.expiring.pop(key)) for key in over}
        there = {each: has(self.desk, self.clients[each[0]], prompt(each[1], 6)) for each in expired}
        could_grow = {
            lease: has(self.desk, self.clients[lease.tenant], prompt(self._prompt(lease), 6))
            for lease in self.desk.depot.leases._growing
        }
        self.desk.tick(now, 1000.0 + now)
        for lease in self.desk.depot.leases._growing:
            assert lease.chunks == min(could_grow[lease], len(lease.hashes) // 32), "it has grown with what was stored"
        self.desk.settle()
        self.model = {key: each for key, each in self.model.items() if each[2] > now}
        for tenant, what, chunks in expired:
            left = has(self.desk, self.clients[tenant], prompt(what, 6))
            if there[tenant, what, chunks] <= chunks:
                assert left == self._held(tenant, what), "what has expired is gone, unless another lease holds it"
        for key in [key for key in self.model if key[1] not in self._names(key[0])]:
            what, chunks, ends, priority = self.model.pop(key)
            account = self.account(key[0], what)
            grown = [
                each
                for each in could_grow
                if (each.tenant, each.request.name) != key
                and each.tenant == key[0]
                and each.request.priority >= priority
                and self.account(each.tenant, self._prompt(each)) is account
            ]
            made_room = ends < float("inf") and grown
            assert not chunks or made_room, (
                "neither did nobody store it for a minute, nor did one that grew need its room"
            )

    @rule(owner=st.sampled_from(_QUOTAS), floor=st.sampled_from([0, 4, 8, None]), cap=st.sampled_from([0, 8, 16]))
    def quota(self, owner: tuple[str, bytes], floor: int | None, cap: int) -> None:
        quota = None if floor is None else pages(floor, cap)
        held = [each for each in self.desk.depot.leases._all() if each.held]
        if self.desk.ask(b"admin", wire.SetQuota(owner[0], quota, owner[1])) is None:
            self.floors[owner] = floor or 0
            self.desk.expire()  # drops what is above the cap now, not in the middle of a later rule
        ended: set[Account] = set()
        for lease in sorted(
            held, key=lambda each: (not each.request.ttl_s, each.request.priority, each.number), reverse=True
        ):
            key, account = (
                (lease.tenant, lease.request.name),
                self.account(lease.tenant, self.model[lease.tenant, lease.request.name][0]),
            )
            if key[1] in self._names(key[0]):
                assert account not in ended, "those without an end, and of high priority, end last"
            else:
                ended.add(account)
                del self.model[key]

    @invariant()
    def agrees(self) -> None:
        self.desk.index.validate()
        leases, accounts = self.desk.depot.leases, self.desk.index.accounts
        held: dict[Account, int] = {}
        for (tenant, name), (what, chunks, _, _) in self.model.items():
            there = has(self.desk, self.clients[tenant], prompt(what, 6))
            assert there >= chunks, f"{name} of {tenant!r} leases {chunks} chunks, and {there} are there"
            account = self.account(tenant, what)
            held[account] = held.get(account, 0) + leases._by_tenant[tenant][name].held
            assert leases._by_tenant[tenant][name].held >= chunks * PAGE
        assert {(t, n) for t, each in leases._by_tenant.items() for n in each} == set(self.model)
        protected: Counter[int] = Counter()
        for top, _ in (each for lease in leases._all() for each in lease.tops):
            chunk: Chunk | None = top
            while chunk is not None:
                protected[id(chunk)] += 1
                chunk = chunk.parent
        for namespace in self.desk.index.namespaces.all():
            assert all(each.leases == protected[id(each)] for each in namespace.chunks.values())
        above_all = 0
        floors = sum(self.floors.values()) * PAGE
        half = (_ARENA * PAGE - floors) // 2
        for account in accounts.all():
            own = held.get(account, 0)
            floor = account.quota.floor_bytes
            assert own <= min(floor + half, max((account.quota.cap_bytes or _ARENA * PAGE) // 2, floor))
            above_all += max(0, own - floor)
            # Whoever wants its floor can have it: what others' leases hold leaves that much.
        assert above_all <= half

    def teardown(self) -> None:
        for tenant, client in self.clients.items():
            for name in list(self._names(tenant)):
                self.desk.ask(client, wire.EndLease(name))
        assert self.desk.index.held == 0
        self.desk.assert_empty()


class TestLeaseMachine(LeaseMachine.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
