"""The GPUs of the fake driver: a folder in /dev/shm that processes find through the environment.

Tests make a `Machine`, start processes with its `environment()`, and ask it what each process holds, and what went
wrong.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parent / "driver.c"
VARIABLES = ("FAKECUDA", "LD_LIBRARY_PATH")
"""The first names the machine's folder (without it there is no GPU), the second that of the libraries."""
BASE_OFFSET = 512
"""Bytes before a plain allocation in its file, as in driver.c."""
_ENTRY = struct.Struct("40sq")
"""An entry of a process's ledger: name, value."""
_KEPT = "kvdepot.devices.cuda.kernel"
"""Not imported again for another machine: it keeps no driver, and what it has compiled is good for the next."""


class Machine:
    """GPUs that all processes with its environment see. Numbers are of the machine, over all living processes."""

    def __init__(self, gpus: int = 2, total_mib: int = 1024, version: int = 13000, seed: int = 0, **more: Any) -> None:
        """version: of the driver, as CUDA numbers it; more: `context_bytes`, and `attributes` by CUDA's names."""
        self.folder = Path(tempfile.mkdtemp(prefix="fakecuda-", dir="/dev/shm"))
        self._attributes: dict[str, int] = more.pop("attributes", {})
        self._settings = {
            "gpus": gpus, "total_bytes": total_mib << 20, "version": version, "seed": seed,
            "context_bytes": 64 << 20, **more,
        }  # fmt: skip
        self._faults: list[str] = []
        self._write()

    def _write(self) -> None:
        from cuda.bindings import driver

        lines = [f"{name} {value}" for name, value in self._settings.items()]
        lines += [
            f"attribute {int(getattr(driver.CUdevice_attribute, n))} {value}" for n, value in self._attributes.items()
        ]
        fresh = self.folder / "config.new"
        fresh.write_text("\n".join([*lines, *self._faults]) + "\n")
        fresh.replace(self.folder / "config")

    def environment(self) -> dict[str, str]:
        """For a process that is to find these GPUs."""
        path = os.pathsep.join(filter(None, [str(libraries()), os.environ.get("LD_LIBRARY_PATH")]))
        return os.environ | dict(zip(VARIABLES, (str(self.folder), path), strict=True))

    @contextmanager
    def here(self) -> Iterator[Machine]:
        """In this process too, while the block runs. Modules that use CUDA are imported anew, and forgotten afterwards.

        Within another machine's block, this process must hold nothing of that machine.
        """
        kept = {name: module for name, module in sys.modules.items() if _uses_cuda(name)}
        for name in kept:
            del sys.modules[name]
        before = os.environ.get(VARIABLES[0], "")
        os.environ[VARIABLES[0]] = str(self.folder)
        driver = _load()
        driver.fakecuda_leave()
        try:
            yield self
        finally:
            driver.fakecuda_leave()
            for name in [name for name in sys.modules if _uses_cuda(name)]:
                del sys.modules[name]
            sys.modules.update(kept)
            os.environ[VARIABLES[0]] = before
            if before:
                driver.cuInit(0)

    # -- what goes wrong, or takes long, on purpose

    def fail(self, function: str, result: str, nth: int = 1, times: int = 1, pid: int = 0) -> None:
        """Let the n-th call from now on of a driver function fail, and the `times - 1` calls after it.

        function: "copy" is the n-th copy that a stream runs: the failure shows in what waits for it, and stays.
        pid: in this process only; 0: in each.
        """
        from cuda.bindings import driver

        self._faults.append(f"fault {function} {int(getattr(driver.CUresult, result))} {nth} {times} {pid} 0")
        self._write()

    def slow(self, function: str, seconds: float, nth: int = 1, pid: int = 0) -> None:
        """Let each call of a driver function from the n-th on take this long, or until `heal`."""
        self._faults.append(f"fault {function} 0 {nth} {10**9} {pid} {int(seconds * 1e6)}")
        self._write()

    def heal(self) -> None:
        """No more failures and delays on purpose."""
        self._faults = []
        self._write()

    @contextmanager
    def gate(self, after: int = 0) -> Iterator[Path]:
        """While the block runs, streams stop after this number of copies of each process; `is_held` tells."""
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

    def _in_use(self, kind: str, gpu: int) -> list[Path]:
        """Memory ("mem") or contexts ("ctx") of a GPU that a living process uses: it has them locked."""
        with (self.folder / "scan").open("w") as scan:
            fcntl.flock(scan, fcntl.LOCK_EX)  # driver.c looks for unused files in the same way
            return [path for path in self.folder.glob(f"{kind}-{gpu}-*") if _is_locked(path)]

    def used_bytes(self, gpu: int) -> int:
        """Memory of a GPU that is taken, contexts included."""
        return sum(_bytes_of(path) for kind in ("mem", "ctx") for path in self._in_use(kind, gpu))

    def contexts(self, gpu: int) -> set[int]:
        """Processes that have a context on a GPU."""
        return {int(path.name.split("-")[2]) for path in self._in_use("ctx", gpu)}

    def _ledger(self, pid: int) -> dict[str, dict[str, int]]:
        """What a process counts, by kind and name; empty if it has not initialised the driver."""
        found: dict[str, dict[str, int]] = {}
        for path in self.folder.glob(f"{pid}-*.ledger"):
            if _is_locked(path):
                found = {"held": {}, "count": {}}
                for name, value in _ENTRY.iter_unpack(path.read_bytes()):
                    kind, _, what = name.rstrip(b"\0").decode().partition(" ")
                    if value:
                        found[kind][what] = value
        return found

    def held_by(self, pid: int) -> dict[str, Any]:
        """What a process has: contexts and memory with their bytes, and the number of handles and ranges by kind."""
        ledger = self._ledger(pid)
        if not ledger:
            return {}
        files = {path.name: _bytes_of(path) for path in _files_of(pid) if path.parent == self.folder}
        contexts, memory = ({n: size for n, size in files.items() if n.startswith(kind)} for kind in ("ctx", "mem"))
        return {"contexts": contexts, "memory": memory, "held": ledger["held"], "counts": ledger["count"]}

    def counts(self, pid: int) -> Counter[str]:
        """How often a process has called what, and of what kind its copies were."""
        return Counter(self._ledger(pid).get("count", {}))

    def failures(self) -> list[str]:
        """What was done that a real driver punishes, or leaves undefined, by any process."""
        path = self.folder / "failures"
        return path.read_text().splitlines() if path.exists() else []

    def close(self) -> None:
        """Remove everything; safe twice."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _uses_cuda(name: str) -> bool:
    return name != _KEPT and name.startswith("kvdepot.devices.cuda")


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _bytes_of(path: Path) -> int:
    """Bytes of the memory or the context in a file."""
    return path.stat().st_size - (BASE_OFFSET if re.match(r"mem-\d+-a-", path.name) else 0)


def _files_of(pid: int) -> Iterator[Path]:
    """The files that a process has open."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            yield link.readlink()


@functools.cache
def libraries() -> Path:
    """The folder with libcuda.so.1 and libnvidia-ml.so.1, built by this machine's C compiler the first time."""
    source = SOURCE.read_bytes()
    folder = Path(tempfile.gettempdir()) / f"fakecuda-{os.getuid()}-{hashlib.sha256(source).hexdigest()[:16]}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
                command = ["cc", "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
                command += [f"-Wl,-Bsymbolic,-soname,{name}", "-o", f"{made}/{name}", str(SOURCE)]
                subprocess.run(command, check=True, timeout=120)
            try:
                Path(made).rename(folder)
                Path(made).mkdir()  # for the context manager to remove
            except OSError:
                assert folder.exists()  # another process was first
    return folder


@functools.cache
def _load() -> Any:
    """The driver, loaded into this process under the name by which NVIDIA's bindings look for it."""
    ctypes.CDLL(str(libraries() / "libnvidia-ml.so.1"))
    return ctypes.CDLL(str(libraries() / "libcuda.so.1"))
