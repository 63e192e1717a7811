"""What this process is to the machine: its ledger, what it did wrong, and what is to go wrong in it.

The machine is a folder (tests/standin/machine.py). A process that has called cuInit holds a lock in it and keeps a
ledger; what a dead process left is swept by whoever looks next.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

from cuda.bindings._types import CUresult
from machine import VARIABLE, is_alive, used_bytes

_POLL_S = 0.001


class Refused(Exception):
    """A call fails with this result."""

    def __init__(self, result: CUresult) -> None:
        super().__init__(result.name)
        self.result = result


class Process:
    """This process, from cuInit on. Guarded by the lock of whoever calls."""

    def __init__(self) -> None:
        folder = os.environ.get(VARIABLE)
        if not folder or not (Path(folder) / "config").exists():
            raise Refused(CUresult.CUDA_ERROR_NO_DEVICE)
        self.folder = Path(folder)
        self.pid = os.getpid()
        self.token = uuid.uuid4().hex[:12]
        # Locked before it has its name: a process that sweeps takes a lock file that nobody holds for a dead process's.
        self._lock = os.open(self._path("new"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._path("new").rename(self._path("lock"))
        self._stamp: Any = None
        self.config: dict[str, Any] = {}
        self._calls: Counter[str] = Counter()
        self._gate: Any = None
        self._passed = 0
        self.counts: Counter[str] = Counter()
        self.contexts: dict[str, int] = {}  # device -> bytes of its context here
        self.memory: dict[str, tuple[int, int]] = {}  # physical memory by name -> device, bytes
        self.held: Counter[str] = Counter()  # mappings, streams, ...
        self.read_config()
        self.sweep()
        self.write()

    def _path(self, kind: str) -> Path:
        return self.folder / f"{self.token}.{kind}"

    def read_config(self) -> dict[str, Any]:
        """The machine's settings, and the failures it wants: counted from when they were asked for."""
        found = (self.folder / "config").stat()
        stamp = found.st_ino, found.st_mtime_ns
        if stamp != self._stamp:
            self._stamp = stamp
            self.config = json.loads((self.folder / "config").read_text())
            self._calls.clear()
        return self.config

    def visible(self) -> list[int]:
        """The GPUs that this process sees, in its own order."""
        count = int(self.config["gpus"])
        wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
        if wanted is None:
            return list(range(count))
        names = {uuid_of(gpu): gpu for gpu in range(count)} | {str(gpu): gpu for gpu in range(count)}
        seen = []
        for name in filter(None, wanted.split(",")):
            if name not in names:
                break  # as the driver does: nothing behind one that is not there
            seen.append(names[name])
        return seen

    # -- the ledger

    def write(self) -> None:
        """Tell the machine what this process holds."""
        fresh = self._path("new")
        held = {"contexts": self.contexts, "memory": self.memory, "held": +self.held, "counts": self.counts}
        fresh.write_text(json.dumps({"pid": self.pid, **held}))
        fresh.replace(self._path("ledger"))

    def used_bytes(self, gpu: int) -> int:
        """Memory of a GPU that anyone holds."""
        self.sweep()
        ledgers = []
        for path in self.folder.glob("*.ledger"):
            try:
                ledgers.append(json.loads(path.read_text()))
            except FileNotFoundError:
                continue
        return used_bytes(ledgers, gpu)

    def sweep(self) -> None:
        """Remove what dead processes left."""
        for path in self.folder.glob("*.lock"):
            if path.stem != self.token and not is_alive(path):
                for left in self.folder.glob(f"{path.stem}.*"):
                    left.unlink(missing_ok=True)

    def leave(self) -> None:
        for left in self.folder.glob(f"{self.token}.*"):
            left.unlink(missing_ok=True)
        os.close(self._lock)

    # -- what goes wrong

    def failure(self, what: str) -> None:
        """Note a misuse for the test to find."""
        line = f"{self.pid}: {what}\n".encode()
        fd = os.open(self.folder / "failures", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)

    def meet_faults(self, function: str) -> None:
        """Count a call; raises Refused where it is to fail."""
        faults = self.read_config()["faults"]
        self.counts[function] += 1
        self._calls[function] += 1
        for fault in faults:
            mine = fault["function"] == function and fault["pid"] in (0, self.pid)
            if mine and 0 <= self._calls[function] - fault["nth"] < fault["times"]:
                raise Refused(CUresult[fault["result"]])

    def must_wait(self) -> bool:
        """Whether a gate stands before the next copy."""
        try:
            gate = (self.folder / "gate").stat()
        except FileNotFoundError:
            self._gate = None
            return False
        if self._gate != gate.st_mtime_ns:
            self._gate = gate.st_mtime_ns
            self._passed = 0
        try:
            after = int((self.folder / "gate").read_text())
        except FileNotFoundError:
            return False
        self._passed += 1
        if self._passed <= after:
            return False
        (self.folder / f"held-{self.pid}").touch()
        return True

    def wait(self) -> None:
        """A while before the gate."""
        time.sleep(_POLL_S)


def uuid_of(gpu: int) -> str:
    """The UUID of a GPU of the stand-in, as NVML writes it."""
    return f"GPU-{uuid.UUID(bytes=uuid_bytes(gpu))}"


def uuid_bytes(gpu: int) -> bytes:
    return b"stand-in for a G"[:15] + bytes([gpu])
