"""Depots with tiers and models of several KV cache groups: what is asked for, what is loaded, and what if that fails.

Bytes are real: a retrieve must give just what was stored of that group.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from kvdepot.keys import ChunkChain
from kvdepot.protocol import wire
from kvdepot.tiers import Tier
from kvdepot.tiers.worker import Erase, Find, Load
from tests.conftest import clear
from tests.core.desk import group_stores, instance_of, prompt, retrieve, store
from tests.core.groups import SHAPES, Reaches, deepest, wire_groups
from tests.core.host import Host, look
from tests.tiers.faulty import FaultyTier, MemoryTier

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


# -- loads


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("reaches", SHAPES)
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


def test_a_window_that_only_the_tier_has_joins_what_memory_has_of_the_others(tier: MemoryTier) -> None:
    reaches, chain = (0, 2), prompt("a", 6)
    fill(tier, reaches, chain)
    there = group_host(reaches, tier, url="disk:///d?write=off")
    put(there, reaches, chain, [range(6), []])
    asked = there.send(b"one", look(chain))
    (find,) = there.tier_tasks
    assert isinstance(find, Find) and len(find.names) == 6, "nothing that memory has, and every window"
    there.rest()
    assert there.answers[asked] == 6 and loaded(there, chain) == [[], [4, 5]]
    take(there, reaches, chain, 6)
    there.assert_quiet()


def test_a_state_at_one_boundary_loads_what_that_needs_and_nothing_behind_it(tier: MemoryTier) -> None:
    reaches, chain = (0, 1), prompt("a", 9)
    fill(tier, reaches, chain, [range(9), [2, 5]])
    there = group_host(reaches, tier, url="disk:///d?write=off")
    assert there.find(b"one", look(chain)) == 6
    assert loaded(there, chain) == [list(range(6)), [5]]
    take(there, reaches, chain, 6)
    # A shorter prompt has its boundary there, and what memory has is not loaded again.
    assert there.find(b"one", look(prompt("a", 5), "r2")) == 3
    assert loaded(there, chain) == [list(range(6)), [2, 5]]
    take(there, reaches, chain, 3, request="r2")
    there.assert_quiet()


def test_a_boundary_in_memory_is_moved_on_by_what_lies_behind_it_in_the_tier(tier: MemoryTier) -> None:
    reaches, chain = (0, 1), prompt("a", 9)
    fill(tier, reaches, chain, [range(9), [6]])
    there = group_host(reaches, tier, url="disk:///d?write=off")
    put(there, reaches, chain, [range(5), [2]])
    asked = there.send(b"one", look(chain))
    (find,) = there.tier_tasks
    assert isinstance(find, Find) and len(find.names) == 4 + 6, "of states only those behind the boundary"
    there.rest()
    assert there.answers[asked] == 7
    assert loaded(there, chain) == [[5, 6], [6]]
    take(there, reaches, chain, 7)
    there.assert_quiet()


@pytest.mark.parametrize("parts", [[range(6), []], [[], range(6)], [range(1, 6), range(6)]])
def test_where_no_boundary_can_be_restored_nothing_is_loaded(tier: MemoryTier, parts: Parts) -> None:
    reaches, chain = (0, 2), prompt("a", 6)
    fill(tier, reaches, chain, parts)
    there = group_host(reaches, tier)
    assert there.find(b"one", look(chain)) == 0
    assert isinstance(there.done[-1], Find) and not any(isinstance(task, Load) for task in there.done)
    assert there.index.chunks == 0
    there.assert_quiet()


def test_a_part_counts_only_with_the_shards_of_all_ranks(tier: MemoryTier) -> None:
    reaches, chain = (0, 1), prompt("a", 5)
    fill(tier, reaches, chain, [range(5), [1, 4]], world_size=2)
    tier.remove([name for name in tier.objects if chain.slice(4, 5).hex() in name][-1:])
    there = group_host(reaches, tier, world_size=2)
    assert there.find(b"one", look(chain, world_size=2, readers=2)) == 2
    assert loaded(there, chain) == [[0, 1], [1]]
    take(there, reaches, chain, 2, world_size=2)
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


# -- what fails


@pytest.mark.parametrize("fault", ["corrupt", "truncate", "hide", "down"])
@pytest.mark.parametrize("group", range(3))
def test_a_part_that_does_not_arrive_leaves_the_boundary_that_memory_had(
    tier: MemoryTier, group: int, fault: str
) -> None:
    reaches, chain = (0, 2, 1), prompt("a", 6)
    fill(tier, reaches, chain)
    # Only the group's last part is behind the faulty tier; the other one has the rest.
    (layout,) = {part for part in _names(tier, chain, 5) if _is_of_group(part, chain, reaches, group)}
    bad = MemoryTier()
    bad.objects[layout] = tier.objects.pop(layout)
    faulty = FaultyTier(bad)
    there = group_host(reaches, faulty, tier, url="disk:///d?write=off")
    put(there, reaches, prompt("a", 3))
    asked = there.send(b"one", look(chain))
    while "Load" not in there.kinds():
        there.work()
    faulty.inject(**{fault: 1.0})
    there.rest()
    assert there.answers[asked] == 3
    take(there, reaches, chain, 3)
    there.assert_quiet()
    is_corrupt = fault in ("corrupt", "truncate")
    assert any(isinstance(task, Erase) for task in there.done) == is_corrupt
    # What did arrive serves the next lookup.
    faulty.inject()
    before = loaded(there, chain)
    found = there.find(b"one", look(chain, "r2"))
    assert found == (3 if is_corrupt else 6)
    if not is_corrupt:
        expected: list[list[int]] = [[], [], []]
        expected[group] = [5]
        assert [sorted(now)[len(then) :] for now, then in zip(loaded(there, chain), before, strict=True)] == expected
    there.ask(b"one", wire.EndSession("r2"))
    there.assert_quiet()


def _names(tier: MemoryTier, chain: ChunkChain, number: int) -> list[str]:
    return [name for name in tier.objects if chain.slice(number, number + 1).hex() in name]


def _is_of_group(name: str, chain: ChunkChain, reaches: Reaches, group: int) -> bool:
    """Whether a host with only this group's part stores an object of this name."""
    alone = MemoryTier()
    fill(alone, reaches, chain, [[5] if number == group else [] for number in range(len(reaches))])
    return name in alone.objects


