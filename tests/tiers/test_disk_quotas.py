"""Quotas and times to live in a disk tier, on a real directory beside a plain model of it."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvdepot.errors import ConfigError
from kvdepot.protocol.keys import salt_tag
from kvdepot.protocol.quotas import Quota
from kvdepot.testing.tiers import content
from kvdepot.tiers import ABSENT, Blob, parse
from kvdepot.tiers.disk import Disk
from kvdepot.tiers.format import Facts
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
NONE = Quota()


def name_of(tenant: str, number: int, salt: bytes = b"") -> str:
    return Facts(tenant, "m", 1, 0, 1, 1, b"layout").name(salt, number.to_bytes(32, "little"))


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


@st.composite
def tables(draw: st.DrawFn) -> dict[Owner, Quota]:
    """Quotas of some tenants and salts, whose floors fit."""
    found, left = {}, CAPACITY // BLOCK
    for owner in draw(st.lists(st.sampled_from(OWNERS), unique=True, max_size=5)):
        if owner == NOBODY:
            continue
        floor = draw(st.integers(0, min(left, 10)))
        cap = draw(st.sampled_from([0, floor or 3, floor + 6]))
        left -= floor
        found[owner] = on_disk(floor, cap, draw(st.sampled_from([0.5, 1.0, 4.0])), draw(st.sampled_from([0, 0, 30])))
    return found


class Neighbours(RuleBasedStateMachine):
    """Tenants write into one directory with several salts, while quotas change, time passes and servers restart."""

    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.TemporaryDirectory()
        self.path = Path(self.place.name) / "tier"
        self.quotas: dict[Owner, Quota] = {}
        self.ttl_s = 0
        self.wall = WALL
        self.objects: dict[str, tuple[Owner, int, int, int]] = {}  # owner, blocks, born, number; by name
        self.tier = opened(self.path, Rules())

    def teardown(self) -> None:
        self.tier.close()
        self.place.cleanup()

    def account(self, owner: Owner) -> Owner:
        """Whose quota an owner's objects count for."""
        tenants = owner[0], b""
        return owner if owner in self.quotas else tenants if tenants in self.quotas else NOBODY

    def forget_evicted(self) -> None:
        names = list(self.objects)
        for name, is_there in zip(names, self.tier.find(names), strict=True):
            salt, space, rest = name.split("/")
            assert (self.path / salt[:2] / salt / space / rest[:2] / rest).exists() == is_there
            if not is_there:
                del self.objects[name]

    def held(self) -> Counter[Owner]:
        """Blocks by account, as the files say; forgets what has been evicted."""
        self.forget_evicted()
        blocks: Counter[Owner] = Counter()
        for owner, count, *_ in self.objects.values():
            blocks[self.account(owner)] += count
        return blocks

    def quota(self, account: Owner) -> Quota:
        return self.quotas.get(account, NONE)

    def has_expired(self, name: str) -> bool:
        (tenant, salt), _, born, _ = self.objects[name]
        own = self.quota((tenant, salt)).ttl_s, self.quota((tenant, b"")).ttl_s
        limits = [self.ttl_s, *own, 20 if salt == SALTS[1] else 0]
        return any(limit and born + limit <= self.wall for limit in limits)

    @rule(owner=st.sampled_from(OWNERS), number=st.integers(0, 5), blocks=st.integers(1, LARGEST))
    def write(self, owner: Owner, number: int, blocks: int) -> None:
        (tenant, salt), account, before = owner, self.account(owner), self.held()
        name = name_of(tenant, number, salt)
        is_kept = write(self.tier, tenant, number, blocks, self.wall, salt)
        if is_kept:
            self.objects[name] = owner, blocks, self.wall, number
        after = self.held()
        assert not is_kept or name in self.objects
        cap = self.quota(account).disk_cap_bytes // BLOCK
        if is_kept and cap:
            assert after[account] <= cap
        fixed = blocks  # what is not there for others to take, at most: an object does not go in parts
        for other in self.quotas.keys() - {account}:
            floor = self.quota(other).disk_floor_bytes // BLOCK
            assert after[other] >= min(before[other], floor), f"{owner!r} takes {other!r} below its floor"
            fixed += min(before[other], floor + LARGEST - 1)
        if fixed <= CAPACITY // BLOCK and blocks <= (cap or blocks):
            assert is_kept, "there was space that could be had"

    @rule(name=st.runner().flatmap(lambda self: st.sampled_from(sorted(self.objects) or [""])))
    def read(self, name: str) -> None:
        if not name:
            return
        area = bytearray(LARGEST * BLOCK)
        (size,) = self.tier.read([Blob(name, [memoryview(area)])])
        _, blocks, _, number = self.objects[name]
        assert size == ABSENT or area[:size] == content(number, blocks * BLOCK)
        assert (size == ABSENT) == (self.tier.find([name]) == [False])

    @rule(quotas=tables(), ttl_s=st.sampled_from([0, 0, 50]), seconds=st.integers(0, 40))
    def change(self, quotas: dict[Owner, Quota], ttl_s: int, seconds: int) -> None:
        self.quotas, self.ttl_s, self.wall = quotas, ttl_s, self.wall + seconds
        before = self.held()  # by the accounts that there will be
        gone = {name for name in self.objects if self.has_expired(name)}
        for name in gone:
            before[self.account(self.objects[name][0])] -= self.objects[name][1]
        enforce(self.tier, Rules.of(quotas, {SALTS[1]: 20}, ttl_s), self.wall)
        after = self.held()
        assert not gone & self.objects.keys(), "what has expired is gone"
        self.only_excess_went(before, after)

    def only_excess_went(self, before: Counter[Owner], after: Counter[Owner]) -> None:
        for account in [NOBODY, *self.quotas]:
            cap = self.quota(account).disk_cap_bytes // BLOCK
            if cap and before[account] > cap:
                assert cap - LARGEST < after[account] <= cap
            else:
                assert after[account] == before[account]

    @rule(quotas=tables())
    def restart(self, quotas: dict[Owner, Quota]) -> None:
        self.quotas = quotas
        before = self.held()
        self.tier.close()
        self.tier = opened(self.path, Rules.of(quotas, {}, 0))
        self.only_excess_went(before, self.held())
        enforce(self.tier, Rules.of({}, {}, 0), self.wall)  # the rules of this server begin to hold by a change
        self.quotas, self.ttl_s = {}, 0

    @invariant()
    def the_books_are_right(self) -> None:
        held, usage = self.held(), self.tier.usage()
        assert usage.bytes == sum(held.values()) * BLOCK <= CAPACITY
        prefixes = Rules.of(self.quotas, {}, 0).quotas
        told = dict(zip(self.quotas, (usage.owners.get(prefix, 0) for prefix in prefixes), strict=True))
        assert told == {account: held[account] * BLOCK for account in self.quotas}


Neighbours.TestCase.settings = hypothesis.settings(max_examples=60, stateful_step_count=30, deadline=None)
TestNeighbours = Neighbours.TestCase


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


def test_an_object_that_is_being_read_does_not_keep_an_account_above_its_cap(start: Callable[..., Disk]) -> None:
    tier = start(Rules())
    for number in range(6):
        assert write(tier, "blue", number)
    entry = tier._folder._ledger.hold(name_of("blue", 0))
    assert entry is not None
    enforce(tier, of_tenants(blue=on_disk(cap=2)))
    assert there(tier, "blue", range(6)) == [0, 5], "what is read is not evicted"
    tier._folder._ledger.release(entry)
    assert write(tier, "blue", 7) and there(tier, "blue", range(8)) == [5, 7]


def test_floors_beyond_the_capacity_are_refused_at_the_start(tmp_path: Path) -> None:
    config = parse(f"disk://{tmp_path}/tier?capacity_gib=1MiB")
    config = type(config)(
        config.kind,
        config.url,
        config.options,
        config.own,
        rules=of_tenants(blue=on_disk(200), red=on_disk(57)),
    )
    with pytest.raises(ConfigError, match="more than its capacity of 1048576"):
        config.open()
