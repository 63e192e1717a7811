"""What the simulation found in depots with tiers, each as the shortest course of events that shows it."""

from __future__ import annotations

from kvdepot.keys import salt_tag
from kvdepot.protocol import wire
from kvdepot.testing.faulty import FaultyTier, MemoryTier
from kvdepot.tiers.worker import Find, Load
from tests.core.desk import PER_CHUNK, layout, prompt, retrieve, store
from tests.core.host import Host, look, new_host


def urgent_first(host: Host) -> None:
    """Let all errands end in the order in which a carrier takes them."""
    while host.errands:
        host.work(next((errand for errand in host.errands if isinstance(errand, Find | Load)), None))


def test_a_store_that_ends_after_its_other_ranks_shard_was_forgotten_leaves_nothing() -> None:
    host = new_host(MemoryTier(), world_size=2)
    chain = prompt("a", 1)
    host.find(b"one", store(chain, instance=1, world_size=2, rank=0))
    asked = host.send(b"one", store(chain, instance=2, world_size=2, rank=1))
    host.send(b"one", wire.Forget())
    host.rest()
    assert host.answers[asked] is False
    host.assert_quiet()


def test_a_chunk_that_is_spoilt_on_two_ranks_is_loaded_anew_on_both() -> None:
    tier = MemoryTier()
    here, there = new_host(tier, world_size=2), new_host(tier, world_size=2)
    chain, ranks = prompt("a", 2), range(2)
    for rank in ranks:
        there.find(b"one", store(chain, instance=rank + 1, world_size=2, rank=rank))
    assert there.find(b"one", look(chain, "holds the second", world_size=2)) == 2
    there.find(b"one", wire.Forget())  # the first one is not held, but the second is behind it
    for rank in ranks:
        here.find(b"one", store(chain, instance=rank + 1, world_size=2, rank=rank))
    head = prompt("a", 1)
    assert there.find(b"one", look(head, world_size=2)) == 1
    assert there.find(b"one", retrieve(head, instance=2, world_size=2, rank=1)) == [True]
    for request in ("r", "holds the second"):
        there.ask(b"one", wire.EndSession(request))
    there.assert_quiet()


def test_two_ranks_store_a_spoilt_chunk_anew_at_once() -> None:
    host = new_host(world_size=2)
    chain, ranks = prompt("a", 2), range(2)
    for rank in ranks:
        host.ask(b"one", store(chain, instance=rank + 1, world_size=2, rank=rank))
    assert host.ask(b"one", look(chain, "holds the second", world_size=2)) == 2
    host.ask(b"one", wire.Forget())
    head = prompt("a", 1)
    for rank in ranks:
        host.send(b"one", store(head, instance=rank + 1, world_size=2, rank=rank))
    host.settle()
    assert host.ask(b"one", look(head, world_size=2)) == 1
    for request in ("r", "holds the second"):
        host.ask(b"one", wire.EndSession(request))
    host.assert_quiet()


def test_a_lookup_that_comes_before_a_tier_has_forgotten_brings_nothing_back() -> None:
    tier = MemoryTier()
    here, there = new_host(tier), new_host(tier)
    chain = prompt("a", 3)
    here.find(b"one", store(chain))
    searching = there.send(b"one", look(chain, "before"))
    forgotten = there.send(b"one", wire.Forget())
    asked = there.send(b"one", look(chain, "after"))
    urgent_first(there)
    assert there.answers[forgotten]["disk:///d"] == 3
    assert (there.answers[searching], there.answers[asked]) == (0, 0)
    assert there.index.chunks == 0
    there.assert_quiet()


def test_what_is_not_forgotten_is_found_while_something_else_is() -> None:
    tier = MemoryTier()
    here, there = new_host(tier), new_host(tier)
    chain = prompt("a", 3)
    here.find(b"one", store(chain))
    for forget in (wire.Forget("other"), wire.Forget(salt=salt_tag("other"))):
        there.send(b"one", forget)
    assert there.find(b"one", look(chain)) == 3


