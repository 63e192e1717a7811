"""Shares of a space, and expiry by age, against sums over all entries: what memory and disk tiers divide by."""

from __future__ import annotations

import itertools
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvdepot.eviction import POLICIES, Victim
from kvdepot.eviction.ages import Ages
from kvdepot.eviction.shares import FairShare, victim_for

NUMBERS = range(3)
"""Shares; the first is that of the rest, which has no bounds."""
NONE = (0, 0, 1.0)
"""Floor, cap and weight of a share without a quota."""


class Item(Victim):
    """An entry of `size` bytes; while it is held it is not evicted."""

    size: int = 0
    share: int = 0
    held: bool = False
    born: int = 0
    ttl_s: int = 0


def is_free(item: Victim) -> bool:
    assert isinstance(item, Item)
    return not item.held


def size_of(item: Victim) -> int:
    assert isinstance(item, Item)
    return item.size


class Space:
    """A space whose shares hold items, and nothing else that knows of shares."""

    def __init__(self, capacity: int, bounds: list[tuple[int, int, float]], policy: str = "lru") -> None:
        self.capacity, self.bounds = capacity, bounds
        self.shares = [FairShare(POLICIES[policy](), is_free, capacity) for _ in bounds]
        for share, each in zip(self.shares, bounds, strict=True):
            share.set_bounds(*each)
        self.items: list[Item] = []
        self._names = 0

    def used(self, number: int | None = None) -> int:
        return sum(item.size for item in self.items if number in (None, item.share))

    def store(self, number: int, size: int) -> bool:
        share = self.shares[number]
        if size > share.cap or share.used > share.cap:
            return False
        while self.used() + size > self.capacity or share.is_over_cap_with(size):
            victim = victim_for(share, size, self.shares, size_of)
            if victim is None:
                return False
            assert isinstance(victim, Item) and not victim.held
            self.remove(victim, True)
        self._names += 1
        item = Item(key=str(self._names).encode(), size=size, share=number)
        share.charge(size)
        share.policy.insert([item])
        share.policy.add(item)
        self.items.append(item)
        return True

    def remove(self, item: Item, evicted: bool) -> None:
        self.items = [other for other in self.items if other is not item]
        item.gone = True
        share = self.shares[item.share]
        share.charge(-item.size)
        share.policy.remove(item, evicted)

    def fill(self, *numbers: int) -> list[int]:
        """Store many items of one byte by turns; the bytes of each share afterwards."""
        for _ in range(300):
            for number in numbers:
                assert self.store(number, 1)
        return [self.used(number) for number in NUMBERS[: len(self.shares)]]


class ShareMachine(RuleBasedStateMachine):
    """Stores, holds, items that are leaving, and changes of bounds."""

    @initialize(capacity=st.integers(8, 40), policy=st.sampled_from(sorted(POLICIES)))
    def begin(self, capacity: int, policy: str) -> None:
        self.space = Space(capacity, [NONE] * len(NUMBERS), policy)
        self.leaving: list[Item] = []

    @rule(number=st.sampled_from(NUMBERS), size=st.integers(1, 6))
    def store(self, number: int, size: int) -> None:
        space, share = self.space, self.space.shares[number]
        before = [space.used(each) for each in NUMBERS]
        is_stored = space.store(number, size)
        floors = [floor for floor, *_ in space.bounds]
        for other in set(NUMBERS) - {number}:
            kept = space.used(other) - sum(item.size for item in self.leaving if item.share == other)
            took = space.used(other) < before[other]
            assert not took or kept >= floors[other], "a share was taken below its floor by another one"
        if is_stored:
            assert share.used <= share.cap
        elif share.used + size <= share.cap:
            for item in space.items if not share.is_over_cap_with(size) else ():
                largest = max(other.size for other in space.items if other.share == item.share)
                spare = space.shares[item.share].spare  # only the policy's next victim is tried, whatever its size
                assert item.held or (item.share != number and spare < largest), "an entry could have been evicted"

    @precondition(lambda self: self.space.items)
    @rule(data=st.data(), held=st.booleans())
    def hold(self, data: st.DataObject, held: bool) -> None:
        item = data.draw(st.sampled_from(self.space.items))
        if item in self.leaving or item.held == held:
            return
        item.held = held
        if held:
            self.leaving.append(item)
            self.space.shares[item.share].mark_leaving(item.size)

    @precondition(lambda self: self.leaving)
    @rule(goes=st.booleans())
    def end_leaving(self, goes: bool) -> None:
        item = self.leaving.pop()
        share = self.space.shares[item.share]
        share.mark_leaving(-item.size)
        item.held = False
        if goes:
            self.space.remove(item, False)
        else:
            share.policy.add(item)

    @rule(
        number=st.sampled_from(NUMBERS[1:]),
        floor=st.integers(0, 12),
        cap=st.integers(0, 30),
        weight=st.sampled_from([0.5, 4.0]),
    )
    def set_bounds(self, number: int, floor: int, cap: int, weight: float) -> None:
        self.space.bounds[number] = floor, max(cap, floor) if cap else 0, weight
        self.space.shares[number].set_bounds(*self.space.bounds[number])

    @invariant()
    def sums_agree(self) -> None:
        for number, share in enumerate(self.space.shares if hasattr(self, "space") else []):
            leaving = sum(item.size for item in self.leaving if item.share == number)
            assert (share.used, share.leaving) == (self.space.used(number), leaving)
            assert share.spare == share.used - leaving - self.space.bounds[number][0]


