"""The Grafana dashboard: health, savings, capacity, users.

Rendered as the JSON that Grafana imports (schema version 39, Grafana 10 and newer). Panels are laid out from left to
right, 24 columns per row. Every query uses the chosen data source and servers; nothing is fetched from elsewhere.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

__all__ = ["FOLDED", "ROWS", "Panel", "dashboard", "render"]

_COLUMNS = 24
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. queries: (PromQL, legend); @ stands for the chosen servers. unit: Grafana's name of it.

    alarm: the value from which it is red; None = never. highest: the end of the axis; None = automatic.
    """

    title: str
    what: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    columns: int = 8
    alarm: float | None = None
    highest: float | None = None


def _stat(title: str, what: str, query: str, unit: str = "short", alarm: float | None = None) -> Panel:
    return Panel(title, what, ((query, "{{instance}}"),), unit, "stat", 4, alarm)


def _quantiles(title: str, requests: str) -> Panel:
    asked = f'kvdepot_request_duration_seconds_bucket{{@, request=~"{requests}"}}[$__rate_interval]'
    return Panel(
        title, "From receiving a request to answering it; median and 99th percentile.",
        tuple(
            (f"histogram_quantile({q}, sum by (request, le) (rate({asked})))", f"{{{{request}}}} {name}")
            for q, name in ((0.5, "p50"), (0.99, "p99"))
        ),
        "s",
    )  # fmt: skip


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    ("Health", (
        _stat("Running for", "Since each server started serving.", "kvdepot_uptime_seconds{@}", "s"),
        _stat("Engines", "Connected schedulers and workers.", "kvdepot_engines{@}"),
        _stat("Prompt tokens reused", "Share of the last hour's prompt tokens loaded from the depot; what engines' own "
              "caches had does not count.",
              "sum(increase(kvdepot_saved_tokens_total{@}[1h])) / sum(increase(kvdepot_asked_tokens_total{@}[1h]))",
              "percentunit"),
        _stat("Prefill saved", "Compute time that engines saved in the time range shown.",
              "sum(increase(kvdepot_saved_prefill_seconds_total{@}[$__range]))", "s"),
        _stat("Memory used", "A full depot is healthy: it evicts the least valuable chunks.",
              "kvdepot_memory_used_bytes{@} / kvdepot_memory_capacity_bytes{@}", "percentunit"),
        _stat("Tiers with an open circuit breaker", "Tiers that fail or do not answer.",
              "count(kvdepot_tier_up{@} == 0) or vector(0)", alarm=1),
    )),
    ("Savings", (
        Panel("Prompt tokens reused, and chunks found", "Share of prompt tokens loaded from the depot, beyond the "
              "engines' own caches; share of chunks found there, and its upper bound, an infinite cache. If the last "
              "two are far apart, more memory would help.", (
                  ("kvdepot_reuse_ratio{@}", "reused, {{window_seconds}} s"),
                  ("kvdepot_hit_ratio{@}", "found, {{window_seconds}} s"),
                  ("kvdepot_hit_ratio_ceiling{@}", "upper bound, {{window_seconds}} s"),
              ), "percentunit", highest=1),
        Panel("Tokens saved", "Tokens per second that engines loaded instead of computing them.", (
            ("rate(kvdepot_saved_tokens_total{@}[$__rate_interval])", "{{instance}}"),
        )),
        Panel("Prefill time saved", "Seconds of prefill saved per second, at the speed that each engine measured.", (
            ("rate(kvdepot_saved_prefill_seconds_total{@}[$__rate_interval])", "{{instance}}"),
        ), "s"),
    )),
    ("Traffic", (
        Panel("Bytes moved", "KV copied from engines into memory, and from memory to engines.", (
            ("sum(rate(kvdepot_stored_bytes_total{@}[$__rate_interval]))", "stored"),
            ("sum(rate(kvdepot_retrieved_bytes_total{@}[$__rate_interval]))", "retrieved"),
        ), "Bps"),
        Panel("Requests", "Requests answered per second, by kind.", (
            ("sum by (request) (rate(kvdepot_request_duration_seconds_count{@}[$__rate_interval]))", "{{request}}"),
        ), "reqps"),
        Panel("Failed requests", "Requests per second answered with an error.", (
            ("sum by (request) (rate(kvdepot_request_errors_total{@}[$__rate_interval])) > 0", "{{request}}"),
        ), "reqps"),
        _quantiles("Lookup latency", "Lookup"),
        _quantiles("Store and retrieve latency", "Store|Retrieve"),
        Panel("Lookups", "Chunks looked up per second, and chunks found.", (
            ("sum(rate(kvdepot_lookup_chunks_total{@}[$__rate_interval]))", "looked up"),
            ("sum(rate(kvdepot_hit_chunks_total{@}[$__rate_interval]))", "hit"),
        )),
    )),
    ("Capacity", (
        Panel("Memory", "Bytes of chunks, and the capacity.", (
            ("kvdepot_memory_used_bytes{@}", "{{instance}} used"),
            ("kvdepot_memory_capacity_bytes{@}", "{{instance}} capacity"),
        ), "bytes"),
        Panel("Chunks removed or not stored", "Per second: evicted to make room; dropped because memory was full; "
              "forgotten; expired; store failed; corrupt.", tuple(
                  (f"sum(rate(kvdepot_{name}_chunks_total{{@}}[$__rate_interval]))", name)
                  for name in ("evicted", "dropped", "forgotten", "expired", "failed", "corrupt")
              )),
        Panel("Refused", "Refusals per second; SECURITY.md names the setting of each limit.", (
            ("sum by (what) (rate(kvdepot_refused_total{@}[$__rate_interval])) > 0", "{{what}}"),
        )),
        Panel("Tiers: bytes", "Contents of each tier, if it reports them.", (
            ("kvdepot_tier_bytes{@}", "{{tier}} used"),
            ("kvdepot_tier_capacity_bytes{@}", "{{tier}} capacity"),
        ), "bytes"),
        Panel("Tiers: write queue", "Chunks are queued by reference: those evicted before their turn are dropped.", (
            ("kvdepot_tier_queued_bytes{@}", "{{tier}}"),
        ), "bytes"),
        Panel("Tiers: chunks", "Per second: saved, loaded, missed, dropped.", (
            ("sum by (tier, event) (rate(kvdepot_tier_events_total{@}[$__rate_interval])) > 0", "{{tier}} {{event}}"),
        )),
    )),
    ("Users", (
        Panel("Bytes by model", "The ten models that use most memory.", (
            ("topk(10, sum by (model) (kvdepot_namespace_bytes{@}))", "{{model}}"),
        ), "bytes"),
        Panel("Found by model", "Share of the chunks looked up by its engines that were in the depot.", (
            ("sum by (model) (rate(kvdepot_namespace_hit_chunks_total{@}[$__rate_interval]))"
             " / sum by (model) (rate(kvdepot_namespace_lookup_chunks_total{@}[$__rate_interval]))", "{{model}}"),
        ), "percentunit", highest=1),
        Panel("Engines", "Connected schedulers and workers.", (
            ("kvdepot_engines{@}", "{{instance}}"),
        )),
    )),
    ("GPUs", (
        Panel("Copies succeed", "1, or 0 after a failed copy; `kvdepot status` has the driver's error.", (
            ("kvdepot_device_up{@}", "{{instance}} {{device}}"),
        ), columns=6, highest=1),
        Panel("Workers", "Registrations of KV tensors on a GPU.", (
            ("kvdepot_device_registrations{@}", "{{instance}} {{device}}"),
        ), columns=6),
        Panel("GPU memory", "GPU memory used by the server: its context, and staging buffers.", (
            ("kvdepot_device_context_bytes{@}", "{{device}} context"),
            ("kvdepot_device_staging_bytes{@}", "{{device}} staging"),
        ), "bytes", columns=6),
        Panel("Memory registered with the driver", "Copies from and to unregistered memory go through the driver's "
              "own buffers and are slower.", (
                  ("max by (instance) (kvdepot_device_pinned_bytes{@})", "{{instance}} registered"),
                  ("kvdepot_memory_capacity_bytes{@} and on (instance) kvdepot_device_up{@}", "{{instance}} arena"),
              ), "bytes", columns=6),
    )),
)  # fmt: skip
"""The rows from top to bottom, and their panels from left to right."""
FOLDED = ("GPUs",)
"""Rows for which only some servers have data: collapsed, and not queried until they are opened."""


