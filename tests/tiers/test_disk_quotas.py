"""Quotas and times to live in a disk tier, on a real directory beside a plain model of it."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from kvdepot.errors import ConfigError
from kvdepot.protocol.keys import salt_tag
from kvdepot.protocol.quotas import Quota
from kvdepot.testing.tiers import content
from kvdepot.tiers import Blob, parse
from kvdepot.tiers.disk import Disk
from kvdepot.tiers.format import ShardFacts
from kvdepot.tiers.rules import Rules
from tests.conftest import eventually

BLOCK = 4096
CAPACITY = 24 * BLOCK
LARGEST = 4  # blocks of an object: so few that the file system needs none to map them
TENANTS = ("blue", "red", "green", "")
SALTS = (b"", salt_tag("short"), salt_tag("own"))
Owner: TypeAlias = tuple[str, bytes]
"""A tenant, and the salt that its objects are stored under."""
OWNERS: list[Owner] = [(tenant, salt) for tenant in TENANTS for salt in SALTS]
NOBODY: Owner = "", b""
WALL = 1_800_000_000


def name_of(tenant: str, number: int, salt: bytes = b"") -> str:
    return ShardFacts(tenant, "m", 1, 0, 1, 1, b"layout").name(salt, number.to_bytes(32, "little"))


def on_disk(floor: int = 0, cap: int = 0, weight: float = 1.0, ttl_s: int = 0) -> Quota:
    """In blocks."""
    return Quota(0, 0, weight, ttl_s, floor * BLOCK, cap * BLOCK)


def of_tenants(**quotas: Quota) -> Rules:
    return Rules.of({(tenant, b""): quota for tenant, quota in quotas.items()}, {}, 0)


def opened(path: Path, rules: Rules, capacity_bytes: int = CAPACITY) -> Disk:
    """The tier, with its objects counted."""
    tier = Disk(path, capacity_bytes, rules=rules)
    eventually(lambda: tier.usage().objects is not None)
    return tier


def write(tier: Disk, tenant: str, number: int, blocks: int = 1, born: int = WALL, salt: bytes = b"") -> bool:
    data = content(number, blocks * BLOCK)
    return tier.write([Blob(name_of(tenant, number, salt), [memoryview(data)], born)])[0]


def there(tier: Disk, tenant: str, numbers: range, salt: bytes = b"") -> list[int]:
    found = tier.find([name_of(tenant, number, salt) for number in numbers])
    return [number for number, is_there in zip(numbers, found, strict=True) if is_there]


def enforce(tier: Disk, rules: Rules, wall: float = WALL) -> None:
    while tier.enforce(rules, wall):
        pass


@pytest.mark.parametrize("seed", range(6))
def test_files_obey_quotas_whatever_tenants_write_and_however_quotas_change(seed: int, tmp_path: Path) -> None:
    """Floors, caps and sums as the files say; eviction/test_shares.py has the model of who must give way to whom."""
    draw, quotas = random.Random(seed), dict[Owner, Quota]()
    tier = opened(tmp_path / "tier", Rules())
    sizes: dict[str, tuple[Owner, int]] = {}

    def held() -> Counter[Owner]:
        """Blocks by account, of the objects that have files."""
        blocks: Counter[Owner] = Counter()
        for name, is_there in zip(list(sizes), tier.find(list(sizes)), strict=True):
            salt, space, rest = name.split("/")
            assert (tmp_path / "tier" / salt[:2] / salt / space / rest[:2] / rest).exists() == is_there
            if is_there:
                owner, count = sizes[name]
                account = next((each for each in (owner, (owner[0], b"")) if each in quotas), NOBODY)
                blocks[account] += count
            else:
                del sizes[name]
        return blocks

    for turn in range(300):
        if turn % 20 == 0:
            left, quotas = CAPACITY // BLOCK, {}
            for owner in draw.sample([each for each in OWNERS if each != NOBODY], 4):
                floor = draw.randint(0, min(left, 10))
                left -= floor
                quotas[owner] = on_disk(floor, draw.choice([0, floor or 3, floor + 6]), draw.choice([0.5, 1.0, 4.0]))
            if turn % 60 == 0:
                tier.close()
                tier = opened(tmp_path / "tier", Rules.of(quotas, {}, 0))
            enforce(tier, Rules.of(quotas, {}, 0))
        owner, number, blocks = draw.choice(OWNERS), draw.randrange(6), draw.randint(1, LARGEST)
        before = held()
        if write(tier, owner[0], number, blocks, salt=owner[1]):
            sizes[name_of(owner[0], number, owner[1])] = owner, blocks
        after, account = held(), next((each for each in (owner, (owner[0], b"")) if each in quotas), NOBODY)
        usage, prefixes = tier.usage(), Rules.of(quotas, {}, 0).quotas
        assert usage.bytes == sum(after.values()) * BLOCK <= CAPACITY
        for each, prefix in zip(quotas, prefixes, strict=True):
            quota = quotas[each]
            assert usage.owners.get(prefix, 0) == after[each] * BLOCK
            assert not quota.disk_cap_bytes or after[each] * BLOCK <= quota.disk_cap_bytes
            floor = quota.disk_floor_bytes // BLOCK
            assert each == account or after[each] >= min(before[each], floor), f"{owner!r} takes {each!r} below it"
    tier.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Disk]]:
    """Open the tier with quotas by tenant; it is closed with the test."""
    tiers: list[Disk] = []

    def begin(rules: Rules, capacity_bytes: int = CAPACITY) -> Disk:
        for tier in tiers:
            tier.close()
        tiers.append(opened(tmp_path / "tier", rules, capacity_bytes))
        return tiers[-1]

    yield begin
    for tier in tiers:
        tier.close()


def test_a_smaller_capacity_is_divided_by_quotas_as_soon_as_a_server_starts(start: Callable[..., Disk]) -> None:
    tier = start(Rules())
    for number in range(8):
        assert write(tier, "blue", number)
    for number in range(16):
        assert write(tier, "red", number)
    tier = start(of_tenants(blue=on_disk(6)), 10 * BLOCK)
    assert [len(there(tier, tenant, range(16))) for tenant in ("blue", "red")] == [8, 2], "2 above each floor"


def test_a_restart_knows_when_contents_were_computed_although_they_were_read_since(start: Callable[..., Disk]) -> None:
    tier = start(Rules())
    assert write(tier, "blue", 1, born=WALL) and write(tier, "blue", 2, born=WALL + 10)
    tier = start(Rules())
    rules = of_tenants(blue=on_disk(ttl_s=60))
    assert tier.read([Blob(name_of("blue", 1), [memoryview(bytearray(BLOCK))])]) == [BLOCK]
    tier = start(Rules())
    enforce(tier, rules, WALL + 59)
    assert there(tier, "blue", range(3)) == [1, 2]
    enforce(tier, rules, WALL + 60)
    assert there(tier, "blue", range(3)) == [2]
    enforce(tier, rules, WALL + 70)
    assert tier.usage().objects == 0 and tier.usage().counters["expired"] == 1 + 1


def test_an_object_from_the_future_expires_as_one_of_when_it_was_found(start: Callable[..., Disk]) -> None:
    rules, now, ahead = Rules.of({}, {}, 3600), time.time(), 30 * 86_400
    tier = start(Rules())
    enforce(tier, rules, now + ahead)
    assert write(tier, "blue", 1, born=int(now) + ahead)
    for wall, left in ((now, 1), (now + 3590, 1), (now + 3610, 0)):  # the clock is right again
        enforce(tier, rules, wall)
        assert tier.usage().objects == left
    assert write(tier, "blue", 1, born=int(now) + ahead)
    tier = start(Rules())
    for wall, left in ((now, 1), (now + 3590, 1), (now + 3700, 0)):
        enforce(tier, rules, wall)
        assert tier.usage().objects == left


def test_floors_beyond_the_capacity_are_refused_at_the_start(tmp_path: Path) -> None:
    config = parse(f"disk://{tmp_path}/tier?capacity_gib=1MiB")
    config = type(config)(
        config.kind, config.url, config.options, config.own, rules=of_tenants(blue=on_disk(200), red=on_disk(57))
    )
    with pytest.raises(ConfigError, match="more than its capacity of 1048576"):
        config.open()
