"""`/metrics`: the status as Prometheus metrics, unchanged. Every label has a bounded set of values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import msgspec
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
from kvdepot.protocol.figures import figures
from kvdepot.protocol.metrics import BOUNDS_S, ENGINES, Latency
from kvdepot.protocol.status import (
    DISTRIBUTIONS,
    FAMILIES,
    OTHERS,
    TIER_DISTRIBUTIONS,
    Family,
    Histogram,
    NamespaceStatus,
    Status,
    TenantStatus,
    TierStatus,
    added_up,
)
from kvdepot.web.poll import Poll

_NAMESPACES = 50
"""The largest namespaces have metrics of their own, the others are summed. The layouts of one model and shape count
together."""


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
    rows: list[Sequence[msgspec.Struct]]
    rows = [[status], _shapes(status), status.model_usage, status.usage, status.tenants, status.tiers]
    for family, each in zip(FAMILIES, rows, strict=True):
        yield from _rows(family, each)
    yield from _counters(status)
    yield from _latencies(status)
    for histogram in status.histograms:
        yield _histogram("", histogram.name, {"": histogram})
    yield from _tiers(status.tiers)


def _rows(family: Family, rows: Sequence[msgspec.Struct]) -> Iterator[Metric]:
    for figure in figures(family.rows):
        kind = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
        metric = kind(f"kvdepot_{family.prefix}{figure.metric}", figure.meaning, labels=list(family.labels))
        for row in rows:
            is_known = not (isinstance(row, TenantStatus) and row.disk_bytes is None and "disk_" in figure.path)
            if is_known and (value := figure.of(row)) is not None:
                metric.add_metric([str(getattr(row, field) or "") for field in family.labels.values()], float(value))
        yield metric


def _counters(status: Status) -> Iterator[Metric]:
    refused = CounterMetricFamily("kvdepot_refused", "Refusals by limits or keys.", labels=["what"])
    for counted in SERVER:
        count = status.counters.get(counted.name, 0)
        if what := refusal(counted):
            refused.add_metric([what], count)
        else:
            yield CounterMetricFamily(f"kvdepot_{counted.series}", counted.meaning, count)
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
    meaning = (TIER_DISTRIBUTIONS if of else DISTRIBUTIONS)[name]
    family = HistogramMetricFamily(f"kvdepot_{of}{name}", meaning, labels=["tier"] if of else [])
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
    sums = sorted(map(added_up, shapes.values()), key=lambda shape: -shape.bytes)
    rest = sums[_NAMESPACES:] + ([status.other_namespaces] if status.other_namespaces is not None else [])
    others = [added_up(rest, tenant=OTHERS, model=OTHERS, world_size=0, blocks_in_chunk=0)] if rest else []
    return sums[:_NAMESPACES] + others


def _tiers(tiers: Sequence[TierStatus]) -> Iterator[Metric]:
    meaning = "0 while a tier's circuit breaker is open, or calls of some kind fail."
    up = GaugeMetricFamily("kvdepot_tier_up", meaning, labels=["tier"])
    for tier in tiers:
        up.add_metric([tier.name], tier.state == "up")
    yield up
    # Series exist before the first event, because Prometheus does not see a series that begins above 0 as an increase.
    for counted in TIER:
        family = CounterMetricFamily(f"kvdepot_tier_{counted.series}", counted.meaning, labels=["tier"])
        for tier in tiers:
            family.add_metric([tier.name], tier.counters.get(counted.name, 0))
        yield family
    histograms: dict[str, dict[str, Histogram]] = {}
    for tier in tiers:
        for histogram in tier.histograms:
            histograms.setdefault(histogram.name, {})[tier.name] = histogram
    for name, by_tier in histograms.items():
        yield _histogram("tier_", name, by_tier)
