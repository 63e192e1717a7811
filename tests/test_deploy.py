"""What a depot is shipped and watched with: packages, images, units, charts, dashboards and alerts, each read by the
tool that will read it. A tool that is missing skips its test at home and fails it in CI.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from kvdepot.config import Config, load
from kvdepot.metrics import BOUNDS_S, Latency
from kvdepot.observability import alerts, dashboard
from kvdepot.status import HitRate, NamespaceStatus, Saved, Status, TierStatus

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "kvdepot"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
KUBERNETES = "1.31"


def missing(what: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(f"{what} is missing")
    pytest.skip(f"{what} is missing")


def module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return missing(name)


def tool(name: str) -> str:
    """Where a program is: beside this interpreter, or where the system has it."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        missing(name)
    return str(found)


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """What a program says; fails the test when it does not succeed."""
    done = subprocess.run(command, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120)
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}"
    return done.stdout


_YAML = """
extends: default
rules:
  line-length: {max: 120}
  document-start: disable
  braces: {max-spaces-inside: 0}
"""


def test_yaml_files_are_clean_to_yamllint() -> None:
    files = [DEPLOY / "compose.yaml", CHART / "Chart.yaml", CHART / "values.yaml"]
    files += [*DEPLOY.glob("kubernetes/*.yaml"), *DEPLOY.glob("prometheus/*.yml")]
    assert len(files) > 5
    assert run(tool("yamllint"), "--strict", "-d", _YAML, *files) == ""


# -- the package


def build(source: Path, folder: Path, kind: str) -> Path:
    """Build the package as pip does, with what is installed; nothing is fetched."""
    module("hatchling")
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", folder, cwd=source)
    (made,) = folder.iterdir()
    return made


def contents(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_is_pure_python_and_holds_the_package_alone(tmp_path: Path) -> None:
    wheel = build(ROOT, tmp_path, "wheel")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = contents(wheel)
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"kvdepot"}
    assert not [name for name in names if re.search(r"(^|/)(tests?|conftest\.py|__pycache__)(/|$)|\.so$|\.pyc$", name)]
    assert {"kvdepot/py.typed", "kvdepot/observability/dashboard.py"} <= names


def test_an_unpacked_sdist_builds_the_same_wheel(tmp_path: Path) -> None:
    sdist = build(ROOT, tmp_path / "sdist", "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    again = build(unpacked, tmp_path / "again", "wheel")
    assert contents(again) == contents(build(ROOT, tmp_path / "wheel", "wheel"))


def test_every_extra_can_be_asked_for_by_name() -> None:
    for name, needs in PROJECT["optional-dependencies"].items():
        for need in needs:
            for extra in re.findall(r"^kvdepot\[(.+)\]$", need):
                unknown = set(extra.split(",")) - set(PROJECT["optional-dependencies"])
                assert not unknown, f"{name} asks for {unknown}"


# -- images


def test_the_dockerfile_is_clean_to_hadolint() -> None:
    assert run(tool("hadolint"), DEPLOY / "Dockerfile") == ""


def test_the_images_end_as_a_user_that_is_not_root() -> None:
    stages = re.split(r"^FROM ", (DEPLOY / "Dockerfile").read_text(), flags=re.M)[1:]
    users = {
        stage.splitlines()[0].split(" AS ")[1]: re.findall(r"^(?:USER|ARG UID=)\s*(\S+)", stage, re.M)
        for stage in stages
    }
    assert users == {"build": [], "vllm": ["10001", "${UID}:${UID}"], "depot": ["10001", "${UID}:${UID}"]}


def test_the_image_is_built_with_extras_that_exist_and_the_vllm_we_support() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", text, re.M)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    (tag,) = re.findall(r"^FROM vllm/vllm-openai:v(\S+)", text, re.M)
    (supported,) = PROJECT["optional-dependencies"]["vllm"]
    assert fnmatch(tag, supported.removeprefix("vllm=="))


def test_what_the_image_is_built_from_is_enough_for_the_wheel(tmp_path: Path) -> None:
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert lines[0] == "*"
    context = tmp_path / "context"
    context.mkdir()
    for name in (line[1:] for line in lines if line.startswith("!")):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, context / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, context / name)
    made = build(context, tmp_path / "made", "wheel")
    assert contents(made) == contents(build(ROOT, tmp_path / "wheel", "wheel"))


