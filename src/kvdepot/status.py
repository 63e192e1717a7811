"""Re-exports protocol/status.py."""

from kvdepot.protocol.status import (
    MOST_NAME,
    Device,
    Engine,
    HitRate,
    Kept,
    NamespaceStatus,
    Reuse,
    Saved,
    Status,
    TierStatus,
    read,
)

__all__ = [
    "MOST_NAME",
    "Device",
    "Engine",
    "HitRate",
    "Kept",
    "NamespaceStatus",
    "Reuse",
    "Saved",
    "Status",
    "TierStatus",
    "read",
]
