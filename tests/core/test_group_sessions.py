"""The core with models of several KV cache groups: registrations, stores, lookups, pins and what the status says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvdepot.errors import BadRequest, Busy, LayoutError
from kvdepot.keys import ChunkChain
from kvdepot.memory.allocator import PAGE
from kvdepot.memory.copier import Mapped
from kvdepot.protocol import wire
from kvdepot.protocol.layout import Layout
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
    store,
)
from tests.core.groups import SHAPES, Reaches, fingerprint

HYBRID = (0, 2)


@pytest.fixture
def desk() -> Desk:
    desk = Desk()
    desk.hello()
    return desk


def put(desk: Desk, chain: ChunkChain, reaches: Reaches = HYBRID, *args: Any, **options: Any) -> None:
    for request in group_stores(reaches, chain, *args, **options):
        assert desk.ask(b"one", request) is True


def there(desk: Desk, chain: ChunkChain) -> list[list[int]]:
    """By group, the numbers of the chunks whose parts exist."""
    keys = [chain.slice(i, i + 1) for i in range(len(chain))]
    return [[i for i, key in enumerate(keys) if key in each.chunks] for each in desk.index.namespaces.all()]


# -- registering


@pytest.mark.parametrize("reaches", SHAPES)
def test_all_groups_of_all_ranks_are_one_model(desk: Desk, reaches: Reaches) -> None:
    desk.register_groups(reaches, world_size=2, chunk_tokens=16)
    (told,) = desk.depot.status().namespaces
    assert (told.model, told.world_size, told.chunk_tokens, told.engines) == ("m", 2, 16, 2)
    assert told.groups == [GroupStatus(reach, 0, 0) for reach in reaches]
    assert desk.depot.status().instances == 2 * len(reaches)
    # The model stays until the last of its groups has left.
    numbers = [instance_of(reaches, group, rank) for group in range(len(reaches)) for rank in range(2)]
    for number in numbers:
        assert len(desk.index.namespaces.all()) == len(reaches)
        assert desk.ask(b"one", wire.Unregister(number)) is None
    assert desk.index.namespaces.all() == []
    assert all(mapped.closed for mapped in desk.mapped)


def test_a_group_whose_tensors_cannot_be_mapped_leaves_the_others_as_they_are() -> None:
    def refuse(given: Layout) -> Mapped:
        if given.fingerprint == fingerprint(1, 0):
            raise LayoutError("no such file")
        return desk.map(given)

    desk = Desk(map_layout=refuse)
    desk.hello()
    full, window = group_requests(HYBRID)
    assert isinstance(desk.ask(b"one", window), LayoutError)
    assert desk.index.namespaces.all() == []
    assert desk.ask(b"one", full) is None
    assert isinstance(desk.ask(b"one", window), LayoutError)
    assert [each.live for each in desk.index.namespaces.all()] == [1, 0]
    assert desk.depot.status().instances == 1


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
BAD = {
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


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD.keys())
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


def test_a_model_of_more_groups_than_namespaces_are_allowed_is_refused_and_leaves_none() -> None:
    desk = Desk(settings={"max_namespaces": 3})
    desk.hello()
    desk.register_groups(HYBRID)
    asked = desk.send(b"one", msgspec.structs.replace(group_requests(HYBRID, model="n")[0], instance=9))
    assert isinstance(desk.answers[asked], Busy) and not desk.tasks
    assert {each.model for each in desk.index.namespaces.all()} == {"m"}
    assert desk.depot.counters["namespaces_refused"] == 1


def test_equal_models_of_two_tenants_are_two() -> None:
    desk = Desk()
    for user in ("ann", "bob"):
        desk.hello(user.encode(), user)
        desk.register_groups(HYBRID, client=user.encode())
    chain = prompt("a", 2)
    for request in group_stores(HYBRID, chain):
        assert desk.ask(b"ann", request) is True
    assert (desk.ask(b"ann", lookup(chain)), desk.ask(b"bob", lookup(chain))) == (2, 0)
    assert len(desk.index.namespaces.all()) == 4
    assert [each.tenant for each in desk.depot.status("bob").namespaces] == ["bob"]


# -- stores


@pytest.mark.parametrize(
    "fields", [{"model": "n"}, {"rank": 1, "world_size": 2}, {"world_size": 2}, {"blocks": list(range(8))}]
)
def test_a_transfer_for_another_model_or_rank_than_the_registered_one_is_refused_and_nothing_of_it_is_done(
    desk: Desk, fields: dict[str, Any]
) -> None:
    desk.register_groups(HYBRID)
    known, chain = desk.index.namespaces.all(), prompt("a", 2)
    for request in (store(chain, **fields), retrieve(chain, **fields)):
        asked = desk.send(b"one", request)
        assert isinstance(desk.answers[asked], BadRequest) and not desk.tasks
    assert desk.index.namespaces.all() == known
    desk.assert_empty()


def test_a_client_that_stores_other_than_it_declared_gets_shorter_prefixes_never_wrong_ones(desk: Desk) -> None:
    desk.register_groups(HYBRID)
    chain = prompt("a", 5)
    # A window one part short, and full attention without its beginning.
    put(desk, chain, HYBRID, [range(5), [4]])
    assert desk.ask(b"one", lookup(chain, "r1")) == 0
    other = prompt("b", 5)
    put(desk, other, HYBRID, [range(1, 5), range(3, 5)])
    assert desk.ask(b"one", lookup(other, "r2")) == 0
    assert desk.ask(b"one", store(other, instance_of(HYBRID, 0), end=1)) is True
    assert desk.ask(b"one", lookup(other, "r2")) == 5
    desk.ask(b"one", wire.EndSession("r2"))
    desk.assert_empty()


def test_a_store_that_dies_half_way_leaves_only_whole_parts(desk: Desk) -> None:
    desk.register_groups(HYBRID)
    chain = prompt("a", 3)
    assert desk.ask(b"one", store(chain, instance_of(HYBRID, 0))) is True
    desk.send(b"one", store(chain, instance_of(HYBRID, 1), first=1, ticket=7))
    for copy in desk.copies():
        desk.finish(copy, False)
    assert there(desk, chain) == [[0, 1, 2], []]
    assert desk.ask(b"one", lookup(chain)) == 0
    desk.assert_empty()


# -- lookups and pins


def test_a_prefix_ends_where_every_group_can_be_resumed_on_every_rank(desk: Desk) -> None:
    desk.register_groups(HYBRID, world_size=2)
    chain = prompt("a", 4)
    steps = [
        (0, 0, 0, 4, 0), (0, 1, 0, 4, 0), (1, 0, 0, 4, 0), (1, 1, 0, 1, 1), (1, 1, 2, 4, 4),
    ]  # fmt: skip
    for group, rank, first, end, expected in steps:
        request = store(chain, instance_of(HYBRID, group, rank), first=first, end=end, world_size=2, rank=rank)
        assert desk.ask(b"one", request) is True
        assert desk.ask(b"one", lookup(chain, world_size=2, readers=2)) == expected
    assert desk.ask(b"one", lookup(prompt("a", 3), world_size=2, readers=2)) == 1
    desk.ask(b"one", wire.EndSession("r"))
    desk.assert_empty()


@pytest.mark.parametrize("reaches", SHAPES)
def test_a_lookup_pins_the_parts_of_its_boundary_and_no_others(desk: Desk, reaches: Reaches) -> None:
    desk.register_groups(reaches)
    chain = prompt("a", 5)
    put(desk, chain, reaches, [range(5)] * len(reaches))
    assert desk.ask(b"one", lookup(prompt("a", 4))) == 4
    desk.ask(b"one", wire.Clear())
    assert there(desk, chain) == [list(range(4))[-reach:] if reach else list(range(4)) for reach in reaches]
    assert desk.ask(b"one", lookup(prompt("a", 4), "again")) == 4
    for request in ("r", "again"):
        desk.ask(b"one", wire.EndSession(request))
    desk.index.validate()
    assert desk.index.held == 0
    desk.ask(b"one", wire.Clear())
    assert there(desk, chain) == [[]] * len(reaches)


def test_the_pins_of_a_request_go_once_every_rank_has_retrieved_every_part_that_it_needs(desk: Desk) -> None:
    desk.register_groups(HYBRID, world_size=2)
    chain = prompt("a", 3)
    put(desk, chain, world_size=2)
    assert desk.ask(b"one", lookup(chain, world_size=2, readers=2)) == 3
    assert desk.depot.status().engines[0].pinned_chunks == 5
    for group, rank in ((0, 0), (1, 0), (1, 1), (0, 1)):
        assert desk.index.held > 0
        first = 1 if group else 0
        request = retrieve(chain, instance_of(HYBRID, group, rank), world_size=2, rank=rank, first=first)
        assert desk.ask(b"one", request) == [True] * (3 - first)
    assert desk.index.held == 0 and desk.depot.status().engines[0].pinned_chunks == 0
    assert desk.depot.usages.tokens.reused == 3
    desk.assert_empty()


def test_what_not_all_ranks_have_retrieved_counts_as_reused_by_none(desk: Desk) -> None:
    desk.register_groups(HYBRID, world_size=2, chunk_tokens=34)
    chain = prompt("a", 3)
    put(desk, chain, world_size=2)
    asked = msgspec.structs.replace(lookup(chain, world_size=2, readers=2), chunk_tokens=34)
    assert desk.ask(b"one", asked) == 3
    assert desk.ask(b"one", retrieve(chain, 1, world_size=2, end=1)) == [True]
    desk.ask(b"one", wire.EndSession("r"))
    assert desk.depot.usages.tokens.reused == 0 and desk.index.held == 0


def test_a_part_that_is_lost_after_the_lookup_is_a_failed_retrieve_of_that_part(desk: Desk) -> None:
    desk.register_groups(HYBRID)
    chain = prompt("a", 3)
    put(desk, chain)
    assert desk.ask(b"one", lookup(chain)) == 3
    window = desk.index.namespaces.all()[1]
    desk.index.mark_corrupt(window.chunks[chain.slice(1, 2)], 0)
    assert desk.ask(b"one", retrieve(chain, instance_of(HYBRID, 0))) == [True] * 3
    assert desk.ask(b"one", retrieve(chain, instance_of(HYBRID, 1), first=1)) == [False, True]
    assert desk.index.held == 0
    assert desk.ask(b"one", lookup(chain, "r2")) == 0
    put(desk, chain)
    assert desk.ask(b"one", lookup(chain, "r2")) == 3


def test_pins_of_all_groups_count_towards_the_limit() -> None:
    desk = Desk(settings={"max_pins": 11})
    desk.hello()
    desk.register_groups(HYBRID)
    one, two = prompt("a", 4), prompt("b", 4)
    for chain in (one, two):
        put(desk, chain)
    assert desk.ask(b"one", lookup(one, "r1")) == 4
    assert isinstance(desk.ask(b"one", lookup(two, "r2")), Busy), "6 of 11 are taken, and 6 more are needed"
    assert desk.depot.counters["pins_refused"] == 1
    held = desk.index.held
    assert desk.ask(b"one", lookup(one, "r1")) == 4, "the same ones, anew"
    assert desk.index.held == held
    desk.ask(b"one", wire.EndSession("r1"))
    assert desk.ask(b"one", lookup(two, "r2")) == 4
    desk.ask(b"one", wire.EndSession("r2"))
    desk.assert_empty()


def test_a_second_lookup_of_a_request_moves_its_pins_to_the_new_boundary(desk: Desk) -> None:
    desk.register_groups(HYBRID)
    chain = prompt("a", 6)
    put(desk, chain, HYBRID, [range(6), range(6)])
    assert desk.ask(b"one", lookup(chain)) == 6
    assert desk.ask(b"one", lookup(prompt("a", 3))) == 3
    desk.ask(b"one", wire.Clear())
    assert there(desk, chain) == [[0, 1, 2], [1, 2]]


# -- leases


def pin(chain: ChunkChain, name: str = "p", **options: Any) -> wire.Lease:
    return wire.Lease(name, "retain", "m", options.pop("world_size", 1), PER_CHUNK, bytes(chain.hashes), **options)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_lease_keeps_what_its_boundary_needs_and_tells_its_bytes(desk: Desk, world_size: int) -> None:
    desk.register_groups(HYBRID, world_size)
    chain = prompt("a", 4)
    put(desk, chain, HYBRID, [range(4), range(4)], world_size)
    assert desk.ask(b"one", pin(chain, world_size=world_size)) == 4
    status = desk.depot.status()
    assert (status.lease_count, status.leased_bytes) == (1, (4 + 2) * world_size * PAGE)
    assert [(each.name, each.bytes) for each in desk.depot.leases.listed("", 0.0)] == [("p", 6 * world_size * PAGE)]
    desk.ask(b"one", wire.Clear())
    assert there(desk, chain) == [[0, 1, 2, 3], [2, 3]]
    assert desk.ask(b"one", wire.EndLease("p")) is True
    assert desk.depot.status().leased_bytes == 0
    desk.assert_empty()


def test_leases_may_take_half_of_the_arena_with_all_their_groups() -> None:
    desk = Desk(pages=22)
    desk.hello()
    desk.register_groups(HYBRID)
    one, two = prompt("a", 4), prompt("b", 4)
    for chain in (one, two):
        put(desk, chain)
    assert desk.ask(b"one", pin(one, "p1")) == 4
    assert isinstance(desk.ask(b"one", pin(two, "p2")), Busy), "6 of 11 pages are taken"
    assert desk.ask(b"one", pin(prompt("a", 4), "p1")) == 4
    desk.ask(b"one", wire.EndLease("p1"))
    assert desk.ask(b"one", pin(two, "p2")) == 4
    desk.ask(b"one", wire.EndLease("p2"))
    desk.assert_empty()


def test_to_forget_a_model_ends_its_leases_and_removes_every_group(desk: Desk) -> None:
    desk.register_groups(HYBRID)
    chain = prompt("a", 4)
    put(desk, chain)
    assert desk.ask(b"one", pin(chain)) == 4
    assert desk.ask(b"one", wire.Count("m")) == [6, 6 * PAGE]
    assert desk.ask(b"one", wire.Forget("m")) == {"memory": 6}
    assert there(desk, chain) == [[], []] and desk.depot.status().lease_count == 0
    put(desk, chain)
    assert desk.ask(b"one", lookup(chain)) == 4


def test_parts_that_are_too_old_are_no_boundary() -> None:
    desk = Desk(settings={"ttl_s": 10})
    desk.hello()
    desk.register_groups(HYBRID)
    chain = prompt("a", 4)
    desk.tick(1.0, 100.0)
    put(desk, chain, HYBRID, [range(4), []])
    desk.tick(2.0, 105.0)
    put(desk, chain, HYBRID, [[], range(2, 4)])
    desk.tick(3.0, 109.0)
    assert desk.ask(b"one", lookup(chain)) == 4
    desk.tick(4.0, 110.0)
    assert desk.ask(b"one", lookup(chain, "r2")) == 0
    assert desk.ask(b"one", retrieve(chain, instance_of(HYBRID, 0), request="r3")) == [True] * 4, "it is still pinned"
    desk.ask(b"one", wire.EndSession("r"))
    desk.tick(5.0, 115.0)
    desk.index.validate()
    assert there(desk, chain) == [[], []] and desk.depot.counters["expired_chunks"] == 6


# -- chunk sizes, and what the status says


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


def test_a_model_has_as_many_chunks_as_the_group_that_has_most(desk: Desk) -> None:
    reaches = (2, 0)
    desk.register_groups(reaches, chunk_tokens=34)
    put(desk, prompt("a", 5), reaches)
    (told,) = desk.depot.status().namespaces
    assert told.chunks == 5 and [group.chunks for group in told.groups] == [2, 5]
    assert desk.depot.status().cached_tokens == 5 * 34


def test_a_lookup_is_asked_of_its_own_chunk_size_only(desk: Desk) -> None:
    desk.register_groups(HYBRID, chunk_tokens=34)
    chain = prompt("a", 3)
    put(desk, chain)
    request = lookup(chain)
    for chunk_tokens, found in ((34, 3), (0, 3), (17, 0)):
        assert desk.ask(b"one", msgspec.structs.replace(request, chunk_tokens=chunk_tokens)) == found
        assert desk.ask(b"one", pin(chain, chunk_tokens=chunk_tokens)) == found
    for chunk_tokens in (-1, wire.MAX_CHUNK_TOKENS + 1):
        assert isinstance(desk.ask(b"one", msgspec.structs.replace(request, chunk_tokens=chunk_tokens)), BadRequest)
        assert isinstance(desk.ask(b"one", pin(chain, chunk_tokens=chunk_tokens)), BadRequest)


def test_two_chunk_sizes_of_one_model_never_see_each_others_parts(desk: Desk) -> None:
    other = desk.hello(b"other")
    desk.register_groups(HYBRID, chunk_tokens=16)
    desk.register_groups(HYBRID, client=other, chunk_tokens=32)
    chain = prompt("a", 3)
    put(desk, chain)
    request = lookup(chain)
    assert desk.ask(b"one", msgspec.structs.replace(request, chunk_tokens=16)) == 3
    assert desk.ask(other, msgspec.structs.replace(request, chunk_tokens=32)) == 0
    assert desk.ask(other, retrieve(chain, instance_of(HYBRID, 0))) == [False] * 3
