"""One operation of a client (a lookup, store or retrieve) and its outcome, for metrics and traces.

The scheduler's and the worker's client pass each to their `watch` once it has ended, on the thread that uses them. A
watcher must neither block nor raise.
"""

from __future__ import annotations

import time

import msgspec

from kvdepot.errors import KVDepotError

__all__ = ["Began", "Operation"]


class Began(msgspec.Struct, frozen=True):
    """When an operation began, by the wall clock and by the monotonic one."""

    wall_ns: int
    at_s: float

    @classmethod
    def now(cls) -> Began:
        return cls(time.time_ns(), time.monotonic())


class Operation(msgspec.Struct, frozen=True):
    """One lookup, store or retrieve that has ended."""

    kind: str
    """lookup, store or retrieve."""
    requests: list[str]
    """Request ids; several where one engine step stores or retrieves for several requests."""
    began: Began
    took_s: float
    """Until the engine asked for the outcome."""
    chunks: int
    """Chunks asked for; a store or retrieve copies one rank's shard of each."""
    done: int
    """Chunks found, stored or retrieved; 0 for a store that was not complete."""
    size_bytes: int = 0
    """Bytes of the shards that are done."""
    error: KVDepotError | None = None
    """Why the lookup was not answered, or nothing was copied."""
    stored: bytes = b""
    """Hashes of the chunks of a complete store, 32 bytes each."""
