"""Removals that take many steps: what is hidden meanwhile, what comes meanwhile and stays, and what is gone after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvdepot.core.index import matching
from kvdepot.core.index.chunk import Chunk, Namespace, is_forgotten, is_hidden
from kvdepot.core.index.events import Reason
from kvdepot.core.index.index import Index
from kvdepot.core.index.states import ChunkState
from kvdepot.errors import Busy
from kvdepot.eviction import POLICIES
from kvdepot.memory.allocator import PAGE, Allocator
from kvdepot.protocol import wire
from tests.core.desk import Desk, lookup, prompt, shards, store
from tests.core.heard import Heard, take_events
from tests.core.host import look, new_host
from tests.core.shelf import Path, Steps, key_of, reserve, sealed
from tests.core.shelf import prompt as keys_of
from tests.tiers.faulty import MemoryTier

# -- as the depot does it


@pytest.fixture
def desk() -> Desk:
    desk = Desk()
    desk.depot.removals.step_chunks = 1
    desk.register(desk.hello())
    return desk


def test_a_forget_is_answered_at_its_end_and_lookups_meanwhile(desk: Desk) -> None:
    chain = prompt("a", 5)
    desk.ask(b"one", store(chain))
    asked = desk.send(b"one", wire.ForgetChunks())
    turns = 0
    while asked not in desk.answers:
        assert desk.depot.next_deadline() == 0.0, "the loop must not wait for anybody"
        found = desk.send(b"one", lookup(chain))
        assert desk.answers[found] == 0
        desk.expire()
        turns += 1
    assert turns == 5 and desk.answers[asked] == wire.ForgetAnswer({"memory": 5})
    assert desk.depot.next_deadline() > 0.0
    assert desk.depot.counters["forgotten_chunks"] == 5


def test_a_preview_counts_some_chunks_at_a_time_and_removes_none(desk: Desk) -> None:
    chain, salted = prompt("a", 3), prompt("b", 2)
    desk.ask(b"one", store(chain))
    desk.ask(b"one", wire.Store(1, [msgspec.structs.replace(shards(salted), salt=SALTS[1])]))
    asked = desk.send(b"one", wire.Count(salt=SALTS[1]))
    turns = 0
    while asked not in desk.answers:
        assert desk.depot.next_deadline() == 0.0
        desk.expire()
        turns += 1
    assert turns == 5
    size = (desk.index.allocator.capacity - desk.index.allocator.free_bytes) // 5
    assert desk.answers[asked] == wire.ChunkTotal(2, 2 * size)
    assert desk.ask(b"one", wire.Count()) == wire.ChunkTotal(5, 5 * size)
    assert desk.ask(b"one", wire.Count("another model")) == wire.ChunkTotal(0, 0)
    assert desk.ask(b"one", lookup(chain)) == 3
    assert desk.depot.counters["forgotten_chunks"] == 0 and desk.index.chunks == 5


def test_a_removal_goes_on_unanswered_after_its_client_has_died(desk: Desk) -> None:
    desk.hello(b"two")
    desk.ask(b"one", store(prompt("a", 5)))
    asked = [desk.send(b"two", request) for request in (wire.ForgetChunks(), wire.Clear())]
    desk.die(b"two")
    desk.settle()  # which notices an answer to the dead
    assert not desk.answers.keys() & set(asked) and desk.index.chunks == 0


def test_a_server_that_ends_removes_all_that_it_was_asked_to(desk: Desk) -> None:
    desk.ask(b"one", store(prompt("a", 5)))
    asked = [desk.send(b"one", request) for request in (wire.Clear(), wire.ForgetChunks())]
    desk.act(desk.depot.stop_waiting())
    assert desk.index.chunks == 0 and [desk.answers[each] for each in asked] == [None, wire.ForgetAnswer({"memory": 4})]


def test_a_seventeenth_removal_in_progress_is_refused(desk: Desk) -> None:
    desk.ask(b"one", store(prompt("a", 30)))
    desk.ask(b"one", store(prompt("b", 20), model="n"))
    asked = [desk.send(b"one", wire.Clear("m") if i % 2 else wire.ForgetChunks("m")) for i in range(16)]
    for request in (wire.Clear("n"), wire.ForgetChunks("n")):
        assert isinstance(desk.answers[desk.send(b"one", request)], Busy)
    desk.settle()
    assert all(not isinstance(desk.answers[each], Busy) for each in asked)
    assert desk.ask(b"one", lookup(prompt("b", 20), model="n")) == 20


def test_forgotten_chunks_leave_memory_without_being_saved_first() -> None:
    tier = MemoryTier()
    host = new_host(("disk:///d?write=on_evict", tier), pages=16)
    host.depot.removals.step_chunks = 1
    host.ask(b"one", store(prompt("a", 14)))
    asked = host.send(b"one", wire.ForgetChunks())
    while host.tier_tasks:
        host.work()
    host.send(b"one", store(prompt("b", 6)))
    for task in list(host.copies):
        host.finish(task)
    assert host.depot.removals and not any(kind == "Save" for kind in host.kinds()) and not tier.objects
    host.rest()
    assert host.answers[asked] == wire.ForgetAnswer({"memory": 14, "disk:///d": 0})
    assert host.find(b"one", look(prompt("b", 6))) == 6


def test_an_answer_that_must_come_before_memory_was_gone_through_says_so() -> None:
    host = new_host(MemoryTier())
    host.depot.removals.step_chunks = 1
    host.find(b"one", store(prompt("a", 6)))
    asked = host.send(b"one", wire.ForgetChunks())
    while host.tier_tasks:
        host.work()
    host.pass_time(26.0)
    assert "the removal from memory has not ended within 25 s" in host.answers[asked].left["error"]
    host.rest()
    assert host.index.chunks == 0 and not host.depot.tiering.forgettings


SALTS = [b"", b"s" * 16]


@dataclass(eq=False)
class Kept:
    """A chunk that somebody has stored, or stores."""

    place: int
    path: Path
    salt: bytes
    handle: Chunk
    forgotten: bool = False
    """Since it was stored."""
    ranks: int = 0  # that are sealed


class RemovalMachine(RuleBasedStateMachine):
    """Stores, lookups, pins and removals in any order, with room for all: who finds what is known exactly."""

    @initialize(step=st.sampled_from([1, 2, 5]), policy=st.sampled_from(sorted(POLICIES)))
    def begin(self, step: int, policy: str) -> None:
        self.index = Index(Allocator(0, 4000 * PAGE), POLICIES[policy])
        self.removals = Steps(self.index, step)
        self.heard = Heard()
        self.namespaces: list[Namespace] = []
        for place, world in enumerate((1, 2)):
            group = wire.Group(0, 4, 0, bytes([place]) * 32)
            for rank in range(world):
                (namespace,) = self.index.namespaces.find_groups(f"model {place}", world, rank, [group])
            namespace.live = 1
            self.namespaces.append(namespace)
        self.kept: dict[tuple[int, bytes], Kept] = {}
        self.open: list[tuple[Kept, int]] = []  # reservations that are under way
        self.pinned: list[list[Chunk]] = []

    # -- storing

    def reserve(self, place: int, path: Path, rank: int, salt: bytes) -> Kept | None:
        namespace, key = self.namespaces[place], key_of(path)
        if not matching.is_missing(namespace, rank, key):
            return None
        handle = reserve(self.index, namespace, rank, key, key_of(path[:-1]), len(path), PAGE, salt)
        assert handle is not None
        kept = self.kept.get((place, key))
        if (
            kept is None
            or kept.handle is not handle
            or (kept.forgotten and handle.state is not ChunkState.PENDING_REMOVAL)
        ):
            kept = self.kept[place, key] = Kept(place, path, handle.salt, handle)
        return kept

    def seal(self, kept: Kept, rank: int) -> None:
        """As the depot does when the bytes have arrived."""
        if is_hidden(kept.handle):
            self.index.discard(kept.handle, rank)
        else:
            assert not kept.forgotten, "what is forgotten on its way must not be sealed"
            self.index.seal(kept.handle, rank)
            kept.ranks += 1

    @rule(place=st.integers(0, 1), path=st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple),
          salt=st.sampled_from(SALTS))  # fmt: skip
    def store(self, place: int, path: Path, salt: bytes) -> None:
        for end in range(1, len(path) + 1):
            for rank in range(place + 1):
                kept = self.reserve(place, path[:end], rank, salt)
                if kept is not None:
                    self.seal(kept, rank)

    @rule(place=st.integers(0, 1), path=st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple),
          rank=st.integers(0, 1), salt=st.sampled_from(SALTS))  # fmt: skip
    def begin_to_store(self, place: int, path: Path, rank: int, salt: bytes) -> None:
        kept = self.reserve(place, path, rank * place, salt)
        if kept is not None:
            self.open.append((kept, rank * place))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end_to_store(self, data: st.DataObject) -> None:
        self.seal(*self.open.pop(data.draw(st.integers(0, len(self.open) - 1))))

    # -- finding

    def prefix(self, place: int, path: Path) -> int:
        """Chunks of a prompt that are there whole and have not been forgotten since they were stored."""
        for end in range(1, len(path) + 1):
            kept = self.kept.get((place, key_of(path[:end])))
            if kept is None or kept.forgotten or kept.ranks < place + 1:
                return end - 1
        return len(path)

    @rule(place=st.integers(0, 1), path=st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple),
          pin=st.booleans())  # fmt: skip
    def lookup(self, place: int, path: Path, pin: bool) -> None:
        found = matching.match(self.namespaces[place], b"".join(keys_of(path)))
        assert found.matched == self.prefix(place, path)
        if pin:
            self.index.hold(found.chunks)
            self.index.use(found.chunks)
            self.pinned.append(found.chunks)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.index.release(self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1))))

    @rule(place=st.integers(0, 1), path=st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple))
    def what_is_forgotten_is_given_to_nobody(self, place: int, path: Path) -> None:
        kept = self.kept.get((place, key_of(path)))
        for rank in range(place + 1):
            found = sealed(self.index, self.namespaces[place], rank, key_of(path))
            assert found is None or (kept is not None and not kept.forgotten)

    @rule()
    def evict(self) -> None:
        victim = self.index.accounts.victim(None, 0)
        if victim is not None:
            evicted, is_counted = self.index.evicted, not is_forgotten(victim)
            self.index.remove(victim, Reason.EVICTED)
            assert victim.gone and self.index.evicted - evicted == is_counted, "what is forgotten is not evicted"
            self.forget_what_is_gone()

    # -- removing

    @rule(places=st.sampled_from([(0,), (1,), (0, 1)]), salt=st.sampled_from([None, *SALTS[1:]]))
    def forget(self, places: tuple[int, ...], salt: bytes | None) -> None:
        if len(self.removals) < 16:
            self.removals.forget([self.namespaces[place] for place in places], salt)
            for kept in self.kept.values():
                if kept.place in places and salt in (None, kept.salt):
                    kept.forgotten = True

    @rule(places=st.sampled_from([(0,), (0, 1)]))
    def clear(self, places: tuple[int, ...]) -> None:
        if len(self.removals) < 16:
            self.removals.clear([self.namespaces[place] for place in places])

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.removals.step()
            self.forget_what_is_gone()

    def forget_what_is_gone(self) -> None:
        """What has gone was forgotten, or may have been cleared or evicted: nothing needed it."""
        needed: set[int] = set()
        for chunk in [chunk for held in self.pinned for chunk in held] + [kept.handle for kept, _ in self.open]:
            step: Any = chunk
            while step is not None:
                needed.add(id(step))
                step = step.parent
        for name, kept in list(self.kept.items()):
            if kept.handle.gone:
                assert not kept.ranks or id(kept.handle) not in needed
                del self.kept[name]

    # -- always

    @invariant()
    def nothing_is_out_of_order(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.validate()
        self.forget_what_is_gone()
        for (place, key), kept in self.kept.items():
            if not kept.forgotten and kept.ranks == place + 1:
                assert self.namespaces[place].chunks[key].state in (ChunkState.WHOLE, ChunkState.CHAINED)
        self.heard.read(take_events(self.index), 0)
        self.heard.check(self.namespaces)
        if not self.removals:
            assert not any(each.hiding for each in self.namespaces)
            forgotten = {id(kept.handle) for kept in self.kept.values() if kept.forgotten}
            for namespace in self.namespaces:
                for chunk in namespace.chunks.values():
                    sealed = any(shard.sealed for shard in chunk.shards.values())
                    assert not (sealed and id(chunk) in forgotten), "it was forgotten, and is still there"

    def teardown(self) -> None:
        if not hasattr(self, "index"):
            return
        for kept, rank in self.open:
            self.seal(kept, rank)
        for held in self.pinned:
            self.index.release(held)
        self.removals.finish()
        for namespace in self.namespaces:
            namespace.live = 0
        self.removals.clear(self.namespaces)
        self.removals.finish()
        assert (self.index.chunks, self.index.reserved, self.index.held) == (0, 0, 0)
        self.heard.read(take_events(self.index), 0)
        assert self.index.allocator.free_bytes == self.index.allocator.capacity and not self.index.namespaces.all()
        assert not self.heard.found


TestRemovalMachine = RemovalMachine.TestCase
TestRemovalMachine.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
