"""The tier `disk`: objects as files of one directory, of a bounded total size. It enforces quotas and times to live.

    disk:///var/cache/kv?capacity_gib=100

Called by worker.py on its threads. Invariant: if the directory is gone, it is not created again on another file system,
such as the one below a disk that is not mounted.

**What a crash leaves.** Nothing is synced: this is a cache. Each change is one rename or one unlink, in this order:

- A write reserves its bytes in the ledger, writes `tmp/x`, and renames it to its place, complete. A killed process
  leaves a file in `tmp/`, or the whole object.
- An eviction or removal takes the object out of the ledger, unlinks the file, and frees the bytes when its last reader
  has closed it. A killed process leaves the object, or nothing.
- To forget, each namespace's directory is renamed into `trash/` before memory is told that it is gone, and removed
  there. A killed process leaves the rest in `trash/`, where no read finds it.
- A start removes `tmp/` and `trash/`, counts the objects, orders them by their access times, and evicts down
  to the capacity and the caps, before anything is written. Reads are served meanwhile from what is counted.

A power failure may leave files that are empty, short or wrong: an empty one is removed by the start, the others are
found by their header and checksum (worker.py). Access times are updated by reads, once a minute at most; modification
times say when contents were computed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec import Meta

from kvdepot.errors import ConfigError, TierError
from kvdepot.eviction import POLICIES
from kvdepot.tiers import Blob, Tally, Usage, convert
from kvdepot.tiers.disk.directory import LOCK, Directory
from kvdepot.tiers.disk.folder import Folder
from kvdepot.tiers.disk.ledger import Ledger
from kvdepot.tiers.rules import NO_RULES, Rules
from kvdepot.tiers.urls import shown


class DiskOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    capacity_gib: Annotated[float, Meta(gt=0, description="maximum disk space for objects, in GiB or as 512MiB")]
    policy: Annotated[str, Meta(description=f"eviction policy: {', '.join(POLICIES)}")] = "lru"


def open(url: str, options: dict[str, str], threads: int, rules: Rules = NO_RULES) -> Disk:
    """The tier in the directory of a URL, which is created if there is none. A large one is counted in the background.

    rules: that hold from the start; until `enforce` is called, nothing is removed because of its age. Raises
    ConfigError for an invalid URL, floors beyond the capacity, a directory in use or one of another user; TierError if
    the directory is not accessible.
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
    """Objects in a directory. If the directory disappears, calls raise TierError until `usage` finds it again."""

    def __init__(self, path: Path, capacity_bytes: int, policy: str = "lru", rules: Rules = NO_RULES) -> None:
        self._path = path
        self._capacity_bytes = capacity_bytes
        self._policy = policy
        self._rules = rules
        self._tally = Tally()
        self._opening = threading.Lock()
        self._closed = False
        self._folder = self._open()
        self._device = _device_of(path)

    def __repr__(self) -> str:
        return f"<Disk {self._folder!r}>"

    def _open(self) -> Folder:
        directory = Directory(self._path, self._tally)
        return Folder(directory, Ledger(self._capacity_bytes, self._policy, self._rules))

    def _reopen(self) -> None:
        self._folder.close()
        is_a_tiers = os.path.lexists(self._path / LOCK)
        if not is_a_tiers and _device_of(self._path) != self._device:
            raise TierError(f"{self._path} is gone: its file system is not mounted")
        try:
            self._folder = self._open()
        except ConfigError as exc:  # it is another's now
            raise TierError(str(exc)) from exc

    @contextlib.contextmanager
    def _call(self) -> Iterator[Folder]:
        folder = self._folder
        with folder.directory.call():
            yield folder

    def attach(self, memory: Sequence[memoryview]) -> None:
        """Nothing to prepare."""

    def find(self, names: Sequence[str]) -> list[bool]:
        with self._call() as folder:
            return folder.find(names)

    def read(self, blobs: Sequence[Blob]) -> list[int]:
        with self._call() as folder:
            return [folder.read(blob) for blob in blobs]

    def write(self, blobs: Sequence[Blob]) -> list[bool]:
        with self._call() as folder:
            return [folder.write(blob) for blob in blobs]

    def remove(self, names: Sequence[str]) -> None:
        with self._call() as folder:
            folder.remove(names)

    def forget(self, salt: str, space: str) -> int:
        with self._call() as folder:
            return folder.forget(salt, space)

    def enforce(self, rules: Rules, wall: float) -> bool:
        self._rules = rules  # also for the directory when it is back
        with self._call() as folder:
            return folder.enforce(rules, wall)

    def usage(self) -> Usage:
        """Without objects and bytes while the directory is being counted. Reopens a directory that was gone."""
        with self._opening:
            if self._folder.directory.ended is not None and not self._closed:
                self._reopen()
        with self._call() as folder:
            return folder.usage()

    def close(self) -> None:
        """Waits for calls in progress; while one hangs, the directory stays locked."""
        with self._opening:
            self._closed = True
            self._folder.close()


def _device_of(path: Path) -> int:
    """The file system of the nearest parent directory that is there."""
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):
            return place.stat().st_dev
    raise TierError(f"no directory above {path} can be read")
