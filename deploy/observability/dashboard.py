"""The Grafana dashboard: totals, health, savings, memory and tiers, models and tenants, traffic.

Rendered as the JSON that Grafana imports (schema version 39, Grafana 10 and newer). Panels are laid out from left to
right, 24 columns per row. Every query uses the chosen data source and servers, except those of vLLM's own metrics,
which come from other scrape jobs; nothing is fetched from elsewhere. Where a series is of one server, its legend names
the instance, which is a link to the server's page, and the label `node` if the scrape job adds it, as the chart's does.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from deploy.observability.alerts import RUNBOOKS

from kvdepot.protocol.figures import figures
from kvdepot.protocol.status import Status

__all__ = ["ROWS", "Panel", "dashboard", "render"]

_COLUMNS = 24
_PAGE = {
    "title": "Page of ${__field.labels.instance}", "url": "http://${__field.labels.instance}/", "targetBlank": True,
}  # fmt: skip
_ALERT_LIST = {
    "alertName": "KVDepot", "viewMode": "list", "groupMode": "default", "groupBy": [], "sortOrder": 3, "maxItems": 20,
    "dashboardAlerts": False, "showInstances": True,
    "stateFilter": {"firing": True, "pending": True, "noData": False, "normal": False, "error": True},
}  # fmt: skip
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_CHOSEN = 'job=~"$job", instance=~"$instance"'
_ABOUT = (
    f"What the figures mean, and what to do when an alert fires: {RUNBOOKS}\n\nEach server has a page of its own, with "
    "recent events and the last errors of its tiers: click a value that names an instance."
)


_GAUGES = {each.metric: each.meaning for each in figures(Status) if each.kind != "counter"}
"""Meanings of the status's gauges, by metric."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. queries: (PromQL, legend); @ stands for the chosen servers, and # for those and the chosen models.

    unit: Grafana's name of it. alarm: the value from which it is red; None = never. highest: the end of the axis;
    None = automatic.
    """

    title: str
    what: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    columns: int = 8
    alarm: float | None = None
    highest: float | None = None


def _total(title: str, what: str, query: str, unit: str = "short", highest: float | None = None) -> Panel:
    """A sum over all chosen servers."""
    return Panel(title, what, ((query, ""),), unit, "stat", 4, highest=highest)


def _stat(title: str, what: str, query: str, unit: str = "short", alarm: float | None = None) -> Panel:
    return Panel(title, what, ((query, "{{instance}}"),), unit, "stat", 4, alarm)


def _quantiles(title: str, what: str, series: str, by: str, unit: str = "s", alarm: float | None = None) -> Panel:
    """The median and the 99th percentile of a histogram, by instance and the labels `by`."""
    labels = ", ".join(("instance", *by.split()))
    legend = " ".join(f"{{{{{label}}}}}" for label in labels.split(", "))
    return Panel(
        title, what,
        tuple(
            (f"histogram_quantile({q}, sum by ({labels}, le) (rate({series}[$__rate_interval])))", f"{legend} {name}")
            for q, name in ((0.5, "p50"), (0.99, "p99"))
        ),
        unit, alarm=alarm,
    )  # fmt: skip


def _figure(title: str, metric: str, unit: str = "short") -> Panel:
    """A gauge of each server, by its meaning in the status."""
    return _stat(title, _GAUGES[metric], f"kvdepot_{metric}{{@}}", unit)


def _share(part: str, whole: str, by: str, over: str = "$__rate_interval") -> str:
    """The share that one counter has in another."""
    return f"sum by ({by}) (increase({part}[{over}])) / sum by ({by}) (increase({whole}[{over}]))"


def _rate(series: str, by: str = "instance") -> str:
    return f"sum by ({by}) (rate({series}[$__rate_interval]))"


_ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    ("All chosen servers", (
        _total("Tokens reused", "Share of the last hour's prompt tokens that engines loaded from their depots, of "
               "those that they did not have in their own caches.",
               "sum(increase(kvdepot_reused_tokens_total{@}[1h])) / sum(increase(kvdepot_asked_tokens_total{@}[1h]))",
               "percentunit", 1),
        _total("Tokens reused per second", "Tokens that engines loaded instead of computing them.",
               "sum(rate(kvdepot_reused_tokens_total{@}[$__rate_interval]))"),
        _total("Prefill saved in an hour", "Compute time that engines saved in the last hour.",
               "sum(increase(kvdepot_saved_prefill_seconds_total{@}[1h]))", "s"),
        _total("Memory used", "Share of the capacity. Full depots are healthy.",
               "sum(kvdepot_memory_used_bytes{@}) / sum(kvdepot_memory_capacity_bytes{@})", "percentunit", 1),
        _total("Engine processes", "Connected schedulers and workers.", "sum(kvdepot_engine_processes{@})"),
        Panel("Servers", "Those that serve, and those that Prometheus scrapes.",
              (("sum(kvdepot_up{@})", "up"), ("count(up{@})", "scraped")), kind="stat", columns=4),
    )),
    ("Health", (
        _figure("Running for", "uptime_seconds", "s"),
        _figure("Engine processes", "engine_processes"),
        _stat("Tokens reused", "Share of the last hour's prompt tokens that engines loaded from the depot, of those "
              "that they did not have in their own caches.",
              _share("kvdepot_reused_tokens_total{@}", "kvdepot_asked_tokens_total{@}", "instance", "1h"),
              "percentunit"),
        _stat("Prefill saved", "Compute time that engines saved in the time range shown.",
              "increase(kvdepot_saved_prefill_seconds_total{@}[$__range])", "s"),
        _figure("Memory holds", "memory_holds_seconds", "s"),
        _stat("Tiers with an open circuit breaker", "Tiers that fail or do not answer.",
              "count by (instance) (kvdepot_tier_up{@} == 0) or 0 * sum by (instance) (kvdepot_up{@})", alarm=1),
    )),
    ("Alerts", (
        Panel("Alerts", "Rules of kvdepot that fire or are about to.", (), kind="alertlist", columns=16),
        Panel("About", "", (), kind="text", columns=8),
    )),
    ("Savings", (
        Panel("Tokens reused and found", "Of the prompt tokens that engines did not have in their own caches: loaded "
              "from the depot; and found there.", tuple(
                  (_share(f"kvdepot_{name}_tokens_total{{@}}", "kvdepot_asked_tokens_total{@}", "instance"),
                   f"{{{{instance}}}} {legend}")
                  for name, legend in (("reused", "reused"), ("found", "found"))
              ), "percentunit", highest=1),
        Panel("Tokens saved", "Tokens per second that engines loaded instead of computing them.", (
            ("rate(kvdepot_reused_tokens_total{@}[$__rate_interval])", "{{instance}}"),
        )),
        Panel("Prefill time saved", "Seconds of prefill saved per second, at the speed that each engine measured.", (
            ("rate(kvdepot_saved_prefill_seconds_total{@}[$__rate_interval])", "{{instance}}"),
        ), "s"),
        Panel("Time to first token (vLLM)", "vLLM's own metric, of all engines that the data source has: median and "
              "99th percentile.", tuple(
                  (f"histogram_quantile({q}, sum by (model_name, le)"
                   f" (rate(vllm:time_to_first_token_seconds_bucket[$__rate_interval])))", f"{{{{model_name}}}} {name}")
                  for q, name in ((0.5, "p50"), (0.99, "p99"))
              ), "s"),
        _quantiles("Prefill time saved by a request", "Of requests that loaded anything; median and 99th percentile.",
                   "kvdepot_saved_seconds_bucket{@}", ""),
        Panel("External prefix cache hit rate (vLLM)", "vLLM's own count of the same: tokens that it loaded, of those "
              "that it did not have itself.", (
                  (_share("vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_queries_total",
                          "model_name"), "{{model_name}}"),
              ), "percentunit", highest=1),
    )),
    ("Memory", (
        Panel("Memory", "Bytes of chunks, and the capacity. A full depot is healthy: it evicts the least valuable "
              "chunks.", (
                  ("kvdepot_memory_used_bytes{@}", "{{instance}} used"),
                  ("kvdepot_memory_capacity_bytes{@}", "{{instance}} capacity"),
              ), "bytes"),
        Panel("Removed or not stored", "Per second: chunks evicted to make room, forgotten, expired; shards dropped "
              "because memory was full, whose store failed, or that were corrupt.", tuple(
                  (f"rate(kvdepot_{name}_total{{@}}[$__rate_interval]) > 0", f"{{{{instance}}}} {name}")
                  for name in ("evicted_chunks", "forgotten_chunks", "expired_chunks", "dropped_shards",
                               "failed_shards", "corrupt_shards")
              )),
        Panel("Lifetime of chunks", "Medians: how long evicted chunks had not been used, and how soon chunks are used "
              "again. If the first is far below the second, chunks are evicted before they are needed.", (
                  ("histogram_quantile(0.5, sum by (instance, le) (rate(kvdepot_eviction_idle_seconds_bucket{@}"
                   "[$__rate_interval])))", "{{instance}} idle when evicted"),
                  ("histogram_quantile(0.5, sum by (instance, le) (rate(kvdepot_reuse_after_seconds_bucket{@}"
                   "[$__rate_interval])))", "{{instance}} used again after"),
              ), "s"),
    )),
    ("Tiers", (
        Panel("Bytes", "Contents and capacity of each tier, if it reports them, and what its file system has free.", (
            ("kvdepot_tier_bytes{@}", "{{instance}} {{tier}} used"),
            ("kvdepot_tier_capacity_bytes{@}", "{{instance}} {{tier}} capacity"),
            ("kvdepot_tier_free_bytes{@}", "{{instance}} {{tier}} file system free"),
        ), "bytes"),
        _quantiles("Load latency", "One call, of up to 16 shards, without the wait for a thread; median and 99th "
                   "percentile.", "kvdepot_tier_load_seconds_bucket{@}", "tier"),
        _quantiles("Load throughput", "KV bytes per second of one call; median and 99th percentile.",
                   "kvdepot_tier_load_bytes_per_second_bucket{@}", "tier", "Bps"),
        Panel("In progress", "Calls that load and save, each of up to 16 shards.", (
            ("kvdepot_tier_loads{@}", "{{instance}} {{tier}} loads"),
            ("kvdepot_tier_saves{@}", "{{instance}} {{tier}} saves"),
        )),
        _quantiles("Save latency", "One call, of up to 16 shards, without the wait for a thread; median and 99th "
                   "percentile.", "kvdepot_tier_save_seconds_bucket{@}", "tier"),
        Panel("Write queue", "Chunks are queued by reference: those evicted before their turn are dropped.", (
            ("kvdepot_tier_queued_bytes{@}", "{{instance}} {{tier}}"),
        ), "bytes"),
        Panel("Shards", "Per second.", tuple(
            (f"rate(kvdepot_tier_{name}_shards_total{{@}}[$__rate_interval]) > 0",
             f"{{{{instance}}}} {{{{tier}}}} {name}")
            for name in ("saved", "loaded", "missed", "dropped", "unavailable")
        ), columns=12),
        Panel("Failures", "Calls per second that failed or timed out, and lookups that a tier answered too late.", (
            ("rate(kvdepot_tier_failures_total{@}[$__rate_interval]) > 0", "{{instance}} {{tier}} failed calls"),
            ("rate(kvdepot_tier_late_total{@}[$__rate_interval]) > 0", "{{instance}} {{tier}} too late"),
        ), columns=12),
    )),
    ("Models and tenants", (
        Panel("Bytes by model", "The ten models that use most memory.", (
            ("topk(10, sum by (instance, model) (kvdepot_namespace_bytes{#}))", "{{instance}} {{model}}"),
        ), "bytes"),
        Panel("Tokens reused by model", "Share of the tokens that were not in its engines' own caches.", (
            (_share("kvdepot_model_reused_tokens_total{#}", "kvdepot_model_asked_tokens_total{#}", "instance, model"),
             "{{instance}} {{model}}"),
        ), "percentunit", highest=1),
        Panel("Tokens found by model", "Share of the same tokens that was in the depot.", (
            (_share("kvdepot_model_found_tokens_total{#}", "kvdepot_model_asked_tokens_total{#}", "instance, model"),
             "{{instance}} {{model}}"),
        ), "percentunit", highest=1),
        Panel("Tokens saved by tenant", "Tokens per second that a tenant's engines loaded.", (
            ("rate(kvdepot_tenant_reused_tokens_total{@}[$__rate_interval])", "{{instance}} {{tenant}}"),
        )),
        Panel("Tokens reused by tenant", "Share of the tokens that were not in its engines' own caches.", (
            (_share("kvdepot_tenant_reused_tokens_total{@}", "kvdepot_tenant_asked_tokens_total{@}",
                    "instance, tenant"), "{{instance}} {{tenant}}"),
        ), "percentunit", highest=1),
        Panel("Bytes by tenant", "The ten tenants that use most memory; of them, cache salts with a quota.", (
            ("topk(10, sum by (instance, tenant) (kvdepot_namespace_bytes{@}))", "{{instance}} {{tenant}}"),
            ('kvdepot_tenant_used_bytes{@, salt!=""}', "{{instance}} {{tenant}} {{salt}}"),
        ), "bytes"),
    )),
    ("Traffic", (
        Panel("Bytes moved", "KV copied from engines into memory, and from memory to engines.", (
            (_rate("kvdepot_stored_bytes_total{@}"), "{{instance}} stored"),
            (_rate("kvdepot_retrieved_bytes_total{@}"), "{{instance}} retrieved"),
        ), "Bps"),
        Panel("Requests", "Requests answered per second, by kind.", (
            (_rate("kvdepot_request_duration_seconds_count{@}", "instance, request"), "{{instance}} {{request}}"),
        ), "reqps"),
        Panel("Failed requests", "Share of the requests of a kind that is answered with an error.", (
            (_share("kvdepot_request_errors_total{@}", "kvdepot_request_duration_seconds_count{@}",
                    "instance, request") + " > 0", "{{instance}} {{request}}"),
        ), "percentunit", alarm=0.01),
        _quantiles("Lookup latency", "From receiving a lookup to answering it, with the wait for stores and tiers; "
                   "median and 99th percentile.", 'kvdepot_request_duration_seconds_bucket{@, request="Lookup"}', "",
                   alarm=0.5),
        _quantiles("Store and retrieve latency", "From receiving a request to answering it, which is before the "
                   "engine copies; median and 99th percentile.",
                   'kvdepot_request_duration_seconds_bucket{@, request=~"Store|Retrieve"}', "request"),
        _quantiles("Hit length", "Tokens that a lookup found, of those that found any; median and 99th percentile.",
                   "kvdepot_hit_tokens_bucket{@}", "", "short"),
        Panel("Loop lag", "How long a request waits before the server handles it.", (
            ("kvdepot_loop_lag_seconds{@}", "{{instance}}"),
        ), "s", alarm=1),
        Panel("Engine processes", "Connected schedulers and workers; and engines that neither store nor load, because "
              "a worker's self-test failed.", (
                  ("kvdepot_engine_processes{@}", "{{instance}}"),
                  ("kvdepot_faulty_engines{@} > 0", "{{instance}} uncached engines"),
              )),
        Panel("Refused", "Refusals per second; SECURITY.md names the setting of each limit.", (
            ("rate(kvdepot_refused_total{@}[$__rate_interval]) > 0", "{{instance}} {{what}}"),
        )),
    )),
)  # fmt: skip


def _others() -> tuple[Panel, ...]:
    """A panel for each gauge of the status that no other panel draws."""
    drawn = " ".join(query for _, row in _ROWS for panel in row for query, _ in panel.queries)
    return tuple(
        Panel(metric.replace("_", " ").capitalize(), meaning, ((f"kvdepot_{metric}{{@}}", "{{instance}}"),),
              "bytes" if metric.endswith("_bytes") else "short")
        for metric, meaning in _GAUGES.items() if f"kvdepot_{metric}{{" not in drawn
    )  # fmt: skip


ROWS = (*_ROWS, ("Other figures", _others()))
"""The rows from top to bottom, and their panels from left to right."""


def dashboard() -> dict[str, Any]:
    """The dashboard as plain data."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        heading: dict[str, Any] = {"type": "row", "title": title, "gridPos": _place(0, y, _COLUMNS, 1)}
        panels.append(heading | {"collapsed": False, "panels": []})
        x, y = 0, y + 1
        height = 4 if row[0].kind == "stat" else 8
        for panel in row:
            if x + panel.columns > _COLUMNS:
                x, y = 0, y + height
            panels.append(_panel(panel) | {"gridPos": _place(x, y, panel.columns, height)})
            x += panel.columns
        y += height
    for number, each in enumerate(panels, 1):
        each["id"] = number
    return {
        "uid": "kvdepot",
        "title": "kvdepot",
        "description": "KV-cache servers for LLM engines: health, savings, capacity.",
        "tags": ["kvdepot", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                _source_variable(),
                _variable("job", ""),
                _variable("instance", 'job=~"$job"'),
                _variable("model", _CHOSEN, "kvdepot_namespace_bytes"),
            ]
        },
        "panels": panels,
    }


