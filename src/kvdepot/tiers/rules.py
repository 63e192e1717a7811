"""What a local tier keeps for whom, and for how long: quotas and times to live, by names of objects. Pure.

The core makes the rules (core/tiering/), a worker hands them to its tier (`Enforcing.enforce`).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvdepot.protocol.quotas import Quota, shortest
from kvdepot.tiers.format import tenant_prefix

__all__ = ["Rules", "owner_of"]


class Rules(msgspec.Struct, frozen=True):
    """The quotas and times to live in one tier."""

    quotas: dict[str, Quota] = {}
    """By owner, see `owner_of`."""
    salts: dict[str, int] = {}
    """Seconds, by the first part of names."""
    ttl_s: int = 0
    """Of all objects; 0: none."""

    @classmethod
    def of(cls, quotas: Mapping[str, Quota], salts: Mapping[bytes, int], ttl_s: int) -> Rules:
        """Those of these tenants (by name) and salts (as in `Facts.name`)."""
        return cls(
            {tenant_prefix(tenant): quota for tenant, quota in quotas.items()},
            {salt.hex(): limit_s for salt, limit_s in salts.items()},
            ttl_s,
        )

    def ttl_of(self, name: str) -> int:
        """Seconds after which an object of this name expires: the shortest of all limits; 0: never."""
        quota = self.quotas.get(owner_of(name))
        return shortest(self.ttl_s, 0 if quota is None else quota.ttl_s, self.salts.get(name[:32], 0))

    @property
    def ages(self) -> object:
        """What `ttl_of` depends on, to be compared."""
        return self.ttl_s, self.salts, {owner: quota.ttl_s for owner, quota in self.quotas.items() if quota.ttl_s}

    def fault(self, capacity_bytes: int) -> str:
        """Why the floors cannot hold in a tier of this capacity; empty if they can."""
        floors = sum(quota.disk_floor_bytes for quota in self.quotas.values())
        if floors <= capacity_bytes:
            return ""
        return f"the floors of all tenants on disk are {floors} bytes, more than its capacity of {capacity_bytes}"


def owner_of(name: str) -> str:
    """Whose object it is: the beginning of its name's second part that stands for the tenant (`tenant_prefix`)."""
    return name[33:41]
