"""The `object` tier: objects of an S3, Google or Azure bucket, or files of a directory that hosts share, with obstore.

    s3://bucket[/prefix]?...    any S3 API, e.g. endpoint=http://127.0.0.1:9000&region=us-east-1
    gs://bucket[/prefix]        Google Cloud Storage
    az://container[/prefix]     Azure Blob Storage
    file:///directory           files, e.g. on NFS; for one host's disk use the `disk` tier, which is bounded

Credentials come from the environment as each store's own tools read it (`AWS_ACCESS_KEY_ID`, roles of an instance,
`GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_NAME`, ...). They must allow reading, writing, deleting and
listing: without the right to list, S3 answers "forbidden" for missing objects. A PUT is atomic.

A batch runs on threads of its own with obstore's blocking calls, which release the GIL; its asyncio calls were as fast
and need a loop. An object is uploaded in one PUT, whatever its size (parts were slower for 8 and 32 MiB, cost more
requests, and stay behind if the uploader dies), and downloaded as a stream that is copied as it arrives.

Known weaknesses: `find` costs one HEAD per name; nothing bounds a bucket (use its lifecycle rules); calls on `file://`
hang with the file server, because the kernel does not end them; if the file server is not mounted, a directory is made
in its place.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias, TypeVar
from urllib.parse import urlsplit

import msgspec
import obstore
from msgspec import Meta
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, LocalStore, S3Store

from kvdepot.errors import ConfigError, TierError
from kvdepot.tiers import Blob, Tally, TierUsage, convert
from kvdepot.tiers.codec import fill
from kvdepot.tiers.urls import redact, shown, shown_option

if TYPE_CHECKING:  # obstore has these in its stubs alone
    from obstore import Bytes
    from obstore.store import ClientConfig, RetryConfig

log = logging.getLogger(__name__)

LARGEST_BYTES = 4 << 30
"""Below the limit of one PUT of any of these stores."""
PART_BYTES = 1 << 20
"""Minimum size of a stream's parts."""
DELETE_NAMES = 1000
_FULL = re.compile("status code: 507|QuotaExceeded|StorageFull|No space left on device|Disk quota exceeded")

_HOST = re.compile(r"[A-Za-z0-9._\-]+|[0-9a-f:.]*:[0-9a-f:.]*")
_WORD = re.compile(r"[A-Za-z0-9._\-]+")
"""The form of names of buckets, containers and regions, to be matched in full."""

_user = 0
"""The id of the process that has opened tiers; 0: none has."""

In = TypeVar("In")
Out = TypeVar("Out")


class ObjectOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    endpoint: Annotated[str, Meta(description="server URL, if not the store's default (s3, az)")] = ""
    region: Annotated[str, Meta(description="region of the bucket (s3)")] = ""
    account: Annotated[str, Meta(description="storage account (az)")] = ""
    tls_ca: Annotated[str, Meta(description="file with CAs to trust in addition to the system's (PEM)")] = ""
    timeout_s: Annotated[float, Meta(gt=0, le=600, description="timeout of a request, in seconds")] = 10.0
    retries: Annotated[int, Meta(ge=0, le=10, description="retries of a request that failed before the timeout")] = 2
    requests: Annotated[int, Meta(ge=1, le=256, description="concurrent requests, for each of `threads`")] = 16


_Store: TypeAlias = S3Store | GCSStore | AzureStore
_STORES: dict[str, Callable[..., _Store]] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
_MEANT_FOR = {"endpoint": ("s3", "az"), "region": ("s3",), "account": ("az",), "tls_ca": ("s3", "gs", "az")}


