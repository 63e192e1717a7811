"""Real parts for the tests: a server process at its own socket with its own arena, and connections to it."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import zmq

from kvdepot.client import MessageQueueClient
from kvdepot.core.forgetting import clear as clear_steps
from kvdepot.core.index.index import Index
from kvdepot.errors import KVDepotError
from kvdepot.memory import shm
from kvdepot.protocol import wire
from tests import ports

try:
    import click  # noqa: F401
except ImportError:  # an environment for GPU tests may lack it
    COMMAND = [sys.executable, str(Path(__file__).parents[1] / "scripts" / "serve.py")]
else:
    COMMAND = [sys.executable, "-m", "kvdepot.cli"]

SHM = Path("/dev/shm")
HANG_S = 120.0
"""A wait of so many seconds is taken for a hang. This bounds hangs, not speed: other programs may use the machine."""
LONGEST = (
    "test_sim.py", "test_mooncake.py", "test_docs.py", "test_bench.py", "test_limits.py", "test_certify.py",
    "test_trust.py", "test_engine.py", "test_speculation.py", "test_processes.py", "test_production.py",
    "test_oracle.py",
)  # fmt: skip
"""Files that take longest. They run first, the longest before the others: the last worker that is busy should not be
busy with one of them alone."""
FAST = "tests/sim/test_sim.py::test_no_invariant", "tests/vllm/test_sim.py::test_no_invariant"
"""Tests of `make test-fast` beside unit tests: the first seeds of both simulations."""
MARKS = {"gpu": "gpu", "huggingface": "vllm", "tiers": "faults", "vllm": "vllm"}
"""The marks of tests by their folder. Those of tiers run against real servers, which takes its time."""
os.environ.setdefault("KVDEPOT_HTTP", "off")  # of every server of these tests, but where HTTP is what they test
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's further threads spin for a while after every start


def pytest_configure() -> None:
    """Hypothesis bounds the time of each example and of making them: on a busy machine any property breaks that."""
    with contextlib.suppress(ImportError):  # an environment for GPU tests may lack it
        from hypothesis import HealthCheck, settings  # here: programs of the tests import this file, too

        usual = settings()
        checks = [*usual.suppress_health_check, HealthCheck.too_slow]
        settings.register_profile("busy machine", usual, deadline=None, suppress_health_check=checks)
        settings.load_profile("busy machine")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while modules are imported, nor look at them whenever some is: they stay."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
    for item in items:
        if mark := MARKS.get(item.path.relative_to(Path(__file__).parent).parts[0]):
            item.add_marker(mark)
        if item.nodeid.startswith(FAST):
            item.add_marker("fast")


def eventually(condition: Callable[[], Any], timeout_s: float = HANG_S) -> Any:
    """What `condition` answers once that is true; fails the test after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"did not happen within {timeout_s:g} s"
        time.sleep(0.002)
    return value


@contextlib.contextmanager
def ends(within_s: float = HANG_S) -> Iterator[None]:
    """Fails where what is inside took so long that it must have hung, though it went on in the end."""
    began = time.monotonic()
    yield
    assert time.monotonic() < began + within_s, "hung"


def suspend(pid: int) -> None:
    """SIGSTOP; returns when none of its threads runs any more, which on a busy machine is not at once."""
    os.kill(pid, signal.SIGSTOP)
    wait_stopped(pid)


def wait_stopped(pid: int) -> None:
    """Return when none of its threads runs any more."""
    tasks = Path(f"/proc/{pid}/task")

    def is_stopped() -> bool:
        with contextlib.suppress(OSError):  # a thread has ended meanwhile
            return all(state(task) == "T" for task in tasks.iterdir())
        return False

    eventually(is_stopped)


def state(process: Path) -> str:
    """Of a process or thread by its folder in /proc: T is stopped, Z has ended."""
    return (process / "stat").read_text().rsplit(")", 1)[1].split()[0]


def clear(index: Index, model: str = "") -> int:
    """Remove every chunk that nothing holds, of one model or of all; how many."""
    namespaces = [namespace for namespace in index.namespaces.all() if model in ("", namespace.model)]
    scope = index.namespaces.begin_removal(namespaces, None, hides=False)
    for _ in clear_steps(index, scope):
        pass
    return scope.removed


