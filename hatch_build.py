"""Brings uPlot, which draws the web page's charts, from the npm registry into the package. Called by hatchling.

Runs before a wheel, an editable install or an sdist is made, and fetches nothing where the pinned version lies already
(in an sdist, say). The one law: what does not have the pinned hash is not unpacked. Without npm or network the install
goes on: the page says that its charts are missing. With KVDEPOT_CHARTS=required it fails.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_VERSION = "1.6.32"
_INTEGRITY = "sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw=="
_FILES = ("package/dist/uPlot.esm.js", "package/dist/uPlot.min.css", "package/LICENSE")
_FOLDER = "src/kvdepot/web/page/vendor"
_TIMEOUT_S = 30


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """hatchling looks for this name."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Fetch what is missing, and have it packed although git ignores it.

        Raises ConnectionError where it cannot be had and KVDEPOT_CHARTS=required asks for it.
        """
        folder = Path(self.root, _FOLDER)
        build_data["artifacts"].append(f"/{_FOLDER}/*")
        marker = folder / "INTEGRITY"
        if marker.is_file() and marker.read_text().strip() == _INTEGRITY:
            return
        try:
            unpack(fetch(), folder)
        except (OSError, subprocess.SubprocessError) as exc:
            told = f"the web page will have no charts: uplot {_VERSION} cannot be had ({exc})"
            if os.environ.get("KVDEPOT_CHARTS") == "required":
                raise ConnectionError(f"{told}, and KVDEPOT_CHARTS=required asks for it") from exc
            self.app.display_warning(f"{told}; install again with npm and network")  # which pip shows with -v alone


def fetch() -> bytes:
    """The pinned package, by npm (which knows its user's mirror and proxies). Raises OSError without npm or network."""
    npm = shutil.which("npm")
    if npm is None:
        raise OSError("npm is not installed")
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", "--silent", f"uplot@{_VERSION}"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=_TIMEOUT_S)
        return next(Path(folder).glob("*.tgz")).read_bytes()


def unpack(package: bytes, folder: Path) -> None:
    """Leave the files that the page loads, and the license, in `folder`.

    Raises ValueError when the package is not the pinned one: then somebody should look, and nothing is built.
    """
    found = "sha512-" + base64.b64encode(hashlib.sha512(package).digest()).decode()
    if found != _INTEGRITY:
        raise ValueError(f"uplot {_VERSION} should have {_INTEGRITY}, and has {found}")
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(package)) as files:
        for name in _FILES:
            member = files.extractfile(name)
            assert member is not None, f"{name} is no file"
            (folder / Path(name).name).write_bytes(member.read())
    (folder / "INTEGRITY").write_text(_INTEGRITY + "\n")  # last: whoever sees it may rely on the rest
