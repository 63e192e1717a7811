"""Makes sure that a disk tier's directory is this user's alone, before it is locked. No state."""

# ruff: noqa: PTH208

from __future__ import annotations

import contextlib
import logging
import os
import stat
from pathlib import Path

from kvdepot.errors import ConfigError
from kvdepot.tiers.disk.files import OTHERS, is_foreign, remove
from kvdepot.tiers.disk.layout import LOCK, QUARANTINE, is_ours

__all__ = ["make_private"]

log = logging.getLogger(__name__)


def make_private(place: Path) -> None:
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
        log.warning("%s had mode %04o; changed it to 0700 and removed what other users put there", place, mode)
    for name in (LOCK, QUARANTINE):
        with contextlib.suppress(FileNotFoundError):
            if is_foreign(f"{place}/{name}", os.lstat(f"{place}/{name}")):
                remove(f"{place}/{name}")


def _check_parent(place: Path, parent: Path) -> None:
    """Whoever can write to a parent directory can replace the directory below it."""
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
        log.warning("%s: every user can write to the volume %s, and could replace it", place, parent)
    elif info.st_mode & stat.S_IWGRP and info.st_gid not in (0, os.getegid()):
        log.warning("%s: group %d can write to %s, and could replace it", place, info.st_gid, parent)
    elif info.st_uid not in (0, os.geteuid()):
        log.warning("%s: user %d owns %s, and could replace it", place, info.st_uid, parent)
