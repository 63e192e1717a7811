"""What a depot is shipped in: packages, images, units, charts, each read by the program that will read it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import zipfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from deploy.observability import alerts, dashboard

import kvdepot
from kvdepot.config import ONLY_IN_FILE, Config, load
from tests.programs import module, run, tool

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "kvdepot"
KUBERNETES = "1.31"

pytestmark = pytest.mark.faults  # most start a program that reads what we ship


# -- the package


def build(source: Path, folder: Path, kind: str) -> Path:
    """Build the package as pip does, with what is installed; nothing is fetched."""
    module("hatchling")
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", folder, cwd=source)
    (made,) = folder.iterdir()
    return made


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The package's files by kind."""
    return {kind: build(ROOT, tmp_path_factory.mktemp("built") / kind, kind) for kind in ("wheel", "sdist")}


def test_the_wheel_is_pure_python_and_holds_the_package_alone(built: dict[str, Path]) -> None:
    assert built["wheel"].name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(built["wheel"]).namelist())
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"kvdepot"}
    assert not [name for name in names if re.search(r"(^|/)(tests?|conftest\.py|__pycache__)(/|$)|\.so$|\.pyc$", name)]
    assert {"kvdepot/py.typed", "kvdepot/core/depot.py"} <= names


@pytest.mark.parametrize(("kind", "most_mib"), [("wheel", 1), ("sdist", 4)])
def test_an_index_would_take_the_package(built: dict[str, Path], kind: str, most_mib: int) -> None:
    said = run(tool("twine"), "--no-color", "check", "--strict", built[kind])
    assert said.count("PASSED") == 1
    assert built[kind].stat().st_size < most_mib << 20


def test_an_sdist_installs_into_an_empty_environment(built: dict[str, Path], tmp_path: Path) -> None:
    """The packages that kvdepot needs are this environment's; kvdepot itself is not, nor is anything fetched."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    wheels = tmp_path / "wheels"
    run(*pip, "wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, built["sdist"])
    (wheel,) = wheels.iterdir()
    empty = tmp_path / "empty"
    run(sys.executable, "-m", "venv", "--without-pip", empty)
    run(*pip, "--python", empty / "bin" / "python", "install", "--no-index", "--no-deps", "--ignore-installed", wheel)
    (place,) = empty.glob("lib/python*/site-packages")
    (place / "needs.pth").write_text(sysconfig.get_path("purelib"))  # after `place`, and without its own .pth files
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    said = partial(subprocess.check_output, env=clean, cwd=tmp_path, text=True)
    assert said([empty / "bin" / "kvdepot", "--version"]) == f"kvdepot {kvdepot.__version__}\n"
    found = said([empty / "bin" / "python", "-c", "import kvdepot.web.app; print(kvdepot.__file__)"])
    assert Path(found).is_relative_to(place)


def test_the_package_contains_uplot_as_it_was_committed_with_its_hash() -> None:
    vendor = ROOT / "src/kvdepot/web/page/vendor"
    hashes = dict(reversed(line.split()) for line in (vendor / "SHA256SUMS").read_text().splitlines())
    found = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in vendor.iterdir()}
    assert found.pop("SHA256SUMS") and found == hashes


# -- images


def test_the_dockerfile_is_clean_to_hadolint() -> None:
    assert run(tool("hadolint"), DEPLOY / "Dockerfile") == ""


def test_the_build_context_of_the_image_gives_the_same_wheel(built: dict[str, Path], tmp_path: Path) -> None:
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
    assert set(zipfile.ZipFile(made).namelist()) == set(zipfile.ZipFile(built["wheel"]).namelist())


def settings(environ: dict[str, str]) -> Config:
    """The settings that these make; all of them must be ones."""
    unknown = {name for name in environ if name[8:].lower() not in Config.__struct_fields__}
    assert not unknown, unknown
    return load(environ=environ)


# -- compose

SHARED = "ipc:///run/kvdepot/depot.sock", "/run/kvdepot"
"""The endpoint, and the arena's folder, of all that is deployed in containers."""


