"""Wants: who may be evicted for whom, compared with a walk over all chunks and wants (wanted.py), and what it costs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvdepot.core.index import matching, wants
from kvdepot.core.index.chunk import Chunk, Namespace, Shard, is_unwanted
from kvdepot.core.index.events import Reason
from kvdepot.core.index.excess import trim
from kvdepot.core.index.index import Index
from kvdepot.core.index.runs import Refusal, Reservation, Run
from kvdepot.core.index.wants import Want
from kvdepot.eviction import POLICIES
from kvdepot.memory.allocator import PAGE, Allocator
from kvdepot.protocol.quotas import Quota
from tests.conftest import clear
from tests.core.groups import Rack, Reaches, wire_groups
from tests.core.heard import take_events
from tests.core.shelf import key_of, keys, prompt
from tests.core.wanted import WatchedIndex, said

TENANTS = ["", "a", "b"]
OWNERS = ["an engine", "another", "a third"]
PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)


def index_of(pages: int, policy: str = "lru") -> WatchedIndex:
    return WatchedIndex(Allocator(0, pages * PAGE), POLICIES[policy], chunk_tokens=16)


class WantsMachine(RuleBasedStateMachine):
    """Queues of several engines, stores and loads of several accounts, and chunks that go while they are wanted."""

    @initialize(
        reaches=st.sampled_from([(0,), (0,), (0, 2), (1, 0)]),
        pages=st.integers(3, 12),
        policy=st.sampled_from(sorted(POLICIES)),
        bounds=st.sampled_from([(), ((0, 0), (0, 0)), ((4, 0), (0, 8)), ((0, 4), (0, 4))]),
    )
    def begin(self, reaches: Reaches, pages: int, policy: str, bounds: tuple[tuple[int, int], ...]) -> None:
        self.index = index_of(pages, policy)
        self.groups: dict[str, list[Namespace]] = {}
        for tenant in TENANTS:
            self.groups[tenant] = self.index.namespaces.find_groups("m", 1, 0, wire_groups(reaches), tenant)
            for group in self.groups[tenant]:
                group.live = 1
        for tenant, (floor, cap) in zip(TENANTS[1:], bounds, strict=False):
            self.index.set_quota(tenant, Quota(min(floor, pages) * PAGE, cap * PAGE))
        self.queue: list[tuple[Want, str, tuple[int, ...]]] = []
        self.open: list[tuple[Chunk, Shard]] = []
        self.pins: list[list[Chunk]] = []

    def reserve(self, tenant: str, group: int, path: tuple[int, ...], run: dict[str, Any]) -> Reservation:
        """Reserve the part of the last chunk of a path."""
        chain = prompt(path)
        parent = chain[-2] if len(chain) > 1 else b"root"
        wall = None if "depth" in run else 0
        return self.index.reserve(self.groups[tenant][group], 0, Run(chain[-1], PAGE, parent, len(chain), **run), wall)

    @rule(tenant=st.sampled_from(TENANTS), path=PATHS, first=st.sampled_from([0, 0, 0, 2]), fails=st.booleans())
    def store(self, tenant: str, path: tuple[int, ...], first: int, fails: bool) -> None:
        for end in range(min(first, len(path) - 1) + 1, len(path) + 1):
            for group in range(len(self.groups[tenant])):
                made = self.reserve(tenant, group, path[:end], {})
                if made.refusal is not None:
                    return
                self.open += [(chunk, chunk.shards[0]) for chunk in made.chunks]
                if not fails:
                    self.end_stores(False)

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def store_what_a_want_lacks(self, data: st.DataObject) -> None:
        want, tenant, path = data.draw(st.sampled_from(self.queue))
        self.store(tenant, path, len(want.tops), False)
        self.say(want, tenant, path)

    @rule(tenant=st.sampled_from(TENANTS), path=PATHS, position=st.integers(0, 5))
    def load(self, tenant: str, path: tuple[int, ...], position: int) -> None:
        """For a request that is in a queue, or that is about to be scheduled."""
        depth = self.index.depth_of(self.queue[position][0]) if position < len(self.queue) else 0.0
        made = self.reserve(tenant, 0, path, {"depth": depth})
        self.open += [(chunk, chunk.shards[0]) for chunk in made.chunks]

    @rule(fails=st.booleans())
    def end_stores(self, fails: bool) -> None:
        opened, self.open = self.open, []
        for chunk, shard in opened:
            if shard.is_open:
                self.index.finish([(chunk, 0)], {} if fails else {0: 1}, 0)
            else:  # a load that a store has overtaken
                self.index.give_back(shard)

    # -- queues

    def say(self, want: Want, tenant: str, path: tuple[int, ...]) -> None:
        chain, first = prompt(path), self.groups[tenant][0]
        pin = matching.match(first, b"".join(chain))
        self.index.wants.want(want, pin.chunks, (first, chain[pin.matched]) if pin.matched < len(chain) else None)

    @rule(
        owner=st.sampled_from(OWNERS), tenant=st.sampled_from(TENANTS), path=PATHS, place=st.integers(-1, 1),
        stores=st.booleans(),
    )  # fmt: skip
    def enter(self, owner: str, tenant: str, path: tuple[int, ...], place: int, stores: bool) -> None:
        if stores:
            self.store(tenant, path, 0, False)
        self.queue.append((self.index.wants.join(owner, place, len(path)), tenant, path))
        self.say(*self.queue[-1])

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def say_again(self, data: st.DataObject) -> None:
        self.say(*data.draw(st.sampled_from(self.queue)))

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.index.wants.unwant(self.queue.pop(data.draw(st.integers(0, len(self.queue) - 1)))[0])

    # -- what else happens to chunks

    @rule(tenant=st.sampled_from(TENANTS), path=PATHS)
    def pin(self, tenant: str, path: tuple[int, ...]) -> None:
        chunks = matching.match(self.groups[tenant][0], b"".join(prompt(path))).chunks
        self.index.hold(chunks)
        self.pins.append(chunks)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.index.release(self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1))))

    @rule(tenant=st.sampled_from(TENANTS), path=PATHS, corrupts=st.booleans())
    def hide(self, tenant: str, path: tuple[int, ...], corrupts: bool) -> None:
        for group in self.groups[tenant]:
            chunk = group.chunks.get(key_of(path))
            if chunk is not None and corrupts and chunk.shards[0].sealed:
                self.index.mark_corrupt(chunk, 0)
            elif chunk is not None and not corrupts:
                self.index.hide(chunk)

    @rule(by=st.sampled_from(["", "a", None]))
    def demote(self, by: str | None) -> None:
        victim = self.index.accounts.victim(None if by is None else self.index.accounts.of(by), 0)
        if victim is not None:
            assert is_unwanted(victim)
            self.index.remove(victim, Reason.EVICTED)

    @rule(cap=st.integers(1, 8))
    def lower_a_cap(self, cap: int) -> None:
        self.index.set_quota("b", Quota(cap_bytes=cap * PAGE))
        while trim(self.index, 2):
            pass

    @invariant()
    def all_agrees(self) -> None:
        if hasattr(self, "index"):
            self.index.validate()
            assert all(self.index.wants.depth(want) == self.index.depth_of(want) for want, *_ in self.queue)
            take_events(self.index)

    def teardown(self) -> None:
        if not hasattr(self, "index"):
            return
        while self.queue:
            self.index.wants.unwant(self.queue.pop()[0])
        self.end_stores(True)
        for chunks in self.pins:
            self.index.release(chunks)
        clear(self.index)
        self.index.validate()
        assert not len(self.index.wants) and not self.index.chunks


TestWants = WantsMachine.TestCase
TestWants.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


# -- plain cases


def house(pages: int, **chains: int) -> tuple[WatchedIndex, Namespace]:
    """An index of one model, with prompts by name of so many chunks, each of a page, stored one after the other."""
    index = index_of(pages)
    (namespace,) = index.namespaces.find_groups("m", 1, 0, wire_groups((0,)))
    namespace.live = 1
    for name, count in chains.items():
        assert store(index, namespace, name, count) is None
    return index, namespace


def store(index: WatchedIndex, namespace: Namespace, name: str, count: int, depth: float = inf) -> Refusal | None:
    """Store a prompt, for a request with this depth; what is refused of it."""
    made = index.reserve(namespace, 0, Run(b"".join(keys(name, count)), PAGE, b"root", 1, depth=depth), 0)
    index.finish([(chunk, 0) for chunk in made.chunks], dict.fromkeys(range(len(made.chunks)), 1), 0)
    index.validate()
    return made.refusal


def top(namespace: Namespace, name: str, count: int) -> list[Chunk]:
    return matching.match(namespace, b"".join(keys(name, count))).chunks


def left(namespace: Namespace, name: str) -> int:
    return sum(key in namespace.chunks for key in keys(name, 64))


def test_the_last_wanted_chain_goes_first_and_its_tail_before_its_head() -> None:
    index, namespace = house(6, a=2, b=2, c=2)
    for name in "cab":  # the order of the queue is not that of the stores
        said(index, "engine", top(namespace, name, 2), size=2)
    assert store(index, namespace, "d", 1, depth=0) is None
    assert [left(namespace, name) for name in "abc"] == [2, 1, 2] and keys("b", 1)[0] in namespace.chunks
    assert store(index, namespace, "e", 3, depth=0) is None  # nobody wants d
    assert [left(namespace, name) for name in "abcde"] == [1, 0, 2, 0, 3]
    assert store(index, namespace, "f", 5, depth=0) is Refusal.WANTED  # c is wanted as soon
    assert [left(namespace, name) for name in "acef"] == [0, 2, 0, 4]


def test_a_place_orders_the_queue_of_its_own_engine_only() -> None:
    index, namespace = house(4, a=1, b=1, c=1, d=1)
    said(index, "modest", top(namespace, "a", 1), size=1)
    said(index, "modest", top(namespace, "b", 1), size=1)
    said(index, "bold", top(namespace, "c", 1), place=-5, size=3)
    last = said(index, "bold", top(namespace, "d", 1), place=-9, size=3)
    assert index.wants.depth(last) == 0
    for name, gone in ("e", "c"), ("f", "b"):
        assert store(index, namespace, name, 1, depth=0) is None
        assert not left(namespace, gone)
        said(index, name, top(namespace, name, 1))


def test_an_engine_that_floods_the_depot_keeps_as_many_bytes_of_its_queue_as_others() -> None:
    index, namespace = house(40, **{f"flood{i}": 2 for i in range(16)}, **{f"few{i}": 2 for i in range(4)})
    for i in range(16):
        said(index, "flooding", top(namespace, f"flood{i}", 2), size=2)
    for i in range(4):
        said(index, "modest", top(namespace, f"few{i}", 2), size=2)
    for i in range(12):
        assert store(index, namespace, f"new{i}", 2, depth=0) is None
        said(index, f"of{i}", top(namespace, f"new{i}", 2))
    kept = [i for i in range(16) if left(namespace, f"flood{i}") == 2]
    assert kept == [0, 1, 2, 3] and all(left(namespace, f"few{i}") == 2 for i in range(4))


def test_a_shared_chunk_is_wanted_by_the_first_of_its_requests() -> None:
    index, namespace = house(6, a=3, b=3)
    first = said(index, "engine", top(namespace, "a", 2), size=2)
    said(index, "engine", top(namespace, "b", 3), size=3)
    said(index, "engine", top(namespace, "a", 3), size=3)
    assert store(index, namespace, "c", 3, depth=1) is None
    assert (left(namespace, "a"), left(namespace, "b")) == (2, 1)
    index.wants.unwant(first)
    assert store(index, namespace, "d", 5, depth=1) is None
    assert (left(namespace, "a"), left(namespace, "b")) == (0, 1)


def test_a_window_of_a_request_that_waits_is_wanted_and_the_parts_before_it_are_not() -> None:
    index = index_of(8)
    rack, chain = Rack((0, 2), index=index), keys("c", 4)
    rack.store_all(chain)
    said(index, "engine", rack.match(chain).chunks)
    made = index.reserve(rack.namespaces[0], 0, Run(b"".join(keys("d", 3)), PAGE, b"root", 1), 0)
    assert (len(made.chunks), made.refusal) == (2, Refusal.WANTED)
    assert rack.there(chain) == [[0, 1, 2, 3], [2, 3]] and rack.boundary(chain) == 4


def test_a_store_has_the_depth_of_the_first_request_that_lacks_one_of_its_chunks() -> None:
    index, namespace = house(4, a=2, b=2)
    said(index, "engine", top(namespace, "a", 2), size=2)
    waits = index.wants.join("engine", 0, 1)
    index.wants.want(waits, [], (namespace, keys("c", 2)[1]))
    said(index, "engine", top(namespace, "b", 2), size=2)
    assert index.wants.waiting_for(namespace, *keys("c", 2)) is waits
    assert index.wants.waiting_for(namespace, *keys("c", 1)) is None
    assert store(index, namespace, "c", 2) is None
    assert (left(namespace, "a"), left(namespace, "b")) == (2, 0)
    index.wants.want(waits, top(namespace, "c", 2), None)
    assert index.wants.waiting_for(namespace, *keys("c", 2)) is None


def test_no_want_moves_to_a_chunk_that_has_gone_before_those_behind_it() -> None:
    index, namespace = house(4, a=2)
    first, second = (namespace.chunks[key] for key in keys("a", 2))
    said(index, "engine", [second])
    index.mark_corrupt(first, 0)
    made = index.reserve(namespace, 0, Run(keys("a", 1)[0], PAGE, b"root", 1), 0)
    assert made.chunks == [first]
    index.discard(first, 0)  # it is stored again, and the copy fails
    index.hide(second)
    assert first.gone and second.gone
    index.validate()


def test_the_last_wanted_chunk_without_a_known_parent_goes_first() -> None:
    index, namespace = house(3)
    chain = keys("a", 3)
    made = index.reserve(namespace, 0, Run(b"".join(chain), PAGE), 0)
    index.finish([(chunk, 0) for chunk in made.chunks], {0: 1, 1: 1, 2: 1}, 0)
    said(index, "engine", [], size=1)
    said(index, "engine", top(namespace, "a", 3), size=3)
    assert store(index, namespace, "b", 1, depth=0) is None
    assert list(namespace.chunks)[:2] == chain[:2]


def test_the_first_in_a_queue_is_waited_for_and_any_group_of_its_model_counts() -> None:
    index = index_of(8)
    rack, (key,) = Rack((0, 2), index=index), keys("c", 1)
    later, first = (index.wants.join("engine", place, 1) for place in (1, 0))
    for want in later, first:
        index.wants.want(want, [], (rack.namespaces[1], key))
    assert all(index.wants.waiting_for(group, key) is first for group in rack.namespaces)


def lines(function: Callable[[], object]) -> int:
    """Lines of the index that a call executes."""
    count, folder = 0, str(Path(wants.__file__).parent)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace if frame.f_code.co_filename.startswith(folder) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def test_four_thousand_wants_cost_few_steps_and_nothing_where_nobody_waits() -> None:
    steps: dict[str, list[int]] = {}
    for count in 64, 4096:
        index = Index(Allocator(0, 64 * PAGE), POLICIES["lru"])
        (namespace,) = index.namespaces.find_groups("m", 1, 0, wire_groups((0,)))
        names = iter(range(1 << 20))

        def reserve(depth: float) -> Reservation:
            run = Run(keys(f"new{next(names)}", 1)[0], PAGE, b"root", 1, depth=depth)  # noqa: B023
            made = index.reserve(namespace, 0, run, 0)  # noqa: B023
            index.finish([(chunk, 0) for chunk in made.chunks], dict.fromkeys(range(len(made.chunks)), 1), 0)  # noqa: B023
            return made

        for _ in range(64):
            reserve(inf)
        tops = list(namespace.chunks.values())
        for i in range(count):
            want = said(index, f"engine {i % 4}", [tops[0 if i % 2 else 32 + i % 32]], size=2)
            index.wants.want(want, list(want.tops.values()), (namespace, keys("lacking", 1)[0]))
        index.hold(tops[48:])  # wanted late, and not to be had
        calls: dict[str, Callable[[], object]] = {
            "unwanted": lambda: reserve(inf),
            "first after a change": lambda: reserve(0),
            "next": lambda: reserve(0),
            "join": lambda: index.wants.join("engine 1", -1, 2),  # noqa: B023
            "lacked": lambda: index.wants.waiting_for(namespace, *keys("lacking", 1)),  # noqa: B023
        }
        for what, call in calls.items():
            steps.setdefault(what, []).append(lines(call))
    assert steps["unwanted"][0] == steps["unwanted"][1] and steps["next"][0] == steps["next"][1], steps
    assert steps["join"][0] == steps["join"][1], steps
    assert max(steps["first after a change"][1], steps["lacked"][1]) < 12 * 4096, steps
