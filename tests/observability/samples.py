"""A status that every metric can be made of."""

from __future__ import annotations

from kvdepot.metrics import BOUNDS_S, Latency
from kvdepot.status import (
    Device,
    Histogram,
    NamespaceStatus,
    Saved,
    Status,
    TenantStatus,
    TierStatus,
    TokenCounts,
    Usage,
)


def full_status() -> Status:
    """A status with one of everything that metrics are made of."""
    return Status(
        chunk_size_tokens=256, capacity_bytes=4, used_bytes=2, chunks=1, reserved_shards=0, holds=0, evicted_chunks=0,
        record_slots=1, record_slots_used=1, unrecorded_shards=0, operations=0, clients=1, sessions=1, instances=1,
        saved=Saved(256, 0.5), tokens=TokenCounts(512, 300, 256, 400), holds_s=2580.0,
        usage=[Usage("", 512, 300, 256)], model_usage=[Usage("", 512, 300, 256, "model")],
        histograms=[
            Histogram(name, "s", [1.0], [1, 0], 0.5)
            for name in ("hit_tokens", "eviction_age_seconds", "eviction_idle_seconds", "reuse_after_seconds",
                         "saved_seconds")
        ],
        latencies=[Latency("Lookup", 1, 0, 0.1, [1] + [0] * len(BOUNDS_S))],
        namespaces=[NamespaceStatus("", "model", 1, 16, 1, 2, 1)],
        tenants=[TenantStatus("", 2, 1, 0, 0, 1.0, 0, 0, 0)],
        tiers=[TierStatus("disk", "through", "up", 1, 2, 4, 0, 0, {}, free_bytes=9, histograms=[
            Histogram(f"{call}_{what}", "s", [1.0], [1, 0], 0.5)
            for call in ("load", "save") for what in ("seconds", "bytes_per_second")
        ])],
        devices=[Device("GPU-1", "a GPU", 1, 1, 1, {}, 1, "")],
        counters={"lookups_refused": 1},
    )  # fmt: skip
