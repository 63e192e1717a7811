"""What is forgotten, pinned by name or too old, in memory and in the tiers behind it."""

from __future__ import annotations

import msgspec

from kvdepot.protocol import wire
from kvdepot.tiers.stamps import FRESH_S, PERIOD_S, space_of
from kvdepot.tiers.worker import Find, Load
from tests.core.desk import PER_CHUNK, layout, prompt, retrieve, store
from tests.core.host import Host, look, new_host
from tests.tiers.faulty import MemoryTier

# -- forgetting


def urgent_first(host: Host) -> None:
    """Let all tier tasks end in the order in which a tier worker takes them."""
    while host.tier_tasks:
        host.work(next((tier_task for tier_task in host.tier_tasks if isinstance(tier_task, Find | Load)), None))


def test_tiers_forget_models_by_prefix_and_the_answer_says_others_may_remain(tier: MemoryTier) -> None:
    host = new_host(tier, pages=400, model="team-x/m0")
    for i in range(150):
        host.find(b"one", store(prompt("a", 2), model=f"team-x/m{i}"))
    host.find(b"one", store(prompt("a", 2), model="team-y/m"))
    assert len(tier.objects) == host.index.chunks == 302
    said = host.find(b"one", wire.ForgetChunks("team-x/"))
    assert said.removed == {"memory": 300, "disk:///d": 300}
    assert "150" in said.left["error"] and "'team-x/'" in said.left["error"]  # the tier may have others
    assert len(tier.objects) == host.index.chunks == 2
    assert host.find(b"one", wire.ForgetChunks("team-x/m0")) == wire.ForgetAnswer({"memory": 0, "disk:///d": 0})
    host.assert_quiet()


def test_a_model_that_only_a_tier_knows_is_forgotten_by_its_whole_name(tier: MemoryTier) -> None:
    here, there = new_host(tier, model="team-x/m"), new_host(tier, model="other")
    here.find(b"one", store(prompt("a", 3), model="team-x/m"))
    left = there.find(b"one", wire.ForgetChunks("team-x/"))
    assert (left.removed, len(tier.objects)) == ({"memory": 0, "disk:///d": 0}, 3)
    assert "whole names" in left.left["error"]
    assert there.find(b"one", wire.ForgetChunks("team-x/m")) == wire.ForgetAnswer({"memory": 0, "disk:///d": 3})
    assert "error" in there.find(b"one", wire.ForgetChunks("team-x/m")).left  # for all that anybody here can know
    assert here.find(b"one", wire.ForgetChunks("team-x/m")) == wire.ForgetAnswer({"memory": 3, "disk:///d": 0})


def test_a_tier_that_cannot_forget_says_so(tier: MemoryTier) -> None:
    host = new_host(tier)
    host.find(b"one", store(prompt("a", 3)))
    tier.inject(down=1)
    said = host.find(b"one", wire.ForgetChunks())
    assert said == wire.ForgetAnswer({"memory": 3}, {"disk:///d": "not forgotten: injected: the store is unavailable"})


def test_a_chunk_forgotten_during_its_save_is_removed_from_the_tier_after_it() -> None:
    tier = MemoryTier()
    for late in (0, 1):  # whether the save fails after it has happened
        host = new_host(tier)
        host.ask(b"one", store(prompt("a", 1)))
        forgotten = host.send(b"one", wire.ForgetChunks())
        tier.inject(late=late)
        host.work()
        tier.inject()
        asked = host.send(b"one", look(prompt("a", 1)))
        urgent_first(host)
        assert host.answers[asked] == 0
        assert host.answers[forgotten] == wire.ForgetAnswer({"memory": 1, "disk:///d": 1})
        assert host.find(b"one", look(prompt("a", 1))) == 0
        host.assert_quiet()


# -- by writer


def enter(host: Host, client: bytes, writer: str) -> None:
    """An engine that marks what it stores."""
    host.hello(client)
    register = wire.Register(1, layout(), "m", 1, 0, PER_CHUNK, writer=writer)
    assert host.ask(client, register) is None


def stamped(tier: MemoryTier) -> tuple[Host, Host]:
    """Two hosts at a tier that has four chunks of each of two writers; one host has them in memory, too."""
    here, there = new_host(tier), new_host(tier)
    for writer in ("good", "bad"):
        enter(here, writer.encode(), writer)
        assert here.find(writer.encode(), store(prompt(writer, 4))) is True
    return here, there


