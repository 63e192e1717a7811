"""Programs and libraries that read what we ship. Where a program is missing, its test is skipped, or fails in CI."""

from __future__ import annotations

import ctypes
import importlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the process `parent` ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def missing(what: str) -> None:
    import pytest  # programs of the tests import this file, too

    if os.environ.get("CI"):
        pytest.fail(f"{what} is missing")
    pytest.skip(f"{what} is missing")


def module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return missing(name)


def tool(name: str) -> str:
    """Where a program is: beside this interpreter, or where the system has it."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        missing(name)
    return str(found)


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """What a program says; fails the test when it does not succeed."""
    done = subprocess.run(command, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120)
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}"
    return done.stdout


def hidden(folder: Path, *modules: str) -> str:
    """A folder for PYTHONPATH that makes importing these modules fail, as if they were not installed."""
    folder.mkdir()
    for name in modules:
        (folder / f"{name}.py").write_text(f"raise ImportError('{name} is hidden by a test')\n")
    return str(folder)


BEYOND_GPU_TESTS = (
    "click", "hypothesis", "prometheus_client", "rich", "uvicorn", "xxhash", "zstandard", "redis",
)  # fmt: skip
"""Packages without which GPU tests and figures must run: of kvdepot's, they need pyzmq, msgspec, blake3 and numpy."""
