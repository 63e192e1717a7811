"""The memory that holds the chunks: one named shared-memory file. Made by the server, written by mover.py.

The one law: never a byte larger than asked, and no page is touched that the kernel has not given us.
The file begins with a page that says what it is; `space.py` decides about the rest.

    offset  0, 8 bytes    magic
    offset  8, uint32     format version
    offset 16, uint64     file size in bytes
    offset 24, 8 bytes    boot id of the server that owns it now
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time

import numpy as np
import numpy.typing as npt

from kvdepot import shm
from kvdepot.errors import ArenaError, LayoutError

__all__ = ["CHUNKS_START", "HEADER_BYTES", "Arena", "Watch"]

HEADER_BYTES = mmap.PAGESIZE
CHUNKS_START = HEADER_BYTES + 64
"""Where chunks begin: as far behind a page's start as KV is in the files that torch makes.

Copying to an address a little ahead of the source modulo 4096 is 4 times as slow (the processor takes each load
for one of the store before it); with equal offsets neither direction is.
"""
_MAGIC = b"kvdepot\0"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQ8s")
_STEP = 16 << 20
_LOCK_WAIT_S = 0.3


class Arena:
    """A named file of `size` bytes in /dev/shm, locked for this process as long as it lives."""

    def __init__(self, name: str, size: int, boot: bytes) -> None:
        """Create the file, or take over the one a dead server left.

        Raises ArenaError when a living server owns it, it is not ours, or /dev/shm is too small.
        """
        self.name = name
        self.size = size
        self.path = shm.shm_path(name)
        self.taken_over = False
        self._fd = self._open()
        try:
            self._claim()
            self._map = mmap.mmap(self._fd, size)
        except BaseException:
            os.close(self._fd)
            raise
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.address = self.bytes.ctypes.data
        shm.advise_huge(self.address, size)
        self.bytes[:HEADER_BYTES] = 0
        self._map[: _HEADER.size] = _HEADER.pack(_MAGIC, _VERSION, 0, size, boot)
        self.populated = HEADER_BYTES  # bytes from the start that have memory; written by one thread
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<Arena {self.name} {self.size} bytes, {self.populated} populated>"

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            self.taken_over = True
        except OSError as exc:
            raise ArenaError(f"arena {self.path} cannot be created: {exc.strerror}") from exc
        try:
            return shm.open_shared(self.name)
        except LayoutError as exc:
            raise ArenaError(str(exc)) from exc

    def _claim(self) -> None:
        deadline = time.monotonic() + _LOCK_WAIT_S  # a client that looks whether we live holds it for an instant
        while not shm.lock(self._fd):
            if time.monotonic() < deadline:
                time.sleep(0.01)
                continue
            raise ArenaError(f"arena {self.path} is in use by another kvdepot server; choose another --arena-name")
        if self.taken_over:
            head = os.pread(self._fd, _HEADER.size, 0)
            if head[:8] not in (_MAGIC, bytes(8), b""):
                raise ArenaError(f"{self.path} is no kvdepot arena; remove it or choose another --arena-name")
        old = os.fstat(self._fd).st_blocks * 512
        stats = os.statvfs(shm.SHM)
        room = stats.f_bavail * stats.f_frsize + old
        if self.size > room:
            if not self.taken_over:
                self.path.unlink(missing_ok=True)
            raise ArenaError(
                f"an arena of {self.size / 2**30:.2f} GiB does not fit in {shm.SHM}, which has "
                f"{room / 2**30:.2f} GiB free; lower --arena-gib or enlarge {shm.SHM}"
            )
        os.ftruncate(self._fd, self.size)

    def start_populating(self) -> None:
        """Give the pages memory in the background, from the start: a first touch costs 30 times a copy."""
        self._thread = threading.Thread(target=self._populate, name="kvdepot-populate", daemon=True)
        self._thread.start()

    def _populate(self) -> None:
        while self.populated < self.size and not self._stop.is_set():
            step = min(_STEP, self.size - self.populated)
            if not shm.populate(self.address + self.populated, step):
                return  # /dev/shm is full: `ensure` tells whoever needs these pages
            self.populated += step

    def ensure(self, offset: int, size: int) -> bool:
        """Make sure that a range has memory before it is written; False when there is none. Any thread."""
        start = offset - offset % mmap.PAGESIZE
        return offset + size <= self.populated or shm.populate(self.address + start, offset + size - start)

    def close(self, remove: bool = True) -> None:
        """Stop populating, unmap, and remove the file (the lock goes with it). Safe twice."""
        if self._fd < 0:
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if remove:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1


class Watch:
    """A client's view of an arena: tells whether the server of one boot still lives."""

    def __init__(self, name: str, boot: bytes) -> None:
        """Raises LayoutError when the file cannot be seen from here."""
        self._boot = boot
        self._fd = shm.open_shared(name, os.O_RDONLY)

    def is_gone(self) -> bool:
        """True once that server can touch no memory any more: its lock is free, or another boot holds it."""
        if self._fd < 0 or not shm.is_locked(self._fd):
            return True
        head = os.pread(self._fd, _HEADER.size, 0)
        if len(head) < _HEADER.size:
            return False  # being created: the lock alone speaks
        magic, _, _, _, boot = _HEADER.unpack(head)
        return bool(magic == _MAGIC and boot != self._boot)

    def close(self) -> None:
        """Safe twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
