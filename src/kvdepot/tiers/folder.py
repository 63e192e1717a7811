"""A directory that holds a tier's objects, from the lock on it to the files in it. Made by disk.py; any thread.

    kvdepot.lock        whoever holds its lock owns the directory
    tmp/                what is being written: renamed when it is whole, removed when the next server finds it
    trash/              what was forgotten, until it is removed
    quarantine/         the last few objects whose bytes were wrong, for people to look at
    5a/...              objects (places.py)

The one law: what the file system gives to our files never exceeds the ledger's capacity, half-written files and those
removed under a reader included. What directories take is not counted; what another puts here is neither touched nor
counted. After a start nothing is written before all is counted, and what is too much is gone.

Nothing is synced: this is a cache. A killed process loses nothing that it has renamed; a machine that loses power may
leave files that are empty, short or wrong, which their header and sum tell (worker.py).

Locks, in this order: `_evicting` from the choice of a victim until its file is gone, `_naming(name)` while a name's
file comes or goes, `_lock` for the ledger and all that stands beside it; no system call under the last.
"""

# ruff: noqa: PTH108, PTH116, PTH208

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import secrets
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvdepot import locks
from kvdepot.errors import ConfigError, TierError
from kvdepot.tiers import NAME, Blob, Usage
from kvdepot.tiers.ledger import Entry, Ledger
from kvdepot.tiers.places import (
    LOCK,
    QUARANTINE,
    TMP,
    TRASH,
    create,
    make_parents,
    make_private,
    move,
    objects_in,
    place_of,
    prune,
    remove,
    spaces_in,
)

__all__ = ["Folder"]

log = logging.getLogger(__name__)

_MOST_QUARANTINED = 8
"""Files; together they take a sixteenth of the capacity at most."""
_DATE_EVERY_S = 60.0
"""A file's date follows its use so often: to write it each time would cost a journal entry a read."""
_PATIENCE_S = 0.1
"""What is counted by then takes writes as soon as it is opened."""
_CLOSE_S = 5.0
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


