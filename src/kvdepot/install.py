"""Commands that install packages which kvdepot lacks; for errors, the log, and `kvdepot doctor`.

They name the packages themselves, or the place that this kvdepot came from, and never `kvdepot` alone: pip would ask
the package registry for that name, which this project has not published. Today that fails; it could run the code of
anybody who registers the name.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

__all__ = ["advice", "again", "requirements"]

_PIP = shlex.join([sys.executable, "-m", "pip", "install"])
"""The pip of this interpreter: a `pip` on the path may be another environment's."""


def advice(extra: str = "") -> str:
    """The command that installs the missing packages of an extra; all of them if none is missing.

    Without an extra: the packages that kvdepot itself needs.
    """
    needed = requirements(extra)
    if not needed:  # not installed (a source tree), or installed before the extra was declared
        return again(extra)
    missing = [each for each in needed if not _is_installed(each)] or needed
    return f"{_PIP} {shlex.join(missing)}"


def again(extra: str = "") -> str:
    """The command that installs this kvdepot again, in this environment, from where it came: a source tree, a wheel, a
    repository. If it came from a package index, it is for the reader to know which."""
    extras = f"[{extra}]" if extra else ""
    record = _direct_url()
    if record is None:
        tree = Path(__file__).resolve().parents[2]
        if (tree / "pyproject.toml").is_file():
            return f"{_PIP} {shlex.quote(f'{tree}{extras}')}"
        return f"install kvdepot{extras} again from the index or file that it came from"
    url, folder, vcs = record["url"], record.get("dir_info"), record.get("vcs_info")
    if vcs is not None:
        place = f"kvdepot{extras} @ {vcs['vcs']}+{url}@{vcs['commit_id']}"
    elif url.startswith("file:"):
        place = unquote(urlsplit(url).path) + extras
    else:
        place = f"kvdepot{extras} @ {url}"
    options = "--editable " if folder and folder.get("editable") else ""
    return f"{_PIP} {options}{shlex.quote(place)}"


def requirements(extra: str = "") -> list[str]:
    """Packages of an extra, or of kvdepot itself, with versions, as the installed kvdepot declares them.

    Empty if it is not installed.
    """
    from importlib import metadata  # slow to import, and rarely needed

    try:
        declared = metadata.requires("kvdepot") or []
    except metadata.PackageNotFoundError:
        return []
    needed = []
    for line in declared:
        package, _, marker = line.partition(";")
        found = re.search(r"""extra\s*==\s*['"](.+?)['"]""", marker)
        if (found[1] if found else marker) == extra:  # other markers are of older Pythons, where pip has heeded them
            needed.append(package.strip())
    return needed


def _direct_url() -> dict[str, Any] | None:
    """Where the installed kvdepot came from (direct_url.json of the packaging specifications).

    None if it is not installed, or came from an index.
    """
    from importlib import metadata

    try:
        text = metadata.distribution("kvdepot").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    found: dict[str, Any] | None = json.loads(text) if text else None
    return found


def _is_installed(requirement: str) -> bool:
    from importlib import metadata

    name = re.match(r"[\w.-]+", requirement)
    assert name, f"{requirement!r} names no package"
    try:
        metadata.version(name[0])
    except metadata.PackageNotFoundError:
        return False
    return True
