"""Depots with tiers behind memory: the real depot, index and tier workers' work, run step by step; no thread, no clock.

Two depots (two hosts) share a tier where it matters. Bytes are real: what a store brings is made up and remembered, and
what a retrieve gives must be just that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvdepot.errors import TierError
from kvdepot.protocol import wire
from kvdepot.tiers.breaker import FAILURES
from kvdepot.tiers.worker import MOST_PARTS, Erased, Find, Load, Probe, Save
from tests.conftest import clear
from tests.core.desk import PER_CHUNK, layout, prompt, retrieve, shards, store
from tests.core.host import Host, look, new_host
from tests.tiers.faulty import FaultyTier, MemoryTier

# -- loads


def test_what_one_host_stored_another_gets_through_the_tier_byte_for_byte(tier: MemoryTier) -> None:
    here, there = new_host(tier), new_host(tier)
    chain = prompt("a", 5)
    assert here.find(b"one", store(chain)) is True
    assert len(tier.objects) == 5
    asked = there.send(b"one", look(chain))
    assert asked not in there.answers and there.kinds() == ["Find"]
    there.work()
    assert asked not in there.answers and there.kinds() == ["Load"]
    there.work()
    assert there.answers[asked] == 5
    assert there.find(b"one", retrieve(chain)) == [True] * 5
    assert len(there.seen) == 5
    there.assert_quiet()
    assert there.depot.counters["tier_hit_chunks"] == 5


def test_only_what_memory_misses_is_asked_for_in_one_batch(tier: MemoryTier) -> None:
    here, there = new_host(tier), new_host(tier)
    chain = prompt("a", 40)
    here.find(b"one", store(chain, end=32))
    there.find(b"one", store(chain, end=8))
    asked = there.send(b"one", look(chain))
    (find,) = there.tier_tasks
    assert isinstance(find, Find) and len(find.names) == 32
    there.rest()
    assert there.answers[asked] == 32
    loads = [tier_task for tier_task in there.done if isinstance(tier_task, Load)]
    assert sum(len(load.parts) for load in loads) == 24 and max(len(load.parts) for load in loads) <= MOST_PARTS


def test_a_hole_in_the_tier_ends_the_prefix_there(tier: MemoryTier) -> None:
    here, there = new_host(tier), new_host(tier)
    chain = prompt("a", 5)
    here.find(b"one", store(chain))
    tier.remove([name for name in tier.objects if chain.slice(2, 3).hex() in name])
    assert there.find(b"one", look(chain)) == 2
    assert there.index.chunks == 2
    there.ask(b"one", wire.EndSession("r"))
    there.assert_quiet()


@pytest.mark.parametrize(
    "other",
    [
        lambda tier: new_host(tier, model="n"),
        lambda tier: new_host(tier, world_size=2),
        lambda tier: _with_layout(tier, b"g" * 32),
    ],
)
def test_another_model_shape_or_layout_never_gets_it(tier: MemoryTier, other: Callable[[Any], Host]) -> None:
    here, there = new_host(tier), other(tier)
    chain = prompt("a", 3)
    here.find(b"one", store(chain))
    model = there.index.namespaces.all()[0].model
    world = there.index.namespaces.all()[0].world_size
    assert there.find(b"one", look(chain, model=model, world_size=world, readers=world)) == 0


def _with_layout(tier: MemoryTier, fingerprint: bytes) -> Host:
    host = Host(pages=64, tiers=[("disk:///d", tier)])
    host.tick(0.0, 1000.0)
    host.hello()
    host.ask(b"one", wire.Register(1, layout(fingerprint), "m", 1, 0, PER_CHUNK))
    return host


def test_an_object_under_anothers_name_is_not_believed(tier: MemoryTier) -> None:
    here, there = new_host(tier), new_host(tier)
    one, two = prompt("a", 1), prompt("b", 1)
    here.find(b"one", store(one))
    (name,) = tier.objects
    wrong = name.replace(bytes(one.hashes).hex(), bytes(two.hashes).hex())
    tier.objects[wrong] = tier.objects[name]
    assert there.find(b"one", look(two)) == 0
    assert wrong not in tier.objects and there.depot.tiering.status(0.0)[0].counters["corrupt_chunks"] == 1
    there.assert_quiet()


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


# -- late, failing, lying


def test_a_hung_tier_costs_a_lookup_its_deadline_and_what_comes_late_serves_the_next(tier: MemoryTier) -> None:
    here, there = new_host(tier), new_host(tier, lookup_s=0.5)
    chain = prompt("a", 5)
    here.find(b"one", store(chain))
    there.find(b"one", store(chain, end=2))
    asked = there.send(b"one", look(chain))
    there.work()  # it is found; the load hangs
    assert there.depot.next_deadline() <= 0.5
    there.pass_time(0.49)
    assert asked not in there.answers
    there.pass_time(0.01)
    assert there.answers[asked] == 2
    load = there.tier_tasks[0]
    there.work()
    assert isinstance(load, Load)
    asked = there.send(b"one", look(chain, "r2"))
    assert there.answers[asked] == 5 and not there.tier_tasks
    there.ask(b"one", wire.EndSession("r2"))
    there.ask(b"one", wire.EndSession("r"))
    there.assert_quiet()


def test_a_tier_that_fails_is_skipped_and_taken_back(tier: MemoryTier) -> None:
    faulty = FaultyTier(tier)
    host = new_host(faulty)
    chains = [prompt(f"p{i}", 2) for i in range(FAILURES + 2)]
    faulty.inject(down=1)
    for chain in chains[:FAILURES]:
        assert host.find(b"one", look(chain)) == 0
    assert host.depot.tiering.status(0.0)[0].state == "circuit breaker open"
    asked = host.send(b"one", look(chains[FAILURES]))
    assert host.answers[asked] == 0 and not host.tier_tasks  # nobody asks it
    faulty.inject()
    host.now += 1.5
    host.tick(host.now, 1001.0)
    assert host.kinds() == ["Probe"]
    host.work()
    assert host.depot.tiering.status(0.0)[0].state == "up"
    assert host.find(b"one", store(chains[0])) is True
    assert len(tier.objects) == 2


class Forbidding(MemoryTier):
    """A tier whose user lacks the right to some kinds of calls."""

    forbidden = ""

    def find(self, names: Any) -> list[bool]:
        return super().find(self._checked("find", names))

    def read(self, blobs: Any) -> list[int]:
        return super().read(self._checked("read", blobs))

    def write(self, blobs: Any) -> list[bool]:
        return super().write(self._checked("write", blobs))

    def remove(self, names: Any) -> None:
        super().remove(self._checked("remove", names))

    def _checked(self, call: str, items: Any) -> Any:
        if call == self.forbidden:
            raise TierError(f"NOPERM: may not {call}")
        return items


@pytest.mark.parametrize(("call", "state"), [("find", "lookups"), ("read", "reads"), ("write", "writes")])
def test_a_kind_of_call_that_always_fails_while_others_succeed_is_a_fault(call: str, state: str) -> None:
    """As of a Redis user without GETRANGE, of a replica, or of an S3 role without GetObject."""
    tier = Forbidding()
    host = new_host(tier, pages=1024)
    far = [prompt(f"far{i}", 1) for i in range(FAILURES + 4)]
    for chain in far:
        assert host.find(b"one", store(chain)) is True
    clear(host.depot.index)

    def use(i: int) -> None:
        """One call of each kind: those that are allowed succeed in between."""
        host.find(b"one", look(far[i], f"r{i}"))
        host.find(b"one", store(prompt(f"new{i}", 1)))

    def probe() -> str:
        host.pass_time(2.5)
        host.tick(host.now, 1000.0)
        host.rest()
        return host.depot.tiering.status(host.now)[0].state

    tier.forbidden = call
    for i in range(FAILURES):
        assert host.depot.tiering.status(host.now)[0].state == "up"
        use(i)
    (status,) = host.depot.tiering.status(host.now)
    assert (status.state, status.error) == ("circuit breaker open", f"NOPERM: may not {call}")
    done = len(host.done)
    use(FAILURES)
    assert host.done[done:] == [], "it is not asked in vain"
    assert probe() == "up"
    use(FAILURES + 1)  # one call is enough to open it again
    assert probe() == f"{state} fail"
    tier.forbidden = ""
    use(FAILURES + 2)
    assert host.depot.tiering.status(host.now)[0].state == "up"
    assert host.find(b"one", look(far[FAILURES + 3])) == 1


def test_an_outcome_that_is_none_of_its_task_is_a_bug_and_raises(tier: MemoryTier) -> None:
    host = new_host(tier)
    host.send(b"one", look(prompt("a", 2)))
    (find,) = host.tier_tasks
    with pytest.raises(AssertionError, match="FindToken ended with Erased"):
        host.finished(find.token, Erased())


def test_a_corrupt_object_is_a_miss_is_erased_and_counted(tier: MemoryTier) -> None:
    faulty = FaultyTier(tier)
    here, there = new_host(tier), new_host(faulty)
    chain = prompt("a", 3)
    here.find(b"one", store(chain))
    for fault in ("corrupt", "truncate", "swell"):
        faulty.inject(**{fault: 1.0})
        asked = there.send(b"one", look(chain))
        while there.tier_tasks:
            there.work()
            if not any(isinstance(tier_task, Find | Load) for tier_task in there.tier_tasks):
                faulty.inject()
        assert there.answers[asked] == 0, fault
        assert there.index.chunks == 0
        clear(here.index)
        here.find(b"one", store(chain))
    assert there.depot.tiering.status(0.0)[0].counters["corrupt_chunks"] == 9
    there.assert_quiet()


def test_a_chunk_that_is_corrupt_on_two_ranks_is_loaded_anew_on_both() -> None:
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


def test_half_time_does_not_end_a_tier_lookup_that_could_still_find_its_first_chunk(tier: MemoryTier) -> None:
    slow = MemoryTier()
    here = new_host(slow)
    chain = prompt("a", 3)
    here.find(b"one", store(chain))
    tier.objects.update({name: data for name, data in slow.objects.items() if chain.slice(2, 3).hex() in name})
    there = new_host(("disk:///d", tier), ("redis://slow", slow), lookup_s=1.0)
    asked = there.send(b"one", look(prompt("a", 4)))
    there.work(there.tier_tasks[0])
    there.pass_time(0.5)
    assert asked not in there.answers, "half a second was left"
    there.work(there.tier_tasks[0])
    there.rest()
    assert there.answers[asked] == 3


def test_a_load_that_hangs_behind_an_open_breaker_keeps_no_other_tier_waiting(tier: MemoryTier) -> None:
    near = MemoryTier()
    here = new_host(tier)
    chain = prompt("a", 3)
    here.find(b"one", store(chain))
    near.objects.update(tier.objects)
    there = new_host(("disk:///d", near), ("redis://far", tier), lookup_s=0.5)
    there.send(b"one", look(chain))
    there.work(there.tier_tasks[0])
    hung = [tier_task for tier_task in there.tier_tasks if tier_task.tier == 0]
    assert any(isinstance(tier_task, Load) for tier_task in hung)
    there.pass_time(0.5)
    for i in range(3):
        there.send(b"one", look(prompt(f"p{i}", 1), f"p{i}"))
        while any(tier_task.tier == 1 for tier_task in there.tier_tasks):
            there.work(next(tier_task for tier_task in there.tier_tasks if tier_task.tier == 1))
        there.pass_time(0.5)
    assert there.depot.tiering.status(there.now)[0].state == "circuit breaker open"
    asked = there.send(b"one", look(chain, "r2"))
    while any(tier_task.tier == 1 for tier_task in there.tier_tasks):
        there.work(next(tier_task for tier_task in there.tier_tasks if tier_task.tier == 1))
    there.pass_time(0.5)
    assert there.answers[asked] == 3, "the far tier has it all"


def test_no_chunk_is_broken_where_there_is_none(tier: MemoryTier) -> None:
    """While `_broken` is not 0 each lookup walks its whole chain."""
    faulty = FaultyTier(tier)
    here, there = new_host(tier), new_host(("disk:///d?write=off", faulty))
    chain = prompt("a", 2)
    there.find(b"one", store(chain))
    assert there.find(b"one", look(chain, "holds the second")) == 2
    there.find(b"one", wire.Forget())
    here.find(b"one", store(chain))
    faulty.inject(corrupt=1)
    assert there.find(b"one", look(prompt("a", 1))) == 0  # the first is loaded anew, and corrupt
    there.ask(b"one", wire.EndSession("holds the second"))
    assert there.index.chunks == 0
    assert not any(each.broken for each in there.index.namespaces.all())


def test_failures_that_were_under_way_when_a_tier_tripped_do_not_double_its_wait(tier: MemoryTier) -> None:
    """A blip of an instant, with twelve lookups under way: its circuit breaker opens for 30 s, not for one."""
    faulty = FaultyTier(tier)
    host = new_host(faulty)
    for i in range(12):
        host.send(b"one", look(prompt(f"p{i}", 2), f"r{i}"))
    faulty.inject(down=1)
    host.rest()
    faulty.inject()
    for second in (2.0, 4.0):
        host.now = second
        host.tick(second, 1000.0 + second)
        host.rest()
    assert host.depot.tiering.status(host.now)[0].state == "up"


# -- whoever asked is gone


def test_a_session_that_ends_while_tiers_are_asked_leaves_no_pin(tier: MemoryTier) -> None:
    here, there = new_host(tier), new_host(tier)
    chain = prompt("a", 3)
    here.find(b"one", store(chain))
    asked = there.send(b"one", look(chain))
    ended = there.send(b"one", wire.EndSession("r"))
    assert (there.answers[asked], there.answers[ended]) == (0, None)
    there.assert_quiet()


def test_a_lookup_anew_ends_the_one_before_it(tier: MemoryTier) -> None:
    here, there = new_host(tier), new_host(tier)
    chain = prompt("a", 3)
    here.find(b"one", store(chain))
    first, second = there.send(b"one", look(chain)), there.send(b"one", look(chain))
    assert there.answers[first] == 0
    there.rest()
    assert there.answers[second] == 3
    there.ask(b"one", wire.EndSession("r"))
    there.assert_quiet()


def test_a_server_that_stops_answers_what_awaits_tiers(tier: MemoryTier) -> None:
    host = new_host(tier)
    asked = host.send(b"one", look(prompt("a", 3)))
    host.act(host.depot.stop_waiting())
    assert host.answers[asked] == 0


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
    assert there.index.allocator.free_bytes == there.index.allocator.capacity


# -- writing


def test_stores_beyond_the_queue_are_dropped_and_counted(tier: MemoryTier) -> None:
    host = new_host(("disk:///d?queue_mib=1&threads=1", tier), pages=1024)
    chain = prompt("a", 384)
    for first in range(0, 384, 32):
        host.ask(b"one", wire.Store(1, 1, [shards(chain, first, first + 32, blocks=list(range(64)))]))
    status = host.depot.tiering.status(0.0)[0]
    assert status.queued_bytes <= 1 << 20
    host.rest()
    status = host.depot.tiering.status(0.0)[0]
    dropped = status.counters["dropped_chunks"]
    assert dropped > 0 and len(tier.objects) == 384 - dropped == status.counters["saved_chunks"]
    assert status.queued_bytes == 0
    host.assert_quiet()


def test_shards_unsaved_for_a_failure_are_counted_apart_from_a_full_queue(tier: MemoryTier) -> None:
    faulty = FaultyTier(tier)
    host = new_host(faulty, pages=1024)
    assert host.find(b"one", look(prompt("before", 2))) == 0
    assert (host.depot.tiering.status(0.0)[0].error, host.depot.tiering.status(0.0)[0].error_s) == ("", None)
    faulty.inject(down=1)
    for i in range(FAILURES + 2):
        host.ask(b"one", wire.Store(1, 1 + i, [shards(prompt(f"p{i}", 2), 0, 2, blocks=list(range(4)))]))
        host.rest()
    status = host.depot.tiering.status(host.now + 7.0)[0]
    assert status.state == "circuit breaker open" and status.error
    assert status.error_s == pytest.approx(7.0)
    assert status.counters["unavailable_chunks"] == 2 * (FAILURES + 2)
    assert not status.counters.get("dropped_chunks") and not status.counters.get("refused_chunks")


def test_a_tier_that_cannot_be_had_at_the_start_is_told_of_by_its_first_probe(
    tier: MemoryTier, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = FaultyTier(tier)
    faulty.inject(down=1)
    host = new_host(faulty)
    host.rest()
    status = host.depot.status().tiers[0]
    assert status.state == "circuit breaker open" and status.error
    assert f"tier {status.name}: circuit breaker open, retrying with backoff: {status.error}" in caplog.text


def test_memory_hands_what_it_evicts_to_the_tier_before_its_room_is_needed(tier: MemoryTier) -> None:
    host = new_host(("disk:///d?write=on_evict", tier), pages=32)
    chains = [prompt(f"p{i}", 2) for i in range(40)]
    for chain in chains:
        assert host.find(b"one", store(chain)) is True
    counters = host.depot.tiering.status(0.0)[0].counters
    assert counters.get("undemoted_chunks", 0) == 0
    assert len(tier.objects) >= 80 - 32
    for chain in chains:
        assert host.find(b"one", look(chain)) == 2, "neither memory nor the tier has it"
        assert host.find(b"one", retrieve(chain)) == [True, True]
    host.assert_quiet()


def test_what_a_far_tier_had_is_kept_in_the_nearer_one(tier: MemoryTier) -> None:
    near = MemoryTier()
    here = new_host(tier)
    there = new_host(("disk:///d", near), ("redis://far", tier))
    chain = prompt("a", 3)
    here.find(b"one", store(chain))
    assert there.find(b"one", look(chain)) == 3
    assert near.objects.keys() == tier.objects.keys()


def test_a_tier_that_is_off_is_read_and_never_written(tier: MemoryTier) -> None:
    here, there = new_host(tier), new_host(("disk:///d?write=off", tier))
    one, two = prompt("a", 2), prompt("b", 2)
    here.find(b"one", store(one))
    there.find(b"one", store(two))
    assert len(tier.objects) == 2
    assert there.find(b"one", look(one)) == 2


@pytest.mark.parametrize("policy", ["lru", "learned"])
def test_what_is_used_while_it_is_handed_down_stays_under_every_policy(tier: MemoryTier, policy: str) -> None:
    from kvdepot.eviction import POLICIES

    host = new_host(("disk:///d?write=on_evict", tier), pages=16)
    host.index.accounts.rest.policy = POLICIES[policy]()
    chains = [prompt(f"p{i}", 1) for i in range(16)]
    for chain in chains[:14]:
        host.find(b"one", store(chain))
    host.send(b"one", store(chains[14]))
    host.settle()
    (save,) = host.tier_tasks
    victim = next(chain for chain in chains if save.parts[0].key == bytes(chain.hashes))
    host.ask(b"one", look(victim, "uses it"))
    host.ask(b"one", wire.EndSession("uses it"))
    host.rest()
    assert host.answers[host.send(b"one", look(victim, "again"))] == 1


# -- looking after tiers


def test_quiet_tiers_are_looked_after() -> None:
    tier = MemoryTier()
    host = new_host(tier)
    host.tick(5.0, 1005.0)
    assert not host.tier_tasks
    host.tick(11.0, 1011.0)
    (probe,) = host.tier_tasks
    assert isinstance(probe, Probe)
    for second in range(12, 40):
        host.tick(float(second), 1000.0 + second)
    assert host.depot.tiering.status(0.0)[0].state == "circuit breaker open"
    assert len(host.tier_tasks) == 1


def test_saves_carry_what_their_readers_check(tier: MemoryTier) -> None:
    host = new_host(tier)
    chain = prompt("a", 20)
    host.ask(b"one", store(chain))
    saves = [tier_task for tier_task in host.tier_tasks if isinstance(tier_task, Save)]
    assert [len(save.parts) for save in saves] == [16, 4]
    assert {part.born for save in saves for part in save.parts} == {1000}
