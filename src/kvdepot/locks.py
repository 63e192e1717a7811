"""Locks on files, which say who lives.

The one law: whoever owns a file holds `flock` on it as long as it lives. The kernel gives the lock up exactly when the
process is gone and its mappings with it, `kill -9` included; so a lock that can be taken proves that its owner touches
memory no more.

The kernel keeps `flock` with the open file, not with the process, so a process that forks without exec hands it on,
and would count as alive until its child has ended: what `lock` has locked is closed in a child that Python forks.
Rejected: POSIX record locks (gone as soon as the process closes any descriptor of the same file, and, when it dies,
before drivers' descriptors are), process ids and start times (each container numbers its own processes).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

__all__ = ["is_locked", "leads_to", "lock"]

_locked: set[tuple[int, int]] = set()
"""Device and inode of files whose lock `lock` has taken for this process."""


def lock(fd: int) -> bool:
    """Take the owner's lock; False when another living process has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    if not _locked:
        os.register_at_fork(after_in_child=_leave_to_parent)
    info = os.fstat(fd)
    _locked.add((info.st_dev, info.st_ino))
    return True


def _leave_to_parent() -> None:
    """In a forked child: close what is a parent's, or its locks would outlive it."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, not paths
        with contextlib.suppress(OSError):
            info = os.fstat(int(name))
            if (info.st_dev, info.st_ino) in _locked:
                os.close(int(name))


def leads_to(path: Path, fd: int) -> bool:
    """Whether a name still leads to our open file, which others may have removed or replaced."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def is_locked(fd: int) -> bool:
    """Whether the owner of this file lives. `fd` must be an open of our own, not the owner's."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # locked; or the kernel has no memory for a lock, which proves nobody's end
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False
