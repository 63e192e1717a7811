"""What an engine asked of the depot and how it ended: told once an operation, for figures and traces.

The scheduler's and the worker's client tell whoever watches them (`watch`), on the thread that uses them. The one law:
to tell changes nothing; who watches neither waits nor raises.
"""

from __future__ import annotations

import time

import msgspec

from kvdepot.errors import KVDepotError

__all__ = ["Began", "Operation"]


class Began(msgspec.Struct, frozen=True):
    """When, by a clock that people read and by one that never jumps."""

    wall_ns: int
    at_s: float

    @classmethod
    def now(cls) -> Began:
        """This moment."""
        return cls(time.time_ns(), time.monotonic())


class Operation(msgspec.Struct, frozen=True):
    """One lookup, store or retrieve that has ended."""

    kind: str
    """lookup, store or retrieve."""
    requests: list[str]
    """Whose; several where an engine's step stores or retrieves for them at once."""
    began: Began
    took_s: float
    """Until the engine was told, or asked for it."""
    chunks: int
    """That were asked for: of each, a store or retrieve moves one rank's shard."""
    done: int
    """That were found, or are stored, or retrieved. Of a store that was not whole: 0."""
    size_bytes: int = 0
    """Of the shards that are done."""
    error: KVDepotError | None = None
    """Why nobody knows, or nothing was moved."""
    stored: bytes = b""
    """Keys of the chunks of a store that was whole, 32 bytes each."""
