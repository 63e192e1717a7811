"""The policy `learned`: its table of runs, its shadows, and what it remembers of keys without chunks."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable
from functools import reduce
from operator import xor
from zlib import crc32

import pytest
from bench import traces
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.core.index import matching
from kvdepot.eviction import Learned, Victim
from kvdepot.eviction.runs import Links, Runs
from kvdepot.protocol.keys import ROOT
from tests.core.shelf import reserve
from tests.eviction.test_policies import Cache, key_of


def check(policy: Learned, chunks: Iterable[Victim]) -> None:
    """The invariants of runs and shadows; chunks: those that exist."""
    runs, known = policy._runs, [run for run in range(1, len(policy._runs.size)) if policy._runs.size[run]]
    assert (len(known), sum(runs.size[run] for run in known)) == (runs.used, policy._known)
    real = Counter(chunk.place for chunk in chunks)
    for chunk in chunks:
        assert 0 <= chunk.number - runs.start[chunk.place] < runs.real[chunk.place]
    gone = {}
    for run in known:
        parent = runs.parent[run]
        assert not parent or (runs.size[parent] and runs.start[run] == runs.start[parent] + runs.size[parent])
        assert runs.real[run] == real[run]
        assert runs.children[run] == sum(runs.parent[each] == run for each in known)
        gone[run] = policy._gone[run]
        assert gone[run] in (0, runs.size[run] - max(real[run], *(each.held[run] for each in policy._shadows)))
        assert (policy._gone_links.after[run] > 0) == (gone[run] > 0)
    assert sum(gone.values()) == policy._gone_count
    slack = 25 * 60  # runs of a request that has evicted no chunk
    assert not policy._gone_count or 25 * runs.used + policy._known <= 40 * policy._chunks + slack
    for shadow in policy._shadows:
        held, kids = shadow.held, Counter(runs.parent[run] for run in known if shadow.held[run])
        assert sum(held[run] for run in known) == shadow.count
        for run in known:
            parent = runs.parent[run]
            assert shadow.kids[run] == kids[run]
            assert not held[run] or not parent or held[parent] == runs.size[parent], "a chain from its start"
            if held[run] and not kids[run] and run not in (shadow._tip, shadow._hit):
                assert shadow.links.after[run], "an end that is in no list is never evicted"
    learning = policy._learning
    risk: Counter[int] = Counter()
    for run in known:
        if learning._risk[run]:
            risk[id(learning._cohort(run))] += learning._risk[run]
    assert risk == {id(each): each.at_risk for each in learning._cohorts.values() if each.at_risk}


@pytest.mark.parametrize("seed", range(8))
def test_runs_and_shadows_keep_their_invariants_in_any_order_of_requests(seed: int) -> None:
    draw = random.Random(seed)
    cache = Cache("learned", draw.choice((5, 20, 60)))
    policy, index, namespace = cache.policy, cache.index, cache.namespace
    assert isinstance(policy, Learned)
    numbers = itertools.count()
    for _ in range(400):
        chunks = list(namespace.chunks.values())
        match draw.randrange(12):
            case 0 if chunks:  # a copy failed, or a checksum
                index.hide(draw.choice(chunks))
            case 1 if chunks:
                matching.match(namespace, draw.choice(chunks).key)  # a lookup that nothing follows
            case 2:  # stored without a lookup, and behind whatever is there
                key = key_of(("loose", next(numbers)))
                chunk = reserve(index, namespace, 0, key, ROOT, 1, 4096)
                if chunk is not None:
                    index.seal(chunk, 0)
            case 3:
                cache.ask(*(("new", next(numbers), place) for place in range(draw.randrange(12))))
            case _:
                place = draw.randrange(8)
                prompt = [(draw.randrange(2) if depth == place else 0, depth) for depth in range(10)]
                cache.ask(draw.randrange(4), *prompt[: draw.randint(1, 10)])
        check(policy, namespace.chunks.values())
    for chunk in sorted(namespace.chunks.values(), key=lambda chunk: -chunk.position):
        if not chunk.gone:
            index.hide(chunk)
            check(policy, namespace.chunks.values())
    assert not namespace.chunks


@pytest.mark.parametrize("make", [traces.chat, traces.system_prompts, traces.scan_heavy])
def test_the_shadow_of_lru_contains_what_a_cache_with_lru_does(make: Callable[[int, int], traces.Prompts]) -> None:
    real, followed = Cache("lru", 300), Cache("learned", 300)
    policy = followed.policy
    assert isinstance(policy, Learned)
    shared = total = 0
    for _, prompt in make(7, 150):
        real.ask(*prompt)
        followed.ask(*prompt)
        held, runs = policy._lru.held, policy._runs
        for key in real.namespace.chunks:
            chunk = followed.namespace.chunks.get(key)
            shared += chunk is not None and chunk.number - runs.start[chunk.place] < held[chunk.place]
        total += len(real.namespace.chunks.keys() & followed.namespace.chunks.keys())
        assert 296 - len(prompt) <= policy._lru.count <= 300 + len(prompt) or len(real.namespace.chunks) < 300
    assert total > 8_000 and shared >= 0.99 * total


def test_it_keeps_the_chunks_of_its_leader_and_follows_the_one_with_fewer_misses() -> None:
    cache = Cache("learned", 300)
    policy = cache.policy
    assert isinstance(policy, Learned)
    changes = 0
    for _, prompt in traces.shifting(5, 1500, phase=150):
        leader = policy._leader
        cache.ask(*prompt)
        changes += policy._leader is not leader
        if not policy._unseen and not policy._outside:
            real, held = policy._runs.real, policy._leader.held
            assert all(real[run] <= held[run] for run in policy._queued), "one that it does not contain is left"
    assert changes > 1


@pytest.mark.parametrize("chained", [False, True])
def test_keys_without_chunks_take_a_bounded_part_of_memory(chained: bool) -> None:
    policy = Learned()
    chunks: list[Victim] = []
    for number in range(4000):
        while len(chunks) >= 100:
            victim = policy.victim(lambda chunk: not any(chunk is each.parent for each in chunks))
            assert victim is not None
            chunks.remove(victim)
            victim.gone = True
            policy.remove(victim, evicted=True)
            if victim.parent is not None:
                policy.add(victim.parent)
        parent = chunks[-1] if chained and number % 5 and chunks else None
        chunk = Victim(key=key_of(number), parent=parent)
        policy.insert([chunk])
        policy.add(chunk)
        chunks.append(chunk)
        if number % 100 == 0:
            check(policy, chunks)
    for chunk in reversed(chunks):
        chunk.gone = True
        policy.remove(chunk, evicted=False)
    assert policy._known == policy._chunks == 0


@given(st.lists(st.integers(0, 60), max_size=300), st.integers(0, 3))
def test_the_table_finds_the_keys_that_were_entered_and_not_freed(names: list[int], parts: int) -> None:
    runs = Runs()
    links = Links(runs)
    known: dict[int, int] = {}
    for name in names:
        key, is_part = hashlib.sha256(bytes([name])).digest(), name < parts
        assert runs.find(key, is_part, 0) == known.get(name, 0)
        if name in known:
            runs.free(known.pop(name))
        else:
            known[name] = runs.enter(key, is_part, 0, 0)
            runs.real[known[name]] = 0
            assert links.after[known[name]] == 0
        assert len(set(known.values())) == len(known) == runs.used
    for name, run in known.items():
        runs.real[run] = 1
        assert not runs.find(hashlib.sha256(bytes([name])).digest(), name < parts, 0)


def test_a_run_that_is_split_or_shortened_is_found_by_the_keys_that_are_left() -> None:
    runs = Runs()
    chunks = [Victim(key=key_of(number)) for number in range(6)]
    run = runs.enter(chunks[0].key, False, 0, 0)
    runs.extend(run, chunks[1:])
    runs.real[run] = 3
    assert runs.is_next(run, chunks[3].key) and not runs.is_next(run, chunks[4].key)
    runs.real[run] = 0
    head = runs.split(run, 2)
    assert [runs.size[each] for each in (head, run)] == [2, 4] and runs.start[run] == 2
    assert runs.find(chunks[0].key, False, 0) == head and runs.find(chunks[2].key, False, head) == run
    assert not runs.find(chunks[2].key, False, 0) and not runs.find(chunks[0].key, True, 0)
    runs.shorten(run, 3)
    runs.real[head] = 1
    assert runs.size[run] == 1 and runs.is_next(head, chunks[1].key)


def test_keys_that_are_made_to_have_one_checksum_share_no_bucket() -> None:
    """Clients choose keys: in one bucket, each would be compared with all others."""
    pattern = 0xEDB88320 << 1 | 1  # of the polynomial of CRC-32: adding it to a key leaves the checksum
    forged = [reduce(xor, (pattern << at for at in range(8) if n >> at & 1), 0) for n in range(256)]
    made = [value.to_bytes(32, "little") for value in forged]
    assert len({crc32(key) for key in made}) == 1 and len(set(made)) == 256
    runs = Runs()
    for key in made:
        runs.enter(key, False, 0, 0)
    assert max(Counter(runs._bucket(runs._hash[run]) for run in range(1, 257)).values()) <= 16
