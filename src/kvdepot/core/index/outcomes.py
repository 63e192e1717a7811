"""Outcomes of the index's operations on one shard. Plain values."""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

import msgspec

from kvdepot.core.index.chunk import Chunk, Shard

__all__ = ["Absent", "Found", "NoRoom", "Present", "Reason", "Replaced", "Reservation", "Reserved"]


class Reserved(msgspec.Struct, frozen=True, gc=False):
    """The caller may write the shard. Its chunk is held until `seal` or `remove`."""

    chunk: Chunk


class Replaced(msgspec.Struct, frozen=True, gc=False):
    """Reserved, in place of a shard that is still being loaded; the loader calls `give_back` for that one."""

    chunk: Chunk


class Present(msgspec.Struct, frozen=True, gc=False):
    """The shard exists, or others are writing it, or others still read the bytes that it would overwrite."""


class NoRoom(msgspec.Struct, frozen=True, gc=False):
    """There is no room for the shard. Those behind it were not reserved either.

    is_capped: because its tenant would exceed its cap, and nothing of the tenant's can be evicted now.
    """

    is_capped: bool = False


Reservation: TypeAlias = Reserved | Replaced | Present | NoRoom


class Found(msgspec.Struct, frozen=True, gc=False):
    """The shard is sealed and may be used."""

    chunk: Chunk
    shard: Shard


class Absent(msgspec.Struct, frozen=True, gc=False):
    """The shard does not exist, or must not be used."""


class Reason(Enum):
    """Why a chunk is removed."""

    EVICTED = "to make room; counted as evicted"
    DROPPED = "cleared, forgotten or too old"
    FAILED = "a copy failed: one rank's reserved shard is removed, and with the last shard its chunk"
