"""Commands that install packages which kvdepot lacks; for errors, the log, and `kvdepot doctor`. They never name
`kvdepot` alone: this project has not published it, and pip could run the code of anybody who registers that name."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import sys

_PIP = shlex.join([sys.executable, "-m", "pip", "install"])
"""The pip of this interpreter: a `pip` on the path may be another environment's."""


def advice(extra: str = "") -> str:
    """The command that installs the packages of an extra, or those that kvdepot itself needs."""
    needed = requirements(extra)
    if not needed:  # not installed (a source tree), or installed before the extra was declared
        return again(extra)
    return f"{_PIP} {shlex.join(needed)}"


def again(extra: str = "") -> str:
    """Advice to install this kvdepot again: from where it came, if that is recorded."""
    from importlib import metadata  # slow to import, and rarely needed

    record = None
    with contextlib.suppress(metadata.PackageNotFoundError):
        record = metadata.distribution("kvdepot").read_text("direct_url.json")  # of the packaging specifications
    place = json.loads(record)["url"] if record else "the source tree, index or file that it came from"
    return f"install kvdepot{f'[{extra}]' if extra else ''} again, from {place}"


def requirements(extra: str = "") -> list[str]:
    """Packages of an extra, or of kvdepot itself, with versions, as it declares them; empty if it is not installed."""
    from importlib import metadata

    try:
        declared = metadata.requires("kvdepot") or []
    except metadata.PackageNotFoundError:
        return []
    # Other markers are of older Pythons, where pip has heeded them.
    lines = (re.sub(r""";.*extra\s*==\s*['"](.+?)['"].*""", r";\1", line).partition(";") for line in declared)
    return [package.strip() for package, _, name in lines if name == extra]
