"""Commands that install the packages of kvdepot's extras; for errors, the log, and `kvdepot doctor`.

They name the packages themselves. `pip install 'kvdepot[web]'` would ask the package registry for `kvdepot`, a name
that this project has not published: today that fails, and it could run the code of anybody who registers the name.
"""

from __future__ import annotations

import re
import shlex

__all__ = ["advice", "requirements"]


def advice(extra: str) -> str:
    """The command that installs the missing packages of an extra; all of them if none is missing."""
    needed = requirements(extra)
    if not needed:  # kvdepot runs from a source tree, and is not installed
        return f"pip install '.[{extra}]' in kvdepot's source tree"
    missing = [each for each in needed if not _is_installed(each)] or needed
    return f"pip install {shlex.join(missing)}"


def requirements(extra: str) -> list[str]:
    """Packages of an extra with versions, as the installed kvdepot declares them; empty if it is not installed."""
    from importlib import metadata  # slow to import, and rarely needed

    try:
        declared = metadata.requires("kvdepot") or []
    except metadata.PackageNotFoundError:
        return []
    needed = []
    for line in declared:
        package, _, marker = line.partition(";")
        if re.search(rf"""extra\s*==\s*['"]{re.escape(extra)}['"]""", marker):
            needed.append(package.strip())
    return needed


def _is_installed(requirement: str) -> bool:
    from importlib import metadata

    name = re.match(r"[\w.-]+", requirement)
    assert name, f"{requirement!r} names no package"
    try:
        metadata.version(name[0])
    except metadata.PackageNotFoundError:
        return False
    return True
