"""The `mooncake` tier: objects in the pooled memory of many hosts, by Mooncake Store's own client.

    mooncake://master[:50051]/?local_host=10.0.0.7&segment_gib=64&protocol=tcp
    mooncake://master[:50051]/?local_host=10.0.0.7&segment_gib=64&protocol=rdma&device=mlx5_0,mlx5_1

`mooncake_master` knows where objects are and evicts them; every host gives a segment of its memory to the pool
(`segment_gib`; 0: none) and moves bytes to and from the others' segments by itself. Package
mooncake-transfer-engine-non-cuda; Debian: libibverbs1 librdmacm1 libnuma1 libcurl4.

Bytes go between segments and the caller's buffers directly. With TCP any memory will do, and the arena is **not**
registered: the client listens on all of the host's addresses, asks nobody who they are, and lets them read and write
all that is registered. So whoever reaches that port can change what lies in this host's segment (the sum in each object
finds that; `key_file` also keeps it secret), but not the arena. With RDMA what `attach` brings is registered, and bytes
elsewhere are staged. RDMA needs `device`: without one the library falls back to TCP and says nothing.

The library reads its settings from the environment. `open` sets those of ENVIRONMENT that are not there: what it says
below ERROR is dropped, its calls to the master end after two seconds, its transfers after five without progress. It
gives the GIL free while it moves bytes or waits for the master, but not while it joins the pool or leaves it. So
joining is tried in another process first, which leaves milliseconds of it; leaving (`close`) takes up to some seconds,
in which other threads of this process stand still.

Known weaknesses: objects end with the segment they lie in, and the master promises those of a dead host for ten seconds
more (`-client_ttl`); reading them answers -1. `remove` takes objects also from other hosts that are just reading them:
what they get may be a mixture, which only the sum in the object finds.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
from msgspec import Meta

from kvdepot.errors import ConfigError, TierError
from kvdepot.tiers import Blob, Usage, convert
from kvdepot.tiers.membership import Membership, known, library
from kvdepot.tiers.urls import shown

__all__ = ["ENVIRONMENT", "MooncakeOptions", "MooncakeTier", "open"]

ENVIRONMENT = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "2",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
}
"""Settings of the library that `open` makes where the environment has none."""
PORT = 50051
PREFIX = "kvdepot/"
"""What the names of our objects begin with, in a pool that others may use, too."""
MOST_SPANS = 256
"""Pieces of memory in one call; what lies in more is staged."""
_NOT_FOUND, _NOT_READY, _EXISTS = -704, -703, -705


class MooncakeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of the URL that this tier has beside the common ones."""

    local_host: Annotated[
        str,
        Meta(description="this host's address for other hosts; default: the local address used to reach the master"),
    ] = ""
    protocol: Annotated[str, Meta(pattern="^(tcp|rdma)$", description="tcp or rdma")] = "tcp"
    device: Annotated[str, Meta(description="RDMA devices, separated by commas")] = ""
    segment_gib: Annotated[
        float,
        Meta(
            ge=0,
            le=65536,
            description="memory that this host adds to the pool, in GiB or as 512MiB; 0 = none, else 16MiB or more",
        ),
    ] = 1.0
    replicas: Annotated[int, Meta(ge=1, le=16, description="hosts that each new object is written to")] = 1
    buffer_mib: Annotated[
        int,
        Meta(
            ge=1,
            le=65536,
            description="staging memory for bytes outside the arena with rdma, in MiB or as 1GiB",
        ),
    ] = 64
    metadata: Annotated[str, Meta(description="the pool's metadata server")] = "P2PHANDSHAKE"


def open(url: str, options: dict[str, str], threads: int) -> MooncakeTier:
    """The tier at `mooncake://host[:port]/`. Blocks for seconds. Raises ConfigError, or TierError without a master."""
    name = shown(url)
    own: MooncakeOptions = convert(options, MooncakeOptions, name)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or PORT
    except ValueError:
        raise ConfigError(f"tier {name}: must be mooncake://host[:port]/") from None
    if not host or parts.path not in ("", "/") or parts.username is not None:
        raise ConfigError(f"tier {name}: must be mooncake://host[:port]/")
    if own.protocol == "rdma" and not own.device:
        raise ConfigError(f"tier {name}: protocol=rdma needs device=, e.g. device=mlx5_0")
    if own.device and own.protocol != "rdma":
        raise ConfigError(f"tier {name}: device= requires protocol=rdma")
    if 0 < own.segment_gib < 1 / 64:
        raise ConfigError(f"tier {name}: segment_gib must be 0 or at least 1/64")
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    library()
    return MooncakeTier((host, port), own, registers=own.protocol == "rdma")


