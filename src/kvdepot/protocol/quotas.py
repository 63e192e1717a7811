"""What one tenant may take of the arena. Plain data, used in settings, messages and the core."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

__all__ = ["MOST_QUOTAS", "MOST_WEIGHT", "Quota", "fault_of"]

MOST_QUOTAS = 64
"""Tenants with a quota. An eviction compares all of them, and the status lists all of them."""
MOST_WEIGHT = 1e6
_MOST = 1 << 62


class Quota(msgspec.Struct, frozen=True, array_like=True):
    """One tenant's part of the arena, in bytes that the allocator counts: whole pages, including reserved ones.

    floor_bytes: no other tenant's store takes the tenant below this. cap_bytes: the tenant never has more; 0: no cap.
    weight: its part of what is left above all floors, beside the other tenants' weights. ttl_s: seconds after which its
    chunks expire, if that is sooner than the server's own `ttl_s`; 0: no own limit.
    """

    floor_bytes: int = 0
    cap_bytes: int = 0
    weight: float = 1.0
    ttl_s: int = 0

    @property
    def words(self) -> str:
        """For people."""
        ttl = f", expires after {self.ttl_s} s" if self.ttl_s else ""
        cap = f"{self.cap_bytes} bytes" if self.cap_bytes else "none"
        return f"floor {self.floor_bytes} bytes, cap {cap}, weight {self.weight:g}{ttl}"

    def fault(self) -> str:
        """What is wrong with it by itself; empty if nothing is."""
        if not (0 <= self.floor_bytes < _MOST and 0 <= self.cap_bytes < _MOST):
            return "floor and cap must be 0 bytes or more"
        if self.cap_bytes and self.cap_bytes < self.floor_bytes:
            return f"the cap of {self.cap_bytes} bytes is below the floor of {self.floor_bytes}"
        if not (math.isfinite(self.weight) and 1 / MOST_WEIGHT <= self.weight <= MOST_WEIGHT):
            return f"weight {self.weight:g} is not between {1 / MOST_WEIGHT:g} and {MOST_WEIGHT:g}"
        if not 0 <= self.ttl_s <= 1 << 31:
            return f"ttl_s {self.ttl_s} is out of range"
        return ""


def fault_of(quotas: Mapping[str, Quota], capacity_bytes: int) -> str:
    """What is wrong with the quotas of all tenants, by name, in an arena of this capacity; empty if nothing is."""
    for tenant, quota in quotas.items():
        if fault := quota.fault():
            return f"quota of {tenant}: {fault}"
    if len(quotas) > MOST_QUOTAS:
        return f"{len(quotas)} tenants have a quota; the limit is {MOST_QUOTAS}"
    floors = sum(quota.floor_bytes for quota in quotas.values())
    if floors > capacity_bytes:
        return f"the floors of all tenants together are {floors} bytes, more than the arena's {capacity_bytes}"
    return ""
