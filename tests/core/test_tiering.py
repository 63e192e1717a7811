"""Depots with tiers behind memory: the real depot, index and tier workers' work, run step by step; no thread, no clock.

Two depots (two hosts) share a tier where it matters. Bytes are real: what a store brings is made up and remembered, and
what a retrieve gives must be just that.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from kvdepot.errors import TierError
from kvdepot.keys import ChunkChain
from kvdepot.memory.allocator import PAGE
from kvdepot.protocol import wire
from kvdepot.protocol.quotas import Quota
from kvdepot.tiers import Tier
from kvdepot.tiers.breaker import FAILURES
from kvdepot.tiers.worker import MOST_PARTS, Erased, Find, Load, Probe, Save
from tests.conftest import clear
from tests.core.desk import PER_CHUNK, group_stores, instance_of, layout, prompt, retrieve, shards, store
from tests.core.groups import SHAPES, Reaches, deepest, wire_groups
from tests.core.host import Host, look, new_host
from tests.harness import kind_of
from tests.tiers.faulty import MemoryTier

# -- loads


def test_only_what_memory_misses_is_asked_for_in_one_batch(tier: MemoryTier) -> None:
    here, there = new_host(tier), new_host(tier)
    chain = prompt("a", 40)
    here.find(b"one", store(chain, end=32))
    there.find(b"one", store(chain, end=8))
    asked = there.send(b"one", look(chain))
    (find,) = there.tier_tasks
    assert isinstance(find, Find) and len(find.names) == 32
    there.rest()
    assert there.answers[asked] == 32
    loads = [tier_task for tier_task in there.done if isinstance(tier_task, Load)]
    assert sum(len(load.parts) for load in loads) == 24 and max(len(load.parts) for load in loads) <= MOST_PARTS


@pytest.mark.parametrize(
    "other",
    [
        lambda tier: new_host(tier, model="n"),
        lambda tier: new_host(tier, world_size=2),
        lambda tier: _with_layout(tier, b"g" * 32),
    ],
)
def test_another_model_shape_or_layout_never_gets_it(tier: MemoryTier, other: Callable[[Any], Host]) -> None:
    here, there = new_host(tier), other(tier)
    chain = prompt("a", 3)
    here.find(b"one", store(chain))
    model = there.index.namespaces.all()[0].model
    world = there.index.namespaces.all()[0].world_size
    assert there.find(b"one", look(chain, model=model, world_size=world, readers=world)) == 0


def _with_layout(tier: MemoryTier, fingerprint: bytes) -> Host:
    host = Host(pages=64, tiers=[("disk:///d", tier)])
    host.tick(0.0, 1000.0)
    host.hello()
    host.ask(b"one", wire.Register(1, layout(fingerprint), "m", 1, 0, PER_CHUNK))
    return host


def test_a_load_that_evicts_the_last_chunk_of_its_namespace_can_be_found() -> None:
    tier = MemoryTier()
    here, there = new_host(tier), new_host(("disk:///d?write=off", tier), pages=2)
    chain = prompt("b", 1)
    here.find(b"one", store(chain))
    there.ask(b"one", wire.Register(2, layout(), "n", 1, 0, PER_CHUNK))
    there.find(b"one", store(prompt("a", 1)))
    there.find(b"one", store(prompt("c", 1), instance=2, model="n"))
    there.ask(b"one", wire.Unregister(1))
    assert there.find(b"one", look(chain)) == 1
    there.index.validate()
    there.ask(b"one", wire.EndSession("r"))
    there.assert_quiet()


def test_loads_that_stores_overtake_count_for_their_tenants_cap(tier: MemoryTier) -> None:
    tenants = {"blue": Quota(cap_bytes=4 * PAGE), "red": Quota(24 * PAGE)}
    here, there = _with_tenants(tier, 200, {}), _with_tenants(tier, 32, tenants)
    chains = [prompt(f"p{i}", 2) for i in range(10)]
    for chain in chains:
        here.find(b"blue", store(chain))
    for i, chain in enumerate(chains):
        there.send(b"blue", look(chain, f"r{i}"))
        for find in [task for task in there.tier_tasks if isinstance(task, Find)]:
            there.work(find)
        there.pass_time(2.0)  # the lookup is answered, the engine computes the chunks and stores them
        there.ask(b"blue", store(chain))
        there.ask(b"blue", wire.EndSession(f"r{i}"))
    allocator = there.index.allocator
    assert allocator.capacity - allocator.free_bytes <= 4 * PAGE
    for i in range(24):
        assert there.ask(b"red", store(prompt(f"red{i}", 1))) is True
    there.index.validate()
    there.rest()
    there.index.validate()


def _with_tenants(tier: MemoryTier, pages: int, quotas: dict[str, Quota]) -> Host:
    host = Host(pages=pages, tiers=[("disk:///d" if not quotas else "disk:///d?write=off", tier)])
    host.tick(0.0, 1000.0)
    host.rest()
    for tenant in ("blue", "red"):
        host.hello(tenant.encode(), tenant)
        assert host.ask(tenant.encode(), wire.Register(1, layout(), "m", 1, 0, PER_CHUNK)) is None
    host.hello(b"admin", "")
    for tenant, quota in quotas.items():
        host.ask(b"admin", wire.SetQuota(tenant, quota))
    return host


def test_a_part_that_cannot_be_loaded_ends_the_prefix_of_all_groups(tier: MemoryTier) -> None:
    chain, reaches = prompt("a", 6), (0, 1)
    here, there = (group_host(reaches, tier, url=url) for url in ("disk:///d", "disk:///d?write=off"))
    for request in group_stores(reaches, chain, [range(6), range(6)]):
        assert here.find(b"one", request) is True
    there.send(b"one", store(chain, instance_of(reaches, 0), first=3, end=4))  # its copy is in progress
    asked = there.send(b"one", look(chain))
    for _ in range(2):
        while there.tier_tasks:
            there.work()
        there.pass_time(5.0)
    assert there.answers[asked] == 3
    there.rest()


# -- late, failing, lying


def test_a_hung_tier_costs_a_lookup_its_deadline_and_what_comes_late_serves_the_next(tier: MemoryTier) -> None:
    here, there = new_host(tier), new_host(tier, lookup_s=0.5)
    chain = prompt("a", 5)
    here.find(b"one", store(chain))
    there.find(b"one", store(chain, end=2))
    asked = there.send(b"one", look(chain))
    there.work()  # it is found; the load hangs
    assert there.depot.next_deadline() <= 0.5
    there.pass_time(0.49)
    assert asked not in there.answers
    there.pass_time(0.01)
    assert there.answers[asked] == 2
    load = there.tier_tasks[0]
    there.work()
    assert isinstance(load, Load)
    asked = there.send(b"one", look(chain, "r2"))
    assert there.answers[asked] == 5 and not there.tier_tasks
    there.ask(b"one", wire.EndSession("r2"))
    there.ask(b"one", wire.EndSession("r"))
    there.assert_quiet()


def test_a_tier_that_fails_is_skipped_and_taken_back(tier: MemoryTier) -> None:
    host = new_host(tier)
    chains = [prompt(f"p{i}", 2) for i in range(FAILURES + 2)]
    tier.inject(down=1)
    for chain in chains[:FAILURES]:
        assert host.find(b"one", look(chain)) == 0
    assert host.depot.tiering.status(0.0)[0].state == "circuit breaker open"
    asked = host.send(b"one", look(chains[FAILURES]))
    assert host.answers[asked] == 0 and not host.tier_tasks  # nobody asks it
    tier.inject()
    host.now += 1.5
    host.tick(host.now, 1001.0)
    assert host.kinds() == ["Probe"]
    host.work()
    assert host.depot.tiering.status(0.0)[0].state == "up"
    assert host.find(b"one", store(chains[0])) is True
    assert len(tier.objects) == 2


class Forbidding(MemoryTier):
    """A tier whose user lacks the right to some kinds of calls."""

    forbidden = ""

    def find(self, names: Any) -> list[bool]:
        return super().find(self._checked("find", names))

    def read(self, blobs: Any) -> list[int]:
        return super().read(self._checked("read", blobs))

    def write(self, blobs: Any) -> list[bool]:
        return super().write(self._checked("write", blobs))

    def remove(self, names: Any) -> None:
        super().remove(self._checked("remove", names))

    def _checked(self, call: str, items: Any) -> Any:
        if call == self.forbidden:
            raise TierError(f"NOPERM: may not {call}")
        return items


@pytest.mark.parametrize(("call", "state"), [("find", "lookups"), ("read", "reads"), ("write", "writes")])
def test_a_kind_of_call_that_always_fails_while_others_succeed_is_a_fault(call: str, state: str) -> None:
    """As of a Redis user without GETRANGE, of a replica, or of an S3 role without GetObject."""
    tier = Forbidding()
    host = new_host(tier, pages=1024)
    far = [prompt(f"far{i}", 1) for i in range(FAILURES + 9)]
    for chain in far:
        assert host.find(b"one", store(chain)) is True
    clear(host.depot.index)

    def use(i: int) -> None:
        """One call of each kind: those that are allowed succeed in between."""
        host.find(b"one", look(far[i], f"r{i}"))
        host.find(b"one", store(prompt(f"new{i}", 1)))

    tier.forbidden = call
    for i in range(FAILURES):
        assert host.depot.tiering.status(host.now)[0].state == "up"
        use(i)
    (status,) = host.depot.tiering.status(host.now)
    assert (status.state, status.error) == (f"{state} fail", f"NOPERM: may not {call}")
    done = len(host.done)
    use(FAILURES)
    kinds = {"find": ["Save"], "read": ["Save"], "write": ["Find", "Load"]}[call]
    assert [kind_of(each) for each in host.done[done:]] == kinds, "it is not asked in vain, and used for the rest"
    wait_s = 1.0
    for i in range(FAILURES + 1, FAILURES + 4):  # it still fails when it is tried again, ever more rarely
        host.pass_time(wait_s + 1.5)
        host.tick(host.now, 1000.0)
        host.rest()
        failures = status.counters["failures"]
        use(i)
        (status,) = host.depot.tiering.status(host.now)
        assert status.counters["failures"] == failures + 1 and status.state == f"{state} fail"
        wait_s *= 2
    tier.forbidden = ""
    host.pass_time(wait_s + 1.5)
    host.tick(host.now, 1000.0)
    host.rest()
    use(FAILURES + 4)
    assert host.depot.tiering.status(host.now)[0].state == "up"
    assert host.find(b"one", look(far[FAILURES + 5])) == 1


def test_an_outcome_that_is_none_of_its_task_is_a_bug_and_raises(tier: MemoryTier) -> None:
    host = new_host(tier)
    host.send(b"one", look(prompt("a", 2)))
    (find,) = host.tier_tasks
    with pytest.raises(AssertionError, match="SearchFind ended with Erased"):
        host.finished(find, Erased())


def test_a_corrupt_object_is_a_miss_is_erased_and_counted(tier: MemoryTier) -> None:
    here, there = new_host(tier), new_host(tier)
    chain = prompt("a", 3)
    here.find(b"one", store(chain))
    for fault in ("corrupt", "truncate", "swell"):
        tier.inject(**{fault: 1.0})
        asked = there.send(b"one", look(chain))
        while there.tier_tasks:
            there.work()
            if not any(isinstance(tier_task, Find | Load) for tier_task in there.tier_tasks):
                tier.inject()
        assert there.answers[asked] == 0, fault
        assert there.index.chunks == 0
        clear(here.index)
        here.find(b"one", store(chain))
    assert there.depot.tiering.status(0.0)[0].counters["corrupt_chunks"] == 9
    there.assert_quiet()


def test_a_load_that_hangs_behind_an_open_breaker_keeps_no_other_tier_waiting(tier: MemoryTier) -> None:
    near = MemoryTier()
    here = new_host(tier)
    chain = prompt("a", 3)
    here.find(b"one", store(chain))
    near.objects.update(tier.objects)
    there = new_host(("disk:///d", near), ("redis://far", tier), lookup_s=0.5)
    there.send(b"one", look(chain))
    there.work(there.tier_tasks[0])
    hung = [tier_task for tier_task in there.tier_tasks if tier_task.tier == 0]
    assert any(isinstance(tier_task, Load) for tier_task in hung)
    there.pass_time(0.5)
    for i in range(3):
        there.send(b"one", look(prompt(f"p{i}", 1), f"p{i}"))
        while any(tier_task.tier == 1 for tier_task in there.tier_tasks):
            there.work(next(tier_task for tier_task in there.tier_tasks if tier_task.tier == 1))
        there.pass_time(0.5)
    assert there.depot.tiering.status(there.now)[0].state == "circuit breaker open"
    asked = there.send(b"one", look(chain, "r2"))
    while any(tier_task.tier == 1 for tier_task in there.tier_tasks):
        there.work(next(tier_task for tier_task in there.tier_tasks if tier_task.tier == 1))
    there.pass_time(0.5)
    assert there.answers[asked] == 3, "the far tier has it all"


def test_failures_that_were_under_way_when_a_tier_tripped_do_not_double_its_wait(tier: MemoryTier) -> None:
    """A blip of an instant, with twelve lookups under way: its circuit breaker opens for 30 s, not for one."""
    host = new_host(tier)
    for i in range(12):
        host.send(b"one", look(prompt(f"p{i}", 2), f"r{i}"))
    tier.inject(down=1)
    host.rest()
    tier.inject()
    for second in (2.0, 4.0):
        host.now = second
        host.tick(second, 1000.0 + second)
        host.rest()
    assert host.depot.tiering.status(host.now)[0].state == "up"


# -- whoever asked is gone


def test_a_server_that_stops_answers_what_awaits_tiers(tier: MemoryTier) -> None:
    host = new_host(tier)
    asked = host.send(b"one", look(prompt("a", 3)))
    host.act(host.depot.stop_waiting())
    assert host.answers[asked] == 0


# -- writing


def test_stores_beyond_the_queue_are_dropped_and_counted(tier: MemoryTier) -> None:
    host = new_host(("disk:///d?queue_mib=1&threads=1", tier), pages=1024)
    chain = prompt("a", 384)
    for first in range(0, 384, 32):
        host.ask(b"one", wire.Store(1, [shards(chain, first, first + 32)]))
    status = host.depot.tiering.status(0.0)[0]
    assert status.queued_bytes <= 1 << 20
    host.rest()
    status = host.depot.tiering.status(0.0)[0]
    dropped = status.counters["dropped_chunks"]
    assert dropped > 0 and len(tier.objects) == 384 - dropped == status.counters["saved_chunks"]
    assert status.queued_bytes == 0
    host.assert_quiet()


def test_shards_unsaved_for_a_failure_are_counted_apart_from_a_full_queue(tier: MemoryTier) -> None:
    host = new_host(tier, pages=1024)
    assert host.find(b"one", look(prompt("before", 2))) == 0
    assert (host.depot.tiering.status(0.0)[0].error, host.depot.tiering.status(0.0)[0].error_s) == ("", None)
    tier.inject(down=1)
    for i in range(FAILURES + 2):
        host.ask(b"one", wire.Store(1, [shards(prompt(f"p{i}", 2), 0, 2)]))
        host.rest()
    status = host.depot.tiering.status(host.now + 7.0)[0]
    assert status.state == "circuit breaker open" and status.error
    assert status.error_s == pytest.approx(7.0)
    assert status.counters["unavailable_chunks"] == 2 * (FAILURES + 2)
    assert not status.counters.get("dropped_chunks") and not status.counters.get("refused_chunks")


def test_a_tier_that_cannot_be_had_at_the_start_is_told_of_by_its_first_probe(
    tier: MemoryTier, caplog: pytest.LogCaptureFixture
) -> None:
    tier.inject(down=1)
    host = new_host(tier)
    host.rest()
    status = host.depot.status().tiers[0]
    assert status.state == "circuit breaker open" and status.error
    assert f"tier {status.name}: circuit breaker open, retrying with backoff: {status.error}" in caplog.text


def test_memory_hands_what_it_evicts_to_the_tier_before_its_room_is_needed(tier: MemoryTier) -> None:
    host = new_host(("disk:///d?write=on_evict", tier), pages=32)
    chains = [prompt(f"p{i}", 2) for i in range(40)]
    for chain in chains:
        assert host.find(b"one", store(chain)) is True
    counters = host.depot.tiering.status(0.0)[0].counters
    assert counters.get("undemoted_chunks", 0) == 0
    assert len(tier.objects) >= 80 - 32
    for chain in chains:
        assert host.find(b"one", look(chain)) == 2, "neither memory nor the tier has it"
        assert host.find(b"one", retrieve(chain)) == [True, True]
    host.assert_quiet()


def test_a_chunk_loaded_from_a_far_tier_is_saved_in_the_nearer_one(tier: MemoryTier) -> None:
    near = MemoryTier()
    here = new_host(tier)
    there = new_host(("disk:///d", near), ("redis://far", tier))
    chain = prompt("a", 3)
    here.find(b"one", store(chain))
    assert there.find(b"one", look(chain)) == 3
    assert near.objects.keys() == tier.objects.keys()


def test_a_tier_that_is_off_is_read_and_never_written(tier: MemoryTier) -> None:
    here, there = new_host(tier), new_host(("disk:///d?write=off", tier))
    one, two = prompt("a", 2), prompt("b", 2)
    here.find(b"one", store(one))
    there.find(b"one", store(two))
    assert len(tier.objects) == 2
    assert there.find(b"one", look(one)) == 2


@pytest.mark.parametrize("policy", ["lru", "learned"])
def test_a_chunk_that_is_used_during_its_demotion_stays_under_every_policy(tier: MemoryTier, policy: str) -> None:
    from kvdepot.eviction import POLICIES

    host = new_host(("disk:///d?write=on_evict", tier), pages=16)
    host.index.accounts.rest.policy = POLICIES[policy]()
    chains = [prompt(f"p{i}", 1) for i in range(16)]
    for chain in chains[:14]:
        host.find(b"one", store(chain))
    host.send(b"one", store(chains[14]))
    host.settle()
    (save,) = host.tier_tasks
    victim = next(chain for chain in chains if save.parts[0].key == bytes(chain.hashes))
    host.ask(b"one", look(victim, "uses it"))
    host.ask(b"one", wire.EndSession("uses it"))
    host.rest()
    assert host.answers[host.send(b"one", look(victim, "again"))] == 1


# -- looking after tiers


def test_tiers_without_calls_are_probed() -> None:
    tier = MemoryTier()
    host = new_host(tier)
    host.tick(5.0, 1005.0)
    assert not host.tier_tasks
    host.tick(11.0, 1011.0)
    (probe,) = host.tier_tasks
    assert isinstance(probe, Probe)
    for second in range(12, 40):
        host.tick(float(second), 1000.0 + second)
    assert host.depot.tiering.status(0.0)[0].state == "circuit breaker open"
    assert len(host.tier_tasks) == 1


@pytest.mark.parametrize(("url", "is_asked_soon"), [("disk:///d", True), ("redis://host", False)])
def test_a_disk_that_still_counts_its_objects_is_asked_every_second(url: str, is_asked_soon: bool) -> None:
    """Nothing is known of it before; other stores may never count theirs."""
    tier = MemoryTier()
    tier.is_counted = False
    host = new_host((url, tier))
    assert host.depot.status().tiers[0].objects is None
    host.tick(1.0, 1001.0)
    host.rest()
    tier.is_counted = True
    host.tick(2.0, 1002.0)
    assert host.kinds() == ["Probe"] * is_asked_soon
    host.rest()
    assert host.depot.status().tiers[0].objects == (0 if is_asked_soon else None)
    host.tick(3.0, 1003.0)
    assert not host.tier_tasks


def test_saves_carry_what_their_readers_check(tier: MemoryTier) -> None:
    host = new_host(tier)
    chain = prompt("a", 20)
    host.ask(b"one", store(chain))
    saves = [tier_task for tier_task in host.tier_tasks if isinstance(tier_task, Save)]
    assert [len(save.parts) for save in saves] == [16, 4]
    assert {part.born for save in saves for part in save.parts} == {1000}


# -- models with any KV cache groups

Parts = Sequence[Iterable[int]]
"""Numbers of chunks, by group."""


def group_host(
    reaches: Reaches, *tiers: Tier, pages: int = 64, world_size: int = 1, url: str = "disk:///d", **settings: Any
) -> Host:
    host = Host(pages=pages, settings=settings, tiers=[(url, tier) for tier in tiers])
    host.tick(0.0, 1000.0)
    host.rest()
    host.hello()
    host.register_groups(reaches, world_size, chunk_tokens=16)
    return host


def put(host: Host, reaches: Reaches, chain: ChunkChain, parts: Parts | None = None, world_size: int = 1) -> None:
    """Store these parts, by default what resuming at the end needs; tiers that are written to get them too."""
    for request in group_stores(reaches, chain, parts, world_size):
        assert host.find(b"one", request) is True


def fill(tier: Tier, reaches: Reaches, chain: ChunkChain, parts: Parts | None = None, world_size: int = 1) -> None:
    """Have a tier hold these parts, stored by another host."""
    put(group_host(reaches, tier, world_size=world_size), reaches, chain, parts, world_size)


def needed(reaches: Reaches, end: int) -> list[list[int]]:
    return [list(range(max(0, end - reach) if reach else 0, end)) for reach in reaches]


def loaded(host: Host, chain: ChunkChain) -> list[list[int]]:
    """By group, the numbers of the chunks that loads asked a tier for."""
    keys = [chain.slice(i, i + 1) for i in range(len(chain))]
    layouts = [namespace.layouts[0] for namespace in host.index.namespaces.all()]
    found: list[list[int]] = [[] for _ in layouts]
    for task in host.done:
        for part in task.parts if isinstance(task, Load) else ():
            if part.facts.rank == 0:
                found[layouts.index(part.facts.layout)].append(keys.index(part.key))
    return [sorted(numbers) for numbers in found]


def take(host: Host, reaches: Reaches, chain: ChunkChain, end: int, world_size: int = 1, request: str = "r") -> None:
    """Retrieve all that the boundary needs on every rank, which ends its pins."""
    for group, numbers in enumerate(needed(reaches, end)):
        for rank in range(world_size) if numbers else ():
            instance, first = instance_of(reaches, group, rank), numbers[0]
            asked = retrieve(chain, instance, first=first, end=end, world_size=world_size, rank=rank, request=request)
            assert host.find(b"one", asked) == [True] * len(numbers)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("reaches", [(0,), *SHAPES])
def test_another_host_gets_byte_for_byte_what_one_stored_and_no_more(
    tier: MemoryTier, reaches: Reaches, world_size: int
) -> None:
    chain = prompt("a", 6)
    fill(tier, reaches, chain, [range(6)] * len(reaches), world_size)
    there = group_host(reaches, tier, world_size=world_size)
    assert there.find(b"one", look(prompt("a", 5), world_size=world_size, readers=world_size)) == 5
    assert loaded(there, chain) == needed(reaches, 5)
    take(there, reaches, chain, 5, world_size)
    assert len(there.seen) == world_size * sum(map(len, needed(reaches, 5)))
    there.assert_quiet()
    assert clear(there.index) == sum(map(len, needed(reaches, 5)))


@pytest.mark.parametrize("parts", [[range(6), []], [[], range(6)], [range(1, 6), range(6)]])
def test_nothing_is_loaded_if_no_boundary_can_be_restored(tier: MemoryTier, parts: Parts) -> None:
    reaches, chain = (0, 2), prompt("a", 6)
    fill(tier, reaches, chain, parts)
    there = group_host(reaches, tier)
    assert there.find(b"one", look(chain)) == 0
    assert isinstance(there.done[-1], Find) and not any(isinstance(task, Load) for task in there.done)
    assert there.index.chunks == 0
    there.assert_quiet()


def test_two_lookups_of_one_prompt_wait_for_one_load(tier: MemoryTier) -> None:
    reaches, chain = (0, 2), prompt("a", 6)
    fill(tier, reaches, chain, [range(6), range(6)])
    there = group_host(reaches, tier)
    first = there.send(b"one", look(chain, "r1"))
    there.work()
    assert there.kinds() == ["Load"]
    second = there.send(b"one", look(chain, "r2"))
    shorter = there.send(b"one", look(prompt("a", 4), "r3"))
    there.rest()
    assert [there.answers[asked] for asked in (first, second, shorter)] == [6, 6, 4]
    assert loaded(there, chain) == [list(range(6)), [2, 3, 4, 5]], "nothing twice"
    for request, end in (("r1", 6), ("r2", 6), ("r3", 4)):
        take(there, reaches, chain, end, request=request)
    there.assert_quiet()


@pytest.mark.parametrize(("numbers", "is_enough"), [([1], False), ([4, 5], True)])
def test_at_half_time_loads_begin_without_the_tier_that_has_not_answered(
    tier: MemoryTier, numbers: list[int], is_enough: bool
) -> None:
    reaches, chain = (0, 2), prompt("a", 6)
    fill(tier, reaches, chain, [range(6), numbers])
    there = group_host(reaches, MemoryTier(), tier, lookup_s=1.0)
    asked = there.send(b"one", look(prompt("a", 7)))
    there.work(there.tier_tasks[1])  # the first tier says nothing, and may have the seventh
    assert there.kinds() == ["Find"]
    there.pass_time(0.5)
    assert there.kinds() == ["Find"] + ["Load"] * is_enough
    assert asked not in there.answers, "the first tier may still have more"
    there.rest()
    assert there.answers[asked] == (6 if is_enough else 0)
    if is_enough:
        take(there, reaches, chain, 6)
    there.assert_quiet()


def test_a_prompt_larger_than_half_the_arena_loads_up_to_a_boundary(tier: MemoryTier) -> None:
    reaches, chain = (0, 2), prompt("a", 20)
    fill(tier, reaches, chain, [range(20), [*range(8), 18, 19]])
    there = group_host(reaches, tier, url="disk:///d?write=off", pages=26)
    assert there.find(b"one", look(chain)) == 8, "half of the arena has room for 11 chunks and a window, which 8 has"
    assert loaded(there, chain) == [list(range(8)), [6, 7]]
    take(there, reaches, chain, 8)
    assert there.find(b"one", look(chain, "r2")) == 8, "12 chunks and a window are too many"
    there.ask(b"one", wire.EndSession("r2"))
    tier.objects.clear()
    fill(tier, reaches, chain, [range(20), [12, 13]])
    assert there.find(b"one", look(chain, "r3")) == 14
    take(there, reaches, chain, 14, request="r3")
    there.assert_quiet()


def test_no_more_objects_are_asked_for_than_a_lookup_may(tier: MemoryTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdepot.core.tiering.loading._MOST_WANTED", 13)
    reaches, chain = (0, 2), prompt("a", 9)
    fill(tier, reaches, chain, [range(9)] * 2)
    there = group_host(reaches, tier)
    asked = there.send(b"one", look(chain))
    (find,) = there.tier_tasks
    assert isinstance(find, Find) and len(find.names) == 12
    there.rest()
    assert there.answers[asked] == 6
    take(there, reaches, chain, 6)
    there.assert_quiet()


def test_tiers_are_not_asked_for_a_group_whose_layout_nobody_knows(tier: MemoryTier) -> None:
    """As after a restart without a record of it."""
    reaches, chain = (0, 2), prompt("a", 4)
    fill(tier, reaches, chain)
    host = Host(tiers=[("disk:///d", tier)])
    host.tick(0.0, 1000.0)
    host.hello()
    full, window = wire_groups(reaches)
    groups = [full, wire.Group(window.reach, window.blocks_in_chunk, 0, window.fingerprint)]
    host.index.namespaces.find_groups("m", 1, 0, groups, chunk_tokens=16)
    assert host.find(b"one", look(chain)) == 0
    assert not any(isinstance(task, Find) for task in host.done)
    host.register_groups(reaches, chunk_tokens=16)
    assert host.find(b"one", look(chain)) == 4


def test_a_store_takes_over_a_part_that_is_being_loaded(tier: MemoryTier) -> None:
    reaches, chain = (0, 2), prompt("a", 4)
    fill(tier, reaches, chain)
    there = group_host(reaches, tier, url="disk:///d?write=off")
    asked = there.send(b"one", look(chain))
    there.work()
    assert there.kinds() == ["Load"]
    for request in group_stores(reaches, chain):  # an engine has computed it all
        assert there.ask(b"one", request) is True
    late = there.send(b"one", look(chain, "r2"))
    assert there.answers[late] == 4
    there.rest()
    assert there.answers[asked] == 4
    for request in ("r", "r2"):
        take(there, reaches, chain, 4, request=request)
    there.assert_quiet()
    assert clear(there.index) == 6 and there.index.allocator.free_bytes == there.index.allocator.capacity


@pytest.mark.parametrize("seed", range(25))
def test_whatever_tiers_do_a_lookup_answers_what_is_there_and_every_byte_of_it(seed: int) -> None:
    rng = random.Random(seed)
    reaches, world_size = rng.choice([(0,), *SHAPES]), rng.choice([1, 1, 2])
    tiers = [MemoryTier(seed=seed + number) for number in range(rng.choice([1, 2]))]
    host = group_host(
        reaches, *tiers, pages=rng.choice([14, 30, 100]), world_size=world_size, lookup_s=1.0,
        url=f"disk:///d?write={rng.choice(['through', 'on_evict'])}",
    )  # fmt: skip
    stored: set[tuple[int, bytes]] = set()  # by group
    prompts = [prompt(name, 6) for name in "ab"]
    for step in range(30):
        chain = rng.choice(prompts)
        end = rng.randint(1, 6)
        rates = {
            fault: rng.choice([0.0, 0.0, 0.2]) for fault in ("down", "late", "hide", "lose", "corrupt", "truncate")
        }
        for tier in tiers:
            tier.inject(**rates if rng.random() < 0.7 else {})
        if rng.random() < 0.5:
            parts = needed(reaches, end)
            if rng.random() < 0.5:
                parts[rng.randrange(len(reaches))] = []
            for request in group_stores(reaches, chain, parts, world_size):
                host.ask(b"one", request)  # not always is there room
            stored |= {(group, chain.slice(i, i + 1)) for group, numbers in enumerate(parts) for i in numbers}
        else:
            asked = host.send(b"one", look(chain, f"r{step}", world_size=world_size, readers=world_size))
            while asked not in host.answers:
                if host.tier_tasks and rng.random() < 0.8:
                    host.work(rng.choice(host.tier_tasks))
                elif rng.random() < 0.5:
                    host.pass_time(0.3)
                else:
                    host.ask(b"one", store(prompt(f"other {step}", 1), world_size=world_size))
            found = host.answers[asked]
            assert isinstance(found, int)
            keys = [chain.slice(i, i + 1) for i in range(6)]
            assert found <= deepest(reaches, keys, lambda group, key: (group, key) in stored)  # noqa: B023
            take(host, reaches, chain, found, world_size, f"r{step}")
        host.index.validate()
        host.now += 1.0
        host.tick(host.now, 1000.0 + host.now)
        if rng.random() < 0.5:
            host.rest()
    host.assert_quiet()
    clear(host.index)
    assert host.index.allocator.free_bytes == host.index.allocator.capacity


# -- what may wait, be remembered and be asked for at most


def test_finds_that_nobody_awaits_do_not_pile_up(tier: MemoryTier) -> None:
    host = new_host(tier)
    chain = prompt("a", 2)
    for i in range(3000):
        host.send(b"one", look(chain, f"r{i}"))
        host.send(b"one", wire.EndSession(f"r{i}"))
    assert not host.depot.tiering.loads
    assert len(host.tier_tasks) <= 1024 + 1
    host.rest()


def test_ended_tier_searches_are_not_kept_until_their_deadline(tier: MemoryTier) -> None:
    host = new_host(tier, lookup_s=8.0)
    for i in range(3000):
        host.find(b"one", look(prompt("a", 2), f"r{i}"))
    assert not host.depot.tiering.loads
    assert len(host.depot.lookups._timers) <= 1024


def test_forgets_do_not_pile_up(tier: MemoryTier) -> None:
    host = new_host(tier)
    for _ in range(3000):
        host.send(b"one", wire.ForgetChunks("none"))
    assert len(host.tier_tasks) <= 1024


def test_ages_of_what_is_gone_are_not_kept_for_the_whole_ttl() -> None:
    host = new_host(pages=8, ttl_s=7 * 86400)
    for i in range(1000):
        host.find(b"one", store(prompt(f"p{i}", 2)))
    assert host.index.chunks <= 8
    assert len(host.index.accounts.ages) <= 100


@pytest.mark.faults
def test_a_lookup_of_many_ranks_costs_no_more_than_a_request_may(tier: MemoryTier) -> None:
    """Ranks are made by one Store; then chunks x ranks are looked at on the deciding thread."""
    host = new_host(tier, pages=1024)
    chain = prompt("a", 1)
    ranks = 512
    parts = [shards(chain, world_size=ranks, rank=rank) for rank in range(ranks)]
    host.send(b"one", wire.Store(1, parts))  # the namespace is known from now on, whatever becomes of the copies
    clients = [host.hello(b"%d" % i) for i in range(17)]  # each may have one prompt larger than all should pin
    asked = [host.send(each, look(prompt(f"b{each!r}", 1024), "r", world_size=ranks)) for each in clients]
    assert [len(tier_task.objects) for tier_task in host.tier_tasks] == [
        1 << 16
    ] * 16  # what all may ask for; not 17 x 524,288
    assert [host.answers.get(one) for one in asked[16:]] == [0]


def test_ages_take_no_more_room_than_chunks_however_many_ranks_they_have() -> None:
    ranks = 4
    host = new_host(world_size=ranks, ttl_s=60, pages=512)
    for number in range(60):
        for rank in range(ranks):
            host.ask(b"one", store(prompt(f"p{number}", 1), instance=rank + 1, world_size=ranks, rank=rank))
    assert host.index.chunks == 60
    assert len(host.index.accounts.ages) == 60, "each seal would look through all of them for those that are gone"
    host.tick(61.0, 1061.0)
    assert host.index.chunks == 0


def test_a_lookup_whose_engine_leaves_meanwhile_loads_nothing() -> None:
    tier = MemoryTier()
    here, there = new_host(tier), new_host(tier)
    chain = prompt("a", 3)
    here.find(b"one", store(chain))
    asked = there.send(b"one", look(chain))
    there.ask(b"one", wire.Unregister(1))  # the namespace goes: it has no chunks, and nobody uses it
    there.rest()
    assert there.answers[asked] == 0
    there.assert_quiet()
    assert there.index.allocator.free_bytes == there.index.allocator.capacity


def test_an_object_under_anothers_name_is_not_believed(tier: MemoryTier) -> None:
    here, there = new_host(tier), new_host(tier)
    one, two = prompt("a", 1), prompt("b", 1)
    here.find(b"one", store(one))
    (name,) = tier.objects
    wrong = name.replace(bytes(one.hashes).hex(), bytes(two.hashes).hex())
    tier.objects[wrong] = tier.objects[name]
    assert there.find(b"one", look(two)) == 0
    assert wrong not in tier.objects and there.depot.tiering.status(0.0)[0].counters["corrupt_chunks"] == 1
    there.assert_quiet()
