"""Receipts: what leases cost, and what they saved beside an index that has no lease."""

from __future__ import annotations

import random

import pytest

from kvdepot.errors import Busy
from kvdepot.eviction import POLICIES
from kvdepot.keys import ChunkChain
from kvdepot.memory.allocator import PAGE
from kvdepot.protocol import wire
from kvdepot.protocol.leases import Receipt
from tests.core.desk import Desk, lookup, prompt, store
from tests.core.test_leases import branch, has, lease
from tests.core.test_quotas import engine, fill, pages


def new_desk(pages: int = 16, policy: str = "lru") -> tuple[Desk, bytes]:
    desk = Desk(pages=pages, policy=policy)
    desk.tick(0.0, 1000.0)
    return desk, engine(desk, "blue")


def receipt(desk: Desk, name: str = "l") -> Receipt:
    desk.depot.leases._index.count_spared()
    return next(each for each in desk.depot.leases.receipts("", desk.now) if each.name == name)


def test_a_lease_costs_what_it_holds_times_the_seconds() -> None:
    desk, blue = new_desk()
    chain = prompt("a", 4)
    desk.ask(blue, store(chain, end=2))
    desk.ask(blue, lease(chain))
    desk.tick(10.0, 1010.0)
    desk.ask(blue, store(chain, first=2))
    desk.tick(15.0, 1015.0)
    assert receipt(desk).byte_seconds == (10 * 2 + 5 * 4) * PAGE
    desk.ask(blue, wire.EndLease("l"))
    desk.tick(20.0, 1020.0)
    assert receipt(desk).byte_seconds == 40 * PAGE and receipt(desk).ended == "released"
    (total,) = desk.depot.leases.sums("", desk.now)
    assert (total.tenant, total.kind, total.leases, total.bytes, total.begun) == ("blue", "retain", 0, 0, 1)
    assert total.byte_seconds == 40 * PAGE


def test_a_lease_has_saved_nothing_while_nothing_would_have_been_evicted() -> None:
    desk, blue = new_desk()
    desk.ask(blue, store(prompt("a", 4)))
    desk.ask(blue, lease(prompt("a", 4)))
    fill(desk, blue, 12)
    desk.ask(blue, lookup(prompt("a", 4)))
    assert (receipt(desk).spared_bytes, receipt(desk).saved_tokens) == (0, 0)


def test_tokens_of_spared_chunks_are_credited_once_with_the_time_that_engines_report() -> None:
    desk, blue = new_desk()
    desk.ask(blue, wire.EndSession("x", 1000, 4.0))
    chain = prompt("a", 4)
    desk.ask(blue, store(chain))
    desk.ask(blue, lease(chain))
    fill(desk, blue, 15)
    assert receipt(desk).spared_bytes == 3 * PAGE, "of 19 chunks, 16 have room"
    desk.ask(blue, lookup(chain, "r1"))
    assert (receipt(desk).saved_tokens, receipt(desk).saved_s) == (3, pytest.approx(0.012))
    desk.ask(blue, lookup(chain, "r2"))
    assert receipt(desk).saved_tokens == 3
    for request in ("r1", "r2"):
        desk.ask(blue, wire.EndSession(request))
    fill(desk, blue, 20, "again")
    desk.ask(blue, lookup(chain, "r3"))
    assert receipt(desk).saved_tokens == 7, "they were spared again"
    (total,) = desk.depot.leases.sums("", desk.now)
    assert total.saved_tokens == 7


def test_of_two_leases_the_first_is_credited_and_after_its_end_the_other() -> None:
    desk, blue = new_desk()
    chain = prompt("a", 2)
    desk.ask(blue, store(chain))
    for name in ("first", "second"):
        desk.ask(blue, lease(chain, name))
    fill(desk, blue, 20)
    assert (receipt(desk, "first").spared_bytes, receipt(desk, "second").spared_bytes) == (2 * PAGE, 0)
    desk.ask(blue, wire.EndLease("first"))
    desk.ask(blue, lookup(chain))
    assert (receipt(desk, "first").saved_tokens, receipt(desk, "second").saved_tokens) == (0, 2)


