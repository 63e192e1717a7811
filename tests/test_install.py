"""Advice on installing: it names packages, and never `kvdepot` from a registry."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvdepot.install import advice, requirements

ROOT = Path(__file__).parents[1]
_DECLARED = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
EXTRAS = re.findall(r"^(\w+) = \[", _DECLARED.partition("[project.scripts]")[0], re.M)
PLACES = ["src", "docs", "deploy", "demo", "bench", "tools", "scripts", "README.md", "SECURITY.md", "ARCHITECTURE.md",
          "CONTRIBUTING.md", "CHANGELOG.md", "Makefile"]  # fmt: skip
KINDS = {".py", ".md", ".js", ".html", ".sh", ".yaml", ".yml", ".toml", ".service", ".txt", ""}


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_packages_of_every_extra_are_named_with_their_versions(extra: str) -> None:
    needed = requirements(extra)
    assert needed and not any(package.startswith("kvdepot") for package in needed)
    told = advice(extra)
    assert told.startswith("pip install ") and "kvdepot" not in told
    assert any(package in told for package in needed)


def test_what_is_installed_already_is_not_named() -> None:
    assert "cuda-bindings" in str(requirements("cuda"))
    program = (
        "import importlib.metadata as metadata; from kvdepot.install import advice; there = metadata.version\n"
        "def version(name):\n"
        "    if name == 'uvicorn': raise metadata.PackageNotFoundError(name)\n"
        "    return '1.0'\n"
        "metadata.version = version; print(advice('web'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"pip install 'uvicorn[<>=.,\d]+'\n", done.stdout)


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
