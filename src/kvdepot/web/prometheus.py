"""`/metrics`: the status as Prometheus metrics, unchanged. Every label has a bounded set of values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from msgspec.structs import replace
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvdepot.errors import Unavailable
from kvdepot.protocol.counters import SERVER, TIER, refusal
from kvdepot.protocol.metrics import BOUNDS_S, ENGINES, Latency
from kvdepot.protocol.status import OTHERS, Histogram, NamespaceStatus, Status, TierStatus
from kvdepot.web.poll import Poll

_NAMESPACES = 50
"""The largest namespaces have metrics of their own, the others are summed. The layouts of one model and shape count
together."""
_TOKENS = {
    "asked": "Tokens of prompts that engines looked up and did not have in their own caches.",
    "found": "Of the tokens asked for, those in the depot.",
    "reused": "Tokens that engines loaded instead of computing them.",
}
_HISTOGRAMS = {
    "hit_tokens": "Tokens that a lookup found, if any.",
    "eviction_age_seconds": "Age of evicted chunks: time since they were computed. One eviction in 16 is counted.",
    "eviction_idle_seconds": "Idle time of evicted chunks: since they were last used. One eviction in 16 is counted.",
    "reuse_after_seconds": "Time from one use of a prompt's last chunk to the next.",
    "saved_seconds": "Prefill time that a request saved, if any.",
    "load_seconds": "Duration of a call that loads up to 16 shards from a tier.",
    "save_seconds": "Duration of a call that saves up to 16 shards in a tier.",
    "load_bytes_per_second": "Throughput of a call that loads from a tier.",
    "save_bytes_per_second": "Throughput of a call that saves in a tier.",
}
"""Help texts by name; those of tiers have the prefix `tier_`."""
_GAUGES = {
    "uptime_s": ("uptime_seconds", "Time since the server started serving."),
    "capacity_bytes": ("memory_capacity_bytes", "Size of the arena."),
    "used_bytes": ("memory_used_bytes", "Bytes of the arena that hold chunks."),
    "chunks": ("chunks", "Chunks in memory, counted in each KV cache group."),
    "cached_tokens": ("cached_tokens", "Tokens of prompts in memory."),
    "reserved_shards": ("reserved_shards", "Shards being stored or loaded."),
    "holds": ("pins", "Pins of requests, leases and copies in progress; each keeps a chunk and those before it."),
    "record_slots": ("record_slots", "Slots for records of shards in the arena."),
    "record_slots_used": ("record_slots_used", "Record slots in use."),
    "unrecorded_shards": ("unrecorded_shards", "Shards without a record, which do not survive a restart."),
    "operations": ("operations", "Stores and retrieves in progress."),
    "clients": ("clients", "Connected clients: processes of engines, this web process, and commands while they run."),
    "sessions": ("sessions", "Requests that hold pins."),
    "instances": ("instances", "Registrations of KV tensors."),
    "namespace_count": ("namespaces", "Distinct models, shapes and layouts."),
    "engine_count": ("engine_processes", "Connected processes of engines: schedulers and workers."),
    "divided_engines": ("divided_engines", "Engines whose scheduler and workers disagree on the identity of their KV."),
    "faulty_engines": ("faulty_engines", "Engines with a worker that can neither store nor load KV."),
    "lease_count": ("leases", "Leases."),
    "leased_bytes": ("leased_bytes", "Bytes held by leases."),
    "waiting_bytes": ("waiting_bytes", "Bytes pinned for requests that wait in engines' queues."),
}
"""Name and help text of the metric, by field of the status."""
_SERIES = {"capped_chunks": "capped_shards", "engines": "workers"}
_LABELS = {"name": "tier"}
"""Names of labels that differ from their fields' names."""
_TIER = "tier", "name"
_OF_NAMESPACE = {
    "chunks": "Chunks in memory of a tenant, model and shape.",
    "bytes": "Bytes in memory of a tenant, model and shape.",
    "engines": "Connected workers of a tenant, model and shape: one per rank of each engine.",
}
_OF_TENANT = {
    "used_bytes": "Memory of a tenant.",
    "floor_bytes": "Memory that others cannot take from a tenant.",
    "cap_bytes": "Most memory that a tenant can have; 0: no cap.",
}
_ON_DISK_OF_TENANT = {
    "disk_bytes": "Bytes of a tenant in tiers disk://, as of their last probes.",
    "disk_floor_bytes": "Bytes in each tier disk:// that others cannot take.",
    "disk_cap_bytes": "Most bytes of a tenant in each tier disk://; 0: no cap.",
}
_LOST_OF_TENANT = {
    "evicted_chunks": "Chunks of a tenant evicted from memory.",
    "capped_chunks": "Shards not stored because of a tenant's cap.",
}
_OF_TIER = {
    "objects": "Objects in a tier.",
    "bytes": "Bytes in a tier.",
    "capacity_bytes": "Capacity of a tier.",
    "free_bytes": "Bytes that a tier's file system has free.",
    "queued_bytes": "Bytes waiting to be saved.",
    "saves": "Calls in progress that save up to 16 shards each.",
    "loads": "Calls in progress that load up to 16 shards each.",
}
"""Help texts by field, as the ones above."""