def render() -> str:
    """The dashboard as a file."""
    return json.dumps(dashboard(), indent=1) + "\n"


def _place(x: int, y: int, columns: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": columns, "h": height}


def _panel(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green" if panel.alarm is not None else "text", "value": None}]
    if panel.alarm is not None:
        steps.append({"color": "red", "value": panel.alarm})
    limits = {} if panel.highest is None else {"max": panel.highest}
    stat = panel.kind == "stat"
    if panel.kind == "text":
        return {"type": "text", "title": panel.title, "options": {"mode": "markdown", "content": _ABOUT}}
    if panel.kind == "alertlist":
        return {"type": "alertlist", "title": panel.title, "description": panel.what, "options": _ALERT_LIST}
    named = any("{{instance}}" in legend for _, legend in panel.queries)
    drawn = {} if stat or panel.alarm is None else {"custom": {"thresholdsStyle": {"mode": "line"}}}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.what,
        "datasource": _SOURCE,
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                **limits,
                **drawn,
                "thresholds": {"mode": "absolute", "steps": steps},
                "links": [_PAGE] if named else [],
            },
            "overrides": [],
        },
        "options": (
            {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "none"}
            if stat
            else {
                "legend": {"showLegend": True, "displayMode": "list", "placement": "bottom"},
                "tooltip": {"mode": "multi"},
            }
        ),
        "targets": [
            {
                "refId": "ABCDEF"[i],
                "datasource": _SOURCE,
                "expr": _with_node(query.replace("#", f'{_CHOSEN}, model=~"$model"').replace("@", _CHOSEN)),
                "legendFormat": legend.replace("{{instance}}", "{{instance}} {{node}}"),
                "instant": stat,
                "range": not stat,
            }
            for i, (query, legend) in enumerate(panel.queries)
        ],
    }


def _with_node(query: str) -> str:
    """What is kept by instance is kept by node, too; without the label this changes nothing."""
    return query.replace("by (instance", "by (instance, node")


def _source_variable() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}


def _variable(name: str, among: str, series: str = "kvdepot_info") -> dict[str, Any]:
    query = f"label_values({series}{{{among}}}, {name})" if among else f"label_values({series}, {name})"
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }
