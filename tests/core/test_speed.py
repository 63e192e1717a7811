"""Load or compute: a real depot, a tier with given times and an engine with a given speed; no thread, no clock.

A request takes its wait for the depot, then the time of computing what it did not get. Beside it: computing all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import msgspec
import pytest

from kvdepot.core.tiering.speed import TierSpeed
from kvdepot.errors import BadRequest
from kvdepot.keys import ChunkChain
from kvdepot.memory.allocator import PAGE
from kvdepot.protocol import wire
from kvdepot.tiers.worker import Find, Load
from tests.core.desk import group_stores, instance_of, prompt, shards, store
from tests.core.groups import Reaches
from tests.core.host import Host, look, new_host
from tests.core.test_tiering import group_host
from tests.tiers.faulty import MemoryTier

TWENTIETH = 1.05 + 1e-9
SPEED = 10.0  # tokens, and chunks, per second
CHUNKS = 8
NEVER = float("inf")
NAMES = count()


class Engine:
    """Requests of one engine, one after the other, with tiers that take these times (by number)."""

    def __init__(self, host: Host, find_s: float = 0.001, chunk_s: float = 0.0, threads: int = 1) -> None:
        """threads: 1: Finds wait for loads; 2: they do not."""
        self.host = host
        self.find_s, self.chunk_s = {0: find_s, 1: find_s}, {0: chunk_s, 1: chunk_s}
        self.asked = 0  # requests for which a tier was asked
        self._free_at = [[0.0] * threads for _ in range(2)]
        self._ends: dict[int, float] = {}  # of tier tasks, by id

    def run(self, chain: ChunkChain) -> float:
        """The time of a request as a share of the time without any cache."""
        host, request, begun = self.host, f"r{next(NAMES)}", self.host.now
        message = msgspec.structs.replace(look(chain, request), speed=SPEED)
        finds = host.kinds().count("Find")
        asked, hurries_at = host.send(b"one", message), begun + len(chain) / SPEED
        self.asked += host.kinds().count("Find") > finds
        while asked not in host.answers:
            self._advance(min(host.depot.next_deadline(), hurries_at))
            if host.now >= hurries_at and asked not in host.answers:
                asked, hurries_at = host.send(b"one", msgspec.structs.replace(message, hurries=True)), NEVER
                assert asked in host.answers
        took_s = host.now - begun + (len(chain) - host.answers[asked]) / SPEED
        host.ask(b"one", wire.EndSession(request))
        self.pause(begun + took_s + 0.1)
        return took_s / (len(chain) / SPEED)

    def pause(self, until: float) -> None:
        """Let time pass; what is under way in the tiers goes on."""
        while self.host.now < until:
            self._advance(until)

    def _advance(self, until: float) -> None:
        """Go on to this time, or to the end of the tier task that ends before."""
        host = self.host
        for task in host.tier_tasks:
            if id(task) not in self._ends:
                chunks = len(task.parts) if isinstance(task, Load) else 0
                took_s = self.find_s[task.tier] if isinstance(task, Find) else chunks * self.chunk_s[task.tier]
                free_at = self._free_at[task.tier]
                thread = isinstance(task, Load) % len(free_at)
                self._ends[id(task)] = free_at[thread] = max(free_at[thread], host.now) + took_s
        first = min(host.tier_tasks, key=lambda task: self._ends[id(task)], default=None)
        if first is not None and self._ends[id(first)] <= until:
            host.now = self._ends.pop(id(first))
            host.work(first)
        else:
            host.pass_time(max(0.0, until - host.now))


def chains(*tiers: MemoryTier, there: int = CHUNKS) -> Iterator[ChunkChain]:
    """Prompts of which the tiers have some chunks, and memory none."""
    while True:
        chain, here = prompt(f"p{next(NAMES)}", CHUNKS), new_host(*tiers)
        if there:
            here.find(b"one", store(chain, end=there))
        yield chain


def new_engine(*tiers: tuple[str, MemoryTier] | MemoryTier, **times: Any) -> Engine:
    host = new_host(*(tier if isinstance(tier, tuple) else ("disk:///d?write=off", tier) for tier in tiers), lookup_s=8)
    return Engine(host, **times)


SLOW = {"chunk_s": 0.3}, {"chunk_s": 0.15}, {"chunk_s": NEVER}, {"find_s": 3.0}, {"find_s": NEVER}


@pytest.mark.parametrize("times", [*SLOW, {"chunk_s": NEVER, "threads": 2}], ids=str)
def test_a_slow_tier_costs_one_request_its_time_and_the_others_a_twentieth(
    tier: MemoryTier, times: dict[str, Any]
) -> None:
    engine, prompts = new_engine(tier, **times), chains(tier)
    assert 1.0 < engine.run(next(prompts)) <= 2.01
    for _ in range(90):
        assert engine.run(next(prompts)) <= TWENTIETH
    assert 1 < engine.asked <= 12, "it is tried again, but not by every request"
    status = engine.host.depot.tiering.status(engine.host.now)[0]
    assert status.counters["late"] == 1 and status.state == "up"


def test_a_fast_tier_is_always_used(tier: MemoryTier) -> None:
    engine, prompts = new_engine(tier, chunk_s=0.03), chains(tier)
    assert all(engine.run(next(prompts)) < 0.31 for _ in range(20))


def test_a_tier_that_becomes_slow_is_found_out_by_the_first_requests(tier: MemoryTier) -> None:
    engine, prompts = new_engine(tier, chunk_s=0.01), chains(tier)
    for _ in range(20):
        engine.run(next(prompts))
    engine.chunk_s[0] = 0.4
    took = [engine.run(next(prompts)) for _ in range(20)]
    assert sum(share > TWENTIETH for share in took) <= 2


def test_a_tier_that_is_fast_for_each_of_many_waiting_requests_stays_in_use(tier: MemoryTier) -> None:
    engine, prompts = (
        Engine(new_host(("disk:///d?write=off", tier), lookup_s=8, pages=1024), chunk_s=0.02),
        chains(tier),
    )
    host = engine.host
    for _ in range(2):
        begun, asked = host.now, []
        for _ in range(40):
            lookup = msgspec.structs.replace(look(next(prompts), f"q{next(NAMES)}"), speed=SPEED)
            asked.append(host.send(b"one", lookup))
            engine.pause(host.now + 0.03)
        engine.pause(begun + 8.0)  # the last one waits eight times as long as computing takes
        assert [host.answers[each] for each in asked] == [CHUNKS] * 40
        host.ask(b"one", wire.Clear())
    assert engine.run(next(prompts)) < 0.3


def test_a_tier_that_was_slow_is_used_again_soon_after_it_is_fast(tier: MemoryTier) -> None:
    engine, prompts = new_engine(tier, chunk_s=0.5), chains(tier)
    for _ in range(30):
        engine.run(next(prompts))
    engine.chunk_s[0] = 0.02
    until = engine.host.now + 21.0
    while engine.host.now < until:
        assert engine.run(next(prompts)) <= TWENTIETH
    assert all(engine.run(next(prompts)) < 0.3 for _ in range(20))
    assert engine.host.depot.tiering.status(engine.host.now)[0].counters["computed_tokens"] > 20 * CHUNKS


def test_loads_are_measured_again_where_finds_take_longer_than_the_slack(tier: MemoryTier) -> None:
    engine, prompts = new_engine(tier, find_s=0.1, chunk_s=0.5), chains(tier)
    for _ in range(20):
        engine.run(next(prompts))
    engine.chunk_s[0] = 0.0
    until = engine.host.now + 75.0
    while engine.host.now < until:
        engine.run(next(prompts))
    assert all(engine.run(next(prompts)) < 0.2 for _ in range(20))


def test_a_tier_with_slow_answers_is_asked_only_while_it_has_something(tier: MemoryTier) -> None:
    engine, prompts, without = new_engine(tier, find_s=0.25), chains(tier), chains(tier, there=0)
    assert all(engine.run(next(prompts)) < 0.4 for _ in range(10))
    took = [engine.run(next(without)) for _ in range(40)]
    assert max(took) < 1.32 and max(took[8:]) <= TWENTIETH


def test_chunks_that_only_a_slow_tier_has_are_computed_and_the_rest_is_loaded(tier: MemoryTier) -> None:
    far = MemoryTier()
    engine, prompts = new_engine(tier, ("redis://far?write=off", far)), chains(far)
    engine.chunk_s = {0: 0.01, 1: 0.4}
    for _ in range(3):
        engine.run(next(prompts))
    chain, here = next(prompts), new_host(tier)
    here.find(b"one", store(chain, end=6))
    assert engine.run(chain) < 0.4
    near, slow = engine.host.depot.tiering.status(engine.host.now)
    assert near.counters["loaded_chunks"] == 6 and slow.counters["computed_tokens"] > 0


def test_the_end_of_a_prefix_is_left_if_the_tier_that_has_it_takes_longer(tier: MemoryTier) -> None:
    far = MemoryTier()
    engine, prompts = new_engine(tier, ("redis://far?write=off", far)), chains(far)
    engine.find_s[1], engine.chunk_s = 0.15, {0: 0.01, 1: 0.05}
    for _ in range(5):
        assert engine.run(next(prompts)) < 1.0, "whole prompts are worth it"
    (chain,), here, there = [next(chains())], new_host(tier), new_host(far)
    here.find(b"one", store(chain, end=7))
    there.find(b"one", store(chain))
    engine.run(chain)
    near, slow = engine.host.depot.tiering.status(engine.host.now)
    assert (near.counters["loaded_chunks"], slow.counters["computed_tokens"]) == (7, 1)


def test_a_lookup_that_waits_for_the_loads_of_another_says_nothing_of_a_slow_tier() -> None:
    speed = TierSpeed()
    speed.load_late(1 << 30, 0.0, 50.0)
    expected_s = speed.load_s(1 << 30, 50.0)
    speed.load_late(0, 0.0, 50.0)
    assert expected_s > 0.0 and speed.load_s(1 << 30, 50.0) == expected_s


def test_a_slow_load_beside_another_counts_only_for_what_it_takes_longer(tier: MemoryTier) -> None:
    far, chain = MemoryTier(), prompt("long", 200)
    host = new_host(("disk:///d?write=off", tier), ("redis://far?write=off", far), pages=512)
    for here, end in ((new_host(tier, pages=512), 199), (new_host(far, pages=512), 200), (host, 192)):
        for first in range(0, end, 32):
            last = min(end, first + 32)
            here.find(b"one", wire.Store(1, [shards(chain, first, last)]))
    near_speed, far_speed = (state.speed for state in host.depot.tiering._tiers)
    near_speed.loaded(7 * PAGE, -0.35, 0.0)
    far_speed.find_s = 0.36
    far_speed.loaded(PAGE, -0.36 - 0.04, 0.0)  # the last chunk comes 0.05 s after the others; computing it takes 0.1
    asked = host.send(b"one", msgspec.structs.replace(look(chain), speed=SPEED))
    far_speed.find_s = 0.72  # this Find takes no time
    host.rest()
    assert host.answers[asked] == 200


def test_a_state_that_makes_a_whole_prefix_usable_is_loaded_however_slow(tier: MemoryTier) -> None:
    reaches: Reaches = (0, 1)
    chain = prompt("a", CHUNKS)
    here, there = (group_host(reaches, tier, url=url) for url in ("disk:///d", "disk:///d?write=off"))
    for request in group_stores(reaches, chain, [range(CHUNKS), range(CHUNKS)]):
        assert here.find(b"one", request) is True
    speed = there.depot.tiering._tiers[0].speed
    there.find(b"one", store(chain, instance_of(reaches, 0)))  # memory has the unbounded group
    speed.loaded(PAGE, -3 * 16 / SPEED, 0.0)  # a part takes as long as computing three chunks
    fast = msgspec.structs.replace(look(chain), speed=SPEED)
    assert there.find(b"one", fast) == CHUNKS


def test_a_hurried_lookup_is_answered_from_memory_at_once_and_counted_once(tier: MemoryTier) -> None:
    (chain,), host = [next(chains(tier))], new_host(("disk:///d?write=off", tier))
    host.find(b"one", store(chain, end=3))
    waiting = host.send(b"one", look(chain))
    assert waiting not in host.answers
    hurried = host.send(b"one", msgspec.structs.replace(look(chain), hurries=True))
    assert host.answers[waiting] == 0 and host.answers[hurried] == 3
    host.ask(b"one", wire.EndSession("r"))
    host.send(b"one", wire.Store(1, [shards(chain, 3, 5)]))  # its copy is in progress
    waiting = host.send(b"one", look(chain))
    hurried = host.send(b"one", msgspec.structs.replace(look(chain), hurries=True))
    assert host.answers[waiting] == 0 and host.answers[hurried] == 3
    counters = host.depot.counters
    assert (counters["lookups"], counters["hit_chunks"]) == (2, 6)
    host.ask(b"one", wire.EndSession("r"))
    host.assert_quiet()


@pytest.mark.parametrize("speed", [-1.0, float("nan"), NEVER])
def test_a_speed_that_is_none_is_refused(tier: MemoryTier, speed: float) -> None:
    host = new_host(tier)
    assert isinstance(host.ask(b"one", msgspec.structs.replace(look(prompt("a", 1)), speed=speed)), BadRequest)