def compose() -> dict[str, Any]:
    text = (DEPLOY / "compose.yaml").read_text()
    filled = re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", text)
    assert "${" not in filled
    document: dict[str, Any] = module("yaml").safe_load(filled)
    return document


def test_the_compose_file_is_one_by_its_specification() -> None:
    run(tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml")


def test_the_compose_file_names_stages_and_settings_that_exist() -> None:
    document = compose()
    stages = set(re.findall(r" AS (\w+)$", (DEPLOY / "Dockerfile").read_text(), re.M))
    assert {service["build"]["target"] for service in document["services"].values()} <= stages
    depot, vllm = document["services"]["depot"], document["services"]["vllm"]
    assert document["services"]["depot-cpu"]["environment"] == depot["environment"]
    image = (DEPLOY / "Dockerfile").read_text().split(" AS depot\n")[1]  # its build has a variable of its own
    set_there = dict(re.findall(r"(KVDEPOT_[A-Z_]+)=(\S+)", image))
    config = settings(set_there | {k: v or "" for k, v in depot["environment"].items()})
    transfer = json.loads(vllm["command"][vllm["command"].index("--kv-transfer-config") + 1])
    assert transfer == {"kv_connector": "KVDepotConnector", "kv_role": "kv_both"}
    for name in ("vllm", "demo"):
        engine = document["services"][name]
        assert (engine["environment"]["KVDEPOT_URL"], engine["environment"]["KVDEPOT_ARENA_DIR"]) == SHARED
        assert f"memory:{config.arena_dir}" in engine["volumes"] and f"memory:{config.arena_dir}" in depot["volumes"]
    assert (config.url, config.arena_dir) == SHARED
    assert not {"deploy", "ipc", "pid"} & set(depot)  # the server uses no GPU
    assert config.on_stop == "keep"  # the volume outlives the container, and the memory is given back with it


# -- containers

_TWO = """
mount -t tmpfs -o size=64m,mode=0700 tmpfs /dev/shm || exit 99
mkdir -p $KVDEPOT_ARENA_DIR && mount -t tmpfs -o size=512m,mode=0700 tmpfs $KVDEPOT_ARENA_DIR || exit 99
apart="unshare --ipc --pid --fork --mount-proc --kill-child"
$apart $PYTHON -m kvdepot.cli serve --arena-gib 0.0625 & server=$!
until $apart $PYTHON -m kvdepot.cli status >/dev/null 2>&1; do kill -0 $server || exit 98; done
$apart $PYTHON -c "
import os, sys
from types import SimpleNamespace
import zmq
from tests.client.engine import works
assert os.getpid() < 10
sys.exit(0 if works(SimpleNamespace(url=os.environ['KVDEPOT_URL'], context=zmq.Context())) else 97)
"
code=$?
kill -9 $server  # unshare, which lets no other signal through; the server dies with it
exit $code
"""


def test_server_and_engine_share_one_folder_and_no_namespace(tmp_path: Path) -> None:
    folder = str(tmp_path / "shared")
    shared = {"KVDEPOT_URL": f"ipc://{folder}/depot.sock", "KVDEPOT_ARENA_DIR": folder}
    environ = {**os.environ, "PYTHON": sys.executable, "KVDEPOT_HTTP": "off", **shared}
    process = subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", _TWO],
        cwd=ROOT, env=environ, text=True, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        _, said = process.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode in (1, 99) and ("unshare:" in said or "mount:" in said):
        pytest.skip("namespaces of one's own are not allowed here")
    assert process.returncode == 0, f"{process.returncode}\n{said}"


# -- systemd


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    """The program is replaced by one that is there, because systemd looks for it."""
    text = (DEPLOY / "kvdepot.service").read_text()
    assert text.count("ExecStart=/opt/kvdepot/bin/kvdepot serve ") == 1
    unit = tmp_path / "kvdepot.service"
    unit.write_text(text.replace("/opt/kvdepot/bin/kvdepot", "/bin/true"))
    assert run(tool("systemd-analyze"), "verify", "--man=no", unit) == ""


def test_the_units_settings_file_is_one() -> None:
    config = load(str(DEPLOY / "kvdepot.toml"), environ={})
    text = (DEPLOY / "kvdepot.service").read_text()
    assert config.url == "ipc:///run/kvdepot/depot.sock"
    assert "RuntimeDirectory=kvdepot\n" in text
    assert "RuntimeDirectoryPreserve=yes\n" in text  # the token that pages and scripts know
    stop = re.search(r"TimeoutStopSec=(\d+)", text)
    assert stop is not None and int(stop[1]) > config.drain_s + 10


# -- Kubernetes

_RENDER = """
import json, sys
from helm_python.chart import Chart, lint
path, values = sys.argv[1], json.loads(sys.argv[2])
found = lint(path, values, strict=True)
files = Chart.load(path).render(values, name="depot", namespace="kv")
print(json.dumps({"lint": found, "files": files}))
"""
EVERYTHING = {
    "user": 1_000_680_000,
    "settings": {"policy": "lru", "lookup_s": 0.5, "max_pins": 2_000_000},
    "tiers": ["disk:///var/cache/kvdepot?capacity_gib=10", "redis://cache:6379/0"],
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    "dashboard": {"enabled": True},
    "docs": "https://wiki.example/kvdepot/metrics/",
    "nodeSelector": {"gpu": "yes"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "llm"},
    "priorityClassName": "system-node-critical",
    "imagePullSecrets": [{"name": "registry"}],
    "cache": {"hostPath": "/var/cache/kvdepot"},
    "extraEnv": [{"name": "AWS_REGION", "value": "eu-central-1"}],
    "extraVolumes": [{"name": "keys", "secret": {"secretName": "keys"}}],
    "extraVolumeMounts": [{"name": "keys", "mountPath": "/keys", "readOnly": True}],
    "serviceAccount": {"annotations": {"role": "kv"}},
}
VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": EVERYTHING,
    "prepared nodes, secrets of one's own": {
        "shm": {"prepare": False}, "http": {"tokenSecret": "mine"}, "tiersSecret": "stores",
        "configSecret": "quotas", "serviceAccount": {"create": False},
    },
    "a network policy": {
        "networkPolicy": {
            "enabled": True, "from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "prometheus"}}}],
            "ingress": [{"ports": [{"port": 5557}]}], "egress": [{"ports": [{"port": 6379}]}],
        },
    },
}  # fmt: skip


