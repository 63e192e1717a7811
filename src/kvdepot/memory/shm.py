"""Files in the folder that server and clients share, in memory: the arena, and the clients' liveness files.

The owner of a file locks it as long as it lives (locks.py). A forked child inherits no such lock: a liveness file is
held open by its mapping alone, which a fork does not inherit (MADV_DONTFORK), and a server's descriptors are closed in
the processes that Python starts. Files are named on the wire, never their folder: each container may mount it
elsewhere.

A **liveness file** is a client's page of shared memory:

    offset 0, 16 bytes   secret: the client of this liveness file must prove that it knows it (protocol/handshake.py)
    offset 16, uint8     left: 1 once the client has closed its connection; stays 0 if it was killed or crashed

Every user of the host can see the names of liveness files, but only the owner can read the page. So the secret proves
that a client belongs to this user, even over a TCP port that any user can reach.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import stat
import time
import weakref
from pathlib import Path

from kvdepot import locks
from kvdepot.errors import ArenaError, BadRequest, Busy, KVDepotError

SHM = Path("/dev/shm")
"""The folder that is used if no other is set."""
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,200}")
_LIVENESS = "kvdepot-client-"
_LEFT = 16
_MAKING_S = 60.0
"""A file that has had a hidden name for longer than this was left by a dead process."""
_SECRET_BYTES = 16
_TMPFS, _HUGETLBFS = 0x01021994, 0x958458F6
_MADV_REMOVE = 9
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_PUNCH_HOLE = 3  # and keep the size

_libc = ctypes.CDLL(None, use_errno=True)  # CDLL calls release the GIL; mmap.madvise does not
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.statfs.argtypes = [ctypes.c_char_p, ctypes.c_void_p]


def check_folder(folder: Path) -> None:
    """Raise ArenaError, with the advice after a semicolon, unless this is a tmpfs in which this user may create files.

    A disk would be slow, and KV would lie there in clear. On hugetlbfs, files cannot be written with `write`.
    """
    about = ctypes.create_string_buffer(256)
    other = "choose another --arena-dir (KVDEPOT_ARENA_DIR)"
    if _libc.statfs(os.fsencode(folder), about):
        why = os.strerror(ctypes.get_errno())
        fault = f"cannot be used: {why}; mount a tmpfs there (mount -t tmpfs tmpfs {folder}), or {other}"
    elif not folder.is_dir():
        fault = f"is not a folder; {other}"
    elif (kind := ctypes.c_ulong.from_buffer(about).value & 0xFFFFFFFF) == _HUGETLBFS:
        fault = f"is in a hugetlbfs; {other} in a tmpfs, which has huge pages with the mount option huge=advise"
    elif kind != _TMPFS:
        fault = f"is on a disk or network, not in memory; {other} in a tmpfs, such as {SHM}"
    elif not os.access(folder, os.W_OK | os.X_OK):
        fault = f"is not writable for user {os.geteuid()}; give the folder to this user, or {other}"
    else:
        return
    raise ArenaError(f"{folder}, the folder for the arena, {fault}")


def path_of(folder: Path, name: str) -> Path:
    """The path of a shared file. Raises ArenaError if the name is not a plain file name."""
    if not _NAME.fullmatch(name) or name in {".", ".."}:
        raise ArenaError(f"{name[:64]!r} is not the name of a file in shared memory")
    return folder / name


def open_shared(folder: Path, name: str, flags: int = os.O_RDWR) -> int:
    """Open a shared file of this user; the caller closes it. Raises ArenaError for anything else, Busy if there are no
    free descriptors."""
    path = path_of(folder, name)
    try:
        # Without O_NONBLOCK, opening a named pipe would block until another process opens it for writing.
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as exc:
        kind = Busy if exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM) else ArenaError
        raise kind(f"{path} cannot be opened: {exc.strerror}") from exc
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
        os.close(fd)
        raise ArenaError(f"{path} is not a file of user {os.geteuid()}")
    return fd


def populate(fd: int, offset: int, address: int, size: int) -> int:
    """Allocate every page of a range of a file that is mapped at `address`; returns why that failed (an errno), or 0.
    Blocks without the GIL (about 3 s per GiB the first time). Touching a page without memory would raise SIGBUS."""
    if not _libc.madvise(address, size, _MADV_POPULATE_WRITE):
        return 0
    error = ctypes.get_errno()
    if error == errno.EINVAL:  # Linux before 5.14, gVisor. The C library's posix_fallocate could overwrite bytes.
        while (error := ctypes.get_errno() if _libc.fallocate(fd, 0, offset, size) else 0) == errno.EINTR:
            pass
    return error


def enter_pages(address: int, size: int) -> None:
    """Enter a mapped range, whose pages another mapping has allocated, into this process's page table now.

    Blocks without the GIL, 0.1 to 0.4 s per GiB: reading enters many neighbours with one fault, writing one page.
    """
    _libc.madvise(address, size, _MADV_POPULATE_READ)


def allocated(address: int, size: int) -> bytearray:
    """A byte for each page of a mapped range: 1 if the kernel has allocated the page, for any process, and else 0."""
    found = bytearray(-(-size // mmap.PAGESIZE))
    _libc.mincore(address, size, (ctypes.c_uint8 * len(found)).from_buffer(found))
    return found


def free(fd: int, size: int) -> None:
    """Free the memory of the first bytes of a file, also where others have mapped them; they read zeros then."""
    _libc.fallocate(fd, _PUNCH_HOLE, 0, size)


def free_mapped(address: int, size: int) -> None:
    """Free the memory of a mapped range of a file, also where others have mapped it; it reads zeros then."""
    _libc.madvise(address, size, _MADV_REMOVE)


def advise_huge(address: int, size: int) -> None:
    _libc.madvise(address, size, mmap.MADV_HUGEPAGE)


def do_not_fork(address: int, size: int) -> None:
    """Do not let forked processes inherit a mapping, and with it the open file and its lock."""
    _libc.madvise(address, size, mmap.MADV_DONTFORK)


class LivenessFile:
    """The client's side: creates the page, holds its lock, and removes the page when closed.

    If it is not closed when Python ends, also by an exception, the client is marked as having left. In a forked child
    it does nothing.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ArenaError, and then leaves nothing behind."""
        check_folder(folder)
        self._owner, self._address = os.getpid(), 0
        self.name = f"{_LIVENESS}{os.urandom(8).hex()}"
        self.secret = os.urandom(_SECRET_BYTES)
        self._path = folder / self.name
        hidden = folder / f".{self.name}"  # hidden until it is locked, so that no sweep takes it for stale
        fd = -1
        try:
            fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.ftruncate(fd, mmap.PAGESIZE)
            os.pwrite(fd, self.secret, 0)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._address = _map_page(fd)
            self._unmap = weakref.finalize(self, _unmap, self._address, self._owner)
            self._unmap.atexit = False  # because `_leave` may run afterwards
            do_not_fork(self._address, mmap.PAGESIZE)
            hidden.rename(self._path)
        except OSError as exc:
            if self._address:
                self._unmap()
            if fd >= 0:
                hidden.unlink(missing_ok=True)
            raise ArenaError(f"{folder} cannot hold this client's liveness file: {exc.strerror}") from exc
        finally:
            if fd >= 0:
                os.close(fd)  # the mapping keeps the file open, and its lock
        self._left = ctypes.c_uint8.from_address(self._address + _LEFT)
        _liveness_files.add(self)

    def leave(self) -> None:
        """Mark the client as having left."""
        if self._address and os.getpid() == self._owner:
            self._left.value = 1

    def close(self) -> None:
        """Mark the client as having left, and remove the page, which releases the lock. May be called twice."""
        if self._address and os.getpid() == self._owner:
            self.leave()
            self._path.unlink(missing_ok=True)
            self._address = 0
            self._unmap()


_liveness_files: weakref.WeakSet[LivenessFile] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    for file in list(_liveness_files):
        file.leave()


def _map_page(fd: int) -> int:
    """Map the first page of a file; Python's mmap would keep a descriptor of its own. Raises OSError."""
    mapped: int | None = _libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if mapped is None or mapped == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return mapped


