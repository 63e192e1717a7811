"""Shares of a bounded space: how much of it each account has, and whose entry is evicted when space is needed. Pure.

The arena (core/index/accounts.py) and each disk tier (tiers/disk/ledger.py) divide their bytes into shares. Each tenant
with a quota has a share. So has each cache salt with a quota, whose bytes then do not count for its tenant. All others
have one share together, "the rest". A share has a policy of its own, so that a victim is found among its entries alone.

Invariants: a reservation for one share takes no other below its floor. No share is above its cap, except after a
lowered quota or a restart, until the owner of the space has evicted the excess.

**Who gives up space.** A share that would exceed its cap evicts its own entries. Otherwise the share with the highest
level does. A share's level is its bytes above its floor, divided by its weight; the share that reserves also counts the
bytes that it asks for. This is weighted max-min fairness (Bertsekas and Gallager, "Data Networks", 1992): space that
some shares do not use goes to the others in proportion to their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import TypeVar

from kvdepot.eviction.policy import Policy, Victim


class FairShare:
    """The bytes of one account in a space of `capacity` bytes."""

    __slots__ = ("_capacity", "_evictable", "cap", "floor", "is_capped", "leaving", "policy", "spare", "used", "weight")

    def __init__(self, policy: Policy, evictable: Callable[[Victim], bool], capacity: int) -> None:
        """evictable: whether an entry may be evicted now."""
        self.policy = policy
        self.used = 0  # bytes that count for the cap, including reserved ones
        self.leaving = 0  # bytes of `used` that no eviction frees, because they are being written, saved or removed
        self.spare = 0  # bytes above the floor without the leaving ones; negative: below the floor
        self._evictable = evictable
        self._capacity = capacity
        self.set_bounds(0, 0, 1.0)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.used} bytes, floor {self.floor}, cap {self.cap}, weight {self.weight:g}>"

    def set_bounds(self, floor: int, cap: int, weight: float) -> None:
        """floor, cap: bytes; cap 0: without a cap."""
        self.floor, self.weight = floor, weight
        self.spare = self.used - self.leaving - self.floor
        self.is_capped = 0 < cap < self._capacity
        self.cap = cap if self.is_capped else self._capacity

    def is_over_cap_with(self, size: int) -> bool:
        """Whether `size` bytes more would exceed its cap; without a cap, never."""
        return self.is_capped and self.used + size > self.cap

    def charge(self, size: int) -> None:
        """Add `size` bytes, or subtract them if negative."""
        self.used += size
        self.spare += size

    def mark_leaving(self, size: int) -> None:
        """Count `size` more bytes as leaving, or fewer if negative."""
        self.leaving += size
        self.spare -= size

    def victim(self, depth: float = inf) -> Victim | None:
        """The entry to evict next, taken out of the policy's queue; see `Policy.victim`. depth: a subclass may also
        evict entries that queued requests want behind this depth (core/index/wants.py)."""
        return self.policy.victim(self._evictable)


ShareT = TypeVar("ShareT", bound=FairShare)


def victim_for(
    by: ShareT | None,
    size: int,
    shares: Sequence[ShareT],
    charge_of: Callable[[Victim], int],
    depth: float | None = None,
) -> Victim | None:
    """The entry to evict next for a reservation of `size` bytes by a share, taken out of its policy's queue.

    Returns None if no entry may be evicted. by: the share that reserves; None: no particular share, so that every floor
    holds. charge_of: the bytes that an entry's eviction frees. The caller removes the entry, or returns it to its
    policy.

    depth: the place of the reservation's request among queued requests, which want entries (core/index/wants.py). Its
    own share gives up entries that are wanted behind this depth. A share with a higher level gives up all wanted
    entries, and a share with a lower level none. None: no wanted entry may be evicted.
    """
    mine, others = (inf, inf) if depth is None else (depth, -1.0)
    if len(shares) == 1:
        return shares[0].victim(mine)
    highest, level = by, 0.0
    if by is not None:
        if by.used + size > by.cap:
            return by.victim(mine)
        above = by.spare + size
        if above > 0:
            level = above / by.weight
    own = level
    for each in shares:  # this loop is most of what quotas cost
        if each.spare > level * each.weight:
            highest, level = each, each.spare / each.weight
    if highest is not None:
        victim = _victim_above_floor(highest, by, charge_of, mine if highest is by else others)
        if victim is not None:
            return victim
    levels = [
        ((each.spare + (size if each is by else 0)) / each.weight, number)
        for number, each in enumerate(shares)
        if each is not highest and (each is by or each.spare > 0)
    ]
    for level, number in sorted(levels, reverse=True):
        behind = mine if shares[number] is by else others if level > own else inf
        if (victim := _victim_above_floor(shares[number], by, charge_of, behind)) is not None:
            return victim
    return None


def _victim_above_floor(
    share: ShareT, by: ShareT | None, charge_of: Callable[[Victim], int], depth: float
) -> Victim | None:
    """The next victim of a share; None if its eviction would take the share below its floor for another share."""
    victim = share.victim(depth)
    if victim is None or share is by or share.spare >= charge_of(victim):
        return victim
    share.policy.add(victim)
    return None
