"""Quotas: the parts of the arena and of local tiers that a tenant or one of its cache salts may take. Plain data."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

import msgspec
from msgspec import Meta

from kvdepot.protocol.figures import gauge
from kvdepot.values import size

MOST_QUOTAS = 64
"""The most tenants and salts with a quota. Each eviction compares all of them, and the status lists all of them."""
MOST_WEIGHT = 1e6
_MOST = 1 << 62


class Quota(msgspec.Struct, frozen=True):
    """The limits of one tenant or salt, in settings file, messages, status, HTTP and command line. Raises ValueError.

    Memory counts in bytes of the allocator: whole pages, including reserved ones; each local tier in bytes that its
    file system allocates. The descriptions of the fields are the help of `kvdepot quota`, and of metrics.
    """

    floor_bytes: Annotated[int, gauge("Memory that others cannot take from a tenant.")] = 0
    cap_bytes: Annotated[int, gauge("Most memory that a tenant can have; 0: no cap.")] = 0
    weight: Annotated[float, Meta(description="Share of the memory above all floors, beside others; default 1.")] = 1.0
    ttl_s: Annotated[int, Meta(description="Seconds after which its chunks expire; 0: only the server's limit.")] = 0
    disk_floor_bytes: Annotated[int, gauge("Bytes in each tier disk:// that others cannot take.")] = 0
    disk_cap_bytes: Annotated[int, gauge("Most bytes of a tenant in each tier disk://; 0: no cap.")] = 0

    def __post_init__(self) -> None:
        limits = dict.fromkeys(("floor_bytes", "cap_bytes", "disk_floor_bytes", "disk_cap_bytes"), (0, _MOST))
        for name, (least, most) in {**limits, "ttl_s": (0, 1 << 31), "weight": (1 / MOST_WEIGHT, MOST_WEIGHT)}.items():
            if not least <= (value := getattr(self, name)) <= most:
                raise ValueError(f"{name}: {value:.12g} is out of range, it must be from {least:.12g} to {most:.12g}")
        for cap, floor in (("cap_bytes", "floor_bytes"), ("disk_cap_bytes", "disk_floor_bytes")):
            if 0 < getattr(self, cap) < getattr(self, floor):
                raise ValueError(f"{cap}: {getattr(self, cap)} is below {floor}, {getattr(self, floor)}")

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


class GivenQuota(Quota, frozen=True, forbid_unknown_fields=True):
    """A quota in the settings file or a body over HTTP, where an unknown field is an error; see `quota`."""

    @property
    def quota(self) -> Quota:
        return Quota(*(getattr(self, name) for name in Quota.__struct_fields__))


def fault_of(quotas: Collection[Quota], capacity_bytes: int) -> str:
    """Why these quotas cannot hold together in an arena of this capacity; empty: they can."""
    if len(quotas) > MOST_QUOTAS:
        return f"{len(quotas)} tenants and salts have a quota; the limit is {MOST_QUOTAS}"
    floors = sum(quota.floor_bytes for quota in quotas)
    if floors > capacity_bytes:
        return f"all floors together are {floors} bytes, more than the arena's {capacity_bytes}"
    return ""


def shown_tag(tag: bytes) -> str:
    """The name of a cache salt for users, who may keep the salt secret: the first 16 hex digits of its tag."""
    return tag.hex()[:16]


def name_of(tenant: str, tag: bytes) -> str:
    """The owner of a quota as people read it: a tenant, or one cache salt (keys.salt_tag) of a tenant."""
    if not tag:
        return tenant
    return f"salt {shown_tag(tag)} of {tenant or 'clients without a tenant'}"


def shortest(*ttls_s: int) -> int:
    """The shortest of these limits, in seconds; 0: no limit."""
    return min(filter(None, ttls_s), default=0)
