"""The index of a model with several KV cache groups, compared with a plain model: a dict of parts, all of it walked."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvdepot.core.index import matching
from kvdepot.core.index.chunk import Chunk, is_hidden
from kvdepot.core.index.events import Reason
from kvdepot.core.index.excess import expire
from kvdepot.eviction import POLICIES
from kvdepot.memory.allocator import PAGE
from kvdepot.protocol.wire import Group
from tests.conftest import clear
from tests.core.groups import BLOCKS, CHUNK_TOKENS, SHAPES, Rack, Reaches, deepest, fingerprint, needed, wire_groups
from tests.core.heard import Heard
from tests.core.shelf import Path, Shelf, Steps, keys, prompt, reserve, reserve_one

# -- the model


@dataclass(eq=False)
class Part:
    """A group's part of a chunk that should exist."""

    group: int
    key: bytes
    chunk: Chunk
    before: Part | None  # it is not evicted before this one
    known: bool  # its whole chain is; of a bounded group always
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

    def before(self, group: int, chain: list[bytes], number: int) -> Part | None:
        """What a part is evicted before: the one before it, if that is in a chain; of a bounded group, the part of the
        first unbounded group. As of when it was new."""
        part = self.parts.get((group, chain[number]))
        if part is not None:
            return part.before
        if not self.reaches[group]:
            before = self.parts.get((group, chain[number - 1])) if number else None
            return before if before is not None and before.known else None
        trunk = self.reaches.index(0) if 0 in self.reaches else None
        return None if trunk is None else self.parts.get((trunk, chain[number]))


PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
GROUPS = st.integers(0, 2)
RANKS = st.integers(0, 1)


class GroupsMachine(RuleBasedStateMachine):
    @initialize(
        reaches=st.sampled_from(SHAPES),
        world_size=st.integers(1, 2),
        pages=st.integers(6, 40),
        policy=st.sampled_from(sorted(POLICIES)),
    )
    def begin(self, reaches: Reaches, world_size: int, pages: int, policy: str) -> None:
        self.heard = Heard()
        self.rack = Rack(reaches, pages, world_size, policy)
        self.index = self.rack.index
        self.model = Model(reaches, world_size)
        self.removals = Steps(self.index, 2)
        self.pinned: list[tuple[list[Part], list[Chunk]]] = []

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

    @rule(path=PATHS, group=GROUPS, first=st.integers(0, 5), rank=RANKS, seals=st.booleans())
    def store(self, path: Path, group: int, first: int, rank: int, seals: bool) -> None:
        chain = prompt(path)
        group, rank = group % len(self.model.reaches), rank % self.model.world_size
        for number in range(min(first, len(chain) - 1), len(chain)):
            if not self.reserve(group, chain, number, rank):
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

    def reserve(self, group: int, chain: list[bytes], number: int, rank: int) -> bool:
        """Reserve one shard if it is missing; returns whether there was room."""
        model, key = self.model, chain[number]
        spared = [model.parts.get((group, key)), model.before(group, chain, number)]
        protected = model.protected(*(part for part in spared if part is not None and not part.hidden))
        has_room = self.index.allocator.free_bytes >= PAGE
        made = reserve_one(
            self.index, self.rack.namespaces[group], rank, key, chain[number - 1] if number else b"root", number + 1
        )
        gone = self.drop_gone(protected)
        assert not has_room or all(part.hidden for part in gone), "evicted without need"
        part, before = model.parts.get((group, key)), model.before(group, chain, number)
        if made.refusal is not None:
            kept = model.protected(part, before)
            assert all(each in kept for each in model.parts.values()), "something could have been evicted"
            return False
        if made.known:
            assert part is not None and (part.ranks[rank] != "corrupt" or part.pins or "open" in part.ranks.values())
            return True
        (chunk,) = made.chunks
        if part is None:
            is_known = bool(model.reaches[group] or not number or before is not None)
            part = Part(group, key, chunk, before, is_known)
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
        pin = self.rack.match(chain)
        assert pin.matched == model.boundary(chain)
        needed = [model.parts[each] for each in model.needed(chain, pin.matched)]
        assert pin.parts == len(needed)
        self.index.hold(pin.chunks)
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
        self.heard.notice(self.index.take_events(), 0.0)
        self.heard.check(self.rack.namespaces)
        told = {(chunk.namespace.group, chunk.key) for chunk in self.heard.found.values()}
        assert whole <= told
        assert told == whole or self.removals, "what is gone can be found, long after"
        pages = sum(len(part.ranks) for part in self.model.parts.values())
        assert self.index.allocator.capacity - self.index.allocator.free_bytes == pages * PAGE

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


