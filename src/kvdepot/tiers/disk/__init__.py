"""The tier `disk`: objects as files of one directory, of a bounded total size. It enforces quotas and times to live.

    disk:///var/cache/kv?capacity_gib=100

Called by worker.py on its threads. Files of others in the directory are neither touched nor counted. Invariants:

- The bytes that the file system allocates to our files never exceed the capacity. Half-written files count, and so do
  removed files that are still being read. Directories are not counted.
- If the directory is gone, it is not created again on another file system, such as the one below a disk that is not
  mounted.

**What a crash leaves.** Nothing is synced: this is a cache. Each change is one rename or one unlink, in this order:

- A write reserves its bytes in the ledger, writes `tmp/x`, and renames it to its place, complete. A killed process
  leaves a file in `tmp/`, or the whole object.
- An eviction or removal takes the object out of the ledger, unlinks the file, and frees the bytes when its last reader
  has closed it. A killed process leaves the object, or nothing.
- To forget, each namespace's directory is renamed into `trash/` before memory is told that it is gone, and removed
  there. A killed process leaves the rest in `trash/`, where no read finds it.
- A start removes `tmp/` and `trash/`, counts the objects, orders them by their access times, and evicts down to the
  capacity and the caps, before anything is written. Meanwhile, objects that are counted already can be read.

A power failure may leave files that are empty, short or wrong: empty files are removed by the start, the others are
found by their header and checksum (worker.py). Access times are updated by reads, once a minute at most; modification
times say when contents were computed.
"""

# ruff: noqa: PTH108, PTH208

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec import Meta

from kvdepot.errors import ConfigError, TierError
from kvdepot.eviction import POLICIES
from kvdepot.tiers import NAME, Blob, Tally, TierUsage, convert
from kvdepot.tiers.disk.directory import (
    LOCK,
    TMP,
    TRASH,
    Directory,
    objects_in,
    path_of,
    prune,
    remove,
    spaces_in,
    transfer,
)
from kvdepot.tiers.disk.ledger import Entry, Ledger
from kvdepot.tiers.rules import NO_RULES, Rules, owner_of
from kvdepot.tiers.urls import shown

log = logging.getLogger(__name__)

_PATIENCE_S = 0.1
"""A directory that is counted within this time takes writes as soon as it is opened."""
_DATE_EVERY_S = 60.0
"""Seconds between two updates of a file's access time: one at each read would cost a journal entry."""
_MOST_TRIMMED = 4096
"""Objects that one call of `enforce` removes, so that the tier's other tasks get the thread again."""
_CLOSE_S = 5.0
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


class DiskOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    capacity_gib: Annotated[float, Meta(gt=0, description="maximum disk space for objects, in GiB or as 512MiB")]
    policy: Annotated[str, Meta(description=f"eviction policy: {', '.join(POLICIES)}")] = "lru"


def open(url: str, options: dict[str, str], threads: int, rules: Rules = NO_RULES) -> Disk:
    """The tier in the directory of a URL, which is created if there is none. A large one is counted in the background.

    rules: quotas and times to live that hold from the start; until `enforce` is called, nothing is removed because of
    its age. Raises ConfigError for an invalid URL, floors beyond the capacity, a directory in use or one of another
    user; TierError if the directory is not accessible.
    """
    parts = urlsplit(url)
    name = shown(url)
    own = convert(options, DiskOptions, name)
    path = Path(unquote(parts.path))
    if parts.netloc or not path.is_absolute() or path == Path("/"):
        raise ConfigError(f"tier {name}: write disk:///directory, with three slashes and a directory of its own")
    if own.policy not in POLICIES:
        raise ConfigError(f"tier {name}: {own.policy!r} is not one of the policies {', '.join(POLICIES)}")
    capacity_bytes = int(own.capacity_gib * 2**30)
    if fault := rules.fault(capacity_bytes):
        raise ConfigError(f"tier {name}: {fault}")
    return Disk(path, capacity_bytes, own.policy, rules)