def test_a_name_that_is_unpinned_while_its_pin_looks_behind_memory_is_not_pinned_after_that() -> None:
    host = new_host(MemoryTier())
    host.find(b"one", store(prompt("a", 2)))
    pinning = host.send(b"one", wire.Pin("name", "m", 1, PER_CHUNK, bytes(prompt("a", 3).hashes)))
    unpinning = host.send(b"one", wire.Unpin("name"))
    assert (host.answers[pinning], host.answers[unpinning]) == (0, False)
    host.rest()
    assert host.depot.status().pinned == []
    host.assert_quiet()


def test_a_pin_that_runs_out_while_its_name_is_pinned_anew_leaves_the_new_one() -> None:
    host = new_host(MemoryTier())
    host.find(b"one", store(prompt("a", 2)))
    for chunks, ttl_s in ((2, 1), (3, 0)):
        asked = host.send(b"one", wire.Pin("name", "m", 1, PER_CHUNK, bytes(prompt("a", chunks).hashes), ttl_s=ttl_s))
    host.now = 2.0
    host.take(host.depot.tick(2.0, 1002.0))
    host.rest()
    assert host.answers[asked] == 2
    assert host.ask(b"one", wire.Unpin("name")) is True
    host.assert_quiet()


def test_what_was_being_saved_when_it_was_forgotten_is_forgotten_after_that() -> None:
    tier = FaultyTier(MemoryTier())
    for late in (0, 1):  # whether the save fails after it has happened
        host = new_host(tier)
        host.ask(b"one", store(prompt("a", 1)))
        forgotten = host.send(b"one", wire.Forget())
        tier.inject(late=late)
        host.work()
        tier.inject()
        asked = host.send(b"one", look(prompt("a", 1)))
        urgent_first(host)
        assert host.answers[asked] == 0
        assert host.answers[forgotten] == {"memory": 1, "disk:///d": 1}
        assert host.find(b"one", look(prompt("a", 1))) == 0
        host.assert_quiet()


def test_what_is_pinned_and_too_old_stays_whole_when_its_head_is_stored_anew() -> None:
    host = new_host(ttl_s=60)
    chain = prompt("a", 3)
    host.find(b"one", store(chain))
    assert host.find(b"one", look(chain, "holds")) == 3
    host.take(host.depot.tick(61.0, 1061.0))
    host.send(b"one", store(chain, end=2))
    for task in host.copies():
        host.finish(task, outcome=False)  # its blocks were needed for something else
    assert host.find(b"one", retrieve(chain, request="holds")) == [True] * 3
    assert host.find(b"one", look(chain, "later")) == 2, "what was computed again is new"
    host.ask(b"one", wire.EndSession("later"))
    host.take(host.depot.tick(122.0, 1122.0))
    host.assert_quiet()
    assert host.index.chunks == 0


def test_a_lookup_whose_engine_leaves_meanwhile_loads_nothing_that_nobody_could_find() -> None:
    tier = MemoryTier()
    here, there = new_host(tier), new_host(tier)
    chain = prompt("a", 3)
    here.find(b"one", store(chain))
    asked = there.send(b"one", look(chain))
    there.ask(b"one", wire.Unregister(1))  # the namespace goes: it has no chunks, and nobody uses it
    there.rest()
    assert there.answers[asked] == 0
    there.assert_quiet()
    assert there.index.space.free_bytes == there.index.space.capacity


def test_a_load_that_evicts_the_last_chunk_of_its_namespace_can_be_found() -> None:
    tier = MemoryTier()
    here, there = new_host(tier), new_host(("disk:///d?write=off", tier), pages=2)
    chain = prompt("b", 1)
    here.find(b"one", store(chain))
    there.ask(b"one", wire.Register(2, layout(), "n", 1, 0, PER_CHUNK))
    there.find(b"one", store(prompt("a", 1)))
    there.find(b"one", store(prompt("c", 1), instance=2, model="n"))
    there.ask(b"one", wire.Unregister(1))
    assert there.find(b"one", look(chain)) == 1
    there.index.validate()
    there.ask(b"one", wire.EndSession("r"))
    there.assert_quiet()
