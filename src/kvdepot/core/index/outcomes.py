"""What the index answers, for each chunk that it was asked about. Plain values."""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

import msgspec

from kvdepot.core.index.chunk import Chunk, Shard

__all__ = ["Absent", "Found", "NoRoom", "Present", "Reason", "Replaced", "Reservation", "Reserved"]


class Reserved(msgspec.Struct, frozen=True, gc=False):
    """The shard is to be written, and its chunk is held until `seal` or `remove`."""

    chunk: Chunk


class Replaced(msgspec.Struct, frozen=True, gc=False):
    """Reserved, in place of a shard that is still being loaded: that is for `give_back` once nothing writes to it."""

    chunk: Chunk


class Present(msgspec.Struct, frozen=True, gc=False):
    """The shard is there, or others are writing it, or others still read what must not be written over."""


class NoRoom(msgspec.Struct, frozen=True, gc=False):
    """There is no room for the shard. Nothing was done for those behind it either."""


Reservation: TypeAlias = Reserved | Replaced | Present | NoRoom


class Found(msgspec.Struct, frozen=True, gc=False):
    """The shard is sealed and may be given out."""

    chunk: Chunk
    shard: Shard


class Absent(msgspec.Struct, frozen=True, gc=False):
    """It is not there, or not to be given to anybody."""


class Reason(Enum):
    """Why a chunk leaves."""

    EVICTED = "to make room: it may be missed, and counts as evicted"
    DROPPED = "cleared, forgotten or too old"
    FAILED = "its copy failed: the reserved shard of one rank goes, and with the last shard its chunk"
