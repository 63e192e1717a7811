"""The table of state transitions: by itself, and as the index uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvdepot.core.index import matching
from kvdepot.core.index.chunk import Chunk, Shard
from kvdepot.core.index.events import Reason
from kvdepot.core.index.index import Index
from kvdepot.core.index.states import TRANSITIONS, ChunkState, IllegalTransition, Transition
from tests.core.shelf import Shelf, keys, reserve_one

FIRST = {ChunkState.RESERVED, ChunkState.LOADING, ChunkState.FILLING}
LAST = {ChunkState.FREED, ChunkState.GONE}


@pytest.mark.parametrize("state", ChunkState)
@pytest.mark.parametrize("event", Transition)
def test_an_event_leads_to_the_state_in_the_table_or_is_refused(state: ChunkState, event: Transition) -> None:
    row = dict(TRANSITIONS[state])
    if event in row:
        assert TRANSITIONS[state][event] is row[event]
    else:
        with pytest.raises(IllegalTransition, match=f"{event.name} .* {state.name}"):
            TRANSITIONS[state][event]
    assert dict(TRANSITIONS[state]) == row


def test_every_state_is_reached_from_a_beginning_and_leads_to_an_end() -> None:
    reached, new = set(FIRST), list(FIRST)
    while new:
        fresh = set(TRANSITIONS[new.pop()].values()) - reached
        reached |= fresh
        new += fresh
    assert reached == set(ChunkState) == set(TRANSITIONS)
    for state in ChunkState:
        assert (state in LAST) == (not TRANSITIONS[state])
        assert state in LAST or TRANSITIONS[state][Transition.REMOVE] in LAST


def facts(index: Index) -> Any:
    """Everything that a transition may change."""
    return (
        [
            (c.key, c.state, c.sealed, c.children, c.holds, c.bytes, c.broken, c.gone, c.generation, c.born,
             {rank: (s.state, s.extents, s.slot, s.checksum) for rank, s in c.shards.items()})
            for namespace in index.namespaces.all()
            for c in namespace.chunks.values()
        ],
        (index.chunks, index.reserved, index.held, index.evicted, index.allocator.free_bytes),
        [len(each.hiding) for each in index.namespaces.all()], index.serial, index.records.used,
    )  # fmt: skip


class States(RuleBasedStateMachine):
    """Any operation on any shard, allowed or not; on a chain of three chunks and two ranks."""

    @initialize()
    def begin(self) -> None:
        self.shelf = Shelf(64, world_size=2)
        self.index = self.shelf.index
        self.chain = keys("c", 3)
        self.open: dict[tuple[int, int], Chunk] = {}  # by number and rank
        self.late: list[Shard] = []  # of loads that were given up
        self.held: list[Chunk] = []
        self.scopes: list[Any] = []

    def chunk(self, number: int) -> Chunk | None:
        return self.shelf.namespace.chunks.get(self.chain[number])

    def attempt(self, verb: Callable[[], None], is_allowed: bool) -> bool:
        """Perform an operation; unless it is allowed, it must be refused without changing anything."""
        before = facts(self.index)
        if is_allowed:
            verb()
            return True
        with pytest.raises((IllegalTransition, AssertionError, KeyError)):
            verb()
        assert facts(self.index) == before
        return False

    @rule(number=st.integers(0, 2), rank=st.integers(0, 1), wall=st.sampled_from([None, 0, 9]))
    def reserve(self, number: int, rank: int, wall: int | None) -> None:
        old = self.chunk(number)
        shard = None if old is None else old.shards.get(rank)
        is_loading = shard is not None and shard.state is ChunkState.LOADING
        parent = self.chain[number - 1] if number else b"root"
        made = reserve_one(self.index, self.shelf.namespace, rank, self.chain[number], parent, number + 1, wall=wall)
        assert made.refusal is None
        if made.known:
            assert shard is not None
            return
        (chunk,) = made.chunks
        if shard is not None and is_loading:
            self.late.append(shard)
        assert chunk.shards[rank].state is (ChunkState.LOADING if wall is None else ChunkState.RESERVED)
        self.open[number, rank] = chunk

    @rule(number=st.integers(0, 2))
    def store(self, number: int) -> None:
        for rank in range(2):
            if (number, rank) not in self.open and matching.is_missing(self.shelf.namespace, rank, self.chain[number]):
                self.reserve(number, rank, 0)
            self.seal(number, rank)

    @rule(number=st.integers(0, 2), rank=st.integers(0, 1))
    def seal(self, number: int, rank: int) -> None:
        chunk = self.open.get((number, rank)) or self.chunk(number)
        if chunk is not None:
            may = (number, rank) in self.open and chunk.state is ChunkState.FILLING
            if self.attempt(lambda: self.index.seal(chunk, rank), may):
                del self.open[number, rank]

    @rule(number=st.integers(0, 2), rank=st.integers(0, 1))
    def fail(self, number: int, rank: int) -> None:
        chunk = self.open.get((number, rank)) or self.chunk(number)
        is_open = (number, rank) in self.open
        if chunk is not None and self.attempt(lambda: self.index.discard(chunk, rank), is_open):
            del self.open[number, rank]

    @rule(number=st.integers(0, 2), rank=st.integers(0, 1))
    def mark_corrupt(self, number: int, rank: int) -> None:
        chunk = self.chunk(number)
        if chunk is not None:
            shard = chunk.shards.get(rank)
            may = shard is not None and shard.state is ChunkState.SEALED
            self.attempt(lambda: self.index.mark_corrupt(chunk, rank), may)

    @rule(number=st.integers(0, 2), at_once=st.booleans())
    def hide(self, number: int, at_once: bool) -> None:
        chunk = self.chunk(number)
        if chunk is not None:
            self.index.hide(chunk, at_once)
            assert chunk.gone or chunk.state is ChunkState.PENDING_REMOVAL

    @rule(number=st.integers(0, 2), reason=st.sampled_from([Reason.EVICTED, Reason.DROPPED]))
    def remove(self, number: int, reason: Reason) -> None:
        chunk = self.chunk(number)
        if chunk is not None:
            may = not chunk.holds and not chunk.children
            if self.attempt(lambda: self.index.remove(chunk, reason), may):
                assert chunk.gone and chunk.state is ChunkState.GONE

    @rule()
    def begin_removal(self) -> None:
        if len(self.scopes) < 3:
            self.scopes.append(self.index.namespaces.begin_removal([self.shelf.namespace], None, hides=True))

    @precondition(lambda self: self.scopes)
    @rule()
    def end_removal(self) -> None:
        for chunk in list(self.shelf.namespace.chunks.values()):
            if not chunk.gone:
                self.index.remove_forgotten(chunk)
        self.index.namespaces.end_removal(self.scopes.pop(0))

    @rule(number=st.integers(0, 2))
    def hold(self, number: int) -> None:
        chunk = self.chunk(number)
        if chunk is not None:
            self.index.hold([chunk])
            self.held.append(chunk)

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        self.index.release([self.held.pop()])

    @precondition(lambda self: self.late)
    @rule()
    def give_back(self) -> None:
        self.index.give_back(self.late.pop())

    @rule(end=st.integers(0, 3))
    def queries_change_nothing(self, end: int) -> None:
        before = facts(self.index)
        hashes = b"".join(self.chain[:end])
        pin = matching.match(self.shelf.namespace, hashes)
        assert pin.matched <= end
        for rank in range(2):
            matching.find(self.shelf.namespace, rank, hashes)
            for key in self.chain:
                matching.is_missing(self.shelf.namespace, rank, key)
        assert facts(self.index) == before

    @rule(rank=st.integers(0, 1), number=st.integers(0, 2), is_load=st.booleans())
    def what_is_missing_can_be_reserved(self, rank: int, number: int, is_load: bool) -> None:
        if matching.is_missing(self.shelf.namespace, rank, self.chain[number]):
            before = set(self.open)
            self.reserve(number, rank, None if is_load else 0)
            assert set(self.open) == before | {(number, rank)}

    @invariant()
    def all_agrees(self) -> None:
        if hasattr(self, "index"):
            self.index.validate()

    def teardown(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.release(self.held)
        for (_, rank), chunk in self.open.items():
            self.index.discard(chunk, rank)
        for shard in self.late:
            self.index.give_back(shard)
        for scope in self.scopes:
            self.index.namespaces.end_removal(scope)
        while self.shelf.namespace.chunks:
            self.index.hide(next(reversed(self.shelf.namespace.chunks.values())))
        self.index.validate()
        assert self.index.allocator.free_bytes == self.index.allocator.capacity
        assert not self.index.chains.waiting and not self.shelf.namespace.broken


TestStates = States.TestCase
TestStates.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
