"""What a server says of itself: the one schema that command line, HTTP, page and metrics read. Plain data.

Filled in by depot.py and server.py, answered to `wire.Status`; `read` is for whoever asked. Sizes in bytes, times in
seconds, counters since the server's start. The one law: names here are promises; what is new is added, with a default.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvdepot.metrics import Event, Latency

__all__ = ["Engine", "HitRate", "Kept", "NamespaceStatus", "Saved", "Status", "TierStatus", "read"]


class HitRate(msgspec.Struct, frozen=True):
    """Of a window: its length, chunks looked up in it, the share that hit, and that of an endless cache."""

    window_s: float
    chunks: int
    hit_rate: float
    ceiling: float


class Saved(msgspec.Struct, frozen=True):
    """What engines did not have to compute: tokens that they got back on all ranks, and the time it would have taken.

    prefill_s: by the speed that each engine measured of itself; tokens of engines that told none count as no time.
    """

    tokens: int = 0
    prefill_s: float = 0.0


class Engine(msgspec.Struct, frozen=True):
    """One client of the server: a scheduler, a worker, or a person's command."""

    id: str
    since_s: float
    models: list[str] = []
    ranks: list[int] = []
    device: str = ""
    tenant: str = ""
    sessions: int = 0
    pinned_chunks: int = 0
    queued: int = 0
    idle_s: float = 0.0
    prefill_tokens_s: float = 0.0


class NamespaceStatus(msgspec.Struct, frozen=True):
    """Chunks whose bytes mean the same."""

    tenant: str
    model: str
    world_size: int
    blocks_in_chunk: int
    chunks: int
    bytes: int
    engines: int
    lookup_chunks: int = 0
    hit_chunks: int = 0


class TierStatus(msgspec.Struct, frozen=True):
    """What lies behind memory. objects, bytes, capacity_bytes: None where the tier has not told."""

    name: str
    write: str
    state: str
    objects: int | None
    bytes: int | None
    capacity_bytes: int | None
    queued_bytes: int
    saves: int
    counters: dict[str, int]


class Kept(msgspec.Struct, frozen=True):
    """A pin by name. left_s: None = no end."""

    name: str
    chunks: int
    bytes: int
    left_s: float | None
    tenant: str = ""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """One server, now."""

    version: str = ""
    boot: str = ""
    pid: int = 0
    wall_s: float = 0.0
    uptime_s: float = 0.0
    chunk_size_tokens: int
    capacity_bytes: int
    used_bytes: int
    chunks: int
    reserved_shards: int
    holds: int
    evicted_chunks: int
    record_slots: int
    record_slots_used: int
    unrecorded_shards: int
    operations: int
    clients: int
    sessions: int
    instances: int
    stored_bytes: int = 0
    retrieved_bytes: int = 0
    saved: Saved = Saved()
    hit_rates: list[HitRate] = []
    latencies: list[Latency] = []
    namespaces: list[NamespaceStatus] = []
    engines: list[Engine] = []
    pinned: list[dict[str, Any]] = []
    tiers: list[TierStatus] = []
    devices: list[dict[str, Any]] = []
    counters: dict[str, int] = {}
    events: list[Event] = []


def read(value: Any) -> Status:
    """A server's answer to `wire.Status`; parts that a newer server added are passed over."""
    return msgspec.convert(value, Status)