def open(url: str, options: dict[str, str], threads: int) -> ObjectTier:
    """The tier at `url`. Connects at the first call. Raises ConfigError, also in a child that was forked afterwards:
    obstore would hang there."""
    global _user
    name = shown(url)
    if _user not in (0, os.getpid()):
        raise ConfigError(f"tier {name}: obstore's threads do not survive the fork of this process: spawn it instead")
    _user = os.getpid()
    own = convert(options, ObjectOptions, name)
    if fault := _fault_of_endpoint(own.endpoint):
        raise ConfigError(f"tier {name}: endpoint: {fault}")
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
        for text, what in ((bucket, "bucket"), (own.region or "default", "region")):
            if not _WORD.fullmatch(text):
                raise ConfigError(f"tier {name}: the name of the {what} has other characters than A-Z a-z 0-9 . _ -")
        return ObjectTier(name, _store(kind, bucket, prefix.strip("/") or None, own), own)
    except OSError as exc:
        raise ConfigError(f"tier {name}: {exc.filename}: {exc.strerror}") from exc
    except (BaseError, ValueError) as exc:
        raise ConfigError(f"tier {name}: {_told(exc)}") from None


def _fault_of_endpoint(endpoint: str) -> str:
    """The fault of an `endpoint`, at which obstore might panic; empty: none."""
    if not endpoint or _is_address(endpoint):
        return ""
    if "://" not in endpoint and _is_address(f"http://{endpoint}"):
        return f"it has no scheme: write {shown_option(f'http://{endpoint}')} or {shown_option(f'https://{endpoint}')}"
    return f"{shown_option(endpoint)!r} is not a URL such as http://10.0.0.7:9000"


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        is_port = parts.port != 0
    except ValueError:
        return False
    is_host = _HOST.fullmatch(parts.hostname or "") is not None
    return parts.scheme in ("http", "https") and is_host and is_port and not re.search(r"[?#\s]", url)


def _make_directory(path: Path) -> None:
    """Make the directory, for this user alone, if there is none. Raises OSError."""
    if path.exists():
        if (mode := path.stat().st_mode & 0o777) & 0o007:
            log.warning("%s has mode %04o: other users of this host can access the objects in it", path, mode)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)


def _store(kind: str, bucket: str, prefix: str | None, own: ObjectOptions) -> _Store:
    limit, is_plain = timedelta(seconds=own.timeout_s), own.endpoint.startswith("http://")
    client: ClientConfig = {"timeout": limit, "connect_timeout": limit, "allow_http": is_plain}
    if own.tls_ca:
        client["root_certificate"] = Path(own.tls_ca).read_bytes()
    # A request that took all of `timeout_s` is not retried: the server hangs.
    retry: RetryConfig = {"max_retries": own.retries, "retry_timeout": limit}
    values = {"endpoint": own.endpoint, "region": own.region, "account_name": own.account}
    config = {name: value for name, value in values.items() if value}
    return _STORES[kind](bucket, prefix=prefix, config=config, client_options=client, retry_config=retry)