def variables(text: str) -> dict[str, str]:
    """What an image, a service or a container sets of ours."""
    return dict(re.findall(r"(KVDEPOT_[A-Z_]+)=(\S+)", text))


def settings(environ: dict[str, str]) -> Config:
    """The settings that these make; all of them must be ones."""
    unknown = {name for name in environ if name[8:].lower() not in Config.__struct_fields__}
    assert not unknown, unknown
    return load(environ=environ)


def test_the_settings_of_the_image_are_settings() -> None:
    config = settings(variables((DEPLOY / "Dockerfile").read_text()))
    assert config.url == "ipc:///dev/shm/kvdepot.sock"


# -- compose


def compose() -> dict[str, Any]:
    text = (DEPLOY / "compose.yaml").read_text()
    filled = re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", text)
    assert "${" not in filled
    document: dict[str, Any] = module("yaml").safe_load(filled)
    return document


def test_depot_and_engine_of_the_compose_file_share_a_user_and_dev_shm_and_nothing_of_the_host() -> None:
    document = compose()
    services = document["services"]
    for service in services.values():
        assert "shm:/dev/shm" in service["volumes"]
        assert not {"privileged", "ipc", "pid", "network_mode", "cap_add", "user"} & set(service)
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    (user,) = {service["build"]["args"]["UID"] for service in services.values()}
    assert f"uid={user},gid={user}" in document["volumes"]["shm"]["driver_opts"]["o"]


def test_the_compose_file_names_stages_and_settings_that_exist() -> None:
    document = compose()
    stages = set(re.findall(r" AS (\w+)$", (DEPLOY / "Dockerfile").read_text(), re.M))
    assert {service["build"]["target"] for service in document["services"].values()} <= stages
    depot, vllm = document["services"]["depot"], document["services"]["vllm"]
    config = settings(
        variables((DEPLOY / "Dockerfile").read_text()) | {k: v or "" for k, v in depot["environment"].items()}
    )
    transfer = json.loads(vllm["command"][vllm["command"].index("--kv-transfer-config") + 1])
    assert transfer["kv_connector"] == "KVDepotConnector"
    assert transfer["kv_connector_extra_config"]["kvdepot.url"] == config.url


# -- systemd


def unit(tmp_path: Path) -> Path:
    """The unit with a program that is there: systemd looks for it."""
    text = (DEPLOY / "kvdepot.service").read_text()
    assert text.count("ExecStart=/opt/kvdepot/bin/kvdepot serve ") == 1
    path = tmp_path / "kvdepot.service"
    path.write_text(text.replace("/opt/kvdepot/bin/kvdepot", "/bin/true"))
    return path


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    assert run(tool("systemd-analyze"), "verify", "--man=no", unit(tmp_path)) == ""


def test_systemd_calls_the_unit_well_protected(tmp_path: Path) -> None:
    said = run(tool("systemd-analyze"), "security", "--offline=yes", "--threshold=25", "--no-pager", unit(tmp_path))
    assert "exposure level" in said


def test_the_units_settings_file_is_one() -> None:
    config = load(str(DEPLOY / "kvdepot.toml"), environ={})
    text = (DEPLOY / "kvdepot.service").read_text()
    assert config.url == "ipc:///run/kvdepot/depot.sock"
    assert "RuntimeDirectory=kvdepot\n" in text
    stop = re.search(r"TimeoutStopSec=(\d+)", text)
    assert stop is not None and int(stop[1]) > config.drain_s + 10


# -- dashboard and alerts


