"""The shadows of `adaptive`, and the table of keys that they share."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.eviction import Victim
from kvdepot.eviction.adaptive import Adaptive
from kvdepot.eviction.shadows import LruShadow, S3FifoShadow
from kvdepot.eviction.slots import REAL, Links, Slots
from kvdepot.testing import traces
from tests.eviction.test_policies import Cache, key_of

SHADOWS = {"lru": LruShadow, "s3fifo": S3FifoShadow}


@pytest.mark.parametrize(
    "make", [traces.chat, traces.system_prompts, traces.scan_heavy], ids=lambda make: make.__name__
)
@pytest.mark.parametrize(("name", "same"), [("lru", 1.0), ("s3fifo", 0.9)])
def test_a_shadow_contains_what_a_cache_with_its_policy_does(
    name: str, same: float, make: Callable[[int, int], traces.Prompts]
) -> None:
    real, followed = Cache(name, 300), Cache("adaptive", 300)
    policy = followed.policy
    assert isinstance(policy, Adaptive)
    shadow = next(shadow for shadow in policy._shadows if isinstance(shadow, SHADOWS[name]))
    shared = total = 0
    slots: dict[bytes, int] = {}
    for _, prompt in make(7, 150):
        real.ask(*prompt)
        followed.ask(*prompt)
        slots |= {key: chunk.place for key, chunk in followed.namespace.chunks.items()}
        shared += sum(policy._slots.flags[slots[key]] & shadow.bit > 0 for key in real.namespace.chunks)
        total += len(real.namespace.chunks)
    assert total > 20_000
    assert shared >= same * total


def test_it_keeps_what_the_shadow_with_the_fewest_misses_keeps() -> None:
    cache = Cache("adaptive", 100)
    policy = cache.policy
    assert isinstance(policy, Adaptive)
    draw = random.Random(4)
    for _ in range(5000):
        cache.ask(min(int(draw.paretovariate(0.8)), 999))
    there = [policy._slots.flags[chunk.place] & policy._leader.bit for chunk in cache.namespace.chunks.values()]
    assert sum(flag > 0 for flag in there) >= 90
    for shadow in policy._shadows:
        shadow.age(1, 1)
    best = min(shadow.recent_misses for shadow in policy._shadows)
    assert policy._is_behind or policy._leader.recent_misses <= best + 5  # a lead of less is chance


def test_a_chain_is_in_a_shadow_only_from_its_start() -> None:
    cache = Cache("adaptive", 60)
    policy = cache.policy
    assert isinstance(policy, Adaptive)
    draw = random.Random(5)
    slots = policy._slots
    for number in range(600):
        head = draw.randrange(9)
        cache.ask(*("head", head, 1, 2, 3, 4)[: draw.randint(2, 6)], *(number for _ in range(draw.randrange(3))))
        for shadow in policy._shadows:
            there = [slot for slot in range(1, len(slots.flags)) if slots.flags[slot] & shadow.bit]
            assert len(there) == shadow.count <= 60 + 9  # what it lacks of a hit enters at once
            kids = [slots.parent[slot] for slot in there if slots.parent[slot]]
            assert all(slots.flags[parent] & shadow.bit for parent in kids)
            assert all(shadow.kids[slot] == kids.count(slot) for slot in there)


@pytest.mark.parametrize("chained", [False, True])
def test_ghosts_stay_in_proportion_to_the_chunks(chained: bool) -> None:
    policy = Adaptive()
    chunks: list[Victim] = []
    for number in range(4000):
        while len(chunks) >= 100:
            victim = policy.victim(lambda chunk: not any(chunk is each.parent for each in chunks))
            assert victim is not None
            chunks.remove(victim)
            victim.gone = True
            policy.remove(victim, evicted=True)
        parent = chunks[-1] if chained and number % 5 and chunks else None
        chunk = Victim(key=key_of(number), parent=parent)
        policy.insert(chunk)
        policy.add(chunk)
        chunks.append(chunk)
        assert policy.ghosts <= 4 * 100
    for chunk in reversed(chunks):
        chunk.gone = True
        policy.remove(chunk, evicted=False)
    assert policy.ghosts == 0


@given(st.lists(st.integers(0, 60), max_size=400), st.integers(0, 3))
def test_a_table_finds_the_keys_that_were_entered_and_not_freed(names: list[int], parts: int) -> None:
    slots = Slots()
    links = Links(slots)
    known: dict[int, int] = {}
    for name in names:
        key, is_part = hashlib.sha256(bytes([name])).digest(), name < parts
        assert slots.find(key, is_part, 0) == known.get(name, 0)
        if name in known:
            slots.free(known.pop(name))
        else:
            known[name] = slots.enter(key, is_part, 0)
            assert links.after[known[name]] == 0
        assert len(set(known.values())) == len(known) == slots.used
    for name, slot in known.items():
        assert slots.find(hashlib.sha256(bytes([name])).digest(), name < parts, 0) == slot
        slots.flags[slot] |= REAL
        assert not slots.find(hashlib.sha256(bytes([name])).digest(), name < parts, 0)


def test_lists_of_slots_keep_their_order() -> None:
    slots = Slots()
    links = Links(slots)
    head = links.make(slots.new_head())
    first, second, third = (slots.enter(key_of(number), False, 0) for number in range(3))
    assert not links.first(head)
    links.append(head, second)
    links.append(head, third)
    links.prepend(head, first)
    links.unlink(second)
    links.unlink(second)
    taken = []
    while slot := links.first(head):
        taken.append(slot)
        links.unlink(slot)
    assert taken == [first, third]


def test_a_key_is_found_behind_its_own_parent_only() -> None:
    slots = Slots()
    here, elsewhere = slots.enter(b"here", False, 0), slots.enter(b"elsewhere", False, 0)
    first, second = slots.enter(b"key", False, here), slots.enter(b"key", False, elsewhere)
    assert slots.find(b"key", False, here) == first
    assert slots.find(b"key", False, elsewhere) == second
    assert not slots.find(b"key", False, 0)
    assert not slots.find(b"key", True, here)


def test_a_free_slot_is_in_no_list_and_no_shadow() -> None:
    """It is used again as it is."""
    policy = Adaptive()
    draw = random.Random(6)
    chunks: list[Victim] = []
    for number in range(4000):
        while len(chunks) >= 60:
            victim = policy.victim(lambda chunk: not any(chunk is each.parent for each in chunks))
            assert victim is not None
            chunks.remove(victim)
            victim.gone = True
            policy.remove(victim, evicted=draw.random() < 0.8)
        if chunks and draw.random() < 0.3:
            used = draw.choice(chunks)
            policy.use(used)
            policy.add(used)
        parent = chunks[-1] if number % 6 and chunks else None
        key = key_of(draw.randrange(300) if number % 3 else number)
        if not any(chunk.key == key for chunk in chunks):
            chunks.append(Victim(key=key, parent=parent))
            policy.insert(chunks[-1])
            policy.add(chunks[-1])
    slots = policy._slots
    free = [slots._free]
    while following := slots._next[free[-1]]:
        free.append(following)
    assert len(free) > 20
    columns = [slots.flags, policy._learned._class]
    for shadow in policy._shadows:
        columns += [shadow.kids, shadow.links.after]
    assert not any(column[slot] for column in columns for slot in free)


def test_after_a_change_of_leader_the_chunks_become_those_of_the_new_one() -> None:
    cache = Cache("adaptive", 300)
    policy = cache.policy
    assert isinstance(policy, Adaptive)
    changes = 0
    for _, prompt in traces.shifting(5, 1500, phase=150):
        leader = policy._leader
        cache.ask(*prompt)
        changes += policy._leader is not leader
        if not policy._unseen and not policy._outside:
            there = [policy._slots.flags[chunk.place] & policy._leader.bit for chunk in policy._queued.values()]
            assert all(there), "one that the leader does not contain is not evicted first"
    assert changes > 1