class ObjectTier:
    """Objects in a bucket. Any thread: obstore's store is all that threads share."""

    def __init__(self, name: str, store: _Store | LocalStore, options: ObjectOptions, path: Path | None = None) -> None:
        self._name = name
        self._store = store
        self._options = options
        self._path = path
        self._closed = False
        self._tally = Tally("refused")

    def attach(self, memory: Sequence[memoryview]) -> None:
        """Do nothing: HTTP sends from and reads into any memory."""

    def find(self, names: Sequence[str]) -> list[bool]:
        return self._each(self._head, names)

    def read(self, blobs: Sequence[Blob]) -> list[int | None]:
        return self._each(self._get, blobs)

    def write(self, blobs: Sequence[Blob]) -> list[bool]:
        """One PUT for each object, concurrently. False: too large, or the store says that it is full."""
        kept = self._each(self._put, blobs)
        self._tally("refused", kept.count(False))
        return kept

    def remove(self, names: Sequence[str]) -> None:
        def delete(name: str) -> None:
            with self._edge(), suppress(FileNotFoundError):
                obstore.delete(self._store, name)

        if isinstance(self._store, S3Store):  # 404 is no missing object there, but a missing bucket or operation
            for start in range(0, len(names), DELETE_NAMES):
                with self._edge():
                    obstore.delete(self._store, names[start : start + DELETE_NAMES])
        else:  # these stores have no batches, or fail at the first missing name
            self._each(delete, names)

    def forget(self, salt: str, space: str) -> int:
        """List the folders of the first two parts of names, then the objects in folders that match."""
        gone = 0
        for folder in [folder for first in self._folders("", salt) for folder in self._folders(first, space)]:
            with self._edge():
                for page in obstore.list(self._store, folder, chunk_size=DELETE_NAMES):
                    self.remove([found["path"] for found in page])
                    gone += len(page)
        return gone

    def usage(self) -> TierUsage:
        """capacity_bytes: of the file system, for `file://`. A bucket does not report its size."""
        with self._edge():
            room = None if self._path is None else os.statvfs(self._path)
            if room is None:
                list(obstore.list(self._store, "no-name-begins-so"))  # the cheapest request
        capacity_bytes = None if room is None else room.f_blocks * room.f_frsize
        return TierUsage(capacity_bytes=capacity_bytes, counters=self._tally.counts())

    def close(self) -> None:
        """Calls in progress continue; obstore closes its connections with the tier."""
        self._closed = True

    # -- one object

    def _head(self, name: str) -> bool:
        with self._edge(), suppress(FileNotFoundError):
            obstore.head(self._store, name)
            return True
        return False

    def _get(self, blob: Blob) -> int | None:
        with self._edge():
            try:
                found = obstore.get(self._store, blob.name)
            except FileNotFoundError:
                return None
            size = found.meta["size"]
            if size > blob.size:
                return size
            # A file is read at once: its stream switches threads every few KiB.
            parts: Iterable[Bytes | bytes] = [found.bytes()] if self._path is not None else found.stream(PART_BYTES)
            if (came := fill(blob.buffers, map(memoryview, parts))) != size:
                raise TierError(f"{self._name}: {came} of {size} bytes arrived")
            return size

    def _put(self, blob: Blob) -> bool:
        if blob.size > LARGEST_BYTES:
            return False
        try:
            with self._edge():
                obstore.put(self._store, blob.name, list(blob.buffers), use_multipart=False)
        except TierError as exc:
            if _FULL.search(str(exc)):  # reads still work
                return False
            raise
        return True

    # -- internals

    def _each(self, ask: Callable[[In], Out], items: Sequence[In]) -> list[Out]:
        """`ask` each item, concurrently. Raises the first TierError, after the requests in progress have ended."""
        if len(items) < 2:
            return [ask(item) for item in items]
        failed = threading.Event()

        def one(item: In) -> Out:
            if failed.is_set():
                raise TierError(f"{self._name}: another object of this batch failed")
            try:
                return ask(item)
            except TierError:
                failed.set()  # set before this thread takes the next item, which would take as long to fail
                raise

        with ThreadPoolExecutor(min(self._options.requests, len(items))) as threads:
            return list(threads.map(one, items))

    def _folders(self, place: str, begins: str) -> list[str]:
        with self._edge():
            found = obstore.list_with_delimiter(self._store, place or None)
        return [path for path in found["common_prefixes"] if path.rpartition("/")[2].startswith(begins)]

    @contextmanager
    def _edge(self) -> Iterator[None]:
        """Turns what obstore raises into TierError."""
        if self._closed:
            raise TierError(f"{self._name} is closed")
        try:
            yield
        except (BaseError, OSError, ValueError) as exc:
            raise TierError(f"{self._name}: {_told(exc)}") from None
        except BaseException as exc:  # a panic of obstore's Rust code
            if isinstance(exc, Exception):
                raise
            advice = "check the bucket, and the endpoint in the URL, AWS_ENDPOINT_URL or AZURE_STORAGE_ENDPOINT"
            raise TierError(f"{self._name}: obstore panicked ({_told(exc)}): {advice}") from None


def _told(exc: BaseException) -> str:
    """The first line of an error of obstore, with the one word of the other lines that gives the reason."""
    text = str(exc)
    why = re.search(r'<Code>(\w+)</Code>|message: "([^"]*)"|source: (TimedOut)', text)
    said = text.partition("\n")[0].partition("<?xml")[0].strip()
    return redact(said + (f" ({why[1] or why[2] or why[3]})" if why else ""))
