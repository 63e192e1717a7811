"""Tenants' quotas as clients see them: who may change them, what a status tells, and what stores and tiers do."""

from __future__ import annotations

from typing import Any

import pytest

from kvdepot.errors import BadRequest
from kvdepot.memory.allocator import PAGE
from kvdepot.protocol import wire
from kvdepot.protocol.quotas import Quota
from kvdepot.protocol.status import TenantStatus
from kvdepot.testing.faulty import MemoryTier
from tests.core.desk import PER_CHUNK, Desk, layout, prompt, store
from tests.core.host import Host, look, new_host


def pages(floor: int = 0, cap: int = 0, weight: float = 1.0, ttl_s: int = 0) -> Quota:
    return Quota(floor * PAGE, cap * PAGE, weight, ttl_s)


def engine(desk: Desk, tenant: str) -> bytes:
    """A client of a tenant (its user has that name, too) that has registered tensors."""
    client = desk.hello(f"of {tenant}".encode(), tenant)
    assert desk.ask(client, wire.Register(1, layout(), "m", 1, 0, PER_CHUNK)) is None
    return client


def fill(desk: Desk, client: bytes, chunks: int, name: str = "fills") -> list[object]:
    """Store prompts of one chunk each."""
    return [desk.ask(client, store(prompt(f"{name} {number}", 1))) for number in range(chunks)]


def told(desk: Desk, tenant: str = "") -> dict[str, TenantStatus]:
    return {each.tenant: each for each in desk.depot.status(tenant).tenants}


@pytest.fixture
def desk() -> Desk:
    desk = Desk(pages=32)
    desk.tick(0.0, 1000.0)
    return desk


def test_only_a_client_without_a_tenant_changes_quotas(desk: Desk) -> None:
    desk.hello(b"admin")
    blue = engine(desk, "blue")
    assert isinstance(desk.ask(blue, wire.SetQuota("blue", pages(16))), BadRequest)
    assert isinstance(desk.ask(blue, wire.SetQuota("red", pages(16))), BadRequest)
    assert told(desk) == {}
    assert desk.ask(b"admin", wire.SetQuota("blue", pages(16, 20, 2.0, 60))) is None
    assert told(desk)["blue"].quota == pages(16, 20, 2.0, 60)
    assert isinstance(desk.ask(blue, wire.SetQuota("blue", None)), BadRequest)
    assert desk.ask(b"admin", wire.SetQuota("blue", None)) is None
    assert told(desk) == {}
    assert [event.text for event in desk.depot.status().events if event.kind == "quota"] == [
        f"blue: floor {16 * PAGE} bytes, cap {20 * PAGE} bytes, weight 2, expires after 60 s",
        "blue: no quota",
    ]


def test_a_quota_that_cannot_hold_is_refused_with_the_reason(desk: Desk) -> None:
    desk.hello(b"admin")
    assert desk.ask(b"admin", wire.SetQuota("red", pages(20))) is None
    for quota, fault in ((pages(13), "floors of all tenants"), (pages(4, 3), "below"), (pages(weight=-1.0), "weight")):
        answer = desk.ask(b"admin", wire.SetQuota("blue", quota))
        assert isinstance(answer, BadRequest) and fault in str(answer)
    assert told(desk).keys() == {"", "red"}


def test_a_tenant_that_no_client_can_have_gets_no_quota_but_can_lose_one(desk: Desk) -> None:
    desk.hello(b"admin")
    desk.depot._is_tenant = "blue".__eq__
    answer = desk.ask(b"admin", wire.SetQuota("bleu", pages(1)))
    assert isinstance(answer, BadRequest) and "'bleu'" in str(answer)
    assert desk.ask(b"admin", wire.SetQuota("blue", pages(1))) is None
    assert desk.ask(b"admin", wire.SetQuota("bleu", None)) is None


