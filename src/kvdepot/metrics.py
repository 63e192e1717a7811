"""Re-exports protocol/metrics.py."""

from kvdepot.protocol.metrics import (
    BOUNDS_S,
    Event,
    Journal,
    Latencies,
    Latency,
    percentile,
)

__all__ = [
    "BOUNDS_S",
    "Event",
    "Journal",
    "Latencies",
    "Latency",
    "percentile",
]
