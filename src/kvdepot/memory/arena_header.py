"""The header of an arena's file, and a client's check whether the arena's server lives.

Used by memory/arena.py, cli/check.py and the client, so it imports little. Nothing here maps the arena.

    page 0               the header
    table_bytes          one record per sealed shard (memory/records.py), for the next server
    64 bytes             see CHUNKS_OFFSET
    the rest             chunks, allocated by memory/allocator.py

    header, offset  0, 8 bytes    magic
            offset  8, uint32     format version
            offset 12, uint32     CRC-32 of the header with zeros here
            offset 16, uint64     file size in bytes
            offset 24, uint64     table_bytes
            offset 32, 8 bytes    boot id of the server that owns it now
            offset 64, 32 bytes   secret of that server, new with each boot id; not covered by the CRC (handshake.py)
            offset 96, uint64     how often that server has hidden chunks from those who had found them; as the secret
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from kvdepot import locks
from kvdepot.errors import ArenaError, Unavailable
from kvdepot.memory import shm
from kvdepot.protocol.handshake import SECRET_BYTES

HEADER_BYTES = mmap.PAGESIZE
CHUNKS_OFFSET = 64
"""Offset of the chunks from the start of a page; the same as that of large tensors that torch allocates on CPUs.

A copy to an address slightly above the source, modulo 4096, is 4 times as slow (4K aliasing: the CPU takes each load
for a dependency of the preceding store); with equal offsets both directions are fast.
"""
MAGIC = b"kvdepot\0"
VERSION = 4
_HEADER = struct.Struct("<8sIIQQ8s")
SECRET_OFFSET, WITHDRAWALS_OFFSET = 64, 96


class ArenaHeader(NamedTuple):
    size: int
    table_bytes: int
    boot: bytes

    def pack(self, version: int = VERSION) -> bytes:
        return _HEADER.pack(MAGIC, version, crc32(_HEADER.pack(MAGIC, version, 0, *self)), *self)

    @classmethod
    def read(cls, fd: int, path: object) -> ArenaHeader | None:
        """Read the header of an arena's file; None if none was written yet. Raises ArenaError if it is not valid."""
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
            raise ArenaError(f"the header of {path} is damaged: remove the file (its chunks are recomputed on demand)")
        return header

    def read_table(self, fd: int) -> bytearray:
        """The contents of the table, up to the file's end; allocates no memory for pages that were never written."""
        data = bytearray(self.table_bytes)
        done = 0
        with memoryview(data) as left:
            while read := os.preadv(fd, [left[done:]], HEADER_BYTES + done):  # Linux reads at most 2 GiB at once
                done += read
        del data[done:]
        return data

    @property
    def chunks_start(self) -> int:
        return HEADER_BYTES + self.table_bytes + CHUNKS_OFFSET


class Watch:
    """A client's view of an arena: tells whether the server with one boot id lives. secret: that server's."""

    def __init__(self, folder: Path, name: str, boot: bytes) -> None:
        """Raises ArenaError if the file is not visible here or others can open it, Unavailable if it is not an arena
        owned by a running server with this boot id, Busy if there are no free descriptors."""
        self._boot = boot
        self._fd = shm.open_shared(folder, name, os.O_RDONLY)
        try:
            if os.fstat(self._fd).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ArenaError(f"other users may open {folder / name}")
            head = os.pread(self._fd, SECRET_OFFSET + SECRET_BYTES, 0)
            if not head.startswith(MAGIC) or len(head) < SECRET_OFFSET + SECRET_BYTES:
                raise Unavailable(f"{folder / name} is not an arena")
            self.secret = head[SECRET_OFFSET:]
            if head[: _HEADER.size][-len(boot) :] != boot or not locks.is_locked(self._fd):
                raise Unavailable(f"arena {name} belongs to another server, or to none")
        except BaseException:
            self.close()
            raise

    def is_gone(self) -> bool:
        """Whether that server has ended: its lock is free, or a server with another boot id holds it."""
        if self._fd < 0 or not locks.is_locked(self._fd):
            return True
        head = os.pread(self._fd, _HEADER.size, 0)
        return head[:8] == MAGIC and head[-8:] != self._boot and len(head) == _HEADER.size

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
