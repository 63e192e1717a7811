"""`make test-gpu` and `make bench-gpu` on machines that lack something: they say what, and begin nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from importlib import import_module
from pathlib import Path

import pytest
from scripts.check_gpu import Need, need_of_tests, short_of_memory

from tests.conftest import HANG_S
from tests.fakecuda.machine import Machine
from tests.programs import BEYOND_GPU_TESTS, hidden, tool

pytestmark = pytest.mark.faults  # a process each

ROOT = Path(__file__).parents[1]
TARGETS = ["test-gpu", "bench-gpu"]


def bindings(folder: Path, version: str) -> str:
    """A folder for PYTHONPATH with NVIDIA's bindings as they are on a machine without a driver."""
    package = folder / "cuda" / "bindings"
    package.mkdir(parents=True)
    (folder / "cuda" / "__init__.py").touch()
    (package / "__init__.py").write_text(f"__version__ = {version!r}\n")
    (package / "driver.py").write_text("def cuInit(flags):\n    raise RuntimeError('libcuda.so.1 not found')\n")
    return str(folder)


def make(target: str, path: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [tool("make"), target, f"GPU_PYTHON={sys.executable}"], cwd=ROOT, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip


def check(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "check_gpu.py"), *words], env=environment,
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip


@pytest.fixture
def machine() -> Iterator[Machine]:
    with closing(Machine(total_mib=16 << 10)) as made:
        yield made


@pytest.mark.parametrize("target", TARGETS)
def test_without_a_driver_make_says_so_and_begins_nothing(target: str, tmp_path: Path) -> None:
    done = make(target, bindings(tmp_path, "13.0.0"))
    assert done.returncode != 0 and "missing: no CUDA driver here: libcuda.so.1 not found" in done.stdout
    assert "SKIPPED" not in done.stdout and "processor" not in done.stdout, "pytest or the benchmark has begun"


@pytest.mark.parametrize("target", TARGETS)
def test_bindings_from_the_callers_pythonpath_are_used(target: str, tmp_path: Path) -> None:
    done = make(target, bindings(tmp_path, "11.8.0"))
    assert done.returncode != 0 and "missing: cuda-bindings 11.8.0 block all threads" in done.stdout


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


def test_a_driver_that_pins_no_shared_memory_is_reported(machine: Machine) -> None:
    machine.fail("cuMemHostRegister", "CUDA_ERROR_OUT_OF_MEMORY")
    done = check(machine.environment(), "bench")
    assert re.search(r"missing: the driver does not pin 64 MiB .*CUDA_ERROR_OUT_OF_MEMORY.*ulimit -l", done.stdout)
    assert done.returncode == 1


def test_shared_memory_smaller_than_an_arena_is_reported() -> None:
    assert any("/dev/shm has" in line for line in short_of_memory(Need(1 << 60, 0)))
    assert not list(short_of_memory(Need(0, 0)))


def test_the_largest_arena_of_the_gpu_tests_is_the_one_that_is_checked() -> None:
    sizes = []
    for path in (ROOT / "tests" / "gpu").glob("*.py"):
        module = import_module(f"tests.gpu.{path.stem}")
        sizes += [
            int(size) if size.isdigit() else getattr(module, size)
            for size in re.findall(r"arena_mib=(\w+)", path.read_text())
        ]
    assert need_of_tests().arena_bytes == max(sizes) << 20


def test_gpu_tests_are_collected_with_three_packages_of_kvdepots(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [hidden(tmp_path / "hidden", *BEYOND_GPU_TESTS), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/gpu"], cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for file in ("device", "processes", "sharing", "overlap", "sanitizer"):
        assert f"tests/gpu/test_{file}.py: " in done.stdout
