"""NVIDIA's compute-sanitizer finds nothing in one pass of the copy kernel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FOUND = 99


def sanitizer() -> str:
    """Where compute-sanitizer is; empty where it is not."""
    places = ["/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer"]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *places])) or ""


def one_pass(*inside: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    done = subprocess.run(
        [*inside, sys.executable, "-m", "tests.gpu.one_pass"], cwd=ROOT, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if done.returncode == 77:
        pytest.skip(f"there is no copy kernel: {done.stderr.strip()}")
    return done


def test_one_pass_of_each_way_copies_every_byte() -> None:
    done = one_pass()
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("tool", ["memcheck", "initcheck", "racecheck", "synccheck"])
def test_compute_sanitizer_finds_nothing(tool: str) -> None:
    if not sanitizer():
        pytest.skip("compute-sanitizer is not installed")
    done = one_pass(
        sanitizer(), "--tool", tool, "--target-processes", "application-only", "--error-exitcode", str(FOUND)
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
