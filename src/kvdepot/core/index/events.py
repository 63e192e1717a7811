"""The events of the index: what its mutations have done to chunks, and the interface of their readers. Plain values.

Events are collected while a request is decided. When all its steps are done (`Depot._conclude`), the readers get them.
Invariant: a reader changes nothing that a decision depends on. It imports of the index only this file and chunk.py, so
no reader can change the index, and the index works the same without it. An event has happened already, and later events
may have overtaken it: a reader that needs to know looks at the chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol, TypeAlias

import msgspec

from kvdepot.core.index.chunk import Chunk
from kvdepot.protocol.status import Status


class Reason(Enum):
    """Why a chunk was removed."""

    EVICTED = "to make room; counted as evicted"
    DROPPED = "cleared, forgotten or too old"
    FAILED = "the store or load of its only shard failed"


class Stored(msgspec.Struct, frozen=True, gc=False):
    """One rank's shard was sealed. Once the shards of all ranks are, a lookup can find the chunk."""

    chunk: Chunk
    rank: int


class Failed(msgspec.Struct, frozen=True, gc=False):
    """One rank's reserved shard was given up."""

    chunk: Chunk


class Used(msgspec.Struct, frozen=True, gc=False):
    """A request has found the prefix that ends with these chunks. Published once per request."""

    chunks: list[Chunk]


class Hidden(msgspec.Struct, frozen=True, gc=False):
    """No lookup finds the chunk any more, although it is still there. May be published twice for one chunk."""

    chunk: Chunk


class Removed(msgspec.Struct, frozen=True, gc=False):
    """A chunk has left the index; its bytes are free."""

    chunk: Chunk
    parent: Chunk | None  # the chunk before it in its chain
    reason: Reason


IndexEvent: TypeAlias = Stored | Failed | Used | Hidden | Removed


class Reader(Protocol):
    """The interface of a reader of events."""

    def read(self, events: Sequence[IndexEvent], wall: int) -> None:
        """Read events, in their order. wall: the time of the last tick, in seconds since 1970."""

    def fill(self, status: Status) -> None:
        """Add the reader's own figures to a status."""
