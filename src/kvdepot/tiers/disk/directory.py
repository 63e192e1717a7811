"""A disk tier's directory: its files, its permissions, its lock, and the calls that use it. Any thread.

    kvdepot.lock        the holder of its lock owns the directory
    tmp/                files being written: renamed when they are complete, removed by the next server's start
    trash/              forgotten namespaces, until they are removed
    5a/5a..9/0c..1/e7/e7..3.0
                        objects: salt, space, key and rank, fanned out by the first two characters of salt and key

Invariant: no path leads out of the root: names are checked before they become paths, and links are not followed. Paths
are strings: a Path costs more than most of these system calls.
"""

# ruff: noqa: PTH102, PTH106, PTH108, PTH116, PTH208

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from kvdepot import locks
from kvdepot.errors import ConfigError, TierError
from kvdepot.logs import Sparing
from kvdepot.tiers import NAME, Tally

log = logging.getLogger(__name__)
sparing_log = Sparing(log)

_T = TypeVar("_T")

LOCK, TMP, TRASH = "kvdepot.lock", "tmp", "trash"
_LEVELS = [re.compile(f"[0-9a-f]{{{length}}}") for length in (2, 32, 32)] + [re.compile(r"[0-9a-f][0-9a-f.]")]
"""Names of the directories above an object, from the root."""
_OTHERS = 0o077
_MOST_BUFFERS = os.sysconf("SC_IOV_MAX")


class Directory:
    """One locked directory. Its use ends for good when the directory is gone or is closed."""

    def __init__(self, path: Path, tally: Tally) -> None:
        """Raises TierError if the directory is not accessible, ConfigError if it is in use or another user's."""
        self.root = str(path)
        self.ended: str | None = None
        """Why calls are refused; None: they are not."""
        self.tally = tally
        self._idle = threading.Condition()
        self._calls = 0
        self._fd: int | None = None
        try:
            _make_private(path)
            self.block_bytes = os.statvfs(path).f_frsize
            self._fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            is_free = locks.lock(self._fd)
        except OSError as exc:
            self.release()
            raise TierError(f"{path} cannot be used: {exc.strerror}") from exc
        if not is_free:
            self.release()
            raise ConfigError(f"{path} is in use by another kvdepot server")

    def is_here(self) -> bool:
        try:
            there = os.stat(f"{self.root}/{LOCK}", follow_symlinks=False)
            return self._fd is not None and os.path.samestat(there, os.fstat(self._fd))
        except OSError:
            return False

    def free_bytes(self) -> int | None:
        """Bytes that the file system has free for us; None: it does not tell."""
        try:
            room = os.statvfs(self.root)
        except OSError:
            return None
        return room.f_bavail * room.f_frsize

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Keep the directory locked during a call that uses it. Raises TierError if the directory's use has ended."""
        with self._idle:
            self.check()
            self._calls += 1
        try:
            yield
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()

    def check(self) -> None:
        if self.ended is not None:
            raise TierError(f"{self.root}: {self.ended}")

    def check_here(self) -> None:
        """If the directory is not there any more, end its use and raise TierError."""
        if not self.is_here():
            self.end("the directory is gone")
            self.check()

    def failed(self, what: str, exc: OSError) -> None:
        """Count and log a failed system call. Raises TierError if the directory is gone."""
        self.tally("errors")
        sparing_log.info("%s: %s: %s", self.root, what, exc.strerror)
        self.check_here()

    def with_parents(self, path: str, act: Callable[[], _T]) -> _T:
        """Call `act`, which creates `path`; make its parent directories as often as others remove them. Raises
        OSError."""
        for _ in range(16):
            try:
                return act()
            except FileNotFoundError:
                if not self.is_here():
                    raise
            place = self.root
            for part in path[len(self.root) + 1 :].split("/")[:-1]:
                place = f"{place}/{part}"
                with contextlib.suppress(FileExistsError, FileNotFoundError):
                    os.mkdir(place, 0o700)
        return act()

    def end(self, reason: str) -> None:
        with self._idle:
            if self.ended is None:
                self.ended = reason

    def drain(self, timeout_s: float) -> None:
        """Wait for the calls in progress. Raises TierError if one hangs that long."""
        with self._idle:
            if not self._idle.wait_for(lambda: self._calls == 0, timeout_s):
                raise TierError(f"{self.root}: {self._calls} calls hang")

    def release(self) -> None:
        """Release the lock. Safe to call twice."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


# -- paths


def path_of(root: str, name: str) -> str:
    salt, space, rest = name.split("/")
    return f"{root}/{salt[:2]}/{salt}/{space}/{rest[:2]}/{rest}"


def spaces_in(root: str, salt: str, space: str) -> list[tuple[str, str]]:
    """Each `salt/space` whose parts begin with these, and its directory. That includes objects that the ledger has lost
    because their files were away for a time."""

    def matching(path: str, level: int, prefix: str) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return [name for name in os.listdir(path) if _LEVELS[level].fullmatch(name) and name.startswith(prefix)]
        return []

    return [
        (f"{one}/{two}", f"{root}/{top}/{one}/{two}")
        for top in matching(root, 0, salt[:2])
        for one in matching(f"{root}/{top}", 1, salt)
        for two in matching(f"{root}/{top}/{one}", 2, space)
    ]


def objects_in(path: str, level: int = 0) -> Iterator[list[tuple[str, os.stat_result]]]:
    """Names and stats of all objects under a root, a directory at a time. Removes links, empty files, and files and
    directories of other users."""
    with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:
        if level == len(_LEVELS):
            yield _objects(path, entries)
            return
        for entry in entries:
            if not _LEVELS[level].fullmatch(entry.name):
                continue
            if entry.is_symlink():  # objects would be written wherever the link leads
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
        if _is_foreign(file.path, info):  # another user may have written any header
            remove(file.path)
        elif stat.S_ISREG(info.st_mode) and info.st_size:
            found.append((name, info))
        elif not stat.S_ISDIR(info.st_mode):
            os.unlink(file.path)  # a link, or a file that a power failure has emptied
    return found


# -- system calls


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


def transfer(call: Callable[[int, Sequence[memoryview], int], int], fd: int, buffers: Sequence[memoryview]) -> int:
    """preadv or pwritev from the file's start, until the buffers or the file end. Returns the bytes transferred."""
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


