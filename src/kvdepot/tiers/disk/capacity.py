"""The bounds of a disk tier: reserves bytes for files, evicts objects, and removes files. Any thread.

Invariant: the bytes that the file system allocates to our files never exceed the ledger's capacity; this includes
half-written files, and removed ones that are still being read. Directories are not counted.

Locks, in this order: `_evicting` from the choice of a victim until its file is removed, `naming(name)` while a file of
this name is created or removed, the quarantine's, then the ledger's, under which there is no system call.
"""

# ruff: noqa: PTH108

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

from kvdepot.tiers.disk.claim import Claim
from kvdepot.tiers.disk.entry import Entry
from kvdepot.tiers.disk.layout import path_of, prune, remove
from kvdepot.tiers.disk.ledger import Ledger

__all__ = ["Capacity"]


class Capacity:
    """The bound of one directory."""

    def __init__(self, claim: Claim, ledger: Ledger) -> None:
        self.claim = claim
        self.ledger = ledger
        self._tally = claim.tally
        self._evicting = threading.Lock()
        self._naming = [threading.Lock() for _ in range(16)]
        self._litter: dict[str, list[Entry]] = {}
        """Paths to remove, and the entries that are settled when that is done."""

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

    # -- bytes

    def charge_of(self, info: os.stat_result) -> int:
        """Bytes that a file takes."""
        return self.charge_for(info.st_blocks * 512)

    def charge_for(self, size: int) -> int:
        """Bytes that a file of `size` bytes will take: its blocks, and the blocks that map them.

        The inode maps the first few blocks; after that, one block maps 256 or more.
        """
        block = self.claim.block_bytes
        blocks = -(-size // block)
        return (blocks + (blocks // 256 + 1 if blocks > 4 else 0)) * block

    def reserve(self, size: int, owner: str) -> bool:
        """Reserve bytes for an owner, evicting objects while there are too few; whether that succeeded."""
        while self.claim.ended is None:
            if self.ledger.reserve(size, owner):
                return True
            if not self._drop(lambda: self.ledger.victim(owner, size)):
                return False
        return False

    def evict(self, size: int, owner: str) -> bool:
        """Evict at least `size` bytes for an owner; whether there were as many.

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
        for pick, by_age in ((lambda: self.ledger.expired(wall), True), (self.ledger.excess, False)):
            while self._drop(pick, by_age):
                most -= 1
                if most <= 0 or self.claim.ended is not None:
                    return self.claim.ended is None
        return False

    def _drop(self, pick: Callable[[], Entry | None], by_age: bool = False) -> int:
        """Remove the object that `pick` takes out of the ledger; bytes freed. by_age: nobody needs its space."""
        with self._evicting:
            entry = pick()
            if entry is None:
                return 0
            with self.naming(entry.name):
                is_replaced = entry.name in self.ledger
                if not is_replaced and not self.unlink(entry):
                    return 0
                self.ledger.settle(entry, evicted=not by_age)
            if by_age:
                self._tally("expired")
            else:
                self._tally("evicted")
            return entry.charge

    # -- removing files

    def unlink(self, entry: Entry) -> bool:
        """Remove the file of an entry that was taken out, and the directories that become empty; whether it is gone.

        If not, the entry is an object again.
        """
        path = path_of(self.claim.root, entry.name)
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as exc:
            self.ledger.keep(entry)
            self.claim.failed("remove", exc)
            return False
        prune(self.claim.root, path)
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
                self.claim.failed("remove", exc)
                continue
            for entry in entries:
                self.ledger.settle(entry)
