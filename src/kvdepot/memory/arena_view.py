"""A client's view of an arena, through which it copies chunks itself (devices/by_client.py).

Invariant: no byte is copied for a server that another has replaced. The successor waits until nobody `use`s the file,
writes its own boot id, and only then gives the file's memory to others; so a client that uses it and finds the boot id
of the server that has placed its chunks may copy until it ends the use. A client that is killed uses it no more.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvdepot import locks
from kvdepot.errors import Unavailable
from kvdepot.memory import shm
from kvdepot.memory.arena_header import WITHDRAWALS_OFFSET, ArenaHeader

_USE_S = 5.0


_views: weakref.WeakSet[ArenaView] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for view in list(_views):
        view.leave()


os.register_at_fork(after_in_child=_leave_to_parent)


class ArenaView:
    """The arena of one run of a server, mapped. Any thread."""

    def __init__(self, name: str, boot: bytes, access: int = mmap.ACCESS_WRITE) -> None:
        """access: ACCESS_READ or ACCESS_WRITE of `mmap`. Raises LayoutError if it is not visible here, ArenaError or
        Unavailable if it is another server's."""
        self._fd = shm.open_shared(name)
        try:
            header = ArenaHeader.read(self._fd, name)
            if header is None or header.boot != boot:
                raise Unavailable(f"arena {name} belongs to another server, or to none")
            self._map = mmap.mmap(self._fd, os.fstat(self._fd).st_size, access=access)
        except BaseException:
            os.close(self._fd)
            raise
        self.key = name, boot
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        shm.advise_huge(self.bytes.ctypes.data, len(self.bytes))
        self._close = weakref.finalize(self, os.close, self._fd)  # the mapping goes with its last array
        self._close.atexit = False  # a thread may copy until the process has ended
        _views.add(self)
        self._lock = threading.Lock()
        self._users = 0

    def leave(self) -> None:
        """Close the file, and with it end any use: a forked child's copy of it would outlive the parent's."""
        self._close()
        self._fd = -1

    def ensure(self, offset: int, size: int) -> bool:
        """As copier.Memory: a server places nothing where its file has no memory."""
        return True

    def withdrawals(self) -> int:
        """The number of times that the server has hidden chunks from those who had found them."""
        return int.from_bytes(self.bytes[WITHDRAWALS_OFFSET : WITHDRAWALS_OFFSET + 8].tobytes(), "little")

    def _begin_use(self, timeout_s: float) -> None:
        try:
            if not locks.use(self._fd, timeout_s):
                raise Unavailable("the arena is being taken over by another server, which hangs")
        except OSError as exc:
            raise Unavailable(f"this kernel has no locks of open files (F_OFD_SETLK): {exc.strerror}") from exc

    @contextlib.contextmanager
    def use(self, timeout_s: float = _USE_S) -> Iterator[npt.NDArray[np.uint8]]:
        """Copy within: the arena's bytes. Blocks for `timeout_s` while another server takes the arena over. Raises
        Unavailable if the server has been replaced, or where the kernel has no locks of open files."""
        with self._lock:
            if not self._users:
                self._begin_use(timeout_s)
            self._users += 1
        try:
            header = ArenaHeader.read(self._fd, self.key[0])
            if header is None or header.boot != self.key[1]:
                raise Unavailable("the server that placed these chunks has been replaced")
            yield self.bytes
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    locks.end_use(self._fd)
