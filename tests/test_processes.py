"""Processes that kvdepot starts run no file of the folder in which the user is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvdepot import processes
from tests.conftest import HANG_S

PACKAGE = Path(processes.__file__).parent
BAITS = ("click", "msgspec", "zmq", "numpy", "runpy", "json", "pickle", "multiprocessing", "kvdepot")
"""Modules that our processes import early."""


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A folder of files that Python may take for modules; each notes that it was run."""
    folder = tmp_path / "trap"
    folder.mkdir()
    for name in BAITS:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'a').write({name!r})\n")
    return folder


def run_in(folder: Path, command: list[str]) -> str:
    """The standard output of a command in a folder that is a trap."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=HANG_S, check=False)
    sprung = folder.with_name("sprung")
    assert not sprung.exists(), f"{sprung.read_text()} of the working directory was run"
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("has_safe_path", [True, False])
def test_code_and_modules_import_nothing_from_the_working_directory(
    trap: Path, monkeypatch: pytest.MonkeyPatch, has_safe_path: bool
) -> None:
    """False is how Python 3.10 does it, which works in all of them."""
    if has_safe_path and sys.version_info < (3, 11):
        pytest.skip("Python 3.10 has no -P")
    monkeypatch.setattr(processes, "_HAS_SAFE_PATH", has_safe_path)
    code = "import json, sys, click, kvdepot; print(json.dumps(sys.argv[1:]))"
    assert run_in(trap, processes.code_command(code, "-x", "a b")) == '["-x", "a b"]\n'
    assert run_in(trap, processes.module_command("kvdepot.cli", "--version")).startswith("kvdepot ")


def test_every_start_of_python_keeps_the_working_directory_off_the_import_path() -> None:
    """Others name the interpreter for people, start a script, or isolate it (-I)."""
    others = {"install.py", "client/launch.py"}
    users = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if "sys.executable" in path.read_text()}
    assert users - others == {"processes.py"}
    assert (PACKAGE / "client/launch.py").read_text().count("sys.executable") == 1