@pytest.mark.parametrize(("numbers", "is_enough"), [([1], False), ([4, 5], True)])
def test_at_half_time_what_the_other_tiers_have_is_loaded_if_a_boundary_comes_of_it(
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


# -- what happens meanwhile


def test_what_a_lookup_loads_and_what_it_needs_of_memory_outlive_any_pressure(tier: MemoryTier) -> None:
    reaches, chain = (0, 2), prompt("a", 6)
    fill(tier, reaches, chain, [range(6), range(4, 6)])
    there = group_host(reaches, tier, url="disk:///d?write=off", pages=16)
    put(there, reaches, chain, [range(3), [5]])
    asked = there.send(b"one", look(chain))
    there.work()
    assert there.kinds() == ["Load"]
    for number in range(20):
        there.ask(b"one", store(prompt(f"other {number}", 1)))
    there.index.validate()
    there.rest()
    assert there.answers[asked] == 6 and loaded(there, chain) == [[3, 4, 5], [4]]
    for number in range(20, 40):
        there.find(b"one", store(prompt(f"other {number}", 1)))
    take(there, reaches, chain, 6)
    there.assert_quiet()


def test_the_boundary_in_memory_outlives_any_pressure_while_tiers_are_asked(tier: MemoryTier) -> None:
    reaches, chain = (0, 0, 2), prompt("a", 6)
    fill(tier, reaches, chain)
    there = group_host(reaches, tier, url="disk:///d?write=off", pages=16)
    put(there, reaches, prompt("a", 3))
    asked = there.send(b"one", look(chain))
    for number in range(20):
        there.ask(b"one", store(prompt(f"other {number}", 1)))
    tier.objects.clear()
    there.rest()
    assert there.answers[asked] == 3
    take(there, reaches, chain, 3)
    there.assert_quiet()


def test_of_a_prompt_too_large_to_be_loaded_at_once_a_boundary_comes_each_time(tier: MemoryTier) -> None:
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
    monkeypatch.setattr("kvdepot.core.tiering.lookup._MOST_WANTED", 13)
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


# -- saves


@pytest.mark.parametrize("seed", range(25))
def test_whatever_tiers_do_a_lookup_answers_what_is_there_and_every_byte_of_it(seed: int) -> None:
    rng = random.Random(seed)
    reaches, world_size = rng.choice(SHAPES), rng.choice([1, 1, 2])
    tiers = [FaultyTier(MemoryTier(), seed + number) for number in range(rng.choice([1, 2]))]
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
