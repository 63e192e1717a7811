"""The events of the index: what its mutations have done to chunks. Plain values.

Events are collected while a request is decided, and handed to the listeners after the mutation (core/depot.py). What an
event says has happened already, and later events may have overtaken it. A listener may change the index in turn, as
the tiers and waiting lookups do; these events are handed out next.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol, TypeAlias

import msgspec

from kvdepot.core.actions import Action
from kvdepot.core.index.chunk import Chunk


class Reason(Enum):
    """Why a chunk was removed."""

    EVICTED = "to make room; counted as evicted"
    DROPPED = "cleared, forgotten or too old"
    FAILED = "the store or load of its only shard failed"


class Stored(msgspec.Struct, frozen=True, gc=False):
    """One rank's shard was sealed. With the last rank's, a lookup can find the chunk."""

    chunk: Chunk
    rank: int


class Failed(msgspec.Struct, frozen=True, gc=False):
    """One rank's reserved shard was given up."""

    chunk: Chunk


class Used(msgspec.Struct, frozen=True, gc=False):
    """A request has found the prefix that ends with these chunks. Each is said once per request."""

    chunks: list[Chunk]


class Hidden(msgspec.Struct, frozen=True, gc=False):
    """No lookup finds the chunk any more, although it is still there. It may be said twice."""

    chunk: Chunk


class Removed(msgspec.Struct, frozen=True, gc=False):
    """A chunk has left the index; its bytes are free."""

    chunk: Chunk
    parent: Chunk | None
    """The chunk before it in its chain."""
    reason: Reason
    tiers: int = 0
    """Bit t: tier t has all shards of a chunk that was evicted."""


IndexEvent: TypeAlias = Stored | Failed | Used | Hidden | Removed


class Listener(Protocol):
    """Whoever wants to know what has happened to chunks."""

    def notice(self, events: Sequence[IndexEvent], now: float) -> Sequence[Action]:
        """Take note of events, in their order, and return what is to be done about them."""
