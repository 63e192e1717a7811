"""The index, compared with a plain model: a dict of the parts of all chunks, all of it walked."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvdepot.core.index import matching
from kvdepot.core.index.chunk import Chunk, Namespace, Pin, is_hidden
from kvdepot.core.index.events import Reason
from kvdepot.core.index.events import Stored as StoredEvent
from kvdepot.core.index.excess import expire
from kvdepot.core.index.index import Index
from kvdepot.core.index.matching import deepest_boundary
from kvdepot.core.index.recovery import restore
from kvdepot.core.index.runs import Refusal, Reservation, Run
from kvdepot.eviction import POLICIES, Lru
from kvdepot.memory.allocator import PAGE, Allocator
from kvdepot.memory.records import SLOT_BYTES, Records
from kvdepot.protocol import wire
from kvdepot.protocol.keys import ROOT
from kvdepot.protocol.wire import Group
from tests.conftest import clear
from tests.core.groups import BLOCKS, CHUNK_TOKENS, SHAPES, Rack, Reaches, deepest, fingerprint, needed, wire_groups
from tests.core.heard import Heard, take_events
from tests.core.shelf import Path, Shelf, Steps, key_of, keys, prompt, reserve_one

# -- the model


@dataclass(eq=False)
class Part:
    """A group's part of a chunk that should exist."""

    group: int
    key: bytes
    chunk: Chunk
    before: Part | None  # it is not evicted before this one
    known: bool  # its whole chain is; of a bounded group always
    is_first: bool  # a prompt begins with it
    ranks: dict[int, str] = field(default_factory=dict)  # rank -> open, sealed or corrupt
    pins: int = 0
    hidden: bool = False


class Model:
    """Every query walks all of the dict."""

    def __init__(self, reaches: Reaches, world_size: int) -> None:
        self.reaches = reaches
        self.world_size = world_size
        self.parts: dict[tuple[int, bytes], Part] = {}

    def is_usable(self, group: int, key: bytes) -> bool:
        part = self.parts.get((group, key))
        return part is not None and not part.hidden and list(part.ranks.values()).count("sealed") == self.world_size

    def needed(self, chain: list[bytes], boundary: int) -> list[tuple[int, bytes]]:
        return needed(self.reaches, chain, boundary)

    def boundary(self, chain: list[bytes]) -> int:
        return deepest(self.reaches, chain, self.is_usable)

    def protected(self, *also: Part | None) -> set[Part]:
        """Parts that must not be evicted: pinned or being written, and all that must not go before those."""
        kept: set[Part] = set()
        for part in [*self.parts.values(), *filter(None, also)]:
            if part.pins or "open" in part.ranks.values() or part in also:
                step: Part | None = part
                while step is not None and step not in kept:
                    kept.add(step)
                    step = step.before
        return kept

    def before(self, group: int, chain: list[bytes], number: int, loose: bool = False) -> Part | None:
        """What a part is evicted before: the one before it, if that is in a chain; of a bounded group, the part of the
        first unbounded group. As of when it was new."""
        part = self.parts.get((group, chain[number]))
        if part is not None:
            return part.before
        if not self.reaches[group]:
            before = self.parts.get((group, chain[number - 1])) if number and not loose else None
            return before if before is not None and before.known else None
        trunk = self.reaches.index(0) if 0 in self.reaches else None
        return None if trunk is None else self.parts.get((trunk, chain[number]))


def tail_key(path: Path, name: int) -> bytes:
    """The key of one of two tails behind the chunks of a path."""
    return key_of((*path, 10 + name))


PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
GROUPS = st.integers(0, 2)
RANKS = st.integers(0, 1)


