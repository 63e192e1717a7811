"""Commands that install packages which kvdepot lacks; for errors, the log, and `kvdepot doctor`.

They name the packages themselves, or the place that this kvdepot came from, and never `kvdepot` alone: pip would ask
the package registry for that name, which this project has not published. Today that fails; it could run the code of
anybody who registers the name.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import sys
from pathlib import Path
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
    return f"{_PIP} {shlex.join([each for each in needed if not _is_installed(each)] or needed)}"


def again(extra: str = "") -> str:
    """The command that installs this kvdepot again, in this environment, from where it came: a source tree, a wheel, a
    repository. If it came from a package index, it is for the reader to know which."""
    from importlib import metadata  # slow to import, and rarely needed

    extras, text = f"[{extra}]" if extra else "", None
    with contextlib.suppress(metadata.PackageNotFoundError):
        text = metadata.distribution("kvdepot").read_text("direct_url.json")  # of the packaging specifications
    if not text:
        tree = Path(__file__).resolve().parents[2]
        if (tree / "pyproject.toml").is_file():
            return f"{_PIP} {shlex.quote(f'{tree}{extras}')}"
        return f"install kvdepot{extras} again from the index or file that it came from"
    record = json.loads(text)
    url, vcs = record["url"], record.get("vcs_info")
    if vcs is not None:
        place = f"kvdepot{extras} @ {vcs['vcs']}+{url}@{vcs['commit_id']}"
    else:
        is_here = url.startswith("file:")
        place = unquote(urlsplit(url).path) + extras if is_here else f"kvdepot{extras} @ {url}"
    options = "--editable " if record.get("dir_info", {}).get("editable") else ""
    return f"{_PIP} {options}{shlex.quote(place)}"


def requirements(extra: str = "") -> list[str]:
    """Packages of an extra, or of kvdepot itself, with versions, as the installed kvdepot declares them.

    Empty if it is not installed.
    """
    from importlib import metadata

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


def _is_installed(requirement: str) -> bool:
    from importlib import metadata

    try:
        metadata.version(re.split(r"[^\w.-]", requirement)[0])
    except metadata.PackageNotFoundError:
        return False
    return True
