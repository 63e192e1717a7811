"""Storage behind memory: the contract of every tier, and how a tier is written in the settings.

A tier keeps objects: bytes under a name. It knows nothing about chunks, engines or the arena: format.py defines what
names and bytes mean, core/tiering/ decides which tier is asked for what, and worker.py calls the methods on the tier's
own threads. So the methods may block; their callers have the deadlines, the circuit breaker and a bounded queue. Every
tier must pass the suite in kvdepot.testing.tiers.

A tier is written as a URL (`parse`): `disk:///var/cache/kv?capacity_gib=100&write=through`.
"""

from __future__ import annotations

import importlib
import re
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Protocol, TypeVar, runtime_checkable
from urllib.parse import parse_qsl, urlsplit

import msgspec
from msgspec import Meta

from kvdepot import install
from kvdepot.errors import ConfigError, KVDepotError
from kvdepot.tiers.rules import Rules
from kvdepot.tiers.urls import credentials_of, has_ambiguous_secret, has_place, redact, secrets_of, shown
from kvdepot.values import explain, in_units, suggestion

__all__ = [
    "KINDS", "NAME", "Blob", "Enforcing", "Options", "Tally", "Tier", "TierConfig", "TierUsage", "convert", "parse",
]  # fmt: skip

KINDS = {
    "disk": "disk",
    "redis": "redis",
    "rediss": "redis",
    "redis+cluster": "redis",
    "rediss+cluster": "redis",
    "s3": "object",
    "gs": "object",
    "az": "object",
    "file": "object",
    "mooncake": "mooncake",
}
"""URL scheme -> the kind of tier: a module here that has `open(url, options: dict[str, str], threads) -> Tier`."""

_SECRET = re.compile("secret|token|pass|pwd|credential|key|auth|signature|^sig$|^sas", re.IGNORECASE)
"""The name of an option that seems to hold a secret contains one of these."""

NAME = re.compile(r"(?=.{1,160}\Z)[0-9a-f]{32}/[0-9a-f]{32}/[0-9a-f]+\.[0-9a-f]+")
"""The form of names (`fullmatch`): salt, space, key and rank, at most 160 characters."""

OptionsT = TypeVar("OptionsT", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True, eq=False)
class Blob:
    """One object to read or write: its name, and its bytes as a sequence of buffers.

    name: `salt/space/key.rank`, as matched by NAME; kvdepot uses no other names. buffers: contiguous, of bytes, at any
    address, none empty, possibly thousands. For a write: the bytes to store, concatenated (may be read-only). For a
    read: the destination, filled in order; large enough for the object unless the object does not match its name, and
    possibly larger. An object has at least one byte. born: for a write, when the bytes were computed, in seconds since
    1970; 0: not known, which counts as now.
    """

    name: str
    buffers: Sequence[memoryview]
    born: int = 0

    @property
    def size(self) -> int:
        return sum(len(buffer) for buffer in self.buffers)


class TierUsage(msgspec.Struct, frozen=True):
    """The contents of a tier; None for values that the tier cannot determine quickly."""

    objects: int | None = None
    bytes: int | None = None
    capacity_bytes: int | None = None
    counters: dict[str, int] = {}
    """Counters since the start, e.g. `evicted`, `expired`."""
    owners: dict[str, int] = {}
    """Bytes that count for each quota (by `rules.owner_prefix`), if the tier enforces quotas."""
    free_bytes: int | None = None
    """Bytes that are left in a file system that the tier shares with others."""


class Tally:
    """A tier's own counters (`TierUsage.counters`, named as in `protocol.counters.TIER`).
    Any thread."""

    def __init__(self, *names: str) -> None:
        """names: counters that are shown from the start, at 0."""
        self._lock = threading.Lock()
        self._counters = Counter(dict.fromkeys(names, 0))

    def __call__(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counters[name] += count

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counters)


