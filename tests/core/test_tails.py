"""Chunks with fewer tokens than others, at ends of prompts: found, waited for, outgrown, in tiers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvdepot.errors import BadRequest
from kvdepot.memory.allocator import PAGE
from kvdepot.protocol import wire
from kvdepot.tiers.worker import Load
from tests.core.desk import Desk, group_stores, instance_of, lookup, prompt, shards
from tests.core.host import Host
from tests.tiers.faulty import MemoryTier

STATES = (0, 1)
"""Full attention and a state."""
CHAIN = prompt("a", 4)


@pytest.fixture
def desk() -> Desk:
    desk = Desk()
    desk.hello(b"one")
    desk.register_groups(STATES)
    for request in group_stores(STATES, CHAIN, [range(3), [2]]):
        assert desk.ask(b"one", request) is True
    return desk


def tail(name: str, chunks: int = 3) -> wire.Tail:
    return wire.Tail(chunks, name.encode().ljust(32, b"."))


def stored(end: wire.Tail, continues: bytes = b"", groups: int = 2) -> list[wire.Store]:
    """Stores of a tail's parts in the first groups."""
    part = shards(CHAIN, first=end.chunks, end=end.chunks + 1)
    part = msgspec.structs.replace(part, hashes=end.key, continues=continues)
    return [wire.Store(instance_of(STATES, group), [part]) for group in range(groups)]


def with_tails(*tails: wire.Tail) -> wire.Lookup:
    return msgspec.structs.replace(lookup(CHAIN), tails=tails)


def keep(desk: Desk, *tails: wire.Tail, **options: Any) -> None:
    for request in [request for end in tails for request in stored(end, **options)]:
        assert desk.ask(b"one", request) is True


def test_the_longest_tail_behind_the_whole_chunks_is_found_and_pinned(desk: Desk) -> None:
    keep(desk, tail("short"), tail("long"), tail("before", 2))
    longest = with_tails(tail("unknown"), tail("long"), tail("short"), tail("before", 2))
    assert desk.ask(b"one", longest) == wire.Hit(3, 1)
    held = [chunk.key for each in desk.index.namespaces.all() for chunk in each.chunks.values() if chunk.holds]
    assert held == [tail("long").key] * 2
    assert desk.ask(b"one", with_tails(tail("before", 2))) == 3
    assert desk.ask(b"one", with_tails()) == 3


def test_a_tail_that_lacks_its_state_or_the_chunks_before_it_is_no_hit(desk: Desk) -> None:
    keep(desk, tail("half"), groups=1)
    keep(desk, tail("far", 4))
    assert desk.ask(b"one", with_tails(tail("far", 4), tail("half"))) == 3


def test_a_prompt_of_less_than_a_chunk_is_a_tail_alone(desk: Desk) -> None:
    first = tail("first", 0)
    keep(desk, first)
    assert desk.ask(b"one", msgspec.structs.replace(with_tails(first), hashes=b"")) == wire.Hit(0, 0)


def test_a_pinned_tail_counts_in_the_pin_budget(desk: Desk) -> None:
    alone = msgspec.structs.replace(with_tails(tail("long", 0), tail("short", 0)), hashes=b"")
    keep(desk, tail("short", 0))
    for request in stored(tail("long", 0)):
        desk.send(b"one", request)
    desk.send(b"one", alone)  # waits, and holds the short one
    desk.check_budget()
    desk.settle()
    assert desk.depot.pins.budget.bytes == 2 * PAGE
    desk.ask(b"one", with_tails(tail("short", 0), tail("long", 0)))
    desk.ask(b"one", msgspec.structs.replace(lookup(CHAIN, "other"), tails=(tail("long", 0),)))
    desk.check_budget()
    assert desk.depot.pins.budget.bytes == 4 * PAGE  # of whole chunks, which both have in common
    desk.ask(b"one", wire.EndSession("r"))
    desk.ask(b"one", wire.EndSession("other"))
    assert desk.depot.pins.budget.bytes == 0


def test_a_lookup_waits_for_a_tail_that_is_being_stored(desk: Desk) -> None:
    keep(desk, tail("short"))
    for request in stored(tail("long")):
        desk.send(b"one", request)
    asked = desk.send(b"one", with_tails(tail("long"), tail("short")))
    assert asked not in desk.answers
    desk.settle()
    assert desk.answers[asked] == wire.Hit(3, 0)
    assert desk.ask(b"one", with_tails(tail("short"))) == wire.Hit(3, 0)


def test_a_tail_that_another_continues_is_evicted_first() -> None:
    desk = Desk(pages=12)
    desk.hello(b"one")
    desk.register_groups(STATES)
    for request in group_stores(STATES, CHAIN, [range(3), [2]]):
        desk.ask(b"one", request)
    keep(desk, tail("first"))
    keep(desk, tail("second"), continues=tail("first").key)
    assert desk.ask(b"one", with_tails(tail("first"))) == wire.Hit(3, 0)  # which makes it the one that was used last
    desk.ask(b"one", wire.EndSession("r"))
    assert desk.index.allocator.free_bytes == 4 * PAGE
    for request in group_stores(STATES, prompt("b", 6), [range(6), []]):
        assert desk.ask(b"one", request) is True
    assert not any(tail("first").key in namespace.chunks for namespace in desk.index.namespaces.all())
    assert desk.ask(b"one", with_tails(tail("second"), tail("first"))) == wire.Hit(3, 0)
    desk.ask(b"one", wire.EndSession("r"))
    desk.assert_empty()


