"""The tier `disk`: objects as files of one directory, which takes a bounded number of bytes (folder.py).

    disk:///var/cache/kv?capacity_gib=100

Called by worker.py on its threads. The one law: a directory that is gone is not made anew on another file system,
where a disk that is not mounted would be.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec import Meta

from kvdepot.errors import ConfigError, TierError
from kvdepot.eviction import POLICIES
from kvdepot.tiers import Blob, Usage, convert
from kvdepot.tiers.folder import Folder
from kvdepot.tiers.ledger import Ledger
from kvdepot.tiers.places import device_of
from kvdepot.tiers.urls import shown

__all__ = ["Disk", "DiskOptions", "open"]


class DiskOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a `disk://` URL."""

    capacity_gib: Annotated[float, Meta(gt=0, description="maximum disk space for objects, in GiB or as 512MiB")]
    policy: Annotated[str, Meta(description=f"eviction policy: {', '.join(POLICIES)}")] = "lru"


def open(url: str, options: dict[str, str], threads: int) -> Disk:
    """The directory of a URL, made where there is none. Does not wait until a large one is counted.

    Raises ConfigError for a URL that makes no sense, a directory that is somebody else's or in use; TierError where it
    cannot be had.
    """
    parts = urlsplit(url)
    name = shown(url)
    own: DiskOptions = convert(options, DiskOptions, name)
    path = Path(unquote(parts.path))
    if parts.netloc or not path.is_absolute() or path == Path("/"):
        raise ConfigError(f"tier {name}: write disk:///directory, with three slashes and a directory of its own")
    if own.policy not in POLICIES:
        raise ConfigError(f"tier {name}: {own.policy!r} is not one of the policies {', '.join(POLICIES)}")
    return Disk(path, int(own.capacity_gib * 2**30), own.policy)


class Disk:
    """Objects in a directory. When that is gone, calls raise TierError until `usage` has found it again."""

    def __init__(self, path: Path, capacity_bytes: int, policy: str = "lru") -> None:
        self.counters: Counter[str] = Counter()
        self._path = path
        self._capacity_bytes = capacity_bytes
        self._policy = policy
        self._opening = threading.Lock()
        self._closed = False
        self._folder = self._open()
        self._device = device_of(path)

    def __repr__(self) -> str:
        return f"<Disk {self._folder!r}>"

    def _open(self) -> Folder:
        return Folder(self._path, Ledger(self._capacity_bytes, self._policy), self.counters)

    def _reopen(self) -> None:
        """Raises TierError where the directory is not back."""
        self._folder.close()
        if not self._folder.is_marked() and device_of(self._path) != self._device:
            raise TierError(f"{self._path} is gone: its file system is not mounted")
        try:
            self._folder = self._open()
        except ConfigError as exc:  # somebody else's by now
            raise TierError(str(exc)) from exc

    def attach(self, memory: Sequence[memoryview]) -> None:
        """Nothing to prepare."""

    def find(self, names: Sequence[str]) -> list[bool]:
        with self._folder.call() as folder:
            return folder.find(names)

    def read(self, blobs: Sequence[Blob]) -> list[int]:
        with self._folder.call() as folder:
            return [folder.read(blob) for blob in blobs]

    def write(self, blobs: Sequence[Blob]) -> list[bool]:
        with self._folder.call() as folder:
            return [folder.write(blob) for blob in blobs]

    def remove(self, names: Sequence[str], spoilt: bool = False) -> None:
        with self._folder.call() as folder:
            folder.remove(names, spoilt)

    def forget(self, salt: str, space: str) -> int:
        with self._folder.call() as folder:
            return folder.forget(salt, space)

    def usage(self) -> Usage:
        """Without objects and bytes while the directory is being counted. Takes up a directory that was gone."""
        with self._opening:
            if self._folder.gone and not self._closed:
                self._reopen()
        with self._folder.call() as folder:
            return folder.usage()

    def close(self) -> None:
        """Waits for calls under way; where the disk holds them up for long, the directory stays locked."""
        with self._opening:
            self._closed = True
            self._folder.close()
