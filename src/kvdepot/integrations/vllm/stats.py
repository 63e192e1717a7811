"""KVDepotConnector's metrics in vLLM: in its log, and as `vllm:kvdepot_*` among its Prometheus metrics.

The scheduler and each rank's worker report the operations that ended since the last step; vLLM adds them up over ranks.
So each shard is one rank's part of a chunk, bytes are those of all ranks, and a time is one rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvdepot.client.operation import Operation
from kvdepot.protocol.metrics import BOUNDS_S

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["Figures", "KVDepotMetrics", "KVDepotStats"]

_COUNTED: Mapping[str, str] = {
    "lookup_chunks": "Chunks looked up in the depot.",
    "hit_chunks": "Chunks found in the depot.",
    "lookup_errors": "Lookups that failed and counted as misses.",
    "retrieved_shards": "Shards loaded from the depot.",
    "retrieved_bytes": "Bytes loaded from the depot.",
    "retrieve_failed_shards": "Shards that failed to load and were recomputed.",
    "stored_shards": "Shards stored, or already in the depot.",
    "stored_bytes": "Bytes of stored shards.",
    "store_failed_shards": "Shards of stores that were dropped, at least in part.",
    "uncached_requests": "Requests not cached because of an error; the log has the reason.",
    "refused_hints": "Requests with malformed hints; the log has the reason.",
    "lease_errors": "Leases of requests, and ends of leases, that failed or were refused.",
}
_TIMED: Mapping[str, str] = {
    "lookup_seconds": "Duration of a lookup, as the scheduler sees it.",
    "retrieve_seconds": "Duration of a load, as the worker sees it.",
    "store_seconds": "Duration of a store, as the worker sees it.",
}


@dataclass
class KVDepotStats(KVConnectorStats):
    """Counts by name, and times as lists; empty if no operation has ended."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def count(self, operation: Operation) -> None:
        """Add an operation that has ended."""
        lost = operation.chunks - operation.done
        if operation.kind == "lookup":
            self.add("lookup_chunks", operation.chunks)
            self.add("hit_chunks", operation.done)
            self.add("lookup_errors", operation.error is not None)
        else:
            self.add(f"{operation.kind}d_shards", operation.done)
            self.add(f"{operation.kind}d_bytes", operation.size_bytes)
            self.add(f"{operation.kind}_failed_shards", lost)
        self.data.setdefault(f"{operation.kind}_seconds", []).append(operation.took_s)

    def add(self, name: str, count: int = 1) -> None:
        """Add to one of the counts."""
        self.data[name] = self.data.get(name, 0) + count

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another's counts and times."""
        for name, value in other.data.items():
            self.data[name] = self.data[name] + value if name in self.data else value
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM logs of an interval."""
        shown: dict[str, int | float] = {}
        for name, value in self.data.items():
            if name in _TIMED:
                shown[f"{name.removesuffix('_seconds')}s"] = len(value)
                shown[f"{name} (median)"] = round(median(value), 4)
            elif value:
                shown[name] = value
        return shown

    def is_empty(self) -> bool:
        return not self.data


class Figures:
    """Operations that ended in one process of the engine since its last step; and their spans, if vLLM traces."""

    def __init__(self, vllm_config: VllmConfig, headers: Callable[[str], Mapping[str, str] | None]) -> None:
        """headers: returns the W3C trace headers of a request, by its id."""
        self._stats = KVDepotStats()
        self._spans: Callable[[Operation], None] | None = None
        if vllm_config.observability_config.otlp_traces_endpoint:
            from kvdepot.client.tracing import Spans  # vLLM has OpenTelemetry then

            self._spans = Spans(headers=headers)

    @property
    def is_traced(self) -> bool:
        """Whether spans are made, which need requests' trace headers."""
        return self._spans is not None

    def __call__(self, operation: Operation) -> None:
        """Add an operation that has ended."""
        self._stats.count(operation)
        if self._spans is not None:
            self._spans(operation)

    def count_uncached(self) -> None:
        """Count a request that is not cached because of an error."""
        self._stats.add("uncached_requests")

    def count_refused_hints(self) -> None:
        """Count a request whose hints are malformed."""
        self._stats.add("refused_hints")

    def count_lease_error(self) -> None:
        """Count a lease, or an end of one, that failed."""
        self._stats.add("lease_errors")

    def take(self) -> KVDepotStats | None:
        """The stats since the last call; None if they are empty."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, KVDepotStats()
        return stats


class KVDepotMetrics(KVConnectorPromMetrics):
    """The stats as Prometheus metrics, by engine."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        labels = self._labelnames
        made = {
            name: self._counter_cls(f"vllm:kvdepot_{name}", text, labelnames=labels) for name, text in _COUNTED.items()
        } | {
            name: self._histogram_cls(f"vllm:kvdepot_{name}", text, labelnames=labels, buckets=BOUNDS_S)
            for name, text in _TIMED.items()
        }
        self._by_engine = {
            engine: {name: metric.labels(*values) for name, metric in made.items()}
            for engine, values in self.per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one step's stats."""
        metrics: dict[str, Any] = self._by_engine[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in _TIMED:
                for took_s in value:
                    metrics[name].observe(took_s)
            elif name in _COUNTED:
                metrics[name].inc(value)
