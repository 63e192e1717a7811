"""The memory that holds the chunks: one named shared-memory file. Made by the server, written by mover.py.

The one law: never a byte larger than asked, and no page is touched that the kernel has not given us.

    page 0               the header: what this file is
    table_bytes          one record a sealed shard (records.py): what the next server needs to know
    64 bytes             see CHUNKS_OFFSET
    the rest             chunks; `space.py` decides where

    header, offset  0, 8 bytes    magic
            offset  8, uint32     format version
            offset 12, uint32     CRC-32 of the header with zeros here
            offset 16, uint64     file size in bytes
            offset 24, uint64     table_bytes
            offset 32, 8 bytes    boot id of the server that owns it now

A server that finds a file of its name takes it over with all that is in it, once the lock on it is free. It refuses
a file it does not understand: removing somebody's data is the user's to decide.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from typing import NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from kvdepot import shm
from kvdepot.errors import ArenaError, LayoutError
from kvdepot.records import ARENA_BYTES_A_SLOT, SLOT_BYTES

__all__ = ["CHUNKS_OFFSET", "HEADER_BYTES", "MAGIC", "Arena", "Header", "Watch", "smallest_arena"]

HEADER_BYTES = mmap.PAGESIZE
CHUNKS_OFFSET = 64
"""How far behind a page's start chunks begin: as far as KV does in the files that torch makes.

Copying to an address a little ahead of the source modulo 4096 is 4 times as slow (the processor takes each load
for one of the store before it); with equal offsets neither direction is.
"""
MAGIC = shm.ARENA_MAGIC
VERSION = 2
_HEADER = struct.Struct("<8sIIQQ8s")
_STEP = 16 << 20
_LOCK_WAIT_S = 0.3


def _table_bytes(size: int) -> int:
    """Bytes of the table in an arena of `size` bytes: whole pages."""
    return -(-size // ARENA_BYTES_A_SLOT * SLOT_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE


def smallest_arena() -> int:
    """Bytes of an arena that holds a chunk of one page."""
    return HEADER_BYTES + mmap.PAGESIZE + CHUNKS_OFFSET + mmap.PAGESIZE


class Header(NamedTuple):
    """The first bytes of an arena."""

    size: int
    table_bytes: int
    boot: bytes

    def pack(self) -> bytes:
        values = self.size, self.table_bytes, self.boot
        return _HEADER.pack(MAGIC, VERSION, crc32(_HEADER.pack(MAGIC, VERSION, 0, *values)), *values)

    @classmethod
    def read(cls, fd: int, path: object) -> Header | None:
        """The header of an arena's file; None where nobody has begun to write one. Raises ArenaError."""
        data = os.pread(fd, _HEADER.size, 0)
        if not data.strip(b"\0"):
            return None
        magic, version, _, size, table_bytes, boot = _HEADER.unpack(data.ljust(_HEADER.size, b"\0"))
        if magic != MAGIC:
            raise ArenaError(f"{path} is no kvdepot arena; remove it or choose another --arena-name")
        if version != VERSION:
            raise ArenaError(
                f"{path} was written in arena format {version}, this kvdepot has format {VERSION}: start the version "
                f"that wrote it, or remove the file (its chunks are recomputed when they are asked for)"
            )
        header = cls(size, table_bytes, boot)
        if header.pack() != data:
            raise ArenaError(
                f"the header of {path} is damaged: remove the file (`kvdepot check --fix` does; its chunks are "
                "recomputed when they are asked for)"
            )
        return header

    @staticmethod
    def is_damaged(fd: int) -> bool:
        """Whether this is an arena of our format with something wrong in its header."""
        return os.pread(fd, 12, 0) == MAGIC + VERSION.to_bytes(4, "little")

    @property
    def chunks_start(self) -> int:
        """Where chunks begin."""
        return HEADER_BYTES + self.table_bytes + CHUNKS_OFFSET


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
        self.whole = 0
        """Bytes from the start that the last server's file still had when we took it over."""
        # Linux closes a dead process's descriptors from the lowest number up, and ends their files the other way round.
        # So the lock is free only when every driver has ended what it did for us, as long as the file is open under no
        # number higher than a driver's: it is opened at the start, and must not be duplicated later.
        self._fd = self._open()
        try:
            self.header = self._claim(boot)
            self._map = mmap.mmap(self._fd, size)
        except BaseException:
            os.close(self._fd)
            raise
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.address = self.bytes.ctypes.data
        shm.advise_huge(self.address, size)
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

    def _claim(self, boot: bytes) -> Header:
        """Lock the file, bring it to its size, and say what its header must be."""
        deadline = time.monotonic() + _LOCK_WAIT_S  # a client that looks whether we live holds it for an instant
        while not shm.lock(self._fd):
            if time.monotonic() < deadline:
                time.sleep(0.01)
                continue
            raise ArenaError(f"arena {self.path} is in use by another kvdepot server; choose another --arena-name")
        found = Header.read(self._fd, self.path) if self.taken_over else None
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
        if found is None:
            os.ftruncate(self._fd, 0)  # a server died before it had begun: nothing in there is to be trusted
            os.ftruncate(self._fd, self.size)
            return self._write_header(Header(self.size, _table_bytes(self.size), boot))
        self.whole = min(found.size, os.fstat(self._fd).st_size)
        if self.size < found.chunks_start + mmap.PAGESIZE or self.whole < found.chunks_start:
            raise ArenaError(
                f"{self.path} is cut off or too small for what is in it ({self.whole} bytes, {self.size} asked for): "
                "raise --arena-gib or remove the file"
            )
        os.fchmod(self._fd, 0o600)
        # Until `settle`, the header says how far the bytes in there are the old ones: should we die before.
        header = self._write_header(found._replace(size=min(self.whole, self.size), boot=boot))
        os.ftruncate(self._fd, self.size)
        return header

    def _write_header(self, header: Header) -> Header:
        try:
            os.pwrite(self._fd, header.pack(), 0)  # not through the mapping: without memory that would be a SIGBUS
        except OSError as exc:
            raise ArenaError(f"arena {self.path} cannot be written: {exc.strerror}") from exc
        return header

    def settle(self) -> None:
        """What was in the file has been taken over: from now on all of it counts."""
        self.header = self._write_header(self.header._replace(size=self.size))

    def table(self) -> memoryview:
        """The memory of the table of records."""
        return memoryview(self._map)[HEADER_BYTES : HEADER_BYTES + self.header.table_bytes]

    def read_table(self) -> bytes:
        """What the table holds, read so that pages never written are given no memory."""
        return os.pread(self._fd, self.header.table_bytes, HEADER_BYTES)

    def ensure_table(self, offset: int, size: int) -> bool:
        """`ensure` for a range of the table."""
        return self.ensure(HEADER_BYTES + offset, size)

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
        """Raises LayoutError when the file cannot be seen from here, Busy without descriptors."""
        self._boot = boot
        self._fd = shm.open_shared(name, os.O_RDONLY)

    def is_gone(self) -> bool:
        """True once that server can touch no memory any more: its lock is free, or another boot holds it."""
        if self._fd < 0 or not shm.is_locked(self._fd):
            return True
        head = os.pread(self._fd, _HEADER.size, 0)
        return head[:8] == MAGIC and head[-8:] != self._boot and len(head) == _HEADER.size

    def close(self) -> None:
        """Safe twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
