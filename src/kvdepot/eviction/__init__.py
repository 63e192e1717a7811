"""Eviction policies: policy.py defines the interface; each policy has a file.

No I/O; the index calls them on the deciding thread, bounded tiers under their own locks.
"""

from __future__ import annotations

from collections.abc import Callable

from kvdepot.eviction.learned import Learned
from kvdepot.eviction.lru import Lru
from kvdepot.eviction.policy import Policy, Victim

__all__ = ["POLICIES", "Learned", "Lru", "Policy", "Victim"]

POLICIES: dict[str, Callable[[], Policy]] = {"learned": Learned, "lru": Lru}
