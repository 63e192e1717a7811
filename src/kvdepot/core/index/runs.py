"""The values of a reservation: the run of chunks that is asked for, and the outcome. Plain data."""

from __future__ import annotations

from enum import Enum
from math import inf

import msgspec

from kvdepot.core.index.chunk import Chunk


class Run(msgspec.Struct, frozen=True, gc=False):
    """Consecutive chunks of one prompt, of which one rank's shards are to be reserved."""

    hashes: bytes
    """32 bytes per chunk."""
    size: int
    """Bytes of one shard."""
    parent: bytes = b""
    """The hash of the chunk before the first one; empty: unknown, so that all of them are loose."""
    position: int = 0
    """The number of the first chunk in its prompt, counted from 1."""
    salt: bytes = b""
    """The salt that the chunks are stored under."""
    continues: bytes = b""
    """The key of a tail that these chunks make useless: it is evicted first."""
    depth: float = inf
    """The depth (wants.py) of the request that these chunks are loaded for; infinity: only those that lack them say."""


class Refusal(Enum):
    """Why the rest of a run was not reserved."""

    NO_ROOM = "nothing more can be evicted for it"
    OVER_CAP = "its account would exceed its cap, and nothing of that account can be evicted now"
    WANTED = "requests that wait in their engines' queues are going to read what could be evicted for it"
    OTHER_SIZE = "memory has the shard in another size, which the new bytes do not fit"


class Reservation(msgspec.Struct, gc=False):
    """The outcome for a run. The shards of `chunks` may be written; these chunks are held until `seal` or `discard`."""

    chunks: list[Chunk]
    places: list[int]
    """The places of `chunks` in the run."""
    known: int = 0
    """Chunks that exist, or that others write or still read."""
    refusal: Refusal | None = None
    refused: int = 0
    """Chunks from the first refused one on: they are useless without it."""
