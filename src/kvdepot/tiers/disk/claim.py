"""A disk tier's directory: that it is this user's alone, the lock on it, and the calls that may use it. Any thread."""

# ruff: noqa: PTH116, PTH208

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from kvdepot import locks
from kvdepot.errors import ConfigError, TierError
from kvdepot.logs import Sparing
from kvdepot.tiers.disk.layout import LOCK, OTHERS, QUARANTINE, is_foreign, is_ours, make_parents, remove
from kvdepot.tiers.tally import Tally

__all__ = ["Claim"]

log = logging.getLogger(__name__)
sparing_log = Sparing(log)

_T = TypeVar("_T")


class Claim:
    """One locked directory. Once it has ended, because the directory is gone or was closed, it stays so."""

    def __init__(self, path: Path, tally: Tally) -> None:
        """Raises TierError if the directory is not accessible, ConfigError if it is in use or another user's."""
        self.root = str(path)
        self.ended: str | None = None
        """Why calls are refused; None while they are not."""
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
        """Whether the root is still the directory that was locked."""
        try:
            there = os.stat(f"{self.root}/{LOCK}", follow_symlinks=False)
            return self._fd is not None and os.path.samestat(there, os.fstat(self._fd))
        except OSError:
            return False

    def free_bytes(self) -> int | None:
        """Bytes that the file system has free for us; None if it does not tell."""
        try:
            room = os.statvfs(self.root)
        except OSError:
            return None
        return room.f_bavail * room.f_frsize

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Around a call that uses the directory: it stays locked meanwhile. Raises TierError if the claim has ended."""
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
        """Raises TierError if the claim has ended."""
        if self.ended is not None:
            raise TierError(f"{self.root}: {self.ended}")

    def check_here(self) -> None:
        """Look whether the directory is there. If not, ends the claim and raises TierError."""
        if not self.is_here():
            self.end("the directory is gone")
            self.check()

    def failed(self, what: str, exc: OSError) -> None:
        """Count and log a failed system call. Raises TierError if the directory is gone."""
        self.tally("errors")
        sparing_log.info("%s: %s: %s", self.root, what, exc.strerror)
        self.check_here()

    def with_parents(self, path: str, act: Callable[[], _T]) -> _T:
        """Do what creates `path`, making its parent directories as often as others remove them. Raises OSError."""
        for _ in range(16):
            try:
                return act()
            except FileNotFoundError:
                if not self.is_here():
                    raise
            make_parents(self.root, path)
        return act()

    # -- the end

    def end(self, reason: str) -> None:
        """Refuse calls from now on. The first reason stays."""
        with self._idle:
            if self.ended is None:
                self.ended = reason

    def drain(self, timeout_s: float) -> None:
        """Wait for the calls in progress. Raises TierError if one hangs for so long."""
        with self._idle:
            if not self._idle.wait_for(lambda: self._calls == 0, timeout_s):
                raise TierError(f"{self.root}: {self._calls} calls hang")

    def release(self) -> None:
        """Release the lock. Safe to call twice."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


# -- permissions


def _make_private(place: Path) -> None:
    """Make the directory if there is none, and close it to other users.

    If other users may enter a directory of ours, it gets mode 0700, and the log says so. Raises ConfigError if it has
    files that are not a disk tier's, if another user owns it or a link to it, or if other users could replace it;
    OSError if it is not accessible.
    """
    for part in reversed([part for part in place.parents if not part.exists()]):
        part.mkdir(mode=0o755)  # and what the umask allows of it
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
    if mode & OTHERS:
        place.chmod(0o700)
        if stat.S_IMODE(place.stat().st_mode) & OTHERS:
            raise ConfigError(f"{place} has mode {mode:04o}, and its file system does not allow changing it to 0700")
        log.warning("%s had mode %04o; changed it to 0700", place, mode)
    for name in (LOCK, QUARANTINE):
        with contextlib.suppress(FileNotFoundError):
            if is_foreign(f"{place}/{name}", os.lstat(f"{place}/{name}")):
                remove(f"{place}/{name}")


def _check_parent(place: Path, parent: Path) -> None:
    """Anyone who can write to a parent directory can replace the directory below it."""
    info = parent.stat()
    if info.st_mode & stat.S_ISVTX and info.st_uid in (0, os.geteuid()):
        return  # only its owner can
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
