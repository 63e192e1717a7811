"""The images of deploy/Dockerfile, which scripts/build_images.sh has built, run by Debian's podman: `make images`.

Servers and engines run as the images' user with no capability, as deploy/compose.yaml and the manifests have them.
Engines are vLLM on the CPU with a small random model, or stores.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.conftest import SHM, eventually
from tests.programs import module, tool
from tests.test_deploy import DEPLOY, rendered

HERE = Path(__file__).parent
IMAGES = os.environ.get("TEST_IMAGES", "")
"""The prefix of the images' names, which `make images` sets."""
USER = 10001
START_S = 600
SHARED = SHM / "kvdepot-test-images"
"""The folder of the machine that containers mount as /run/kvdepot where they do as Kubernetes does."""
LEAST = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "all", "--security-opt", "no-new-privileges")
ENGINE = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"}
SETTINGS = {"CONTAINERS_CONF": str(HERE / "containers.conf"), "PREFIX": IMAGES, "KVDEPOT_ARENA_GIB": "0.5"}

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not IMAGES, reason="`make images` builds the images and runs these tests"),
]


def attempt(*command: str) -> subprocess.CompletedProcess[str]:
    """Run podman, or the first of `command` if that is a path."""
    program = [] if command[0].startswith("/") else [tool("podman")]
    return subprocess.run(
        [*program, *command], env=os.environ | SETTINGS, text=True, capture_output=True, timeout=START_S, check=False
    )


def podman(*command: str) -> str:
    """What podman prints to its standard output; fails the test when it does not succeed."""
    done = attempt(*command)
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


@contextmanager
def container(*arguments: str) -> Iterator[str]:
    """A container that runs in the background; yields its name."""
    name = f"kvdepot-test-{uuid.uuid4().hex[:8]}"
    try:
        podman("run", "--detach", "--name", name, *LEAST, *arguments)
        yield name
    finally:
        attempt("rm", "--force", "--time", "2", "--volumes", name)


@contextmanager
def volume(options: str = f"mode=0700,uid={USER},gid={USER}") -> Iterator[str]:
    """A memory file system of 1 GiB; yields its name."""
    name = f"kvdepot-test-{uuid.uuid4().hex[:8]}"
    podman("volume", "create", "--opt=type=tmpfs", "--opt=device=tmpfs", f"--opt=o=nr_blocks=256k,{options}", name)
    try:
        yield name
    finally:
        podman("volume", "rm", "--force", name)


@contextmanager
def server(*arguments: str) -> Iterator[str]:
    """A container with a server of 256 MiB; yields its name when it is healthy."""
    with container("--memory", "1g", "--env", "KVDEPOT_ARENA_GIB=0.25", *arguments, f"{IMAGES}/depot") as name:
        wait_healthy(name)
        yield name


def wait_healthy(name: str) -> None:
    """Wait until a server's health check succeeds."""
    eventually(lambda: attempt("healthcheck", "run", name).returncode == 0)


def log(name: str) -> str:
    done = attempt("logs", name)
    return done.stdout + done.stderr


def get(url: str, token: str = "") -> int:
    """The status of an answer."""
    try:
        with urlopen(Request(url, headers={"Authorization": f"Bearer {token}"} if token else {}), timeout=30) as answer:
            return int(answer.status)
    except HTTPError as exc:
        return exc.code


# -- the server's image


def test_the_server_runs_as_its_user_with_a_read_only_root_and_little_memory() -> None:
    with server("--shm-size", "320m") as name:
        assert podman("exec", name, "id", "--user") == str(USER)
        assert attempt("exec", name, "touch", "/opt/kvdepot/x").returncode == 1
        podman("exec", name, "kvdepot", "doctor")
        podman("stop", "--time", "20", name)
        assert podman("inspect", "--format", "{{.State.ExitCode}}", name) == "0"
        assert log(name).rstrip().endswith("INFO stopped")


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--shm-size", "64m"], "1", "enlarge /dev/shm"),  # others may leave it: a later start may succeed
        (["--shm-size", "2g", "--memory", "300m"], "2", "the 300 MiB that control group / allows: lower --arena-gib"),
    ],
    ids=["shared memory", "memory limit"],
)
def test_a_server_without_room_says_what_is_too_small(flags: list[str], code: str, message: str) -> None:
    with container("--env", "KVDEPOT_ARENA_GIB=1", *flags, f"{IMAGES}/depot") as name:
        assert podman("wait", name) == code
        assert message in log(name)


# -- what server and engine must share


