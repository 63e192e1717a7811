"""The deciding part alone: messages and outcomes in, replies and actions out; no socket, no thread, no byte moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvdepot.core.lookups.phases import STORE_S
from kvdepot.errors import BadRequest, Busy, KVDepotError, LayoutError, UnknownClient, UnknownInstance
from kvdepot.keys import ChunkChain
from kvdepot.memory.allocator import PAGE
from kvdepot.protocol import wire
from kvdepot.protocol.layout import BlockFormat
from kvdepot.protocol.status import GroupStatus
from tests.core.desk import (
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


@pytest.mark.parametrize("what", ["copied", "allocated"])
def test_a_store_without_bytes_or_without_memory_for_them_leaves_nothing(what: str) -> None:
    desk = Desk(is_populated=False)
    desk.register(desk.hello())
    chain = prompt("a", 4)
    asked = desk.send(b"one", store(chain))
    assert not desk.copies, "its memory is not allocated yet"
    (task,) = desk.prepares
    desk.prepare(task, is_allocated=what == "copied")
    if what == "copied":
        assert asked not in desk.answers
        desk.finish(desk.copies[0], copied=False)
    assert desk.answers[asked] is False and not desk.copies
    assert [desk.depot.counters[name] for name in ("stored_chunks", "failed_chunks")] == [0, 4]
    assert desk.ask(b"one", lookup(chain)) == 0
    assert desk.ask(b"one", store(chain)) is True
    assert desk.ask(b"one", lookup(chain)) == 4
    desk.ask(b"one", wire.EndSession("r"))
    desk.assert_empty()


def test_a_placement_names_the_chunks_that_are_missing_by_their_positions(desk: Desk, client: bytes) -> None:
    a, b = prompt("a", 4), prompt("b", 3)
    desk.ask(client, wire.Store(1, [shards(a, end=2)]))
    desk.send(client, wire.Store(1, [shards(a), shards(b)]))
    desk.send(client, wire.Retrieve(1, [shards(b), shards(a)]))
    storing, loading = desk.copies
    assert storing.placement.chunks == [2, 3, 4, 5, 6] and loading.placement.chunks == [3, 4]
    assert {place.extents for place in storing.placement.places}.isdisjoint(
        place.extents for place in loading.placement.places
    )
    desk.settle()
    assert desk.ask(client, wire.Retrieve(1, [shards(b), shards(a)])) == [True] * 7


def test_checksums_are_asked_for_and_compared_as_verify_says() -> None:
    chain = prompt("a", 40)
    some = [key[0] < 16 for key in (chain.slice(i, i + 1) for i in range(40))]
    for verify, summed in (("off", [False] * 40), ("sampled", some), ("always", [True] * 40)):
        desk = Desk(settings={"verify": verify})
        desk.register(desk.hello())
        for request in (store(chain), retrieve(chain)):
            desk.send(b"one", request)
            assert [place.is_summed for place in desk.copies[0].placement.places] == summed
            desk.settle()
        asked = desk.send(b"one", retrieve(chain))
        desk.finish(desk.copies[0], sums=[2 * each for each in summed])
        assert desk.answers[asked] == [not each for each in summed]
        assert desk.depot.counters["corrupt_chunks"] == sum(summed)
        assert desk.ask(b"one", retrieve(chain)) == [not each for each in summed]
        desk.assert_empty()


COMPLETED = {
    "too few sums": {"sums": [1]},
    "too many sums": {"sums": [1, 1, 1]},
    "no sums": {"sums": []},
    "a sum that was not asked for": {"sums": [1, 0]},
    "a negative sum": {"sums": [-1, 1]},
    "differences of what was not compared": {"sums": [1, 1], "differences": [[0.0], [0.0]]},
}
COMPARED = {
    "too few": {"sums": [0, 0], "differences": [[0.0]]},
    "too many": {"sums": [0, 0], "differences": [[0.0]] * 3},
    "an empty one": {"sums": [0, 0], "differences": [[0.0], []]},
    "a negative one": {"sums": [0, 0], "differences": [[0.0], [0.5, -0.5]]},
    "no sums": {"sums": [], "differences": [[0.0]] * 2},
}


@pytest.mark.parametrize(
    ("kind", "said"),
    [*(((kind, said)) for kind in ("store", "retrieve") for said in COMPLETED.values())]
    + [("compare", said) for said in COMPARED.values()],
)
def test_a_completion_that_does_not_fit_its_placement_is_refused_and_ends_it(kind: str, said: dict[str, Any]) -> None:
    desk = Desk(settings={"verify": "always"})
    desk.register(desk.hello())
    chain = prompt("a", 2)
    if kind != "store":
        assert desk.ask(b"one", store(chain)) is True
    requests = {"store": store(chain), "retrieve": retrieve(chain), "compare": wire.Compare(1, [shards(chain)], 0.1)}
    asked = desk.send(b"one", requests[kind])
    desk.finish(desk.copies[0], **said)
    assert isinstance(desk.answers[asked], BadRequest)
    assert (desk.depot.operations, desk.index.held, desk.index.reserved) == (0, 0, 0)
    assert desk.ask(b"one", lookup(chain)) == (0 if kind == "store" else 2)
    desk.ask(b"one", wire.EndSession("r"))
    desk.assert_empty()


def test_memory_that_a_dead_client_was_storing_to_is_kept_for_two_seconds() -> None:
    desk = Desk(pages=4)
    for name in (b"dies", b"leaves", b"stays"):
        desk.register(desk.hello(name))
    asked = [desk.send(name, store(prompt(name.decode(), 2))) for name in (b"dies", b"leaves")]
    waiting = desk.send(b"stays", lookup(prompt("dies", 2)))
    desk.liveness_files[b"leaves"].left = True
    desk.die(b"leaves")
    desk.die(b"dies")
    assert desk.answers[waiting] == 0 and desk.index.chunks == 0
    desk.index.validate()
    assert desk.depot.next_deadline() == desk.depot.now + 2.0 and desk.depot.is_busy
    assert desk.ask(b"stays", store(prompt("dies", 3))) is False, "two pages are free"
    desk.now += 1.9
    desk.expire()
    assert desk.ask(b"stays", store(prompt("other", 3))) is False
    desk.now += 0.1
    desk.expire()
    assert not desk.depot.is_busy
    assert desk.ask(b"stays", store(prompt("more", 4))) is True
    assert desk.depot.counters["failed_chunks"] == 4 and not desk.answers.keys() & asked


def test_a_store_whose_memory_is_allocated_after_its_client_died_leaves_nothing() -> None:
    desk = Desk(is_populated=False)
    desk.register(desk.hello())
    desk.send(b"one", store(prompt("a", 2)))
    desk.die(b"one")
    assert not desk.depot.is_busy, "it was told to write nowhere"
    assert desk.ask_only(desk.hello(), wire.Register(1, layout())) is None
    desk.prepare(desk.prepares[0])
    assert not desk.copies
    desk.die(b"one")
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


def test_a_request_without_hello_is_refused(desk: Desk) -> None:
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
    "no blocks": bad(blocks=0),
    "too many blocks": bad(blocks=1 << 30),
    "a short parent": bad(parent=b"x"),
    "a negative depth": bad(depth=-1),
    "rank outside": bad(rank=1),
    "negative rank": bad(rank=-1),
    "no world": bad(world_size=0),
    "a huge world": bad(world_size=1 << 20),
    "a long name": bad(model="m" * 5000),
    "a long request": bad(request="r" * 5000),
    "a short salt": bad(salt=b"x"),
}


@pytest.mark.parametrize("part", BAD_SHARDS.values(), ids=BAD_SHARDS.keys())
@pytest.mark.parametrize("kind", ["store", "retrieve", "compare"])
def test_a_transfer_with_a_bad_part_is_refused_and_nothing_of_it_is_done(
    desk: Desk, client: bytes, part: wire.Shards, kind: str
) -> None:
    parts = [shards(prompt("fine", 2)), part]
    requests = {
        "store": wire.Store(1, parts),
        "retrieve": wire.Retrieve(1, parts),
        "compare": wire.Compare(1, parts, 1),
    }
    assert isinstance(desk.answers[desk.send(client, requests[kind])], BadRequest)
    assert not desk.copies
    desk.assert_empty()


@pytest.mark.parametrize("hashes", [b"", bytes(31), bytes(33)])
def test_a_lookup_of_what_are_no_hashes_is_refused(desk: Desk, client: bytes, hashes: bytes) -> None:
    assert isinstance(desk.ask(client, wire.Lookup("m", 1, PER_CHUNK, "r", 1, hashes)), BadRequest)


@pytest.mark.parametrize("number", [0, 2, -1])
def test_transfers_of_an_instance_nobody_registered_are_told_so(desk: Desk, client: bytes, number: int) -> None:
    for request in (store(prompt("a", 1), number), retrieve(prompt("a", 1), number)):
        assert isinstance(desk.ask(client, request), UnknownInstance)


# -- registering and unregistering


BAD_REGISTRATIONS = [("m", 1, 1, PER_CHUNK), ("m", 0, 0, PER_CHUNK), ("m", 1, 0, 0), ("m" * 5000, 1, 0, PER_CHUNK)]


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("fields", BAD_REGISTRATIONS, ids=lambda fields: str(fields)[-12:])
def test_a_refused_registration_changes_nothing(desk: Desk, fields: tuple[str, int, int, int], is_there: bool) -> None:
    if is_there:
        desk.register(b"one")
    assert isinstance(desk.ask(b"one", wire.Register(1, layout(), *fields)), BadRequest)
    assert desk.depot.status().instances == is_there
    answer = desk.ask(b"one", store(prompt("a", 1)))
    assert answer is True if is_there else isinstance(answer, UnknownInstance)


@pytest.mark.parametrize("format", [layout(b"short"), layout(block=0), layout(block=-1), layout(block=1 << 50)])
def test_blocks_that_nobody_has_are_refused(desk: Desk, format: BlockFormat) -> None:
    assert isinstance(desk.ask(b"one", wire.Register(1, format)), LayoutError)
    assert desk.depot.status().instances == 0


def test_a_registration_replaces_the_one_before_and_what_was_placed_ends_as_usual(desk: Desk, client: bytes) -> None:
    chain = prompt("a", 2)
    asked = desk.send(client, store(chain))
    assert desk.ask_only(client, wire.Register(1, layout(b"g" * 32), "n", 1, 0, PER_CHUNK)) is None
    assert desk.depot.status().instances == 1
    desk.settle()
    assert desk.answers[asked] is True
    assert desk.ask(client, retrieve(chain)) == [False] * 2, "the new one has another layout"
    asked = desk.send(client, store(chain))
    assert desk.ask_only(client, wire.Unregister(1)) is None
    assert isinstance(desk.ask_only(client, retrieve(chain)), UnknownInstance)
    desk.settle()
    assert desk.answers[asked] is True
    assert desk.ask(client, wire.Unregister(1)) is None


def test_a_worker_that_cannot_copy_is_listed_with_its_reason_and_copies_nothing(desk: Desk) -> None:
    why = "the self-test of cuda:0 failed: " + "x" * 5000
    assert desk.ask(b"one", wire.Register(1, layout(), "m", 1, 0, PER_CHUNK, fault=why)) is None
    (engine,) = desk.depot.status().engines
    assert engine.fault == why[:200] and engine.models == ["m"]
    for request in (store(CHAIN), retrieve(CHAIN), wire.Compare(1, [GOOD], 0.1)):
        refused = desk.ask(b"one", request)
        assert isinstance(refused, BadRequest) and "the self-test of cuda:0 failed" in str(refused)
    desk.register(b"one")
    assert desk.depot.status().engines[0].fault == ""
    assert desk.ask(b"one", store(CHAIN)) is True


def test_registrations_beyond_the_limit_are_refused_and_counted() -> None:
    desk = Desk(settings={"max_instances": 2})
    desk.hello()
    for instance in (1, 2, 2):
        desk.register(b"one", instance)
    assert isinstance(desk.ask(b"one", wire.Register(3, layout())), Busy)
    assert desk.depot.counters["registrations_refused"] == 1
    assert desk.ask(b"one", wire.Unregister(1)) is None
    desk.register(b"one", 3)


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
    known = desk.index.namespaces.all()
    assert isinstance(desk.ask(b"one", spoil(good[0])), BadRequest)
    assert desk.index.namespaces.all() == known
    assert [each.live for each in known] == [1, 1] * there_already
    assert desk.depot.status().instances == 2 * there_already and desk.depot.counters["errors"] == 1
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
        assert isinstance(desk.ask(b"one", request), BadRequest)
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
    refused = desk.ask(b"one", msgspec.structs.replace(group_requests(HYBRID, model="n")[0], instance=9))
    assert isinstance(refused, Busy)
    assert {each.model for each in desk.index.namespaces.all()} == {"m"}
    assert desk.depot.counters["namespaces_refused"] == 1


@pytest.mark.parametrize(
    "fields", [{"model": "n"}, {"rank": 1, "world_size": 2}, {"world_size": 2}, {"blocks": 2 * PER_CHUNK}]
)
def test_a_transfer_for_another_model_or_rank_than_registered_is_refused_whole(
    desk: Desk, fields: dict[str, Any]
) -> None:
    desk.register_groups(HYBRID)
    known, chain = desk.index.namespaces.all(), prompt("a", 2)
    for request in (store(chain, **fields), retrieve(chain, **fields)):
        assert isinstance(desk.ask(b"one", request), BadRequest)
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


def retain(chain: ChunkChain, chunk_tokens: int) -> wire.TakeLease:
    return wire.TakeLease("p", "retain", "m", 1, PER_CHUNK, bytes(chain.hashes), chunk_tokens=chunk_tokens)


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
Kind: TypeAlias = Callable[[int, wire.Shards], wire.Request]
KINDS: st.SearchStrategy[Kind] = st.sampled_from(
    [
        lambda instance, part: wire.Store(instance, [part]),
        lambda instance, part: wire.Retrieve(instance, [part]),
        lambda instance, part: wire.Compare(instance, [part], 0.1),
    ]
)


class DepotMachine(RuleBasedStateMachine):
    """Clients that do anything in any order and die at any time: each request is answered once, nothing leaks."""

    @initialize(
        pages=st.integers(3, 20), queued=st.integers(1, 6), sessions=st.integers(1, 3), ttl_s=st.sampled_from([0, 3]),
        step_chunks=st.sampled_from([1, 3, 256]),
    )  # fmt: skip
    def begin(self, pages: int, queued: int, sessions: int, ttl_s: int, step_chunks: int) -> None:
        self.desk = Desk(pages, {"max_queued": queued, "max_sessions": sessions, "ttl_s": ttl_s}, is_populated=False)
        self.desk.depot.removals.step_chunks = step_chunks
        self.second = 0
        self.desk.tick(0.0, 1000.0)
        self.asked: list[tuple[bytes, bytes]] = []
        self.lives: Counter[bytes] = Counter()
        self.sent: dict[tuple[bytes, bytes], int] = {}
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
        self.send(client, wire.Unregister(instance))

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
        client=CLIENTS, chain=CHAINS, model=MODELS, request=REQUESTS, instance=INSTANCES,
        shape=st.sampled_from([(1, 0), (1, 0), (2, 0), (2, 1)]), kind=KINDS, data=st.data(),
    )  # fmt: skip
    def transfer(
        self,
        client: bytes,
        chain: ChunkChain,
        model: str,
        request: str,
        shape: tuple[int, int],
        instance: int,
        kind: Kind,
        data: st.DataObject,
    ) -> None:
        first = data.draw(st.integers(0, len(chain) - 1))
        part = shards(chain, first, model=model, request=request, world_size=shape[0], rank=shape[1])
        self.send(client, kind(instance, part))

    @rule(client=CLIENTS, kind=KINDS)
    def transfer_what_all_have(self, client: bytes, kind: Kind) -> None:
        self.send(client, kind(1, shards(prompt("x", 3))))

    @rule(client=CLIENTS, part=st.sampled_from(list(BAD_SHARDS.values())), kind=KINDS)
    def send_nonsense(self, client: bytes, part: wire.Shards, kind: Kind) -> None:
        self.send(client, kind(1, part))

    @rule(client=CLIENTS, operation=st.integers(-1, 30), boot=st.sampled_from([b"\1" * 8, b"another "]))
    def complete_anything(self, client: bytes, operation: int, boot: bytes) -> None:
        if all(each.placement.operation != operation or each.client != client for each in self.desk.copies):
            self.send(client, wire.Complete(operation, boot))
            answer = self.desk.answers.get(self.asked[-1]) if self.asked else None
            assert answer is None or isinstance(answer, KVDepotError) or self.desk.depot.client(client) is None

    @rule(client=CLIENTS, kind=st.sampled_from([wire.Noop, wire.Clear, wire.GetStatus, wire.ChunkSize]))
    def ask_something(self, client: bytes, kind: type[Any]) -> None:
        self.send(client, kind())

    @rule(client=CLIENTS, model=MODELS)
    def forget(self, client: bytes, model: str) -> None:
        self.send(client, wire.ForgetChunks(model))

    @precondition(lambda self: self.desk.depot.removals)
    @rule()
    def go_on(self) -> None:
        self.desk.expire()

    @rule(seconds=st.integers(1, 3))
    def grow_older(self, seconds: int) -> None:
        self.second += seconds
        self.desk.tick(float(self.second), 1000.0 + self.second)
        self.desk.expire()  # of lookups that wait for stores

    @precondition(lambda self: self.desk.prepares)
    @rule(data=st.data(), is_allocated=st.sampled_from([True, True, False]))
    def allocate(self, data: st.DataObject, is_allocated: bool) -> None:
        self.desk.prepare(data.draw(st.sampled_from(self.desk.prepares)), is_allocated)

    @precondition(lambda self: self.desk.copies)
    @rule(data=st.data(), copied=st.sampled_from([True, True, False]))
    def finish(self, data: st.DataObject, copied: bool) -> None:
        self.desk.finish(data.draw(st.sampled_from(self.desk.copies)), copied)

    @rule(client=CLIENTS, has_left=st.booleans())
    def die(self, client: bytes, has_left: bool) -> None:
        if client in self.desk.liveness_files:
            self.desk.liveness_files[client].left = has_left
        self.desk.die(client)
        self.lives[client] += 1

    @invariant()
    def nothing_is_out_of_order(self) -> None:
        if hasattr(self, "desk"):
            self.desk.index.validate()
            self.desk.check_budget()
            self.desk.check_places()
            assert all(each >= 0 for each in (self.desk.depot.operations, self.desk.index.held))

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
        desk.linger()
        desk.assert_empty()
        assert desk.index.namespaces.all() == []
        status = desk.depot.status()
        assert [getattr(status, name) for name in ("clients", "sessions", "instances")] == [0, 0, 0]


TestDepotMachine = DepotMachine.TestCase
TestDepotMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize("parts", [1, wire.MAX_CHUNKS + 1])
def test_requests_for_more_chunks_than_one_may_name_are_refused_and_counted(desk: Desk, parts: int) -> None:
    too_many = bytes(32 * (wire.MAX_CHUNKS + 1)) if parts == 1 else b""
    refused = desk.ask(b"one", wire.Store(1, [wire.Shards("r", "m", 1, 0, bytes(32), 0, too_many, 1)] * parts))
    assert isinstance(refused, Busy) and str(wire.MAX_CHUNKS) in str(refused)
    assert desk.depot.counters["large_requests_refused"] == 1
