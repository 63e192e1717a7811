"""Where the disk tier's files are in its directory, and system calls on them. No state.

    kvdepot.lock        the holder of its lock owns the directory
    tmp/                files being written: renamed when they are complete, removed by the next server's start
    trash/              forgotten namespaces, until they are removed
    quarantine/         the last few corrupt objects, for inspection
    5a/5a..9/0c..1/e7/e7..3.0
                        objects: salt, space, key and rank, fanned out by the first two characters of salt and key

Invariant: no path leads out of the root: names are checked before they become paths, and links are not followed.

Paths are strings: a Path costs more than most of these system calls.
"""

# ruff: noqa: PTH102, PTH106, PTH108, PTH208

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = [
    "LEVELS", "LOCK", "OTHERS", "QUARANTINE", "TMP", "TRASH", "create", "is_foreign", "is_ours", "make_parents",
    "path_of", "prune", "remove", "spaces_in", "transfer",
]  # fmt: skip

log = logging.getLogger(__name__)

LOCK, TMP, TRASH, QUARANTINE = "kvdepot.lock", "tmp", "trash", "quarantine"
LEVELS = [re.compile(f"[0-9a-f]{{{length}}}") for length in (2, 32, 32)] + [re.compile(r"[0-9a-f][0-9a-f.]")]
"""Names of the directories above an object, from the root."""
OTHERS = 0o077
"""Permissions of all users but the owner."""
_MOST_BUFFERS = os.sysconf("SC_IOV_MAX")


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


# -- system calls


def create(path: str) -> int:
    """A new file, open for writing. Raises FileExistsError if there is one already."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def make_parents(root: str, path: str) -> None:
    """Make the directories between root and `path`. If others remove them meanwhile, some may be missing."""
    place = root
    for part in path[len(root) + 1 :].split("/")[:-1]:
        place = f"{place}/{part}"
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            os.mkdir(place, 0o700)


def prune(root: str, path: str) -> None:
    """Remove the empty directories between `path` and root."""
    with contextlib.suppress(OSError):
        while (path := path.rpartition("/")[0]) != root:
            os.rmdir(path)


def remove(path: str) -> None:
    """Remove a file, or a directory with all its contents."""
    try:
        os.unlink(path)
    except IsADirectoryError:
        shutil.rmtree(path)


def is_foreign(path: str, info: os.stat_result) -> bool:
    """Whether another user owns this file or directory. A directory of our own is closed to other users."""
    if info.st_uid != os.geteuid():
        log.warning("removed %s: it belongs to user %d", path, info.st_uid)
        return True
    if stat.S_ISDIR(info.st_mode) and info.st_mode & OTHERS:
        Path(path).chmod(0o700)
    return False


def transfer(call: Callable[[int, Sequence[memoryview], int], int], fd: int, buffers: Sequence[memoryview]) -> int:
    """preadv or pwritev from the file's start, until the buffers or the file end; bytes transferred."""
    rest = list(buffers)
    done = 0
    while rest and (count := call(fd, rest[:_MOST_BUFFERS], done)):
        done += count
        full = 0
        while full < len(rest) and count >= len(rest[full]):
            count -= len(rest[full])
            full += 1
        del rest[:full]
        if count:
            rest[0] = rest[0][count:]
    return done