def stores(*arguments: str) -> str:
    """What stores.py prints in a container whose own /dev/shm has 64 MiB."""
    mount = f"{HERE / 'stores.py'}:/stores.py:ro"
    flags = ["--rm", "--shm-size", "64m", "--volume", mount, "--entrypoint", "python"]
    return podman("run", *LEAST, *flags, *arguments, f"{IMAGES}/demo", "/stores.py")


def test_dev_shm_may_be_the_volume() -> None:
    with volume() as shm, server("--volume", f"{shm}:/dev/shm"):
        assert stores("--volume", f"{shm}:/dev/shm") == "stored and loaded"


def test_the_socket_alone_is_not_enough_but_may_be_beside_a_common_ipc_namespace() -> None:
    url = ("--env", "KVDEPOT_URL=ipc:///run/kvdepot/sock")
    with volume() as run, server(*url, "--volume", f"{run}:/run/kvdepot", "--shm-size", "512m") as name:
        both = (*url, "--volume", f"{run}:/run/kvdepot")
        assert "/dev/shm" in stores(*both)  # which they do not share
        assert stores(*both, "--ipc", f"container:{name}") == "stored and loaded"


def test_an_engine_of_another_user_is_refused(shm_folder: Path) -> None:
    shm_folder.chmod(0o1777)
    with server("--volume", f"{shm_folder}:/dev/shm"):
        said = stores("--volume", f"{shm_folder}:/dev/shm", "--user", "10002")
        assert f"belongs to user {USER}, not to this user (10002)" in said


# -- real engines


@pytest.fixture
def shm_folder() -> Iterator[Path]:
    """`SHARED`, which exists during a test."""
    SHARED.mkdir()
    yield SHARED
    for file in SHARED.iterdir():
        file.unlink()
    SHARED.rmdir()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model that the images' user can read."""
    from tests.vllm.engines import LLAMA, write_model
    from tests.vllm.processors import write_tokenizer

    folder = tmp_path_factory.mktemp("images") / "model"
    write_model(folder, LLAMA)
    write_tokenizer(folder)
    for file in folder.iterdir():
        file.chmod(0o644)
    return folder


def wait_engine(name: str) -> None:
    """Wait until an engine's /health answers, as its health check asks."""
    wait = (
        "import time, urllib.request\n"
        "while True:\n"
        "    try: urllib.request.urlopen('http://127.0.0.1:8000/health'); break\n"
        "    except OSError: time.sleep(0.5)"
    )
    done = attempt("exec", name, "timeout", str(START_S - 20), "python3", "-c", wait)
    assert done.returncode == 0, log(name)


def complete(model: Path) -> list[int]:
    """The tokens that the engine at port 8000 generates after a prompt of two chunks."""
    asked = {"model": str(model), "prompt": [50 + i % 900 for i in range(600)], "max_tokens": 8, "temperature": 0}
    body = json.dumps(asked | {"return_token_ids": True}).encode()
    request = Request("http://127.0.0.1:8000/v1/completions", body, {"Content-Type": "application/json"})
    with urlopen(request, timeout=START_S) as answer:
        tokens: list[int] = json.load(answer)["choices"][0]["token_ids"]
    return tokens


def status(name: str) -> dict[str, Any]:
    """The status of the server in a container."""
    found: dict[str, Any] = json.loads(podman("exec", name, "kvdepot", "status", "--json"))
    return found


@contextmanager
def compose(profile: str, model: Path) -> Iterator[None]:
    """What deploy/compose.yaml starts for a profile."""
    SETTINGS["MODEL"] = str(model)
    command = [
        tool("podman-compose"), "--file", str(DEPLOY / "compose.yaml"), "--file", str(HERE / "compose.yaml"),
        "--project-name", "kvdepot-test", "--profile", profile,
    ]  # fmt: skip
    try:
        podman(*command, "up", "--no-build", "--detach")
        yield
    finally:
        attempt(*command, "down", "--volumes", "--timeout", "5")


def test_compose_serves_a_model_and_chunks_outlive_both_containers(model: Path) -> None:
    depot, engine = "kvdepot-test_depot_1", "kvdepot-test_vllm_1"
    with compose("gpu", model):
        wait_engine(engine)
        podman("healthcheck", "run", engine)
        tokens = complete(model)
        eventually(lambda: status(depot)["chunks"] == 2)
        stored_bytes = status(depot)["stored_bytes"]
        podman("restart", "--time", "20", depot)
        wait_healthy(depot)
        assert status(depot)["chunks"] == 2
        podman("restart", "--time", "20", engine)
        wait_engine(engine)
        assert complete(model) == tokens
        assert status(depot)["retrieved_bytes"] == stored_bytes > 0
        assert get("http://127.0.0.1:7077/readyz") == 200
        assert get("http://127.0.0.1:7077/metrics") == 401