# -- permissions


def _is_foreign(path: str, info: os.stat_result) -> bool:
    """Whether another user owns this file or directory. A directory of our own is closed to other users."""
    if info.st_uid != os.geteuid():
        log.warning("removed %s: it belongs to user %d", path, info.st_uid)
        return True
    if stat.S_ISDIR(info.st_mode) and info.st_mode & _OTHERS:
        Path(path).chmod(0o700)
    return False


def _make_private(place: Path) -> None:
    """Make the directory if there is none, and close it to other users.

    If other users may enter a directory of ours, it gets mode 0700, and the log says so. Raises ConfigError if it has
    files that are not a disk tier's, if another user owns it or a link to it, or if other users could replace it;
    OSError if it is not accessible.
    """
    for part in reversed([part for part in place.parents if not part.exists()]):
        part.mkdir(mode=0o755)  # the umask may take more rights away
    place.mkdir(mode=0o700, exist_ok=True)
    own = {LOCK, TMP, TRASH, "lost+found"}
    if others := [name for name in os.listdir(place) if name not in own and not _LEVELS[0].fullmatch(name)]:
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
        log.warning("%s had mode %04o; changed it to 0700", place, mode)
    with contextlib.suppress(FileNotFoundError):
        if _is_foreign(f"{place}/{LOCK}", os.lstat(f"{place}/{LOCK}")):
            remove(f"{place}/{LOCK}")


def _check_parent(place: Path, parent: Path) -> None:
    """Raise ConfigError if other users could replace a place, because they can write to this directory above it."""
    info = parent.stat()
    if info.st_mode & stat.S_ISVTX and info.st_uid in (0, os.geteuid()):
        return  # only the owner of an entry can replace it there
    if info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX:
        if not parent.is_mount():
            raise ConfigError(
                f"{place}: every user can write to {parent} and could replace it; use another directory, or "
                f"chmod o-w {parent}"
            )
        # Kubernetes mounts a pod's volumes like this, and only root could change it.
        sparing_log.warning("%s: every user can write to the volume %s, and could replace it", place, parent)
    elif info.st_mode & stat.S_IWGRP and info.st_gid not in (0, os.getegid()):
        sparing_log.warning("%s: group %d can write to %s, and could replace it", place, info.st_gid, parent)
    elif info.st_uid not in (0, os.geteuid()):
        sparing_log.warning("%s: user %d owns %s, and could replace it", place, info.st_uid, parent)
