"""Files in /dev/shm, and the memory files (memfd_create) that engines allocate their KV in.

Used by the server (arena, mapping clients' tensors) and the client (its liveness file). The owner of a file locks it as
long as it lives (locks.py). A forked child inherits neither: a liveness file is held open by its mapping alone, which a
fork does not inherit (MADV_DONTFORK), and a server's descriptors are closed in the processes that Python starts.

A **liveness file** is a client's page of shared memory:

    offset 0, uint64     fence: stores whose ticket is <= this number must not become visible
    offset 8, 16 bytes   secret: the client of this liveness file must prove that it knows it (protocol/handshake.py)
    offset 24, uint8     left: 1 once the client has closed its connection; stays 0 if it was killed or crashed

Every user of the host can see the names of liveness files, but only the owner can read the page. So the secret proves
that a client belongs to this user, even over a TCP port that any user can reach.

A client raises its fence before it lets the engine reuse blocks that a store may still be reading. The server reads the
fence after it has copied and before it seals, so a copy that is sealed ended before the fence was raised.
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
import signal
import stat
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvdepot import locks
from kvdepot.errors import ArenaError, BadRequest, Busy, KVDepotError, LayoutError

if TYPE_CHECKING:
    from kvdepot.memory.extents import Bytes

SHM = Path("/dev/shm")
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,200}")
_LIVENESS = "kvdepot-card-"
_TENSORS = re.compile(r"torch_[0-9]+_[0-9]+_[0-9]+")
"""Names of torch's files of shared tensors: the number of the process, as its container counts, and two more."""
ARENA_MAGIC = b"kvdepot\0"
"""The first bytes of every arena (memory/arena_header.py)."""
_MEMORY_FILE = re.compile(r"memfd:([1-9][0-9]{0,9}):([0-9]{1,9}):([A-Za-z0-9_.\-]{16,200})")
"""Names of memory files: the process that has one open and its descriptor there, and the name given to the kernel,
which must be unique: a number may mean another process in the server's container."""
_SECRET = slice(8, 24)
_LEFT = 24
_MAKING_S = 60.0
"""A file that has had a hidden name for longer than this was left by a dead process."""
SECRET_BYTES = 16
_MAP_FIXED = 16
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_PUNCH_HOLE = 3  # and keep the size

_WHY_NOT = {
    0: "",
    errno.EFAULT: f"{SHM} is full",  # touching the page would raise SIGBUS
    errno.ENOSPC: f"{SHM} is full",
    errno.ENOMEM: "this machine or control group is out of memory",
}
"""The reason for an errno of `populate`."""

_libc = ctypes.CDLL(None, use_errno=True)  # CDLL calls release the GIL; mmap.madvise does not
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def shm_path(name: str) -> Path:
    """The path of a shared-memory file. Raises LayoutError if the name is not a plain file name."""
    if not _NAME.fullmatch(name) or name in {".", ".."}:
        raise LayoutError(f"{name[:64]!r} is not the name of a shared-memory file")
    return SHM / name


def open_shared(name: str, flags: int = os.O_RDWR) -> int:
    """Open a shared-memory file of this user; the caller closes it. Raises LayoutError for anything else, Busy if there
    are no free descriptors."""
    path = shm_path(name)
    try:
        # Without O_NONBLOCK, opening a named pipe would block until another process opens it for writing.
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as exc:
        raise _failed(f"shared memory {name} cannot be opened", exc) from exc
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
        os.close(fd)
        raise LayoutError(f"shared memory {name} is not a file of user {os.geteuid()}")
    return fd


def _failed(what: str, exc: OSError) -> KVDepotError:
    """The error for a failed open or mapping: Busy if it may succeed later, when other clients have left."""
    kind = Busy if exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM) else LayoutError
    return kind(f"{what}: {exc.strerror}")


