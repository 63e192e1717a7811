"""Where the disk tier's files lie, and what is done with files whoever they belong to. No state; folder.py's.

    ROOT/5a/5a..9/0c..1/e7/e7..3.0    salt, space, key and rank, fanned out by the first two characters of salt and key

The one law: nothing leads out of the root: names are checked, links are not followed. Paths are strings here, for a
Path costs more than most of the system calls.
"""

# ruff: noqa: PTH102, PTH106, PTH108, PTH208

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvdepot.errors import ConfigError
from kvdepot.tiers import NAME

__all__ = [
    "LOCK", "QUARANTINE", "TMP", "TRASH", "create", "device_of", "is_ours", "make_parents", "make_private", "move",
    "objects_in", "place_of", "prune", "remove", "spaces_in",
]  # fmt: skip

log = logging.getLogger(__name__)

LOCK, TMP, TRASH, QUARANTINE = "kvdepot.lock", "tmp", "trash", "quarantine"
_LEVELS = [re.compile(f"[0-9a-f]{{{length}}}") for length in (2, 32, 32)] + [re.compile(r"[0-9a-f][0-9a-f.]")]
_OTHERS = 0o077
_MOST_PIECES = os.sysconf("SC_IOV_MAX")


def make_private(place: Path) -> None:
    """Make the directory where there is none, and make sure that it is this user's alone.

    A directory of ours that others may enter is given mode 0700, and the log says so. Raises ConfigError where it holds
    what is not ours, where another user owns it or a link to it, or could put another in its place; OSError where it
    cannot be had.
    """
    for part in reversed([part for part in place.parents if not part.exists()]):
        part.mkdir(mode=0o755)  # whatever the umask allows
    place.mkdir(mode=0o700, exist_ok=True)
    if others := [name for name in os.listdir(place) if not is_ours(name)]:
        raise ConfigError(f"{place} holds {others[0]!r}: the disk tier needs a directory of its own")
    real = Path(os.path.realpath(place))
    for part in (place, *place.parents):
        if part.is_symlink() and part.lstat().st_uid not in (0, os.geteuid()):
            raise ConfigError(f"{part} is a link of user {part.lstat().st_uid}: give the directory itself, {real}")
    for parent in sorted({*place.parents, *(real.parents if real.exists() else ())}):
        _check_parent(place, parent)
    info = place.stat()
    if info.st_uid != os.geteuid():
        raise ConfigError(
            f"{place} belongs to user {info.st_uid}: the disk tier needs a directory of its own user ({os.geteuid()}); "
            f"use one below it, {place}/kvdepot, or chown it"
        )
    mode = stat.S_IMODE(info.st_mode)
    if mode & _OTHERS:
        place.chmod(0o700)
        if stat.S_IMODE(place.stat().st_mode) & _OTHERS:
            raise ConfigError(f"{place} has mode {mode:04o}, and its file system does not allow changing it to 0700")
        log.warning("%s had mode %04o; changed it to 0700 and removed what other users put there", place, mode)
    for name in (LOCK, QUARANTINE):
        with contextlib.suppress(FileNotFoundError):
            if _is_foreign(f"{place}/{name}", os.lstat(f"{place}/{name}")):
                remove(f"{place}/{name}")


def _check_parent(place: Path, parent: Path) -> None:
    """Whoever can write to a parent directory can put another directory in the place of ours."""
    info = parent.stat()
    if info.st_mode & stat.S_ISVTX and info.st_uid in (0, os.geteuid()):
        return  # only its owner can
    if info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX:
        if not parent.is_mount():
            raise ConfigError(
                f"{place}: every user can write to {parent} and could replace it; use another directory, or "
                f"chmod o-w {parent}"
            )
        # Kubernetes mounts a pod's volumes like this, and who is no root there cannot change it.
        log.warning("%s: every user can write to the volume %s, and could replace it", place, parent)
    elif info.st_mode & stat.S_IWGRP and info.st_gid not in (0, os.getegid()):
        log.warning("%s: group %d can write to %s, and could replace it", place, info.st_gid, parent)
    elif info.st_uid not in (0, os.geteuid()):
        log.warning("%s: user %d owns %s, and could replace it", place, info.st_uid, parent)