class IndexMachine(RuleBasedStateMachine):
    @initialize(
        reaches=st.sampled_from([(0,), (0,), *SHAPES]),
        world_size=st.integers(1, 2),
        pages=st.integers(6, 40),
        size=st.sampled_from([PAGE, 3 * PAGE - 100]),
        policy=st.sampled_from(sorted(POLICIES)),
    )
    def begin(self, reaches: Reaches, world_size: int, pages: int, size: int, policy: str) -> None:
        self.size = size
        self.heard = Heard()
        self.rack = Rack(reaches, pages, world_size, policy)
        self.index = self.rack.index
        self.model = Model(reaches, world_size)
        self.removals = Steps(self.index, 2)
        self.pinned: list[tuple[list[Part], list[Chunk]]] = []
        self.tailed: list[Path] = []

    def drop_gone(self, protected: set[Part]) -> list[Part]:
        """Parts that the index has removed: none of them was protected, nor has one that it must outlive stayed."""
        model, namespaces = self.model, self.rack.namespaces
        gone = {each for each in model.parts.values() if namespaces[each.group].chunks.get(each.key) is not each.chunk}
        assert not gone & protected, "pinned, being written, or needed by what is behind it"
        for part in gone:
            del model.parts[part.group, part.key]
        for part in model.parts.values():
            assert part.before is None or part.before not in gone, "a part outlived the one that it is evicted before"
        return list(gone)

    def drop_hidden(self) -> None:
        """Nothing has gone but what no lookup could find."""
        assert all(part.hidden for part in self.drop_gone(self.model.protected()))

    def hide(self, part: Part) -> None:
        part.hidden = True
        part.ranks = {rank: "corrupt" if state == "sealed" else state for rank, state in part.ranks.items()}

    # -- stores

    @rule(path=PATHS, group=GROUPS, first=st.integers(0, 5), rank=RANKS, seals=st.booleans(), loose=st.booleans())
    def store(self, path: Path, group: int, first: int, rank: int, seals: bool, loose: bool) -> None:
        chain = prompt(path)
        group, rank = group % len(self.model.reaches), rank % self.model.world_size
        for number in range(min(first, len(chain) - 1), len(chain)):
            if not self.reserve(group, chain, number, rank, loose):
                break
            part = self.model.parts[group, chain[number]]
            if seals and part.ranks.get(rank) == "open":
                self.end(part, rank, fails=False)

    @rule(path=PATHS)
    def store_what_resuming_needs(self, path: Path) -> None:
        chain = prompt(path)
        for group, key in self.model.needed(chain, len(chain)):
            for rank in range(self.model.world_size):
                if not self.reserve(group, chain, chain.index(key), rank):
                    return
                part = self.model.parts[group, key]
                if part.ranks.get(rank) == "open":
                    self.end(part, rank, fails=False)

    @rule(path=PATHS, name=st.integers(0, 1), continues=st.booleans(), seals=st.booleans())
    def store_up_to_a_tail(self, path: Path, name: int, continues: bool, seals: bool) -> None:
        self.tailed.append(path)
        chain, before = [*prompt(path), tail_key(path, name)], tail_key(path, 1 - name) if continues else b""
        for group, key in self.model.needed(chain, len(chain)):
            for rank in range(self.model.world_size):
                is_tail = key == chain[-1]
                if not self.reserve(group, chain, chain.index(key), rank, continues=before if is_tail else b""):
                    return
                part = self.model.parts[group, key]
                if part.ranks.get(rank) == "open" and (seals or not is_tail):
                    self.end(part, rank, fails=False)

    def reserve(self, group: int, chain: list[bytes], number: int, rank: int, loose: bool = False, **more: Any) -> bool:
        """Reserve one shard if it is missing; returns whether there was room. more: of `reserve_one`."""
        model, key = self.model, chain[number]
        spared = [model.parts.get((group, key)), model.before(group, chain, number, loose)]
        protected = model.protected(*(part for part in spared if part is not None and not part.hidden))
        need = Allocator.rounded(self.size)
        free = self.index.allocator.free_bytes
        place = (b"", 0) if loose else (chain[number - 1] if number else b"root", number + 1)
        made = reserve_one(self.index, self.rack.namespaces[group], rank, key, *place, size=self.size, **more)
        gone = self.drop_gone(protected)
        sizes = [need * len(part.ranks) for part in gone]
        assert free < need or all(part.hidden for part in gone), "evicted without need"
        is_needed = any(part.hidden for part in gone) or not gone or free + sum(sizes) - max(sizes) < need
        assert is_needed, "more was evicted than was needed"
        part, before = model.parts.get((group, key)), model.before(group, chain, number, loose)
        if made.refusal is not None:
            kept = model.protected(part, before)
            assert all(each in kept for each in model.parts.values()), "something could have been evicted"
            return False
        if made.known:
            assert part is not None and (part.ranks[rank] != "corrupt" or part.pins or "open" in part.ranks.values())
            return True
        (chunk,) = made.chunks
        if part is None:
            is_known = bool(model.reaches[group] or not (number or loose) or before is not None)
            part = Part(group, key, chunk, before, is_known, not number and not loose)
            model.parts[group, key] = part
            assert part.chunk.parent is (None if part.before is None else part.before.chunk)
        assert chunk is part.chunk and part.ranks.get(rank) not in ("open", "sealed")
        if part.hidden and rank in part.ranks:
            part.hidden = False  # all of it is being stored anew
        part.ranks[rank] = "open"
        return True

    def end(self, part: Part, rank: int, fails: bool) -> None:
        """End a copy, as the depot does."""
        model = self.model
        assert is_hidden(part.chunk) == part.hidden
        if fails or part.hidden:
            del part.ranks[rank]
            if not part.ranks:  # it goes, and what is behind it is evicted by itself from now on
                del model.parts[part.group, part.key]
                for each in model.parts.values():
                    each.before = None if each.before is part else each.before
            self.index.discard(part.chunk, rank)
            assert part.chunk.gone or part.ranks
        else:
            part.ranks[rank] = "sealed"
            self.index.seal(part.chunk, rank)
        self.drop_hidden()

    @rule(data=st.data(), fails=st.booleans())
    def a_copy_ends(self, data: st.DataObject, fails: bool) -> None:
        copies = [
            (part, rank) for part in self.model.parts.values() for rank, state in part.ranks.items() if state == "open"
        ]
        if copies:
            self.end(*data.draw(st.sampled_from(copies)), fails)

    # -- lookups

    @rule(path=PATHS)
    def look_up_and_pin(self, path: Path) -> None:
        chain, model = prompt(path), self.model
        for end in range(len(chain)):
            assert self.rack.boundary(chain[:end]) == model.boundary(chain[:end])
        self.pin(chain, self.rack.match(chain))

    @precondition(lambda self: self.tailed)
    @rule(number=st.integers(0, 100))
    def look_up_and_pin_with_tails(self, number: int) -> None:
        path, model, namespaces = self.tailed[-1 - number % len(self.tailed)], self.model, self.index.namespaces
        chain = prompt(path)
        tails = [wire.Tail(end, tail_key(path[:end], name)) for end in range(len(path), 0, -1) for name in range(2)]
        request = wire.Lookup("m", model.world_size, 0, "r", 1, b"".join(chain))
        found, expected = matching.match_prompt(namespaces, "", request, request.hashes, tails), chain
        for tail in tails:
            longer = [*chain[: tail.chunks], tail.key]
            if tail.chunks >= model.boundary(chain) and model.boundary(longer) == len(longer):
                expected = longer
                break
        assert found.tail == (None if expected is chain else tails.index(tail))
        assert found.chunks == (model.boundary(chain) if expected is chain else tail.chunks)
        self.pin(expected, found.pins[0])

    def pin(self, chain: list[bytes], pin: Pin) -> None:
        model = self.model
        assert pin.matched == model.boundary(chain)
        needed = [model.parts[each] for each in model.needed(chain, pin.matched)]
        assert pin.parts == len(needed)
        assert {id(chunk) for chunk in pin.chunks} <= {id(part.chunk) for part in needed}
        self.index.hold(pin.chunks)
        self.index.use(pin.chunks)
        for part in needed:
            part.pins += 1
        self.pinned.append((needed, pin.chunks))

    @precondition(lambda self: self.pinned)
    @rule(number=st.integers(0, 100))
    def unpin(self, number: int) -> None:
        needed, chunks = self.pinned.pop(number % len(self.pinned))
        for part in needed:
            part.pins -= 1
        self.index.release(chunks)
        self.drop_hidden()

    @rule(path=PATHS, group=GROUPS, rank=RANKS)
    def find(self, path: Path, group: int, rank: int) -> None:
        chain, group, rank = prompt(path), group % len(self.model.reaches), rank % self.model.world_size
        found = matching.find(self.rack.namespaces[group], rank, b"".join(chain))
        parts = [self.model.parts.get((group, key)) for key in chain]
        assert [each is not None for each in found] == [
            part is not None and not part.hidden and part.ranks.get(rank) == "sealed" for part in parts
        ]

    # -- damage and removals

    @rule(data=st.data())
    def mark_corrupt(self, data: st.DataObject) -> None:
        whole = [
            (part, rank)
            for part in self.model.parts.values()
            for rank, state in part.ranks.items()
            if state == "sealed" and not part.hidden
        ]
        if whole:
            part, rank = data.draw(st.sampled_from(whole))
            self.index.mark_corrupt(part.chunk, rank)
            part.ranks[rank] = "corrupt"

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        if self.model.parts and not self.removals:
            part = data.draw(st.sampled_from(list(self.model.parts.values())))
            self.index.hide(part.chunk)
            self.hide(part)
            self.drop_hidden()

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """What the policy does under pressure, for any part that it might choose."""
        model = self.model
        needed = {part.before for part in model.parts.values()} | model.protected()
        free = [part for part in model.parts.values() if part not in needed]
        if free and not self.removals:
            part = data.draw(st.sampled_from(free))
            self.index.remove(part.chunk, Reason.EVICTED)
            gone = self.drop_gone(model.protected())
            assert part in gone and all(each.hidden for each in gone if each is not part)

    @precondition(lambda self: len(self.removals) < 2)
    @rule()
    def forget_all(self) -> None:
        self.removals.forget(self.rack.namespaces)
        for part in self.model.parts.values():
            self.hide(part)

    @precondition(lambda self: self.removals)
    @rule()
    def forget_some(self) -> None:
        self.removals.step()
        self.drop_hidden()

    # -- what always holds

    @invariant()
    def all_agrees(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.validate()
        whole = {place for place in self.model.parts if self.model.is_usable(*place)}
        self.heard.read(take_events(self.index), 0)
        self.heard.check(self.rack.namespaces)
        told = {(chunk.namespace.group, chunk.key) for chunk in self.heard.found.values()}
        assert whole <= told
        assert told == whole or self.removals, "what is gone can be found, long after"
        used = sum(len(part.ranks) for part in self.model.parts.values()) * Allocator.rounded(self.size)
        assert self.index.allocator.capacity - self.index.allocator.free_bytes == used
        shards = [s for part in self.model.parts.values() for s in part.chunk.shards.values()]
        taken = sorted(extent for shard in shards for extent in shard.extents)
        assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(taken)), "shared bytes"

    def teardown(self) -> None:
        if not hasattr(self, "index"):
            return
        while self.removals:
            self.forget_some()
        for part in list(self.model.parts.values()):
            for rank in [rank for rank, state in part.ranks.items() if state == "open"]:
                self.end(part, rank, fails=True)
        for number in range(len(self.pinned)):
            self.unpin(number)
        clear(self.index)
        self.index.validate()
        assert (self.index.chunks, self.index.reserved, self.index.held) == (0, 0, 0)
        assert self.index.allocator.free_bytes == self.index.allocator.capacity
        assert not self.index.chains.waiting and not any(each.broken for each in self.rack.namespaces)
        for namespace in self.rack.namespaces:
            assert not namespace.gone
            namespace.live = 0
            self.index.namespaces.forget(namespace)
        assert self.index.namespaces.all() == [] and all(each.gone for each in self.rack.namespaces)


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