class Depot:
    """A `kvdepot serve` process."""

    names: ClassVar[set[str]] = set()
    command: ClassVar[list[str]] = COMMAND

    def __init__(
        self,
        *flags: str,
        arena_mib: int = 64,
        chunk_size: int | str = 256,
        url: str = "",
        name: str = "",
        files: int = 0,
        stderr: int | None = None,
    ) -> None:
        """files: how many it may have open. stderr: where its log goes; else `logged` has it."""
        self.name = name or f"kvdepot-test-{uuid.uuid4().hex[:12]}"
        self.names.add(self.name)
        self.url = url or f"ipc://{tempfile.gettempdir()}/{self.name}.sock"
        self.context: zmq.Context[Any] = zmq.Context()
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self.process = subprocess.Popen(
            [
                *self.command, "serve", "--url", self.url, "--arena-name", self.name,
                "--arena-gib", str(arena_mib / 1024), "--chunk-size", str(chunk_size), *flags,
            ],
            stderr=self.log if stderr is None else stderr,
            preexec_fn=partial(resource.setrlimit, resource.RLIMIT_NOFILE, (files, files)) if files else None,
        )  # fmt: skip

    def wait_ready(self) -> Depot:
        client = MessageQueueClient(self.url, self.context)
        try:
            answer = client.ask(wire.ChunkSize(), deadline_s=None)
            eventually(lambda: answer.query() or self.process.poll() is not None)
            if self.process.poll() is not None:
                pytest.fail(f"the server ended with status {self.process.returncode}:\n{self.logged()}")
            answer.result(0.0)
        except (AssertionError, KVDepotError):
            self.process.kill()
            pytest.fail(f"the server did not answer:\n{self.logged()}")
        finally:
            client.close()
        return self

    def logged(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def status(self) -> dict[str, Any]:
        client = MessageQueueClient(self.url, self.context)
        try:
            answer: dict[str, Any] = client.ask(wire.GetStatus()).result(HANG_S)
            return answer
        finally:
            client.close()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.terminate()
        return self.process.wait(HANG_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(HANG_S)
        ending = threading.Thread(target=self.context.destroy, kwargs={"linger": 0}, daemon=True)
        ending.start()
        ending.join(10)  # a socket that a failed test left open elsewhere must not hang the rest
        if not self.log.closed:  # a test may have closed it already
            print(f"-- log of the server at {self.url}\n{self.logged()}")  # pytest shows it if the test fails
            self.log.close()
        (SHM / self.name).unlink(missing_ok=True)
        for path in Path(tempfile.gettempdir()).glob(f"{self.name}.sock*"):
            path.unlink()


StartDepot = Callable[..., Depot]


SETTLE_S = 10.0
"""How long what a test has ended may take to be gone: threads of ZeroMQ end on their own."""


def held() -> Counter[str]:
    """What this process holds and a test can leak, by name: descriptors, mapped files of shared memory, threads."""
    names: list[str] = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of this loop, or another thread has closed it
            names.append(f"descriptor of {str(path.readlink()).partition(':[')[0]}")  # without a socket's number
    maps = Path("/proc/self/maps").read_text()
    names += [f"map of {file}" for file in re.findall(r"(?:/dev/shm/|/tmp/|/memfd:).*", maps)]
    names += [f"thread {thread.name}" for thread in threading.enumerate()]
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended
            names += [f"thread {name}" for name in [path.read_text().strip()] if name.startswith("ZMQ")]
    return Counter(names) - Counter({"descriptor of socket": len(ports.held)})


@pytest.fixture(autouse=True)
def _nothing_leaks(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What a test opened, mapped or started in this process is gone when it and its own fixtures have ended.

    Unit tests alone are looked at: libraries of stores, vLLM and drivers of GPUs open things for the whole process.
    """
    is_unit = not any(map(request.node.get_closest_marker, ("faults", "gpu", "vllm")))
    before = held()
    yield
    if not is_unit or not held() - before:
        return
    request.node.funcargs.clear()  # the values of fixtures that have ended
    caplog.get_records("call").clear()  # they keep the frames of logged errors
    gc.collect()
    deadline = time.monotonic() + SETTLE_S
    while (left := held() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, f"leaked: {dict(left)}"


@pytest.fixture(scope="session", autouse=True)
def _no_leftovers() -> Iterator[None]:
    """No server of these tests may leave its arena behind."""
    yield
    shm.sweep_liveness_files(SHM)  # as the next server would: tests kill clients and servers together
    left = [name for name in Depot.names if (SHM / name).exists()]
    assert not left, f"left in {SHM}: {left}"


@pytest.fixture
def start_depot() -> Iterator[StartDepot]:
    """Start servers that end with the test: `start_depot(*flags, arena_mib=64, chunk_size=256)`."""
    started: list[Depot] = []

    def start(*flags: str, **options: Any) -> Depot:
        depot = Depot(*flags, **options)
        started.append(depot)
        return depot.wait_ready()

    yield start
    for depot in started:
        depot.close()


@pytest.fixture(scope="module")
def depot() -> Iterator[Depot]:
    """One server for a module's tests; they use model names of their own."""
    with contextlib.closing(Depot()) as server:
        yield server.wait_ready()
