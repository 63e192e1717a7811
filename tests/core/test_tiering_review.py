"""What a review found in depots with tiers, each as the shortest course of events that shows it."""

from __future__ import annotations

import pytest

from kvdepot.protocol import wire
from kvdepot.testing.faulty import FaultyTier, MemoryTier
from kvdepot.tiers.worker import Load
from tests.core.desk import BLOCK, PER_CHUNK, Page, layout, prompt, retrieve, shards, store
from tests.core.host import Host, look, new_host


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier()


def test_a_tenant_that_forgets_all_forgets_in_tiers_where_no_engine_is(tier: MemoryTier) -> None:
    """Models are collected after dooming, which drops the namespaces of which nothing is left."""
    host = Host(pages=64, settings={"keys": "/somewhere"}, tiers=[("disk:///d", tier)])
    host.take(host.depot.tick(0.0, 1000.0))
    host.rest()
    host.depot.hello(b"one", Page(), "acme")
    register = wire.Register(1, layout(), "m", 1, 0, PER_CHUNK)
    assert host.ask(b"one", register) is None
    chain = prompt("a", 3)
    assert host.find(b"one", store(chain)) is True
    assert len(tier.objects) == 3
    assert host.ask(b"one", wire.Unregister(1)) is None  # the engine stops; its chunks stay
    assert host.find(b"one", wire.Forget()) == {"memory": 3, "disk:///d": 3}
    assert not tier.objects


def test_a_store_that_is_under_way_is_forgotten_too_or_not_counted() -> None:
    host = new_host()
    chain = prompt("a", 3)
    host.send(b"one", store(chain))
    said = host.ask(b"one", wire.Forget())  # `ask` lets the copies end
    assert said["memory"] == 0 or host.find(b"one", look(chain)) == 0


def test_a_repeated_hash_leaks_no_hold(tier: MemoryTier) -> None:
    host = new_host(tier)
    one, two = prompt("a", 1), prompt("b", 1)
    part = shards(one)
    loose = wire.Shards(part.request, "m", 1, 0, b"", 0, part.hashes, part.block_ids)
    host.find(b"one", wire.Store(1, 1, [loose]))
    hashes = bytes(one.hashes) * 3 + bytes(two.hashes)
    assert host.find(b"one", wire.Lookup("m", 1, PER_CHUNK, "r", 1, hashes, False)) == 3
    host.ask(b"one", wire.EndSession("r"))
    host.assert_quiet()


def test_a_namespace_that_is_dropped_during_a_search_takes_no_chunks(tier: MemoryTier) -> None:
    here, there = new_host(tier), new_host(tier)
    chain, other = prompt("a", 3), prompt("b", 1)
    here.find(b"one", store(chain))
    there.find(b"one", store(other))
    there.ask(b"one", wire.Unregister(1))
    there.send(b"one", look(chain))
    there.ask(b"one", wire.Clear())  # or its last chunk is evicted
    there.rest()
    there.index.validate()


def test_what_is_pinned_by_name_and_expires_can_be_cached_again() -> None:
    host = new_host(ttl_s=60)
    chain = prompt("a", 3)
    host.find(b"one", store(chain))
    assert host.find(b"one", wire.Pin("p", "m", 1, PER_CHUNK, bytes(chain.hashes))) == 3
    host.take(host.depot.tick(61.0, 1061.0))
    assert host.find(b"one", look(chain)) == 0
    host.find(b"one", store(chain))  # recomputed
    assert host.find(b"one", look(chain)) == 3


def test_what_is_pinned_by_name_and_forgotten_can_be_cached_again() -> None:
    host = new_host()
    chain = prompt("a", 3)
    host.find(b"one", store(chain))
    assert host.find(b"one", wire.Pin("p", "m", 1, PER_CHUNK, bytes(chain.hashes))) == 3
    host.find(b"one", wire.Forget())
    host.find(b"one", store(chain))
    assert host.find(b"one", look(chain)) == 3


def test_finds_that_nobody_awaits_do_not_pile_up(tier: MemoryTier) -> None:
    host = new_host(tier)
    chain = prompt("a", 2)
    for i in range(3000):
        host.send(b"one", look(chain, f"r{i}"))
        host.send(b"one", wire.EndSession(f"r{i}"))
    assert host.depot.tiering.searches == 0
    assert len(host.errands) <= 1024 + 1
    host.rest()


def test_a_slow_tier_does_not_collect_finds_for_ever(tier: MemoryTier) -> None:
    """Ten a second are answered, a hundred are asked: every one late, none a failure, for something succeeded."""
    host = new_host(tier, lookup_s=1.0)
    n = 0
    for second in range(1, 40):
        for _ in range(100):
            n += 1
            host.send(b"one", look(prompt("a", 2), f"r{n}"))
        for _ in range(10):
            host.pass_time(0.1)
            if host.errands:
                host.work()
        host.take(host.depot.tick(host.now, 1000.0 + second))
    assert len(host.errands) <= 1024 + 1, host.depot.tiering.status(host.now)[0].counters


