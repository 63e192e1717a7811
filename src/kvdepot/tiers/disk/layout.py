"""Where the disk tier's files are in its directory. No state.

    kvdepot.lock        whoever holds its lock owns the directory
    tmp/                files being written: renamed when they are complete, removed by the next server's start
    trash/              forgotten namespaces, until they are removed
    quarantine/         the last few corrupt objects, for inspection
    5a/5a..9/0c..1/e7/e7..3.0
                        objects: salt, space, key and rank, fanned out by the first two characters of salt and key

Invariant: no path leads out of the root: names are checked before they become paths, and links are not followed.
"""

# ruff: noqa: PTH208

from __future__ import annotations

import contextlib
import os
import re

__all__ = ["LEVELS", "LOCK", "QUARANTINE", "TMP", "TRASH", "is_ours", "path_of", "spaces_in"]

LOCK, TMP, TRASH, QUARANTINE = "kvdepot.lock", "tmp", "trash", "quarantine"
LEVELS = [re.compile(f"[0-9a-f]{{{length}}}") for length in (2, 32, 32)] + [re.compile(r"[0-9a-f][0-9a-f.]")]
"""Names of the directories above an object, from the root."""


def is_ours(name: str) -> bool:
    """Whether a disk tier's root may have an entry of this name."""
    return name in {LOCK, TMP, TRASH, QUARANTINE, "lost+found"} or LEVELS[0].fullmatch(name) is not None


def path_of(root: str, name: str) -> str:
    """The path of an object. `name` must match kvdepot.tiers.NAME."""
    salt, space, rest = name.split("/")
    return f"{root}/{salt[:2]}/{salt}/{space}/{rest[:2]}/{rest}"


def spaces_in(root: str, salt: str, space: str) -> list[tuple[str, str]]:
    """`salt/space` and its directory, of all whose parts begin with `salt` and `space`."""
    found = []
    for top in _list(root, LEVELS[0], salt[:2]):
        for one in _list(f"{root}/{top}", LEVELS[1], salt):
            for two in _list(f"{root}/{top}/{one}", LEVELS[2], space):
                found.append((f"{one}/{two}", f"{root}/{top}/{one}/{two}"))
    return found


def _list(path: str, pattern: re.Pattern[str], prefix: str) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return [name for name in os.listdir(path) if pattern.fullmatch(name) and name.startswith(prefix)]
    return []
