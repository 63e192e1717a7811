"""What the simulation found in depots with tiers, each as the shortest course of events that shows it."""

from __future__ import annotations

from kvdepot import wire
from kvdepot.testing.faulty import MemoryTier
from tests.test_depot import prompt, retrieve, store
from tests.test_tiering import look, new_host


def test_a_store_that_ends_after_its_other_ranks_shard_was_forgotten_leaves_nothing() -> None:
    host = new_host(MemoryTier(), world_size=2)
    chain = prompt("a", 1)
    host.find(b"one", store(chain, instance=1, world_size=2, rank=0))
    asked = host.send(b"one", store(chain, instance=2, world_size=2, rank=1))
    host.send(b"one", wire.Forget())
    host.rest()
    assert host.answers[asked] is True
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