def full_status() -> Status:
    """A status with one of everything that metrics are made of."""
    return Status(
        chunk_size_tokens=256, capacity_bytes=4, used_bytes=2, chunks=1, reserved_shards=0, holds=0, evicted_chunks=0,
        record_slots=1, record_slots_used=1, unrecorded_shards=0, operations=0, clients=1, sessions=1, instances=1,
        saved=Saved(256, 0.5),
        hit_rates=[HitRate(3600.0, 2, 0.5, 0.75)],
        latencies=[Latency("Lookup", 1, 0, 0.1, [1] + [0] * len(BOUNDS_S))],
        namespaces=[NamespaceStatus("", "model", 1, 16, 1, 2, 1)],
        tiers=[TierStatus("disk", "through", "up", 1, 2, 4, 0, 0, {"dropped_chunks": 0, "spoilt_chunks": 0})],
        counters={"lookups_refused": 1},
    )  # fmt: skip


def exported() -> dict[str, set[str]]:
    """Names of the series that a server exports, and the labels of each."""
    found: dict[str, set[str]] = {"up": {"job", "instance"}, "kvdepot_up": {"job", "instance"}}
    for family in module("kvdepot.web.prometheus").families(full_status()):
        for sample in family.samples:
            found.setdefault(sample.name, {"job", "instance"}).update(sample.labels)
    return found


def queries() -> Iterator[tuple[str, str]]:
    """Every query, and the legend or text that goes with it, as Prometheus gets them."""
    for alert in alerts.ALERTS:
        labels = re.findall(r"\$labels\.(\w+)", alert.summary + alert.action)
        yield alert.query, " ".join(f"{{{{{label}}}}}" for label in labels)
    for panel in dashboard.dashboard()["panels"]:
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


def test_panels_lie_side_by_side_within_the_page() -> None:
    taken: dict[tuple[int, int], str] = {}
    panels = dashboard.dashboard()["panels"]
    for panel in panels:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert x < 24
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(x + 1 == 24 or (x + 1, y) in taken for x, y in taken), "a row has a gap"


def test_the_readme_has_a_line_for_every_alert() -> None:
    told = re.findall(r"^\| `(KVDepot\w+)` \|", (DEPLOY / "README.md").read_text(), re.M)
    assert told == [alert.name for alert in alerts.ALERTS]


def test_the_chart_carries_the_dashboard_and_the_alerts_as_they_are() -> None:
    again = "write it anew: python -m kvdepot.observability"
    assert (CHART / "files" / "alerts.yaml").read_text() == alerts.render(), f"{again} alerts"
    assert (CHART / "files" / "dashboard.json").read_text() == dashboard.render(), f"{again} dashboard"


def test_the_module_prints_what_the_chart_carries() -> None:
    for what, file in (("alerts", "alerts.yaml"), ("dashboard", "dashboard.json")):
        assert run(sys.executable, "-m", "kvdepot.observability", what) == (CHART / "files" / file).read_text()


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
}
"""Five hours of a depot that is well, a value a minute."""
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
    "KVDepotTierSpoilt": {  # the first ever: the series begins with it
        f'kvdepot_tier_events_total{{{LABELS}, tier="disk", event="spoilt_chunks"}}': "_x220 1x80"
    },
}
"""What is otherwise where an alert is to fire."""


def rule_tests(folder: Path, trouble: str) -> Path:
    """A file for `promtool test rules`: four hours in, just this alert fires."""
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


@pytest.mark.parametrize("trouble", ["", *(alert.name for alert in alerts.ALERTS)])
def test_an_alert_fires_for_its_trouble_and_no_other(trouble: str, tmp_path: Path) -> None:
    assert not trouble or trouble in TROUBLE
    run(tool("promtool"), "test", "rules", rule_tests(tmp_path, trouble))


def test_prometheus_takes_the_scrape_job_and_the_rules(tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "prometheus" / "prometheus.yml", tmp_path)
    (tmp_path / "kvdepot.rules.yml").write_text(alerts.render())
    said = run(tool("promtool"), "check", "config", tmp_path / "prometheus.yml")
    assert f"{len(alerts.ALERTS)} rules found" in said


def test_prometheus_finds_nothing_wrong_with_the_metrics() -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    class One:
        def collect(self) -> Any:
            return module("kvdepot.web.prometheus").families(full_status())

    registry = CollectorRegistry()
    registry.register(One())
    done = subprocess.run([tool("promtool"), "check", "metrics"], input=generate_latest(registry), capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
