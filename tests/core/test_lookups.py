"""Lookups that wait for stores in progress: when they wait, when they stop, and that each is answered once."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvdepot.core.index.chunk import Chunk
from kvdepot.core.index.matching import coming_part
from kvdepot.core.lookups import lookups
from kvdepot.core.lookups.phases import STORE_S, SearchPhase
from kvdepot.errors import BadRequest
from kvdepot.memory.allocator import PAGE
from kvdepot.protocol import wire
from kvdepot.tiers.worker import Load
from tests.conftest import clear
from tests.core.desk import PER_CHUNK, Desk, group_stores, instance_of, lookup, prompt, retrieve, store
from tests.core.groups import SHAPES, Rack, Reaches, deepest, needed
from tests.core.host import look, new_host
from tests.core.shelf import keys
from tests.tiers.faulty import MemoryTier

HYBRID = (0, 2)
Asked = tuple[bytes, bytes]


@pytest.fixture
def desk() -> Desk:
    desk = Desk()
    desk.register(desk.hello(b"one"))
    desk.hello(b"two")
    return desk


def begin(desk: Desk, request: wire.Store, client: bytes = b"one") -> Asked:
    """A store whose copies wait until the test lets them end."""
    asked = desk.send(client, request)
    assert asked not in desk.answers and desk.copies
    return asked


def later(desk: Desk, seconds: float) -> None:
    desk.now += seconds
    desk.expire()


def allow(desk: Desk, phase: SearchPhase, most: int) -> None:
    """Limit the number of searches in a phase."""
    rows = desk.depot.lookups._rows
    rows[phase] = rows[phase]._replace(most=most)


def unheard(desk: Desk, asked: Asked) -> bool:
    return asked not in desk.answers and desk.unanswered[asked] == 1


def assert_quiet(desk: Desk) -> None:
    for client in (b"one", b"two"):
        if desk.depot.client(client) is not None:
            desk.send(client, wire.EndSession("r"))
    assert (desk.index.held, desk.index.reserved, len(desk.depot.lookups)) == (0, 0, 0)
    desk.index.validate()


# -- what is waited for


def test_a_lookup_waits_for_the_store_of_its_prompt_and_pins_what_that_brings(desk: Desk) -> None:
    chain = prompt("a", 3)
    begin(desk, store(chain))
    asked = desk.send(b"two", lookup(chain))
    assert unheard(desk, asked)
    desk.settle()
    assert desk.answers[asked] == 3
    assert desk.depot.counters["awaited_chunks"] == 3
    assert desk.index.held == 1  # the pin
    assert desk.ask(b"one", retrieve(chain)) == [True] * 3
    assert_quiet(desk)


def test_a_later_step_of_the_prompt_that_is_not_being_stored_yet_is_not_waited_for(desk: Desk) -> None:
    chain = prompt("a", 6)
    begin(desk, store(chain, end=2))
    asked = desk.send(b"two", lookup(chain))
    desk.settle()
    assert desk.answers[asked] == 2


ABSENT, COMING, THERE = range(3)
CHUNKS = 6


@settings(max_examples=300, deadline=None)
@given(
    reaches=st.sampled_from([(0,), *SHAPES]),
    parts=st.lists(st.sampled_from([ABSENT, COMING, THERE, THERE]), min_size=3 * CHUNKS, max_size=3 * CHUNKS),
    ranks=st.integers(1, 2),
)
def test_a_part_is_waited_for_exactly_if_stores_in_progress_make_the_prefix_longer(
    reaches: Reaches, parts: list[int], ranks: int
) -> None:
    rack, chain = Rack(reaches, world_size=ranks, pages=128), keys("a", CHUNKS)
    state = {(group, key): parts[group * CHUNKS + i] for group in range(len(reaches)) for i, key in enumerate(chain)}
    for group in range(len(reaches)):
        for number, key in enumerate(chain):
            for rank in range(ranks if state[group, key] else 0):
                chunk = rack.reserve(group, chain, number, rank)
                assert chunk is not None
                if state[group, key] == THERE or rank:  # one of two ranks still writes
                    rack.index.seal(chunk, rank)
    now = deepest(reaches, chain, lambda group, key: state[group, key] == THERE)
    then = deepest(reaches, chain, lambda group, key: state[group, key] != ABSENT)
    assert rack.boundary(chain) == now
    part = coming_part(rack.namespaces[0], b"".join(chain), now)
    assert (part is not None) == (then > now)
    if part is not None:
        assert state[part.namespace.group, part.key] == COMING
        assert (part.namespace.group, part.key) in needed(reaches, chain, then)


# -- how long


def test_a_rank_whose_store_hangs_stays_late_when_the_other_has_stored() -> None:
    host = new_host(world_size=2)
    chain = prompt("a", 2)
    for rank in range(2):
        begin(host, store(chain, instance=rank + 1, world_size=2, rank=rank))
    hanging = host.copies[1]
    first = host.send(b"one", lookup(chain, "first", world_size=2))
    assert unheard(host, first)
    later(host, STORE_S)
    assert host.answers[first] == 0
    host.finish(host.copies[0])
    assert host.copies == [hanging]
    assert host.answers[host.send(b"one", lookup(chain, "second", world_size=2))] == 0
    host.settle()
    assert host.answers[host.send(b"one", lookup(chain, "third", world_size=2))] == 2


def test_a_store_that_hangs_delays_one_lookup_to_its_deadline_and_no_later_one(desk: Desk) -> None:
    chain = prompt("a", 4)
    assert desk.ask(b"one", store(chain, end=1)) is True
    begin(desk, store(chain))
    first = desk.send(b"two", lookup(chain, "first"))
    later(desk, STORE_S / 2)
    second = desk.send(b"two", lookup(chain, "second"))
    assert desk.depot.next_deadline() == STORE_S
    later(desk, STORE_S / 2)
    assert desk.answers[first] == 1 and unheard(desk, second)
    assert desk.answers[desk.send(b"two", lookup(chain, "third"))] == 1
    later(desk, STORE_S / 2)
    assert desk.answers[second] == 1
    assert desk.depot.counters["late_lookups"] == 2
    assert desk.depot.next_deadline() == float("inf")
    desk.settle()  # it ends after all
    assert desk.answers[desk.send(b"two", lookup(chain, "fourth"))] == 4
    for request in ("first", "second", "third", "fourth"):
        desk.send(b"two", wire.EndSession(request))
    assert_quiet(desk)


def test_the_deadline_counts_from_the_first_store_that_was_waited_for(desk: Desk) -> None:
    chain = prompt("a", 6)
    for first in (0, 2, 4):
        begin(desk, store(chain, first=first, end=first + 2))
    asked = desk.send(b"two", lookup(chain))
    later(desk, STORE_S / 2)
    other = desk.send(b"two", lookup(chain, "other"))
    desk.finish(desk.copies[0])
    assert unheard(desk, asked) and desk.depot.next_deadline() == STORE_S
    later(desk, STORE_S / 2)
    assert desk.answers[asked] == 2 and unheard(desk, other)


def test_not_more_than_so_many_lookups_wait_at_a_time(desk: Desk) -> None:
    allow(desk, SearchPhase.STORES, 2)
    chain = prompt("a", 6)
    for first in (0, 3):
        begin(desk, store(chain, first=first, end=first + 3))
    asked = [desk.send(b"two", lookup(chain, f"r{i}")) for i in range(3)]
    assert [unheard(desk, each) for each in asked] == [True, True, False] and desk.answers[asked[2]] == 0
    desk.finish(desk.copies[0])  # those that wait already may go on waiting
    assert [unheard(desk, each) for each in asked[:2]] == [True, True]
    desk.settle()
    assert [desk.answers[each] for each in asked[:2]] == [6, 6]


# -- how it ends otherwise


@pytest.mark.parametrize("ends", [wire.EndSession("r"), lookup(prompt("b", 1))])
def test_a_lookup_whose_session_ends_or_that_is_repeated_finds_nothing(desk: Desk, ends: wire.Request) -> None:
    chain = prompt("a", 4)
    begin(desk, store(chain))
    asked = desk.send(b"two", lookup(chain))
    desk.send(b"two", ends)
    assert desk.answers[asked] == 0
    desk.settle()
    assert_quiet(desk)


def test_a_server_that_ends_answers_with_what_it_has(desk: Desk) -> None:
    chain = prompt("a", 4)
    assert desk.ask(b"one", store(chain, end=1)) is True
    begin(desk, store(chain))
    asked = desk.send(b"two", lookup(chain))
    desk.act(desk.depot.stop_waiting())
    assert desk.answers[asked] == 1
    desk.settle()
    assert_quiet(desk)


def test_chunks_that_a_waiting_lookup_has_found_are_not_evicted() -> None:
    desk = Desk(pages=8)
    desk.register_groups(HYBRID, client=desk.hello(b"one"))
    chain = prompt("a", 4)
    for request in group_stores(HYBRID, chain, [[0, 1], [0, 1]]):
        assert desk.ask(b"one", request) is True
    for request in group_stores(HYBRID, chain, [[2, 3], [2, 3]]):
        begin(desk, request)
    asked = desk.send(b"one", lookup(chain))
    full = desk.send(b"one", store(prompt("b", 1)))
    assert desk.answers[full] is False
    while desk.copies:
        desk.finish(desk.copies[0], False)
    assert desk.answers[asked] == 2


def test_a_lease_waits_too_and_ends_with_its_name(desk: Desk) -> None:
    chain = prompt("a", 3)
    begin(desk, store(chain))
    asked, gone = (
        desk.send(b"two", wire.TakeLease(name, "retain", "m", 1, PER_CHUNK, bytes(chain.hashes)))
        for name in ("name", "gone")
    )
    assert unheard(desk, asked) and unheard(desk, gone)
    desk.send(b"two", wire.EndLease("gone"))
    assert desk.answers[gone] == 0
    desk.die(b"two")
    desk.settle()
    assert asked not in desk.answers and desk.depot.status().lease_count == 0
    assert_quiet(desk)


# -- beside tiers


def test_after_a_store_what_is_still_missing_comes_from_the_tiers() -> None:
    tier = MemoryTier()
    here, there = new_host(tier), new_host(tier)
    chain = prompt("a", 5)
    here.find(b"one", store(chain))
    assert here.find(b"one", look(chain)) == 5
    begin(there, store(chain, end=2))
    asked = there.send(b"one", look(chain))
    assert unheard(there, asked) and not there.tier_tasks
    there.settle()
    assert unheard(there, asked) and "Find" in there.kinds()
    there.rest()
    assert there.answers[asked] == 5
    counters = there.depot.counters
    assert (counters["awaited_chunks"], counters["tier_hit_chunks"], counters["lookups"]) == (2, 3, 1)
    there.ask(b"one", wire.EndSession("r"))
    there.assert_quiet()


def test_after_a_store_that_hangs_the_tiers_are_asked_for_the_rest() -> None:
    tier = MemoryTier()
    there = new_host(tier)
    chain = prompt("a", 3)
    begin(there, store(chain))
    asked = there.send(b"one", look(chain))
    there.pass_time(STORE_S)
    assert unheard(there, asked) and there.kinds() == ["Find"]
    there.work()
    assert there.answers[asked] == 0


def test_a_lookup_that_names_a_chunk_twice_holds_it_no_longer_than_it_waits(desk: Desk) -> None:
    first, second = bytes(prompt("a", 1).hashes), bytes(prompt("b", 1).hashes)
    desk.ask(b"one", store(prompt("a", 1)))
    begin(desk, store(prompt("b", 1)))
    asked = desk.send(b"two", replace(lookup(prompt("a", 1)), hashes=2 * first + second))
    assert unheard(desk, asked)
    desk.settle()
    assert asked in desk.answers
    assert_quiet(desk)


# -- room


def queued(request: wire.Lookup) -> wire.Lookup:
    return msgspec.structs.replace(request, queued=True)


def go_on(desk: Desk) -> None:
    """Turns of the loop without a message, as long as there is something to do."""
    while not desk.depot.next_deadline():
        desk.expire()
    desk.check_budget()


def kept(desk: Desk) -> int:
    """Pages that sessions keep, or that are on their way in."""
    sessions = [session for client in desk.depot.clients for session in client.sessions.values()]
    chunks: list[Chunk | None] = [chunk for session in sessions for chunk in session.chunks]
    for chunk in chunks:  # which grows
        chunks += [chunk.parent] if chunk is not None else []
    return len({id(chunk) for chunk in chunks if chunk is not None}) + desk.index.reserved


def test_a_deep_queue_on_a_slow_tier_is_bounded_and_nothing_is_lost_or_starved() -> None:
    requests, length, pages = 500, 8, 256
    host = new_host(MemoryTier(), pages=pages, lookup_s=0.2)
    host.hello(b"two")
    chains = [prompt(f"p{i}", length) for i in range(requests)]
    for chain in chains:
        host.find(b"one", store(chain))
    host.done.clear()
    asked = [host.send(b"two", queued(look(chain, f"r{i}"))) for i, chain in enumerate(chains)]
    left = dict.fromkeys(range(requests))
    for _ in range(10 * requests):
        for _ in host.tier_tasks[:4]:  # what the tier does in that time
            host.work()
        host.pass_time(0.05)
        go_on(host)
        assert kept(host) <= pages * 3 // 8, "what the queue keeps leaves too little for stores"
        for i in [i for i in left if asked[i] in host.answers][:2]:  # the engine begins two a step
            # What memory has overtakes what tiers load, but nothing overtakes more than may be kept.
            assert host.answers[asked[i]] == length and i in list(left)[: pages * 3 // 8 // length]
            assert host.ask(b"one", retrieve(chains[i], request=f"r{i}")) == [True] * length
            assert host.ask(b"one", store(prompt(f"new {i}", 4))) is True
            host.send(b"two", wire.EndSession(f"r{i}"))
            del left[i]
    assert not left
    loads = Counter(part.key for task in host.done if isinstance(task, Load) for part in task.parts)
    assert not host.depot.counters["dropped_chunks"] and max(loads.values()) == 1, "what a tier brought was lost"
    host.assert_quiet()


def with_prompts(*names: str, chunks: int = 24, pages: int = 72) -> Desk:
    """A depot that has prompts, and of whose memory lookups may keep three quarters."""
    desk = Desk(pages=pages)
    desk.register(desk.hello(b"one"))
    desk.hello(b"two")
    for name in names:
        assert desk.ask(b"one", store(prompt(name, chunks))) is True
    return desk


def test_a_lookup_without_room_gets_what_fits_after_half_a_second() -> None:
    desk = with_prompts("a", "b", "c")
    for name in "abb":
        assert desk.ask(b"one", lookup(prompt(name, 24), f"{name} {desk.index.held}")) == 24
    late = desk.send(b"one", lookup(prompt("c", 24), "c"))
    assert unheard(desk, late)
    assert desk.ask(b"one", lookup(prompt("a", 24), "another")) == 24, "it is kept anyway"
    assert desk.ask(b"two", lookup(prompt("c", 24), "c")) == 24, "each client may have one"
    desk.send(b"two", wire.EndSession("c"))
    later(desk, STORE_S)
    assert desk.answers[late] == 6 and kept(desk) == 54
    assert desk.depot.counters["shortened_lookups"] == 1 and not desk.depot.counters["late_lookups"]
    assert desk.ask(b"one", wire.Why("c")).lookups[-1].end == "room"


@pytest.mark.parametrize("end", ["retrieve", "session", "death"])
def test_a_request_that_waits_no_more_leaves_room_for_the_next(end: str) -> None:
    desk = with_prompts("a", "b", "c")
    desk.hello(b"three")
    assert desk.ask(b"one", lookup(prompt("a", 24), "a")) == desk.ask(b"three", lookup(prompt("b", 24), "b")) == 24
    desk.ask(b"two", lookup(prompt("a", 1), "short"))
    third = desk.send(b"two", lookup(prompt("c", 24), "c"))
    assert unheard(desk, third)
    if end == "retrieve":
        desk.send(b"one", retrieve(prompt("b", 24), request="b"))
    elif end == "session":
        desk.send(b"three", wire.EndSession("b"))
    else:
        desk.die(b"three")
    go_on(desk)
    assert desk.answers[third] == 24


def test_a_prompt_larger_than_all_may_keep_is_found_whole_when_its_client_has_none() -> None:
    desk = with_prompts("a", chunks=32, pages=40)
    for request in (lookup(prompt("a", 32), "r1"), queued(lookup(prompt("a", 32), "r2"))):
        assert desk.ask(b"one", request) == 32
        desk.send(b"one", wire.EndSession(request.request))


def test_a_queue_is_answered_in_order_and_leaves_room_for_other_clients() -> None:
    desk = with_prompts("a", "b", "c", chunks=12, pages=40)
    first, second, third = (desk.send(b"one", queued(lookup(prompt(name, 12), name))) for name in "abc")
    assert desk.answers[first] == 12
    later(desk, 100 * STORE_S)
    assert unheard(desk, second) and unheard(desk, third)
    other = desk.send(b"two", queued(lookup(prompt("b", 12), "b")))
    assert desk.answers[other] == 12
    assert desk.ask(b"one", queued(lookup(prompt("new", 3), "new"))) == 0, "it needs no room"
    desk.ask(b"one", retrieve(prompt("a", 12), request="a"))
    go_on(desk)
    assert desk.answers[second] == 12
    desk.send(b"one", wire.EndSession("b"))
    go_on(desk)
    assert desk.answers[third] == 12


def test_a_queue_is_answered_by_place_then_arrival_and_other_queues_are_not_asked() -> None:
    desk = with_prompts("a", "b", "c", "d", chunks=12, pages=60)
    places = {"a": 0, "b": 5, "c": 5, "d": -3}
    asked = [desk.send(b"one", replace(queued(lookup(prompt(x, 12), x)), place=places[x])) for x in "abcd"]
    assert [desk.answers.get(each) for each in asked] == [12, None, None, None]
    other = desk.send(b"two", replace(queued(lookup(prompt("a", 12), "a")), place=wire.MAX_PLACE))
    assert desk.answers[other] == 12
    heard = ["a"]
    for ended, next_one in (("a", "d"), ("d", "b"), ("b", "c")):
        desk.send(b"one", wire.EndSession(ended))
        go_on(desk)
        heard.append(next_one)
        assert sorted(x for x, each in zip("abcd", asked, strict=True) if each in desk.answers) == sorted(heard)


def test_a_queued_lookup_goes_on_when_the_one_before_it_is_given_up() -> None:
    desk = with_prompts(pages=16)
    for name, chunks in (("a", 4), ("b", 6), ("c", 1)):
        desk.ask(b"one", store(prompt(name, chunks)))
    _, _, small = (desk.send(b"one", queued(lookup(prompt(*each), each[0]))) for each in (("a", 4), ("b", 6), ("c", 1)))
    assert unheard(desk, small)
    desk.send(b"one", wire.EndSession("b"))
    go_on(desk)
    assert desk.answers[small] == 1


@pytest.mark.parametrize("place", [wire.MAX_PLACE + 1, -wire.MAX_PLACE - 1, 1 << 62])
def test_a_place_that_is_out_of_bounds_is_refused(desk: Desk, place: int) -> None:
    answer = desk.ask(b"one", replace(queued(lookup(prompt("a", 1))), place=place))
    assert isinstance(answer, BadRequest) and "place" in str(answer)


def test_wanted_chunks_outlive_stores_that_nobody_waits_for() -> None:
    desk = with_prompts("b", "a", chunks=12, pages=40)
    first, second = (desk.send(b"one", queued(lookup(prompt(name, 12), name))) for name in "ab")
    assert desk.answers[first] == 12 and unheard(desk, second)
    for number in range(3):
        desk.ask(b"one", store(prompt(f"new {number}", 16)))
    assert desk.depot.counters["yielded_chunks"] + desk.index.evicted >= 32
    desk.send(b"one", wire.EndSession("a"))
    go_on(desk)
    assert desk.answers[second] == 12


def test_a_lookup_waits_for_the_first_wanted_chunk_that_memory_loses() -> None:
    desk = with_prompts("b", "a", chunks=12, pages=40)
    assert desk.ask(b"one", queued(lookup(prompt("a", 12), "a"))) == 12
    asked, chain = desk.send(b"one", queued(lookup(prompt("b", 12), "b"))), prompt("b", 12)
    assert desk.ask(b"two", wire.Drop("m", 1, PER_CHUNK, bytes(chain.hashes), keep=10)) == 2
    (namespace,) = desk.index.namespaces.all()
    assert [desk.index.wants.waiting_for(namespace, chain.slice(i, i + 1)) is None for i in (9, 10)] == [True, False]
    assert desk.ask(b"one", store(chain, first=10)) is True
    assert namespace.chunks[chain.slice(11, 12)].wants == 1 and unheard(desk, asked)


def test_a_lookup_wants_what_is_stored_while_it_is_the_first_that_waits_for_it() -> None:
    desk = with_prompts("a", chunks=16, pages=40)
    chain = prompt("p", 6)
    assert desk.ask(b"one", store(chain, end=2)) is True
    assert desk.ask(b"one", queued(lookup(prompt("a", 16), "a"))) == 16
    waiting = [desk.send(b"one", queued(lookup(chain, name))) for name in ("first", "second")]
    assert desk.ask(b"one", store(chain, end=4)) is True
    assert [unheard(desk, each) for each in waiting] == [True, True]

    def wanted() -> list[int]:
        (namespace,) = desk.index.namespaces.all()
        return [namespace.chunks[chain.slice(i, i + 1)].wants for i in range(4)]

    assert wanted() == [0, 1, 0, 1], "the second one would want the same"
    desk.send(b"one", wire.EndSession("first"))
    assert wanted() == [0, 0, 0, 1], "the first has left its queue"
    desk.send(b"one", wire.EndSession("a"))
    go_on(desk)
    assert desk.answers[waiting[1]] == 4 and wanted() == [0, 0, 0, 0]


def test_a_tenants_queues_leave_room_for_others_however_many_clients_it_has() -> None:
    desk = Desk(pages=96)  # of which 72 may be kept
    names = [f"{number}" for number in range(12)]
    for tenant in ("red", "blue"):
        desk.register(desk.hello(tenant.encode(), user=tenant))
        for name in names[: 12 if tenant == "red" else 4]:
            assert desk.ask(tenant.encode(), store(prompt(name, 6))) is True
    clients = [desk.hello(b"red %d" % number, user="red") for number in range(4)]
    held = [desk.send(client, queued(lookup(prompt(name, 6), name))) for client in clients for name in names]
    kept_by_red = [asked for asked in held if asked in desk.answers]
    assert desk.depot.pins.budget.bytes <= desk.depot.pins.budget.most_bytes // 2
    assert {client for client, _ in kept_by_red} == set(clients), "each client has one at least"
    other = [desk.send(b"blue", queued(lookup(prompt(name, 6), name))) for name in names[:4]]
    assert sum(desk.answers.get(asked) == 6 for asked in other) == 3
    for client in clients:
        for name in names:
            desk.send(client, wire.EndSession(name))
    go_on(desk)
    assert all(desk.answers[asked] == 6 for asked in other)


def test_a_queued_lookup_that_is_wanted_now_gets_what_memory_has() -> None:
    desk = with_prompts("a", "b", "c", chunks=12, pages=40)
    waiting = [desk.send(b"one", queued(lookup(prompt(name, 12), name))) for name in "abc"][1:]
    now = desk.send(b"one", msgspec.structs.replace(lookup(prompt("c", 12), "c"), hurries=True))
    assert desk.answers[now] == 12 and desk.answers[waiting[1]] == 0 and unheard(desk, waiting[0])
    begin(desk, store(prompt("d", 2)))
    awaited = desk.send(b"two", lookup(prompt("d", 2), "d"))
    assert unheard(desk, awaited)
    assert desk.answers[desk.send(b"two", msgspec.structs.replace(lookup(prompt("d", 2), "d"), hurries=True))] == 0
    assert desk.answers[awaited] == 0


def test_a_lookup_that_is_hurried_after_its_answer_was_lost_counts_its_hits_once(desk: Desk) -> None:
    desk.ask(b"one", store(prompt("p", 3)))
    asked = lookup(prompt("p", 3))
    for request in (asked, replace(asked, hurries=True), replace(asked, hurries=True)):
        assert desk.ask(b"two", request) == 3
    counters = desk.depot.counters
    assert (counters["lookups"], counters["lookup_chunks"], counters["hit_chunks"]) == (1, 3, 3)
    desk.ask(b"two", replace(lookup(prompt("p", 3), "unseen"), hurries=True))  # what it hurries went to a dead server
    assert (counters["lookups"], counters["lookup_chunks"], counters["hit_chunks"]) == (2, 6, 6)


def test_lookups_beyond_those_that_may_queue_get_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("searches", "hashes"):
        desk = with_prompts("a", "b", "c", chunks=12, pages=40)
        if limit == "searches":
            allow(desk, SearchPhase.WANTED, 1)
        else:
            monkeypatch.setattr(lookups, "MOST_QUEUED_HASHES", 23)
        asked = [desk.send(b"one", queued(lookup(prompt(name, 12), name))) for name in "abc"]
        assert [desk.answers.get(each) for each in asked] == [12, None, 12]
        desk.send(b"one", wire.EndSession("b"))
        assert desk.answers[asked[1]] == 0
        monkeypatch.undo()


def test_windows_and_the_chunks_before_them_count(desk: Desk) -> None:
    rack = Desk(pages=64)
    rack.hello()
    rack.register_groups(HYBRID)
    for name in "ab":
        for request in group_stores(HYBRID, prompt(name, 10)):
            assert rack.ask(b"one", request) is True
    assert rack.ask(b"one", lookup(prompt("a", 10), "a")) == 10
    assert rack.depot.status().waiting_bytes == kept(rack) * PAGE == 12 * PAGE
    assert rack.ask(b"one", retrieve(prompt("a", 10), instance_of(HYBRID, 0), request="a")) == [True] * 10
    assert rack.depot.status().waiting_bytes == 0


# -- lookups that are sent again, because the client suspects that the answer is lost


def again(desk: Desk, asked: Asked, request: wire.Lookup) -> None:
    desk.deliver(asked[0], wire.encode_request(int.from_bytes(asked[1], "little"), request))


def test_a_lookup_sent_again_while_it_waits_keeps_its_place_and_is_answered_once() -> None:
    desk = with_prompts("a", "b", "c", chunks=12, pages=40)
    requests = [queued(lookup(prompt(name, 12), name)) for name in "abc"]
    _, second, third = (desk.send(b"one", request) for request in requests)
    again(desk, second, requests[1])
    again(desk, third, requests[2])
    assert unheard(desk, second) and unheard(desk, third)
    for ended, answered in (("a", second), ("b", third)):
        desk.send(b"one", wire.EndSession(ended))
        go_on(desk)
        assert desk.answers[answered] == 12
    begin(desk, store(prompt("d", 4)))
    stored = desk.send(b"two", lookup(prompt("d", 4), "d"))
    again(desk, stored, lookup(prompt("d", 4), "d"))
    assert unheard(desk, stored)
    desk.settle()
    assert desk.answers[stored] == 4 and desk.depot.counters["lookups"] == 4


def test_a_lookup_sent_again_while_tiers_are_asked_gets_what_they_have() -> None:
    host = new_host(MemoryTier(), lookup_s=0.2)
    host.find(b"one", store(prompt("a", 4)))
    clear(host.index)
    asked = host.send(b"one", look(prompt("a", 4), "r"))
    again(host, asked, look(prompt("a", 4), "r"))
    assert unheard(host, asked)
    host.rest()
    assert host.answers[asked] == 4


def test_a_lookup_sent_again_after_its_answer_keeps_its_pins_and_gets_the_same() -> None:
    """The answer was on its way: what it has promised stays, although there is no room for another share."""
    desk = with_prompts("a", "b", chunks=12, pages=40)
    first, second = queued(lookup(prompt("a", 16), "a")), queued(lookup(prompt("b", 12), "b"))
    asked = desk.send(b"one", first)
    assert unheard(desk, desk.send(b"one", second)) and desk.answers[asked] == 12
    desk.ask(b"one", store(prompt("a", 16), first=12))
    again(desk, asked, first)
    assert desk.answers[asked] == 12 and desk.index.held == 1 and desk.depot.counters["lookups"] == 2


def test_a_lookup_sent_again_after_its_chunks_were_forgotten_finds_none() -> None:
    desk = with_prompts("a", chunks=4)
    asked = desk.send(b"one", queued(lookup(prompt("a", 4), "a")))
    assert desk.answers[asked] == 4
    desk.ask(b"two", wire.ForgetChunks("m"))
    again(desk, asked, queued(lookup(prompt("a", 4), "a")))
    assert desk.answers[asked] == 0


# -- lookups without pins


def test_a_lookup_without_pins_waits_for_no_room() -> None:
    host = new_host(MemoryTier(), pages=36, lookup_s=0.2)
    for chain in (large := prompt("a", 26), prompt("b", 8)):
        host.find(b"one", store(chain))
    host.send(b"one", look(large, "holds the room"))
    host.rest()
    asked = host.send(b"one", replace(look(prompt("b", 9), "q"), pins=False))
    assert host.answers[asked] == 8
    assert len(host.depot.client(b"one").sessions) == 1


def test_a_lookup_without_pins_ends_the_session_that_it_replaces(desk: Desk) -> None:
    desk.ask(b"one", store(prompt("a", 4)))
    assert desk.ask(b"one", lookup(prompt("a", 4), "r")) == 4 and desk.index.held
    assert desk.ask(b"one", replace(lookup(prompt("a", 4), "r"), pins=False)) == 4
    assert not desk.index.held and not desk.depot.client(b"one").sessions and not desk.depot.pins.budget.bytes


def test_clients_that_died_together_are_not_answered(desk: Desk) -> None:
    chain = prompt("a", 3)
    begin(desk, store(chain))
    asked = desk.send(b"two", lookup(chain))
    assert unheard(desk, asked)
    for name in (b"one", b"two"):
        desk.liveness_files[name].alive = False
    desk.tick(desk.now + 1.0, desk.now + 1.0)
    assert asked not in desk.answers and not desk.depot.clients