@cache
def render(values: str) -> Any:
    """What Helm's library makes of the chart with these values; in a process of its own, because it is Go."""
    module("helm_python")
    return json.loads(run(sys.executable, "-c", _RENDER, CHART, values))


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The chart as objects."""
    yaml = module("yaml")
    said = render(json.dumps(values))
    assert not said["lint"]["errors"], said["lint"]
    texts = [text for name, text in said["files"].items() if not name.endswith(".txt")]
    return [made for text in texts for made in yaml.safe_load_all(text) if made]


@pytest.fixture(params=sorted(VALUES))
def chart(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """The chart's objects by kind, for several values."""
    made = rendered(VALUES[request.param])
    found = {each["kind"]: each for each in made}
    assert len(found) == len(made)
    return found


def validate(made: dict[str, Any]) -> None:
    """By Kubernetes's own schemas; unknown fields are faults."""
    if made["apiVersion"].startswith("monitoring.coreos.com"):
        return  # the Prometheus operator's
    module("kubernetes_validate").validate(made, KUBERNETES, strict=True)


def restrictions(pod: dict[str, Any]) -> None:
    """What "restricted" of the pod security standards asks for, volumes aside; `prepare` is root, with a capability."""
    assert not {"hostIPC", "hostPID", "hostNetwork"} & set(pod)
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    whole = pod["securityContext"]
    assert whole["seccompProfile"] == {"type": "RuntimeDefault"}
    assert whole["runAsNonRoot"] is True and whole["runAsUser"] == whole["runAsGroup"] > 0
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        own = container["securityContext"]
        assert not own.get("privileged") and own["allowPrivilegeEscalation"] is False
        if container["name"] == "prepare":
            assert own["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
        else:
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert not {"runAsUser", "runAsNonRoot"} & set(own)


def environment(container: dict[str, Any]) -> dict[str, str]:
    """Our variables of a container; what comes from a Secret is left out."""
    named = {each["name"]: each.get("value", "") for each in container["env"] if "valueFrom" not in each}
    return {name: value for name, value in named.items() if name.startswith("KVDEPOT_")}


def test_the_charts_pod_has_no_privileges_only_its_folders_and_right_settings(chart: dict[str, dict[str, Any]]) -> None:
    for made in chart.values():
        validate(made)
    pod = chart["DaemonSet"]["spec"]["template"]["spec"]
    restrictions(pod)
    folders = {v["name"]: v["hostPath"]["path"] for v in pod["volumes"] if "hostPath" in v}
    assert folders.pop("cache", "/var/cache/kvdepot") == "/var/cache/kvdepot"
    assert folders == {"kvdepot": "/dev/shm/kvdepot"}
    (server,) = pod["containers"]
    assert server["securityContext"]["readOnlyRootFilesystem"] is True
    assert server["readinessProbe"]["httpGet"]["path"] == "/readyz"
    for probe in ("startupProbe", "livenessProbe"):  # an ill web process must not have the depot killed
        assert server[probe]["exec"]["command"] == ["kvdepot", "status", "--json"]
        assert server[probe]["timeoutSeconds"] >= 5
    mounted = {mount["name"] for each in [*pod.get("initContainers", []), server] for mount in each["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    config = settings(environment(server))
    assert (config.url, config.arena_dir) == SHARED
    assert {"name": "kvdepot", "mountPath": config.arena_dir} in server["volumeMounts"]
    assert config.on_stop == "keep"  # the node's folder outlives the container
    assert config.http == f"0.0.0.0:{server['ports'][0]['containerPort']}"
    memory = server["resources"]["limits"]["memory"]
    assert memory.endswith("Gi") and int(memory[:-2]) > config.arena_gib


def test_all_values_of_the_chart_arrive() -> None:
    made = {each["kind"]: each for each in rendered(EVERYTHING)}
    pod = made["DaemonSet"]["spec"]["template"]["spec"]
    (server,) = pod["containers"]
    config = settings(environment(server))
    assert (config.policy, config.lookup_s, config.on_stop, len(config.tiers)) == ("lru", 0.5, "keep", 2)
    assert config.max_pins == 2_000_000
    assert pod["securityContext"]["runAsUser"] == 1_000_680_000
    (owner,) = [each["env"] for each in pod["initContainers"] if each["name"] == "prepare"]
    assert owner == [
        {"name": "OWNER", "value": "1000680000"}, {"name": "FOLDERS", "value": "/run/kvdepot /var/cache/kvdepot"}
    ]  # fmt: skip
    assert {"name": "AWS_REGION", "value": "eu-central-1"} in server["env"]
    assert {"/run/kvdepot", "/var/cache/kvdepot", "/keys"} <= {mount["mountPath"] for mount in server["volumeMounts"]}
    assert made["ServiceAccount"]["metadata"]["annotations"] == {"role": "kv"}
    at = str(EVERYTHING["docs"])
    linked = alerts.render().replace(f'runbook: "{alerts.RUNBOOKS}', f'runbook_url: "{at}')
    assert made["PrometheusRule"]["spec"] == module("yaml").safe_load(linked)
    assert made["PrometheusRule"]["spec"]["groups"][0]["rules"][0]["annotations"]["runbook_url"].startswith(f"{at}#")
    assert made["ConfigMap"]["data"]["kvdepot.json"] == dashboard.render().replace(alerts.RUNBOOKS, at)
    monitor = made["PodMonitor"]["spec"]
    labels = made["DaemonSet"]["spec"]["template"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert labels[monitor["jobLabel"]] == "kvdepot"
    (scraped,) = monitor["podMetricsEndpoints"]
    assert scraped["authorization"]["credentials"]["name"] == made["Secret"]["metadata"]["name"]


def test_the_size_of_the_arena_can_have_its_unit() -> None:
    (pod,) = [each for each in rendered({"arenaGiB": "64.5GiB"}) if each["kind"] == "DaemonSet"]
    (server,) = pod["spec"]["template"]["spec"]["containers"]
    assert settings(environment(server)).arena_gib == 64.5
    assert server["resources"]["limits"]["memory"] == "67Gi"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"user": 0}, "must not be root"),
        ({"configSecret": "Not a name"}, "configSecret"),
        ({"settings": {"http": "off"}}, "settings.http: the chart sets this"),
        ({"settings": {"arena_dir": "/tmp"}}, "settings.arena_dir: the chart sets this"),
        ({"networkPolicy": {"enabled": True}, "tiers": ["redis://cache"]}, "could not reach its tiers"),
        ({"arenaGib": 16}, "arenaGib"),
        ({"arenaGiB": "64MB"}, "arenaGiB"),
        ({"settings": {"polcy": "lru"}}, "settings"),
        ({"tiers": "redis://cache"}, "tiers"),
    ],
    ids=str,
)
def test_the_chart_refuses_values_that_cannot_work(values: dict[str, Any], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        rendered(values)


def test_the_charts_schema_has_every_value_and_no_other() -> None:
    values = module("yaml").safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert "if another chart includes this one" in schema["properties"].pop("global")["description"]

    def compare(part: dict[str, Any], there: dict[str, Any]) -> None:
        assert part["additionalProperties"] is False and part["properties"].keys() == there.keys()
        for name, inner in part["properties"].items():
            if "properties" in inner:
                compare(inner, there[name])

    compare(schema, values)
    run(tool("check-jsonschema"), "--check-metaschema", CHART / "values.schema.json")
    run(tool("check-jsonschema"), "--schemafile", CHART / "values.schema.json", CHART / "values.yaml")


def test_the_charts_schema_knows_every_setting() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    names = schema["properties"]["settings"]["propertyNames"]["enum"]
    assert names == sorted(set(Config.__struct_fields__) - set(ONLY_IN_FILE))


@pytest.mark.parametrize("name", ["engine", "sidecar"])
def test_kubernetes_takes_the_example_pods(name: str) -> None:
    made = module("yaml").safe_load((DEPLOY / "kubernetes" / f"{name}.yaml").read_text())
    validate(made)
    restrictions(made["spec"])
    volumes = {volume["name"]: volume for volume in made["spec"]["volumes"]}
    values = module("yaml").safe_load((CHART / "values.yaml").read_text())
    if name == "engine":
        assert volumes["kvdepot"]["hostPath"]["path"] == values["shm"]["hostPath"]
        assert made["spec"]["securityContext"]["runAsUser"] == values["user"]
    else:
        assert not [volume for volume in volumes.values() if "hostPath" in volume]
        assert volumes["kvdepot"]["emptyDir"]["medium"] == "Memory"
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    for container in [*made["spec"].get("initContainers", []), *made["spec"]["containers"]]:
        config = settings(environment(container))
        assert (config.url, config.arena_dir) == SHARED
        assert {"name": "kvdepot", "mountPath": config.arena_dir} in container["volumeMounts"]
        if container["name"] == "depot":
            assert "nvidia.com/gpu" not in container["resources"]["limits"]
            assert config.on_stop == "keep"
            for room in (container["resources"]["limits"]["memory"], volumes["kvdepot"]["emptyDir"]["sizeLimit"]):
                assert room.endswith("Gi") and int(room[:-2]) > config.arena_gib
        else:
            (said,) = [each.partition("=")[2] for each in container["args"] if "kv-transfer-config" in each]
            assert json.loads(said) == {"kv_connector": "KVDepotConnector", "kv_role": "kv_both"}
            assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
            for probe in (container["startupProbe"], container["readinessProbe"]):
                assert probe["httpGet"] == {"path": "/health", "port": container["ports"][0]["name"]}
            patience_s = container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"]
            (minutes,) = re.findall(r"--start-period=(\d+)m", (DEPLOY / "Dockerfile").read_text())
            assert patience_s == int(minutes) * 60
            assert set(container["resources"]["requests"]) == {"cpu", "memory"}
