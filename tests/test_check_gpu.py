"""`make test-gpu` and `make bench-gpu` on machines that lack something: they say what, and begin nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.conftest import HANG_S
from tests.fakecuda.machine import Machine

pytestmark = pytest.mark.faults  # a process each

ROOT = Path(__file__).parents[1]


def check(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "check_gpu.py"), *words], env=environment,
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip


@pytest.fixture
def machine() -> Iterator[Machine]:
    with closing(Machine(total_mib=16 << 10)) as made:
        yield made


@pytest.mark.parametrize("what", ["tests", "bench"])
def test_missing_packages_are_all_named(what: str, machine: Machine, tmp_path: Path) -> None:
    # An empty environment: -S leaves out site-packages, where the packages are.
    done = subprocess.run(
        [sys.executable, "-S", str(ROOT / "scripts" / "check_gpu.py"), what], capture_output=True, text=True,
        timeout=HANG_S, check=False,
    )  # fmt: skip
    named = re.findall(r"^missing: the package (\S+)", done.stdout, re.M)
    assert named == ["pyzmq", "msgspec", "blake3", "numpy"] + ["pytest"] * (what == "tests")
    assert done.returncode == 1 and not done.stderr


@pytest.mark.parametrize("what", [["tests"], ["bench"], ["bench", "--tiny"]])
def test_a_machine_with_all_that_is_needed_passes(what: list[str], machine: Machine) -> None:
    done = check(machine.environment(), *what)
    assert "missing:" not in done.stdout and done.returncode == 0, done.stdout + done.stderr
    assert machine.used_bytes(0) == 0 and machine.failures() == []


def test_a_gpu_with_too_little_free_memory_is_reported() -> None:
    with closing(Machine(total_mib=4096)) as small:
        done = check(small.environment(), "tests")
    assert re.search(r"missing: .* has [\d.]+ of 4.00 GiB free, and [\d.]+ GiB are needed", done.stdout)
    assert done.returncode == 1
