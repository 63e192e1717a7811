"""What the simulation found in depots with tiers, each as the shortest course of events that shows it."""

from __future__ import annotations

from kvdepot import wire
from kvdepot.testing.faulty import MemoryTier
from tests.test_depot import prompt, store
from tests.test_tiering import new_host


def test_a_store_that_ends_after_its_other_ranks_shard_was_forgotten_leaves_nothing() -> None:
    host = new_host(MemoryTier(), world_size=2)
    chain = prompt("a", 1)
    host.find(b"one", store(chain, instance=1, world_size=2, rank=0))
    asked = host.send(b"one", store(chain, instance=2, world_size=2, rank=1))
    host.send(b"one", wire.Forget())
    host.rest()
    assert host.answers[asked] is True
    host.assert_quiet()
