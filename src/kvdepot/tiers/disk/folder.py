"""One locked directory of objects: reading, writing, removing and forgetting them. Any thread.

disk/__init__.py says what a crash leaves. Files of others in the directory are neither touched nor counted.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from kvdepot.errors import TierError
from kvdepot.tiers import ABSENT, NAME, Blob, Usage
from kvdepot.tiers.disk.directory import TMP, TRASH, Directory, path_of, prune, spaces_in, transfer
from kvdepot.tiers.disk.ledger import Entry, Ledger
from kvdepot.tiers.disk.space import DiskSpace
from kvdepot.tiers.rules import Rules, owner_of

__all__ = ["Folder"]

_DATE_EVERY_S = 60.0
"""Seconds between two updates of a file's access time: one at each read would cost a journal entry."""
_MOST_TRIMMED = 4096
"""Objects that one call of `enforce` removes, so that the tier's other tasks get the thread again."""
_CLOSE_S = 5.0
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


class Folder:
    """An open directory, locked until `close`. Methods but `close` are called within `directory.call()`."""

    def __init__(self, directory: Directory, ledger: Ledger) -> None:
        self.directory = directory
        self._root = directory.root
        self._tally = directory.tally
        self._ledger = ledger
        self._space = DiskSpace(directory, ledger)
        self._mark = secrets.token_hex(4)
        self._serials = itertools.count()
        self._space.start()

    def __repr__(self) -> str:
        return f"<Folder {self._root} {self.directory.ended or self._ledger!r}>"

    def close(self) -> None:
        """Wait for the calls in progress and release the lock. Raises TierError if a call hangs. Safe to call twice."""
        self.directory.end("closed")
        self._space.counted.set()
        self.directory.drain(_CLOSE_S)
        self._space.join()
        self.directory.release()

    def usage(self) -> Usage:
        self.directory.check_here()
        self._space.retry_discarded()
        ledger, counted = self._ledger, self._space.counted.is_set()
        return Usage(
            len(ledger) if counted else None,
            ledger.used_bytes if counted else None,
            ledger.capacity_bytes,
            self._tally.counts(),
            ledger.used_by_quota(),
            self.directory.free_bytes(),
        )

    def enforce(self, rules: Rules, wall: float) -> bool:
        """As Enforcing.enforce. While objects are being counted, nothing is removed."""
        self._ledger.set_rules(rules)
        return not self._space.counted.is_set() or self._space.trim(_MOST_TRIMMED, wall)

    def find(self, names: Sequence[str]) -> list[bool]:
        return [name in self._ledger for name in names]

    # -- reading

    def read(self, blob: Blob) -> int:
        """As Tier.read."""
        entry = self._ledger.hold(blob.name)
        if entry is None:
            return ABSENT
        try:
            return self._read(blob, entry)
        except FileNotFoundError as exc:
            with self._space.naming(entry.name):
                is_lost = self._ledger.lose(entry)
            if is_lost:  # by nothing that we did
                self._tally("vanished")
                self.directory.failed("read", exc)
            return ABSENT
        except OSError as exc:
            self.directory.failed("read", exc)
            if exc.errno == errno.EIO:  # otherwise it would be found, and fail, forever
                self._remove(entry.name)
            return ABSENT
        finally:
            self._ledger.release(entry)

    def _read(self, blob: Blob, entry: Entry) -> int:
        fd = os.open(path_of(self._root, blob.name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if size > blob.size:
                return size
            now = time.time()
            if abs(now - entry.dated) > _DATE_EVERY_S:
                entry.dated = now
                with contextlib.suppress(OSError):  # a read-only file system can still be read
                    os.utime(fd, (now, entry.born))
            return transfer(os.preadv, fd, blob.buffers)
        finally:
            os.close(fd)

    # -- writing

    def write(self, blob: Blob) -> bool:
        """As Tier.write."""
        size = blob.size
        self._space.retry_discarded()
        if not (self._space.counted.is_set() and size and NAME.fullmatch(blob.name)):
            self._tally("refused")
            return False
        for is_last in (False, True):
            try:
                return self._write(blob, size)
            except OSError as exc:
                self.directory.failed("write", exc)
                if is_last or exc.errno not in _NO_SPACE or not self._space.evict(size, owner_of(blob.name)):
                    break
        return False

    def _write(self, blob: Blob, size: int) -> bool:
        """Raises OSError."""
        now = time.time()
        entry = Entry(name=blob.name, charge=self._space.charge_for(size), dated=now, born=blob.born or now)
        owner = entry.owner
        fits = self._ledger.can_ever_hold(entry.charge, owner)  # otherwise it evicts nothing
        if not fits or not self._space.reserve(entry.charge, owner):
            self._tally("refused")
            return False
        path = self._unused(TMP)
        try:
            more = max(0, self._space.charge_of(self._fill(path, blob, entry)) - entry.charge)
            if more and not self._space.reserve(more, owner):
                self._tally("refused")
                self._space.discard(path, [Entry(owner=owner, charge=entry.charge)])
                return False
            entry.charge += more
            target = path_of(self._root, blob.name)
            with self._space.naming(blob.name):
                self.directory.with_parents(target, partial(os.rename, path, target))
                self._ledger.enter(entry)
        except OSError:
            self._space.discard(path, [Entry(owner=owner, charge=entry.charge)])
            raise
        return True

    def _fill(self, path: str, blob: Blob, entry: Entry) -> os.stat_result:
        """Write a new file; its stat. Its timestamps are those of the entry, for the next start. Raises OSError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = self.directory.with_parents(path, partial(os.open, path, flags, 0o600))
        try:
            if transfer(os.pwritev, fd, blob.buffers) != blob.size:
                raise OSError(errno.EIO, "a write was cut short")
            os.utime(fd, (entry.dated, entry.born))
            return os.fstat(fd)
        finally:
            os.close(fd)

    def _unused(self, directory: str) -> str:
        return f"{self._root}/{directory}/{self._mark}-{next(self._serials)}"

    # -- removing

    def remove(self, names: Sequence[str]) -> None:
        """As Tier.remove. Raises TierError also if the file system refuses."""
        self._space.wait()
        refused = [name for name in names if not self._remove(name)]
        if refused:
            raise TierError(f"{self._root} does not allow removing objects")

    def _remove(self, name: str) -> bool:
        """Whether the object is gone."""
        with self._space.naming(name):
            entry = self._ledger.take(name)
            if entry is not None:
                if not self._space.unlink(entry):
                    return False
                self._ledger.settle(entry)
        return True

    def forget(self, salt: str, space: str) -> int:
        """As Tier.forget. A space goes in one step: if this process is killed, the next start removes the rest."""
        self._space.wait()
        trash: dict[str, str] = {}
        kept: set[str] = set()
        with self._space.frozen():
            for place, path in spaces_in(self._root, salt, space):
                target = self._unused(TRASH)
                try:
                    self.directory.with_parents(target, partial(os.rename, path, target))
                except OSError as exc:
                    kept.add(place)
                    self.directory.failed("forget", exc)
                    continue
                trash[place] = target
                prune(self._root, path)
            gone: dict[str, list[Entry]] = defaultdict(list)
            for entry in self._ledger.forget(salt, space, kept):
                place = entry.name[:65]
                if place in trash:
                    gone[place].append(entry)
                else:  # others have removed its directory
                    self._ledger.settle(entry)
        for place, target in trash.items():
            self._space.discard(target, gone[place])
        if kept:
            raise TierError(f"{self._root} does not allow removing objects")
        return sum(map(len, gone.values()))
