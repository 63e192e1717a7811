"""`make test` reruns a failed test once, alone: it names flaky tests, and hides no failure."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RunParts = Callable[..., "subprocess.CompletedProcess[str]"]

GOOD = """
import pytest
@pytest.mark.parametrize("what", ["a b", "c::d", "e/f"])
def test_good(what): pass
"""
FLAKY = """
from pathlib import Path
import pytest
def first_time(name):
    beside = Path(__file__).with_name(name)
    if not beside.exists():
        beside.touch()
        return True
    return False
@pytest.mark.parametrize("what", ["x [y]::z"])
def test_flaky(what):
    assert not first_time("called"), "the first failure"
@pytest.fixture
def shaky():
    yield
    assert not first_time("torn-down"), "the first teardown"
def test_flaky_afterwards(shaky): pass
"""
BAD = 'def test_bad():\n    assert False, "never right"\n'
CRASH = """
import os
from pathlib import Path
def test_crash():
    beside = Path(__file__).with_name("crashed")
    if not beside.exists():
        beside.touch()
        os._exit(9)
"""

pytestmark = pytest.mark.faults


@pytest.fixture
def run_parts(tmp_path: Path) -> RunParts:
    """Run files of tests as parts, each with pytest's arguments: `run_parts(one=["file.py"], **files)`."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q -p xdist\n")

    def run(files: dict[str, str], **parts: list[str]) -> subprocess.CompletedProcess[str]:
        for name, content in files.items():
            (tmp_path / f"{name}.py").write_text(content)
        code = "import json, sys; from scripts.run_tests import run; sys.exit(run(json.loads(sys.argv[1])))"
        return subprocess.run(
            [sys.executable, "-c", code, json.dumps(parts)], cwd=tmp_path, text=True, check=False, timeout=300,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        )  # fmt: skip

    return run


def test_a_test_that_fails_twice_fails_the_run_which_still_names_the_flaky_ones(run_parts: RunParts) -> None:
    done = run_parts({"test_flaky": FLAKY, "test_bad": BAD}, one=["test_flaky.py"], two=["test_bad.py"], three=["."])
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) > 3
    assert "FLAKY: test_flaky.py::test_flaky[x [y]::z]" in done.stdout.splitlines()[-3:]
    assert done.stdout.splitlines()[-1] == "FAILED: two: failed twice: test_bad.py::test_bad"
    assert done.stdout.count("E       AssertionError: never right\n") == 2


@pytest.mark.parametrize(
    ("content", "arguments", "why"),
    [
        (CRASH, ["-n", "2"], r"worker gw\d crashed"),
        (CRASH, [], "ended without a report"),
        ("import no_such_module\n", [], "cannot be collected"),
        (GOOD, ["-k", "no_such_test"], "status 5"),
    ],
    ids=["a crashed worker", "a crashed pytest", "an error at collection", "no tests"],
)
def test_a_failure_of_no_single_test_fails_the_run(
    run_parts: RunParts, content: str, arguments: list[str], why: str
) -> None:
    done = run_parts({"test_it": content}, it=[*arguments, "test_it.py"])
    assert done.returncode == 1, done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith("FAILED: it: ") and re.search(why, last), done.stdout
    assert "FLAKY" not in done.stdout
