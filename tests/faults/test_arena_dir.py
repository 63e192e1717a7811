"""The arena in a folder of its own, as containers share one: whatever /dev/shm is, and wherever each side mounts it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdepot.client import admin
from kvdepot.client.launch import Embedded, Shared
from tests.cli.command import run
from tests.conftest import HANG_S, SHM, eventually
from tests.faults.conftest import Mounts, python_path

pytestmark = pytest.mark.faults

USES = """
import sys
import kvdepot
from tests.library.kv import COUNT, check, open_namespace, put
with kvdepot.connect(sys.argv[1]) as depot:
    ns = open_namespace(depot, "one")
    if sys.argv[2] == "put":
        put(ns, 1)
    assert check(ns, 1) == COUNT
"""
"""A program that stores KV and gets it back, or that finds what another has stored."""


class Pod(Mounts):
    """A mount namespace with a /dev/shm and another tmpfs, which servers and clients see at different places."""

    def __init__(self, folder: Path, shm: str) -> None:
        """shm: options of its /dev/shm."""
        self.server, self.client = folder / "server", folder / "client"
        self.url = f"ipc://{folder}/depot.sock"
        self.log = folder / "log"
        for path in (self.server, self.client):
            path.mkdir()
        super().__init__(
            f"mount -t tmpfs -o {shm} tmpfs {SHM} && mount -t tmpfs -o size=400m tmpfs {self.server} && "
            f"mount --bind {self.server} {self.client}"
        )

    def serve(self, *flags: str) -> subprocess.Popen[bytes]:
        words = "-m", "kvdepot.cli", "serve", "--url", self.url, "--arena-name", "arena", "--chunk-size", "16", *flags
        with self.log.open("w") as log:
            return subprocess.Popen([*self.inside, sys.executable, *words], stderr=log)

    def use(self, what: str, arena_dir: Path) -> str:
        """Run a client; what it says if it fails."""
        environ = os.environ | {"KVDEPOT_ARENA_DIR": str(arena_dir), "PYTHONPATH": python_path()}
        command = [*self.inside, sys.executable, "-c", USES, self.url, what]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=HANG_S, check=False)
        return done.stderr if done.returncode else ""


@pytest.mark.parametrize("shm", ["size=64m", "ro"])
def test_server_and_client_work_whatever_dev_shm_is_and_wherever_the_folder_is(shm: str, tmp_path: Path) -> None:
    with contextlib.closing(Pod(tmp_path, shm)) as pod:
        server = pod.serve("--arena-dir", str(pod.server), "--arena-gib", "128MiB")
        try:
            assert pod.use("put", pod.client) == ""
            assert pod.use("get", pod.client) == ""
            inside = Path(f"/proc/{server.pid}/root")
            assert [path.name for path in (inside / str(pod.client)[1:]).glob("arena*")] == ["arena"]
            assert not list((inside / str(SHM)[1:]).iterdir())
            server.terminate()
            assert server.wait(HANG_S) == 0
            print(pod.log.read_text())
            assert f"arena {pod.server}/arena of 128 MiB" in pod.log.read_text()
        finally:
            server.kill()
            server.wait(HANG_S)


def test_an_arena_that_nobody_sized_is_as_its_folder_allows(tmp_path: Path) -> None:
    with contextlib.closing(Pod(tmp_path, "size=64m")) as pod:
        server = pod.serve("--arena-dir", str(pod.server))
        try:
            eventually(lambda: f"arena {pod.server}/arena of 100 MiB" in pod.log.read_text() or server.poll())
            assert server.poll() is None, pod.log.read_text()
        finally:
            server.kill()
            server.wait(HANG_S)


def test_a_client_that_looks_in_another_folder_is_told_which_and_what_to_set(tmp_path: Path) -> None:
    with contextlib.closing(Pod(tmp_path, "size=64m")) as pod:
        server = pod.serve("--arena-dir", str(pod.server), "--arena-gib", "32MiB")
        try:
            said = pod.use("put", SHM)
            assert f"{SHM}/arena cannot be opened: No such file or directory" in said
            assert "--arena-dir" in said and "KVDEPOT_ARENA_DIR" in said
            assert f"{tmp_path}, the folder for the arena, is on a disk" in pod.use("put", tmp_path)
        finally:
            server.kill()
            server.wait(HANG_S)


def test_a_server_whose_folder_does_not_suit_says_so_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    for folder, said in (
        (tmp_path, "is on a disk"),
        (tmp_path / "none", "No such file"),
        (Path("shm"), "absolute path"),
    ):
        ended = run("serve", "--url", f"ipc://{tmp_path}/s", "--http", "off", "--arena-dir", folder)
        assert ended.returncode != 0
        (line,) = ended.stderr.splitlines()
        assert said in line and str(folder) in line and "--arena-dir" in line
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def folder() -> Iterator[Path]:
    """Another folder in memory than /dev/shm itself."""
    made = SHM / f"kvdepot-test-{uuid.uuid4().hex[:12]}"
    made.mkdir(0o700)
    yield made
    for path in made.iterdir():
        path.unlink()
    made.rmdir()


@pytest.mark.parametrize("how", ["shared", "embedded"])
def test_a_server_that_an_engine_starts_has_the_engines_folder(
    how: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVDEPOT_ARENA_GIB", "16MiB")
    monkeypatch.setenv("KVDEPOT_ARENA_NAME", "arena")
    monkeypatch.setenv("KVDEPOT_ARENA_DIR", str(folder if how == "shared" else SHM))
    url = f"ipc://{tmp_path}/depot.sock"
    with contextlib.ExitStack() as stack:
        if how == "shared":
            stack.callback(run, "stop", "--url", url)
            assert Shared(url).start()
        else:
            stack.enter_context(contextlib.closing(Embedded(url, uuid.uuid4().hex[:12], str(folder))))
        with admin.connect(url, timeout_s=HANG_S, arena_dir=str(folder)) as client:
            arena, _ = client.arena
            assert (folder / arena).exists() and not (SHM / arena).exists()
            assert admin.status(client).settings["arena_dir"] == str(folder)
    eventually(lambda: not list(folder.iterdir()))
