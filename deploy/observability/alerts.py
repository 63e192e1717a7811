"""The Prometheus alert rules: when an operator should look at a server, and what to do.

Rendered as YAML for Prometheus's `rule_files`. Every alert is actionable, so normal events (evictions, misses) have
none; only damaged memory is critical, because without a depot engines compute. The rules expect the scrape job to be
named `kvdepot`. `runbook` names the line of the alert on the page RUNBOOKS, which is a file of this repository; where
an operator has published that page, the chart puts a `runbook_url` in its place.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from kvdepot.protocol.counters import SERVER, TIER
from kvdepot.protocol.metrics import ENGINES

__all__ = ["ALERTS", "RUNBOOKS", "Alert", "render"]

RUNBOOKS = "docs/metrics.md"
"""The page with a line for each alert, in the repository."""
_ENGINES = f'{{request=~"{"|".join(ENGINES)}"}}'
"""Requests of engines."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule. lasts: how long the query must be true. summary: the cause; action: the next step."""

    name: str
    severity: str
    lasts: str
    query: str
    summary: str
    action: str


def _of_counters() -> list[Alert]:
    """Alerts on counters that should never grow; the table of counters says which."""
    made = []
    for table, series, where in (
        (SERVER, "kvdepot_{}_total", "at {{ $labels.instance }}"),
        (TIER, "kvdepot_tier_{}_total", "in {{ $labels.tier }} of {{ $labels.instance }}"),
    ):
        for counted in table:
            if counted.alert:
                query = f"increase({series.format(counted.series)}[1h]) > 0"
                what = counted.meaning[0].lower() + counted.meaning[1:]
                summary = f'{{{{ printf "%.0f" $value }}}} in the last hour {where}: {what}'
                made.append(Alert(counted.alert, counted.severity, "0m", query, summary, counted.advice))
    return made