class Folder:
    """The directory at `path`, locked until it is closed. Once it is found to be gone, it stays so."""

    def __init__(self, path: Path, ledger: Ledger, counters: Counter[str]) -> None:
        """Raises TierError where it cannot be had, ConfigError where it is in use or somebody else's."""
        self.gone = ""
        """Why no call is let in any more."""
        self._root = str(path)
        self._ledger = ledger
        self._counters = counters
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._active = 0
        self._evicting = threading.Lock()
        self._names = [threading.Lock() for _ in range(16)]
        self._litter: dict[str, list[Entry]] = {}  # what is to be removed, and what is settled by that
        self._quarantined: dict[str, Entry] = {}  # by path, the oldest first
        self._mark = secrets.token_hex(4)
        self._serials = itertools.count()
        self._counted = threading.Event()
        self._fd = -1
        self._block = 4096
        self._claim(path)
        self._thread = threading.Thread(target=self._count, name="kvdepot-disk-count", daemon=True)
        self._thread.start()
        self._counted.wait(_PATIENCE_S)

    def __repr__(self) -> str:
        return f"<Folder {self._root} {self.gone or self._ledger!r}>"

    # -- the directory

    def _claim(self, path: Path) -> None:
        """Make the directory ours."""
        try:
            make_private(path)
            self._block = os.statvfs(path).f_frsize
            self._fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            is_free = locks.lock(self._fd)
        except OSError as exc:
            self._unlock()
            raise TierError(f"{path} cannot be used: {exc.strerror}") from exc
        if not is_free:
            self._unlock()
            raise ConfigError(f"{path} is in use by another kvdepot server")

    def _unlock(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def is_marked(self) -> bool:
        """Whether the directory there now is a tier's."""
        return os.path.lexists(f"{self._root}/{LOCK}")

    def _is_here(self) -> bool:
        """Whether the directory there now is the one that we have locked."""
        try:
            return os.path.samestat(os.stat(f"{self._root}/{LOCK}", follow_symlinks=False), os.fstat(self._fd))
        except OSError:
            return False

    @contextlib.contextmanager
    def call(self) -> Iterator[Folder]:
        """The directory stays ours meanwhile. Raises TierError where it cannot be had."""
        with self._lock:
            if self.gone:
                raise TierError(f"{self._root}: {self.gone}")
            self._active += 1
        try:
            yield self
        finally:
            with self._idle:
                self._active -= 1
                self._idle.notify_all()

    def close(self) -> None:
        """Let no call in, wait for those under way, give the lock up. Raises TierError when one hangs. Safe twice."""
        with self._idle:
            self.gone = self.gone or "closed"
            self._counted.set()
            if not self._idle.wait_for(lambda: self._active == 0, _CLOSE_S):
                raise TierError(f"{self._root}: {self._active} calls hang")
        self._thread.join()
        self._unlock()

    def _tally(self, what: str, count: int = 1) -> None:
        with self._lock:
            self._counters[what] += count

    def _failed(self, what: str, exc: OSError) -> None:
        """Count a failure. Raises TierError where it is one of the whole directory."""
        self._tally("errors")
        log.info("%s: %s: %s", self._root, what, exc.strerror)
        if not self._is_here():
            self.gone = self.gone or "the directory is gone"
            raise TierError(f"{self._root}: {self.gone}") from exc

    # -- what is there at the start; on a thread of its own

    def _count(self) -> None:
        try:
            for left in (TMP, TRASH):
                with contextlib.suppress(FileNotFoundError):
                    self._tally("swept", len(os.listdir(f"{self._root}/{left}")))
                    remove(f"{self._root}/{left}")
            self._count_quarantine()
            self._trim_quarantine()
            for found in objects_in(self._root):
                with self._lock:
                    for name, info in found:
                        self._ledger.note(Entry(name=name, charge=self._charge(info), dated=info.st_mtime))
                if self.gone:
                    break
            with self._lock:
                self._ledger.rank()
            self._reserve(0)
        except (OSError, TierError) as exc:  # what cannot be counted cannot be bounded
            log.warning("cannot count the objects in %s: %s", self._root, exc)
            self.gone = self.gone or f"cannot count its objects: {exc}"
        self._counted.set()

    def _count_quarantine(self) -> None:
        with contextlib.suppress(FileNotFoundError), os.scandir(f"{self._root}/{QUARANTINE}") as files:
            found = [(file.stat(follow_symlinks=False), file.path) for file in files]
            with self._lock:
                for info, path in sorted(found, key=lambda pair: pair[0].st_mtime):
                    self._quarantined[path] = Entry(charge=self._charge(info))
                    self._ledger.note(self._quarantined[path], is_object=False)

    # -- room

    def _charge(self, info: os.stat_result) -> int:
        return self._with_map(info.st_blocks * 512)

    def _with_map(self, size: int) -> int:
        """Whole blocks, and those that will say where they lie: first the inode does, then a block for 256 or more."""
        blocks = -(-size // self._block)
        return (blocks + (blocks // 256 + 1 if blocks > 4 else 0)) * self._block

    def _reserve(self, size: int) -> bool:
        """Take room, evicting what has to go; False where there is none."""
        with self._lock:
            aside = sum(entry.charge for entry in self._quarantined.values())
            if size + aside > self._ledger.capacity_bytes:
                return False
        while not self.gone:
            with self._lock:
                if self._ledger.reserve(size):
                    return True
            if not self._evict():
                return False
        return False

    def _evict(self) -> int:
        """Remove what goes first; bytes of room that has made."""
        with self._evicting:
            with self._lock:
                victim = self._ledger.victim()
            if victim is None:
                return 0
            with self._naming(victim.name):
                with self._lock:
                    is_replaced = victim.name in self._ledger
                if not is_replaced and not self._unlink(victim):
                    return 0
                with self._lock:
                    self._ledger.settle(victim, evicted=True)
                    self._counters["evicted"] += 1
            return victim.charge

    def _unlink(self, entry: Entry) -> bool:
        """Remove a file that was taken out, and the directories it leaves empty. What cannot be removed is kept."""
        path = place_of(self._root, entry.name)
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as exc:
            with self._lock:
                self._ledger.keep(entry)
            self._failed("remove", exc)
            return False
        prune(self._root, path)
        return True

    def _discard(self, path: str, entries: list[Entry]) -> None:
        """Remove what is no object any more, now or when it can be; it is counted until then."""
        with self._lock:
            self._litter[path] = entries
        self._tidy()

    def _tidy(self) -> None:
        for path in list(self._litter):
            with self._lock:
                entries = self._litter.pop(path, None)
            if entries is None:
                continue  # another thread is at it
            try:
                remove(path)
            except FileNotFoundError:
                pass
            except OSError as exc:
                with self._lock:
                    self._litter[path] = entries
                self._failed("remove", exc)
                continue
            with self._lock:
                for entry in entries:
                    self._ledger.settle(entry)

    # -- objects

    def _naming(self, name: str) -> threading.Lock:
        """The lock under which files of this name come and go."""
        return self._names[hash(name) % len(self._names)]

    def find(self, names: Sequence[str]) -> list[bool]:
        with self._lock:
            return [name in self._ledger for name in names]

    def read(self, blob: Blob) -> int:
        with self._lock:
            entry = self._ledger.hold(blob.name)
        if entry is None:
            return -1
        try:
            return self._read(blob, entry)
        except FileNotFoundError as exc:
            if self._is_lost(entry):
                self._failed("read", exc)
            return -1
        except OSError as exc:
            self._failed("read", exc)
            if exc.errno == errno.EIO:  # else it would be found, and be in vain, for ever
                self._remove(entry.name, spoilt=False)
            return -1
        finally:
            with self._lock:
                self._ledger.release(entry)

    def _read(self, blob: Blob, entry: Entry) -> int:
        fd = os.open(place_of(self._root, blob.name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if size > blob.size:
                return size
            now = time.time()
            if abs(now - entry.dated) > _DATE_EVERY_S:
                entry.dated = now
                with contextlib.suppress(OSError):  # of a file system that is read only we can still read
                    os.utime(fd)
            return move(os.preadv, fd, blob.buffers)
        finally:
            os.close(fd)

    def _is_lost(self, entry: Entry) -> bool:
        """Whether it is through nothing we did that a file is not there; then it is an object no more."""
        with self._naming(entry.name), self._lock:
            if entry.gone:
                return False
            self._ledger.take(entry.name)
            self._ledger.settle(entry)
        self._tally("vanished")
        return True

    def write(self, blob: Blob) -> bool:
        size = blob.size
        if self._litter:
            self._tidy()
        if self._counted.is_set() and size and NAME.fullmatch(blob.name):
            try:
                return self._write(blob, size)
            except OSError as exc:
                self._failed("write", exc)
                if exc.errno not in _NO_SPACE or not self._make_way(size):
                    return False
            try:
                return self._write(blob, size)
            except OSError as exc:
                self._failed("write", exc)
                return False
        self._tally("refused")
        return False

    def _make_way(self, size: int) -> bool:
        """Evict so much where the disk is full below our capacity: else what we hold would stay for ever."""
        while size > 0:
            if not (made := self._evict()):
                return False
            size -= made
        return True

    def _write(self, blob: Blob, size: int) -> bool:
        charge = self._with_map(size)
        if not self._reserve(charge):
            self._tally("refused")
            return False
        path = f"{self._root}/{TMP}/{self._mark}-{next(self._serials)}"
        entry = Entry(name=blob.name, charge=charge, dated=time.time())
        try:
            info = self._fill(path, blob, size)
            more = max(0, self._charge(info) - charge)
            if more and not self._reserve(more):
                self._tally("refused")
                self._discard(path, [Entry(charge=entry.charge)])
                return False
            entry.charge += more
            with self._naming(blob.name):
                self._with_directories(os.rename, path, place_of(self._root, blob.name))
                with self._lock:
                    self._ledger.enter(entry)
        except OSError:
            self._discard(path, [Entry(charge=entry.charge)])
            raise
        return True

    def _fill(self, path: str, blob: Blob, size: int) -> os.stat_result:
        """Write a new file; what it is then."""
        fd = self._with_directories(create, path)
        try:
            if move(os.pwritev, fd, blob.buffers) != size:
                raise OSError(errno.EIO, "a write was cut short")
            return os.fstat(fd)
        finally:
            os.close(fd)

    def _with_directories(self, act: Callable[..., int | None], *paths: str) -> int:
        """Do what brings a file to the last of `paths`, making its directories as long as others remove them."""
        for _ in range(16):
            try:
                return act(*paths) or 0
            except FileNotFoundError:
                if not self._is_here():
                    raise
            make_parents(self._root, paths[-1])
        return act(*paths) or 0

    # -- removing

    def _wait_counted(self) -> None:
        """Until then there may be files nobody knows."""
        self._counted.wait()
        if self.gone:
            raise TierError(f"{self._root}: {self.gone}")

    def remove(self, names: Sequence[str], spoilt: bool) -> None:
        """Raises TierError where the directory does not let us."""
        self._wait_counted()
        refused = [name for name in names if not self._remove(name, spoilt)]
        self._trim_quarantine()
        if refused:
            raise TierError(f"{self._root} does not allow removing objects")

    def _remove(self, name: str, spoilt: bool) -> bool:
        with self._naming(name):
            with self._lock:
                entry = self._ledger.take(name)
            if entry is None or (spoilt and self._set_aside(entry)):
                return True
            if not self._unlink(entry):
                return False
            with self._lock:
                self._ledger.settle(entry)
        return True

    def _set_aside(self, entry: Entry) -> bool:
        place = place_of(self._root, entry.name)
        path = f"{self._root}/{QUARANTINE}/{entry.name.replace('/', '_')}"
        try:
            self._with_directories(os.rename, place, path)
        except OSError:
            return False
        self._tally("quarantined")
        prune(self._root, place)
        with self._lock:
            old = self._quarantined.pop(path, None)
            self._quarantined[path] = entry
            if old is not None:
                self._ledger.settle(old)
        return True

    def _trim_quarantine(self) -> None:
        while True:
            with self._lock:
                size = sum(entry.charge for entry in self._quarantined.values())
                if len(self._quarantined) <= _MOST_QUARANTINED and size <= self._ledger.capacity_bytes // 16:
                    return
                path = next(iter(self._quarantined))
                entry = self._quarantined.pop(path)
            self._discard(path, [entry])

    def forget(self, salt: str, space: str) -> int:
        """In one step a space; whoever is killed meanwhile leaves the rest to the next server's start."""
        self._wait_counted()
        trash: dict[str, str] = {}
        kept: set[str] = set()
        with contextlib.ExitStack() as stack:
            for lock in (self._evicting, *self._names):
                stack.enter_context(lock)
            for place, path in spaces_in(self._root, salt, space):
                target = f"{self._root}/{TRASH}/{self._mark}-{next(self._serials)}"
                try:
                    self._with_directories(os.rename, path, target)
                except OSError as exc:
                    kept.add(place)
                    self._failed("forget", exc)
                    continue
                trash[place] = target
                prune(self._root, path)
            gone: dict[str, list[Entry]] = defaultdict(list)
            with self._lock:
                for entry in self._ledger.forget(salt, space):
                    place = entry.name[:65]
                    if place in kept:
                        self._ledger.keep(entry)
                    elif place in trash:
                        gone[place].append(entry)
                    else:
                        self._ledger.settle(entry)
        for place, target in trash.items():
            self._discard(target, gone[place])
        if kept:
            raise TierError(f"{self._root} does not allow removing objects")
        return sum(map(len, gone.values()))

    def usage(self) -> Usage:
        if not self._is_here():
            self.gone = self.gone or "the directory is gone"
            raise TierError(f"{self._root}: {self.gone}")
        self._tidy()
        with self._lock:
            ledger, known = self._ledger, self._counted.is_set()
            return Usage(
                len(ledger) if known else None,
                ledger.used_bytes if known else None,
                ledger.capacity_bytes,
                dict(self._counters),
            )
