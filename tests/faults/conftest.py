"""Toy engines in processes that die with the test, and the numbers that must not grow."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tools.toy_engine import ToyEngine

from kvdepot.client import MessageQueueClient
from kvdepot.protocol import wire
from tests.conftest import HANG_S, Depot, StartDepot, eventually, state, wait_stopped
from tests.programs import die_with_parent, missing

ANSWER_S = 300.0
ROOT = Path(__file__).parent.parent.parent


class Driver:
    """A toy engine (tools/toy_engine.py) in a process of its own."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self._channel = channel
        self._channel.settimeout(ANSWER_S)
        self._lines = channel.makefile("r")

    def send(self, do: str, **arguments: Any) -> None:
        """Tell it to do something; `answer` is due."""
        with contextlib.suppress(BrokenPipeError):  # it died; what it said last is the answer
            self._channel.sendall(json.dumps({"do": do, **arguments}).encode() + b"\n")

    def answer(self) -> Any:
        line = self._lines.readline()
        assert line, "the engine's process died"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["ok"]

    def tell(self, do: str, **arguments: Any) -> Any:
        self.send(do, **arguments)
        return self.answer()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait_stopped(self) -> None:
        """Return when its process has stopped itself (halting.py). The answer to what it was told last is still due."""
        wait_stopped(self.pid)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone with all its descriptors."""
        self.signal(signal.SIGKILL)
        eventually(lambda: not Path(f"/proc/{self.pid}").exists() or is_zombie(self.pid))
        self.close()

    def close(self) -> None:
        """Its process ends when it sees this."""
        self._lines.close()
        self._channel.close()


def is_zombie(pid: int) -> bool:
    """Whether a process has ended with all its threads: its descriptors stay open until the last thread has ended."""
    try:
        return state(Path(f"/proc/{pid}")) == "Z" and len(_tasks(pid)) == 1
    except OSError:
        return True


def _tasks(pid: int) -> list[str]:
    return [path.name for path in Path(f"/proc/{pid}/task").iterdir()]


def python_path() -> str:
    """Where the tests are too, for a process that begins in another folder."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


class Nursery:
    """The process that has imported torch and forks engines."""

    def __init__(self, *inside: str) -> None:
        """inside: the beginning of a command that runs the rest of it somewhere else."""
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [*inside, sys.executable, "-m", "tests.faults.driver", str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
            # A process that forks must have one thread.
            env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": python_path()},
        )
        theirs.close()
        self._channel = ours
        self._channel.settimeout(ANSWER_S)
        self._lock = threading.Lock()

    def spawn(self) -> Driver:
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            socket.send_fds(self._channel, [b"fork"], [theirs.fileno()])
            pid = int.from_bytes(self._channel.recv(8), "little")
        return Driver(pid, ours)

    def close(self) -> None:
        self._channel.close()
        self.process.kill()
        self.process.wait(HANG_S)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


StartDriver = Callable[..., Driver]


@pytest.fixture
def start_driver(nursery: Nursery) -> Iterator[StartDriver]:
    """Start toy engines that end with the test: `start_driver(url, model=..., blocks=..., width=..., seed=...)`."""
    started: list[Driver] = []

    def start(url: str, **options: Any) -> Driver:
        driver = nursery.spawn()
        started.append(driver)
        driver.tell("open", url=url, **options)
        return driver

    yield start
    for driver in started:
        if not is_zombie(driver.pid):
            os.kill(driver.pid, signal.SIGKILL)
        driver.close()


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def footprint(pid: int) -> dict[str, int]:
    """What must stay flat in a server. Its memory: `resident_kib`."""
    return {
        "fds": descriptors(pid),
        "threads": len(_tasks(pid)),
        "maps": len(Path(f"/proc/{pid}/maps").read_text().splitlines()),
    }


def resident_kib(pid: int) -> int:
    """Private memory of a process: without the arena, tensors and libraries, which are files."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0])


def settled(depot: Depot) -> dict[str, Any]:
    """The server's status once nothing is under way and no session is open; ends of sessions are not waited for."""

    def at_rest() -> dict[str, Any] | None:
        status = depot.status()
        nothing = not any(status[what] for what in ("reserved_shards", "operations", "sessions", "holds"))
        return status if nothing else None

    found: dict[str, Any] = eventually(at_rest)
    return found


class Mounts:
    """A mount namespace, until `close`. Skips the test where it may not be made, or fails it in CI."""

    def __init__(self, script: str) -> None:
        """script: what mounts the file systems in it."""
        parent, script = os.getpid(), f"{script} && echo ready && exec sleep 1000"
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=lambda: die_with_parent(parent),
        )  # fmt: skip
        assert self._holder.stdout is not None and self._holder.stderr is not None
        if self._holder.stdout.readline() != "ready\n":
            said = self._holder.stderr.read()
            Mounts.close(self)
            missing(f"the right to mount file systems ({said})")
        self.inside = ["nsenter", "--mount", f"--target={self._holder.pid}"]
        """The beginning of a command that runs in it."""
        self.root = Path(f"/proc/{self._holder.pid}/root")

    def close(self) -> None:
        self._holder.kill()
        self._holder.communicate()


class Watcher:
    """One connection that asks a server for its status again and again."""

    def __init__(self, depot: Depot) -> None:
        self._client = MessageQueueClient(depot.url, depot.context)

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._client.ask(wire.GetStatus()).result(HANG_S)
        return answer

    def clear(self) -> None:
        """Drop all chunks that nothing holds."""
        self._client.ask(wire.Clear()).result(HANG_S)

    def wait_released(self) -> None:
        """Wait until nothing is left of all clients but this one."""
        nothing = {"clients": 1, "instances": 0, "sessions": 0, "operations": 0, "reserved_shards": 0, "holds": 0}
        eventually(lambda: nothing.items() <= self.status().items())

    def close(self) -> None:
        self._client.close()


@pytest.fixture
def ending(start_depot: StartDepot) -> Iterator[contextlib.ExitStack]:
    """Closes with the test what is entered, before its servers end."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def watch(ending: contextlib.ExitStack) -> Callable[[Depot], Watcher]:
    """Connections for `Watcher.status`."""
    return lambda depot: ending.enter_context(contextlib.closing(Watcher(depot)))


MakeEngine = Callable[..., ToyEngine]


@pytest.fixture
def make_engine(ending: contextlib.ExitStack) -> MakeEngine:
    """Toy engines in this process: `make_engine(depot, model=...)`."""

    def make(depot: Depot, **options: Any) -> ToyEngine:
        return ending.enter_context(contextlib.closing(ToyEngine(depot.url, context=depot.context, **options)))

    return make
