"""Dashboard and alerts: queries are compared with a server's metrics; each alert is tested on a simulated problem."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deploy.observability import alerts, dashboard

from kvdepot.metrics import BOUNDS_S, Latency
from kvdepot.protocol.quotas import Quota
from kvdepot.status import Histogram, NamespaceStatus, Saved, Status, TenantStatus, TierStatus, TokenCounts, Usage
from tests.programs import module, run, tool

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "kvdepot"


def full_status() -> Status:
    """A status with one of everything that metrics are made of."""
    return Status(
        chunk_size_tokens=256, capacity_bytes=4, used_bytes=2, chunks=1, reserved_shards=0, holds=0, evicted_chunks=0,
        record_slots=1, record_slots_used=1, unrecorded_shards=0, operations=0, clients=1, sessions=1, instances=1,
        saved=Saved(256, 0.5), tokens=TokenCounts(512, 300, 256), holds_s=2580.0,
        usage=[Usage("", 512, 300, 256)], model_usage=[Usage("", 512, 300, 256, "model")],
        histograms=[
            Histogram(name, "s", [1.0], [1, 0], 0.5)
            for name in ("hit_tokens", "eviction_age_seconds", "eviction_idle_seconds", "reuse_after_seconds",
                         "saved_seconds")
        ],
        latencies=[Latency("Lookup", 1, 0, 0.1, [1] + [0] * len(BOUNDS_S))],
        namespaces=[NamespaceStatus("", "model", 1, 16, 1, 2, 1)],
        tenants=[TenantStatus("", 2, 1, Quota(), 0, 0)],
        tiers=[TierStatus("disk", "through", "up", 1, 2, 4, 0, 0, {}, free_bytes=9, histograms=[
            Histogram(f"{call}_{what}", "s", [1.0], [1, 0], 0.5)
            for call in ("load", "save") for what in ("seconds", "bytes_per_second")
        ])],
        counters={"lookups_refused": 1},
    )  # fmt: skip


def exported() -> dict[str, set[str]]:
    """Names of the series that a server exports, and the labels of each; and of vLLM's own that are shown beside."""
    scraped = {"job", "instance", "node"}  # node: added by the chart's scrape job
    found: dict[str, set[str]] = {name: set(scraped) for name in ("up", "kvdepot_up", "kvdepot_loop_lag_seconds")}
    for name in ("time_to_first_token_seconds_bucket", "external_prefix_cache_hits_total",
                 "external_prefix_cache_queries_total"):  # fmt: skip
        found[f"vllm:{name}"] = {*scraped, "model_name", "engine", "le"}
    for family in module("kvdepot.web.prometheus").families(full_status()):
        for sample in family.samples:
            found.setdefault(sample.name, set(scraped)).update(sample.labels)
    return found


def queries() -> Iterator[tuple[str, str]]:
    """Every query, and the legend or text that goes with it, as Prometheus gets them."""
    for alert in alerts.ALERTS:
        labels = re.findall(r"\$labels\.(\w+)", alert.summary + alert.action)
        yield alert.query, " ".join(f"{{{{{label}}}}}" for label in labels)
    for panel in dashboard.dashboard()["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in (("$__rate_interval", "1m"), ("$__range", "1h"), ("$job", ".*"), ("$instance", ".*"),
                                ("$model", ".*")):  # fmt: skip
                query = query.replace(name, value)
            yield query, target["legendFormat"]


def test_every_query_asks_for_metrics_and_labels_that_a_server_exports() -> None:
    promql = module("promql_parser")
    names = exported()
    asked = set()
    for query, legend in queries():
        selectors: list[Any] = []

        def visit(node: Any, into: list[Any] = selectors) -> bool:
            if isinstance(node, promql.VectorSelector):
                into.append(node)
            return True

        promql.walk(promql.parse(query), visit)
        assert selectors, query
        for selector in selectors:
            assert selector.name in names, f"no server exports {selector.name}"
            asked.add(selector.name)
            unknown = {matcher.name for matcher in selector.matchers.matchers} - names[selector.name]
            assert not unknown, f"{selector.name} has no {unknown}"
        labels = {"le"}.union(*(names[selector.name] for selector in selectors))
        grouped = {label.strip() for group in re.findall(r"(?:by|on) \(([^)]*)\)", query) for label in group.split(",")}
        assert grouped | set(re.findall(r"\{\{(\w+)\}\}", legend)) <= labels, query
    assert len(asked) > 40


def test_the_page_of_metrics_has_a_line_for_every_alert_in_their_order() -> None:
    told = re.findall(r"^\| `(KVDepot\w+)` \|", (DEPLOY.parent / "docs" / "metrics.md").read_text(), re.M)
    assert told == [alert.name for alert in alerts.ALERTS]


def test_the_chart_carries_the_dashboard_and_the_alerts_as_they_are() -> None:
    again = "write it anew: python -m deploy.observability"
    assert (CHART / "files" / "alerts.yaml").read_text() == alerts.render(), f"{again} alerts"
    assert (CHART / "files" / "dashboard.json").read_text() == dashboard.render(), f"{again} dashboard"