class Tier(Protocol):
    """Named objects in a store.

    Every method may block, may be called by several threads at once, and takes many objects at a time, which it handles
    in as few round trips as the store allows. It raises TierError if the whole store is unavailable (not reachable,
    access refused); the state of the call's objects is then unknown. A problem with one object is reported in that
    object's answer. No method touches a buffer after it has returned or raised. Tiers do not pin: the caller keeps the
    buffers alive until the method returns, and an object may disappear at any time between two calls.
    """

    def attach(self, memory: Sequence[memoryview]) -> None:
        """Called once, before anything else: most buffers will be in these areas, which outlive the tier.

        For stores that register memory (RDMA). Buffers elsewhere must work too.
        """

    def find(self, names: Sequence[str]) -> list[bool]:
        """Which of these exist, one answer per name. True may be outdated a moment later; it does not guarantee a read.

        A policy may count this as a use. Must not read the objects.
        """

    def read(self, blobs: Sequence[Blob]) -> list[int | None]:
        """Fill the buffers, one answer per blob: the object's size in bytes, or None if it does not exist.

        If an object is larger than the buffers, the answer is its size and the buffers' contents are undefined, as are
        bytes after a shorter object. An object answered as read has arrived completely and in order; buffers never mix
        two objects. One name may be requested twice, into different buffers.
        """

    def write(self, blobs: Sequence[Blob]) -> list[bool]:
        """Store objects, one answer per blob: whether it now exists, complete. Existing objects are replaced or kept.

        False: refused (too large, no space, not now); a previous object may still exist. Writes are atomic for `find`
        and `read` on every host: no reader ever gets part of an object, even if this process is killed. A name occurs
        once per call.
        """

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects; missing names are ignored. No read that begins after the return finds them."""

    def forget(self, salt: str, space: str) -> int:
        """Remove every object whose name's first part begins with `salt` and second with `space`; returns how many.

        Empty strings match all. Objects written meanwhile may stay. The number is exact without concurrent calls.
        """

    def usage(self) -> TierUsage:
        """Count the tier's objects. Cheap, as it also serves as the probe of a failed tier. Raises TierError."""

    def close(self) -> None:
        """Release connections, threads and files; objects stay. May be called twice.

        Calls in progress and later calls may fail with TierError, or behave as if the tier were empty.
        """


