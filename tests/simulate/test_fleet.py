"""A fleet: its hosts hit what the server's index hits, its tier has what they miss, its router does as it is named."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdepot.simulate.fleet import Counts, Fleet, replay_fleet
from kvdepot.simulate.memory import Memory
from kvdepot.simulate.replay import replay
from kvdepot.simulate.routing import Session, sessions_of
from kvdepot.simulate.traces import Trace
from kvdepot.simulate.traffic import Traffic
from kvdepot.testing.traces import WORKLOADS

PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=50)
NAMES = ["random", "session", "prefix"]


def trace_of(*prompts: Sequence[int | str], every_s: float = 1.0) -> Trace:
    return Trace((number * every_s, prompt) for number, prompt in enumerate(prompts))


def counts_of(trace: Trace, fleet: Fleet, copies: int = 1) -> Counts:
    return replay_fleet(Traffic(trace, copies), fleet)


# -- runs, and copies


@given(prompts=PROMPTS)
@settings(max_examples=100, deadline=None)
def test_prompts_share_as_many_blocks_in_runs_as_in_the_trace(prompts: list[list[int]]) -> None:
    trace = trace_of(*prompts)
    found = [request for batch in Traffic(trace).batches() for request in batch]
    assert [sum(sizes) for _, sizes, _ in found] == [blocks for _, _, blocks in found] == [*map(len, prompts)]
    for (one, other), ((runs, sizes, _), (others, _, _)) in zip(
        itertools.combinations(prompts, 2), itertools.combinations(found, 2), strict=True
    ):
        blocks = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(runs, others, strict=False)))
        assert sum(sizes[:shared]) == blocks


def test_a_long_prompt_that_nobody_continues_is_one_run() -> None:
    (batch,) = Traffic(trace_of("abcdefgh", "abcdefgh", "x", "abcdefgh")).batches()
    assert [(runs, sizes) for runs, sizes, _ in batch] == [([0], [8]), ([0], [8]), ([1], [1]), ([0], [8])]


def test_copies_share_nothing_and_keep_each_the_order_of_the_trace() -> None:
    trace = Trace(WORKLOADS["rag"](3, 200))
    traffic = Traffic(trace, 7)
    seen: dict[int, set[int]] = {}
    begun: dict[int, float] = {}
    times: list[float] = []
    order: dict[int, list[int]] = {}
    for batch in traffic.batches():
        times += batch.times
        of = zip(batch, batch.requests.tolist(), batch.copies.tolist(), batch.times, strict=True)
        for (runs, _, _), request, copy, time_s in of:
            begun.setdefault(copy, time_s)
            seen.setdefault(copy, set()).update(runs)
            order.setdefault(copy, []).append(request)
    assert len(traffic) == len(times) == 1400
    assert times == sorted(times)
    assert order == {copy: list(range(200)) for copy in range(7)}
    assert sum(map(len, seen.values())) == len(set().union(*seen.values()))
    assert 0 < max(begun.values()) - min(begun.values()) <= traffic.seconds / 20


def test_in_unlimited_memory_copies_hit_what_the_trace_hits_alone() -> None:
    trace = Trace(WORKLOADS["chat"](3, 300))
    counts = counts_of(trace, Fleet(10, "session", 10 * trace.unique), copies=10)
    assert counts.memory_hits.sum() == 10 * (len(trace.blocks) - trace.unique)
    assert counts.requests.sum() == 3000


# -- one host


@pytest.mark.parametrize("routing", NAMES)
@given(prompts=PROMPTS, capacity=st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_one_host_hits_exactly_what_the_servers_index_hits(
    routing: str, prompts: list[list[int]], capacity: int
) -> None:
    trace = trace_of(*prompts)
    counts = counts_of(trace, Fleet(1, routing, capacity))
    assert counts.memory_hits.sum() == replay(trace, "lru", capacity).hits
    assert (counts.requests.sum(), counts.blocks.sum()) == (len(trace), len(trace.blocks))


@pytest.mark.parametrize("name", WORKLOADS)
def test_one_host_hits_exactly_what_the_servers_index_hits_of_a_workload(name: str) -> None:
    trace = Trace(WORKLOADS[name](4, 400))
    for part in (2, 10, 60):
        capacity = max(1, trace.unique // part)
        assert counts_of(trace, Fleet(1, "prefix", capacity)).memory_hits.sum() == replay(trace, "lru", capacity).hits


# -- several hosts, and a tier


@given(prompts=PROMPTS, capacity=st.integers(1, 20), hosts=st.integers(2, 4))
@settings(max_examples=60, deadline=None)
def test_each_host_is_an_index_of_its_own(prompts: list[list[int]], capacity: int, hosts: int) -> None:
    trace = trace_of(*prompts)
    counts = counts_of(trace, Fleet(hosts, "session", capacity))
    routing = Session([Memory(capacity) for _ in range(hosts)], trace)
    chosen = [host for batch in Traffic(trace).batches() for host in routing.hosts(batch)]
    for host in range(hosts):
        own = trace_of(*(prompt for prompt, at in zip(prompts, chosen, strict=True) if at == host))
        assert counts.requests[host] == len(own)
        assert counts.memory_hits[host] == replay(own, "lru", capacity).hits


class Plain:
    """An LRU cache of prefixes, block by block: the oracle of memory and tier."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._dates: dict[tuple[int, ...], tuple[int, int]] = {}
        self._now = 0

    def use(self, prompt: Sequence[int]) -> int:
        self._now += 1
        prefixes = [tuple(prompt[:end]) for end in range(1, len(prompt) + 1)]
        hits = sum(1 for _ in itertools.takewhile(self._dates.__contains__, prefixes))
        self._dates |= {prefix: (self._now, -len(prefix)) for prefix in prefixes}
        while len(self._dates) > self._capacity:
            del self._dates[min(self._dates, key=self._dates.__getitem__)]
        return hits