LABELS = 'job="kvdepot", instance="host:7077"'
QUIET = {
    f"up{{{LABELS}}}": "1x300",
    f"kvdepot_up{{{LABELS}}}": "1x300",
    f"kvdepot_uptime_seconds{{{LABELS}}}": "0+60x300",
    f"kvdepot_corrupt_shards_total{{{LABELS}}}": "0x300",
    f"kvdepot_differing_shards_total{{{LABELS}}}": "0x300",
    f"kvdepot_engine_processes{{{LABELS}}}": "2x300",
    f'kvdepot_request_errors_total{{{LABELS}, request="Lookup"}}': "0x300",
    f'kvdepot_request_duration_seconds_count{{{LABELS}, request="Lookup"}}': "0+600x300",
    f'kvdepot_request_duration_seconds_bucket{{{LABELS}, request="Lookup", le="0.001"}}': "0+600x300",
    f'kvdepot_request_duration_seconds_bucket{{{LABELS}, request="Lookup", le="1.0"}}': "0+600x300",
    f'kvdepot_request_duration_seconds_bucket{{{LABELS}, request="Lookup", le="+Inf"}}': "0+600x300",
    f"kvdepot_stored_shards_total{{{LABELS}}}": "0+100x300",
    f"kvdepot_dropped_shards_total{{{LABELS}}}": "0+1x300",
    f'kvdepot_refused_total{{{LABELS}, what="lookups"}}': "3x300",
    f"kvdepot_asked_tokens_total{{{LABELS}}}": "0+1000x300",
    f"kvdepot_found_tokens_total{{{LABELS}}}": "0+500x300",
    f"kvdepot_reused_tokens_total{{{LABELS}}}": "0+400x300",
    f'kvdepot_eviction_idle_seconds_bucket{{{LABELS}, le="300.0"}}': "0+1x300",
    f"kvdepot_eviction_idle_seconds_count{{{LABELS}}}": "0+10x300",
    f'kvdepot_tier_up{{{LABELS}, tier="disk"}}': "1x300",
    f'kvdepot_tier_dropped_shards_total{{{LABELS}, tier="disk"}}': "7x300",
    f'kvdepot_tier_bytes{{{LABELS}, tier="disk"}}': "50x300",
    f'kvdepot_tier_capacity_bytes{{{LABELS}, tier="disk"}}': "100x300",
    f'kvdepot_tier_free_bytes{{{LABELS}, tier="disk"}}': "60x300",
}
"""Five hours of a healthy server, one value per minute."""
TROUBLE: dict[str, dict[str, str]] = {
    "KVDepotUnreachable": {f"up{{{LABELS}}}": "1x170 0x130"},
    "KVDepotNoTarget": {f"up{{{LABELS}}}": "1x170 _x130"},
    "KVDepotNotServing": {f"kvdepot_up{{{LABELS}}}": "1x170 0x130"},
    "KVDepotRestarting": {f"kvdepot_uptime_seconds{{{LABELS}}}": "0+60x225 " + "0+60x4 " * 15},
    "KVDepotMemoryDamaged": {f"kvdepot_corrupt_shards_total{{{LABELS}}}": "0x230 1x70"},
    "KVDepotKVDiffers": {f"kvdepot_differing_shards_total{{{LABELS}}}": "0x230 1x70"},
    "KVDepotErrors": {f'kvdepot_request_errors_total{{{LABELS}, request="Lookup"}}': "0+30x300"},
    "KVDepotLookupsSlow": {
        f'kvdepot_request_duration_seconds_bucket{{{LABELS}, request="Lookup", le="0.001"}}': "0+500x300"
    },
    "KVDepotStoresDropped": {f"kvdepot_dropped_shards_total{{{LABELS}}}": "0+10x300"},
    "KVDepotRefusing": {f'kvdepot_refused_total{{{LABELS}, what="lookups"}}': "3+1x300"},
    "KVDepotNoEngine": {f"kvdepot_engine_processes{{{LABELS}}}": "2x200 0x100"},
    "KVDepotEngineDivided": {f"kvdepot_divided_engines{{{LABELS}}}": "0x230 1x70"},
    "KVDepotEngineUncached": {f"kvdepot_faulty_engines{{{LABELS}}}": "0x230 1x70"},
    "KVDepotHitRateCollapsed": {
        f"kvdepot_asked_tokens_total{{{LABELS}}}": "0+10000x300",
        f"kvdepot_reused_tokens_total{{{LABELS}}}": "0+4000x150 600000+200x150",
    },
    "KVDepotMemorySmall": {
        **{
            f"kvdepot_{name}_tokens_total{{{LABELS}}}": f"0+{each}x300"
            for name, each in (("asked", 10000), ("found", 5000), ("reused", 4000))
        },
        f'kvdepot_eviction_idle_seconds_bucket{{{LABELS}, le="300.0"}}': "0+8x300",
        f'kvdepot_tier_up{{{LABELS}, tier="disk"}}': "_x300",
    },
    "KVDepotTierDown": {f'kvdepot_tier_up{{{LABELS}, tier="disk"}}': "1x200 0x100"},
    "KVDepotDiskNearlyFull": {f'kvdepot_tier_free_bytes{{{LABELS}, tier="disk"}}': "60x200 4x100"},
    "KVDepotTierDropping": {f'kvdepot_tier_dropped_shards_total{{{LABELS}, tier="disk"}}': "7+1x300"},
    "KVDepotTierCorrupt": {f'kvdepot_tier_corrupt_shards_total{{{LABELS}, tier="disk"}}': "0x220 1x80"},
}
"""The series that differ when an alert must fire."""