class SharedFiles:
    """An engine's files, mapped readable and writable, one behind the other, so that equal files are equally apart."""

    def __init__(self, files: Sequence[tuple[str, int]]) -> None:
        """files: names, and the bytes to map of each.

        Raises LayoutError if a file is smaller, or is an arena or a liveness file: a copy into those would overwrite
        kvdepot's own state. Raises Busy if there are no free descriptors or address space.
        """
        self.fds: list[int] = []
        self.starts = [0]
        """Where each file begins in `bytes`; last, where they end."""
        for _, size in files:
            self.starts.append(self.starts[-1] + -(-max(size, 0) // mmap.PAGESIZE) * mmap.PAGESIZE)
        self._size = max(self.starts[-1], mmap.PAGESIZE)
        self._address = _map(None, self._size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        try:
            for (name, size), start in zip(files, self.starts, strict=False):
                self.fds.append(_open_tensors(name, size))
                access = mmap.PROT_READ | mmap.PROT_WRITE
                _map(self._address + start, size, access, mmap.MAP_SHARED | _MAP_FIXED, self.fds[-1])
        except KVDepotError:
            self.close()
            raise
        import numpy as np  # commands that only ask for files start sooner without it

        self.bytes: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * self._size).from_address(self._address))

    def close(self) -> None:
        """Unmap and close them, after the last use of `bytes` and of all arrays made from it. Safe twice."""
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()
        if self._size:
            _libc.munmap(self._address, self._size)
            self._size = 0


def _map(address: int | None, size: int, access: int, flags: int, fd: int) -> int:
    """Map memory with libc, because Python's mmap chooses the address itself. Raises Busy or LayoutError."""
    mapped: int | None = _libc.mmap(address, size, access, flags, fd, 0)
    if mapped is None or mapped == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise _failed("shared memory cannot be mapped", OSError(error, os.strerror(error)))
    return mapped


def memory_file(link: str) -> str | None:
    """The name for `SharedFiles` of this process's memory file, given as /proc/self/maps shows it; None if it has no
    descriptor open, or a name that another file may have, too."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if str(entry.readlink()) == link:
                name = f"memfd:{os.getpid()}:{entry.name}:{link.removeprefix('/memfd:').removesuffix(' (deleted)')}"
                return name if _MEMORY_FILE.fullmatch(name) else None
    return None


def _open_memory_file(name: str) -> int:
    """Open another process's memory file; the caller closes it. The kernel lets only processes of the same user do so.
    Raises LayoutError for anything else, Busy if there are no free descriptors."""
    found = _MEMORY_FILE.fullmatch(name)
    if found is None:
        raise LayoutError(f"{name[:64]!r} is not the name of a memory file")
    try:
        path, link = Path(f"/proc/{found[1]}/fd/{found[2]}"), Path(f"/memfd:{found[3]} (deleted)")
        # What is there is looked at first: opening a pipe or a device may have effects.
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC) if path.readlink() == link else -1
    except OSError as exc:
        if exc.errno in (errno.EMFILE, errno.ENFILE):
            raise _failed(f"memory file {name} cannot be opened", exc) from exc
        fd = -1
    if fd >= 0 and Path(f"/proc/self/fd/{fd}").readlink() != link:
        os.close(fd)
        fd = -1
    if fd < 0:
        raise LayoutError(
            f"memory file {name} cannot be opened: run the server as the engine's user and in its process namespace "
            "(the same container, or one that shares process ids)"
        )
    return fd


def _open_tensors(name: str, size: int) -> int:
    """Open an engine's file of at least `size` bytes; the caller closes it. Raises as `SharedFiles`."""
    if _LIVENESS in name:
        raise LayoutError(f"shared memory {name} is a client's liveness file, not KV tensors")
    fd = _open_memory_file(name) if name.startswith("memfd:") else open_shared(name)
    actual = os.fstat(fd).st_size
    fault = ""
    if not 0 < size <= actual:
        fault = f"has {actual} bytes, not {size}"
    elif os.pread(fd, len(ARENA_MAGIC), 0) == ARENA_MAGIC:
        fault = "is a kvdepot arena, not KV tensors"
    if fault:
        os.close(fd)
        raise LayoutError(f"shared memory {name} {fault}")
    return fd


def populate(fd: int, offset: int, address: int, size: int) -> str:
    """Allocate every page of a range of a file that is mapped at `address`; returns why that failed, or nothing.
    Blocks without the GIL (about 3 s per GiB the first time). Touching a page without memory would raise SIGBUS."""
    if not _libc.madvise(address, size, _MADV_POPULATE_WRITE):
        return ""
    error = ctypes.get_errno()
    if error == errno.EINVAL:  # Linux before 5.14, gVisor. The C library's posix_fallocate could overwrite bytes.
        while (error := ctypes.get_errno() if _libc.fallocate(fd, 0, offset, size) else 0) == errno.EINTR:
            pass
    return _WHY_NOT[error] if error in _WHY_NOT else os.strerror(error)


def enter_pages(address: int, size: int) -> None:
    """Enter a mapped range, whose pages another mapping has allocated, into this process's page table now.

    Blocks without the GIL, 0.1 to 0.4 s per GiB: reading enters many neighbours with one fault, writing one page.
    """
    _libc.madvise(address, size, _MADV_POPULATE_READ)


def free(fd: int, size: int) -> None:
    """Free the memory of the first bytes of a file, also where others have mapped them; they read zeros then."""
    _libc.fallocate(fd, _PUNCH_HOLE, 0, size)


def advise_huge(address: int, size: int) -> None:
    _libc.madvise(address, size, mmap.MADV_HUGEPAGE)


def do_not_fork(address: int, size: int) -> None:
    """Do not let forked processes inherit a mapping, and with it the open file and its lock."""
    _libc.madvise(address, size, mmap.MADV_DONTFORK)


def left_tensors() -> Iterator[tuple[str, int]]:
    """Files of torch's shared tensors that their processes have left behind: their names, and the bytes they take."""
    for path in SHM.glob("torch_*"):
        fd = _open_left(path.name)
        if fd is not None:
            taken = os.fstat(fd).st_blocks * 512
            os.close(fd)
            yield path.name, taken


def is_tensors(name: str) -> bool:
    return _TENSORS.fullmatch(name) is not None


def remove_left_tensors(name: str) -> bool:
    """Remove a file of torch's shared tensors if no process has it open; whether it is gone.

    torch's helper process removes them when their process ends, unless it is killed, too.
    """
    fd = _open_left(name)
    if fd is None:
        return not (SHM / name).exists()
    try:
        return not locks.leads_to(SHM / name, fd) or _remove(SHM / name)
    finally:
        os.close(fd)


def _open_left(name: str) -> int | None:
    """Open a file of this user's shared tensors if no process of any container has it open or mapped; else None. The
    kernel grants a lease for writing only then, and holds back whoever opens the file until our descriptor is
    closed."""
    if not is_tensors(name):
        return None
    try:
        fd = open_shared(name)
    except KVDepotError:
        return None
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # if another process opens it; SIGIO would end this one
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        os.close(fd)
        return None
    return fd


class LivenessFile:
    """The client's side: creates the page, holds its lock, raises the fence, and removes the page when closed.

    If it is not closed when Python ends, also by an exception, the client is marked as having left. In a forked child
    it does nothing.
    """

    def __init__(self) -> None:
        """Raises ArenaError, and then leaves nothing behind."""
        self._owner = os.getpid()
        self._address = 0
        self.name = f"{_LIVENESS}{os.urandom(8).hex()}"
        self.secret = os.urandom(SECRET_BYTES)
        path = SHM / self.name
        hidden = path.with_name(f".{self.name}")  # until it is locked, so that no sweep takes it for stale
        fd = -1
        try:
            fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.ftruncate(fd, mmap.PAGESIZE)
            os.pwrite(fd, self.secret, _SECRET.start)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Python's mmap would keep a descriptor of its own.
            self._address = _map(None, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd)
            self._unmap = weakref.finalize(self, _unmap, self._address, self._owner)
            self._unmap.atexit = False  # a thread may raise the fence until the process has ended
            do_not_fork(self._address, mmap.PAGESIZE)
            hidden.rename(path)
        except (OSError, KVDepotError) as exc:
            if self._address:
                self._unmap()
            if fd >= 0:
                hidden.unlink(missing_ok=True)
            raise ArenaError(f"{SHM} cannot hold this client's liveness file: {exc}") from exc
        finally:
            if fd >= 0:
                os.close(fd)  # the mapping keeps the file open, and its lock
        self._fence = ctypes.c_uint64.from_address(self._address)
        self._left = ctypes.c_uint8.from_address(self._address + _LEFT)
        _liveness_files.add(self)

    def _is_ours(self) -> bool:
        return self._address != 0 and os.getpid() == self._owner

    def raise_fence(self, ticket: int) -> None:
        """Prevent stores with a ticket up to this one from becoming visible."""
        if self._is_ours():
            self._fence.value = max(self._fence.value, ticket)

    def leave(self) -> None:
        """Mark the client as having left."""
        if self._is_ours():
            self._left.value = 1

    def close(self) -> None:
        """Mark the client as having left, and remove the page, which releases the lock. May be called twice."""
        if self._is_ours():
            self.leave()
            (SHM / self.name).unlink(missing_ok=True)
            self._address = 0
            self._unmap()


_liveness_files: weakref.WeakSet[LivenessFile] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    for file in list(_liveness_files):
        file.leave()


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
        for name in {line.rpartition("/")[2] for line in maps}:
            if name.startswith(_LIVENESS):
                with contextlib.suppress(OSError, KVDepotError):  # its client has removed it
                    fd = open_shared(name)
                    try:
                        os.pwrite(fd, b"\1", _LEFT)
                    finally:
                        os.close(fd)
    with contextlib.suppress(OSError):
        for thread in process.joinpath("task").iterdir():
            with contextlib.suppress(OSError):  # this thread has ended meanwhile
                for child in thread.joinpath("children").read_text().split():
                    leave_for(int(child))


class LivenessView:
    def __init__(self, name: str) -> None:
        if not name.startswith(_LIVENESS):
            raise BadRequest(f"{name[:64]!r} is not the name of a client's liveness file")
        self.name = name
        self._fd = open_shared(name)
        try:
            if os.fstat(self._fd).st_size < mmap.PAGESIZE:
                raise BadRequest(f"liveness file {name} is shorter than a page")
            self._page = mmap.mmap(self._fd, mmap.PAGESIZE)
        except OSError as exc:
            os.close(self._fd)
            raise _failed(f"liveness file {name} cannot be mapped", exc) from exc
        except BadRequest:
            os.close(self._fd)
            raise
        self._fence = memoryview(self._page).cast("Q")

    @property
    def secret(self) -> bytes:
        """The client's secret, which only processes of this user can read."""
        return self._page[_SECRET]

    @property
    def fence(self) -> int:
        """Stores with a ticket up to this are void; all once the file is closed, because its client is dead."""
        try:
            return self._fence[0]
        except ValueError:
            return 2**64 - 1

    def is_alive(self) -> bool:
        return locks.is_locked(self._fd)

    def has_left(self) -> bool:
        """Whether the client closed its connection, as opposed to having died."""
        return self._page[_LEFT] != 0

    def close(self, remove: bool) -> None:
        """Unmap and close it; remove: also remove the file, for a dead client."""
        if self._fd >= 0:
            if remove:
                _remove(SHM / self.name)
            self._fence.release()
            self._page.close()
            os.close(self._fd)
            self._fd = -1


def _remove(path: Path) -> bool:
    """Remove a dead client's file. False if it does not exist or cannot be removed."""
    try:
        path.unlink()
    except OSError:
        return False
    return True


def is_being_made(path: Path) -> bool:
    """Whether a file with a hidden name is so young that its owner may be about to lock and rename it.

    Raises OSError if it is gone.
    """
    return path.name.startswith(".") and 0 <= time.time() - path.lstat().st_mtime < _MAKING_S


def sweep_liveness_files() -> None:
    """Remove the liveness files of clients that died while no server watched them, and no others."""
    for path in SHM.glob(f"*{_LIVENESS}*"):
        try:
            if is_being_made(path):
                continue  # its owner is about to lock it, and would fail while we check the lock
            fd = open_shared(path.name)
        except (KVDepotError, OSError):
            continue  # another user's, or already gone
        try:
            if not locks.is_locked(fd):
                _remove(path)
        finally:
            os.close(fd)
