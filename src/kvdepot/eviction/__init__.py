"""Which chunk goes first when space is needed: policy.py says what a policy is; each has a file.

Pure; called by the index and by bounded tiers, on the deciding thread.
"""

from __future__ import annotations

from collections.abc import Callable

from kvdepot.eviction.adaptive import Adaptive
from kvdepot.eviction.lru import Lru
from kvdepot.eviction.policy import Policy, Queue, Victim
from kvdepot.eviction.s3fifo import S3Fifo

__all__ = ["POLICIES", "Lru", "Policy", "Queue", "S3Fifo", "Victim"]

POLICIES: dict[str, Callable[[], Policy]] = {
    "adaptive": Adaptive,
    "lru": Lru,
    "s3fifo": S3Fifo,
}