class StatusCollector(Collector):
    """Metrics of the server's last status; only `kvdepot_up` while it does not answer."""

    def __init__(self, poll: Poll) -> None:
        self._poll = poll

    def collect(self) -> Iterator[Metric]:
        meaning = "1 while the server answers and its loop lag is within bounds."
        yield GaugeMetricFamily("kvdepot_up", meaning, float(not self._poll.trouble()))
        try:
            answer = self._poll.latest()
        except Unavailable:
            return
        meaning = "How long a request waits before the server handles it."
        yield GaugeMetricFamily("kvdepot_loop_lag_seconds", meaning, answer.lag_s)
        yield from families(answer.status)


def families(status: Status) -> Iterator[Metric]:
    facts = {"version": status.version, "boot": status.boot, "host": status.host}
    yield InfoMetricFamily("kvdepot", "The server.", facts)
    for field, (name, meaning) in _GAUGES.items():
        yield GaugeMetricFamily(f"kvdepot_{name}", meaning, getattr(status, field))
    if status.holds_s is not None:
        meaning = "Median idle time of recently evicted chunks."
        yield GaugeMetricFamily("kvdepot_memory_holds_seconds", meaning, status.holds_s)
    yield from _counters(status)
    yield from _latencies(status)
    for histogram in status.histograms:
        yield _histogram("", histogram.name, {"": histogram})
    shape = "namespace", "tenant", "model", "world_size", "blocks_in_chunk"
    yield from _labelled(shape, _OF_NAMESPACE, _shapes(status))
    helps = {f"{name}_tokens": meaning for name, meaning in _TOKENS.items()}
    helps |= {each.series: each.meaning for each in SERVER if each.series in ("compared_shards", "differing_shards")}
    yield from _labelled(("model", "tenant", "model"), helps, status.model_usage, kind=CounterMetricFamily)
    yield from _labelled(("tenant", "tenant"), helps, status.usage, kind=CounterMetricFamily)
    tenant = "tenant", "tenant", "salt"
    on_disk = [each for each in status.tenants if each.disk_bytes is not None]
    yield from _labelled(tenant, _OF_TENANT, status.tenants)
    yield from _labelled(tenant, _ON_DISK_OF_TENANT, on_disk)
    yield from _labelled(tenant, _LOST_OF_TENANT, status.tenants, kind=CounterMetricFamily)
    yield from _tiers(status.tiers)


def _labelled(
    key: tuple[str, ...],
    helps: Mapping[str, str],
    rows: Iterable[Any],
    value: Callable[[Any, str], float | None] = getattr,
    kind: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily,
) -> Iterator[Metric]:
    """A metric for each field of some rows. key: their kind, then the fields that identify one. helps: help texts."""
    of, *labels = key
    names = [_LABELS.get(label, label) for label in labels]
    for field, meaning in helps.items():
        family = kind(f"kvdepot_{of}_{_SERIES.get(field, field)}", meaning, labels=names)
        for row in rows:
            if (found := value(row, field)) is not None:
                family.add_metric([str(getattr(row, label) or "") for label in labels], float(found))
        yield family


