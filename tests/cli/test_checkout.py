"""Commands that belong to a checkout: `bench` and `demo`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvdepot
from kvdepot import cli
from tests.cli.command import run
from tests.conftest import HANG_S
from tests.tiers.servers import need


@pytest.mark.parametrize("command", ["bench", "demo"])
def test_outside_a_checkout_bench_and_demo_say_where_they_are(command: str, tmp_path: Path) -> None:
    package = tmp_path / "site" / "kvdepot"
    shutil.copytree(Path(kvdepot.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-m", "kvdepot.cli", command], cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S,
        env={**os.environ, "PYTHONPATH": str(package.parent)}, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"kvdepot: .*in a checkout.*\n", done.stderr)


@pytest.mark.faults
def test_bench_runs_the_benchmark_of_the_checkout_and_prints_its_figures_as_json() -> None:
    done = run("bench", "--tiny", "--only", "policies", "--json")
    assert done.returncode == 0, done.stderr
    assert "numbers mean nothing" in done.stderr
    assert json.loads(done.stdout)


def test_bench_refuses_a_family_of_figures_that_there_is_not() -> None:
    done = run("bench", "--only", "nonsense")
    assert done.returncode == 2
    assert "'nonsense'" in done.stderr


@pytest.mark.faults
def test_the_demo_says_before_it_begins_that_the_server_it_is_to_use_is_not_there(tmp_path: Path) -> None:
    need(modules=["vllm", "torch", "safetensors"])
    done = run("demo", "--url", f"ipc://{tmp_path}/x", "--lengths", "2065", "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search(r"^kvdepot: no kvdepot server answers at .*`kvdepot serve`", done.stderr, re.MULTILINE)
    assert "Traceback" not in done.stderr and "engine A" not in done.stderr


def test_a_demo_of_two_depots_takes_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--cluster", "--url"]) == 2
    assert "--url" in capsys.readouterr().err


def test_a_demo_of_two_depots_has_one_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--cluster", "--model", "windows"]) == 2
    assert "--model" in capsys.readouterr().err
