"""What may wait, be remembered and be asked for at most, of depots with tiers."""

from __future__ import annotations

import pytest

from kvdepot.protocol import wire
from tests.core.desk import prompt, shards, store
from tests.core.host import look, new_host
from tests.tiers.faulty import MemoryTier


def test_finds_that_nobody_awaits_do_not_pile_up(tier: MemoryTier) -> None:
    host = new_host(tier)
    chain = prompt("a", 2)
    for i in range(3000):
        host.send(b"one", look(chain, f"r{i}"))
        host.send(b"one", wire.EndSession(f"r{i}"))
    assert host.depot.tiering.tier_lookups == 0
    assert len(host.tier_tasks) <= 1024 + 1
    host.rest()


def test_ended_tier_lookups_are_not_kept_until_their_deadline(tier: MemoryTier) -> None:
    host = new_host(tier, lookup_s=8.0)
    for i in range(3000):
        host.find(b"one", look(prompt("a", 2), f"r{i}"))
    assert host.depot.tiering.tier_lookups == 0
    assert len(host.depot.tiering._deadlines) <= 1024


def test_forgets_do_not_pile_up(tier: MemoryTier) -> None:
    host = new_host(tier)
    for _ in range(3000):
        host.send(b"one", wire.Forget("none"))
    assert len(host.tier_tasks) <= 1024


def test_ages_of_what_is_gone_are_not_kept_for_the_whole_ttl() -> None:
    host = new_host(pages=8, ttl_s=7 * 86400)
    for i in range(1000):
        host.find(b"one", store(prompt(f"p{i}", 2)))
    assert host.index.chunks <= 8
    assert len(host.index.accounts.ages) <= 100


@pytest.mark.faults
def test_a_lookup_of_many_ranks_costs_no_more_than_a_request_may(tier: MemoryTier) -> None:
    """Ranks are made by one Store; then chunks x ranks are looked at on the deciding thread."""
    host = new_host(tier, pages=1024)
    chain = prompt("a", 1)
    ranks = 512
    parts = [shards(chain, world_size=ranks, rank=rank) for rank in range(ranks)]
    host.send(b"one", wire.Store(1, 1, parts))  # the namespace is known from now on, whatever becomes of the copies
    asked = [host.send(b"one", look(prompt(f"b{i}", 1024), f"r{i}", world_size=ranks)) for i in range(17)]
    assert [len(tier_task.objects) for tier_task in host.tier_tasks] == [
        1 << 16
    ] * 16  # what all may ask for; not 17 x 524,288
    assert [host.answers.get(one) for one in asked[16:]] == [0]


def test_ages_take_no_more_room_than_chunks_however_many_ranks_they_have() -> None:
    ranks = 4
    host = new_host(world_size=ranks, ttl_s=60, pages=512)
    for number in range(60):
        for rank in range(ranks):
            host.ask(b"one", store(prompt(f"p{number}", 1), instance=rank + 1, world_size=ranks, rank=rank))
    assert host.index.chunks == 60
    assert len(host.index.accounts.ages) == 60, "each seal would look through all of them for those that are gone"
    host.tick(61.0, 1061.0)
    assert host.index.chunks == 0