TestGroups = GroupsMachine.TestCase
TestGroups.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# -- which boundaries a stored prompt has


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("reaches", "group"), [(reaches, g) for reaches in SHAPES for g in range(len(reaches))])
def test_a_corrupt_part_is_no_boundary_until_it_is_stored_again(reaches: Reaches, group: int, world_size: int) -> None:
    rack, chain = Rack(reaches, world_size=world_size), keys("c", 6)
    rack.store_all(chain)
    reach = reaches[group]
    for number, key in enumerate(chain):
        rack.index.mark_corrupt(rack.part(group, key), world_size - 1)
        rack.index.validate()
        is_needed_at_the_end = not reach or number >= 6 - reach
        assert rack.boundary(chain) == (number if is_needed_at_the_end else 6)
        rack.store(group, chain, [number])
        rack.index.validate()
        assert rack.boundary(chain) == 6


# -- eviction


def test_parts_in_the_middle_are_evicted_while_both_ends_of_the_prompt_stay() -> None:
    rack, chain, other = Rack((0, 2), pages=16), keys("c", 8), keys("d", 6)
    rack.store_all(chain)
    rack.index.release(rack.pin(chain[:2]))  # the beginning is used by many
    pinned = rack.pin(chain)
    rack.store(0, other, range(4))
    assert rack.there(chain) == [list(range(8)), [0, 1, 6, 7]]
    assert [rack.boundary(chain[:end]) for end in range(9)] == [0, 1, 2, 2, 2, 2, 2, 2, 8]
    rack.store(0, other, range(4, 6))
    assert rack.there(chain) == [list(range(8)), [6, 7]], "only what the pin does not need has gone"
    chunk = reserve(rack.index, rack.namespaces[1], 0, other[0])
    assert chunk is not None, "the other prompt makes room for its own parts"
    rack.index.discard(chunk, 0)
    rack.index.release(pinned)
    rack.index.validate()


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("reaches", [(0, 2), (2, 0), (0, 0, 1)])
def test_a_bounded_part_is_evicted_before_the_unbounded_one_of_its_chunk(reaches: Reaches, policy: str) -> None:
    rack, chain = Rack(reaches, policy=policy), keys("c", 5)
    trunk = reaches.index(0)
    rack.store(trunk, chain)
    for group, reach in enumerate(reaches):
        if group != trunk:
            rack.store(group, chain)
            assert not reach or all(rack.part(group, key).parent is rack.part(trunk, key) for key in chain)
    order: list[tuple[int, int]] = []
    while (victim := rack.index.accounts.victim(None, 0)) is not None:
        order.append((victim.namespace.group, chain.index(victim.key)))
        rack.index.remove(victim, Reason.EVICTED)
    assert len(order) == 5 * len(reaches)
    for group, reach in enumerate(reaches):
        for number in range(5):
            if reach:
                assert order.index((group, number)) < order.index((trunk, number))
            elif number:
                assert order.index((group, number)) < order.index((group, number - 1))


def test_a_part_that_came_before_its_unbounded_one_is_evicted_by_itself() -> None:
    rack, chain = Rack((0, 1)), keys("c", 2)
    rack.store(1, chain)
    rack.store(0, chain)
    assert rack.part(1, chain[1]).parent is None and rack.boundary(chain) == 2
    rack.lose(0, chain[1])
    assert rack.boundary(chain) == 1
    rack.index.validate()


def test_a_part_whose_unbounded_one_failed_to_arrive_stays_and_serves_once_that_does() -> None:
    rack, chain = Rack((0, 1)), keys("c", 1)
    trunk = rack.reserve(0, chain, 0)
    assert trunk is not None
    rack.store(1, chain)
    rack.index.discard(trunk, 0)
    rack.index.validate()
    assert rack.boundary(chain) == 0
    rack.store(0, chain)
    assert rack.boundary(chain) == 1
    assert clear(rack.index) == 2
    rack.index.validate()


# -- forgetting and ages


