"""What the core wants done: the values that its decisions return. Plain data.

`server/loop.py` sends replies, and hands the other actions to copy threads (memory/copier.py) and to tiers' threads
(tiers/worker.py); in tests, `testing/harness.py` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kvdepot.memory.copier import Call, Copy
from kvdepot.tiers.worker import TierTask

__all__ = ["Action", "Reply"]


@dataclass(slots=True)
class Reply:
    """Answer request `number` of `client`; an error in `value` is told as one."""

    client: bytes
    number: bytes
    value: object
    """What the wire carries; protocol/wire.py says which value a request has."""


Action: TypeAlias = Reply | Copy | Call | TierTask
