"""An arena's file as others than its server see it: the header that says what it is, and whether its server lives.

Used by memory/arena.py, cli/check_arena.py and the client, which imports no more than it must. The one law: nothing
here needs the arena's memory.

    page 0               the header: what this file is
    table_bytes          one record a sealed shard (memory/records.py): what the next server needs to know
    64 bytes             see CHUNKS_OFFSET
    the rest             chunks; `memory/allocator.py` decides where

    header, offset  0, 8 bytes    magic
            offset  8, uint32     format version
            offset 12, uint32     CRC-32 of the header with zeros here
            offset 16, uint64     file size in bytes
            offset 24, uint64     table_bytes
            offset 32, 8 bytes    boot id of the server that owns it now
            offset 64, 32 bytes   secret of that server, new with each boot id; not part of the sum (handshake.py)
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from typing import NamedTuple
from zlib import crc32

from kvdepot import locks
from kvdepot.errors import ArenaError, LayoutError, Unavailable
from kvdepot.memory import shm
from kvdepot.protocol.handshake import SECRET_BYTES

__all__ = ["CHUNKS_OFFSET", "HEADER_BYTES", "MAGIC", "SECRET_OFFSET", "Header", "Watch"]

HEADER_BYTES = mmap.PAGESIZE
CHUNKS_OFFSET = 64
"""How far behind a page's start chunks begin: as far as KV does in the files that torch makes.

Copying to an address a little ahead of the source modulo 4096 is 4 times as slow (the processor takes each load
for one of the store before it); with equal offsets neither direction is.
"""
MAGIC = shm.ARENA_MAGIC
VERSION = 2
_HEADER = struct.Struct("<8sIIQQ8s")
SECRET_OFFSET = 64


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
            raise ArenaError(f"{path} is not a kvdepot arena; remove it or choose another --arena-name")
        if version != VERSION:
            raise ArenaError(
                f"{path} was written in arena format {version}, this kvdepot has format {VERSION}: start the version "
                f"that wrote it, or remove the file (its chunks are recomputed on demand)"
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

    def read_table(self, fd: int) -> bytearray:
        """What the table holds, up to where the file ends; pages that were never written are given no memory."""
        data = bytearray(self.table_bytes)
        done = 0
        with memoryview(data) as left:
            while read := os.preadv(fd, [left[done:]], HEADER_BYTES + done):  # Linux reads 2 GiB at once at most
                done += read
        del data[done:]
        return data

    @property
    def chunks_start(self) -> int:
        """Where chunks begin."""
        return HEADER_BYTES + self.table_bytes + CHUNKS_OFFSET


class Watch:
    """A client's view of an arena: tells whether the server of one boot still lives.

    secret: what that server keeps there, where only its own user can read it.
    """

    def __init__(self, name: str, boot: bytes) -> None:
        """Raises LayoutError when the file cannot be seen from here or others may read it, Unavailable when it is no
        arena that a living server of this boot owns, Busy without descriptors."""
        self._boot = boot
        self._fd = shm.open_shared(name, os.O_RDONLY)
        try:
            if os.fstat(self._fd).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise LayoutError(f"other users may open shared memory {name}")
            head = os.pread(self._fd, SECRET_OFFSET + SECRET_BYTES, 0)
            if head[: len(MAGIC)] != MAGIC or len(head) < SECRET_OFFSET + SECRET_BYTES:
                raise Unavailable(f"shared memory {name} is not an arena")
            self.secret = head[SECRET_OFFSET:]
            if head[: _HEADER.size][-len(boot) :] != boot or not locks.is_locked(self._fd):
                raise Unavailable(f"arena {name} belongs to another server, or to none")
        except BaseException:
            self.close()
            raise

    def is_gone(self) -> bool:
        """True once that server can touch no memory any more: its lock is free, or another boot holds it."""
        if self._fd < 0 or not locks.is_locked(self._fd):
            return True
        head = os.pread(self._fd, _HEADER.size, 0)
        return head[:8] == MAGIC and head[-8:] != self._boot and len(head) == _HEADER.size

    def close(self) -> None:
        """Safe twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
