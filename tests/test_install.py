"""Advice on installing: it names packages or where kvdepot came from, and never `kvdepot` from a registry."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvdepot.install import advice, requirements

ROOT = Path(__file__).parents[1]
_DECLARED = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
EXTRAS = re.findall(r"^(\w+) = \[", _DECLARED.partition("[project.scripts]")[0], re.M)
PLACES = ["src", "docs", "deploy", "demo", "bench", "tools", "scripts", "README.md", "SECURITY.md", "ARCHITECTURE.md",
          "CONTRIBUTING.md", "CHANGELOG.md", "Makefile"]  # fmt: skip
KINDS = {".py", ".md", ".js", ".html", ".sh", ".yaml", ".yml", ".toml", ".service", ".txt", ""}


PIP = [sys.executable, "-m", "pip", "install"]


@pytest.mark.parametrize("extra", ["", *EXTRAS])
def test_the_packages_of_every_extra_are_named_with_their_versions(extra: str) -> None:
    needed = requirements(extra)
    assert needed and not any(package.startswith("kvdepot") for package in needed)
    told = shlex.split(advice(extra))
    assert told == [*PIP, *needed]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"url": "file:///home/me/depot", "dir_info": {"editable": True}}, "again, from file:///home/me/depot\n"),
        (None, "again, from the source tree, index or file that it came from\n"),
    ],
)
def test_an_undeclared_extra_is_installed_from_where_kvdepot_came_from(
    record: dict[str, Any] | None, said: str, tmp_path: Path
) -> None:
    folder = tmp_path / "kvdepot-9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: kvdepot\nVersion: 9\nRequires-Dist: click\n")
    if record is not None:
        (folder / "direct_url.json").write_text(json.dumps(record))
    done = subprocess.run(
        [sys.executable, "-c", "from kvdepot.install import advice; print(advice('new'))"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == f"install kvdepot[new] {said}"


def test_nothing_tells_anybody_to_install_kvdepot_from_a_registry() -> None:
    found = []
    for place in PLACES:
        path = ROOT / place
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.is_file() and file.suffix in KINDS and "vendor" not in file.parts and file.name != "install.py":
                text = file.read_text(errors="replace")
                found += [f"{file.relative_to(ROOT)}: {line}" for line in re.findall(r".*kvdepot\[.*", text)]
                found += [f"{file.relative_to(ROOT)}: {line}" for line in re.findall(r".*pip install kvdepot.*", text)]
    assert found == []