def test_ended_searches_are_not_kept_until_their_deadline(tier: MemoryTier) -> None:
    host = new_host(tier, lookup_s=8.0)
    for i in range(3000):
        host.find(b"one", look(prompt("a", 2), f"r{i}"))
    assert host.depot.tiering.searches == 0
    assert len(host.depot.tiering._times) <= 1024


def test_forgets_do_not_pile_up(tier: MemoryTier) -> None:
    host = new_host(tier)
    for _ in range(3000):
        host.send(b"one", wire.Forget("none"))
    assert len(host.errands) <= 1024


def test_ages_of_what_is_gone_are_not_kept_for_the_whole_ttl() -> None:
    host = new_host(pages=8, ttl_s=7 * 86400)
    for i in range(1000):
        host.find(b"one", store(prompt(f"p{i}", 2)))
    assert host.index.chunks <= 8
    assert len(host.index._ages) <= 100


@pytest.mark.faults
def test_a_lookup_of_many_ranks_costs_no_more_than_a_request_may(tier: MemoryTier) -> None:
    """Ranks are made by one Store; then chunks x ranks are looked at on the deciding thread."""
    host = new_host(tier, pages=1024)
    chain = prompt("a", 1)
    ranks = 512
    parts = [shards(chain, world_size=ranks, rank=rank) for rank in range(ranks)]
    host.send(b"one", wire.Store(1, 1, parts))  # the namespace is known from now on, whatever becomes of the copies
    asked = [host.send(b"one", look(prompt(f"b{i}", 1024), f"r{i}", world_size=ranks)) for i in range(17)]
    assert [len(errand.objects) for errand in host.errands] == [1 << 16] * 16  # what all may ask for; not 17 x 524,288
    assert [host.answers.get(one) for one in asked[16:]] == [0]


def test_the_nearest_tier_that_has_it_loads_it(tier: MemoryTier) -> None:
    near = MemoryTier()
    here = new_host(tier)
    chain = prompt("a", 5)
    here.find(b"one", store(chain))
    near.objects.update(tier.objects)
    there = new_host(("disk:///d", near), ("redis://far", tier))
    there.send(b"one", look(prompt("a", 6)))  # nobody has the sixth
    near_find, far_find = there.errands
    there.work(far_find)
    there.work(near_find)
    assert {errand.tier for errand in there.errands if isinstance(errand, Load)} == {0}
    there.rest()


def test_half_time_does_not_end_a_search_that_could_still_find_its_first_chunk(tier: MemoryTier) -> None:
    slow = MemoryTier()
    here = new_host(slow)
    chain = prompt("a", 3)
    here.find(b"one", store(chain))
    tier.objects.update({name: data for name, data in slow.objects.items() if chain.slice(2, 3).hex() in name})
    there = new_host(("disk:///d", tier), ("redis://slow", slow), lookup_s=1.0)
    asked = there.send(b"one", look(prompt("a", 4)))
    there.work(there.errands[0])
    there.pass_time(0.5)
    assert asked not in there.answers, "half a second was left"
    there.work(there.errands[0])
    there.rest()
    assert there.answers[asked] == 3


def test_a_retrieve_by_a_layout_of_another_size_reads_no_neighbours() -> None:
    host = new_host()
    chain = prompt("a", 1)
    host.find(b"one", store(chain))
    host.ask(b"one", wire.Register(2, layout(block=16 * BLOCK), "m", 1, 0, PER_CHUNK))
    host.send(b"one", retrieve(chain, instance=2))
    for task in host.copies():
        for piece in task.pieces:
            room = sum(length for _, length in piece.extents)
            assert room >= len(piece.block_ids) * task.mapped.layout.block_bytes
    host.settle()


def test_what_is_recomputed_while_its_load_hangs_is_cached(tier: MemoryTier) -> None:
    here, there = new_host(tier), new_host(tier, lookup_s=0.5)
    chain = prompt("a", 3)
    here.find(b"one", store(chain))
    there.send(b"one", look(chain))
    there.work()
    assert there.kinds() == ["Load"]  # which hangs from now on
    there.pass_time(0.5)
    assert there.ask(b"one", store(chain)) is True  # the engine has computed it
    asked = there.send(b"one", look(chain, "r2"))
    there.pass_time(0.5)
    assert there.answers[asked] == 3


