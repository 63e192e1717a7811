"""A client's view of an arena, through which it copies its KV: a worker of an engine, the library, SGLang's storage.

The server answers a store, a retrieve or a comparison with a `wire.Placement`: extents of this file. The client copies
between them and its own memory within `use`, and then tells the server with `wire.Complete`. No other process copies.

Invariant: no byte is copied for a server that another has replaced. A client records the ranges that it is about to
`use`, and then reads the boot id; a successor writes its own boot id, and then looks which ranges are in use. So a
client that finds the boot id of the server that has placed its chunks may copy until it ends the use: until then, the
successor gives these ranges to nobody (`Arena.in_use`). The use of a killed client has ended; the work of its GPU may
go on for a moment, for which a server gives what the client was storing to nobody.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvdepot import locks
from kvdepot.errors import ProtocolError, Unavailable
from kvdepot.memory import shm
from kvdepot.memory.arena_header import MAGIC, WITHDRAWALS_OFFSET, ArenaHeader

_MOST_RANGES = 256
"""The most ranges of one use; if there are more, the use covers all bytes from the first to the last."""

_views: weakref.WeakSet[ArenaView] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for view in list(_views):
        view.leave()


os.register_at_fork(after_in_child=_leave_to_parent)


class ArenaView:
    """The arena of one run of a server, mapped. Any thread."""

    def __init__(self, folder: Path, name: str, boot: bytes, access: int = mmap.ACCESS_WRITE) -> None:
        """access: ACCESS_READ or ACCESS_WRITE of `mmap`. Raises ArenaError if it is not visible here or no arena,
        Unavailable if it is another server's, OSError if it cannot be mapped."""
        self._fd = shm.open_shared(folder, name)
        try:
            header = ArenaHeader.read(self._fd, name)
            if header is None or header.boot != boot:
                raise Unavailable(f"arena {name} belongs to another server, or to none")
            self._map = mmap.mmap(self._fd, os.fstat(self._fd).st_size, access=access)
        except BaseException:
            os.close(self._fd)
            raise
        self.key = name, boot
        self._chunks = header.chunks_start
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        shm.advise_huge(self.bytes.ctypes.data, len(self.bytes))
        self._close = weakref.finalize(self, os.close, self._fd)  # the mapping lives as long as its last array
        self._close.atexit = False  # a thread may copy until the process has ended
        _views.add(self)
        self._uses: set[int] = set()  # descriptors of uses in progress

    def leave(self) -> None:
        """Close the file, and with it end all uses: a forked child's copies of them would outlive the parent's."""
        while self._uses:
            os.close(self._uses.pop())
        self._close()
        self._fd = -1

    def withdrawals(self) -> int:
        """The number of times that the server has hidden chunks from those who had found them."""
        return int.from_bytes(self.bytes[WITHDRAWALS_OFFSET : WITHDRAWALS_OFFSET + 8].tobytes(), "little")

    def is_freed(self) -> bool:
        """Whether its server has removed it and freed its memory, which nobody used any more."""
        if self._fd < 0 or os.fstat(self._fd).st_nlink:
            return False  # a file with a name may be a server's that is about to write its header
        return not any(os.pread(self._fd, len(MAGIC), 0))

    @contextlib.contextmanager
    def use(self, extents: Iterable[tuple[int, int]]) -> Iterator[npt.NDArray[np.uint8]]:
        """Mark these extents (offset and size in bytes) as used within, and yield the arena's bytes. Does not block.

        Raises ProtocolError for extents outside the arena's chunks, and Unavailable if the server has been replaced, or
        where the kernel has no locks of open files.
        """
        extents = list(extents)
        for start, size in extents:
            if not (self._chunks <= start < start + size <= len(self.bytes)):
                raise ProtocolError(f"the server placed {size} bytes at offset {start}, outside the arena's chunks")
        fd = -1
        try:
            try:
                # Of an open file of its own: uses by several threads may overlap.
                fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
                self._uses.add(fd)
                for start, end in _joined(extents):
                    locks.use(fd, start, end - start)
            except OSError as exc:
                raise Unavailable(f"the use of the arena cannot be recorded: {exc.strerror}") from exc
            header = ArenaHeader.read(fd, self.key[0])
            if header is None or header.boot != self.key[1]:
                raise Unavailable("the server that placed these chunks has been replaced")
            yield self.bytes
        finally:
            if fd in self._uses:  # not in a forked child
                self._uses.discard(fd)
                os.close(fd)


def _joined(extents: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges (start, end) that extents make up."""
    ranges: list[tuple[int, int]] = []
    for start, size in sorted(extents):
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = ranges[-1][0], max(ranges[-1][1], start + size)
        else:
            ranges.append((start, start + size))
    return ranges if len(ranges) <= _MOST_RANGES else [(ranges[0][0], ranges[-1][1])]
