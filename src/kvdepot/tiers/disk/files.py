"""System calls on files and directories, wherever they are and whoever owns them. No state.

Paths are strings: a Path costs more than most of these system calls.
"""

# ruff: noqa: PTH102, PTH106, PTH108

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["OTHERS", "create", "is_foreign", "make_parents", "prune", "remove", "transfer"]

log = logging.getLogger(__name__)

OTHERS = 0o077
"""Permissions of all users but the owner."""
_MOST_BUFFERS = os.sysconf("SC_IOV_MAX")


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