ALERTS = (
    Alert(
        "KVDepotUnreachable", "warning", "2m",
        'up{job="kvdepot"} == 0',
        "{{ $labels.instance }} does not answer a scrape.",
        "See the server's log. Engines run without it, and recompute what they would have loaded.",
    ),
    Alert(
        "KVDepotNoTarget", "warning", "5m",
        'absent(up{job="kvdepot"})',
        "Prometheus has no target of the job kvdepot.",
        "No server is watched. If there should be some, see Prometheus's service discovery; the scrape job must be "
        "named kvdepot.",
    ),
    Alert(
        "KVDepotNotServing", "warning", "2m",
        "kvdepot_up == 0",
        "The web process of {{ $labels.instance }} answers, but its server does not, or lags.",
        "/healthz says why. If the server hangs, kill it: the next one takes over its chunks.",
    ),
    Alert(
        "KVDepotRestarting", "warning", "0m",
        "resets(kvdepot_uptime_seconds[30m]) > 2",
        "{{ $labels.instance }} has started {{ $value }} times within 30 minutes.",
        "See the log before each start, and look for the kernel's out-of-memory killer: the arena's pages count as the "
        "server's.",
    ),
    Alert(
        "KVDepotErrors", "warning", "10m",
        # Of engines: two mistyped commands would be all requests of their kind.
        f"sum by (job, instance, request) (rate(kvdepot_request_errors_total{_ENGINES}[10m]))"
        f" / sum by (job, instance, request) (rate(kvdepot_request_duration_seconds_count{_ENGINES}[10m])) > 0.01"
        f" and sum by (job, instance, request) (increase(kvdepot_request_errors_total{_ENGINES}[10m])) > 5",
        "{{ $value | humanizePercentage }} of the {{ $labels.request }} requests to {{ $labels.instance }} fail.",
        "`kvdepot status` counts them by cause; the log of the engine has the message.",
    ),
    Alert(
        "KVDepotLookupsSlow", "warning", "10m",
        "histogram_quantile(0.99, sum by (job, instance, le)"
        ' (rate(kvdepot_request_duration_seconds_bucket{request="Lookup"}[10m]))) > 0.5',
        "One lookup in 100 at {{ $labels.instance }} takes {{ $value | humanizeDuration }} or more.",
        "Lookups wait for tiers, at most lookup_s: find the slow tier, lower lookup_s, or give the server more CPU.",
    ),
    Alert(
        "KVDepotStoresDropped", "warning", "15m",
        "rate(kvdepot_dropped_shards_total[15m])"
        " / (rate(kvdepot_dropped_shards_total[15m]) + rate(kvdepot_stored_shards_total[15m])) > 0.05",
        "{{ $labels.instance }} drops {{ $value | humanizePercentage }} of stores.",
        "Copies, tier lookups and pins hold too much of its memory: raise arena_gib, or end leases.",
    ),
    Alert(
        "KVDepotRefusing", "warning", "15m",
        "rate(kvdepot_refused_total[15m]) > 0",
        "{{ $labels.instance }} refuses {{ $labels.what }}.",
        "A client reached a limit. SECURITY.md names the setting of each limit; raise it if you trust the client.",
    ),
    Alert(
        "KVDepotNoEngine", "warning", "15m",
        "kvdepot_engine_processes == 0 and avg_over_time(kvdepot_engine_processes[1d]) > 0.1",
        "No engine is connected to {{ $labels.instance }}; for much of the last day there were some.",
        "If engines run, their logs say why they do not connect: another address, key or version, or /dev/shm is not "
        "shared. They recompute what they would have loaded.",
    ),
    Alert(
        "KVDepotEngineDivided", "warning", "5m",
        "kvdepot_divided_engines > 0",
        "{{ $value }} engines at {{ $labels.instance }} store and load nothing: their processes disagree.",
        "Scheduler and workers describe their engine differently, which is a bug: report it with the error line in "
        "the engine's log.",
    ),
    Alert(
        "KVDepotEngineUncached", "warning", "5m",
        "kvdepot_faulty_engines > 0",
        "{{ $value }} engines at {{ $labels.instance }} neither store nor load KV: copies of theirs cannot be trusted.",
        "`kvdepot status` says why: a worker's self-test failed, or its device cannot be used. The engines compute "
        "everything. Restart them when the cause is gone.",
    ),
    Alert(
        "KVDepotHitRateCollapsed", "warning", "30m",
        "increase(kvdepot_reused_tokens_total[1h]) / increase(kvdepot_asked_tokens_total[1h])"
        " < 0.5 * increase(kvdepot_reused_tokens_total[1d]) / increase(kvdepot_asked_tokens_total[1d])"
        " and increase(kvdepot_reused_tokens_total[1d]) > 0.05 * increase(kvdepot_asked_tokens_total[1d])"
        " and increase(kvdepot_asked_tokens_total[1h]) > 0.01 * increase(kvdepot_asked_tokens_total[1d])"
        " and increase(kvdepot_asked_tokens_total[1h]) > 1e5",
        "Engines reuse {{ $value | humanizePercentage }} of the tokens that they ask {{ $labels.instance }} for, less "
        "than half of the last day's share.",
        "Look for a restart, a forget, a tier that is down, or engines whose model or settings have changed: they have "
        "a namespace of their own. If there is none, the prompts have changed.",
    ),
    Alert(
        "KVDepotMemorySmall", "info", "2h",
        "sum without (le) (increase(kvdepot_eviction_idle_seconds_bucket{le=~\"300(.0)?\"}[1h]))"
        " / increase(kvdepot_eviction_idle_seconds_count[1h]) > 0.5"
        " and increase(kvdepot_reused_tokens_total[1h]) > 0.05 * increase(kvdepot_asked_tokens_total[1h])"
        " and increase(kvdepot_asked_tokens_total[1h]) > 1e5"
        " unless on (job, instance) kvdepot_tier_up",
        "{{ $labels.instance }}: {{ $value | humanizePercentage }} of the evicted chunks had been stored or used less "
        "than five minutes before.",
        "Prompts come back, and memory forgets some within minutes: add memory or a disk tier. `bench/replay.py` in a "
        "checkout of kvdepot predicts the gain from a trace of requests.",
    ),
    Alert(
        "KVDepotTierDown", "warning", "5m",
        "kvdepot_tier_up == 0",
        "{{ $labels.instance }}: tier {{ $labels.tier }} does not answer, or reads, writes, lookups or removals fail.",
        "`kvdepot status` shows its last error. It is probed, and used again automatically once it answers.",
    ),
    Alert(
        "KVDepotDiskNearlyFull", "warning", "15m",
        "kvdepot_tier_free_bytes < 0.05 * kvdepot_tier_capacity_bytes"
        " and kvdepot_tier_bytes < 0.95 * kvdepot_tier_capacity_bytes",
        "{{ $labels.instance }}: {{ $value | humanize1024 }}B are free on the file system of {{ $labels.tier }}, which "
        "has not reached its capacity.",
        "Others fill the file system, or `capacity_gib` is more than it has. Free space, or lower `capacity_gib`: the "
        "tier evicts what it needs at its capacity.",
    ),
    Alert(
        "KVDepotTierDropping", "warning", "15m",
        "rate(kvdepot_tier_dropped_shards_total[15m]) > 0",
        "{{ $labels.instance }} drops writes to {{ $labels.tier }}.",
        "The store cannot keep up: give it more threads, a longer queue (queue_mib), or write=on_evict.",
    ),
    *_of_counters(),
)  # fmt: skip
"""All rules; within a subject, the most severe first."""


def render() -> str:
    """The rules as a file for Prometheus."""
    lines = ["groups:", "  - name: kvdepot", "    rules:"]
    for alert in ALERTS:
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.query)}",
            f"        for: {alert.lasts}",
            "        labels:",
            f"          severity: {alert.severity}",
            "        annotations:",
            f"          summary: {json.dumps(alert.summary)}",
            f"          description: {json.dumps(alert.action)}",
            f"          runbook: {json.dumps(f'{RUNBOOKS}#{alert.name.lower()}')}",
        ]
        if "$labels.instance" in alert.summary:
            lines.append('          page: "http://{{ $labels.instance }}/"')
    return "\n".join(lines) + "\n"
