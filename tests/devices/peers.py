"""Processes that run tests/devices/peer.py, controlled by the tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakecuda.machine import Machine

HERE = Path(__file__).parent
MIB = 1 << 20


class Peer:
    """A process that runs tests/devices/peer.py."""

    def __init__(self, machine: Machine, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "peer.py")],
            env={"PYTHONWARNINGS": "error", **machine.environment(), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self, what: str, *args: Any) -> Any:
        """What that method of the peer answers; raises what it raised, as `Raised`."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([what, *args]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            _, log = self.process.communicate(timeout=120)
            pytest.fail(f"the peer is gone:\n{log}")
        kind, value = json.loads(line)
        if kind != "ok":
            raise Raised(kind, value)
        return value

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=120)


class Raised(Exception):
    """A peer's exception: its type's name and text."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


def is_stopped(pid: int) -> bool:
    """Whether no thread of a process runs; a signal takes its time to get to each."""
    states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(states) == {"T"}
