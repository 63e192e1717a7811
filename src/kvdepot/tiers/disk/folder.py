"""One locked directory of objects: reading, writing, removing and forgetting them. Any thread.

Nothing is synced: this is a cache. A killed process loses nothing that it has renamed into place; a power failure may
leave files that are empty, short or wrong, which their header and checksum show (worker.py). Files of others in the
directory are neither touched nor counted.
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
from pathlib import Path

from kvdepot.errors import TierError
from kvdepot.tiers import ABSENT, NAME, Blob, Usage
from kvdepot.tiers.disk.capacity import Capacity
from kvdepot.tiers.disk.claim import Claim
from kvdepot.tiers.disk.entry import Entry
from kvdepot.tiers.disk.layout import TMP, TRASH, create, path_of, prune, spaces_in, transfer
from kvdepot.tiers.disk.ledger import Ledger
from kvdepot.tiers.disk.quarantine import Quarantine
from kvdepot.tiers.disk.scan import Scan
from kvdepot.tiers.rules import Rules, owner_of
from kvdepot.tiers.tally import Tally

__all__ = ["Folder"]

_DATE_EVERY_S = 60.0
"""How often reads update a file's access time: an update at each read would cost a journal entry."""
_MOST_TRIMMED = 4096
"""Objects that one call of `enforce` removes, so that the tier's other tasks get the thread again."""
_CLOSE_S = 5.0
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


class Folder:
    """The directory at `path`, locked until `close`. Methods but `close` are called within `claim.call()`."""

    def __init__(self, path: Path, capacity_bytes: int, policy: str, tally: Tally, rules: Rules) -> None:
        """Raises TierError if the directory is not accessible, ConfigError if it is in use or another user's."""
        self.claim = Claim(path, tally)
        self._root = self.claim.root
        self._tally = tally
        self._ledger = Ledger(capacity_bytes, policy, rules)
        self._capacity = Capacity(self.claim, self._ledger)
        self._quarantine = Quarantine(self._capacity)
        self._mark = secrets.token_hex(4)
        self._serials = itertools.count()
        self._scan = Scan(self._capacity, self._quarantine)

    def __repr__(self) -> str:
        return f"<Folder {self._root} {self.claim.ended or self._ledger!r}>"

    def close(self) -> None:
        """Wait for the calls in progress and release the lock. Raises TierError if a call hangs. Safe to call twice."""
        self.claim.end("closed")
        self._scan.done.set()
        self.claim.drain(_CLOSE_S)
        self._scan.join()
        self.claim.release()

    def usage(self) -> Usage:
        self.claim.check_here()
        self._capacity.retry_discarded()
        ledger, counted = self._ledger, self._scan.done.is_set()
        return Usage(
            len(ledger) if counted else None,
            ledger.used_bytes if counted else None,
            ledger.capacity_bytes,
            self._tally.counts(),
            ledger.owners(),
            self.claim.free_bytes(),
        )

    def enforce(self, rules: Rules, wall: float) -> bool:
        """As Enforcing.enforce. While objects are being counted, nothing is removed."""
        self._ledger.set_rules(rules)
        return not self._scan.done.is_set() or self._capacity.trim(_MOST_TRIMMED, wall)

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
            with self._capacity.naming(entry.name):
                is_lost = self._ledger.lose(entry)
            if is_lost:  # by nothing that we did
                self._tally("vanished")
                self.claim.failed("read", exc)
            return ABSENT
        except OSError as exc:
            self.claim.failed("read", exc)
            if exc.errno == errno.EIO:  # otherwise it would be found, and fail, forever
                self._remove(entry.name, spoilt=False)
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
        self._capacity.retry_discarded()
        if not (self._scan.done.is_set() and size and NAME.fullmatch(blob.name)):
            self._tally("refused")
            return False
        for is_last in (False, True):
            try:
                return self._write(blob, size)
            except OSError as exc:
                self.claim.failed("write", exc)
                if is_last or exc.errno not in _NO_SPACE or not self._capacity.evict(size, owner_of(blob.name)):
                    break
        return False

    def _write(self, blob: Blob, size: int) -> bool:
        """Raises OSError."""
        now = time.time()
        entry = Entry(name=blob.name, charge=self._capacity.charge_for(size), dated=now, born=blob.born or now)
        owner = entry.owner
        fits = self._ledger.can_have(entry.charge, self._quarantine.size_bytes, owner)  # otherwise it evicts nothing
        if not fits or not self._capacity.reserve(entry.charge, owner):
            self._tally("refused")
            return False
        path = self._unused(TMP)
        try:
            more = max(0, self._capacity.charge_of(self._fill(path, blob, entry)) - entry.charge)
            if more and not self._capacity.reserve(more, owner):
                self._tally("refused")
                self._capacity.discard(path, [Entry(owner=owner, charge=entry.charge)])
                return False
            entry.charge += more
            target = path_of(self._root, blob.name)
            with self._capacity.naming(blob.name):
                self.claim.with_parents(target, partial(os.rename, path, target))
                self._ledger.enter(entry)
        except OSError:
            self._capacity.discard(path, [Entry(owner=owner, charge=entry.charge)])
            raise
        return True

    def _fill(self, path: str, blob: Blob, entry: Entry) -> os.stat_result:
        """Write a new file; its stat. Its timestamps are those of the entry, for `Scan`. Raises OSError."""
        fd = self.claim.with_parents(path, partial(create, path))
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

    def remove(self, names: Sequence[str], spoilt: bool) -> None:
        """As Tier.remove. Raises TierError also if the file system refuses."""
        self._scan.wait()
        refused = [name for name in names if not self._remove(name, spoilt)]
        self._quarantine.trim()
        if refused:
            raise TierError(f"{self._root} does not allow removing objects")

    def _remove(self, name: str, spoilt: bool) -> bool:
        """Whether the object is gone."""
        with self._capacity.naming(name):
            entry = self._ledger.take(name)
            if entry is None or (spoilt and self._quarantine.add(entry)):
                return True
            if not self._capacity.unlink(entry):
                return False
            self._ledger.settle(entry)
        return True

    def forget(self, salt: str, space: str) -> int:
        """As Tier.forget. A space goes in one step: if this process is killed, the next scan removes the rest."""
        self._scan.wait()
        trash: dict[str, str] = {}
        kept: set[str] = set()
        with self._capacity.frozen():
            for place, path in spaces_in(self._root, salt, space):
                target = self._unused(TRASH)
                try:
                    self.claim.with_parents(target, partial(os.rename, path, target))
                except OSError as exc:
                    kept.add(place)
                    self.claim.failed("forget", exc)
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
            self._capacity.discard(target, gone[place])
        if kept:
            raise TierError(f"{self._root} does not allow removing objects")
        return sum(map(len, gone.values()))
