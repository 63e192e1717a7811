"""Eviction policies: what each keeps, that none names a chunk that is not evictable, and how good `learned` is."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import pytest
from bench import traces
from bench.replay import Trace, load, replay
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvdepot.core.index import matching
from kvdepot.core.index.index import Index
from kvdepot.core.index.runs import Run
from kvdepot.eviction import POLICIES, Policy, Victim
from kvdepot.memory.allocator import PAGE, Allocator
from kvdepot.protocol.keys import ROOT
from kvdepot.protocol.wire import Group

EVERY = pytest.mark.parametrize("name", sorted(POLICIES))


def key_of(name: object) -> bytes:
    return hashlib.sha256(repr(name).encode()).digest()


class Cache:
    """An index of `chunks` chunks with a policy, and requests as a depot makes them."""

    def __init__(self, name: str, chunks: int) -> None:
        self.policy = POLICIES[name]()
        self.index = Index(Allocator(0, chunks * PAGE), lambda: self.policy)
        (self.namespace,) = self.index.namespaces.find_groups("m", 1, 0, [Group(0, 1, 0, bytes(32))])
        self.namespace.live = 1

    def ask(self, *prompt: object) -> int:
        """A request: look up, and store the missing chunks; returns the number of hits."""
        keys = [key_of(prompt[: i + 1]) for i in range(len(prompt))]
        pin = matching.match(self.namespace, b"".join(keys))
        self.index.hold(pin.chunks)
        self.index.use(pin.chunks)
        missing, parent = b"".join(keys[pin.matched :]), keys[pin.matched - 1] if pin.matched else ROOT
        for chunk in self.index.reserve(self.namespace, 0, Run(missing, PAGE, parent, pin.matched + 1), 0).chunks:
            self.index.seal(chunk, 0)
        self.index.release(pin.chunks)
        return pin.matched

    def has(self, *prompt: object) -> int:
        """The number of chunks of a prompt that exist, without using them."""
        keys = b"".join(key_of(prompt[: i + 1]) for i in range(len(prompt)))
        return matching.match(self.namespace, keys).matched


# -- what each policy keeps


@pytest.mark.parametrize(("name", "kept"), [("lru", 0), ("learned", 10)])
def test_popular_prompts_outlive_a_flood_of_prompts_that_are_not_repeated(name: str, kept: int) -> None:
    cache = Cache(name, 100)
    for number in range(40):
        for popular in range(10):
            cache.ask("popular", popular)
        cache.ask("other", number)
    for number in range(300):
        cache.ask("flood", number)
    assert sum(cache.has("popular", popular) == 2 for popular in range(10)) >= kept * 0.9
    if not kept:
        assert not any(cache.has("popular", popular) for popular in range(10))


@EVERY
def test_a_head_that_many_tails_share_is_as_frequent_as_they_are_together(name: str) -> None:
    """Each request uses only its deepest chunk, but the head must not count as used once."""
    cache = Cache(name, 60)
    for number in range(50):
        cache.ask("head", 1, 2, 3, ("tail", number))
        cache.ask("noise", number, 1, 2)
    for number in range(8):
        cache.ask("more noise", number, 1, 2)
    assert cache.has("head", 1, 2, 3) == 4


def test_learned_keeps_the_chats_that_go_on_and_drops_the_prompts_that_do_not() -> None:
    """Both are new, and differ only in the chunk they were stored behind."""
    hits = {}
    for name in ("lru", "learned"):
        cache = Cache(name, 400)
        draw = random.Random(2)
        chats: list[list[object]] = []
        hits[name] = 0
        for number in range(3000):
            if number % 3 == 0:
                if not chats or draw.random() < 0.1:
                    chats.append([("chat", number)])
                    chats = chats[-60:]
                chat = draw.choice(chats)
                hits[name] += cache.ask(*chat)
                if len(chat) < 12:
                    chat.append(number)
            else:
                cache.ask(("once", number), 1, 2, 3)
    assert hits["learned"] > 1.3 * hits["lru"] > 0


# -- kept after all, removed, adopted


@EVERY
def test_ghosts_and_queues_stay_in_proportion_to_the_chunks(name: str) -> None:
    policy = POLICIES[name]()
    chunks: list[Victim] = []
    for number in range(5000):
        if len(chunks) >= 100:
            victim = policy.victim(lambda chunk: True)
            assert victim is not None
            chunks.remove(victim)
            victim.gone = True
            policy.remove(victim, evicted=True)
        if number % 7 == 0 and chunks:  # forgotten, while it is queued
            gone = chunks.pop(number % len(chunks))
            gone.gone = True
            policy.remove(gone, evicted=False)
        chunk = Victim(key=key_of(number % 3000))
        policy.insert([chunk])
        policy.add(chunk)
        chunks.append(chunk)
        if number % 3 == 0:
            policy.use(chunks[number % len(chunks)])
            policy.add(chunks[number % len(chunks)])
    assert len(chunks) <= policy.queued <= 2 * len(chunks) + 32
    for chunk in chunks:
        chunk.gone = True
        policy.remove(chunk, evicted=False)
    assert policy.queued <= 32
    assert policy.victim(lambda chunk: True) is None


# -- any order of calls, without an index: what a tier without chains does


class PolicyMachine(RuleBasedStateMachine):
    @initialize(name=st.sampled_from(sorted(POLICIES)))
    def begin(self, name: str) -> None:
        self.policy: Policy = POLICIES[name]()
        self.free: list[Victim] = []  # what may be evicted
        self.held: list[Victim] = []
        self.numbers = itertools.count()

    @rule(number=st.integers(0, 30), count=st.integers(1, 5), held=st.booleans())
    def insert(self, number: int, count: int, held: bool) -> None:
        for key in range(number, number + count):
            if any(chunk.key == key_of(key) for chunk in self.free + self.held):
                continue
            chunk = Victim(key=key_of(key))
            self.policy.insert([chunk])
            if held:
                self.held.append(chunk)
            else:
                self.policy.add(chunk)
                self.free.append(chunk)

    @rule(at=st.integers(0, 60))
    def use(self, at: int) -> None:
        if everything := self.free + self.held:
            chunk = everything[at % len(everything)]
            self.policy.use(chunk)
            if chunk in self.free:
                self.policy.add(chunk)

    @rule(at=st.integers(0, 60))
    def hold(self, at: int) -> None:
        if self.free:
            self.held.append(self.free.pop(at % len(self.free)))

    @rule(at=st.integers(0, 60))
    def release(self, at: int) -> None:
        if self.held:
            chunk = self.held.pop(at % len(self.held))
            self.policy.add(chunk)
            self.free.append(chunk)

    @rule(at=st.integers(0, 60))
    def drop(self, at: int) -> None:
        if self.free:
            chunk = self.free.pop(at % len(self.free))
            chunk.gone = True
            self.policy.remove(chunk, evicted=False)

    @rule(count=st.integers(1, 8), keep=st.booleans())
    def evict(self, count: int, keep: bool) -> None:
        for _ in range(count):
            victim = self.policy.victim(lambda chunk: any(chunk is one for one in self.free))
            if victim is None:
                assert not self.free, "it may go, and the policy does not name it"
                break
            if keep:
                self.policy.add(victim)
                assert victim.queued
            self.free = [chunk for chunk in self.free if chunk is not victim]
            if keep:
                self.held.append(victim)
            else:
                victim.gone = True
                self.policy.remove(victim, evicted=True)

    @invariant()
    def what_may_go_is_known(self) -> None:
        if hasattr(self, "policy"):
            assert all(chunk.queued for chunk in self.free)


TestPolicyMachine = PolicyMachine.TestCase
TestPolicyMachine.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)


# -- the bar


def lru_hits(trace: Trace, capacity: int) -> int:
    """What a replay of LRU must hit, in a tenth of its time. Of a request's blocks, the last goes first."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for blocks in map(np.ndarray.tolist, trace):
        matched = next((i for i, block in enumerate(blocks) if block not in cached), len(blocks))
        hits += matched
        for block in blocks[:matched]:
            del cached[block]
        while len(cached) > max(0, capacity - len(blocks)):
            cached.popitem(last=False)
        cached.update(dict.fromkeys(reversed(blocks[:capacity])))
    return hits