# -- forgetting and ages


def test_a_part_that_is_too_old_is_no_boundary_but_those_who_pinned_it_get_it() -> None:
    rack, chain = Rack((0, 2), ttl_s=10), keys("c", 4)
    rack.store(0, chain, born=5)
    rack.store(1, chain, [0, 1], born=5)
    rack.store(1, chain, [2, 3], born=1)
    assert expire(rack.index, 10) == 0
    pinned = rack.pin(chain)
    assert expire(rack.index, 11) == 2
    assert rack.boundary(chain) == 2
    found = matching.find(rack.namespaces[1], 0, b"".join(chain))
    assert [each is not None for each in found] == [True] * 4
    rack.store(1, chain, [3], born=11)  # its bytes stay, and are as new
    rack.index.validate()
    rack.index.release(pinned)
    rack.index.validate()
    assert rack.there(chain) == [[0, 1, 2, 3], [0, 1, 3]]
    rack.store(1, chain, [2], born=11)
    assert rack.boundary(chain) == 4
    assert expire(rack.index, 15) == 6
    assert rack.boundary(chain) == 0
    assert expire(rack.index, 21) == 2
    rack.index.validate()
    assert rack.index.chunks == 0 and rack.index.allocator.free_bytes == rack.index.allocator.capacity


# -- namespaces