def _unmap(address: int, owner: int) -> None:
    """Unmap a liveness file's page, unless this is a forked child, which does not have it."""
    if os.getpid() == owner:
        _libc.munmap(address, mmap.PAGESIZE)


def leave_for(pid: int) -> None:
    """Mark the clients of a process and of its descendants as having left: its parent is about to end it, too fast for
    it to close its connections. Does nothing for another user's process, or one that is gone."""
    process = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):
        maps = process.joinpath("maps").read_text(encoding="utf-8", errors="replace").splitlines()
        for path in {Path("/", line.partition("/")[2]) for line in maps if f"/{_LIVENESS}" in line}:
            with (
                contextlib.suppress(OSError, KVDepotError),  # its client has removed it
                open(open_shared(path.parent, path.name), "wb", buffering=0) as file,
            ):
                os.pwrite(file.fileno(), b"\1", _LEFT)
    with contextlib.suppress(OSError):
        for thread in process.joinpath("task").iterdir():
            with contextlib.suppress(OSError):  # this thread has ended meanwhile
                for child in thread.joinpath("children").read_text().split():
                    leave_for(int(child))


class LivenessView:
    """The server's side of a client's liveness file. secret: the client's, which only processes of this user can
    read."""

    def __init__(self, folder: Path, name: str) -> None:
        """Raises BadRequest, ArenaError or Busy."""
        if not name.startswith(_LIVENESS):
            raise BadRequest(f"{name[:64]!r} is not the name of a client's liveness file")
        self.name = name
        self._path = folder / name
        self._fd = open_shared(folder, name)
        self.secret = os.pread(self._fd, _SECRET_BYTES, 0)
        if len(self.secret) < _SECRET_BYTES:
            os.close(self._fd)
            raise BadRequest(f"liveness file {name} is too short")

    def is_alive(self) -> bool:
        return locks.is_locked(self._fd)

    def has_left(self) -> bool:
        """Whether the client closed its connection, as opposed to having died."""
        return os.pread(self._fd, 1, _LEFT) == b"\1"

    def close(self, remove: bool) -> None:
        """Close the file. remove: whether to remove it, too, for a dead client. May be called twice."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                if remove:
                    self._path.unlink()
            os.close(self._fd)
            self._fd = -1


def sweep_liveness_files(folder: Path) -> None:
    """Remove the liveness files of clients that died while no server watched them, and no others."""
    for path in folder.glob(f"*{_LIVENESS}*"):
        try:
            if path.name.startswith(".") and 0 <= time.time() - path.lstat().st_mtime < _MAKING_S:
                continue  # its owner is about to lock it, and would fail while we check the lock
            fd = open_shared(folder, path.name)
        except (KVDepotError, OSError):
            continue  # another user's, or already gone
        with contextlib.suppress(OSError):
            if not locks.is_locked(fd):
                path.unlink()
        os.close(fd)


def liveness_files(folder: Path) -> int:
    return sum(1 for _ in folder.glob(f"{_LIVENESS}*"))
