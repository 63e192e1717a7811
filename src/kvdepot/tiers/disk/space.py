"""The bounds of a disk tier: counts the objects at the start, reserves bytes, evicts, and removes files. Any thread.

Invariant: the bytes that the file system allocates to our files never exceed the ledger's capacity; this includes
half-written files, and removed ones that are still being read. Directories are not counted.

Locks, in this order: `_evicting` from the choice of a victim until its file is removed, `naming(name)` while a file of
this name is created or removed, then the ledger's, under which there is no system call.
"""

# ruff: noqa: PTH108, PTH208

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator

from kvdepot.errors import TierError
from kvdepot.tiers.disk.directory import LEFT, Directory, objects_in, path_of, prune, remove
from kvdepot.tiers.disk.ledger import Entry, Ledger

__all__ = ["DiskSpace"]

log = logging.getLogger(__name__)

_PATIENCE_S = 0.1
"""A directory that is counted within this time takes writes as soon as it is opened."""


class DiskSpace:
    """The bound of one directory."""

    def __init__(self, directory: Directory, ledger: Ledger) -> None:
        self.directory = directory
        self.ledger = ledger
        self.counted = threading.Event()
        """Set once the objects are counted; until then nothing is written: what is not counted cannot be bounded."""
        self._tally = directory.tally
        self._evicting = threading.Lock()
        self._naming = [threading.Lock() for _ in range(16)]
        self._litter: dict[str, list[Entry]] = {}
        """Paths to remove, and the entries that are settled when that is done."""
        self._counting = threading.Thread(target=self._run, name="kvdepot-disk-count", daemon=True)

    def naming(self, name: str) -> threading.Lock:
        """The lock under which files of this name are created and removed."""
        return self._naming[hash(name) % len(self._naming)]

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Meanwhile no object is created or removed by others."""
        with contextlib.ExitStack() as stack:
            for lock in (self._evicting, *self._naming):
                stack.enter_context(lock)
            yield

    # -- the start

    def start(self) -> None:
        """Begin to count the objects; blocks briefly."""
        self._counting.start()
        self.counted.wait(_PATIENCE_S)

    def wait(self) -> None:
        """Block until all objects are counted. Raises TierError if the directory's use has ended."""
        self.counted.wait()
        self.directory.check()

    def join(self) -> None:
        """Wait for the counting thread, after the end of the directory's use."""
        self.counted.set()
        self._counting.join()

    def _run(self) -> None:
        try:
            self._count()
        except BaseException as exc:  # noqa: BLE001 - the top of a thread: calls of the tier wait for it
            why = str(exc) if isinstance(exc, OSError | TierError) else repr(exc)
            log.warning("cannot count the objects in %s: %s", self.directory.root, why)
            self.directory.end(f"cannot count its objects: {why}")
        self.counted.set()

    def _count(self) -> None:
        """Remove what an earlier server left half done, count objects, and evict down to the capacity and the caps."""
        root = self.directory.root
        for left in LEFT:
            with contextlib.suppress(FileNotFoundError):
                self._tally("swept", len(os.listdir(f"{root}/{left}")))
                remove(f"{root}/{left}")
        for found in objects_in(root):
            for name, info in found:
                entry = Entry(name=name, charge=self.charge_of(info), dated=info.st_atime, born=info.st_mtime)
                self.ledger.add_found(entry)
            if self.directory.ended is not None:
                break
        self.ledger.rank()
        self.trim(self.ledger.used_bytes, 0.0)  # as many as there are; none by age

    # -- bytes

    def charge_of(self, info: os.stat_result) -> int:
        """Bytes that a file takes."""
        return self.charge_for(info.st_blocks * 512)

    def charge_for(self, size: int) -> int:
        """Bytes that a file of `size` bytes will take: its blocks, and the blocks that map them.

        The inode maps the first few blocks; after that, one block maps 256 or more.
        """
        block = self.directory.block_bytes
        blocks = -(-size // block)
        return (blocks + (blocks // 256 + 1 if blocks > 4 else 0)) * block

    def reserve(self, size: int, owner: str) -> bool:
        """Reserve bytes for an owner, evicting objects while there are too few; whether that succeeded."""
        while self.directory.ended is None:
            if self.ledger.reserve(size, owner):
                return True
            if not self._drop(lambda: self.ledger.victim(owner, size)):
                return False
        return False

    def evict(self, size: int, owner: str) -> bool:
        """Evict at least `size` bytes for an owner; whether that many could be.

        For a file system that is full below our capacity: otherwise what is stored would stay forever.
        """
        while size > 0:
            if not (freed := self._drop(lambda: self.ledger.victim(owner, 0))):
                return False
            size -= freed
        return True

    def trim(self, most: int, wall: float) -> bool:
        """Remove up to `most` objects that have expired at `wall`, or exceed a cap or the capacity.

        Returns whether there may be more. What cannot be removed now, because it is being read or the file system
        refuses, stays until the next call.
        """
        for pick, is_expired in ((lambda: self.ledger.expired(wall), True), (self.ledger.excess, False)):
            while self._drop(pick, is_expired):
                most -= 1
                if most <= 0 or self.directory.ended is not None:
                    return self.directory.ended is None
        return False

    def _drop(self, pick: Callable[[], Entry | None], is_expired: bool = False) -> int:
        """Remove the object that `pick` takes out of the ledger; bytes freed."""
        with self._evicting:
            entry = pick()
            if entry is None:
                return 0
            with self.naming(entry.name):
                is_replaced = entry.name in self.ledger
                if not is_replaced and not self.unlink(entry):
                    return 0
                self.ledger.settle(entry, evicted=not is_expired)
            self._tally("expired" if is_expired else "evicted")
            return entry.charge

    # -- removing files

    def unlink(self, entry: Entry) -> bool:
        """Remove the file of an entry that was taken out, and the directories that become empty; whether it is gone.

        If not, the entry is an object again.
        """
        path = path_of(self.directory.root, entry.name)
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as exc:
            self.ledger.keep(entry)
            self.directory.failed("remove", exc)
            return False
        prune(self.directory.root, path)
        return True

    def discard(self, path: str, entries: list[Entry]) -> None:
        """Remove what is no longer an object, now or as soon as possible; the entries are counted until then."""
        self._litter[path] = entries
        self.retry_discarded()

    def retry_discarded(self) -> None:
        """Remove what could not be removed before."""
        for path in list(self._litter):
            entries = self._litter.pop(path, None)
            if entries is None:
                continue  # another thread removes it
            try:
                remove(path)
            except FileNotFoundError:
                pass
            except OSError as exc:
                self._litter[path] = entries
                self.directory.failed("remove", exc)
                continue
            for entry in entries:
                self.ledger.settle(entry)