def _is_foreign(path: str, info: os.stat_result) -> bool:
    """Whether another user has put it there or may change it still; a directory of ours is closed instead."""
    if info.st_uid != os.geteuid():
        log.warning("removed %s: it belongs to user %d", path, info.st_uid)
        return True
    if stat.S_ISDIR(info.st_mode) and info.st_mode & _OTHERS:
        Path(path).chmod(0o700)
    return False


def is_ours(name: str) -> bool:
    """Whether something of this name may lie in the root, with us or before us."""
    return name in {LOCK, TMP, TRASH, QUARANTINE, "lost+found"} or _LEVELS[0].fullmatch(name) is not None


def place_of(root: str, name: str) -> str:
    """The path of an object. `name` must be one (kvdepot.tiers.NAME)."""
    salt, space, rest = name.split("/")
    return f"{root}/{salt[:2]}/{salt}/{space}/{rest[:2]}/{rest}"


def objects_in(path: str, level: int = 0) -> Iterator[list[tuple[str, os.stat_result]]]:
    """Names and facts of all objects under a root, a directory at a time.

    Removes links, files without a byte, and what belongs to another user.
    """
    with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
        if level == len(_LEVELS):
            yield _objects(path, entries)
            return
        for entry in entries:
            if not _LEVELS[level].fullmatch(entry.name):
                continue
            if entry.is_symlink():  # or what we write would go who knows where
                log.warning("removed %s: it is a symbolic link", entry.path)
                os.unlink(entry.path)
            elif _is_foreign(entry.path, entry.stat(follow_symlinks=False)):
                remove(entry.path)
            elif entry.is_dir(follow_symlinks=False):
                yield from objects_in(entry.path, level + 1)


def _objects(path: str, files: Iterator[os.DirEntry[str]]) -> list[tuple[str, os.stat_result]]:
    top, salt, space, fan = path.split("/")[-4:]
    found = []
    for file in files:
        name = f"{salt}/{space}/{file.name}"
        if salt[:2] != top or file.name[:2] != fan or not NAME.fullmatch(name):
            continue
        info = file.stat(follow_symlinks=False)
        if _is_foreign(file.path, info):  # whose header may be whatever its owner wants
            remove(file.path)
        elif stat.S_ISREG(info.st_mode) and info.st_size:
            found.append((name, info))
        elif not stat.S_ISDIR(info.st_mode):
            os.unlink(file.path)  # a link, or what a power cut has left of a file
    return found


def spaces_in(root: str, salt: str, space: str) -> list[tuple[str, str]]:
    """`salt/space`, and its directory, of all that begin so."""
    found = []
    for top in _list(root, _LEVELS[0], salt[:2]):
        for one in _list(f"{root}/{top}", _LEVELS[1], salt):
            for two in _list(f"{root}/{top}/{one}", _LEVELS[2], space):
                found.append((f"{one}/{two}", f"{root}/{top}/{one}/{two}"))
    return found


def _list(path: str, pattern: re.Pattern[str], prefix: str) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return [name for name in os.listdir(path) if pattern.fullmatch(name) and name.startswith(prefix)]
    return []


def create(path: str) -> int:
    """A new file, open for writing. Raises FileExistsError rather than touch what is there."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def make_parents(root: str, path: str) -> None:
    """The directories between root and `path`. Others may be removing them: see what comes of it."""
    place = root
    for part in path[len(root) + 1 :].split("/")[:-1]:
        place = f"{place}/{part}"
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            os.mkdir(place, 0o700)


def prune(root: str, path: str) -> None:
    """Remove the directories between `path` and root that are empty."""
    with contextlib.suppress(OSError):
        while (path := path.rpartition("/")[0]) != root:
            os.rmdir(path)


def remove(path: str) -> None:
    """A file, or a directory with all that is in it."""
    try:
        os.unlink(path)
    except IsADirectoryError:
        shutil.rmtree(path)


def move(call: Callable[[int, Sequence[memoryview], int], int], fd: int, buffers: Sequence[memoryview]) -> int:
    """preadv or pwritev from the file's start, until the buffers or the file end; how many bytes."""
    rest = list(buffers)
    done = 0
    while rest and (count := call(fd, rest[:_MOST_PIECES], done)):
        done += count
        full = 0
        while full < len(rest) and count >= len(rest[full]):
            count -= len(rest[full])
            full += 1
        del rest[:full]
        if count:
            rest[0] = rest[0][count:]
    return done


def device_of(path: Path) -> int:
    """The file system that a path is on, or would be."""
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):
            return place.stat().st_dev
    return -1