@given(prompts=PROMPTS, capacity=st.integers(1, 12), tier_blocks=st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_a_tier_has_what_memory_misses(prompts: list[list[int]], capacity: int, tier_blocks: int) -> None:
    memory, tier = Plain(capacity), Plain(tier_blocks)
    expected = Counter[str]()
    for prompt in prompts:
        hits = memory.use(prompt)
        expected["memory"] += hits
        if hits < len(prompt):
            found = tier.use(prompt)
            expected["tier"] += max(0, found - hits)
            expected["loads"] += found > hits
            expected["writes"] += max(0, min(len(prompt), tier_blocks) - found)
    counts = counts_of(trace_of(*prompts), Fleet(1, "random", capacity, tier_blocks))
    assert counts.memory_hits.sum() == expected["memory"]
    assert counts.tier_hits.sum() == expected["tier"]
    assert counts.tier_loads.sum() == expected["loads"]
    assert counts.tier_writes.sum() == expected["writes"]


@pytest.mark.parametrize("routing", NAMES)
def test_a_large_tier_makes_up_for_any_routing(routing: str) -> None:
    trace = Trace(WORKLOADS["chat"](5, 500))
    counts = counts_of(trace, Fleet(8, routing, 60, trace.unique))
    assert counts.memory_hits.sum() + counts.tier_hits.sum() == len(trace.blocks) - trace.unique
    assert counts.tier_writes.sum() == trace.unique


@pytest.mark.parametrize("routing", NAMES)
def test_a_replay_is_the_same_each_time_and_counts_every_request_once(routing: str) -> None:
    trace = Trace(WORKLOADS["agents"](5, 500))
    one, other = (vars(counts_of(trace, Fleet(7, routing, 300, 2000), 3)) for _ in range(2))
    assert all((one[name] == other[name]).all() for name in one)
    assert (one["requests"].sum(), one["blocks"].sum()) == (1500, 3 * len(trace.blocks))


def test_progress_is_told_up_to_the_last_request() -> None:
    told: list[int] = []
    replay_fleet(Traffic(trace_of(*["ab"] * 40), 5000), Fleet(3, "random", 10), told.append)
    assert len(told) > 2
    assert told == sorted(told)
    assert told[-1] == 200_000


# -- routing


def test_random_routing_spreads_requests_evenly() -> None:
    requests = counts_of(trace_of(*["a"] * 100), Fleet(10, "random", 5), 100).requests
    assert 850 < requests.min() <= requests.max() < 1150


def test_a_session_stays_on_its_host_and_copies_have_sessions_of_their_own() -> None:
    turns = ["ab", "abc", "abcd", "abcde"] * 10
    trace = Trace(enumerate(turns), sessions=["s"] * 40)
    assert np.count_nonzero(counts_of(trace, Fleet(50, "session", 9)).requests) == 1
    assert np.count_nonzero(counts_of(trace, Fleet(50, "session", 9), 500).requests) == 50


def test_sessions_that_a_trace_names_are_taken_even_if_their_prompts_are_alike() -> None:
    trace = Trace(enumerate(["ab", "ab", "abc", "x"]), sessions=["one", "other", "one", None])
    assert trace.sessions.tolist() == [0, 1, 0, -1]
    one, other, again, unnamed = sessions_of(trace).tolist()
    assert one == again
    assert len({one, other, unnamed}) == 3


def test_prompts_without_a_session_go_by_the_first_block_behind_what_many_share() -> None:
    chats = [["system", f"chat {chat}", *range(turn)] for chat in range(100) for turn in range(1, 4)]
    families = sessions_of(Trace(enumerate(chats))).reshape(100, 3)
    assert (families == families[:, :1]).all()
    assert len(np.unique(families)) == 100


def test_prompts_that_all_share_are_a_family_and_empty_ones_harm_nobody() -> None:
    trace = trace_of(*[*["ab"] * 80, "", "abc", ""])
    families = sessions_of(trace).tolist()
    assert len(set(families[:80])) == 1
    assert families[81] != families[0]
    assert sessions_of(trace_of("", "")).tolist() == [0, 0]


def test_prefix_routing_finds_the_host_that_has_most_of_a_prompt() -> None:
    chats = [[chat, *range(turn)] for turn in range(1, 6) for chat in range(30)]
    trace = trace_of(*chats, every_s=10.0)
    counts = counts_of(trace, Fleet(6, "prefix", trace.unique))
    assert counts.memory_hits.sum() == len(trace.blocks) - trace.unique
    assert counts.requests.min() > 0


@pytest.mark.parametrize("begin_s", [0.0, -1e6, 1.8e9])
def test_prefix_routing_overloads_no_host(begin_s: float) -> None:
    trace = Trace((begin_s + number * 0.01, "ab") for number in range(2000))
    requests = counts_of(trace, Fleet(10, "prefix", 5)).requests
    assert requests.max() <= 1.25 * 200 + 9


def test_prefix_routing_comes_back_to_a_host_once_its_load_has_passed() -> None:
    crowded = [(number * 0.01, "ab") for number in range(30)]
    later = [(100_000.0, "ab"), (200_000.0, "ab")]
    counts = counts_of(Trace([*crowded, *later]), Fleet(2, "prefix", 5))
    assert counts.memory_hits.sum() == 2 * (32 - np.count_nonzero(counts.requests))


@given(
    uses=st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), max_size=4)), max_size=40),
    capacity=st.integers(1, 8),
)
@settings(max_examples=60, deadline=None)
def test_what_a_router_knows_is_what_the_hosts_hold(uses: list[tuple[int, list[int]]], capacity: int) -> None:
    memories = [Memory(capacity) for _ in range(3)]
    holders: dict[int, list[int]] = {}
    for host, memory in enumerate(memories):
        memory.watch(host, holders)
    for batch in Traffic(trace_of(*(prompt for _, prompt in uses))).batches():
        for (host, _), (runs, sizes, blocks) in zip(uses, batch, strict=True):
            memories[host].use(runs, sizes, blocks)
            held = {run: [at for at, memory in enumerate(memories) if run in memory.held] for run in batch.runs}
            assert {run: sorted(holders.get(run, [])) for run in batch.runs} == held
            assert all(holders.values())
            assert all(sum(memory.held.values()) <= capacity for memory in memories)