def test_what_is_released_is_evicted_as_if_it_had_never_been_leased() -> None:
    desk, blue = new_desk()
    one, two = branch("a", 3, 1), branch("a", 3, 2)
    for number, chain in enumerate((one, two)):
        desk.ask(blue, store(chain))
        desk.ask(blue, lease(chain, f"{number}"))
    fill(desk, blue, 30)
    for number in range(2):
        desk.ask(blue, wire.EndLease(f"{number}"))
        desk.index.validate()
        fill(desk, blue, 30, f"more {number}")
    assert has(desk, blue, one) == has(desk, blue, two) == 0
    desk.assert_empty()


@pytest.mark.parametrize("seed", range(12))
def test_without_the_lease_exactly_those_chunks_are_evicted_that_count_as_spared(seed: int) -> None:
    rng = random.Random(seed)
    prompts: list[ChunkChain] = [branch(f"p{n % 3}", rng.randint(1, 2), n) for n in range(8)]
    leased = prompts[1]
    steps = [rng.randrange(8) for _ in range(6)] + [1] + [rng.randrange(2, 8) for _ in range(6)]
    floods = rng.randint(0, 25)
    desks = [new_desk(20) for _ in range(2)]
    for step in steps:
        for desk, blue in desks:
            desk.ask(blue, store(prompts[step]))
    (beside, blue), (without, red) = desks
    there = has(beside, blue, leased)
    assert there == has(without, red, leased)
    beside.ask(blue, lease(leased))
    without.ask(red, lookup(leased))  # a lease is a use, too
    without.ask(red, wire.EndSession("r"))
    for number in range(floods):
        for desk, client in desks:
            desk.ask(client, store(prompt(f"flood {number}", 1)))
        evicted = there - has(without, red, leased)
        assert receipt(beside).spared_bytes == evicted * PAGE, f"after {number + 1} chunks"
        beside.index.validate()


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(8))
def test_no_more_counts_as_spared_than_is_evicted_without_the_lease(policy: str, seed: int) -> None:
    """Several accounts want space; nothing is asked for again that was evicted."""
    rng = random.Random(seed)
    prompts: list[ChunkChain] = [branch(f"p{n % 3}", rng.randint(1, 2), n) for n in range(8)]
    leased = prompts[1]
    steps = [rng.randrange(8) for _ in range(6)] + [1] + [rng.randrange(2, 8) for _ in range(6)]
    quotas = [
        (tenant, pages(rng.choice([0, 3]), rng.choice([0, 9, 14]), rng.choice([0.5, 1.0, 3.0])))
        for tenant in ("blue", "red")
        if rng.random() < 0.8
    ]
    floods = [rng.choice(["blue", "red", "one"]) for _ in range(rng.randint(10, 60))]
    desks = []
    for _ in range(2):
        desk, blue = new_desk(24, policy)
        clients = {"blue": blue, "red": engine(desk, "red"), "one": engine(desk, "one")}
        desk.hello(b"admin")
        for tenant, quota in quotas:
            assert desk.ask(b"admin", wire.SetQuota(tenant, quota)) is None
        desks.append((desk, clients))
    for step in steps:
        for desk, clients in desks:
            desk.ask(clients["blue"], store(prompts[step]))
    (beside, one), (without, other) = desks
    there = has(beside, one["blue"], leased)
    assert there == has(without, other["blue"], leased)
    if isinstance(beside.ask(one["blue"], lease(leased)), Busy):
        return
    without.ask(other["blue"], lookup(leased))  # a lease is a use, too
    without.ask(other["blue"], wire.EndSession("r"))
    for number, tenant in enumerate(floods):
        for desk, clients in desks:
            desk.ask(clients[tenant], store(prompt(f"flood {number}", 1)))
        evicted = there - has(without, other["blue"], leased)
        assert receipt(beside).spared_bytes <= evicted * PAGE, f"after {number + 1} chunks"
        beside.index.validate()
