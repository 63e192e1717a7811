"""Run the parts of the test suite, and rerun each failed test once, alone.

    python scripts/run_tests.py [fast] [unit] [faults] [vllm]

A test that passes the second time is flaky: the last lines name it, its first failure stays in the output above, and
the run succeeds. The run fails if a test fails twice, or by a failure that is not that of a single test: more than
`MOST` failures in a part, a crashed worker, an error at collection, an interrupted pytest. No part runs after one that
has failed. pytest also loads this file as a plugin, to report which tests failed. scripts/test_versions.py runs its
parts with it, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

WITHOUT_VLLM = ["--ignore", "tests/vllm", "--ignore", "tests/huggingface", "tests"]  # importing vLLM takes ten seconds
SMALL = ["client", "core", "eviction", "integrations", "memory", "protocol", "server", "test_structure.py"]
"""What a change of core or client needs, beside seeds of both simulations."""
BY_FILE = ["--dist", "loadfile", "--no-loadscope-reorder"]  # in the order of tests/conftest.py, the longest first
PARTS = {
    "fast": ["-m", "fast or not (vllm or faults or gpu)", "-n", "2", *BY_FILE, "tests/vllm/test_sim.py", "tests/sim"],
    "unit": ["-m", "not vllm and not faults and not gpu", "-n", "2", *BY_FILE, *WITHOUT_VLLM],
    "faults": ["-m", "faults", "-n", "6", *BY_FILE, *WITHOUT_VLLM],  # they wait, mostly
    "vllm": ["-m", "vllm", "-n", "3", *BY_FILE, "tests/vllm", "tests/huggingface"],
}


class Interpreter(NamedTuple):
    """What runs a part's pytest: the command of Python, and variables of its environment."""

    command: Sequence[str] = (sys.executable,)
    environ: Mapping[str, str] = MappingProxyType({})


ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Of torch in a process of tests: several spin for each other on small tensors, beside a part's other processes."""
PARTS["fast"] += [f"tests/{name}" for name in SMALL]
WITHIN = {"fast": Interpreter(environ=ONE_THREAD), "vllm": Interpreter(environ=ONE_THREAD)}
"""Parts that are not run by this Python as it is. `make test-gpu` is none of them."""
MOST = 5
"""Maximum number of tests of a part that are rerun; if more fail, the change under test is broken."""

# -- running pytest


@dataclasses.dataclass
class Outcome:
    """What a pytest process reported: node ids of tests, and failures that are not of a test."""

    passed: list[str] = dataclasses.field(default_factory=list)
    failed: list[str] = dataclasses.field(default_factory=list)
    broken: list[str] = dataclasses.field(default_factory=list)


class PartFailed(Exception):
    """Why the run fails."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="run_tests.py", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all but fast")
    names = parser.parse_args().parts or [name for name in PARTS if name != "fast"]
    for name in names:
        if name not in PARTS:
            parser.error(f"{name!r} is none of {', '.join(PARTS)}")
    return run({name: PARTS[name] for name in names}, WITHIN)


def run(parts: dict[str, list[str]], within: Mapping[str, Interpreter] = {}) -> int:
    """Run parts (pytest's arguments, by name) one after the other; returns the exit code. within: by name of part."""
    flaky: list[str] = []
    failure = ""
    try:
        for name, arguments in parts.items():
            run_part(name, arguments, within.get(name, Interpreter()), flaky)
    except PartFailed as exc:
        failure = str(exc)
    for test in flaky:
        say(f"FLAKY: {test}")
    if failure:
        say(f"FAILED: {failure}")
    return 1 if failure else 0


def run_part(name: str, arguments: list[str], within: Interpreter, flaky: list[str]) -> None:
    """Run one part; appends flaky tests to `flaky`. Raises `PartFailed`."""
    outcome, status = run_pytest(arguments, within)
    if status == 0:
        return
    if outcome.broken or status != pytest.ExitCode.TESTS_FAILED or not outcome.failed:
        raise PartFailed("; ".join([f"{name}: pytest exited with status {status}", *outcome.broken]))
    if len(outcome.failed) > MOST:
        raise PartFailed(f"{name}: {len(outcome.failed)} tests failed; with more than {MOST}, none is run again")
    failed_twice = []
    for test in outcome.failed:
        say(f"\nThis test failed and is run again, alone: {test}")
        again, status = run_pytest([test], within)
        if status == 0 and test in again.passed:  # a skipped test has not passed
            flaky.append(test)
        else:
            failed_twice.append(test)
    if failed_twice:
        raise PartFailed(f"{name}: failed twice: {', '.join(failed_twice)}")


def run_pytest(arguments: list[str], within: Interpreter) -> tuple[Outcome, int]:
    """Run pytest in a process of its own that shares our output; returns its report and exit status."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "outcome.json")
        command = [*within.command, "-m", "pytest", "-p", "scripts.run_tests", f"--outcome={report}", *arguments]
        # Hundreds of processes import the same modules; the first one compiles them for all.
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        status = subprocess.run(command, env={**environ, **within.environ}, check=False).returncode
        if not report.exists():  # it was killed, or never began
            return Outcome(broken=["it ended without a report"]), status or 1
        return Outcome(**json.loads(report.read_text())), status


def say(line: str) -> None:
    print(line, flush=True)


# -- the plugin


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcome", metavar="FILE", help="where scripts/run_tests.py finds what passed and failed")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--outcome") and not hasattr(config, "workerinput"):  # xdist's workers report to us
        config.pluginmanager.register(Recorder(Path(config.getoption("--outcome"))))


class Recorder:
    """Writes the `Outcome` when pytest ends."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._passed: set[str] = set()
        self._failed: dict[str, None] = {}  # in the order in which they failed
        self._broken: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:  # in its call, or in what comes before and after it
            self._failed[report.nodeid] = None
        elif report.passed and report.when == "call":
            self._passed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._broken.append(f"{report.nodeid} cannot be collected")

    def pytest_internalerror(self, excrepr: object) -> None:
        self._broken.append("pytest met an error of its own")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        if error:
            self._broken.append(f"worker {node.gateway.id} crashed")

    def pytest_sessionfinish(self) -> None:
        outcome = Outcome(sorted(self._passed - set(self._failed)), list(self._failed), self._broken)
        self._file.write_text(json.dumps(dataclasses.asdict(outcome)))


if __name__ == "__main__":
    sys.exit(main())