def test_the_groups_of_a_model_are_found_again_only_by_what_agrees_with_all_of_them() -> None:
    rack = Rack((0, 2))
    namespaces = rack.index.namespaces

    def find(groups: list[Group], rank: int = 0, chunk_tokens: int = CHUNK_TOKENS) -> bool:
        found = namespaces.find_groups("m", 1, rank, groups, chunk_tokens=chunk_tokens)
        is_same = found == rack.namespaces
        assert is_same or not set(found) & set(rack.namespaces), "some of its groups"
        for each in found if not is_same else ():
            namespaces.forget(each)
        return is_same

    full, window = wire_groups((0, 2))
    assert find([full, window])
    assert find([full, Group(2, BLOCKS, 0, window.fingerprint)]), "its size is not known"
    for other in (
        Group(3, BLOCKS, PAGE, window.fingerprint),
        Group(0, BLOCKS, PAGE, window.fingerprint),
        Group(2, BLOCKS + 1, PAGE, window.fingerprint),
        Group(2, BLOCKS, 2 * PAGE, window.fingerprint),
        Group(2, BLOCKS, PAGE, fingerprint(7, 0)),
    ):
        assert not find([full, other])
        assert namespaces.all() == rack.namespaces
    assert not find([full]) and not find([window, full]) and not find([full, window, wire_groups((0, 0, 1))[2]])
    assert not find([full, window], chunk_tokens=2 * CHUNK_TOKENS)
    assert namespaces.all() == rack.namespaces