def test_only_the_parts_of_one_salt_are_forgotten() -> None:
    rack, mine, theirs = Rack((0, 1)), keys("mine", 2), keys("theirs", 2)
    for chain, salt in ((mine, b"s" * 16), (theirs, b"t" * 16)):
        for group in range(2):
            for number in range(2):
                chunk = rack.reserve(group, chain, number, salt=salt)
                assert chunk is not None
                rack.index.seal(chunk, 0)
    removals = Steps(rack.index, 1)
    removal = removals.forget(rack.namespaces, b"s" * 16)
    removals.finish()
    assert removal.removed == 4
    assert (rack.boundary(mine), rack.boundary(theirs)) == (0, 2)


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


def test_an_unbounded_part_that_is_too_old_takes_all_boundaries_behind_it_whatever_the_others_are() -> None:
    rack, chain = Rack((0, 1), ttl_s=10), keys("c", 4)
    rack.store(0, chain, [0, 1], born=5)
    rack.store(0, chain, [2, 3], born=1)
    rack.store(1, chain, born=9)
    assert expire(rack.index, 11) == 2
    rack.index.validate()
    assert rack.boundary(chain) == 2
    rack.store(0, chain, [2, 3], born=11)
    assert rack.boundary(chain) == 4, "they were kept for the younger parts, and are as new"


# -- namespaces


def test_a_model_with_one_unbounded_group_is_as_simple_as_one_without_groups() -> None:
    shelf, rack = Shelf(8), Rack((0,), pages=8)
    namespaces = rack.index.namespaces
    same = namespaces.find("m", 1, 0, fingerprint(0, 0), BLOCKS, size=PAGE, chunk_tokens=CHUNK_TOKENS)
    assert same is rack.namespaces[0]
    for namespace in (shelf.namespace, same):
        assert namespace.is_simple and namespace.groups == [namespace] and namespace.trunk is namespace
        assert (namespace.reach, namespace.group) == (0, 0)
    chain = keys("c", 3)
    shelf.store(chain)
    rack.store_all(chain)
    for namespace in (shelf.namespace, same):
        pin = matching.match(namespace, b"".join([*chain, bytes(32)]))
        assert (pin.chunks, pin.matched, pin.parts) == ([namespace.chunks[chain[2]]], 3, 3)
        assert [namespace.chunks[key].depth for key in chain] == [1, 2, 3]


@pytest.mark.parametrize("reaches", [(1,), (0, 1), (0, 0), (2, 3)])
def test_other_models_are_not_simple(reaches: Reaches) -> None:
    namespaces = Rack(reaches).namespaces
    assert not any(each.is_simple for each in namespaces)
    assert [(each.group, each.reach) for each in namespaces] == list(enumerate(reaches))
    trunks = [each.trunk for each in namespaces]
    assert trunks == [namespaces[0] if 0 in reaches else None] * len(reaches)


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


def test_the_groups_of_a_model_are_dropped_together_once_none_has_chunks_or_engines() -> None:
    rack, chain = Rack((0, 1)), keys("c", 1)
    namespaces, (full, state) = rack.index.namespaces, rack.namespaces
    rack.store(1, chain)
    for namespace in (full, state):
        namespace.live = 0
        namespaces.forget(namespace)
    assert namespaces.all() == [full, state] and not full.gone
    rack.lose(1, chain[0])
    rack.index.take_events()
    assert namespaces.all() == [] and full.gone and state.gone
    again = namespaces.find_groups("m", 1, 0, wire_groups((0, 1)))
    assert not set(again) & {full, state} and len({each.number for each in (*again, full, state)}) == 4


def test_a_lookup_is_asked_of_the_chunk_size_and_the_first_groups_blocks_that_it_names() -> None:
    rack = Rack((0, 1))
    namespaces = rack.index.namespaces
    (other,) = namespaces.find_groups("m", 1, 0, [Group(0, BLOCKS + 1, PAGE, bytes(32))], chunk_tokens=48)
    other.live = 1
    mine = rack.namespaces[0]
    model = "", "m", 1
    assert matching.for_lookup(namespaces, model) == [mine, other]
    assert matching.for_lookup(namespaces, model, chunk_tokens=48) == [other]
    assert matching.for_lookup(namespaces, model, BLOCKS) == matching.for_lookup(namespaces, model, 0, 16) == [mine]
    assert matching.for_lookup(namespaces, model, BLOCKS, chunk_tokens=48) == []