def _counters(status: Status) -> Iterator[Metric]:
    totals = {
        "stored_bytes": ("Bytes stored.", status.stored_bytes),
        "retrieved_bytes": ("Bytes retrieved.", status.retrieved_bytes),
        **{f"{name}_tokens": (meaning, getattr(status.tokens, name)) for name, meaning in _TOKENS.items()},
        "saved_prefill_seconds": ("Prefill time that engines saved.", status.saved.prefill_s),
    }
    refused = CounterMetricFamily("kvdepot_refused", "Refusals by limits or keys.", labels=["what"])
    for counted in SERVER:
        count = status.counters.get(counted.name, 0)
        if what := refusal(counted):
            refused.add_metric([what], count)
        else:
            totals[counted.series] = counted.meaning, count
    for name, (meaning, value) in totals.items():
        yield CounterMetricFamily(f"kvdepot_{name}", meaning, value)
    yield refused


def _latencies(status: Status) -> Iterator[Metric]:
    meaning = "Time from receiving a request to answering it."
    took = HistogramMetricFamily("kvdepot_request_duration_seconds", meaning, labels=["request"])
    meaning = "Requests answered with an error, by kind of request."
    failed = CounterMetricFamily("kvdepot_request_errors", meaning, labels=["request"])
    # Prometheus does not see the first request of a kind as an increase, unless its series began at 0.
    kinds = {request: Latency(request) for request in ENGINES} | {kind.request: kind for kind in status.latencies}
    for kind in kinds.values():
        took.add_metric([kind.request], _buckets(map(str, BOUNDS_S), kind.buckets), kind.sum_s)
        failed.add_metric([kind.request], kind.errors)
    yield took
    yield failed


def _histogram(of: str, name: str, by_tier: dict[str, Histogram]) -> Metric:
    """One family. of: empty for the server's histogram, whose key in `by_tier` is empty, too."""
    family = HistogramMetricFamily(f"kvdepot_{of}{name}", _HISTOGRAMS[name], labels=["tier"] if of else [])
    for tier, histogram in by_tier.items():
        buckets = _buckets(map("{:.15g}".format, histogram.bounds), histogram.counts)
        family.add_metric([tier] if of else [], buckets, histogram.sum)
    return family


def _buckets(bounds: Iterable[str], counts: Sequence[int]) -> list[tuple[str, int]]:
    """Buckets as Prometheus counts them: each includes those before it. counts: of each bucket alone."""
    return list(zip((*bounds, "+Inf"), accumulate(counts), strict=True))


def _shapes(status: Status) -> list[NamespaceStatus]:
    """The largest namespaces, those of one tenant, model and shape added up, and the sum of the others."""
    shapes: dict[tuple[object, ...], list[NamespaceStatus]] = {}
    for each in status.namespaces:
        shapes.setdefault((each.tenant, each.model, each.world_size, each.blocks_in_chunk), []).append(each)
    sums = sorted(map(_sum, shapes.values()), key=lambda shape: -shape.bytes)
    rest = sums[_NAMESPACES:] + ([status.other_namespaces] if status.other_namespaces is not None else [])
    others = [replace(_sum(rest), tenant=OTHERS, model=OTHERS, world_size=0, blocks_in_chunk=0)] if rest else []
    return sums[:_NAMESPACES] + others


def _sum(parts: Sequence[NamespaceStatus]) -> NamespaceStatus:
    sums = {field: sum(getattr(each, field) for each in parts) for field in _OF_NAMESPACE}
    return replace(parts[0], **sums)


def _tiers(tiers: Sequence[TierStatus]) -> Iterator[Metric]:
    up = {"up": "0 while a tier's circuit breaker is open, or calls of some kind fail."}
    yield from _labelled(_TIER, up, tiers, lambda tier, _: tier.state == "up")
    yield from _labelled(_TIER, _OF_TIER, tiers)
    # Series exist before the first event, because Prometheus does not see a series that begins above 0 as an increase.
    helps = {counted.series: counted.meaning for counted in TIER}
    names = {counted.series: counted.name for counted in TIER}
    yield from _labelled(_TIER, helps, tiers, lambda tier, of: tier.counters.get(names[of], 0), CounterMetricFamily)
    histograms: dict[str, dict[str, Histogram]] = {}
    for tier in tiers:
        for histogram in tier.histograms:
            histograms.setdefault(histogram.name, {})[tier.name] = histogram
    for name, by_tier in histograms.items():
        yield _histogram("tier_", name, by_tier)
