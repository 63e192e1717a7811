"""Actions: the values that the core's decisions return. Plain data.

`server/loop.py` sends replies, stops, has memory allocated, passes descriptions to the publisher of KV events, and
submits the other actions to tier threads (tiers/worker.py); in tests, `tests/harness.py` does this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from kvdepot.memory.allocator import Extents
from kvdepot.protocol.wire import Describe
from kvdepot.tiers.worker import TierTask


@dataclass(slots=True)
class Reply:
    """The reply to request `number` of `client`; a KVDepotError in `value` is sent as an error."""

    client: bytes
    number: bytes
    value: object  # the answer, of the type that protocol/wire.py gives for the request


@dataclass(slots=True)
class Prepare:
    """Have the arena's memory at `extents` allocated, before a client writes there. The outcome comes with `token`."""

    token: Any
    extents: list[Extents]


class Prepared(NamedTuple):
    """The outcome of a Prepare. is_allocated: all its extents have memory."""

    is_allocated: bool


@dataclass(slots=True)
class Stop:
    """Stop the server, as SIGTERM does."""

    reason: str


Action: TypeAlias = Reply | Prepare | TierTask | Stop | Describe
