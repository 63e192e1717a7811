"""`/metrics`: the status as Prometheus metrics, named by its conventions. Every label has a bounded set of values.

Called by app.py for each scrape. Values are those of the status, unchanged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

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
from kvdepot.protocol.leases import KINDS, Sum
from kvdepot.protocol.metrics import BOUNDS_S
from kvdepot.protocol.quotas import MOST_QUOTAS
from kvdepot.protocol.status import Device, NamespaceStatus, Status, TenantStatus, TierStatus
from kvdepot.web.poll import Poll

__all__ = ["StatusCollector", "families"]

_NO_EVENTS = {counted.name: 0 for counted in TIER}
"""Series exist before the first event, because Prometheus does not see a series that begins above 0 as an increase."""
_LEASES = MOST_QUOTAS * len(KINDS)
_NAMESPACES = 50
"""Only the largest namespaces have metrics; the layouts of one model and shape count together."""
_GAUGES = {
    "uptime_s": ("uptime_seconds", "Time since the server started serving."),
    "capacity_bytes": ("memory_capacity_bytes", "Size of the arena."),
    "used_bytes": ("memory_used_bytes", "Bytes of the arena that hold chunks."),
    "chunks": ("chunks", "Chunks in memory, counted in each KV cache group."),
    "cached_tokens": ("cached_tokens", "Tokens of prompts in memory."),
    "reserved_shards": ("reserved_shards", "Shards being stored or loaded."),
    "holds": ("held_chunks", "Chunks held by pins or copies."),
    "record_slots": ("record_slots", "Slots for records of shards in the arena."),
    "record_slots_used": ("record_slots_used", "Record slots in use."),
    "unrecorded_shards": ("unrecorded_shards", "Shards without a record, which do not survive a restart."),
    "operations": ("operations", "Stores and retrieves in progress."),
    "clients": ("clients", "Connected clients."),
    "sessions": ("sessions", "Requests that hold pins."),
    "instances": ("instances", "Registrations of KV tensors."),
    "namespace_count": ("namespaces", "Distinct models, shapes and layouts."),
    "engine_count": ("engines", "Connected schedulers and workers of engines."),
    "lease_count": ("leases", "Leases."),
    "leased_bytes": ("leased_bytes", "Bytes held by leases."),
}
"""Name and help text of the metric, by field of the status."""


class StatusCollector(Collector):
    """Metrics of the server's last status; only `kvdepot_up` while it does not answer."""

    def __init__(self, poll: Poll) -> None:
        self._poll = poll

    def collect(self) -> Iterator[Metric]:
        up = not self._poll.trouble()
        yield GaugeMetricFamily(
            "kvdepot_up", "1 while the server answers and its loop lag is within bounds.", float(up)
        )
        try:
            answer = self._poll.latest()
        except Unavailable:
            return
        yield GaugeMetricFamily(
            "kvdepot_loop_lag_seconds", "How long a request waits before the server handles it.", answer.lag_s
        )
        yield from families(answer.status)


def families(status: Status) -> Iterator[Metric]:
    """All metrics of one status."""
    yield InfoMetricFamily("kvdepot", "The server.", {"version": status.version, "boot": status.boot})
    for field, (name, meaning) in _GAUGES.items():
        yield GaugeMetricFamily(f"kvdepot_{name}", meaning, getattr(status, field))
    yield from _counters(status)
    yield from _hit_rates(status)
    yield from _latencies(status)
    yield from _namespaces(status.namespaces)
    yield from _tenants(status.tenants)
    yield from _leases(status.lease_sums)
    yield from _tiers(status.tiers)
    yield from _devices(status.devices)


def _counters(status: Status) -> Iterator[Metric]:
    totals = {
        "stored_bytes": ("Bytes stored.", status.stored_bytes),
        "retrieved_bytes": ("Bytes retrieved.", status.retrieved_bytes),
        "asked_tokens": ("Tokens of prompts that engines looked up, in whole chunks.", status.asked_tokens),
        "saved_tokens": ("Tokens that engines loaded instead of computing them.", status.saved.tokens),
        "saved_prefill_seconds": ("Prefill time that engines saved.", status.saved.prefill_s),
    }
    refused = CounterMetricFamily("kvdepot_refused", "Refusals by limits or keys.", labels=["what"])
    for counted in SERVER:
        count = status.counters.get(counted.name, 0)
        if what := refusal(counted):
            refused.add_metric([what], count)
        else:
            totals[counted.name] = counted.meaning, count
    for name, (meaning, value) in totals.items():
        yield CounterMetricFamily(f"kvdepot_{name}", meaning, value)
    yield refused


