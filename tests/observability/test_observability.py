"""Dashboard and alerts: queries are compared with a server's metrics; each alert is tested on a simulated problem."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deploy.observability import alerts, dashboard

from kvdepot.metrics import BOUNDS_S, Latency
from kvdepot.status import Device, HitRate, NamespaceStatus, Reuse, Saved, Status, TierStatus
from tests.programs import module, run, tool

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "kvdepot"


def full_status() -> Status:
    """A status with one of everything that metrics are made of."""
    return Status(
        chunk_size_tokens=256, capacity_bytes=4, used_bytes=2, chunks=1, reserved_shards=0, holds=0, evicted_chunks=0,
        record_slots=1, record_slots_used=1, unrecorded_shards=0, operations=0, clients=1, sessions=1, instances=1,
        saved=Saved(256, 0.5),
        hit_rates=[HitRate(3600.0, 2, 0.5, 0.75)],
        reuse=[Reuse(3600.0, 512, 256, 0.5)],
        latencies=[Latency("Lookup", 1, 0, 0.1, [1] + [0] * len(BOUNDS_S))],
        namespaces=[NamespaceStatus("", "model", 1, 16, 1, 2, 1)],
        tiers=[TierStatus("disk", "through", "up", 1, 2, 4, 0, 0, {"dropped_chunks": 0, "spoilt_chunks": 0})],
        devices=[Device("GPU-1", "a GPU", 1, 1, 1, {}, 1, "")],
        counters={"lookups_refused": 1},
    )  # fmt: skip


def exported() -> dict[str, set[str]]:
    """Names of the series that a server exports, and the labels of each."""
    found: dict[str, set[str]] = {"up": {"job", "instance"}, "kvdepot_up": {"job", "instance"}}
    for family in module("kvdepot.web.prometheus").families(full_status()):
        for sample in family.samples:
            found.setdefault(sample.name, {"job", "instance"}).update(sample.labels)
    return found


def all_panels() -> list[dict[str, Any]]:
    """All panels, including those in collapsed rows."""
    panels = dashboard.dashboard()["panels"]
    return [each for panel in panels for each in (panel, *panel.get("panels", ()))]


def queries() -> Iterator[tuple[str, str]]:
    """Every query, and the legend or text that goes with it, as Prometheus gets them."""
    for alert in alerts.ALERTS:
        labels = re.findall(r"\$labels\.(\w+)", alert.summary + alert.action)
        yield alert.query, " ".join(f"{{{{{label}}}}}" for label in labels)
    for panel in all_panels():
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in (("$__rate_interval", "1m"), ("$__range", "1h"), ("$job", ".*"), ("$instance", ".*")):
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
    assert len(asked) > 25


def test_grafanas_own_types_lose_nothing_of_the_dashboard() -> None:
    read = module("grafana_foundation_sdk.models.dashboard").Dashboard.from_json
    encode = module("grafana_foundation_sdk.cog.encoder").JSONEncoder(sort_keys=True).encode

    def lost(had: Any, has: Any, where: str) -> Iterator[str]:
        if isinstance(had, dict):
            for name, value in had.items():
                yield from lost(value, has[name], f"{where}.{name}") if name in has else [f"{where}.{name}"]
        elif isinstance(had, list):
            assert len(had) == len(has), where
            for i, (one, other) in enumerate(zip(had, has, strict=True)):
                yield from lost(one, other, f"{where}[{i}]")
        elif had != has:
            yield f"{where}: {had!r} is {has!r}"

    made = json.loads(dashboard.render())
    assert list(lost(made, json.loads(encode(read(made))), "")) == []


def test_panels_lie_side_by_side_within_the_page() -> None:
    taken: dict[tuple[int, int], str] = {}
    panels = all_panels()
    for panel in panels:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert x < 24
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(x + 1 == 24 or (x + 1, y) in taken for x, y in taken), "a row has a gap"


def test_what_only_some_depots_have_asks_nothing_until_it_is_opened() -> None:
    (gpus,) = (panel for panel in dashboard.dashboard()["panels"] if panel.get("collapsed"))
    asked = " ".join(target["expr"] for panel in gpus["panels"] for target in panel["targets"])
    for family in module("kvdepot.web.prometheus").families(full_status()):
        assert not family.name.startswith("kvdepot_device_") or family.name in asked


def test_the_page_of_metrics_has_a_line_for_every_alert_in_their_order() -> None:
    told = re.findall(r"^\| `(KVDepot\w+)` \|", (DEPLOY.parent / "docs" / "metrics.md").read_text(), re.M)
    assert told == [alert.name for alert in alerts.ALERTS]


def test_the_chart_carries_the_dashboard_and_the_alerts_as_they_are() -> None:
    again = "write it anew: python -m deploy.observability"
    assert (CHART / "files" / "alerts.yaml").read_text() == alerts.render(), f"{again} alerts"
    assert (CHART / "files" / "dashboard.json").read_text() == dashboard.render(), f"{again} dashboard"


def test_the_module_prints_what_the_chart_carries() -> None:
    for what, file in (("alerts", "alerts.yaml"), ("dashboard", "dashboard.json")):
        assert (
            run(sys.executable, "-m", "deploy.observability", what, cwd=DEPLOY.parent)
            == (CHART / "files" / file).read_text()
        )


LABELS = 'job="kvdepot", instance="host:7077"'
QUIET = {
    f"up{{{LABELS}}}": "1x300",
    f"kvdepot_up{{{LABELS}}}": "1x300",
    f"kvdepot_uptime_seconds{{{LABELS}}}": "0+60x300",
    f"kvdepot_corrupt_chunks_total{{{LABELS}}}": "0x300",
    f'kvdepot_request_errors_total{{{LABELS}, request="Lookup"}}': "0x300",
    f'kvdepot_request_duration_seconds_count{{{LABELS}, request="Lookup"}}': "0+600x300",
    f'kvdepot_request_duration_seconds_bucket{{{LABELS}, request="Lookup", le="0.001"}}': "0+600x300",
    f'kvdepot_request_duration_seconds_bucket{{{LABELS}, request="Lookup", le="1.0"}}': "0+600x300",
    f'kvdepot_request_duration_seconds_bucket{{{LABELS}, request="Lookup", le="+Inf"}}': "0+600x300",
    f"kvdepot_stored_chunks_total{{{LABELS}}}": "0+100x300",
    f"kvdepot_dropped_chunks_total{{{LABELS}}}": "0+1x300",
    f'kvdepot_refused_total{{{LABELS}, what="lookups"}}': "3x300",
    f'kvdepot_hit_ratio{{{LABELS}, window_seconds="3600"}}': "0.5x300",
    f'kvdepot_hit_ratio_ceiling{{{LABELS}, window_seconds="3600"}}': "0.6x300",
    f'kvdepot_tier_up{{{LABELS}, tier="disk"}}': "1x300",
    f'kvdepot_tier_events_total{{{LABELS}, tier="disk", event="dropped_chunks"}}': "7x300",
    f'kvdepot_device_up{{{LABELS}, device="GPU-1"}}': "1x300",
}
"""Five hours of a healthy server, one value per minute."""
TROUBLE: dict[str, dict[str, str]] = {
    "KVDepotUnreachable": {f"up{{{LABELS}}}": "1x170 0x130"},
    "KVDepotNotServing": {f"kvdepot_up{{{LABELS}}}": "1x170 0x130"},
    "KVDepotRestarting": {f"kvdepot_uptime_seconds{{{LABELS}}}": "0+60x225 " + "0+60x4 " * 15},
    "KVDepotMemoryDamaged": {f"kvdepot_corrupt_chunks_total{{{LABELS}}}": "0x230 1x70"},
    "KVDepotErrors": {f'kvdepot_request_errors_total{{{LABELS}, request="Lookup"}}': "0+30x300"},
    "KVDepotLookupsSlow": {
        f'kvdepot_request_duration_seconds_bucket{{{LABELS}, request="Lookup", le="0.001"}}': "0+500x300"
    },
    "KVDepotStoresDropped": {f"kvdepot_dropped_chunks_total{{{LABELS}}}": "0+10x300"},
    "KVDepotRefusing": {f'kvdepot_refused_total{{{LABELS}, what="lookups"}}': "3+1x300"},
    "KVDepotMemorySmall": {f'kvdepot_hit_ratio_ceiling{{{LABELS}, window_seconds="3600"}}': "0.9x300"},
    "KVDepotTierDown": {f'kvdepot_tier_up{{{LABELS}, tier="disk"}}': "1x200 0x100"},
    "KVDepotTierDropping": {f'kvdepot_tier_events_total{{{LABELS}, tier="disk", event="dropped_chunks"}}': "7+1x300"},
    "KVDepotGpuFailing": {f'kvdepot_device_up{{{LABELS}, device="GPU-1"}}': "1x200 0x100"},
    "KVDepotTierSpoilt": {f'kvdepot_tier_events_total{{{LABELS}, tier="disk", event="spoilt_chunks"}}': "0x220 1x80"},
}
"""The series that differ when an alert must fire."""


def rule_tests(folder: Path, trouble: str) -> Path:
    """A file for `promtool test rules`: after four hours, only this alert fires."""
    series = QUIET | TROUBLE.get(trouble, {})
    fires = [{"labels": f'{{alertname="{trouble}"}}', "value": 1}] if trouble else []
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


@pytest.mark.faults
@pytest.mark.parametrize("trouble", ["", *(alert.name for alert in alerts.ALERTS)])
def test_an_alert_fires_for_its_trouble_and_no_other(trouble: str, tmp_path: Path) -> None:
    assert not trouble or trouble in TROUBLE
    run(tool("promtool"), "test", "rules", rule_tests(tmp_path, trouble))


@pytest.mark.faults
def test_prometheus_takes_the_scrape_job_and_the_rules(tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "prometheus" / "prometheus.yml", tmp_path)
    (tmp_path / "kvdepot.rules.yml").write_text(alerts.render())
    said = run(tool("promtool"), "check", "config", tmp_path / "prometheus.yml")
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
