"""The `object` tier: objects of an S3, Google or Azure bucket, or files of a directory that hosts share, by obstore.

    s3://bucket[/prefix]?...    any S3 API, e.g. endpoint=http://127.0.0.1:9000&region=us-east-1
    gs://bucket[/prefix]        Google Cloud Storage
    az://container[/prefix]     Azure Blob Storage
    file:///directory           files, e.g. on NFS; for one host's disk see the `disk` tier, which has a bound

Credentials come from the environment as each store's own tools read it (`AWS_ACCESS_KEY_ID`, roles of an instance,
`GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_NAME`, ...). Needed are reading, writing, deleting and listing:
without the right to list, S3 answers "forbidden" for what is not there. A PUT is seen whole or not at all.

A batch is done by threads of its own with obstore's blocking calls, which let go of the GIL; its asyncio calls were as
fast and need a loop. An object goes up in one PUT, whatever its size (parts were slower for 8 and 32 MiB, cost more
requests, and are left behind by who dies), and comes down as a stream, copied while the rest is on its way.

Known weaknesses: `find` costs one HEAD a name; nothing bounds what a bucket holds (use its lifecycle rules); a file
server that hangs hangs the calls on `file://`, for the kernel ends none of them, and one that is not mounted is not
missed: a directory is made in its place.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import obstore
from msgspec import Meta
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, LocalStore, S3Store

from kvdepot.errors import ConfigError, TierError
from kvdepot.tiers import Blob, Usage, convert
from kvdepot.tiers.pieces import fill
from kvdepot.tiers.urls import redact, shown

__all__ = ["ObjectOptions", "ObjectTier", "open"]

log = logging.getLogger(__name__)

LARGEST_BYTES = 4 << 30
"""Below what one PUT may bring to any of these stores."""
PART_BYTES = 1 << 20
"""What a stream hands over at once, at least."""
DELETE_NAMES = 1000
_FULL = re.compile("status code: 507|QuotaExceeded|StorageFull|No space left on device|Disk quota exceeded")

In = TypeVar("In")
Out = TypeVar("Out")


class ObjectOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the URL that this tier has beside the common ones."""

    endpoint: Annotated[str, Meta(description="server URL, if not the store's default (s3, az)")] = ""
    region: Annotated[str, Meta(description="region of the bucket (s3)")] = ""
    account: Annotated[str, Meta(description="storage account (az)")] = ""
    tls_ca: Annotated[str, Meta(description="file with CAs to trust in addition to the system's (PEM)")] = ""
    timeout_s: Annotated[float, Meta(gt=0, le=600, description="timeout of a request, in seconds")] = 10.0
    retries: Annotated[int, Meta(ge=0, le=10, description="retries of a request that failed before the timeout")] = 2
    requests: Annotated[int, Meta(ge=1, le=256, description="concurrent requests, for each of `threads`")] = 16


_MEANT_FOR = {"endpoint": ("s3", "az"), "region": ("s3",), "account": ("az",), "tls_ca": ("s3", "gs", "az")}


def open(url: str, options: dict[str, str], threads: int) -> ObjectTier:
    """The tier at `url`. Connects when first asked. Raises ConfigError that names what is wrong."""
    name = shown(url)
    own: ObjectOptions = convert(options, ObjectOptions, name)
    kind, _, rest = url.partition("://")
    for option, kinds in _MEANT_FOR.items():
        if getattr(own, option) and kind not in kinds:
            raise ConfigError(f"tier {name}: {option} does not apply to {kind}://")
    try:
        if kind == "file":
            path = Path(rest)
            if not path.is_absolute():
                raise ConfigError(f"tier {name}: the path must be absolute: file:///directory")
            _make_directory(path)
            return ObjectTier(name, LocalStore(path, mkdir=True), own, path)
        bucket, _, prefix = rest.partition("/")
        if not bucket:
            raise ConfigError(f"tier {name}: there is no bucket")
        return ObjectTier(name, _store(kind, bucket, prefix.strip("/") or None, own), own)
    except OSError as exc:
        raise ConfigError(f"tier {name}: {exc.filename}: {exc.strerror}") from exc
    except (BaseError, ValueError) as exc:
        raise ConfigError(f"tier {name}: {_told(exc)}") from None


def _make_directory(path: Path) -> None:
    """For this user alone where there is none. Raises OSError."""
    if path.exists():
        if (mode := path.stat().st_mode & 0o777) & 0o007:
            log.warning("%s has mode %04o: other users of this host can access the objects in it", path, mode)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)


def _store(kind: str, bucket: str, prefix: str | None, own: ObjectOptions) -> S3Store | GCSStore | AzureStore:
    limit = timedelta(seconds=own.timeout_s)
    client: Any = {"timeout": limit, "connect_timeout": limit, "allow_http": own.endpoint.startswith("http://")}
    if own.tls_ca:
        client["root_certificate"] = Path(own.tls_ca).read_bytes()
    # What took all of `timeout_s` is not tried again: a server that hangs is known after that.
    retry: Any = {"max_retries": own.retries, "retry_timeout": limit}
    if kind == "gs":
        return GCSStore(bucket, prefix=prefix, client_options=client, retry_config=retry)
    place = {"endpoint": own.endpoint} if own.endpoint else {}
    if kind == "az":
        place |= {"account_name": own.account} if own.account else {}
        return AzureStore(bucket, prefix=prefix, config=place, client_options=client, retry_config=retry)  # type: ignore[arg-type]
    place |= {"region": own.region} if own.region else {}
    return S3Store(bucket, prefix=prefix, config=place, client_options=client, retry_config=retry)  # type: ignore[arg-type]


