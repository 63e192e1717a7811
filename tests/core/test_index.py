"""The index, compared with a plain model of the chunks that are stored, pinned, or have chunks behind them."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvdepot.core.actions import Reply
from kvdepot.core.clients import Client
from kvdepot.core.index import matching
from kvdepot.core.index.chunk import Chunk, Namespace
from kvdepot.core.index.events import Stored as StoredEvent
from kvdepot.core.index.excess import expire
from kvdepot.core.index.index import Index
from kvdepot.core.index.recovery import restore
from kvdepot.core.index.runs import Refusal, Reservation, Run
from kvdepot.core.lists import Lists
from kvdepot.core.tiering.tiering import Tiering
from kvdepot.eviction import POLICIES, Learned, Lru
from kvdepot.memory.allocator import PAGE, Allocator
from kvdepot.memory.records import SLOT_BYTES, Records
from kvdepot.protocol import wire
from kvdepot.protocol.keys import ROOT
from kvdepot.protocol.prefixes import Prefix
from tests.conftest import clear
from tests.core.heard import Heard
from tests.core.shelf import Path, Shelf, key_of, keys, prompt, reserve, sealed
from tests.harness import PlainLiveness

# -- the model


@dataclass(eq=False)
class Stored:
    """A chunk that should exist."""

    place: int  # which namespace
    key: bytes
    size: int  # bytes a shard
    number: int  # position in its prompt, 0 = unknown
    before: Stored | None
    ranks: dict[int, bool] = field(default_factory=dict)  # rank -> sealed
    pins: int = 0
    hits: int = 0  # lookups that ended with it
    handle: Chunk | None = None

    def needed(self) -> bool:
        return self.pins > 0 or not all(self.ranks.values())


class Model:
    """A dict of chunks; every query walks all of it."""

    def __init__(self, capacity: int, worlds: list[int]) -> None:
        self.capacity = capacity
        self.worlds = worlds
        self.chunks: dict[tuple[int, bytes], Stored] = {}

    def used(self) -> int:
        return sum(chunk.size * len(chunk.ranks) for chunk in self.chunks.values())

    def removable(self, *also_needed: Stored | None) -> list[Stored]:
        """Chunks that may be evicted: nothing holds them or a chunk behind them."""
        kept: set[int] = set()
        for chunk in [*self.chunks.values(), *filter(None, also_needed)]:
            if chunk.needed() or chunk in also_needed:
                step: Stored | None = chunk
                while step is not None and id(step) not in kept:
                    kept.add(id(step))
                    step = step.before
        return [chunk for chunk in self.chunks.values() if id(chunk) not in kept]

    def prefix(self, place: int, keys: list[bytes]) -> list[Stored]:
        """Linear search: chunks from the first on, while every rank's shard is sealed."""
        found = []
        for key in keys:
            chunk = self.chunks.get((place, key))
            if chunk is None or sum(chunk.ranks.values()) < self.worlds[place]:
                break
            found.append(chunk)
        return found

    def drop(self, chunk: Stored) -> None:
        del self.chunks[chunk.place, chunk.key]

    def families(self, place: int) -> dict[bytes, list[Stored]]:
        """The chunks of all prompts that begin with the same one, by its key, as far as their chains are complete."""
        found: dict[bytes, list[Stored]] = {}
        for chunk in self.chunks.values():
            is_whole = all(self.chunks.get((each.place, each.key)) is each for each in self.line(chunk))
            if chunk.place == place and chunk.number and is_whole:
                found.setdefault(self.line(chunk)[-1].key, []).append(chunk)
        return found

    def line(self, chunk: Stored) -> list[Stored]:
        """A chunk and those before it, whether they are still there or not."""
        line = [chunk]
        while line[-1].before is not None:
            line.append(line[-1].before)
        return line

    def shared(self, chunks: list[Stored]) -> Stored:
        """The last chunk that all prompts of a family share: the deepest that is on the way to each end."""
        ends = [self.line(chunk) for chunk in chunks if not any(each.before is chunk for each in chunks)]
        return next(each for each in ends[0] if all(each in line for line in ends))


PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
LOOSE = st.integers(1, 5).map(lambda n: tuple(range(10, 10 + n)))  # an engine's hashes: nobody knows how they chain
PLACES = st.integers(0, 2)
SIZES = [3 * PAGE, 5 * PAGE - 100, PAGE]
WORLDS = [1, 2, 1]


class IndexMachine(RuleBasedStateMachine):
    @initialize(pages=st.integers(8, 50), policy=st.sampled_from(sorted(POLICIES)))
    def begin(self, pages: int, policy: str) -> None:
        self.index = Index(Allocator(0, pages * PAGE), POLICIES[policy], chunk_tokens=16)
        self.model = Model(pages * PAGE, WORLDS)
        self.heard = Heard()
        self.namespaces: list[Namespace] = []
        for place, world in enumerate(WORLDS):
            for rank in range(world):
                namespace = self.index.namespaces.find(f"model {place}", world, rank, bytes([place]) * 32, 4)
            namespace.live = 1  # an engine is registered
            self.namespaces.append(namespace)
        self.open: list[tuple[Stored, int]] = []  # reservations
        self.pinned: list[tuple[list[Stored], list[Chunk]]] = []

    def watch_evictions(self, before: int, need: int, stored: bool, *spared: Stored | None) -> None:
        """The chunks evicted since `before` bytes were used were evictable, and their space was needed."""
        model = self.model
        gone = [c for (place, key), c in model.chunks.items() if key not in self.namespaces[place].chunks]
        allowed = set(map(id, model.removable(*spared)))
        assert all(id(chunk) in allowed for chunk in gone), "pinned, reserved, or needed by what is behind it"
        lost = set(map(id, gone))
        for chunk in model.chunks.values():
            assert chunk.before is None or id(chunk.before) not in lost or id(chunk) in lost, "a tail outlived its head"
        sizes = [chunk.size * len(chunk.ranks) for chunk in gone]
        free = model.capacity - before
        if stored and gone:
            assert free + sum(sizes) - max(sizes) < need, "more was evicted than was needed"
        if stored and need <= free:
            assert not gone
        for chunk in gone:
            model.drop(chunk)

    # -- storing

    def reserve(self, place: int, path: Path, rank: int, loose: bool) -> Stored | None:
        model, key = self.model, key_of(path)
        size = -(-SIZES[place] // PAGE) * PAGE
        chunk = model.chunks.get((place, key))
        if chunk is not None and rank in chunk.ranks:
            return None
        known = chunk is not None
        if chunk is None:
            parent = model.chunks.get((place, key_of(path[:-1])))
            chained = not loose and (len(path) == 1 or (parent is not None and parent.number == len(path) - 1))
            chunk = Stored(place, key, size, len(path) if chained else 0, parent if chained else None)
        used = model.used()
        room = model.capacity - used
        room += sum(c.size * len(c.ranks) for c in model.removable(chunk if known else None, chunk.before))
        parent_key = b"" if loose else key_of(path[:-1])
        handle = reserve(
            self.index, self.namespaces[place], rank, key, parent_key, 0 if loose else len(path), SIZES[place]
        )
        assert (handle is not None) == (size <= room), "there is room exactly when enough can be evicted"
        self.watch_evictions(used, size, handle is not None, chunk if known else None, chunk.before)
        if handle is None:
            return None
        assert sum(length for _, length in handle.shards[rank].extents) == size
        chunk.ranks[rank] = False
        chunk.handle = handle
        model.chunks[place, key] = chunk
        self.open.append((chunk, rank))
        return chunk

    @rule(place=PLACES, path=st.one_of(PATHS, LOOSE), rank=st.integers(0, 1), loose=st.booleans())
    def reserve_one(self, place: int, path: Path, rank: int, loose: bool) -> None:
        self.reserve(place, path, rank % WORLDS[place], loose or path[0] >= 10)

    @rule(place=PLACES, path=st.one_of(PATHS, LOOSE), first=st.integers(0, 2))
    def store_a_prompt(self, place: int, path: Path, first: int) -> None:
        for rank in range(WORLDS[place]):
            begun = len(self.open)
            for end in range(first + 1, len(path) + 1):
                self.reserve(place, path[:end], rank, path[0] >= 10)
            for chunk, rank_ in self.open[begun:]:
                self.index.seal(chunk.handle, rank_)
                chunk.ranks[rank_] = True
            del self.open[begun:]

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        chunk, rank = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.index.seal(chunk.handle, rank)
        chunk.ranks[rank] = True

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        chunk, rank = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.index.discard(chunk.handle, rank)
        del chunk.ranks[rank]
        if not chunk.ranks:
            self.model.drop(chunk)

    # -- finding and pinning

    @rule(place=PLACES, path=st.one_of(PATHS, LOOSE), pin=st.booleans())
    def lookup(self, place: int, path: Path, pin: bool) -> None:
        keys = prompt(path)
        expected = self.model.prefix(place, keys)
        found = matching.match(self.namespaces[place], b"".join(keys))
        assert found.matched == len(expected)
        assert {id(chunk) for chunk in found.chunks} <= {id(chunk.handle) for chunk in expected}
        if (end := matching.last_chained(found)) is not None:
            end.hits += 1
        if chained := [chunk for chunk in expected if chunk.number]:
            chained[-1].hits += 1
        if pin:
            self.index.hold(found.chunks)
            self.index.use(found.chunks)
            for chunk in expected:
                chunk.pins += 1
            self.pinned.append((expected, found.chunks))

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        chunks, held = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        self.index.release(held)
        for chunk in chunks:
            chunk.pins -= 1

    @rule(place=PLACES, path=PATHS, rank=st.integers(0, 1))
    def ask_for_one_shard(self, place: int, path: Path, rank: int) -> None:
        chunk = self.model.chunks.get((place, key_of(path)))
        found = sealed(self.index, self.namespaces[place], rank, key_of(path))
        if chunk is not None and chunk.ranks.get(rank):
            assert found is chunk.handle
        else:
            assert found is None

    @rule()
    def clear(self) -> None:
        going = self.model.removable()
        assert clear(self.index) == len(going)
        for chunk in going:
            self.model.drop(chunk)

    # -- always

    @invariant()
    def what_is_there_is_what_the_model_says(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.validate()
        for place, namespace in enumerate(self.namespaces):
            there = {
                key: {rank: shard.sealed for rank, shard in c.shards.items()} for key, c in namespace.chunks.items()
            }
            assert there == {c.key: c.ranks for c in self.model.chunks.values() if c.place == place}
        assert (
            self.model.used() == self.index.allocator.capacity - self.index.allocator.free_bytes <= self.model.capacity
        )
        taken = sorted(
            e for s in self.namespaces for c in s.chunks.values() for h in c.shards.values() for e in h.extents
        )
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(taken)), "two shards share bytes"

    @invariant()
    def what_was_told_is_what_can_be_found(self) -> None:
        if hasattr(self, "index"):
            whole = {place for place, c in self.model.chunks.items() if sum(c.ranks.values()) == WORLDS[place[0]]}
            self.heard.notice(self.index.take_events(), 0.0)
            self.heard.check(self.namespaces)
            told = {(chunk.namespace.number, chunk.key) for chunk in self.heard.found.values()}
            assert told == {(self.namespaces[place].number, key) for place, key in whole}

    @invariant()
    def the_list_of_prefixes_is_what_the_model_says(self) -> None:
        if not hasattr(self, "index"):
            return
        expected = []
        for place, namespace in enumerate(self.namespaces):
            for chunks in self.model.families(place).values():
                shared = self.model.shared(chunks)
                ends = [chunk for chunk in chunks if not any(each.before is chunk for each in chunks)]
                size = sum(chunk.size * len(chunk.ranks) for chunk in chunks)
                hits, tokens = sum(each.hits for each in chunks), sum(16 * each.hits * each.number for each in chunks)
                expected.append(
                    (namespace.model, shared.key.hex(), 16 * shared.number, 16 * len(chunks), len(ends), size, hits,
                     tokens)
                )  # fmt: skip
        told = [
            (each.model, each.hash, each.shared_tokens, each.tokens, each.prompts, each.bytes, each.hits,
             each.hit_tokens)
            for each in ask_prefixes(self.index, wire.Prefixes(most=1000))
        ]  # fmt: skip
        assert sorted(told) == sorted(expected)
        assert [each[6] for each in told] == sorted((each[6] for each in expected), reverse=True)

    def teardown(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.validate()
        for chunk, rank in self.open:
            self.index.discard(chunk.handle, rank)
        for _, held in self.pinned:
            self.index.release(held)
        for namespace in self.namespaces:
            namespace.live = 0
        clear(self.index)
        self.index.validate()
        assert (self.index.chunks, self.index.reserved, self.index.held) == (0, 0, 0)
        assert self.index.allocator.free_bytes == self.model.capacity, "bytes leaked"
        assert self.index.namespaces.all() == [] or not any(
            namespace.chunks for namespace in self.index.namespaces.all()
        )


def ask_prefixes(index: Index, request: wire.Prefixes) -> list[Prefix]:
    """The answer of a core with this index, two chunks a step."""
    lists = Lists(index, Tiering((), index, 0.0), step=2)
    actions = lists.prefixes(Client(b"one", PlainLiveness("")), b"1", request, wall=0)
    while lists:
        assert not actions
        actions = lists.step()
    (reply,) = actions
    assert isinstance(reply, Reply) and isinstance(reply.value, list)
    return reply.value


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


# -- plain cases


@pytest.fixture(params=sorted(POLICIES))
def shelf(request: pytest.FixtureRequest) -> Shelf:
    return Shelf(6, policy=request.param)


@pytest.fixture
def lru_shelf() -> Shelf:
    return Shelf(6)


def test_a_chain_loses_its_tail_first(shelf: Shelf) -> None:
    old = keys("old", 6)
    shelf.store(old)
    for lost in range(1, 6):
        shelf.store([keys("new", lost)[-1]], loose=True)
        shelf.index.release(shelf.pin(keys("new", lost)[-1:]))
        left = sum(shelf.there(old))
        assert shelf.there(old) == [True] * left + [False] * (6 - left)
        assert shelf.matched(old) == left
        # `learned` has learned nothing in so small a cache, and may evict a new chunk although it was used.
        assert left == 6 - lost or isinstance(shelf.policy, Learned)
    assert left < 6


def test_of_two_chains_the_one_used_longer_ago_loses_its_tail(lru_shelf: Shelf) -> None:
    one, two, three = keys("one", 3), keys("two", 3), keys("three", 3)
    lru_shelf.store(one)
    lru_shelf.store(two)
    lru_shelf.index.release(lru_shelf.pin(one))
    lru_shelf.store(three)
    assert (lru_shelf.matched(one), lru_shelf.matched(two), lru_shelf.matched(three)) == (3, 0, 3)


def test_chunks_without_a_chain_go_in_the_order_in_which_they_were_last_used(lru_shelf: Shelf) -> None:
    each = [[key] for key in keys("k", 6)]
    for single in each:
        lru_shelf.store(single, loose=True)
    for number in (3, 0, 5):
        lru_shelf.index.release(lru_shelf.pin(each[number]))
    order = []
    for number in range(6):
        lru_shelf.store(keys(f"new{number}", 1), loose=True)
        order += [i for i in range(6) if not lru_shelf.there(each[i])[0] and i not in order]
    assert order == [1, 2, 4, 3, 0, 5]


def test_a_prompt_without_a_chain_loses_its_tail_first_once_it_was_used(lru_shelf: Shelf) -> None:
    prompt_ = keys("loose", 6)
    lru_shelf.store(prompt_, loose=True)
    lru_shelf.index.release(lru_shelf.pin(prompt_))
    for left in range(5, -1, -1):
        lru_shelf.store(keys(f"new{left}", 1))
        assert lru_shelf.there(prompt_) == [True] * left + [False] * (6 - left)


def test_a_stored_chunk_counts_as_used_when_it_was_stored(lru_shelf: Shelf) -> None:
    first, later = keys("first", 1), keys("later", 1)
    lru_shelf.store(first, loose=True)
    lru_shelf.store(later, loose=True)
    lru_shelf.store(keys("rest", 5))
    assert (lru_shelf.there(first), lru_shelf.there(later)) == ([False], [True])


def test_once_its_tail_has_gone_the_head_of_a_chain_goes_before_what_was_used_later(lru_shelf: Shelf) -> None:
    chain, other, rest = keys("chain", 2), keys("other", 1), keys("rest", 3)
    lru_shelf.store(chain)
    lru_shelf.store(other)
    lru_shelf.index.release(lru_shelf.pin(chain))
    lru_shelf.store(rest)
    left = []
    for number in range(3):
        lru_shelf.store(keys(f"new{number}", 1))
        left.append((lru_shelf.matched(chain), lru_shelf.matched(other)))
    assert left == [(2, 0), (1, 0), (0, 0)]
    assert lru_shelf.matched(rest) == 3


def test_two_models_with_chunks_of_different_sizes_share_a_full_space_without_a_failed_store() -> None:
    draw = random.Random(7)
    pages = 1000
    index = Index(Allocator(0, pages * PAGE), Lru)
    sizes = {"small": 7, "large": 13}
    namespaces = {name: index.namespaces.find(name, 1, 0, name.encode(), 4) for name in sizes}
    for namespace in namespaces.values():
        namespace.live = 1
    full = split = 0
    for number in range(4000):
        name = draw.choice(["small", "large"])
        chain = keys(f"{name}{number}", draw.randrange(1, 4))
        for position, key in enumerate(chain, 1):
            parent = chain[position - 2] if position > 1 else b"root"
            chunk = reserve(index, namespaces[name], 0, key, parent, position, sizes[name] * PAGE)
            assert chunk is not None, f"store {number} found no room in {index}"
            split += len(chunk.shards[0].extents) > 1
            index.seal(chunk, 0)
        if index.evicted:
            full += 1
            assert index.allocator.free_bytes <= 0.05 * pages * PAGE, index
    assert full > 3000 and split > 100
    index.validate()


def test_a_namespace_is_found_again_only_by_what_agrees_with_it(shelf: Shelf) -> None:
    index = shelf.index
    one = index.namespaces.find("model", 2, 0, b"a" * 32, 4)
    assert index.namespaces.find("model", 2, 0, b"a" * 32, 4) is one
    assert index.namespaces.find("model", 2, 1, b"b" * 32, 4) is one, "another rank may lie differently"
    others = [
        index.namespaces.find("model", 2, 1, b"c" * 32, 4),
        index.namespaces.find("model", 1, 0, b"a" * 32, 4),
        index.namespaces.find("model", 2, 0, b"a" * 32, 8),
        index.namespaces.find("other", 2, 0, b"a" * 32, 4),
    ]
    assert len({id(namespace) for namespace in [one, *others]}) == 5


def test_equal_keys_in_two_namespaces_are_two_chunks(shelf: Shelf) -> None:
    chain = keys("c", 2)
    other = shelf.index.namespaces.find("m", 1, 0, b"other layout".ljust(32), 4)
    assert other is not shelf.namespace
    shelf.store(chain)
    assert matching.match(other, b"".join(chain)).matched == 0


def test_a_namespace_without_chunks_or_engines_is_forgotten(shelf: Shelf) -> None:
    shelf.store(keys("c", 2))
    shelf.namespace.live = 0
    shelf.index.namespaces.forget(shelf.namespace)
    assert shelf.index.namespaces.all() == [shelf.namespace]
    clear(shelf.index)
    assert shelf.index.namespaces.all() == []


def test_an_index_in_which_every_store_is_new_stays_as_fast_and_small(shelf: Shelf) -> None:
    for number in range(2000):
        shelf.store(keys(f"x{number}", 2))
        shelf.index.release(shelf.pin(keys(f"x{number}", 2)))
    shelf.index.validate()
    assert shelf.index.chunks == 6
    queued = int(repr(shelf.policy).split()[1])
    assert queued <= 2 * shelf.index.chunks, "the policy's queue grows with what is gone"


def test_using_chunks_again_and_again_queues_each_once(shelf: Shelf) -> None:
    chain = keys("c", 4)
    shelf.store(chain)
    shelf.store(keys("loose", 2), loose=True)
    for _ in range(100):
        shelf.index.release(shelf.pin(chain))
        shelf.index.release(shelf.pin(keys("loose", 2)))
    assert int(repr(shelf.policy).split()[1]) <= 6


def test_a_shard_of_another_size_is_not_written_over_and_is_no_lack_of_room(shelf: Shelf) -> None:
    chain = keys("c", 2)
    shelf.store(chain)
    shelf.index.mark_corrupt(shelf.namespace.chunks[chain[0]], 0)
    made = shelf.index.reserve(shelf.namespace, 0, Run(b"".join(chain), 2 * PAGE, b"root", 1), 0)
    assert (made.refusal, made.refused, made.chunks) == (Refusal.OTHER_SIZE, 2, [])
    assert shelf.reserve(chain, 1) is not None, "one of its size is"


def test_a_run_evicts_before_it_is_inserted_and_never_its_own_chunks(shelf: Shelf) -> None:
    own, other = keys("own", 5), keys("other", 3)
    shelf.store(own[:2])
    shelf.store(other)
    run = Run(b"".join(own), PAGE, b"root", 1)
    made = shelf.index.reserve(shelf.namespace, 0, run, 0)
    assert (made.known, made.places, made.refusal) == (2, [2, 3, 4], None)
    assert shelf.there(own) == [True] * 5 and sum(shelf.there(other)) == 1
    for chunk in made.chunks:
        shelf.index.seal(chunk, 0)
    assert shelf.matched(own) == 5
    shelf.index.validate()


# -- runs that meet chunks which exist


def index_of(pages: int, policy: str = "lru", ranks: int = 1, ttl_s: int = 0) -> tuple[Index, Namespace]:
    records = Records(memoryview(bytearray(64 * SLOT_BYTES)))
    index = Index(Allocator(0, pages * PAGE), POLICIES[policy], records, ttl_s)
    for rank in range(ranks):
        namespace = index.namespaces.find("m", ranks, rank, bytes([rank]) * 32, 1, "", size=PAGE, chunk_tokens=16)
    namespace.live = 1
    return index, namespace


def store_run(index: Index, namespace: Namespace, run: Run, wall: int = 1, rank: int = 0) -> Reservation:
    """Store the chunks of a run that are missing."""
    made = index.reserve(namespace, rank, run, wall)
    index.finish([(chunk, rank) for chunk in made.chunks], dict.fromkeys(range(len(made.chunks)), 1), wall)
    index.take_events()
    index.validate()
    return made


def run_of(*hashes: bytes, parent: bytes = ROOT, position: int = 1, salt: bytes = b"") -> Run:
    return Run(b"".join(hashes), PAGE, parent, position, salt)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_prompt_stored_around_a_loose_chunk_is_used_and_evicted(policy: str) -> None:
    index, namespace = index_of(64, policy)
    path = keys("a", 5)
    store_run(index, namespace, run_of(path[2], parent=path[1], position=3))  # its parent is not there
    store_run(index, namespace, run_of(*path))
    found = matching.match(namespace, b"".join(path[:4]))
    assert found.matched == 4
    index.use(found.chunks)
    for number in range(80):
        store_run(index, namespace, run_of(*keys(f"new{number}", 1)))
    assert index.make_room(index.accounts.rest, PAGE, 64) == 64 and not namespace.chunks


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
def test_what_one_rank_renews_is_new_to_tiers_removals_and_the_next_server(is_corrupt: bool) -> None:
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
    index.take_events()
    made = index.reserve(namespace, 1, run_of(first), 12)
    index.finish([(each, 1) for each in made.chunks], {0: 1}, 12)
    assert {event.rank for event in index.take_events() if isinstance(event, StoredEvent)} == {0, 1}
    assert [shard.tiers for shard in chunk.shards.values()] == [0, 0] and not scope.means(chunk)
    after = Index(Allocator(0, 64 * PAGE), Lru, Records(memoryview(bytearray(index.records._memory))), 10)
    assert restore(after).shards == 4
    for each in (index, after):
        (known,) = each.namespaces.all()
        assert known.chunks[first].born == 12 and matching.match(known, first).matched == 1
        assert expire(each, 21) == 1 and first in known.chunks
        assert expire(each, 22) == 1 and not known.chunks
        each.validate()