def test_a_status_tells_everybody_of_all_tenants_and_a_tenant_of_itself_alone(desk: Desk) -> None:
    desk.hello(b"admin")
    blue, red, other = engine(desk, "blue"), engine(desk, "red"), engine(desk, "other")
    desk.ask(b"admin", wire.SetQuota("blue", pages(cap=4)))
    desk.ask(b"admin", wire.SetQuota("red", pages(8)))
    assert fill(desk, blue, 6) == [True] * 6
    assert fill(desk, red, 3) == [True] * 3
    assert fill(desk, other, 2) == [True] * 2
    shown = {name: (each.used_bytes // PAGE, each.chunks, each.evicted_chunks) for name, each in told(desk).items()}
    assert shown == {"": (2, 2, 0), "blue": (4, 4, 2), "red": (3, 3, 0)}
    assert told(desk, "blue").keys() == {"blue"}
    assert told(desk, "other") == {}, "what the others have together is not for one of them"
    for client, tenant in ((blue, "blue"), (red, "red")):
        assert [each.tenant for each in desk.ask(client, wire.Status()).tenants] == [tenant]


def test_a_store_beyond_a_cap_is_counted_as_that_and_not_as_full_memory(desk: Desk) -> None:
    desk.hello(b"admin")
    blue = engine(desk, "blue")
    desk.ask(b"admin", wire.SetQuota("blue", pages(cap=2)))
    assert desk.ask(blue, store(prompt("long", 5))) is False, "a prompt's own beginning is not evicted for its end"
    counters = desk.depot.counters
    assert (counters["capped_chunks"], counters["dropped_chunks"]) == (3, 0)
    assert told(desk)["blue"].capped_chunks == 3
    assert desk.ask(blue, store(prompt("short", 2))) is True


def test_a_lowered_cap_and_a_shorter_time_to_live_take_effect_within_turns_of_the_loop() -> None:
    desk = Desk(pages=1024)
    desk.depot._step_chunks = 100
    desk.tick(0.0, 1000.0)
    desk.hello(b"admin")
    blue, red = engine(desk, "blue"), engine(desk, "red")
    for client in (blue, red):
        assert fill(desk, client, 400) == [True] * 400
    assert desk.depot.next_deadline() > 0.0
    desk.send(b"admin", wire.SetQuota("blue", pages(cap=50)))
    left = []
    while desk.depot.next_deadline() == 0.0:
        desk.expire()
        left.append(told(desk)["blue"].chunks)
    assert left == [300, 200, 100, 50]
    desk.send(b"admin", wire.SetQuota("red", pages(ttl_s=10)))
    desk.tick(10.0, 1010.0)
    turns = 1
    while desk.depot.next_deadline() == 0.0:
        desk.expire()
        turns += 1
    assert (told(desk)["red"].chunks, told(desk)["blue"].chunks, turns) == (0, 50, 5)
    assert desk.depot.counters["expired_chunks"] == 400
    desk.index.validate()


# -- with tiers


def tenants_of(tier: MemoryTier, **more: Any) -> tuple[Host, bytes, bytes]:
    """A host with a tier that gets what is evicted, and engines of two tenants."""
    host = new_host(("disk:///d?write=on_evict", tier), pages=32, **more)
    return host, engine(host, "blue"), engine(host, "red")


def saved(host: Host) -> int:
    return host.depot.tiering.status(host.now)[0].counters.get("saved_chunks", 0)


def test_what_a_cap_pushes_out_is_saved_before_although_memory_has_space() -> None:
    tier = MemoryTier()
    host, blue, _ = tenants_of(tier)
    host.ask(b"one", wire.SetQuota("blue", pages(cap=8)))
    for number in range(14):
        assert host.find(blue, store(prompt(f"p{number}", 1))) is True
    assert saved(host) >= 6 and host.depot.counters["capped_chunks"] == 0
    assert "undemoted_chunks" not in host.depot.tiering.status(host.now)[0].counters
    for number in range(14):
        assert host.find(blue, look(prompt(f"p{number}", 1), "again")) == 1
        host.find(blue, wire.EndSession("again"))
        assert host.index.accounts.of("blue").used <= 8 * PAGE
    host.assert_quiet()


def test_making_room_ahead_takes_nobody_below_its_floor() -> None:
    host, blue, red = tenants_of(MemoryTier())
    host.ask(b"one", wire.SetQuota("blue", pages(16)))
    host.ask(b"one", wire.SetQuota("red", pages(16)))
    for number in range(16):
        assert host.find(blue, store(prompt(f"b{number}", 1))) is True
    for number in range(40):
        assert host.find(red, store(prompt(f"r{number}", 1))) is True
    assert host.index.accounts.of("blue").used == 16 * PAGE
    assert saved(host) >= 24 and "undemoted_chunks" not in host.depot.tiering.status(host.now)[0].counters
    host.assert_quiet()


def test_what_is_too_old_for_its_tenant_is_not_loaded_back() -> None:
    tier = MemoryTier()
    host, blue, red = tenants_of(tier, lookup_s=8.0)
    host.ask(b"one", wire.SetQuota("blue", pages(cap=4, ttl_s=60)))
    host.ask(b"one", wire.SetQuota("red", pages(cap=4)))
    for client in (blue, red):
        for number in range(8):
            assert host.find(client, store(prompt(f"p{number}", 1))) is True
    host.tick(5.0, 1050.0)
    assert [host.find(client, look(prompt("p0", 1))) for client in (blue, red)] == [1, 1]
    host.tick(6.0, 1060.0)
    host.rest()
    assert [host.find(client, look(prompt("p1", 1), "later")) for client in (blue, red)] == [0, 1]
    host.index.validate()


def test_a_chunk_that_was_to_leave_stays_if_its_tenant_has_come_down_to_its_floor_by_then() -> None:
    host, blue, red = tenants_of(MemoryTier())
    host.ask(b"one", wire.SetQuota("red", pages(4)))
    assert fill(host, red, 20) == [True] * 20
    assert fill(host, blue, 10) == [True] * 10
    account = host.index.accounts.of("red")
    assert account.leaving > 0, "a chunk of red's is being saved, to make room for blue"
    host.ask(red, wire.Clear())
    assert 0 < account.used == account.leaving <= 4 * PAGE
    before = account.chunks
    fill(host, blue, 17, "more")
    assert host.index.allocator.free_bytes < 4 * PAGE, "space is still short"
    host.rest()
    assert account.chunks == before
    host.assert_quiet()