TestShares = ShareMachine.TestCase
TestShares.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize(
    ("bounds", "used"),
    [
        ([(0, 0, 1), (20, 0, 1), (0, 0, 3)], [16, 36, 48]),  # 80 above the floor, by weight
        ([(0, 0, 1), (30, 0, 1), (30, 40, 1)], [15, 45, 40]),  # the third stops at its cap
        ([(0, 0, 1), (10, 10, 1), (0, 5, 9)], [85, 10, 5]),
    ],
)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_shares_divide_what_is_above_the_floors_by_weight(
    policy: str, bounds: list[tuple[int, int, float]], used: list[int]
) -> None:
    space = Space(100, bounds, policy)
    assert space.fill(0, 1, 2) == used


def test_unused_space_serves_others_until_its_share_wants_it() -> None:
    space = Space(100, [NONE, (30, 0, 1.0), (10, 0, 1.0)])
    assert space.fill(1) == [0, 100, 0]
    assert space.fill(2) == [0, 60, 40]
    assert space.fill(0) == [20, 50, 30]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from([0, 5, 10, 30])), max_size=80),
    st.lists(st.tuples(st.integers(0, 79), st.sampled_from([0, 5, 30, 60]), st.booleans()), max_size=40),
    st.lists(st.integers(0, 120), min_size=1, max_size=6),
)
def test_each_entry_expires_once_and_when_its_present_limit_says(
    born: list[tuple[int, int]], changes: list[tuple[int, int, bool]], walls: list[int]
) -> None:
    ages: Ages[Item] = Ages(lambda item: item.ttl_s)
    items = [Item(born=at, ttl_s=ttl_s) for at, ttl_s in born]
    for item in items:
        ages.record(item)
    for wall in sorted(walls):
        for number, ttl_s, goes in changes if items else ():
            item = items[number % len(items)]
            is_sooner = ttl_s > 0 and not 0 < item.ttl_s <= ttl_s
            item.ttl_s, item.gone = ttl_s, item.gone or (goes and number % 3 == 0)
            if is_sooner and not item.gone:
                ages.record(item)
        expected = [item for item in items if not item.gone and item.ttl_s and item.born + item.ttl_s <= wall]
        found = []
        for item in ages.due(wall):
            item.gone = True
            found.append(item)
        assert sorted(map(id, found)) == sorted(map(id, expected))
        assert len(ages) <= 2 * len(items) + 64 + len(changes) * len(walls)


def test_an_entry_larger_than_its_share_has_above_its_floor_stays() -> None:
    space = Space(6, [NONE, (5, 0, 1.0)])
    assert space.store(1, 3) and space.store(1, 3)
    assert not space.store(0, 3)
    assert space.used(1) == 6


class Asked(FairShare):
    """A share without entries; it notes behind which depth wanted ones may go."""

    asked: list[float] | None = None

    def victim(self, depth: float = inf) -> None:
        self.asked = [*(self.asked or []), depth]


@pytest.mark.parametrize(
    ("by", "depth", "expected"),
    [
        (0, 7, [[7], [-1], [inf]]),  # the second is above the first with what that asks for, and the third below
        (0, inf, [[inf], [-1], [inf]]),
        (1, 7, [[inf], [7], [inf]]),
        (2, 7, [[-1], [-1], [7]]),
        (0, None, [[inf], [inf], [inf]]),
    ],
)
def test_a_share_gives_up_what_is_wanted_behind_the_depth_or_to_one_of_lower_level(
    by: int, depth: float | None, expected: list[list[float]]
) -> None:
    shares = [Asked(POLICIES["lru"](), is_free, 100) for _ in range(3)]
    for share, used in zip(shares, (30, 50, 20), strict=True):
        share.charge(used)
    assert victim_for(shares[by], 5, shares, size_of, depth) is None
    assert [share.asked for share in shares] == expected
    alone = Asked(POLICIES["lru"](), is_free, 100)
    assert victim_for(alone, 5, [alone], size_of, depth) is None
    assert alone.asked == [inf if depth is None else depth]


def test_entries_that_are_gone_are_dropped_a_few_at_a_time() -> None:
    """All at once would stop the server for a second."""
    ages: Ages[Item] = Ages(lambda item: item.ttl_s)
    items = [Item(born=number, ttl_s=1000) for number in range(4000)]
    sizes = [0]
    for item in items:
        ages.record(item)
        ages.record(item)  # takes no room
        sizes.append(len(ages))
        item.gone = item.born % 8 > 0
    assert -16 <= min(after - before for before, after in itertools.pairwise(sizes)) < 0
    assert list(ages.due(5000)) == items[::8]
