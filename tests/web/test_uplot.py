"""How uPlot gets into the package: by the build hook, and only if it is the one that was pinned."""

from __future__ import annotations

import importlib.util
import io
import os
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from .site import VENDOR

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hook() -> ModuleType:
    """The build hook's module, which lies outside of the package."""
    if not os.environ.get("CI"):
        pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(hook: ModuleType, root: Path) -> list[str]:
    """What the hook has packed although git ignores it."""
    from hatchling.bridge.app import Application

    data: dict[str, Any] = {"artifacts": []}
    made = hook.CustomBuildHook(str(root), {}, None, None, str(root), "wheel", Application())
    made.initialize("editable", data)
    artifacts: list[str] = data["artifacts"]
    return artifacts


def no_npm(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no npm, and nobody says that charts are required."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("KVDEPOT_CHARTS", raising=False)


def test_without_npm_the_install_goes_on_and_says_what_will_be_missing(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    no_npm(monkeypatch)
    build(hook, tmp_path)
    assert "the web page will have no charts" in "".join(capfd.readouterr())
    assert not (tmp_path / hook._FOLDER).exists()


def test_where_charts_are_required_an_install_without_npm_fails(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_npm(monkeypatch)
    monkeypatch.setenv("KVDEPOT_CHARTS", "required")
    with pytest.raises(OSError, match="KVDEPOT_CHARTS=required"):
        build(hook, tmp_path)


def test_a_package_that_is_not_the_pinned_one_is_not_unpacked(hook: ModuleType, tmp_path: Path) -> None:
    other = io.BytesIO()
    with tarfile.open(fileobj=other, mode="w:gz") as files:
        for name in hook._FILES:
            files.addfile(tarfile.TarInfo(name))
    with pytest.raises(ValueError, match="should have sha512-"):
        hook.unpack(other.getvalue(), tmp_path / "vendor")
    assert not (tmp_path / "vendor").exists()


def test_what_is_there_is_not_fetched_again_and_is_packed(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    no_npm(monkeypatch)
    folder = tmp_path / hook._FOLDER
    folder.mkdir(parents=True)
    (folder / "INTEGRITY").write_text(hook._INTEGRITY)
    assert build(hook, tmp_path) == [f"/{hook._FOLDER}/*"]
    assert "".join(capfd.readouterr()) == ""


def test_what_was_fetched_is_the_pinned_version_with_its_license(hook: ModuleType) -> None:
    if not (VENDOR / "INTEGRITY").is_file():
        (pytest.fail if os.environ.get("CI") else pytest.skip)("uPlot has not been fetched: no network at install?")
    assert (VENDOR / "INTEGRITY").read_text().strip() == hook._INTEGRITY
    assert f"(v{hook._VERSION})" in (VENDOR / "uPlot.esm.js").read_text()[:400]
    assert "Leon Sorokin" in (VENDOR / "LICENSE").read_text()


def test_git_ignores_what_was_fetched() -> None:
    assert f"{VENDOR.relative_to(ROOT)}/" in (ROOT / ".gitignore").read_text().splitlines()