# -- boundaries

WINDOW = 12


@given(
    reaches=st.lists(st.integers(1, WINDOW + 2), max_size=4),
    there=st.lists(st.sets(st.integers(0, WINDOW - 1)), min_size=4, max_size=4),
    end=st.integers(0, WINDOW),
)
def test_the_answer_is_the_largest_boundary_whose_windows_are_whole(
    reaches: list[int], there: list[set[int]], end: int
) -> None:
    whole = [
        boundary
        for boundary in range(end + 1)
        if all(set(range(max(0, boundary - reach), boundary)) <= there[group] for group, reach in enumerate(reaches))
    ]
    found = deepest_boundary(list(enumerate(reaches)), end, lambda group, i: i in there[group])
    assert found == max(whole)


def test_no_part_is_asked_for_twice_in_a_row_where_one_group_lacks_everything() -> None:
    asked: list[int] = []

    def has(group: int, i: int) -> bool:
        asked.append(i)
        return False

    assert deepest_boundary([(0, 4)], 1000, has) == 0
    assert asked == list(range(999, -1, -1))


# -- plain cases


@pytest.fixture(params=sorted(POLICIES))
def shelf(request: pytest.FixtureRequest) -> Shelf:
    return Shelf(6, policy=request.param)


def test_a_shard_of_another_size_is_not_written_over_and_is_no_lack_of_room(shelf: Shelf) -> None:
    chain = keys("c", 2)
    shelf.store(chain)
    shelf.index.mark_corrupt(shelf.namespace.chunks[chain[0]], 0)
    made = shelf.index.reserve(shelf.namespace, 0, Run(b"".join(chain), 2 * PAGE, b"root", 1), 0)
    assert (made.refusal, made.refused, made.chunks) == (Refusal.OTHER_SIZE, 2, [])
    assert shelf.reserve(chain, 1) is not None, "one of its size is"


