"""The arena: the named shared-memory file that holds the chunks. The server creates it; its tiers' threads write it.

Clients map it, too, and copy their KV there and back (arena_view.py). Invariants: the file is never larger than
requested, and no page is touched before the kernel has allocated it. A server that finds a file of that name takes it
over, once its lock is free, but refuses one that it does not understand.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvdepot import locks
from kvdepot.errors import ArenaError
from kvdepot.logs import Sparing
from kvdepot.memory import shm
from kvdepot.memory.allocator import Extents
from kvdepot.memory.arena_header import CHUNKS_OFFSET, HEADER_BYTES, SECRET_OFFSET, WITHDRAWALS_OFFSET, ArenaHeader
from kvdepot.memory.records import ARENA_BYTES_A_SLOT, SLOT_BYTES
from kvdepot.memory.room import free_bytes
from kvdepot.protocol.handshake import SECRET_BYTES
from kvdepot.values import size

log = logging.getLogger(__name__)
sparing_log = Sparing(log)

_STEP = 16 << 20
_LOCK_WAIT_S = 0.3
_USE_WAIT_S = 10.0
"""A successor waits this long for uses of the arena's old contents that may not go on while it serves."""


class Arena:
    """A named file of `size` bytes in a folder in memory, locked by this process as long as it lives."""

    def __init__(self, folder: Path, name: str, size: int, boot: bytes) -> None:
        """Create the file, or take over the one that a dead server left.

        Raises ArenaError if a running server owns it, it is not ours, it or the folder is too small, or the folder
        cannot be used (shm.check_folder).
        """
        shm.check_folder(folder)
        if size < HEADER_BYTES + mmap.PAGESIZE + CHUNKS_OFFSET + mmap.PAGESIZE:  # header, records, one chunk
            raise ArenaError(f"an arena of {size} bytes cannot hold a chunk; raise --arena-gib")
        self.name = name
        self.size = size
        self.path = shm.path_of(folder, name)
        self.secret = os.urandom(SECRET_BYTES)
        """Proves to clients that this server can write the arena (protocol/handshake.py)."""
        self.taken_over = False
        self.whole = 0
        """Bytes from the start that the previous server's file still had when we took it over."""
        self.in_use: list[tuple[int, int]] = []
        """Offsets and sizes that clients of the previous server used when we took it over: their copies, or the step of
        an engine that loads within it, may outlive it. Nobody else may get this memory before that has ended."""
        # Linux closes a dead process's descriptors in ascending order, but releases their files in reverse. The lock
        # must become free only after a network card (a tier with RDMA) has stopped its work for us, so the arena's
        # descriptor must have a lower number than any driver's: it is opened first, and must not be duplicated later.
        self._fd = self._open()
        try:
            self.header = self._claim(boot)
            self._map = self._map_whole()
        except BaseException:
            os.close(self._fd)
            raise
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.address = self.bytes.ctypes.data
        shm.advise_huge(self.address, size)
        shm.do_not_fork(self.address, size)
        self.populated = HEADER_BYTES  # bytes from the start that are allocated; written by one thread
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            self.taken_over = True
        except OSError as exc:
            raise ArenaError(f"arena {self.path} cannot be created: {exc.strerror}") from exc
        return shm.open_shared(self.path.parent, self.name)

    def _claim(self, boot: bytes) -> ArenaHeader:
        """Lock the file, give it its size, and write and return its header."""
        # A client that checks whether we live locks it for an instant.
        if not _becomes(lambda: locks.lock(self._fd), _LOCK_WAIT_S):
            raise ArenaError(f"arena {self.path} is in use by another kvdepot server; choose another --arena-name")
        found = ArenaHeader.read(self._fd, self.path) if self.taken_over else None
        os.fchmod(self._fd, 0o600)
        old = os.fstat(self._fd).st_blocks * 512
        folder = self.path.parent
        room = free_bytes(folder) + old
        if self.size > room:
            if not self.taken_over:
                self.path.unlink(missing_ok=True)
            raise ArenaError(
                f"an arena of {size(self.size)} does not fit in {folder}, which has {size(room)} free; lower "
                f"--arena-gib, enlarge {folder}, or choose another --arena-dir"
            )
        if found is None:
            os.ftruncate(self._fd, 0)  # a server died before it had written the header: trust none of the contents
            os.ftruncate(self._fd, self.size)
            pages = -(-self.size // ARENA_BYTES_A_SLOT * SLOT_BYTES // mmap.PAGESIZE)  # of the table of records
            return self._write_header(ArenaHeader(self.size, pages * mmap.PAGESIZE, boot))
        self.whole = min(found.size, os.fstat(self._fd).st_size)
        if self.size < found.chunks_start + mmap.PAGESIZE or self.whole < found.chunks_start:
            raise ArenaError(
                f"{self.path} is truncated, or the requested size is too small for its contents "
                f"({self.whole} bytes, {self.size} requested): raise --arena-gib or remove the file"
            )
        # In case we die before `settle`, the header gives the size of the old contents. Whoever begins a use now finds
        # our boot id, and ends it at once (arena_view.py).
        header = self._write_header(ArenaHeader(min(self.whole, self.size), found.table_bytes, boot))
        if not _becomes(lambda: self._find_uses(found), _USE_WAIT_S):
            # Whoever stopped in the middle of a copy may go on at any time, so the file cannot be taken over.
            log.warning("a client hangs while it copies to or from %s: starting with an empty arena", self.path)
            self.path.unlink(missing_ok=True)
            self.taken_over, self.in_use = False, []
            unused, self._fd = self._fd, self._open()
            os.close(unused)
            return self._claim(boot)
        os.ftruncate(self._fd, self.size)
        return header

    def _find_uses(self, found: ArenaHeader) -> bool:
        """Note the ranges that clients of the previous server use. Returns whether they may be used while we serve."""
        self.in_use = locks.uses(self._fd, found.chunks_start, self.whole)
        return all(start + size <= self.size for start, size in self.in_use)

    def is_used(self, extents: Extents) -> bool:
        return any(locks.uses(self._fd, start, start + size) for start, size in extents)

    def _map_whole(self) -> mmap.mmap:
        try:
            return mmap.mmap(self._fd, self.size)
        except OSError as exc:
            if not self.taken_over:
                self.path.unlink(missing_ok=True)  # just created, and ours: we hold its lock
            raise ArenaError(
                f"an arena of {size(self.size)} cannot be mapped: {exc.strerror}; lower --arena-gib or raise "
                "`ulimit -v`"
            ) from exc

    def _write_header(self, header: ArenaHeader) -> ArenaHeader:
        try:
            os.pwrite(self._fd, self.secret, SECRET_OFFSET)
            self.note_withdrawals(0)
            os.pwrite(self._fd, header.pack(), 0)  # not through the mapping: if memory is full, that raises SIGBUS
        except OSError as exc:
            raise ArenaError(f"arena {self.path} cannot be written: {exc.strerror}") from exc
        return header

    def settle(self) -> None:
        """Set the header's size to the new one, once the old contents have been taken over."""
        self.header = self._write_header(self.header._replace(size=self.size))

    def is_lost(self) -> bool:
        """Whether the name no longer leads to our file, so that new clients cannot find it.

        This cannot be repaired: Linux does not allow a file to be linked again once its last name is gone.
        """
        return self._fd >= 0 and not locks.leads_to(self.path, self._fd)

    def table(self) -> memoryview:
        return memoryview(self._map)[HEADER_BYTES : HEADER_BYTES + self.header.table_bytes]

    def read_table(self) -> bytearray:
        """The contents of the table; reading them allocates no memory for pages that were never written."""
        return self.header.read_table(self._fd)

    def start_populating(self) -> None:
        """Start to allocate the pages in the background, because first touching a page costs 30 times a copy."""
        self._thread = threading.Thread(target=self._populate, name="kvdepot-populate", daemon=True)
        self._thread.start()

    def _populate(self) -> None:
        while self.populated < self.size and not self._stop.is_set():
            step = min(_STEP, self.size - self.populated)
            if shm.populate(self._fd, self.populated, self.address + self.populated, step):
                return  # `ensure` will fail for these pages, too, if they are needed before there is room
            self.populated += step

    def ensure(self, offset: int, size: int) -> bool:
        """Allocate the pages of a range before it is written; False, and a log line, if memory is full. Any thread."""
        if self.is_populated(((offset, size),)):
            return True
        start = offset - offset % mmap.PAGESIZE
        error = shm.populate(self._fd, start, self.address + start, offset + size - start)
        if error:
            why = {errno.ENOMEM: "this machine or control group is out of memory"}.get(error, os.strerror(error))
            if error in (errno.EFAULT, errno.ENOSPC):  # EFAULT: touching the page would raise SIGBUS
                why = f"{self.path.parent} is full"
            advice = "cannot allocate memory for the arena, so what needs it is not stored: %s; make room, or lower %s"
            sparing_log.warning(advice, why, "--arena-gib")
        return not error

    def is_populated(self, extents: Iterable[tuple[int, int]]) -> bool:
        """Whether `ensure` would return at once for all of these, because their pages are allocated. Any thread."""
        return all(start + size <= self.populated for start, size in extents)

    def close(self, remove: bool = True) -> None:
        """Stop populating, remove the file if `remove`, and close it, which releases the lock. May be called twice."""
        if self._fd < 0:
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if remove:
            self.remove()
            with contextlib.suppress(OSError):
                os.pwrite(self._fd, self.header._replace(boot=bytes(8)).pack(), 0)  # no use begins any more
                if not locks.uses(self._fd, 0, self.size):  # engines that have mapped it would keep its memory
                    shm.free(self._fd, self.size)
        os.close(self._fd)
        self._fd = -1

    def note_withdrawals(self, number: int) -> None:
        """Tell engines, by a counter in the header, that chunks which they have found may not be used any more."""
        os.pwrite(self._fd, number.to_bytes(8, "little"), WITHDRAWALS_OFFSET)

    def remove(self) -> None:
        """Remove the file, unless another one has taken its name. It stays locked until `close` or our end."""
        if not self.is_lost():
            self.path.unlink(missing_ok=True)


def _becomes(test: Callable[[], bool], timeout_s: float) -> bool:
    """Call `test` until it is true. Returns whether that was within `timeout_s`. Blocks."""
    deadline = time.monotonic() + timeout_s
    while not (is_true := test()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_true