@dataclass(slots=True)
class _Object:
    """One object of a call: its key in the pool, and the memory for it."""

    number: int
    """Its place among the answers."""
    key: str
    spans: list[tuple[int, int]]
    """(address, bytes), none adjacent to the one before."""
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = sum(size for _, size in self.spans)

    def cut(self, size: int) -> _Object:
        """The first `size` bytes of its memory."""
        spans = []
        for address, length in self.spans:
            if size <= 0:
                break
            spans.append((address, min(length, size)))
            size -= length
        return _Object(self.number, self.key, spans)


class _Group:
    """Objects for one call of the library."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._weight = 0
        self.objects: dict[str, _Object] = {}
        """By key: of two with one key in a call, the library fills one and answers for both (0.3.13)."""

    def is_full(self, entry: _Object, weight: int) -> bool:
        return bool(self.objects) and (self._weight + weight > self._most or entry.key in self.objects)

    def add(self, entry: _Object, weight: int) -> None:
        self._weight += weight
        self.objects[entry.key] = entry

    def take(self) -> list[_Object]:
        """All of it; the group is empty then."""
        taken = list(self.objects.values())
        self.objects = {}
        self._weight = 0
        return taken


class MooncakeTier:
    """A client of one Mooncake Store."""

    def __init__(self, master: tuple[str, int], options: MooncakeOptions, registers: bool) -> None:
        """registers: whether the transport wants to know memory before it moves bytes there. Raises TierError."""
        device = options.device if options.protocol == "rdma" else ""
        self._pool = Membership(master, options.local_host, options.metadata, int(options.segment_gib * 2**30), device)
        self._options = options
        self._registers = registers
        self._memory: list[memoryview] = []
        self._asks_sizes = True
        """Whether sizes are asked for before a read, which is a round trip: the library fails, loudly, where memory is
        not of just the object's size. Not after a read in which all memory was, until one in which some was not."""
        self._staging = threading.Lock()
        self._stage = np.zeros(0, np.uint8)
        """The staging area: whoever holds _staging uses it."""
        self._counting = threading.Lock()
        self._counters = {"refused": 0, "failed": 0, "staged_bytes": 0}

    def __repr__(self) -> str:
        return f"<MooncakeTier {self._pool!r} {self._counters}>"

    def _count(self, counter: str, more: int) -> None:
        with self._counting:
            self._counters[counter] += more

    # -- memory

    def attach(self, memory: Sequence[memoryview]) -> None:
        self._memory = list(memory)
        if self._registers:
            for area in memory:
                self._pool.register(_address(area), len(area))

    def _is_direct(self, entry: _Object) -> bool:
        return len(entry.spans) <= MOST_SPANS and (
            not self._registers or all(self._pool.knows(*span) for span in entry.spans)
        )

    def _groups(self, objects: list[_Object]) -> Iterator[tuple[list[_Object], bool]]:
        """Objects in groups that one call may carry, and whether their bytes have to be staged."""
        direct, staged = _Group(MOST_SPANS), _Group(self._options.buffer_mib << 20)
        for entry in objects:
            stages = not self._is_direct(entry)
            group, weight = (staged, entry.size) if stages else (direct, len(entry.spans))
            if group.is_full(entry, weight):
                yield group.take(), stages
            group.add(entry, weight)
        for group in (direct, staged):
            if group.objects:
                yield group.take(), group is staged

    @contextmanager
    def _staged(self, objects: list[_Object]) -> Iterator[list[_Object]]:
        """The same objects with memory in the staging area, which is ours meanwhile."""
        total = sum(entry.size for entry in objects)
        with self._staging:
            if total > len(self._stage):
                self._enlarge(total)
            at = _address(self._stage.data)
            moved = []
            for entry in objects:
                moved.append(_Object(entry.number, entry.key, [(at, entry.size)]))
                at += entry.size
            self._count("staged_bytes", total)
            yield moved

    def _enlarge(self, size: int) -> None:
        stage = np.zeros(max(size, self._options.buffer_mib << 20), np.uint8)
        if self._registers:
            self._pool.register(_address(stage.data), len(stage))
            if len(self._stage):
                self._pool.unregister(_address(self._stage.data))
        self._stage = stage

    # -- the contract

    def find(self, names: Sequence[str]) -> list[bool]:
        if not names:
            return []
        with self._pool.calling() as store:
            return [code == 1 for code in known(store.batch_is_exist([PREFIX + name for name in names]))]

    def read(self, blobs: Sequence[Blob]) -> list[int]:
        """As the contract says. Objects on hosts that are gone are not there."""
        sizes = [-1] * len(blobs)
        if not blobs:
            return sizes
        with self._pool.calling() as store, self._pool.reading():
            objects = [_Object(number, PREFIX + blob.name, _spans(blob)) for number, blob in enumerate(blobs)]
            if self._asks_sizes:
                fitting = self._fit(store, objects, sizes)
                exact = [entry for entry in fitting if entry.size == blobs[entry.number].size]
                self._asks_sizes = not fitting or len(exact) < len(fitting)
                self._get(store, fitting, sizes)
            elif odd := self._get(store, objects, sizes):
                fitting = [entry for entry in self._fit(store, odd, sizes) if entry.size < blobs[entry.number].size]
                self._asks_sizes = bool(fitting)
                self._get(store, fitting, sizes)
        return sizes

    def _get(self, store: Any, objects: list[_Object], sizes: list[int]) -> list[_Object]:
        """Read objects whose size is that of their memory; those with which that did not succeed."""
        failed = []
        for group, stages in self._groups(objects):
            if stages:
                with self._staged(group) as moved:
                    codes = self._move(store.batch_get_into_multi_buffers, moved)
                    for entry, place, code in zip(group, moved, codes, strict=True):
                        if code == entry.size:
                            _scatter(place.spans[0][0], entry.spans)
            else:
                codes = self._move(store.batch_get_into_multi_buffers, group)
            for entry, code in zip(group, codes, strict=True):
                if code == entry.size:
                    sizes[entry.number] = code
                elif code not in (_NOT_FOUND, _NOT_READY):
                    failed.append(entry)
        self._count("failed", len(failed))
        return failed

    @staticmethod
    def _fit(store: Any, objects: list[_Object], sizes: list[int]) -> list[_Object]:
        """Those that there is room for, with memory of just the right size. The others are answered."""
        fitting = []
        replicas = store.batch_get_replica_desc(list({entry.key for entry in objects}))
        if objects and not replicas:  # so it also answers when there is no master
            known(store.batch_is_exist([objects[0].key]))
        for entry in objects:
            size = _size(replicas.get(entry.key, ()))
            if size > entry.size:
                sizes[entry.number] = size
            elif size > 0:
                fitting.append(entry.cut(size))
        return fitting

    def write(self, blobs: Sequence[Blob]) -> list[bool]:
        """As the contract says. What exists is left as it is; what another is just writing is refused."""
        there = [False] * len(blobs)
        with self._pool.calling() as store:
            config = library().ReplicateConfig()
            config.replica_num = self._options.replicas
            objects = [_Object(number, PREFIX + blob.name, _spans(blob)) for number, blob in enumerate(blobs)]
            for group, stages in self._groups(objects):
                self._put(store, group, stages, config, there)
        self._count("refused", there.count(False))
        return there

    def _put(self, store: Any, objects: list[_Object], stages: bool, config: Any, there: list[bool]) -> None:
        """Write one group. In three steps, for a plain put says of what another is just writing that it is there."""
        with self._pool.reserving():
            codes = known(
                store.batch_put_session_start([e.key for e in objects], [entry.size for entry in objects], config)
            )
        begun = [entry for entry, code in zip(objects, codes, strict=True) if code == 0]
        exist = [entry for entry, code in zip(objects, codes, strict=True) if code == _EXISTS]
        try:
            if begun and stages:
                with self._staged(begun) as moved:
                    for entry, place in zip(begun, moved, strict=True):
                        _gather(entry.spans, place.spans[0][0])
                    whole = self._send(store, moved)
            else:
                whole = self._send(store, begun)
            if whole:
                ends = known(store.batch_put_session_end([entry.key for entry in whole]))
                for entry, code in zip(whole, ends, strict=True):
                    there[entry.number] = code == 0
        finally:
            if left := [entry.key for entry in begun if not there[entry.number]]:
                store.batch_put_session_revoke(left)
        if exist:
            for entry, code in zip(exist, known(store.batch_is_exist([e.key for e in exist])), strict=True):
                there[entry.number] = code == 1

    def _move(self, move: Callable[..., list[int]], objects: list[_Object], *more: list[list[int]]) -> list[int]:
        addresses = [[address for address, _ in entry.spans] for entry in objects]
        sizes = [[size for _, size in entry.spans] for entry in objects]
        return self._pool.transfer(move, [entry.key for entry in objects], addresses, sizes, *more)

    def _send(self, store: Any, objects: list[_Object]) -> list[_Object]:
        """Move the bytes of objects that are reserved; those that arrived."""
        if not objects:
            return []
        offsets = []
        for entry in objects:
            ends = np.cumsum([size for _, size in entry.spans])
            offsets.append([0, *ends[:-1].tolist()])
        codes = self._move(store.batch_put_from_multi_buffer_ranges, objects, offsets)
        whole = [entry for entry, code in zip(objects, codes, strict=True) if code == entry.size]
        self._count("failed", len(objects) - len(whole))
        return whole

    def remove(self, names: Sequence[str], spoilt: bool = False) -> None:
        if names:
            with self._pool.calling() as store, self._pool.removing():
                # Forced: what anybody has read or asked for within the last ten seconds is not removed otherwise.
                known(store.batch_remove([PREFIX + name for name in names], True))

    def forget(self, salt: str, space: str) -> int:
        first, second = re.escape(salt), re.escape(space)
        pattern = f"^{re.escape(PREFIX)}{first}[0-9a-f]*/{second}[0-9a-f]*/[0-9a-f]+[.][0-9a-f]+$"
        with self._pool.calling() as store, self._pool.removing():
            count = int(store.remove_by_regex(pattern, True))
        if count < 0:
            raise TierError(f"Mooncake Store removed nothing (code {count})")
        return count

    def usage(self) -> Usage:
        """Counters only: what the pool holds, its master alone knows."""
        with self._pool.calling() as store:
            if (code := store.is_exist(PREFIX)) < 0:
                raise TierError(f"Mooncake Store's master does not answer (code {code})")
        with self._counting:
            return Usage(counters={**self._counters, "rejoined": self._pool.rejoined})

    def close(self) -> None:
        """As the contract says. Takes this host's segment, and what lies there, out of the pool."""
        self._pool.leave()
        self._memory = []


def _size(replicas: Sequence[Any]) -> int:
    """Bytes of an object; 0 where no replica says so."""
    for replica in replicas:
        if replica.is_memory_replica():
            return int(replica.get_memory_descriptor().buffer_descriptor.size)
        if replica.is_disk_replica():
            return int(replica.get_disk_descriptor().object_size)
    return 0


def _address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


def _spans(blob: Blob) -> list[tuple[int, int]]:
    """A blob's memory, adjacent buffers joined."""
    spans: list[tuple[int, int]] = []
    for buffer in blob.buffers:
        address, size = _address(buffer), buffer.nbytes
        if spans and spans[-1][0] + spans[-1][1] == address:
            spans[-1] = (spans[-1][0], spans[-1][1] + size)
        else:
            spans.append((address, size))
    return spans


def _gather(spans: list[tuple[int, int]], target: int) -> None:
    for address, size in spans:
        ctypes.memmove(target, address, size)
        target += size


def _scatter(source: int, spans: list[tuple[int, int]]) -> None:
    for address, size in spans:
        ctypes.memmove(address, source, size)
        source += size