@pytest.mark.faults
@pytest.mark.parametrize(
    ("make", "capacity", "gain"),
    [
        (lambda: traces.agents(2, 300), 1500, -0.006),
        (lambda: traces.chat(2, 900), 3500, -0.006),
        (lambda: traces.loop(2, 500, prompts=80), 1000, 0.1),
        (lambda: traces.system_prompts(2, 1500), 3500, 0.01),
        (lambda: traces.scan_heavy(4, 2000), 2000, 0.03),
        (lambda: traces.shifting(4, 2000, phase=400), 1800, -0.006),
        (lambda: traces.rag(5, 500), 500, 0.01),
    ],
    ids=["agents", "chat", "loop", "system_prompts", "scan_heavy", "shifting", "rag"],
)
def test_learned_is_better_than_lru_on_mixed_traffic_and_hardly_below_it_elsewhere(
    make: Callable[[], traces.Prompts], capacity: int, gain: float
) -> None:
    trace = Trace(make())
    lru, learned = (replay(trace, name, capacity) for name in ("lru", "learned"))
    assert lru.hits == lru_hits(trace, capacity)
    assert learned.hit_rate >= lru.hit_rate + gain, (lru.hit_rate, learned.hit_rate)


@pytest.mark.faults
@pytest.mark.skipif("KVDEPOT_TRACE" not in os.environ, reason="KVDEPOT_TRACE names no trace of requests")
def test_learned_holds_its_bar_on_a_trace_of_real_requests() -> None:
    trace = load(os.environ["KVDEPOT_TRACE"])
    gains = []
    for capacity in (1000, 5000, 10_000, 20_000, 30_000):
        gains.append(replay(trace, "learned", capacity).hit_rate - lru_hits(trace, capacity) / len(trace.blocks))
    assert replay(trace, "lru", 30_000).hits == lru_hits(trace, 30_000)
    assert min(gains) >= -0.003 and sum(gains) / len(gains) >= 0.01, gains


@EVERY
def test_a_victim_that_is_kept_after_all_is_the_next_victim_again(name: str) -> None:
    policy = POLICIES[name]()
    chunks = [Victim(key=key_of(number)) for number in range(50)]
    for chunk in chunks:
        policy.insert([chunk])
        policy.add(chunk)
    for chunk in chunks[20:]:
        policy.use(chunk)
        policy.add(chunk)
    for _ in range(5):
        first = policy.victim(lambda chunk: True)
        assert first is not None and not first.queued
        policy.add(first)
        assert policy.victim(lambda chunk: True) is first
        first.gone = True
        policy.remove(first, evicted=True)
