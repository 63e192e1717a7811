"""The deciding part alone: messages and outcomes in, replies and copies out; no socket, no thread, no byte moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvdepot.core.waiting import STORE_S
from kvdepot.errors import BadRequest, Busy, LayoutError, UnknownClient, UnknownInstance
from kvdepot.keys import ChunkChain
from kvdepot.memory.allocator import PAGE
from kvdepot.memory.copier import Call, Copy, Mapped
from kvdepot.protocol import wire
from kvdepot.protocol.layout import Layout
from kvdepot.protocol.status import GroupStatus
from tests.core.desk import (
    BLOCKS,
    PER_CHUNK,
    Desk,
    group_requests,
    group_stores,
    instance_of,
    layout,
    lookup,
    prompt,
    retrieve,
    shards,
    store,
)
from tests.core.groups import Reaches, fingerprint


@pytest.fixture
def desk() -> Desk:
    desk = Desk()
    desk.hello()
    return desk


@pytest.fixture
def client(desk: Desk) -> bytes:
    name = desk.hello()
    desk.register(name)
    return name


# -- the plain life of a chunk


def test_a_store_is_answered_and_visible_only_when_its_bytes_have_arrived(desk: Desk, client: bytes) -> None:
    chain = prompt("a", 3)
    asked = desk.send(client, store(chain))
    assert asked not in desk.answers
    assert desk.ask(client, wire.Noop()) == "ok"  # which let the copies end
    assert desk.answers[asked] is True

    other = prompt("b", 3)
    asked = desk.send(client, store(other))
    seen, taken = desk.send(client, lookup(other, "r2")), desk.send(client, retrieve(other))
    assert asked not in desk.answers and seen not in desk.answers and desk.answers[taken] == [False] * 3
    desk.settle()
    assert desk.answers[asked] is True and desk.answers[seen] == 3


def test_only_the_first_chunk_of_a_retrieve_skips_blocks_which_may_repeat(desk: Desk, client: bytes) -> None:
    chain = prompt("a", 3)
    desk.ask(client, store(chain))
    assert isinstance(desk.ask(client, store(chain, skip=1)), BadRequest)
    desk.send(client, retrieve(chain, skip=1, blocks=[1, 1, 2, 3, 4, 5]))
    assert [piece.skip for copy in desk.copies() for piece in copy.pieces] == [1, 0, 0]


def test_chunks_of_a_store_that_did_not_arrive_are_discarded_and_the_others_kept() -> None:
    desk = Desk(pages=64 << 10)
    desk.hello()
    desk.register(b"one", block=4 << 20)
    chain = prompt("a", 4)
    asked = desk.send(b"one", store(chain))
    copies = desk.copies()
    assert len(copies) == 4
    desk.finish(copies[2], False)
    for copy in (copies[3], copies[0], copies[1]):
        assert asked not in desk.answers
        desk.finish(copy)
    assert desk.answers[asked] is False
    assert [desk.depot.counters[name] for name in ("stored_chunks", "failed_chunks")] == [3, 1]
    assert desk.ask(b"one", lookup(chain)) == 2
    assert desk.ask(b"one", store(chain)) is True
    assert desk.ask(b"one", lookup(chain)) == 4
    desk.ask(b"one", wire.EndSession("r"))
    desk.assert_empty()


# -- pins


def held(desk: Desk) -> int:
    desk.index.validate()
    return desk.index.held


def test_the_pins_of_a_request_go_once_all_its_readers_have_retrieved_all_its_chunks() -> None:
    desk = Desk()
    scheduler = desk.hello(b"scheduler")
    workers = [desk.hello(b"worker 0"), desk.hello(b"worker 1")]
    chain = prompt("a", 3)
    for rank, worker in enumerate(workers):
        desk.register(worker)
        desk.ask(worker, store(chain, world_size=2, rank=rank))
    assert desk.ask(scheduler, lookup(chain, world_size=2, readers=2)) == 3
    desk.ask(workers[0], retrieve(chain, world_size=2, rank=0))
    assert held(desk) > 0
    desk.ask(workers[1], retrieve(chain, end=2, world_size=2, rank=1))
    assert held(desk) > 0
    asked = desk.send(workers[1], retrieve(chain, first=2, end=3, world_size=2, rank=1))
    assert asked not in desk.answers and held(desk) > 0
    desk.settle()
    assert held(desk) == 0
    desk.assert_empty()


def test_a_retrieve_whose_engine_ends_pins_itself_leaves_them_alone(desk: Desk, client: bytes) -> None:
    chain = prompt("a", 3)
    desk.ask(client, store(chain))
    desk.ask(client, lookup(chain))
    held = desk.index.held
    assert desk.ask(client, msgspec.structs.replace(retrieve(chain), unpins=False)) == [True] * 3
    assert desk.index.held == held > 0
    desk.ask(client, wire.EndSession("r"))
    assert desk.index.held == 0


# -- limits


def test_more_transfers_than_allowed_are_refused_whole_and_taken_later() -> None:
    desk = Desk(settings={"max_queued": 2})
    desk.hello()
    desk.hello(b"two")
    for name in (b"one", b"two"):
        desk.register(name)
    asked = [desk.send(b"one", store(prompt(f"p{i}", 1))) for i in range(2)]
    refused = [desk.send(b"one", store(prompt("q", 1))), desk.send(b"one", retrieve(prompt("q", 1)))]
    assert all(isinstance(desk.answers[number], Busy) for number in refused)
    assert desk.index.reserved == 2
    fine = desk.send(b"two", store(prompt("r", 1)))
    desk.settle()
    assert [desk.answers[number] for number in [*asked, fine]] == [True] * 3
    assert desk.ask(b"one", store(prompt("q", 1))) is True


def test_more_pinning_requests_than_allowed_are_refused_until_one_ends() -> None:
    desk = Desk(settings={"max_sessions": 2})
    desk.hello()
    desk.register(b"one")
    chain = prompt("a", 1)
    desk.ask(b"one", store(chain))
    assert [desk.ask(b"one", lookup(chain, name)) for name in "ab"] == [1, 1]
    assert isinstance(desk.ask(b"one", lookup(chain, "c")), Busy)
    assert desk.ask(b"one", lookup(chain, "a")) == 1, "a request that has its place may ask again"
    desk.ask(b"one", wire.EndSession("a"))
    assert desk.ask(b"one", lookup(chain, "c")) == 1


# -- bad requests


def test_who_has_not_said_hello_is_told_so(desk: Desk) -> None:
    actions = desk.depot.handle(b"stranger", b"12345678", wire.Noop())
    assert [(a.client, a.number, type(a.value)) for a in actions] == [(b"stranger", b"12345678", UnknownClient)]


CHAIN = prompt("bad", 2)
GOOD = shards(CHAIN)


def bad(**fields: Any) -> wire.Shards:
    values = {name: getattr(GOOD, name) for name in GOOD.__struct_fields__}
    return wire.Shards(**{**values, **fields})


BAD_SHARDS = {
    "no hashes": bad(hashes=b""),
    "half a hash": bad(hashes=bytes(48)),
    "no blocks": bad(block_ids=b""),
    "half a block id": bad(block_ids=bytes(18)),
    "blocks that do not divide": bad(block_ids=np.arange(3, dtype="<u4").tobytes()),
    "a block outside": bad(block_ids=np.array([0, 1, 2, BLOCKS], "<u4").tobytes()),
    "a block twice": bad(block_ids=np.array([0, 1, 2, 1], "<u4").tobytes()),
    "a short parent": bad(parent=b"x"),
    "a negative depth": bad(depth=-1),
    "rank outside": bad(rank=1),
    "negative rank": bad(rank=-1),
    "no world": bad(world_size=0),
    "a huge world": bad(world_size=1 << 20),
    "a long name": bad(model="m" * 5000),
    "a long request": bad(request="r" * 5000),
    "skips a whole chunk": bad(skip_blocks=PER_CHUNK),
    "skips negatively": bad(skip_blocks=-1),
    "a block twice behind skipped ones": bad(block_ids=np.array([0, 0, 1, 1], "<u4").tobytes(), skip_blocks=1),
}


@pytest.mark.parametrize("part", BAD_SHARDS.values(), ids=BAD_SHARDS.keys())
@pytest.mark.parametrize("kind", ["store", "retrieve"])
def test_a_transfer_with_a_bad_part_is_refused_and_nothing_of_it_is_done(
    desk: Desk, client: bytes, part: wire.Shards, kind: str
) -> None:
    fine = shards(prompt("fine", 2), blocks=[10, 11, 12, 13])
    parts = [fine, part]
    asked = desk.send(client, wire.Store(1, 1, parts) if kind == "store" else wire.Retrieve(1, parts))
    assert isinstance(desk.answers[asked], BadRequest)
    assert not desk.tasks
    desk.assert_empty()


def test_two_requests_of_one_retrieve_may_skip_but_not_write_one_block(desk: Desk, client: bytes) -> None:
    for blocks, skip, expected in (([1, 2], 0, BadRequest), ([3, 2], 1, list)):
        one, two = shards(prompt("a", 1), blocks=[3, 1], skip=1), shards(prompt("b", 1), blocks=blocks, skip=skip)
        assert isinstance(desk.ask(client, wire.Retrieve(1, [one, two])), expected)


@pytest.mark.parametrize("hashes", [b"", bytes(31), bytes(33)])
def test_a_lookup_of_what_are_no_hashes_is_refused(desk: Desk, client: bytes, hashes: bytes) -> None:
    assert isinstance(desk.ask(client, wire.Lookup("m", 1, PER_CHUNK, "r", 1, hashes)), BadRequest)


@pytest.mark.parametrize("number", [0, 2, -1])
def test_transfers_of_an_instance_nobody_registered_are_told_so(desk: Desk, client: bytes, number: int) -> None:
    for request in (store(prompt("a", 1), number), retrieve(prompt("a", 1), number)):
        assert isinstance(desk.ask(client, request), UnknownInstance)


# -- registering and unregistering


@pytest.mark.parametrize("then", ["", "unregisters", "dies"])
def test_tensors_that_cannot_be_mapped_are_refused_with_the_reason_and_leave_nothing(then: str) -> None:
    def refuse(_: Layout) -> Mapped:
        raise LayoutError("no such file")

    desk = Desk(map_layout=refuse)
    desk.hello()
    asked = [desk.send(b"one", wire.Register(1, layout(), "m", 1, 0, PER_CHUNK))]
    if then:
        asked.append(desk.send(b"one", wire.Unregister(1)))
    if then == "dies":
        desk.die(b"one")
    desk.settle()
    answers = [desk.answers.get(each, "nothing") for each in asked]
    assert [type(each) for each in answers] == (
        [str, str] if then == "dies" else [LayoutError, type(None)][: len(asked)]
    )
    assert then == "dies" or "no such file" in str(answers[0])
    assert desk.depot.status().instances == 0 and desk.index.namespaces.all() == []


BAD_REGISTRATIONS = [("m", 1, 1, PER_CHUNK), ("m", 0, 0, PER_CHUNK), ("m", 1, 0, 0), ("m" * 5000, 1, 0, PER_CHUNK)]


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("fields", BAD_REGISTRATIONS, ids=lambda fields: str(fields)[-12:])
def test_a_refused_registration_leaves_nothing_behind_and_leaks_no_mapping(
    desk: Desk, fields: tuple[str, int, int, int], is_there: bool
) -> None:
    desk.hello()
    if is_there:
        desk.register(b"one")
    assert isinstance(desk.ask(b"one", wire.Register(1, layout(), *fields)), BadRequest)
    assert desk.depot.status().instances == is_there
    assert desk.ask(b"one", wire.Unregister(1)) is None
    assert [mapped.closed for mapped in desk.mapped] == [True] * is_there
    desk.register(b"one")


def test_a_refused_unregistering_changes_nothing() -> None:
    desk = Desk(settings={"max_queued": 2})
    client = desk.hello()
    desk.register(client)
    desk.send(client, store(prompt("a", 1)))
    (old,) = desk.copies()
    waiting = [desk.send(client, wire.Unregister(1)) for _ in range(2)]
    again = desk.send(client, wire.Register(1, layout()))
    desk.finish(next(task for task in desk.tasks if task is not old))
    refused = desk.send(client, wire.Unregister(1))
    assert desk.answers[again] is None and isinstance(desk.answers[refused], Busy)
    storing = desk.send(client, store(prompt("b", 1)))
    desk.settle()
    assert [desk.answers[asked] for asked in waiting] == [None, None]
    assert desk.answers[storing] is True, "the tensors that were not unregistered can be used"
    assert desk.ask(client, retrieve(prompt("b", 1))) == [True]
    assert desk.ask(client, wire.Unregister(1)) is None
    assert [mapped.closed for mapped in desk.mapped] == [True, True]


@pytest.mark.parametrize(("device", "lane"), [("", ""), ("GPU-1", "devices")])
def test_a_devices_tensors_are_mapped_where_no_copy_of_the_processor_waits(desk: Desk, device: str, lane: str) -> None:
    desk.hello()
    given = layout()
    given = msgspec.structs.replace(given, mappings=[msgspec.structs.replace(m, device=device) for m in given.mappings])
    for request in (wire.Register(1, given), wire.Unregister(1)):
        desk.send(b"one", request)
        (task,) = desk.tasks
        assert isinstance(task, Call) and task.lane == lane
        desk.settle()


# -- models with several KV cache groups


HYBRID = (0, 2)


def put(desk: Desk, chain: ChunkChain, reaches: Reaches = HYBRID, *args: Any, **options: Any) -> None:
    for request in group_stores(reaches, chain, *args, **options):
        assert desk.ask(b"one", request) is True


def there(desk: Desk, chain: ChunkChain) -> list[list[int]]:
    """By group, the numbers of the chunks whose parts exist."""
    keys = [chain.slice(i, i + 1) for i in range(len(chain))]
    return [[i for i, key in enumerate(keys) if key in each.chunks] for each in desk.index.namespaces.all()]


def changed(group: int = 0, **fields: Any) -> Callable[[wire.Register], wire.Register]:
    """Change what a registration says about one of its groups."""

    def change(request: wire.Register) -> wire.Register:
        groups = list(request.groups)
        groups[group] = msgspec.structs.replace(groups[group], **fields)
        return msgspec.structs.replace(request, groups=groups)

    return change


def replaced(**fields: Any) -> Callable[[wire.Register], wire.Register]:
    return lambda request: msgspec.structs.replace(request, **fields)


MANY = [wire.Group(0, PER_CHUNK, PAGE, fingerprint(number, 0)) for number in range(wire.MAX_GROUPS + 1)]
BAD_GROUPS = {
    "an unknown group": replaced(group=2),
    "a negative group": replaced(group=-1, layout=layout(fingerprint(1, 0))),
    "a group without groups": replaced(groups=[], group=1),
    "another group's layout": replaced(group=1),
    "too many groups": replaced(groups=MANY),
    "one fingerprint twice": changed(1, fingerprint=fingerprint(0, 0)),
    "a short fingerprint": changed(1, fingerprint=b"short"),
    "a fingerprint that is not the layout's": changed(fingerprint=fingerprint(9, 0)),
    "a size that does not add up": changed(size=PAGE + 1),
    "another block's size": replaced(layout=layout(fingerprint(0, 0), block=PAGE)),
    "no size": changed(1, size=0),
    "a negative size": changed(1, size=-PAGE),
    "a negative reach": changed(1, reach=-1),
    "too far a reach": changed(1, reach=wire.MAX_CHUNKS + 1),
    "no blocks": changed(1, blocks_in_chunk=0),
    "blocks that do not add up": replaced(blocks_in_chunk=2 * PER_CHUNK),
    "negative chunk_tokens": replaced(chunk_tokens=-1),
    "too many chunk_tokens": replaced(chunk_tokens=wire.MAX_CHUNK_TOKENS + 1),
    "no model": replaced(model=""),
    "a rank outside": replaced(rank=1),
}


@pytest.mark.parametrize("spoil", BAD_GROUPS.values(), ids=BAD_GROUPS.keys())
@pytest.mark.parametrize("there_already", [False, True])
def test_groups_that_contradict_themselves_are_refused_and_nothing_changes(
    desk: Desk, spoil: Callable[[wire.Register], wire.Register], there_already: bool
) -> None:
    good = group_requests(HYBRID)
    if there_already:
        desk.register_groups(HYBRID)
    known, mapped = desk.index.namespaces.all(), list(desk.mapped)
    asked = desk.send(b"one", spoil(good[0]))
    assert isinstance(desk.answers[asked], BadRequest) and not desk.tasks
    assert desk.index.namespaces.all() == known and desk.mapped == mapped
    assert [each.live for each in known] == [1, 1] * there_already
    assert desk.depot.status().instances == len(mapped) and desk.depot.counters["errors"] == 1
    if not there_already:
        desk.register_groups(HYBRID)
    put(desk, prompt("a", 3))
    assert desk.ask(b"one", lookup(prompt("a", 3))) == 3


@pytest.mark.parametrize("other", [(0, 3), (0,), (0, 2, 1), (2, 0), ()])
def test_ranks_must_have_the_same_groups(desk: Desk, other: Reaches) -> None:
    for request in group_requests(HYBRID, 2, rank=0):
        assert desk.ask(b"one", request) is None
    known = desk.index.namespaces.all()
    wrong = group_requests(other, 2, rank=1) or [wire.Register(9, layout(fingerprint(0, 1)), "m", 2, 1, PER_CHUNK)]
    for request in wrong:
        asked = desk.send(b"one", request)
        assert isinstance(desk.answers[asked], BadRequest) and not desk.tasks
    assert desk.index.namespaces.all() == known
    # Once no engine has the first ones, the others are right, whatever is left of those.
    assert desk.ask(b"one", store(prompt("a", 1), world_size=2)) is True
    for group in range(2):
        desk.ask(b"one", wire.Unregister(instance_of(HYBRID, group)))
    assert desk.ask(b"one", wrong[0]) is None


def test_a_model_of_more_groups_than_namespaces_allow_is_refused_whole() -> None:
    desk = Desk(settings={"max_namespaces": 3})
    desk.hello()
    desk.register_groups(HYBRID)
    asked = desk.send(b"one", msgspec.structs.replace(group_requests(HYBRID, model="n")[0], instance=9))
    assert isinstance(desk.answers[asked], Busy) and not desk.tasks
    assert {each.model for each in desk.index.namespaces.all()} == {"m"}
    assert desk.depot.counters["namespaces_refused"] == 1


@pytest.mark.parametrize(
    "fields", [{"model": "n"}, {"rank": 1, "world_size": 2}, {"world_size": 2}, {"blocks": list(range(8))}]
)
def test_a_transfer_for_another_model_or_rank_than_registered_is_refused_whole(
    desk: Desk, fields: dict[str, Any]
) -> None:
    desk.register_groups(HYBRID)
    known, chain = desk.index.namespaces.all(), prompt("a", 2)
    for request in (store(chain, **fields), retrieve(chain, **fields)):
        asked = desk.send(b"one", request)
        assert isinstance(desk.answers[asked], BadRequest) and not desk.tasks
    assert desk.index.namespaces.all() == known
    desk.assert_empty()


def test_models_of_several_chunk_sizes_are_counted_in_their_own_tokens(desk: Desk) -> None:
    desk.register_groups(HYBRID, chunk_tokens=34)
    request = msgspec.structs.replace(group_requests((0,), model="n")[0], instance=8, groups=[])
    assert desk.ask(b"one", request) is None
    mine, other = prompt("a", 3), prompt("b", 2)
    put(desk, mine)
    assert desk.ask(b"one", store(other, 8, model="n")) is True
    status = desk.depot.status()
    assert [(each.model, each.chunk_tokens, each.chunks, each.bytes) for each in status.namespaces] == [
        ("m", 34, 3, 5 * PAGE), ("n", 1, 2, 2 * PAGE),
    ]  # fmt: skip
    assert status.namespaces[0].groups == [GroupStatus(0, 3, 3 * PAGE), GroupStatus(2, 2, 2 * PAGE)]
    assert status.namespaces[1].groups == [GroupStatus(0, 2, 2 * PAGE)]
    assert (status.cached_tokens, status.chunks) == (3 * 34 + 2, 7)
    longer = prompt("a", 5)
    assert desk.ask(b"one", msgspec.structs.replace(lookup(longer), chunk_tokens=34)) == 3
    assert desk.ask(b"one", lookup(other, model="n", request="r2")) == 2
    assert desk.depot.usages.tokens.asked == 5 * 34 + 2
    told = {each.model: (each.lookup_chunks, each.hit_chunks) for each in desk.depot.status().namespaces}
    assert told == {"m": (5, 3), "n": (2, 2)}
    # Reused is what came back of all groups.
    assert desk.ask(b"one", retrieve(mine, instance_of(HYBRID, 0))) == [True] * 3
    assert desk.depot.usages.tokens.reused == 0
    assert desk.ask(b"one", retrieve(mine, instance_of(HYBRID, 1), first=1)) == [True] * 2
    assert desk.depot.usages.tokens.reused == 3 * 34
    assert desk.ask(b"one", retrieve(other, 8, model="n", request="r2")) == [True] * 2
    assert desk.depot.usages.tokens.reused == 3 * 34 + 2
    desk.assert_empty()


def retain(chain: ChunkChain, chunk_tokens: int) -> wire.Lease:
    return wire.Lease("p", "retain", "m", 1, PER_CHUNK, bytes(chain.hashes), chunk_tokens=chunk_tokens)


def test_a_lookup_is_asked_of_its_own_chunk_size_only(desk: Desk) -> None:
    desk.register_groups(HYBRID, chunk_tokens=34)
    chain = prompt("a", 3)
    put(desk, chain)
    request = lookup(chain)
    for chunk_tokens, found in ((34, 3), (0, 3), (17, 0)):
        assert desk.ask(b"one", msgspec.structs.replace(request, chunk_tokens=chunk_tokens)) == found
        assert desk.ask(b"one", retain(chain, chunk_tokens)) == found
    for chunk_tokens in (-1, wire.MAX_CHUNK_TOKENS + 1):
        assert isinstance(desk.ask(b"one", msgspec.structs.replace(request, chunk_tokens=chunk_tokens)), BadRequest)
        assert isinstance(desk.ask(b"one", retain(chain, chunk_tokens)), BadRequest)


# -- all of it at once


CLIENTS = st.sampled_from([b"a", b"b", b"c"])
INSTANCES = st.integers(1, 2)
CHAINS = st.tuples(st.sampled_from(["x", "y"]), st.integers(1, 4)).map(lambda pair: prompt(*pair))
MODELS = st.sampled_from(["m", "m", "n"])
REQUESTS = st.sampled_from(["r1", "r2"])


class DepotMachine(RuleBasedStateMachine):
    """Clients that do anything in any order and die at any time: each request is answered once, nothing leaks."""

    @initialize(
        pages=st.integers(3, 20), queued=st.integers(1, 6), sessions=st.integers(1, 3), ttl_s=st.sampled_from([0, 3]),
        step_chunks=st.sampled_from([1, 3, 256]),
    )  # fmt: skip
    def begin(self, pages: int, queued: int, sessions: int, ttl_s: int, step_chunks: int) -> None:
        self.desk = Desk(pages, {"max_queued": queued, "max_sessions": sessions, "ttl_s": ttl_s})
        self.desk.depot.removals.step_chunks = step_chunks
        self.second = 0
        self.desk.tick(0.0, 1000.0)
        self.asked: list[tuple[bytes, bytes]] = []
        self.lives: Counter[bytes] = Counter()
        self.sent: dict[tuple[bytes, bytes], int] = {}
        self.begun: list[tuple[Copy, bytes, int]] = []  # copies, and whose tensors they touch
        self.leaving: dict[tuple[bytes, bytes], list[Copy]] = {}  # unregistering: copies of before
        for name in (b"a", b"b"):
            self.desk.hello(name)
            self.desk.register(name)
            self.desk.ask(name, store(prompt("x", 3)))

    def send(self, client: bytes, request: wire.Request) -> None:
        if self.desk.depot.client(client) is not None:
            self.asked.append(self.desk.send(client, request))
            self.sent[self.asked[-1]] = self.lives[client]

    @rule(client=CLIENTS)
    def hello(self, client: bytes) -> None:
        self.desk.hello(client)

    @rule(
        client=CLIENTS,
        instance=INSTANCES,
        print_=st.sampled_from([b"f", b"g"]),
        named=st.sampled_from([("", 0, 0, 0), ("m", 2, 0, PER_CHUNK), ("m", 2, 1, PER_CHUNK), ("m", 1, 1, PER_CHUNK)]),
    )
    def register(self, client: bytes, instance: int, print_: bytes, named: tuple[str, int, int, int]) -> None:
        self.send(client, wire.Register(instance, layout(print_ * 32), *named))

    @rule(client=CLIENTS, instance=INSTANCES)
    def unregister(self, client: bytes, instance: int) -> None:
        under_way = {id(copy) for copy in self.desk.copies()}
        before = [copy for copy, *whose in self.begun if whose == [client, instance] and id(copy) in under_way]
        if self.desk.depot.client(client) is not None:
            self.send(client, wire.Unregister(instance))
            self.leaving[self.asked[-1]] = before

    @rule(client=CLIENTS, chain=CHAINS, model=MODELS, request=REQUESTS, world=st.sampled_from([1, 1, 2]))
    def lookup(self, client: bytes, chain: ChunkChain, model: str, request: str, world: int) -> None:
        self.send(client, lookup(chain, request, model, readers=world, world_size=world))

    @rule(request=REQUESTS, length=st.integers(1, 3))
    def look_up_the_same_from_everywhere(self, request: str, length: int) -> None:
        for client in (b"a", b"b", b"c"):
            self.send(client, lookup(prompt("x", length), request))

    @rule(client=CLIENTS, request=REQUESTS)
    def end_session(self, client: bytes, request: str) -> None:
        self.send(client, wire.EndSession(request))

    @rule(
        client=CLIENTS, chain=CHAINS, model=MODELS, request=REQUESTS, instance=INSTANCES, ticket=st.integers(1, 9),
        shape=st.sampled_from([(1, 0), (1, 0), (2, 0), (2, 1)]), is_store=st.booleans(), data=st.data(),
    )  # fmt: skip
    def transfer(
        self,
        client: bytes,
        chain: ChunkChain,
        model: str,
        request: str,
        shape: tuple[int, int],
        instance: int,
        ticket: int,
        is_store: bool,
        data: st.DataObject,
    ) -> None:
        first = data.draw(st.integers(0, len(chain) - 1))
        part = shards(chain, first, model=model, request=request, world_size=shape[0], rank=shape[1])
        self._transfer(client, instance, ticket, part, is_store)

    @rule(client=CLIENTS, is_store=st.booleans())
    def transfer_what_all_have(self, client: bytes, is_store: bool) -> None:
        self._transfer(client, 1, 9, shards(prompt("x", 3)), is_store)

    def _transfer(self, client: bytes, instance: int, ticket: int, part: wire.Shards, is_store: bool) -> None:
        known = {id(copy) for copy in self.desk.copies()}
        self.send(client, wire.Store(instance, ticket, [part]) if is_store else wire.Retrieve(instance, [part]))
        self.begun += [(copy, client, instance) for copy in self.desk.copies() if id(copy) not in known]

    @rule(client=CLIENTS, part=st.sampled_from(list(BAD_SHARDS.values())), is_store=st.booleans())
    def send_nonsense(self, client: bytes, part: wire.Shards, is_store: bool) -> None:
        self.send(client, wire.Store(1, 1, [part]) if is_store else wire.Retrieve(1, [part]))

    @rule(client=CLIENTS, fence=st.integers(1, 9))
    def raise_fence(self, client: bytes, fence: int) -> None:
        if client in self.desk.liveness_files:
            self.desk.liveness_files[client].fence = max(self.desk.liveness_files[client].fence, fence)

    @rule(client=CLIENTS, kind=st.sampled_from([wire.Noop, wire.Clear, wire.Status, wire.ChunkSize]))
    def ask_something(self, client: bytes, kind: type[Any]) -> None:
        self.send(client, kind())

    @rule(client=CLIENTS, model=MODELS)
    def forget(self, client: bytes, model: str) -> None:
        self.send(client, wire.Forget(model))

    @precondition(lambda self: self.desk.depot.removals)
    @rule()
    def go_on(self) -> None:
        self.desk.expire()

    @rule(seconds=st.integers(1, 3))
    def grow_older(self, seconds: int) -> None:
        self.second += seconds
        self.desk.tick(float(self.second), 1000.0 + self.second)
        self.desk.expire()  # of lookups that wait for stores

    @precondition(lambda self: self.desk.tasks)
    @rule(data=st.data(), good=st.sampled_from([None, None, False]))
    def finish(self, data: st.DataObject, good: bool | None) -> None:
        self.desk.finish(data.draw(st.sampled_from(self.desk.tasks)), good)

    @rule(client=CLIENTS)
    def die(self, client: bytes) -> None:
        self.desk.die(client)
        self.desk.liveness_files.pop(client, None)
        self.lives[client] += 1
        # Its memory went with it: who says hello under its name next has other tensors.
        self.begun = [begun for begun in self.begun if begun[1] != client]

    @invariant()
    def nothing_is_out_of_order(self) -> None:
        if hasattr(self, "desk"):
            self.desk.index.validate()
            self.desk.check_budget()
            writing = [e for c in self.desk.copies() if c.is_store for p in c.pieces for e in p.extents]
            reading = {e for c in self.desk.copies() if not c.is_store for p in c.pieces for e in p.extents}
            assert len(set(writing)) == len(writing), "two stores write the same bytes"
            assert not reading & set(writing), "a store writes what a retrieve reads"
            for asked, before in self.leaving.items():
                if asked in self.desk.answers and self.desk.answers[asked] is None:  # and not refused
                    assert not any(copy is task for copy in before for task in self.desk.tasks), "given back too early"

    def teardown(self) -> None:
        if not hasattr(self, "desk"):
            return
        desk = self.desk
        desk.settle()
        desk.now += STORE_S  # lookups that wait for room are answered then
        desk.expire()
        desk.settle()
        for asked in self.asked:
            if self.lives[asked[0]] == self.sent[asked]:
                assert asked in desk.answers, "a request of a living client was never answered"
        for name in (b"a", b"b", b"c"):
            desk.die(name)
        desk.settle()
        desk.assert_empty()
        assert desk.index.namespaces.all() == []
        assert all(mapped.closed for mapped in desk.mapped)
        status = desk.depot.status()
        assert [getattr(status, name) for name in ("clients", "sessions", "instances")] == [0, 0, 0]


TestDepotMachine = DepotMachine.TestCase
TestDepotMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize("parts", [1, wire.MAX_CHUNKS + 1])
def test_requests_for_more_chunks_than_one_may_name_are_refused_and_counted(desk: Desk, parts: int) -> None:
    too_many = bytes(32 * (wire.MAX_CHUNKS + 1)) if parts == 1 else b""
    refused = desk.ask(b"one", wire.Store(1, 1, [wire.Shards("r", "m", 1, 0, bytes(32), 0, too_many, b"")] * parts))
    assert isinstance(refused, Busy) and str(wire.MAX_CHUNKS) in str(refused)
    assert desk.depot.counters["large_requests_refused"] == 1
