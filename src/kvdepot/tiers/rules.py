"""Rules of a local tier: quotas and times to live, by names of objects. Pure. The core makes rules, and a worker hands
them to its tier (`Enforcing.enforce`).

Each tenant with a quota owns objects, and so does each cache salt with a quota; their owners are the beginnings of
their names' parts (`owner_prefix`).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvdepot.protocol.quotas import Quota, shortest
from kvdepot.tiers.format import tenant_prefix


class Rules(msgspec.Struct, frozen=True):
    quotas: dict[str, Quota] = {}
    """Quotas by `owner_prefix`."""
    salts: dict[str, int] = {}
    """Times to live in seconds, by the first part of objects' names."""
    ttl_s: int = 0
    """Time to live of all objects in seconds; 0: no limit."""

    @classmethod
    def of(cls, quotas: Mapping[tuple[str, bytes], Quota], salts: Mapping[bytes, int], ttl_s: int) -> Rules:
        """quotas: by tenant and salt (see `ShardFacts.name`; empty: the tenant's). salts: seconds to live, by salt."""
        return cls(
            {owner_prefix(tenant, salt): quota for (tenant, salt), quota in quotas.items()},
            {salt.hex(): limit_s for salt, limit_s in salts.items()},
            ttl_s,
        )

    def ttl_of(self, name: str) -> int:
        """Seconds after which an object of this name expires: the shortest of all limits; 0: never."""
        owner = owner_of(name)
        own = [self.quotas[each].ttl_s for each in (owner, tenant_of(owner)) if each in self.quotas]
        return shortest(self.ttl_s, self.salts.get(name[:32], 0), *own)

    @property
    def ages(self) -> object:
        """All that `ttl_of` depends on, to be compared."""
        return self.ttl_s, self.salts, {owner: quota.ttl_s for owner, quota in self.quotas.items() if quota.ttl_s}

    def fault(self, capacity_bytes: int) -> str:
        """Why the floors cannot hold in a tier of this capacity; empty if they can."""
        floors = sum(quota.disk_floor_bytes for quota in self.quotas.values())
        if floors <= capacity_bytes:
            return ""
        return f"all floors on disk together are {floors} bytes, more than its capacity of {capacity_bytes}"


NO_RULES = Rules()


def owner_of(name: str) -> str:
    """The smallest owner of an object that may have a quota: the object's name up to the tenant's part."""
    return name[:41]


def tenant_of(owner: str) -> str:
    return owner[33:]


def owner_prefix(tenant: str, salt: bytes) -> str:
    """The owner for a quota of a tenant, or of its cache salt. salt: see `ShardFacts.name`; empty: the tenant."""
    return f"{salt.hex()}/{tenant_prefix(tenant)}" if salt else tenant_prefix(tenant)
