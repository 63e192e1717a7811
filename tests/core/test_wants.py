"""Wants: who may be evicted for whom, compared with a walk over all chunks and wants (wanted.py), and what it costs."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvdepot.core.index import matching
from kvdepot.core.index.chunk import Chunk, Namespace, Shard, is_unwanted
from kvdepot.core.index.events import Reason
from kvdepot.core.index.excess import trim
from kvdepot.core.index.runs import Reservation, Run
from kvdepot.core.index.wants import Want
from kvdepot.eviction import POLICIES
from kvdepot.memory.allocator import PAGE, Allocator
from kvdepot.protocol.quotas import Quota
from tests.conftest import clear
from tests.core.groups import Reaches, wire_groups
from tests.core.shelf import key_of, prompt
from tests.core.wanted import WatchedIndex

TENANTS = ["", "a", "b"]
OWNERS = ["an engine", "another", "a third"]
PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)


def index_of(pages: int, policy: str = "lru") -> WatchedIndex:
    return WatchedIndex(Allocator(0, pages * PAGE), POLICIES[policy], chunk_tokens=16)


class WantsMachine(RuleBasedStateMachine):
    """Queues of several engines, stores and loads of several accounts, and chunks that go while they are wanted."""

    @initialize(
        reaches=st.sampled_from([(0,), (0,), (0, 2), (1, 0)]),
        pages=st.integers(4, 24),
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

    @rule(tenant=st.sampled_from(TENANTS), path=PATHS, first=st.integers(0, 4), fails=st.booleans())
    def store(self, tenant: str, path: tuple[int, ...], first: int, fails: bool) -> None:
        for end in range(min(first, len(path) - 1) + 1, len(path) + 1):
            for group in range(len(self.groups[tenant])):
                made = self.reserve(tenant, group, path[:end], {})
                if made.refusal is not None:
                    return
                self.open += [(chunk, chunk.shards[0]) for chunk in made.chunks]
                if not fails:
                    self.end_stores(False)

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

    @rule(owner=st.sampled_from(OWNERS), tenant=st.sampled_from(TENANTS), path=PATHS, place=st.integers(-1, 1))
    def enter(self, owner: str, tenant: str, path: tuple[int, ...], place: int) -> None:
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
            self.index.take_events()

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