def _hit_rates(status: Status) -> Iterator[Metric]:
    reuse = GaugeMetricFamily(
        "kvdepot_reuse_ratio",
        "Tokens that engines loaded, beyond their own caches, over prompt tokens looked up.",
        labels=["window_seconds"],
    )
    for each in status.reuse:
        if each.asked_tokens:
            reuse.add_metric([f"{each.window_s:g}"], each.rate)
    yield reuse
    rate = GaugeMetricFamily(
        "kvdepot_hit_ratio",
        "Share of looked-up chunks that were in the depot, whether or not the engine had them too.",
        labels=["window_seconds"],
    )
    ceiling = GaugeMetricFamily(
        "kvdepot_hit_ratio_ceiling",
        "Upper bound: the hit rate of an infinite cache.",
        labels=["window_seconds"],
    )
    for window in status.hit_rates:
        if not window.chunks:  # without lookups there is no hit rate
            continue
        rate.add_metric([f"{window.window_s:g}"], window.hit_rate)
        ceiling.add_metric([f"{window.window_s:g}"], window.ceiling)
    yield rate
    yield ceiling


def _latencies(status: Status) -> Iterator[Metric]:
    took = HistogramMetricFamily(
        "kvdepot_request_duration_seconds", "Time from receiving a request to answering it.", labels=["request"]
    )
    failed = CounterMetricFamily("kvdepot_request_errors", "Requests answered with an error.", labels=["request"])
    for kind in status.latencies:
        below = 0
        buckets = []
        for bound, count in zip((*BOUNDS_S, None), kind.buckets, strict=True):
            below += count
            buckets.append(("+Inf" if bound is None else str(bound), below))
        took.add_metric([kind.request], buckets, kind.sum_s)
        failed.add_metric([kind.request], kind.errors)
    yield took
    yield failed


def _namespaces(namespaces: Sequence[NamespaceStatus]) -> Iterator[Metric]:
    labels = ["tenant", "model", "world_size", "blocks_in_chunk"]
    gauges = {
        "chunks": GaugeMetricFamily("kvdepot_namespace_chunks", "Chunks in memory.", labels=labels),
        "bytes": GaugeMetricFamily("kvdepot_namespace_bytes", "Bytes in memory.", labels=labels),
        "engines": GaugeMetricFamily(
            "kvdepot_namespace_engines", "Workers registered in the namespace.", labels=labels
        ),
    }
    counters = {
        "lookup_chunks": CounterMetricFamily("kvdepot_namespace_lookup_chunks", "Chunks looked up.", labels=labels),
        "hit_chunks": CounterMetricFamily("kvdepot_namespace_hit_chunks", "Chunks found.", labels=labels),
    }
    # Namespaces that differ only in layout are one series. They are summed before the smallest are dropped; otherwise
    # a layout that moves in and out of the largest would make counters fall.
    sums: dict[tuple[str, ...], dict[str, int]] = defaultdict(lambda: dict.fromkeys((*gauges, *counters), 0))
    for namespace in namespaces:
        values = sums[namespace.tenant, namespace.model, str(namespace.world_size), str(namespace.blocks_in_chunk)]
        for name in values:
            values[name] += getattr(namespace, name)
    for names, values in sorted(sums.items(), key=lambda each: -each[1]["bytes"])[:_NAMESPACES]:
        for name, gauge in gauges.items():
            gauge.add_metric(list(names), values[name])
        for name, counter in counters.items():
            counter.add_metric(list(names), values[name])
    yield from gauges.values()
    yield from counters.values()


def _tenants(tenants: Sequence[TenantStatus]) -> Iterator[Metric]:
    """At most protocol.quotas.MOST_QUOTAS tenants and salts, and the others together under empty names."""
    labels = ["tenant", "salt"]
    gauges = {
        "used_bytes": GaugeMetricFamily("kvdepot_tenant_used_bytes", "Memory of a tenant.", labels=labels),
        "floor_bytes": GaugeMetricFamily(
            "kvdepot_tenant_floor_bytes", "Memory that others cannot take from a tenant.", labels=labels
        ),
        "cap_bytes": GaugeMetricFamily(
            "kvdepot_tenant_cap_bytes", "Most memory that a tenant can have; 0: no cap.", labels=labels
        ),
        "disk_bytes": GaugeMetricFamily(
            "kvdepot_tenant_disk_bytes", "Bytes of a tenant in tiers disk://, as of their last probes.", labels=labels
        ),
        "disk_floor_bytes": GaugeMetricFamily(
            "kvdepot_tenant_disk_floor_bytes", "Bytes in each tier disk:// that others cannot take.", labels=labels
        ),
        "disk_cap_bytes": GaugeMetricFamily(
            "kvdepot_tenant_disk_cap_bytes", "Most bytes of a tenant in each tier disk://; 0: no cap.", labels=labels
        ),
    }
    counters = {
        "evicted_chunks": CounterMetricFamily(
            "kvdepot_tenant_evicted_chunks", "Chunks of a tenant evicted from memory.", labels=labels
        ),
        "capped_chunks": CounterMetricFamily(
            "kvdepot_tenant_capped_chunks", "Shards not stored because of a tenant's cap.", labels=labels
        ),
    }
    for tenant in tenants:
        whose = [tenant.tenant, tenant.salt]
        for name, gauge in gauges.items():
            if tenant.disk_bytes is not None or not name.startswith("disk"):
                gauge.add_metric(whose, getattr(tenant, name))
        for name, counter in counters.items():
            counter.add_metric(whose, getattr(tenant, name))
    yield from gauges.values()
    yield from counters.values()