FORGET = wire.ForgetChunks("m", writer="bad")


def test_a_tier_forgets_a_writers_earlier_objects_and_keeps_its_later_ones(tier: MemoryTier) -> None:
    here, there = stamped(tier)
    assert there.find(b"one", FORGET) == wire.ForgetAnswer({"memory": 0, "disk:///d": 0})
    assert here.find(b"one", FORGET) == wire.ForgetAnswer({"memory": 4, "disk:///d": 0}), (
        "the other host had it in memory"
    )
    for host in (here, there, new_host(tier)):
        assert host.find(b"one", look(prompt("bad", 4))) == 0
        assert host.find(b"one", look(prompt("good", 4), "g")) == 4
    assert here.find(b"bad", store(prompt("bad", 4))) is True
    for host in (there, new_host(tier)):
        assert host.find(b"one", look(prompt("bad", 4), "again")) == 4
        host.index.validate()


def test_a_refused_object_is_removed_and_a_forgotten_model_leaves_no_stamps(tier: MemoryTier) -> None:
    _, there = stamped(tier)
    assert len(tier.objects) == 10, "each writer has a stamp"
    there.find(b"one", FORGET)
    assert len(tier.objects) == 9
    assert there.find(b"one", look(prompt("bad", 4))) == 0
    assert len(tier.objects) == 5, "one save's objects of the other writer, and its stamp"
    there.find(b"one", wire.ForgetChunks("m"))
    assert not tier.objects


def test_a_chunk_loaded_from_a_tier_has_its_writer(tier: MemoryTier) -> None:
    _, there = stamped(tier)
    asked = msgspec.structs.replace(look(prompt("bad", 4)), writers=True)
    assert there.find(b"one", asked) == wire.Hit(4, writers=(wire.WriterRun(4, "bad"),))
    assert there.find(b"one", FORGET) == wire.ForgetAnswer({"memory": 4, "disk:///d": 0})
    assert there.find(b"one", look(prompt("bad", 4))) == 0


def test_another_server_of_a_shared_tier_notices_within_a_minute(tier: MemoryTier) -> None:
    here, there = stamped(tier)
    here.find(b"bad", store(prompt("more", 2)))
    assert there.find(b"one", look(prompt("bad", 1))) == 1
    here.find(b"one", FORGET)
    there.tick(FRESH_S, 1000.0 + FRESH_S)
    assert there.find(b"one", look(prompt("more", 2), "later")) == 0


def test_a_chunk_whose_writer_was_forgotten_during_its_load_is_not_served(tier: MemoryTier) -> None:
    _, there = stamped(tier)
    asked = there.send(b"one", look(prompt("bad", 4)))
    there.work()
    assert there.kinds() == ["Load"]
    forgotten = there.send(b"one", FORGET)
    there.settle()
    there.rest()
    assert (there.answers[asked], there.answers[forgotten]) == (0, wire.ForgetAnswer({"memory": 0, "disk:///d": 0}))
    assert there.find(b"one", look(prompt("bad", 4))) == 0
    there.assert_quiet()


def test_a_tier_that_cannot_forget_a_writer_says_so_and_serves_nothing_of_it(tier: MemoryTier) -> None:
    stamped(tier)
    there = new_host(tier)
    tier.inject(down=1)
    assert "not forgotten" in there.find(b"one", FORGET).left["disk:///d"]
    tier.inject()
    assert there.find(b"one", look(prompt("bad", 4), "again")) == 0
    assert new_host(tier).find(b"one", look(prompt("bad", 4))) == 0, "it was removed before it was looked at"


def test_a_tier_that_has_lost_a_stamp_loses_hits_and_then_has_another(tier: MemoryTier) -> None:
    here, _ = stamped(tier)
    assert tier.forget("", space_of("", "m", "good")) == 1
    assert new_host(tier).find(b"one", look(prompt("good", 4))) == 0
    here.now += PERIOD_S
    here.tick(here.now, 1000.0 + here.now)
    assert here.find(b"good", store(prompt("more", 2))) is True
    assert new_host(tier).find(b"one", look(prompt("more", 2))) == 2