def test_a_load_that_hangs_in_a_tier_left_alone_does_not_keep_another_tier_from_serving(tier: MemoryTier) -> None:
    near = MemoryTier()
    here = new_host(tier)
    chain = prompt("a", 3)
    here.find(b"one", store(chain))
    near.objects.update(tier.objects)
    there = new_host(("disk:///d", near), ("redis://far", tier), lookup_s=0.5)
    there.send(b"one", look(chain))
    there.work(there.errands[0])
    hung = [errand for errand in there.errands if errand.tier == 0]
    assert any(isinstance(errand, Load) for errand in hung)
    there.pass_time(0.5)
    for i in range(3):
        there.send(b"one", look(prompt(f"p{i}", 1), f"p{i}"))
        while any(errand.tier == 1 for errand in there.errands):
            there.work(next(errand for errand in there.errands if errand.tier == 1))
        there.pass_time(0.5)
    assert there.depot.tiering.status(there.now)[0].state == "left alone"
    asked = there.send(b"one", look(chain, "r2"))
    while any(errand.tier == 1 for errand in there.errands):
        there.work(next(errand for errand in there.errands if errand.tier == 1))
    there.pass_time(0.5)
    assert there.answers[asked] == 3, "the far tier has it all"


def test_no_chunk_is_broken_where_there_is_none(tier: MemoryTier) -> None:
    """While `_broken` is not 0 each lookup walks its whole chain."""
    faulty = FaultyTier(tier)
    here, there = new_host(tier), new_host(("disk:///d?write=off", faulty))
    chain = prompt("a", 2)
    there.find(b"one", store(chain))
    assert there.find(b"one", look(chain, "holds the second")) == 2
    there.find(b"one", wire.Forget())
    here.find(b"one", store(chain))
    faulty.inject(corrupt=1)
    assert there.find(b"one", look(prompt("a", 1))) == 0  # the first is loaded anew, and spoilt
    there.ask(b"one", wire.EndSession("holds the second"))
    assert there.index.chunks == 0
    assert there.index._broken == 0


def test_what_expired_is_not_shown_again_by_another_ranks_shard(tier: MemoryTier) -> None:
    """`seal` gives a doomed chunk its depth back; bisection does not look at `doomed`."""
    here, there = new_host(tier, world_size=2), new_host(("disk:///d?write=off", tier), world_size=2, ttl_s=60)
    chain = prompt("a", 1)
    for rank in range(2):
        here.find(b"one", store(chain, instance=rank + 1, world_size=2, rank=rank))
    there.find(b"one", store(chain, instance=1, world_size=2, rank=0))
    there.now = 59.9
    asked = there.send(b"one", look(chain, world_size=2, readers=2))
    there.work()
    assert there.kinds() == ["Load"]
    there.take(there.depot.tick(60.5, 1061.0))
    there.now = 60.5
    there.rest()
    assert there.answers[asked] == 0


def test_failures_that_were_under_way_when_a_tier_tripped_do_not_double_its_wait(tier: MemoryTier) -> None:
    """A blip of an instant, with twelve lookups under way: the tier is left alone for 30 s, not for one."""
    faulty = FaultyTier(tier)
    host = new_host(faulty)
    for i in range(12):
        host.send(b"one", look(prompt(f"p{i}", 2), f"r{i}"))
    faulty.inject(down=1)
    host.rest()
    faulty.inject()
    for second in (2.0, 4.0):
        host.now = second
        host.take(host.depot.tick(second, 1000.0 + second))
        host.rest()
    assert host.depot.tiering.status(host.now)[0].state == "up"


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "ageing", "wtinylfu", "adaptive"])
def test_what_is_used_while_it_is_handed_down_stays_under_every_policy(tier: MemoryTier, policy: str) -> None:
    from kvdepot.eviction import POLICIES

    host = new_host(("disk:///d?write=on_evict", tier), pages=16)
    host.index._policy = POLICIES[policy]()
    chains = [prompt(f"p{i}", 1) for i in range(16)]
    for chain in chains[:14]:
        host.find(b"one", store(chain))
    host.send(b"one", store(chains[14]))
    host.settle()
    (save,) = host.errands
    victim = next(chain for chain in chains if save.parts[0].key == bytes(chain.hashes))
    host.ask(b"one", look(victim, "uses it"))
    host.ask(b"one", wire.EndSession("uses it"))
    host.rest()
    assert host.answers[host.send(b"one", look(victim, "again"))] == 1


def test_ages_take_no_more_room_than_chunks_however_many_ranks_they_have() -> None:
    ranks = 4
    host = new_host(world_size=ranks, ttl_s=60, pages=512)
    for number in range(60):
        for rank in range(ranks):
            host.ask(b"one", store(prompt(f"p{number}", 1), instance=rank + 1, world_size=ranks, rank=rank))
    assert host.index.chunks == 60
    assert len(host.index._ages) == 60, "each seal would look through all of them for those that are gone"
    host.take(host.depot.tick(61.0, 1061.0))
    assert host.index.chunks == 0