def test_compose_runs_the_demo(model: Path) -> None:
    with compose("cpu", model):
        assert podman("wait", "kvdepot-test_demo_1") == "0", log("kvdepot-test_demo_1")


# -- Kubernetes: `podman kube play` of pods


@contextmanager
def play(*objects: dict[str, Any], folder: Path) -> Iterator[None]:
    """Run pods with podman, without what only a cluster has."""
    yaml = module("yaml")
    for pod in (each["spec"] for each in objects if each["kind"] == "Pod"):
        for volume in pod["volumes"]:
            if "secret" in volume:
                volume["secret"]["optional"] = False  # podman 4.3 does not know the default
        for port in (port for each in pod["containers"] for port in each.get("ports", [])):
            port["hostIP"] = "127.0.0.1"  # podman publishes all ports
    file = folder / f"{uuid.uuid4().hex}.yaml"
    file.write_text(yaml.safe_dump_all(objects))
    try:
        podman("kube", "play", str(file))
        yield
    finally:
        attempt("kube", "down", str(file))
        for secret in (each["metadata"]["name"] for each in objects if each["kind"] == "Secret"):
            attempt("secret", "rm", secret)
            attempt("volume", "rm", "--force", secret)


def example(name: str, model: Path) -> dict[str, Any]:
    """A pod of deploy/kubernetes whose engine runs on the CPU and has the model, on `SHARED`."""
    pod: dict[str, Any] = module("yaml").safe_load((DEPLOY / "kubernetes" / f"{name}.yaml").read_text())
    (engine,) = pod["spec"]["containers"]
    assert engine["args"][0] == "Qwen/Qwen3-0.6B"
    engine["args"][0] = str(model)
    engine["image"] = f"{IMAGES}/vllm:latest"
    engine["env"] += [{"name": key, "value": value} for key, value in ENGINE.items()]
    del engine["resources"]
    engine["volumeMounts"].append({"name": "model", "mountPath": str(model), "readOnly": True})
    for each in pod["spec"]["volumes"]:
        if each["name"] == "kvdepot":
            each.pop("emptyDir", None)  # podman 4.3 has those on a disk
            each["hostPath"] = {"path": str(SHARED), "type": "Directory"}
    pod["spec"]["volumes"].append({"name": "model", "hostPath": {"path": str(model)}})
    return pod


def test_the_charts_pod_prepares_its_node_and_serves_an_engines_pod(
    shm_folder: Path, model: Path, tmp_path: Path
) -> None:
    image = {"repository": f"{IMAGES}/depot", "tag": "latest", "pullPolicy": "Never"}
    values = {"image": image, "arenaGiB": 0.25, "shm": {"hostPath": str(shm_folder)}}
    made = {each["kind"]: each for each in rendered(values)}
    template = made["DaemonSet"]["spec"]["template"]
    # By default podman 4.3 removes an init container when it has ended, and may fail in that.
    annotations = {"io.podman.annotations.init.container.type": "always"}
    metadata = {"name": "depot", "labels": template["metadata"]["labels"], "annotations": annotations}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
    with play(made["Secret"], pod, folder=tmp_path):
        wait_healthy("depot-kvdepot")
        assert (shm_folder.stat().st_uid, shm_folder.stat().st_mode & 0o777) == (USER, 0o700)
        assert podman("exec", "depot-kvdepot", "stat", "--format", "%a %u", "/run/kvdepot-token/token") == f"600 {USER}"
        token = podman("exec", "depot-kvdepot", "cat", "/run/kvdepot-token/token")
        assert get("http://127.0.0.1:7077/readyz") == 200
        assert [get("http://127.0.0.1:7077/metrics", each) for each in ("", token)] == [401, 200]
        with play(example("engine", model), folder=tmp_path):
            wait_engine("vllm-vllm")
            complete(model)
            eventually(lambda: status("depot-kvdepot")["chunks"] == 2)


def test_the_sidecars_pod_shares_kv_between_its_containers(shm_folder: Path, model: Path, tmp_path: Path) -> None:
    os.chown(shm_folder, 0, USER)
    shm_folder.chmod(0o2777)  # as the kubelet makes a memory volume for fsGroup
    pod = example("sidecar", model)
    (depot,) = pod["spec"].pop("initContainers")
    assert depot.pop("restartPolicy") == "Always"  # podman 4.3 knows no sidecars: it is a container like others
    depot |= {"image": f"{IMAGES}/depot:latest", "env": [*depot["env"], {"name": "KVDEPOT_ARENA_GIB", "value": "0.25"}]}
    pod["spec"]["containers"].insert(0, depot)
    with play(pod, folder=tmp_path):
        wait_engine("vllm-vllm")
        complete(model)
        eventually(lambda: status("vllm-depot")["chunks"] == 2)