def dashboard() -> dict[str, Any]:
    """The dashboard as plain data."""
    panels: list[dict[str, Any]] = []
    made: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        heading: dict[str, Any] = {"type": "row", "title": title, "gridPos": _place(0, y, _COLUMNS, 1)}
        heading |= {"collapsed": title in FOLDED, "panels": []}
        panels.append(heading)
        made.append(heading)
        into = heading["panels"] if heading["collapsed"] else panels
        x, y = 0, y + 1
        height = 4 if row[0].kind == "stat" else 8
        for panel in row:
            if x + panel.columns > _COLUMNS:
                x, y = 0, y + height
            made.append(_panel(panel) | {"gridPos": _place(x, y, panel.columns, height)})
            into.append(made[-1])
            x += panel.columns
        y += height
    for number, each in enumerate(made, 1):
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
        "templating": {"list": [_source_variable(), _variable("job", ""), _variable("instance", 'job=~"$job"')]},
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
    chosen = 'job=~"$job", instance=~"$instance"'
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.what,
        "datasource": _SOURCE,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, **limits, "thresholds": {"mode": "absolute", "steps": steps}},
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
                "expr": query.replace("@", chosen),
                "legendFormat": legend,
                "instant": stat,
                "range": not stat,
            }
            for i, (query, legend) in enumerate(panel.queries)
        ],
    }


def _source_variable() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}


def _variable(name: str, among: str) -> dict[str, Any]:
    query = f"label_values(kvdepot_info{{{among}}}, {name})" if among else f"label_values(kvdepot_info, {name})"
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
