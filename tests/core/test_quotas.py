"""Quotas as clients see them: who may change them, what a status tells, and what stores and tiers do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvdepot.config import SaltQuota
from kvdepot.errors import BadRequest, Busy
from kvdepot.memory.allocator import PAGE
from kvdepot.protocol import wire
from kvdepot.protocol.keys import ChunkChain, salt_tag
from kvdepot.protocol.quotas import Quota
from kvdepot.protocol.status import TenantStatus, read
from kvdepot.tiers.disk import Disk
from kvdepot.tiers.rules import Rules
from kvdepot.tiers.worker import Enforce
from tests.core.desk import PER_CHUNK, Desk, layout, prompt, shards, store
from tests.core.host import Host, look, new_host
from tests.tiers.faulty import MemoryTier


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


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"floor_bytes": 8, "cap_bytes": 4}, "cap_bytes: 4 is below floor_bytes, 8"),
        ({"disk_floor_bytes": 8, "disk_cap_bytes": 4}, "disk_cap_bytes: 4 is below disk_floor_bytes, 8"),
        ({"floor_bytes": -1}, "floor_bytes: -1 is out of range"),
        ({"disk_cap_bytes": 1 << 63}, "disk_cap_bytes: .* is out of range"),
        ({"weight": 0.0}, "weight: 0 is out of range"),
        ({"weight": float("nan")}, "weight: nan is out of range"),
        ({"ttl_s": -1}, "ttl_s: -1 is out of range"),
    ],
)
def test_a_quota_that_cannot_hold_is_neither_made_nor_decoded(given: dict[str, float], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        Quota(**given)  # type: ignore[arg-type]
    with pytest.raises(msgspec.ValidationError, match=fault):
        msgspec.convert(given, Quota)


def test_a_status_with_a_newer_servers_field_of_a_quota_is_read(desk: Desk) -> None:
    desk.hello(b"admin")
    assert desk.ask(b"admin", wire.SetQuota("blue", Quota(floor_bytes=PAGE))) is None
    answer = msgspec.to_builtins(desk.depot.status())
    answer["tenants"][0]["quota"]["added_later"] = 1
    assert read(answer).tenants == desk.depot.status().tenants


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
        "quota of blue: floor 64 KiB, cap 80 KiB, weight 2, expires after 60 s",
        "quota of blue: none",
    ]


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
        assert [each.tenant for each in desk.ask(client, wire.GetStatus()).tenants] == [tenant]


def test_a_lower_cap_and_a_shorter_time_to_live_take_effect_in_steps() -> None:
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


def tenants_of(tier: MemoryTier, **more: Any) -> tuple[Host, bytes, bytes]:
    """A host with a tier that gets what is evicted, and engines of two tenants."""
    host = new_host(("disk:///d?write=on_evict", tier), pages=32, **more)
    return host, engine(host, "blue"), engine(host, "red")


def saved(host: Host) -> int:
    return host.depot.tiering.status(host.now)[0].counters.get("saved_chunks", 0)


def test_chunks_that_a_cap_pushes_out_are_saved_although_memory_has_space() -> None:
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


def test_a_chunk_that_was_to_leave_stays_if_its_tenant_is_at_its_floor_by_then() -> None:
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


OBJECT = PAGE + 4096
"""Bytes that the file of one chunk takes: a header, and a page."""


def disk(floor: int = 0, cap: int = 0, ttl_s: int = 0) -> Quota:
    """Floor and cap in objects."""
    return Quota(0, 0, 1.0, ttl_s, floor * OBJECT, cap * OBJECT)


def test_a_quota_on_disk_is_refused_without_a_local_tier_or_beyond_its_capacity() -> None:
    desk = Desk(pages=32)
    desk.tick(0.0, 1000.0)
    desk.hello(b"admin")
    answer = desk.ask(b"admin", wire.SetQuota("blue", disk(1)))
    assert isinstance(answer, BadRequest) and "disk://" in str(answer)
    shared = new_host(("redis://localhost:1", MemoryTier()), pages=32)
    assert isinstance(shared.ask(b"one", wire.SetQuota("blue", disk(cap=1))), BadRequest)
    host = new_host(MemoryTier(10 * OBJECT), pages=32)
    assert host.ask(b"one", wire.SetQuota("blue", disk(6))) is None
    answer = host.ask(b"one", wire.SetQuota("red", disk(5)))
    assert isinstance(answer, BadRequest) and "tier disk:///d" in str(answer) and "capacity" in str(answer)
    assert host.ask(b"one", wire.SetQuota("blue", disk(5))) is None, "a tenant's own old floor does not count"
    assert host.ask(b"one", wire.SetQuota("red", disk(5))) is None
    assert {name: each.quota for name, each in told(host).items()} == {"": Quota(), "blue": disk(5), "red": disk(5)}


def test_local_tiers_are_told_of_rules_and_shared_ones_are_not() -> None:
    host = new_host(("disk:///d?ttl_s=9", MemoryTier()), ("redis://localhost:1", MemoryTier()), pages=32, ttl_s=60)
    assert [task.rules for task in host.done if isinstance(task, Enforce)] == [Rules(ttl_s=9)]
    assert host.ask(b"one", wire.SetQuota("blue", disk(1, ttl_s=5))) is None
    host.done.clear()
    host.tick(1.0, 1001.0)
    host.tick(2.0, 1002.0)
    assert host.kinds().count("Enforce") == 1, "one at a time"
    host.rest()
    (task,) = [task for task in host.done if isinstance(task, Enforce)]
    assert task.tier == 0 and [quota.ttl_s for quota in task.rules.quotas.values()] == [5]
    host.tick(11.0, 1011.0)
    assert host.kinds().count("Enforce") == 0
    host.tick(12.0, 1012.0)
    assert host.kinds().count("Enforce") == 1, "after 10 s"


def test_rules_are_told_again_until_the_tier_has_taken_them() -> None:
    tier = MemoryTier()
    host = new_host(tier, pages=32)
    assert host.ask(b"one", wire.SetQuota("blue", disk(ttl_s=5))) is None
    tier.inject(down=1.0)
    host.tick(1.0, 1001.0)
    host.rest()
    tier.inject()
    host.done.clear()
    host.tick(2.0, 1002.0)
    host.rest()
    host.tick(3.0, 1003.0)
    assert [type(task) for task in host.done] == [Enforce] and not host.tier_tasks


def salted(name: str, salt: bytes) -> wire.Store:
    """Store a prompt of one chunk with a salt."""
    return wire.Store(1, [msgspec.structs.replace(shards(prompt(name, 1)), salt=salt)])


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[tuple[Host, Disk]]:
    """A host with a directory behind memory, which gets all that is stored."""
    tier = Disk(tmp_path / "tier", 20 * OBJECT)
    host = new_host((f"disk://{tmp_path}/tier", tier), pages=256, salts={"brief": SaltQuota(ttl_s=30)}, lookup_s=8.0)
    yield host, tier
    tier.close()


def test_chunks_of_a_salt_expire_in_memory_and_on_disk_and_so_do_those_of_a_tenant(on_disk: tuple[Host, Disk]) -> None:
    host, tier = on_disk
    tag = salt_tag("brief")
    blue = engine(host, "blue")
    assert host.ask(b"one", wire.SetQuota("blue", disk(ttl_s=60))) is None
    for client, name, salt in ((blue, "a", b""), (blue, "b", tag), (b"one", "c", tag), (b"one", "d", salt_tag("long"))):
        assert host.find(client, salted(name, salt)) is True

    def left(now: float) -> tuple[int, int | None]:
        """Chunks in memory, and objects on disk, so many seconds after they were computed."""
        host.tick(now, 1000.0 + now)
        host.rest()
        return host.index.chunks, tier.usage().objects

    assert left(29.0) == (4, 4)
    assert left(30.0)[0] == 2 and left(39.0) == (2, 2)
    assert left(59.0)[0] == 2 and left(60.0)[0] == 1 and left(69.0) == (1, 1)
    assert left(10_000.0) == (1, 1)
    host.assert_quiet()


def of_salts(desk: Desk, tenant: str = "") -> dict[tuple[str, str], TenantStatus]:
    return {(each.tenant, each.salt): each for each in desk.depot.status(tenant).tenants}


def test_a_salt_has_a_quota_of_its_own_which_its_tenant_sees_by_its_tag(desk: Desk) -> None:
    desk.hello(b"admin")
    blue, red = engine(desk, "blue"), engine(desk, "red")
    tag = salt_tag("alice")
    for number in range(3):
        for client in (blue, red):
            assert desk.ask(client, salted(f"first {number}", tag)) is True
    assert desk.ask(b"admin", wire.SetQuota("blue", pages(cap=5), tag)) is None
    for number in range(6):
        for salt in (tag, salt_tag("bob"), b""):
            desk.ask(blue, salted(f"then {number} {salt.hex()}", salt))
    shown = {whose: each.chunks for whose, each in of_salts(desk).items()}
    assert shown == {("", ""): 3 + 12, ("blue", tag.hex()[:16]): 5}
    assert of_salts(desk)["blue", tag.hex()[:16]].quota == pages(cap=5)
    assert of_salts(desk, "blue").keys() == {("blue", tag.hex()[:16])} and of_salts(desk, "red") == {}
    (event,) = [event.text for event in desk.depot.status().events if event.kind == "quota"]
    assert event.startswith(f"quota of salt {tag.hex()[:16]} of blue: ") and "alice" not in event
    assert desk.ask(b"admin", wire.SetQuota("blue", None, tag)) is None
    assert of_salts(desk) == {}
    desk.index.validate()


def test_a_salt_of_clients_without_a_tenant_can_have_a_quota_although_they_cannot(desk: Desk) -> None:
    desk.hello(b"admin")
    desk.depot._is_tenant = "blue".__eq__
    tag = salt_tag("alice")
    assert isinstance(desk.ask(b"admin", wire.SetQuota("", pages(1))), BadRequest)
    assert isinstance(desk.ask(b"admin", wire.SetQuota("red", pages(1), tag)), BadRequest)
    assert isinstance(desk.ask(b"admin", wire.SetQuota("", pages(1), b"short")), BadRequest)
    assert isinstance(desk.ask(b"admin", wire.SetQuota("", disk(1), tag)), BadRequest)
    assert desk.ask(b"admin", wire.SetQuota("", pages(1), tag)) is None
    assert of_salts(desk).keys() == {("", ""), ("", tag.hex()[:16])}


def test_leases_of_a_salts_prompts_have_the_budget_of_its_account(desk: Desk) -> None:
    client, tag = engine(desk, ""), salt_tag("alice")
    desk.ask(client, wire.SetQuota("", pages(8, 8), tag))
    ours, theirs = prompt("ours", 8), prompt("theirs", 12)
    for chain, salt in ((ours, tag), (theirs, b"")):
        assert desk.ask(client, wire.Store(1, [msgspec.structs.replace(shards(chain), salt=salt)])) is True

    def lease(name: str, chain: ChunkChain, chunks: int, salt: bytes) -> object:
        hashes = bytes(chain.hashes[: 32 * chunks])
        return desk.ask(client, wire.TakeLease(name, "retain", "m", 1, PER_CHUNK, hashes, salt))

    assert lease("a", theirs, 12, b"") == 12, "half of the 24 pages above the floor"
    assert isinstance(lease("b", prompt("theirs", 12), 1, b""), Busy)
    assert lease("c", ours, 8, tag) == 8, "all of its floor"
    assert desk.ask(client, wire.SetQuota("", pages(4, 16), tag)) is None
    assert desk.depot.leases.totals("")[0] == 1, "both no longer fit above the floors"