def rule_tests(folder: Path, trouble: str) -> Path:
    """A file for `promtool test rules`: after four hours, only this alert fires."""
    series = QUIET | TROUBLE.get(trouble, {}) | HEALTHY.get(trouble, {})
    fires = [{"labels": f'{{alertname="{trouble}"}}', "value": 1}] if trouble in TROUBLE else []
    (folder / "rules.yaml").write_text(alerts.render())
    path = folder / "tests.json"
    asked = {"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": "240m", "exp_samples": fires}
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [asked],
    }
    path.write_text(json.dumps({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}))
    return path


HEALTHY: dict[str, dict[str, str]] = {
    "a full disk tier": {
        f'kvdepot_tier_bytes{{{LABELS}, tier="disk"}}': "99x300",
        f'kvdepot_tier_free_bytes{{{LABELS}, tier="disk"}}': "1x300",
    },
    "two mistyped commands": {
        f'kvdepot_request_errors_total{{{LABELS}, request="EndLease"}}': "0x230 1x1 2x70",
        f'kvdepot_request_duration_seconds_count{{{LABELS}, request="EndLease"}}': "0x230 1x1 2x70",
    },
    "a failure every four minutes, among few requests": {
        f'kvdepot_request_errors_total{{{LABELS}, request="Store"}}': " ".join(str(i // 4) for i in range(300)),
        f'kvdepot_request_duration_seconds_count{{{LABELS}, request="Store"}}': "0+1x300",
    },
    "a benchmark that took a minute": {f"kvdepot_engine_processes{{{LABELS}}}": "0x220 4x1 0x80"},
    "a small memory that hardly anybody uses": {
        **{
            f"kvdepot_{name}_tokens_total{{{LABELS}}}": f"0+{each}x300"
            for name, each in (("asked", 100), ("found", 50), ("reused", 40))
        },
        f'kvdepot_eviction_idle_seconds_bucket{{{LABELS}, le="300.0"}}': "0+8x300",
        f'kvdepot_tier_up{{{LABELS}, tier="disk"}}': "_x300",
    },
    "no engine since the start": {f"kvdepot_engine_processes{{{LABELS}}}": "0x300"},
    "a quiet night": {
        f"kvdepot_asked_tokens_total{{{LABELS}}}": "0+1000x150 150000+1x150",
        f"kvdepot_found_tokens_total{{{LABELS}}}": "0+500x150 75000x150",
        f"kvdepot_reused_tokens_total{{{LABELS}}}": "0+400x150 60000x150",
    },
    "prompts that are never repeated": {
        f"kvdepot_{name}_tokens_total{{{LABELS}}}": "0+10x150 1500x150" for name in ("found", "reused")
    },
}
"""Series that differ, and that nobody needs to look at."""


@pytest.mark.faults
@pytest.mark.parametrize("trouble", ["", *(alert.name for alert in alerts.ALERTS)])
def test_an_alert_fires_for_its_trouble_and_no_other(trouble: str, tmp_path: Path) -> None:
    assert not trouble or trouble in TROUBLE
    run(tool("promtool"), "test", "rules", rule_tests(tmp_path, trouble))


@pytest.mark.faults
@pytest.mark.parametrize("state", HEALTHY)
def test_no_alert_fires_for_what_is_no_trouble(state: str, tmp_path: Path) -> None:
    run(tool("promtool"), "test", "rules", rule_tests(tmp_path, state))


@pytest.mark.faults
def test_prometheus_takes_the_scrape_job_and_the_rules() -> None:
    said = run(tool("promtool"), "check", "config", DEPLOY / "prometheus" / "prometheus.yml")
    assert f"{len(alerts.ALERTS)} rules found" in said


@pytest.mark.faults
def test_prometheus_finds_nothing_wrong_with_the_metrics() -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    class One:
        def collect(self) -> Any:
            return module("kvdepot.web.prometheus").families(full_status())

    registry = CollectorRegistry()
    registry.register(One())
    done = subprocess.run([tool("promtool"), "check", "metrics"], input=generate_latest(registry), capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
