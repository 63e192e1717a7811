"""The measurements of an engine: metrics in vLLM, and the speed of its prefill.

- `KVDepotStats` and `KVDepotMetrics` are the connector's metrics in vLLM's log, and as `vllm:kvdepot_*` among its
  Prometheus metrics. The scheduler and each rank's worker report the operations that ended since the last step; vLLM
  adds them up over ranks. So a shard is one rank's part of a chunk, bytes are those of all ranks, a time is one rank's.
- `PrefillSpeed` turns a load into the seconds that it saves. With vLLM's async scheduling the next step is built while
  the first still runs, so a step's time is counted from when it was built, or from the previous output if that came
  later, to its own output. Steps whose output cannot be attributed are not measured, nor is an engine's first, which
  pays for the first touch of memory and for kernels being compiled.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median, median_high
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvdepot.client.transfer import Operation
from kvdepot.protocol.metrics import BOUNDS_S

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
    "decoded_chunks": "With save_decode auto: chunks that requests have decoded, at least in part, stored or not.",
    "continued_chunks": "With save_decode auto: decoded chunks of answers with which a later prompt continued.",
    "stalls_broken": "Requests computed because the engine stood still and waited for the depot's answer.",
    "uncached_requests": "Requests not cached because of an error; the log has the reason.",
    "refused_hints": "Requests with malformed hints; the log has the reason.",
    "computed_tokens": "Tokens found in the depot that were computed, as that was sooner than loading them.",
    "lease_errors": "Leases of requests, and ends of leases, that failed or were refused.",
}
_TIMED: Mapping[str, str] = {
    "lookup_seconds": "Duration of a lookup, as the scheduler sees it.",
    "retrieve_seconds": "Duration of a load, as the worker sees it.",
    "store_seconds": "Duration of a store, as the worker sees it.",
}


@dataclass
class KVDepotStats(KVConnectorStats):
    """Counts by name, and times as lists, of one process of the engine; empty if no operation has ended."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def count(self, operation: Operation) -> None:
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
        self.data[name] = self.data.get(name, 0) + count

    def take(self) -> KVDepotStats | None:
        if self.is_empty():
            return None
        taken = KVDepotStats(data=self.data)
        self.reset()
        return taken

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data[name] + value if name in self.data else value
        return self

    def reduce(self) -> dict[str, int | float]:
        """The counts and medians that vLLM logs of an interval."""
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
        metrics: dict[str, Any] = self._by_engine[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in _TIMED:
                for took_s in value:
                    metrics[name].observe(took_s)
            elif name in _COUNTED:
                metrics[name].inc(value)


# -- the speed of prefill

_LARGE_PART = 256
"""A step counts as prefill from this many tokens of one request: decoding takes a few, and small steps are mostly
overhead."""
_MOST_BUILT = 64
"""Steps whose output is awaited; a bound, as some never come."""
_SAMPLES = 31
"""The speed is the median of this many steps, so that a step which was slow (another compilation) or seemed fast (the
output before it was late) hardly changes it."""


class _Built(NamedTuple):
    step: int
    tokens: int
    at: float


class PrefillSpeed:
    """Tokens per second of this engine's latest prefill steps. Times are those of any monotonic clock."""

    def __init__(self) -> None:
        self._built: deque[_Built] = deque(maxlen=_MOST_BUILT)
        self._output_at = -math.inf  # of the latest output
        self._is_warm = False  # whether the first measured step is over
        self._samples: deque[float] = deque(maxlen=_SAMPLES)

    def __repr__(self) -> str:
        return f"<PrefillSpeed {self.speed:.0f} tokens/s, {len(self._samples)} steps>"

    @property
    def speed(self) -> float:
        """The median in tokens per second; 0.0 while it is unknown."""
        return median_high(self._samples) if self._samples else 0.0

    @property
    def under_way(self) -> int:
        """Tokens of the prefill steps whose output has not come."""
        return sum(each.tokens for each in self._built)

    def built(self, step: int, tokens: Collection[int], now: float) -> None:
        """A step is built, and measured if it is prefill. step: its number, higher than those before. tokens: number of
        tokens of each of its requests."""
        if max(tokens, default=0) >= _LARGE_PART:
            self._built.append(_Built(step, sum(tokens), now))

    def output(self, step: int, now: float) -> None:
        """A step's output has come. step: its number; 0 if unknown. Outputs come in the order of steps; some never
        come."""
        before, self._output_at = self._output_at, now
        while self._built and self._built[0].step <= step:
            built = self._built.popleft()
            took_s = now - max(built.at, before)
            if built.step == step and took_s > 0 and self._is_warm:
                self._samples.append(built.tokens / took_s)
            self._is_warm = True
