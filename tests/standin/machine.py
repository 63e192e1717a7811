"""The GPUs of the stand-in: a folder in /dev/shm that processes find through the environment.

Tests make a `Machine`, start processes with its `environment()`, and ask it what is held, by whom, and what went wrong.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
VARIABLE = "CUDA_STANDIN"
"""Names the machine's folder; without it there is no GPU."""


class Machine:
    """So many GPUs with so much memory. Numbers are of the stand-in as a whole, over all living processes."""

    def __init__(self, gpus: int = 2, total_mib: int = 1024, version: int = 13000, seed: int = 0, **more: Any) -> None:
        """version: of the driver, as CUDA numbers it; more: "context_bytes"."""
        self.folder = Path(tempfile.mkdtemp(prefix="standin-", dir="/dev/shm"))
        self._config: dict[str, Any] = {
            "gpus": gpus, "total_bytes": total_mib << 20, "version": version, "seed": seed, "faults": [], **more
        }  # fmt: skip
        self._write()

    def _write(self) -> None:
        fresh = self.folder / "config.new"
        self._config["edition"] = uuid.uuid4().hex
        fresh.write_text(json.dumps(self._config))
        fresh.replace(self.folder / "config")

    def environment(self) -> dict[str, str]:
        """For a process that is to find these GPUs, and this stand-in before the real bindings."""
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        return {**os.environ, "PYTHONPATH": path, VARIABLE: str(self.folder)}

    @contextmanager
    def here(self) -> Iterator[Machine]:
        """In this process too, while the block runs: modules that have met CUDA are loaded anew, and forgotten."""
        kept = {name: module for name, module in sys.modules.items() if _met_cuda(name)}
        for name in kept:
            del sys.modules[name]
        sys.path.insert(0, str(HERE))
        before = os.environ.get(VARIABLE, "")
        os.environ[VARIABLE] = str(self.folder)
        try:
            yield self
        finally:
            stand_in = sys.modules.get("cuda.bindings.driver")
            if stand_in is not None:
                stand_in.leave()
            for name in [name for name in sys.modules if _met_cuda(name)]:
                del sys.modules[name]
            sys.modules.update(kept)
            sys.path.remove(str(HERE))
            os.environ[VARIABLE] = before

    # -- what goes wrong on purpose

    def fail(self, function: str, result: str, nth: int = 1, times: int = 1, pid: int = 0) -> None:
        """Let the n-th call from now on of a driver function fail, and `times - 1` more behind it.

        function: "copy" is the n-th copy that a stream runs: the failure shows in what waits for it, and stays.
        pid: in this process only; 0: in each.
        """
        self._config["faults"].append({"function": function, "result": result, "nth": nth, "times": times, "pid": pid})
        self._write()

    def heal(self) -> None:
        """No more failures on purpose."""
        self._config["faults"] = []
        self._write()

    @contextmanager
    def gate(self, after: int = 0) -> Iterator[Path]:
        """While the block runs, streams stop behind so many copies of each process; `is_held` tells."""
        gate = self.folder / "gate"
        (self.folder / "gate.new").write_text(str(after))
        (self.folder / "gate.new").replace(gate)
        try:
            yield gate
        finally:
            gate.unlink()
            for held in self.folder.glob("held-*"):
                held.unlink(missing_ok=True)

    def is_held(self, pid: int) -> bool:
        """Whether this process stands before the gate with copies that it has begun."""
        return (self.folder / f"held-{pid}").exists()

    # -- what there is

    def _ledgers(self) -> list[dict[str, Any]]:
        found = []
        for path in self.folder.glob("*.ledger"):
            if is_alive(path):
                try:
                    found.append(json.loads(path.read_text()))
                except FileNotFoundError:
                    continue
        return found

    def used_bytes(self, gpu: int) -> int:
        """Memory of a GPU that is taken, contexts included."""
        return used_bytes(self._ledgers(), gpu)

    def contexts(self, gpu: int) -> set[int]:
        """Processes that have a context on a GPU."""
        return {ledger["pid"] for ledger in self._ledgers() if str(gpu) in ledger["contexts"]}

    def held_by(self, pid: int) -> dict[str, Any]:
        """What a process has: contexts, memory, mappings, streams, ... by number or bytes."""
        return next((ledger for ledger in self._ledgers() if ledger["pid"] == pid), {})

    def counts(self, pid: int) -> Counter[str]:
        """How often a process has called what, and of what kind its copies were."""
        return Counter(self.held_by(pid).get("counts", {}))

    def failures(self) -> list[str]:
        """What was done that a real driver punishes, or leaves undefined, by any process."""
        path = self.folder / "failures"
        return path.read_text().splitlines() if path.exists() else []

    def close(self) -> None:
        """Remove everything; safe twice."""
        shutil.rmtree(self.folder, ignore_errors=True)


_KEPT = "kvdepot.devices.cuda.kernel"
"""Knows no driver before it is given one, and what it has compiled is good for the next."""


def _met_cuda(name: str) -> bool:
    return name != _KEPT and (name in ("cuda", "pynvml") or name.startswith(("cuda.", "kvdepot.devices.cuda")))


def is_alive(ledger: Path) -> bool:
    """Whether the process that wrote this ledger lives: it holds a lock as long as it does."""
    try:
        fd = os.open(ledger.with_suffix(".lock"), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def used_bytes(ledgers: list[dict[str, Any]], gpu: int) -> int:
    """Memory of a GPU that these processes hold; what several have mapped counts once."""
    memory = {key: size for ledger in ledgers for key, (of, size) in ledger["memory"].items() if of == gpu}
    return sum(memory.values()) + sum(ledger["contexts"].get(str(gpu), 0) for ledger in ledgers)
