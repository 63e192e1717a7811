"""Servers with small chunks, connections of the library to them, and programs that stop in the middle of a copy."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kvdepot
from kvdepot import Namespace
from kvdepot.status import Status
from tests.conftest import HANG_S, Depot, StartDepot, eventually
from tests.library.kv import TOKENS, open_namespace

Connect = Callable[[Depot], kvdepot.Depot]
MakeNamespace = Callable[..., Namespace]
StartProgram = Callable[..., "Program"]


@pytest.fixture(scope="module")
def server() -> Iterator[Depot]:
    """One server for a module's tests, which use revisions of their own."""
    made = Depot("--verify", "always", chunk_size=TOKENS)
    yield made.wait_ready()
    made.close()


@pytest.fixture
def connect(start_depot: StartDepot) -> Iterator[Connect]:
    """Connections that end with the test, before its servers do."""
    made: list[kvdepot.Depot] = []

    def start(depot: Depot) -> kvdepot.Depot:
        made.append(kvdepot.connect(depot.url))
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.fixture
def make(server: Depot, connect: Connect, request: pytest.FixtureRequest) -> MakeNamespace:
    """Make a namespace of this test alone: `make(*shapes, dtype="bfloat16")`."""
    depot = connect(server)
    return lambda *shapes, **options: open_namespace(depot, request.node.name, *shapes, **options)


class Program:
    """A program that uses the library (tests/library/program.py): one JSON line in, one out."""

    def __init__(self, url: str, revision: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.library.program", str(os.getpid()), url, revision],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.pid = self._process.pid
        assert self.answer() == "ready"

    def send(self, do: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the program has ended"
        return json.loads(line)

    def ask(self, do: str, **arguments: Any) -> Any:
        self.send(do, **arguments)
        return self.answer()

    def pause(self, do: str, at_copy: int = 2, **arguments: Any) -> None:
        """Begin a call, and return when it has stopped within a use of the arena, before this copy of a chunk's part.
        The command "resume" lets it go on."""
        self.send(do, at_copy=at_copy, **arguments)
        assert self.answer() == "paused"

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(HANG_S)

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def start_program(start_depot: StartDepot) -> Iterator[StartProgram]:
    """Start programs that end with the test, before its servers do: `start_program(url, revision="1")`."""
    started: list[Program] = []

    def start(url: str, revision: str = "1") -> Program:
        started.append(Program(url, revision))
        return started[-1]

    yield start
    for program in started:
        program.close()


def at_rest(depot: kvdepot.Depot) -> kvdepot.status.Status:
    """The server's status once nothing is under way."""

    def find() -> Status | None:
        status = depot.status()
        return status if not (status.reserved_shards or status.operations or status.sessions or status.holds) else None

    found: Status = eventually(find, 20)
    return found
