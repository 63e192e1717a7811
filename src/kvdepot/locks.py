"""File locks that show whether a file's owner lives.

Invariant: the owner of a file holds `flock` on it as long as it lives. The kernel releases the lock only when the
process and its mappings are gone, even after `kill -9`; so a lock that can be taken proves that its owner no longer
touches memory. `flock` belongs to the open file, not to the process: a forked child that does not exec would keep its
parent alive, so the files that `lock` has locked are closed in children that Python forks.

A **use** is a second, shared lock (`fcntl`, of the open file), which is independent of the owner's: whoever copies into
another's file holds it meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
from pathlib import Path

_NO_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""Errors of `flock` on file systems that do not have it, such as Lustre and NFS without locks."""
_TRIES, _PAUSE_S = 3, 0.008
"""Who asks whether a file is locked (`is_locked`) holds a lock for a moment, too."""
_FLOCK = struct.Struct("@hhqqi4x")
"""The C type `struct flock`: kind, whence, start, length, process (0 for locks of an open file)."""
_locked: set[tuple[int, int]] = set()
"""Device and inode of the files that this process has locked."""


def lock(fd: int) -> bool:
    """Take the owner's lock; False if another process has it. Blocks some 20 ms then. Raises OSError."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(_PAUSE_S)
        except OSError as exc:
            if exc.errno not in _NO_FLOCK:
                raise
            advice = "use a folder on a local disk, or mount this file system with locks (flock)"
            raise OSError(exc.errno, f"its file system has no file locks; {advice}") from exc
    else:
        return False
    if not _locked:
        os.register_at_fork(after_in_child=_leave_to_parent)
    info = os.fstat(fd)
    _locked.add((info.st_dev, info.st_ino))
    return True


def _leave_to_parent() -> None:
    """Close, in a forked child, the parent's locked files, so that their locks do not outlive it."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, not paths
        with contextlib.suppress(OSError):
            info = os.fstat(int(name))
            if (info.st_dev, info.st_ino) in _locked:
                os.close(int(name))


def leads_to(path: Path, fd: int) -> bool:
    """Whether a path still leads to our open file, which others may have removed or replaced."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def use(fd: int, timeout_s: float) -> bool:
    """Record in the kernel that this open file is in use, until `end_use` or its last process ends. Waits while another
    process refuses it; False after `timeout_s`. Threads with one open file share one use.

    Raises OSError where the kernel has no locks of open files.
    """
    return _take_use(fd, fcntl.F_RDLCK, timeout_s)


def end_use(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 1, 0))


def refuse_use(fd: int, timeout_s: float) -> bool:
    """Wait until no other open file is in use, and let no use begin before `end_use`; False after `timeout_s`, and if
    the kernel cannot tell. Where it has no locks of open files, nobody can use one."""
    try:
        return _take_use(fd, fcntl.F_WRLCK, timeout_s)
    except OSError as exc:
        return exc.errno in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def _take_use(fd: int, kind: int, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, 0, 1, 0))
            return True
        except (BlockingIOError, PermissionError):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE_S)


def is_locked(fd: int) -> bool:
    """Whether the owner of this file lives. `fd` must come from an open of our own, not the owner's."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # locked; or the kernel is out of memory, which does not prove that the owner has ended
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False
