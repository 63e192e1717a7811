"""Actions: the values that the core's decisions return. Plain data.

`server/loop.py` sends replies, stops, passes descriptions to the publisher of KV events, and submits the other actions
to copy threads (memory/copier.py) and tier threads (tiers/worker.py); in tests, `tests/harness.py` does this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kvdepot.memory.copier import Call, Copy
from kvdepot.protocol.wire import Describe
from kvdepot.tiers.worker import TierTask


@dataclass(slots=True)
class Reply:
    """The reply to request `number` of `client`; a KVDepotError in `value` is sent as an error."""

    client: bytes
    number: bytes
    value: object
    """The answer, of the type that protocol/wire.py gives for the request."""


@dataclass(slots=True)
class Stop:
    """The server is to stop, as on SIGTERM."""

    reason: str


Action: TypeAlias = Reply | Copy | Call | TierTask | Stop | Describe