@pytest.mark.parametrize("successor", ["second", "first"], ids=["another", "itself"])
def test_a_tail_whose_successor_is_not_stored_is_not_evicted_first(successor: str) -> None:
    """The other one finds no room; a request that stops where its load has ended names itself."""
    desk, other = Desk(pages=12), prompt("b", 6)
    desk.hello(b"one")
    desk.register_groups(STATES)
    for request in [*group_stores(STATES, other, [range(6), []]), *group_stores(STATES, CHAIN, [range(3), [2]])]:
        assert desk.ask(b"one", request) is True
    keep(desk, tail("first"))
    everything = [chunk for namespace in desk.index.namespaces.all() for chunk in namespace.chunks.values()]
    desk.index.hold(everything)
    assert desk.ask(b"one", with_tails(tail("first"))) == wire.Hit(3, 0)
    for request in stored(tail(successor), continues=tail("first").key):
        assert desk.ask(b"one", request) is (successor == "first")
    desk.ask(b"one", wire.EndSession("r"))
    desk.index.release(everything)
    for request in group_stores(STATES, prompt("c", 6), [range(6), []]):
        assert desk.ask(b"one", request) is True
    assert desk.ask(b"one", with_tails(tail("first"))) == wire.Hit(3, 0)
    desk.ask(b"one", wire.EndSession("r"))
    desk.assert_empty()


# -- in tiers


def server(tier: MemoryTier, write: str = "through", pages: int = 64) -> Host:
    """A server, with an engine, in front of a tier that others may have written to."""
    host = Host(pages=pages, tiers=[(f"disk:///d?write={write}", tier)])
    host.tick(0.0, 1000.0)
    host.rest()
    host.hello()
    host.register_groups(STATES)
    return host


def put(host: Host, *tails: wire.Tail) -> None:
    """Store the chunks before tails, and the tails."""
    for request in [*group_stores(STATES, CHAIN, [range(3), [2]]), *(each for end in tails for each in stored(end))]:
        assert host.find(b"one", request) is True


def asks(*tails: wire.Tail) -> wire.Lookup:
    return msgspec.structs.replace(with_tails(*tails), chained=True)


def loaded(host: Host) -> list[bytes]:
    return [part.key for task in host.done if isinstance(task, Load) for part in task.parts]


def test_a_tier_brings_the_longest_tail_and_the_chunks_before_it_alone() -> None:
    tier = MemoryTier()
    put(server(tier), tail("short"), tail("long"))
    host = server(tier)
    assert host.find(b"one", asks(tail("unknown"), tail("long"), tail("short"))) == wire.Hit(3, 1)
    whole = [CHAIN.slice(i, i + 1) for i in range(3)]
    assert sorted(loaded(host)) == sorted([*whole, tail("long").key, tail("long").key])  # not the state before it
    ids = msgspec.structs.replace(shards(CHAIN, first=3, end=4), hashes=tail("long").key)
    assert [host.find(b"one", wire.Retrieve(instance_of(STATES, group), [ids])) for group in range(2)] == [[True]] * 2
    host.find(b"one", wire.EndSession("r"))
    host.done.clear()
    known = msgspec.structs.replace(asks(tail("unknown"), tail("long")), hashes=CHAIN.slice(0, 3))
    assert host.find(b"one", known) == wire.Hit(3, 1) and not host.done  # memory has one
    host.find(b"one", wire.EndSession("r"))
    host.assert_quiet()


def test_a_tail_is_loaded_behind_chunks_in_memory() -> None:
    tier = MemoryTier()
    put(server(tier), tail("end"), tail("first", 0))
    host = server(tier, "off")
    put(host)
    assert host.find(b"one", asks(tail("end"))) == wire.Hit(3, 0) and loaded(host) == [tail("end").key] * 2
    host.find(b"one", wire.EndSession("r"))
    assert host.find(b"one", msgspec.structs.replace(asks(tail("first", 0)), hashes=b"")) == wire.Hit(0, 0)
    host.find(b"one", wire.EndSession("r"))
    host.assert_quiet()


@pytest.mark.parametrize("is_there", [True, False], ids=["corrupt", "absent"])
def test_a_tier_with_half_a_tail_brings_the_whole_chunks(is_there: bool) -> None:
    tier = MemoryTier()
    put(server(tier))
    names = {*tier.objects}
    put(server(tier), tail("end"))
    broken = sorted({*tier.objects} - names)[0]
    if is_there:
        tier.objects[broken] = bytes(len(tier.objects[broken]))
    else:
        del tier.objects[broken]
    host = server(tier)
    assert host.find(b"one", asks(tail("end"))) in ((0, 3) if is_there else (3,))
    host.find(b"one", wire.EndSession("r"))
    assert host.find(b"one", asks(tail("end"))) == 3
    host.find(b"one", wire.EndSession("r"))
    host.assert_quiet()


def test_tails_that_are_evicted_go_to_a_tier_first() -> None:
    host = server(MemoryTier(), "on_evict", pages=16)
    ends = [tail(f"{number}") for number in range(12)]
    put(host, *ends)
    for end in ends:
        assert host.find(b"one", asks(end)) == wire.Hit(3, 0)
        host.find(b"one", wire.EndSession("r"))
    host.assert_quiet()


@pytest.mark.parametrize(
    "tails", [[wire.Tail(5, bytes(32))], [wire.Tail(-1, bytes(32))], [wire.Tail(0, b"")], [tail("a")] * 65]
)
def test_tails_that_follow_no_chunk_of_their_lookup_are_refused(desk: Desk, tails: list[wire.Tail]) -> None:
    assert isinstance(desk.ask(b"one", with_tails(*tails)), BadRequest)