def test_a_tenant_that_forgets_all_forgets_in_tiers_where_no_engine_is(tier: MemoryTier) -> None:
    """Models are collected after the removal has begun, which drops the namespaces of which nothing is left."""
    host = Host(pages=64, settings={"keys": "/somewhere"}, tiers=[("disk:///d", tier)])
    host.tick(0.0, 1000.0)
    host.rest()
    host.hello(b"one", "acme")
    register = wire.Register(1, layout(), "m", 1, 0, PER_CHUNK)
    assert host.ask(b"one", register) is None
    chain = prompt("a", 3)
    assert host.find(b"one", store(chain)) is True
    assert len(tier.objects) == 3
    assert host.ask(b"one", wire.Unregister(1)) is None  # the engine stops; its chunks stay
    assert host.find(b"one", wire.ForgetChunks()) == wire.ForgetAnswer({"memory": 3, "disk:///d": 3})
    assert not tier.objects


def test_a_lease_that_ends_while_it_looks_behind_memory_does_not_begin_after_that() -> None:
    host = new_host(MemoryTier())
    host.find(b"one", store(prompt("a", 2)))
    pinning = host.send(b"one", wire.TakeLease("name", "retain", "m", 1, PER_CHUNK, bytes(prompt("a", 3).hashes)))
    unpinning = host.send(b"one", wire.EndLease("name"))
    assert (host.answers[pinning], host.answers[unpinning]) == (0, False)
    host.rest()
    assert host.depot.status().lease_count == 0
    host.assert_quiet()


def test_an_expired_pinned_chain_stays_whole_when_its_head_is_stored_again() -> None:
    host = new_host(ttl_s=60)
    chain = prompt("a", 3)
    host.find(b"one", store(chain))
    assert host.find(b"one", look(chain, "holds")) == 3
    host.tick(61.0, 1061.0)
    host.send(b"one", store(chain, end=2))
    for task in host.copies:
        host.finish(task, outcome=False)  # its blocks were needed for something else
    assert host.find(b"one", retrieve(chain, request="holds")) == [True] * 3
    assert host.find(b"one", look(chain, "later")) == 2, "what was computed again is new"
    host.ask(b"one", wire.EndSession("later"))
    host.tick(122.0, 1122.0)
    host.assert_quiet()
    assert host.index.chunks == 0


# -- clocks that are set


DAY = 86_400


def test_a_chunk_stored_while_the_clock_was_ahead_expires_as_if_it_had_been_right() -> None:
    host = new_host(ttl_s=3600)
    host.tick(10.0, 1010.0 + 30 * DAY)
    host.find(b"one", store(prompt("a", 2)))
    host.tick(11.0, 1011.0)
    host.find(b"one", store(prompt("b", 2)))
    host.tick(3609.0, 4609.0)
    assert [host.find(b"one", look(prompt(name, 2), name)) for name in "ab"] == [2, 2]
    for name in "ab":
        host.ask(b"one", wire.EndSession(name))
    host.tick(3612.0, 4612.0)
    assert host.find(b"one", look(prompt("a", 2))) == 0
    host.ask(b"one", wire.EndSession("r"))
    host.assert_quiet()
    assert host.index.chunks == 0


def test_a_chunk_expires_by_the_clock_that_nobody_sets_while_the_other_stands_still() -> None:
    host = new_host(ttl_s=60)
    host.find(b"one", store(prompt("a", 2)))
    for second in range(1, 62):
        host.tick(float(second), 1000.0)
    assert host.find(b"one", look(prompt("a", 2))) == 0


def test_an_object_from_the_future_is_not_used_where_its_age_counts(tier: MemoryTier) -> None:
    ahead = new_host(tier)
    ahead.tick(1.0, 1001.0 + 30 * DAY)
    ahead.find(b"one", store(prompt("a", 2)))
    ahead.tick(2.0, 1002.0)
    ahead.find(b"one", store(prompt("b", 2)))
    for ttl_s, found in ((0, [2, 2]), (3600, [0, 2])):
        host = new_host(tier, ttl_s=ttl_s)
        host.tick(1.0, 1001.0)
        assert [host.find(b"one", look(prompt(name, 2), name)) for name in "ab"] == found
