"""What a tenant, or one cache salt of it, may take of the arena and of local tiers. Plain data."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from kvdepot.values import size

MOST_QUOTAS = 64
"""Tenants and salts with a quota. An eviction compares all of them, and the status lists all of them."""
MOST_WEIGHT = 1e6
_MOST = 1 << 62


class Quota(msgspec.Struct, frozen=True, array_like=True):
    """The part of the arena of one tenant or salt, in bytes that the allocator counts: whole pages, including reserved
    ones. And its part of each local tier, in bytes that the file system allocates.

    floor_bytes: no other's store takes it below this. cap_bytes: it never has more; 0: no cap.
    weight: its part of what is left above all floors, beside the others' weights, in memory and in local tiers.
    ttl_s: seconds after which its chunks expire, if that is sooner than the server's own `ttl_s`; 0: no own limit.
    disk_floor_bytes, disk_cap_bytes: as the first two, in each local tier.
    """

    floor_bytes: int = 0
    cap_bytes: int = 0
    weight: float = 1.0
    ttl_s: int = 0
    disk_floor_bytes: int = 0
    disk_cap_bytes: int = 0

    @property
    def words(self) -> str:
        ttl = f", expires after {self.ttl_s} s" if self.ttl_s else ""
        cap = size(self.cap_bytes) if self.cap_bytes else "none"
        disk = ""
        if self.is_on_disk:
            most = size(self.disk_cap_bytes) if self.disk_cap_bytes else "none"
            disk = f"; on disk: floor {size(self.disk_floor_bytes)}, cap {most}"
        return f"floor {size(self.floor_bytes)}, cap {cap}, weight {self.weight:g}{ttl}{disk}"

    @property
    def is_on_disk(self) -> bool:
        return bool(self.disk_floor_bytes or self.disk_cap_bytes)

    def fault(self) -> str:
        """The fault of this quota by itself; empty: none."""
        for where, floor, cap in (
            ("", self.floor_bytes, self.cap_bytes),
            (" on disk", self.disk_floor_bytes, self.disk_cap_bytes),
        ):
            if not (0 <= floor < _MOST and 0 <= cap < _MOST):
                return f"floor and cap{where} must be 0 bytes or more"
            if cap and cap < floor:
                return f"the cap of {cap} bytes{where} is below the floor of {floor} bytes"
        if not (math.isfinite(self.weight) and 1 / MOST_WEIGHT <= self.weight <= MOST_WEIGHT):
            return f"weight {self.weight:g} is not between {1 / MOST_WEIGHT:g} and {MOST_WEIGHT:g}"
        if not 0 <= self.ttl_s <= 1 << 31:
            return f"ttl_s {self.ttl_s} is out of range"
        return ""


def fault_of(quotas: Sequence[tuple[str, Quota]], capacity_bytes: int) -> str:
    """The fault of all quotas together, each with its `name_of`, in an arena of this capacity; empty: none."""
    for name, quota in quotas:
        if fault := quota.fault():
            return f"quota of {name}: {fault}"
    if len(quotas) > MOST_QUOTAS:
        return f"{len(quotas)} tenants and salts have a quota; the limit is {MOST_QUOTAS}"
    floors = sum(quota.floor_bytes for _, quota in quotas)
    if floors > capacity_bytes:
        return f"all floors together are {floors} bytes, more than the arena's {capacity_bytes}"
    return ""


def shown_tag(tag: bytes) -> str:
    """The name of a cache salt for users, who may keep the salt secret: the first 16 hex digits of its tag."""
    return tag.hex()[:16]


def name_of(tenant: str, tag: bytes) -> str:
    """Whose quota it is, for people: a tenant's, or that of one cache salt (keys.salt_tag) of it."""
    if not tag:
        return tenant
    return f"salt {shown_tag(tag)} of {tenant or 'clients without a tenant'}"


def shortest(*ttls_s: int) -> int:
    """The limit that applies where each of these does, in seconds; 0 is none."""
    return min(filter(None, ttls_s), default=0)