def _leases(sums: Sequence[Sum]) -> Iterator[Metric]:
    """By tenant and kind, those that held most bytes for longest."""
    labels = ["tenant", "kind"]
    held = GaugeMetricFamily("kvdepot_lease_bytes", "Bytes that leases hold.", labels=labels)
    counters = {
        "byte_seconds": CounterMetricFamily(
            "kvdepot_lease_byte_seconds", "Bytes that leases held, times seconds.", labels=labels
        ),
        "spared_bytes": CounterMetricFamily(
            "kvdepot_lease_spared_bytes", "Bytes of chunks that would have been evicted without leases.", labels=labels
        ),
        "saved_tokens": CounterMetricFamily(
            "kvdepot_lease_saved_tokens", "Tokens that engines loaded of such chunks.", labels=labels
        ),
        "saved_s": CounterMetricFamily(
            "kvdepot_lease_saved_prefill_seconds", "Prefill time of these tokens.", labels=labels
        ),
    }
    for each in sorted(sums, key=lambda each: -each.byte_seconds)[:_LEASES]:
        held.add_metric([each.tenant, each.kind], each.bytes)
        for name, counter in counters.items():
            counter.add_metric([each.tenant, each.kind], getattr(each, name))
    yield held
    yield from counters.values()


def _tiers(tiers: Sequence[TierStatus]) -> Iterator[Metric]:
    up = GaugeMetricFamily("kvdepot_tier_up", "0 while a tier's circuit breaker is open.", labels=["tier"])
    gauges = {
        "objects": GaugeMetricFamily("kvdepot_tier_objects", "Objects in a tier.", labels=["tier"]),
        "bytes": GaugeMetricFamily("kvdepot_tier_bytes", "Bytes in a tier.", labels=["tier"]),
        "capacity_bytes": GaugeMetricFamily("kvdepot_tier_capacity_bytes", "Capacity of a tier.", labels=["tier"]),
        "queued_bytes": GaugeMetricFamily("kvdepot_tier_queued_bytes", "Bytes waiting to be saved.", labels=["tier"]),
        "saves": GaugeMetricFamily("kvdepot_tier_saves", "Shards being saved.", labels=["tier"]),
    }
    events = CounterMetricFamily(
        "kvdepot_tier_events",
        "The counters of a tier, by name.",
        labels=["tier", "event"],
    )
    for tier in tiers:
        up.add_metric([tier.name], float(tier.state == "up"))
        for name, gauge in gauges.items():
            if (value := getattr(tier, name)) is not None:
                gauge.add_metric([tier.name], value)
        for event, count in {**_NO_EVENTS, **tier.counters}.items():
            events.add_metric([tier.name, event], count)
    yield up
    yield from gauges.values()
    yield events


def _devices(devices: Sequence[Device]) -> Iterator[Metric]:
    up = GaugeMetricFamily("kvdepot_device_up", "0 while a GPU's copies fail.", labels=["device"])
    gauges = {
        "registrations": GaugeMetricFamily(
            "kvdepot_device_registrations", "Registrations of a GPU's tensors.", labels=["device"]
        ),
        "context_bytes": GaugeMetricFamily(
            "kvdepot_device_context_bytes", "GPU memory used by the server's context.", labels=["device"]
        ),
        "staging_bytes": GaugeMetricFamily(
            "kvdepot_device_staging_bytes", "GPU memory used by staging buffers.", labels=["device"]
        ),
        "pinned_bytes": GaugeMetricFamily(
            "kvdepot_device_pinned_bytes",
            "Bytes of the arena registered with the driver, once for all GPUs.",
            labels=["device"],
        ),
    }
    for device in devices:
        up.add_metric([device.uuid], float(not device.failure))
        for name, gauge in gauges.items():
            if (value := getattr(device, name)) is not None:
                gauge.add_metric([device.uuid], value)
    yield up
    yield from gauges.values()