class Disk:
    """Objects in a directory. If the directory disappears, calls raise TierError until `usage` finds it again.

    Locks, in this order: `_opening`, `_evicting` from the choice of a victim until its file is removed, `_naming(name)`
    while a file of this name is created or removed, then the ledger's, under which there is no system call.
    """

    def __init__(self, path: Path, capacity_bytes: int, policy: str = "lru", rules: Rules = NO_RULES) -> None:
        self._path = path
        self._capacity_bytes = capacity_bytes
        self._policy = policy
        self._rules = rules
        self._tally = Tally()
        self._opening = threading.Lock()
        self._closed = False
        self._mark = secrets.token_hex(4)
        self._serials = itertools.count()
        self._evicting = threading.Lock()
        self._names = [threading.Lock() for _ in range(16)]
        self._open()
        self._device = _device_of(path)

    # -- opening and closing

    def _open(self) -> None:
        """Lock the directory, and begin to count its objects, in the background if that takes long."""
        directory = Directory(self._path, self._tally)
        self._root = directory.root
        self._ledger = Ledger(self._capacity_bytes, self._policy, self._rules)
        self._litter: dict[str, list[Entry]] = {}
        """Paths to remove, and the entries that are settled when that is done."""
        self._counted = threading.Event()
        """Set once the objects are counted; until then nothing is written: what is not counted cannot be bounded."""
        self._counting = threading.Thread(target=self._run, name="kvdepot-disk-count", daemon=True)
        self._directory = directory  # set last: from now on, calls are let in
        try:
            self._counting.start()
        except RuntimeError as exc:
            self._release("no thread is left to count its objects")
            raise TierError(f"{self._path} cannot be used: {exc}") from exc
        self._counted.wait(_PATIENCE_S)

    def _reopen(self) -> None:
        """Open the directory again after it was gone. No call uses it meanwhile."""
        self._release("gone")
        is_a_tiers = os.path.lexists(self._path / LOCK)
        if not is_a_tiers and _device_of(self._path) != self._device:
            raise TierError(f"{self._path} is gone: its file system is not mounted")
        try:
            self._open()
        except ConfigError as exc:  # another server has locked the directory
            raise TierError(str(exc)) from exc

    def _release(self, reason: str) -> None:
        """Wait for the calls in progress and release the lock. Raises TierError if a call hangs. Safe to call twice."""
        self._directory.end(reason)
        self._counted.set()
        self._directory.drain(_CLOSE_S)
        if self._counting.ident is not None:
            self._counting.join()
        self._directory.release()

    def attach(self, memory: Sequence[memoryview]) -> None:
        """Do nothing: the kernel reads from and writes to any memory."""

    def close(self) -> None:
        """Waits for calls in progress; while one hangs, the directory stays locked."""
        with self._opening:
            self._closed = True
            self._release("closed")

    def _naming(self, name: str) -> threading.Lock:
        return self._names[hash(name) % len(self._names)]

    # -- the start

    def _run(self) -> None:
        try:
            self._count()
        except BaseException as exc:  # noqa: BLE001 - the top of a thread: calls of the tier wait for it
            why = str(exc) if isinstance(exc, OSError | TierError) else repr(exc)
            log.warning("cannot count the objects in %s: %s", self._root, why)
            self._directory.end(f"cannot count its objects: {why}")
        self._counted.set()

    def _count(self) -> None:
        """Remove what an earlier server left half done, count objects, and evict down to the capacity and the caps."""
        root = self._root
        for left in (TMP, TRASH):
            with contextlib.suppress(FileNotFoundError):
                self._tally("swept", len(os.listdir(f"{root}/{left}")))
            with contextlib.suppress(FileNotFoundError):  # a link that leads nowhere
                remove(f"{root}/{left}")
        for found in objects_in(root):
            for name, info in found:
                entry = Entry(name=name, charge=self._charge_of(info), dated=info.st_atime, born=info.st_mtime)
                self._ledger.add_found(entry)
            if self._directory.ended is not None:
                break
        self._ledger.rank()
        self._trim(self._ledger.used_bytes, 0.0)  # any number of objects, but none because of its age

    def _wait_counted(self) -> None:
        """Block until all objects are counted. Raises TierError if the directory's use has ended."""
        self._counted.wait()
        self._directory.check()

    def usage(self) -> TierUsage:
        """Without objects and bytes while the directory is being counted. Reopens a directory that was gone."""
        with self._opening:
            if self._directory.ended is not None and not self._closed:
                self._reopen()
        with self._directory.call():
            self._directory.check_here()
            self._retry_discarded()
            ledger, counted = self._ledger, self._counted.is_set()
            return TierUsage(
                len(ledger) if counted else None,
                ledger.used_bytes if counted else None,
                ledger.capacity_bytes,
                self._tally.counts(),
                ledger.used_by_quota(),
                self._directory.free_bytes(),
            )

    def enforce(self, rules: Rules, wall: float) -> bool:
        """See Enforcing.enforce. While objects are being counted, nothing is removed."""
        self._rules = rules  # also for the directory when it is back
        with self._directory.call():
            self._ledger.set_rules(rules)
            if not self._counted.is_set():
                return True
            self._ledger.date(time.monotonic(), wall)
            return self._trim(_MOST_TRIMMED, wall)

    def find(self, names: Sequence[str]) -> list[bool]:
        with self._directory.call():
            return [name in self._ledger for name in names]

    # -- reading

    def read(self, blobs: Sequence[Blob]) -> list[int | None]:
        with self._directory.call():
            return [self._read(blob) for blob in blobs]

    def _read(self, blob: Blob) -> int | None:
        entry = self._ledger.hold(blob.name)
        if entry is None:
            return None
        try:
            return self._read_file(blob, entry)
        except FileNotFoundError as exc:
            with self._naming(entry.name):
                is_lost = self._ledger.lose(entry)
            if is_lost:  # the file is gone, by nothing that we did
                self._tally("vanished")
                self._directory.failed("read", exc)
            return None
        except OSError as exc:
            self._directory.failed("read", exc)
            if exc.errno == errno.EIO:  # otherwise the object would be found, and fail, forever
                self._remove(entry.name)
            return None
        finally:
            self._ledger.release(entry)

    def _read_file(self, blob: Blob, entry: Entry) -> int:
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

    def write(self, blobs: Sequence[Blob]) -> list[bool]:
        with self._directory.call():
            return [self._write(blob) for blob in blobs]

    def _write(self, blob: Blob) -> bool:
        size = blob.size
        self._retry_discarded()
        if not (self._counted.is_set() and size and NAME.fullmatch(blob.name)):
            self._tally("refused")
            return False
        for is_last in (False, True):
            try:
                return self._write_file(blob, size)
            except OSError as exc:
                self._directory.failed("write", exc)
                if is_last or exc.errno not in _NO_SPACE:
                    return False
                missing = size  # the file system is full below our capacity: evict so much
                while missing > 0:
                    if not (freed := self._drop(lambda: self._ledger.victim(owner_of(blob.name), 0))):
                        return False
                    missing -= freed
        return False

    def _write_file(self, blob: Blob, size: int) -> bool:
        now = time.time()
        entry = Entry(name=blob.name, charge=self._charge_for(size), dated=now, born=blob.born or now)
        owner = entry.owner
        fits = self._ledger.can_ever_hold(entry.charge, owner)  # if it can never fit, evict nothing
        if not fits or not self._reserve(entry.charge, owner):
            self._tally("refused")
            return False
        path = self._unused(TMP)
        try:
            more = max(0, self._charge_of(self._fill(path, blob, entry)) - entry.charge)
            if more and not self._reserve(more, owner):
                self._tally("refused")
                self._discard(path, [Entry(owner=owner, charge=entry.charge)])
                return False
            entry.charge += more
            target = path_of(self._root, blob.name)
            with self._naming(blob.name):
                self._directory.with_parents(target, partial(os.rename, path, target))
                self._ledger.enter(entry)
        except OSError:
            self._discard(path, [Entry(owner=owner, charge=entry.charge)])
            raise
        return True

    def _fill(self, path: str, blob: Blob, entry: Entry) -> os.stat_result:
        """Write a new file with the entry's timestamps, for the next start. Returns its stat. Raises OSError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = self._directory.with_parents(path, partial(os.open, path, flags, 0o600))
        try:
            if transfer(os.pwritev, fd, blob.buffers) != blob.size:
                raise OSError(errno.EIO, "a write was cut short")
            os.utime(fd, (entry.dated, entry.born))
            return os.fstat(fd)
        finally:
            os.close(fd)

    def _unused(self, directory: str) -> str:
        return f"{self._root}/{directory}/{self._mark}-{next(self._serials)}"

    # -- the bound

    def _charge_of(self, info: os.stat_result) -> int:
        return self._charge_for(info.st_blocks * 512)

    def _charge_for(self, size: int) -> int:
        """Bytes that a file of `size` bytes will take: its blocks, and the blocks that map all but the first few."""
        block = self._directory.block_bytes
        blocks = -(-size // block)
        return (blocks + (blocks // 256 + 1 if blocks > 4 else 0)) * block

    def _reserve(self, size: int, owner: str) -> bool:
        """Reserve bytes for an owner, evicting objects while there are too few. Returns whether they are reserved."""
        while self._directory.ended is None:
            if self._ledger.reserve(size, owner):
                return True
            if not self._drop(lambda: self._ledger.victim(owner, size)):
                return False
        return False

    def _trim(self, most: int, wall: float) -> bool:
        """Remove up to `most` objects that have expired at `wall`, or exceed a cap or the capacity. Returns whether
        there may be more. What cannot be removed now, because it is being read or the file system refuses, stays until
        the next call."""
        for pick, is_expired in ((lambda: self._ledger.expired(wall), True), (self._ledger.excess, False)):
            while self._drop(pick, is_expired):
                most -= 1
                if most <= 0 or self._directory.ended is not None:
                    return self._directory.ended is None
        return False

    def _drop(self, pick: Callable[[], Entry | None], is_expired: bool = False) -> int:
        """Remove the object that `pick` takes out of the ledger. Returns the bytes freed."""
        with self._evicting:
            entry = pick()
            if entry is None:
                return 0
            with self._naming(entry.name):
                is_replaced = entry.name in self._ledger
                if not is_replaced and not self._unlink(entry):
                    return 0
                self._ledger.settle(entry, evicted=not is_expired)
            self._tally("expired" if is_expired else "evicted")
            return entry.charge

    # -- removing

    def remove(self, names: Sequence[str]) -> None:
        with self._directory.call():
            self._wait_counted()
            if refused := [name for name in names if not self._remove(name)]:
                raise TierError(f"{self._root} does not allow removing {len(refused)} objects")

    def _remove(self, name: str) -> bool:
        with self._naming(name):
            entry = self._ledger.take(name)
            is_gone = entry is None or self._unlink(entry)
            if entry is not None and is_gone:
                self._ledger.settle(entry)
        return is_gone

    def forget(self, salt: str, space: str) -> int:
        """See Tier.forget. A space is renamed in one step; if this process is killed, the next start removes it."""
        with self._directory.call():
            self._wait_counted()
            trash: dict[str, list[Entry]] = {}
            is_refused = False
            with contextlib.ExitStack() as frozen:  # meanwhile no object is created or removed by others
                for lock in (self._evicting, *self._names):
                    frozen.enter_context(lock)
                known = self._ledger.spaces(salt, space)
                for place, path in spaces_in(self._root, salt, space):
                    entries, target = known.pop(place, []), self._unused(TRASH)
                    try:
                        self._directory.with_parents(target, partial(os.rename, path, target))
                    except OSError as exc:
                        is_refused = True
                        self._directory.failed("forget", exc)
                        continue
                    for entry in entries:
                        self._ledger.take(entry.name)
                    trash[target] = entries
                    prune(self._root, path)
                self._directory.check_here()  # otherwise others have removed the rest
                for entry in itertools.chain(*known.values()):
                    self._ledger.lose(entry)
            for target, entries in trash.items():
                self._discard(target, entries)
            if is_refused:
                raise TierError(f"{self._root} does not allow removing objects")
            return sum(map(len, trash.values()))

    def _unlink(self, entry: Entry) -> bool:
        """Remove the file of an entry that was taken out, and the directories that become empty. Returns whether the
        file is gone; if not, the entry is an object again."""
        path = path_of(self._root, entry.name)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        except OSError as exc:
            self._ledger.keep(entry)
            self._directory.failed("remove", exc)
            return False
        prune(self._root, path)
        return True

    def _discard(self, path: str, entries: list[Entry]) -> None:
        """Remove a path that is no longer an object, now or as soon as possible; its entries are counted until then."""
        self._litter[path] = entries
        self._retry_discarded()

    def _retry_discarded(self) -> None:
        for path in list(self._litter):
            entries = self._litter.pop(path, None)
            if entries is None:
                continue  # another thread removes the path
            try:
                with contextlib.suppress(FileNotFoundError):
                    remove(path)
            except OSError as exc:
                self._litter[path] = entries
                self._directory.failed("remove", exc)
                continue
            for entry in entries:
                self._ledger.settle(entry)


def _device_of(path: Path) -> int:
    """The device number of the nearest parent directory that exists."""
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):
            return place.stat().st_dev
    raise TierError(f"no directory above {path} can be read")
