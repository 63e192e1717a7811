"""File locks that show whether a file's owner lives.

Invariant: the owner of a file holds `flock` on it as long as it lives. The kernel releases the lock only when the
process and its mappings are gone, even after `kill -9`; so a lock that can be taken proves that no instruction of its
owner touches memory any more (work that it gave to a GPU may go on for a moment). `flock` belongs to the open file, not
to the process: a forked child that does not exec would keep its parent alive, so the files that `lock` has locked are
closed in children that Python forks.

A **use** is a second, shared lock (`fcntl`, of the open file) on a range of bytes, which is independent of the owner's:
whoever copies to or from this range of another's file holds it meanwhile.
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


def use(fd: int, start: int, size: int) -> None:
    """Record in the kernel that this open file uses a range of bytes, until it is closed in its last process.

    Raises OSError if another process forbids that, or where the kernel has no locks of open files.
    """
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, start, size, 0))


def uses(fd: int, start: int, end: int) -> list[tuple[int, int]]:
    """The parts of [start, end) that other open files use, as offset and size, ascending. All of it if the kernel
    cannot tell; none where it has no locks of open files, because nobody can use any."""
    found, left = list[tuple[int, int]](), [(start, end)]
    try:
        while left:
            first, last = left.pop()
            if first >= last:
                continue
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, last - first, 0)
            kind, _, at, size, _ = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))
            if kind != fcntl.F_UNLCK:
                at, stop = max(first, at), min(last, at + size if size else last)
                found.append((at, stop - at))
                left += [(first, at), (stop, last)]
    except OSError as exc:
        return [] if exc.errno in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP) else [(start, end - start)]
    return sorted(found)


def is_locked(fd: int) -> bool:
    """Whether the owner of this file lives. `fd` must come from an open of our own, not the owner's."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # locked; or the kernel is out of memory, which does not prove that the owner has ended
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False