class ObjectTier:
    """Objects in a bucket. Threads: any; what they share is obstore's store and two counters under a lock."""

    def __init__(
        self,
        name: str,
        store: S3Store | GCSStore | AzureStore | LocalStore,
        options: ObjectOptions,
        path: Path | None = None,
    ) -> None:
        """path: of the directory, where it is one."""
        self._name = name
        self._store = store
        self._options = options
        self._path = path
        self._closed = False
        self._lock = threading.Lock()
        self._counters = {"refused": 0, "spoilt": 0}

    def __repr__(self) -> str:
        counts = "".join(f", {name} {count}" for name, count in self._counters.items())
        return f"<ObjectTier {self._name}{counts}>"

    def attach(self, memory: Sequence[memoryview]) -> None:
        """Nothing: any memory will do."""

    def find(self, names: Sequence[str]) -> list[bool]:
        """A HEAD each, many at once."""
        return self._each(self._head, names)

    def read(self, blobs: Sequence[Blob]) -> list[int]:
        """A GET each, many at once."""
        return self._each(self._get, blobs)

    def write(self, blobs: Sequence[Blob]) -> list[bool]:
        """A PUT each, many at once. False: too large, or the store says that it is full."""
        kept = self._each(self._put, blobs)
        self._count("refused", kept.count(False))
        return kept

    def remove(self, names: Sequence[str], spoilt: bool = False) -> None:
        """Spoilt ones are counted; none are kept aside."""
        if isinstance(self._store, S3Store):
            with self._edge():
                for start in range(0, len(names), DELETE_NAMES):
                    obstore.delete(self._store, names[start : start + DELETE_NAMES])
        else:  # which have nothing for many names, or fail at the first that is not there
            self._each(self._delete, names)
        self._count("spoilt", len(names) if spoilt else 0)

    def forget(self, salt: str, space: str) -> int:
        """Lists the folders of the first two parts, then what lies in those that are meant."""
        gone = 0
        for first in self._folders("", salt):
            for folder in self._folders(first, space):
                with self._edge():
                    pages = obstore.list(self._store, folder, chunk_size=DELETE_NAMES)
                for page in self._pages(pages):
                    self.remove([found["path"] for found in page])
                    gone += len(page)
        return gone

    def usage(self) -> Usage:
        """capacity_bytes: of the file system, where it is one. A bucket does not tell what it holds."""
        capacity = None
        with self._edge():
            if self._path is not None:
                room = os.statvfs(self._path)
                capacity = room.f_blocks * room.f_frsize
            else:
                for _ in obstore.list(self._store, "no-name-begins-so"):  # the least that a bucket can be asked
                    pass
        return Usage(capacity_bytes=capacity, counters=dict(self._counters))

    def close(self) -> None:
        """Calls under way go on to their end; obstore drops its connections with the tier."""
        self._closed = True

    # -- one object

    def _head(self, name: str) -> bool:
        with self._edge(), suppress(FileNotFoundError):
            obstore.head(self._store, name)
            return True
        return False

    def _get(self, blob: Blob) -> int:
        with self._edge():
            try:
                found = obstore.get(self._store, blob.name)
            except FileNotFoundError:
                return -1
            size = found.meta["size"]
            if size > blob.size:
                return size
            # A file is read at once: its stream takes a trip to another thread for every few KiB.
            parts: Any = [found.bytes()] if self._path is not None else found.stream(PART_BYTES)
            if (came := fill(blob.buffers, parts)) != size:
                raise TierError(f"{self._name}: {came} of {size} bytes arrived")
            return size

    def _put(self, blob: Blob) -> bool:
        if blob.size > LARGEST_BYTES:
            return False
        try:
            with self._edge():
                obstore.put(self._store, blob.name, list(blob.buffers), use_multipart=False)
        except TierError as exc:
            if _FULL.search(str(exc)):  # it can be read from all the same
                return False
            raise
        return True

    def _delete(self, name: str) -> None:
        with self._edge(), suppress(FileNotFoundError):
            obstore.delete(self._store, name)

    # -- beneath

    def _each(self, ask: Callable[[In], Out], items: Sequence[In]) -> list[Out]:
        """`ask` of each item, several at once; the first TierError ends it when what is under way has ended."""
        if len(items) < 2:
            return [ask(item) for item in items]
        failed = threading.Event()

        def one(item: In) -> Out:
            if failed.is_set():
                raise TierError(f"{self._name}: another object of this batch failed")
            try:
                return ask(item)
            except TierError:
                failed.set()  # before this thread takes the next item, which would wait as long as this one
                raise

        with ThreadPoolExecutor(min(self._options.requests, len(items))) as threads:
            return list(threads.map(one, items))

    def _folders(self, place: str, begins: str) -> list[str]:
        with self._edge():
            found = obstore.list_with_delimiter(self._store, place or None)
        return [path for path in found["common_prefixes"] if path.rpartition("/")[2].startswith(begins)]

    def _pages(self, pages: Any) -> Iterator[Any]:
        while True:
            with self._edge():
                page = next(pages, None)
            if page is None:
                return
            yield page

    @contextmanager
    def _edge(self) -> Iterator[None]:
        """What obstore raises is TierError from here on."""
        if self._closed:
            raise TierError(f"{self._name} is closed")
        try:
            yield
        except (BaseError, OSError, ValueError) as exc:
            raise TierError(f"{self._name}: {_told(exc)}") from None

    def _count(self, name: str, count: int) -> None:
        with self._lock:
            self._counters[name] += count


def _told(exc: Exception) -> str:
    """What an error of obstore says, on a line, with the one word of its dump that tells why."""
    text = str(exc)
    why = re.search(r'<Code>(\w+)</Code>|message: "([^"]*)"|source: (TimedOut)', text)
    said = text.partition("\n")[0].partition("<?xml")[0].strip()
    return redact(said + (f" ({why[1] or why[2] or why[3]})" if why else ""))