@runtime_checkable
class Enforcing(Tier, Protocol):
    """A local tier: it can enforce quotas and times to live, because no other server has objects in it."""

    def enforce(self, rules: Rules, wall: float) -> bool:
        """Follow these rules from now on, and remove what has expired at `wall` (seconds since 1970) or exceeds a cap.

        One call removes a bounded number of objects; returns whether to call again at once. A write takes no object
        from an owner that has no more than its floor. An owner above its cap loses an object of its own to each write.
        """


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options that every tier's URL accepts; each field's description is its help text."""

    write: Annotated[
        str,
        Meta(
            pattern=r"^(through|on_evict|off)\Z",
            description="through: write stored chunks; on_evict: write evicted chunks; off: write nothing",
        ),
    ] = "through"
    compress: Annotated[
        str, Meta(pattern=r"^(off|zstd)\Z", description="off, or zstd: byte shuffle and zstd, lossless")
    ] = "off"
    key_file: Annotated[str, Meta(description="file with 32 bytes in hex; encrypts objects (AES-256-GCM)")] = ""
    ttl_s: Annotated[int, Meta(ge=0, description="seconds after which chunks expire; 0 = never")] = 0
    threads: Annotated[int, Meta(ge=1, le=64, description="concurrent reads and writes")] = 4
    queue_mib: Annotated[
        int, Meta(ge=1, description="size of the write queue, in MiB or as 2GiB; writes beyond it are dropped")
    ] = 1024


class TierConfig(msgspec.Struct, frozen=True):
    """One tier of the settings."""

    kind: str
    url: str
    """The URL without options."""
    options: Options
    own: dict[str, str]
    """Options of this kind of tier alone."""
    secrets: tuple[str, ...] = ()
    """Credentials, which a library may quote."""
    rules: Rules = Rules()
    """The rules that a local tier follows from the start."""

    def __repr__(self) -> str:
        return f"<TierConfig {self.name}>"

    @property
    def name(self) -> str:
        """The URL without credentials and options, for people."""
        return shown(credentials_of(self.url)[2])

    @property
    def is_local(self) -> bool:
        """Whether it is `Enforcing`; all other tiers are shared by servers."""
        return self.kind == "disk"

    def redact(self, exc: BaseException) -> str:
        """The message of a library's error without this tier's secrets."""
        return redact(str(exc), self.secrets)

    def open(self) -> Tier:
        """The tier itself. Blocks. Raises ConfigError, or TierError if the store is unavailable."""
        try:
            rules = (self.rules,) if self.is_local else ()
            tier: Tier = self.module().open(self.url, dict(self.own), self.options.threads, *rules)
        except KVDepotError as exc:
            raise type(exc)(str(exc)) from None  # a cause may quote the URL
        return tier

    def module(self) -> ModuleType:
        """The module of this kind of tier, imported now, which may block. Raises ConfigError if a package is
        missing."""
        kind = KINDS[self.kind]
        try:
            return importlib.import_module(f"kvdepot.tiers.{kind}")
        except ImportError as exc:
            raise ConfigError(f"tier {self.name}: {exc.name} is missing; {install.advice(kind)}") from exc


def parse(text: str) -> TierConfig:
    """A tier's URL with its options. Raises ConfigError that names what is wrong, without the credentials."""
    scheme, colon, rest = text.partition("://")
    if not colon or scheme not in KINDS:
        known = ", ".join(kind + "://" for kind in KINDS)
        close = "redis" if scheme == "valkey" else "disk" if text.startswith("/") else suggestion(scheme, KINDS)
        meant = f"; did you mean {close}://?" if close else ""
        raise ConfigError(f"tiers: {shown(text)!r} does not begin with one of {known}{meant}")
    if has_ambiguous_secret(text):
        raise ConfigError(
            f"tiers: {shown(text)!r} contains a space, a #, or an @ after a ?; percent-encode them (%20, %23, %40), "
            "and a ? in a password (%3F)"
        )
    try:
        query = urlsplit(text).query
    except ValueError:
        raise ConfigError(f"tiers: {shown(text)!r} is not a URL") from None  # whose text may quote a password
    if not has_place(text):
        raise ConfigError(f"tiers: {shown(text)!r} has no host:port, or no bucket, after ://")
    place, _, _ = rest.partition("?")
    if "@" in place and KINDS[scheme] != "redis" and not (KINDS[scheme] != "mooncake" and place.startswith("/")):
        raise ConfigError(f"tiers: {shown(text)!r}: {scheme}:// does not accept a user or password in its URL")
    given = dict(parse_qsl(query.replace("+", "%2B"), keep_blank_values=True))  # a + is no space, as in a path
    common = {name: given.pop(name) for name in Options.__struct_fields__ if name in given}
    config = TierConfig(scheme, text.partition("?")[0], Options(), given, tuple(secrets_of(text)))
    return msgspec.structs.replace(config, options=convert(common, Options, config.name))


def convert(given: dict[str, str], kind: type[OptionsT], name: str) -> OptionsT:
    """Options of a URL as a struct. Raises ConfigError that names the tier and the option."""
    if unknown := [option for option in given if option not in kind.__struct_fields__]:
        raise ConfigError(f"tier {name}: {_unknown(unknown, kind)}")
    values = in_units(given)
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as exc:
        option, said = explain(exc, values)
        raise ConfigError(f"tier {name}: {option}: {said}" if option else f"tier {name}: {said}") from exc


def _unknown(options: Sequence[str], kind: type[msgspec.Struct]) -> str:
    if any(_SECRET.search(option) for option in options):  # a part of the secret may look like another option
        return "no option holds a secret; they come from files or the environment, as docs/tiers.md says"
    option = options[0]
    meant = suggestion(option, (*kind.__struct_fields__, *Options.__struct_fields__))
    if not meant and not re.fullmatch("[a-z_]{1,20}", option):
        return "an unknown option"  # its name is not shown, as it may be the rest of a password with a ? in it
    return f"unknown option {option} (did you mean {meant}?)" if meant else f"unknown option {option}"