def test_a_long_run_that_names_a_chunk_twice_reserves_it_once() -> None:
    """The time must not be that of comparing each chunk with all before it: with 65,536 that stops the server."""
    shelf = Shelf(pages=1 << 16)
    chain = [number.to_bytes(32, "big") for number in range(1, wire.MAX_CHUNKS)]
    made = shelf.index.reserve(shelf.namespace, 0, Run(b"".join([*chain, chain[0]]), PAGE, b"root", 1), 0)
    assert (len(made.chunks), made.known, made.refusal) == (len(chain), 1, None)


# -- runs that meet chunks which exist


def index_of(pages: int, policy: str = "lru", ranks: int = 1, ttl_s: int = 0) -> tuple[Index, Namespace]:
    records = Records(memoryview(bytearray(64 * SLOT_BYTES)))
    index = Index(Allocator(0, pages * PAGE), POLICIES[policy], records, ttl_s)
    for rank in range(ranks):
        (namespace,) = index.namespaces.find_groups("m", ranks, rank, [Group(0, 1, PAGE, bytes([rank]) * 32)], "", 16)
    namespace.live = 1
    return index, namespace


def store_run(index: Index, namespace: Namespace, run: Run, wall: int = 1, rank: int = 0) -> Reservation:
    """Store the chunks of a run that are missing."""
    made = index.reserve(namespace, rank, run, wall)
    index.finish([(chunk, rank) for chunk in made.chunks], dict.fromkeys(range(len(made.chunks)), 1), wall)
    take_events(index)
    index.validate()
    return made


def run_of(*hashes: bytes, parent: bytes = ROOT, position: int = 1, salt: bytes = b"") -> Run:
    return Run(b"".join(hashes), PAGE, parent, position, salt)


@pytest.mark.parametrize("is_corrupt", [False, True])
def test_a_run_has_room_if_a_victim_takes_along_a_chunk_of_it(is_corrupt: bool) -> None:
    index, namespace = index_of(2, ttl_s=10)
    first, second = keys("a", 2)
    store_run(index, namespace, run_of(first))
    store_run(index, namespace, run_of(second, parent=first, position=2), 9)
    if is_corrupt:
        index.mark_corrupt(namespace.chunks[first], 0)
    expire(index, 12)
    (other,) = keys("b", 1)
    made = store_run(index, namespace, run_of(first, other), 12)
    assert made.refusal is None and namespace.chunks.keys() == {first, other}
    assert (made.known, len(made.chunks)) == ((0, 2) if is_corrupt else (1, 1))


@pytest.mark.parametrize("is_corrupt", [False, True])
def test_a_chunk_that_one_rank_renews_is_new_to_tiers_removals_and_restarts(is_corrupt: bool) -> None:
    index, namespace = index_of(64, ranks=2, ttl_s=10)
    first, second = keys("a", 2)
    for rank in range(2):
        store_run(index, namespace, run_of(first), 1, rank)
        store_run(index, namespace, run_of(second, parent=first, position=2), 9, rank)
    chunk = namespace.chunks[first]
    for shard in chunk.shards.values():
        shard.tiers = 1
    if is_corrupt:
        index.mark_corrupt(chunk, 1)
    assert expire(index, 12) == 1 and first in namespace.chunks  # it waits for the one behind it
    scope = index.namespaces.begin_removal([namespace], None, hides=False)
    take_events(index)
    made = index.reserve(namespace, 1, run_of(first), 12)
    index.finish([(each, 1) for each in made.chunks], {0: 1}, 12)
    assert {event.rank for event in take_events(index) if isinstance(event, StoredEvent)} == {0, 1}
    assert [shard.tiers for shard in chunk.shards.values()] == [0, 0] and not scope.means(chunk)
    after = Index(Allocator(0, 64 * PAGE), Lru, Records(memoryview(bytearray(index.records._memory))), 10)
    assert restore(after).shards == 4
    for each in (index, after):
        (known,) = each.namespaces.all()
        assert known.chunks[first].born == 12 and matching.match(known, first).matched == 1
        assert expire(each, 21) == 1 and first in known.chunks
        assert expire(each, 22) == 1 and not known.chunks
        each.validate()
