"""The `mooncake` tier: objects in the pooled memory of many hosts, with Mooncake Store's own client.

    mooncake://master[:50051]/?local_host=10.0.0.7&segment_gib=64&protocol=tcp
    mooncake://master[:50051]/?local_host=10.0.0.7&segment_gib=64&protocol=rdma&device=mlx5_0,mlx5_1

`mooncake_master` knows where objects are and evicts them; every host adds a segment of its memory to the pool
(`segment_gib`; 0: none) and moves bytes to and from the others' segments itself. Package
mooncake-transfer-engine-non-cuda; Debian: libibverbs1 librdmacm1 libnuma1 libcurl4.

Bytes move directly between segments and the caller's buffers. With TCP, any memory will do, and the arena is **not**
registered: the client listens on all of the host's addresses, authenticates nobody, and lets anyone read and write all
registered memory. So anyone who reaches that port can change this host's segment (the checksum in each object detects
that; `key_file` also keeps it secret), but not the arena. With RDMA, the memory of `attach` is registered, and bytes
elsewhere are staged. RDMA needs `device`: without one, the library silently falls back to TCP.

The library reads its settings from the environment. `open` sets those of ENVIRONMENT that are not set: the library logs
only errors, its calls to the master end after two seconds, its transfers after five without progress. It releases the
GIL while it moves bytes or waits for the master, but not while it joins or leaves the pool. So joining is tried in
another process first, after which it takes milliseconds; leaving (`close`) takes up to a few seconds, in which other
threads of this process are blocked.

Known weaknesses: objects disappear with their segment, and the master reports those of a dead host for ten seconds more
(`-client_ttl`); reads answer None then. `remove` also removes objects that other hosts are reading: they may get a
mixture, which only the checksum in the object detects.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from urllib.parse import urlsplit

from kvdepot.errors import ConfigError, TierError
from kvdepot.tiers import Blob, Tally, TierUsage, convert
from kvdepot.tiers.mooncake.library import MooncakeStore, ReplicateConfig, library, size_of
from kvdepot.tiers.mooncake.membership import Membership, MooncakeOptions, known
from kvdepot.tiers.mooncake.objects import (
    MOST_SPANS,
    PREFIX,
    Batch,
    PoolObject,
    Staging,
    batches_of,
    memory_of,
    objects_of,
)
from kvdepot.tiers.urls import shown

__all__ = ["ENVIRONMENT", "PREFIX", "MooncakeOptions", "MooncakeTier", "open"]

ENVIRONMENT = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "2",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
}
"""Environment variables of the library that `open` sets if they are not set."""
PORT = 50051
_NOT_FOUND, _NOT_READY, _EXISTS = -704, -703, -705


def open(url: str, options: dict[str, str], threads: int) -> MooncakeTier:
    """The tier at `mooncake://host[:port]/`. Blocks for seconds. Raises ConfigError, or TierError without a master."""
    name = shown(url)
    own = convert(options, MooncakeOptions, name)
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


class MooncakeTier:
    """A client of one Mooncake Store. Any thread."""

    def __init__(self, master: tuple[str, int], options: MooncakeOptions, registers: bool) -> None:
        """registers: whether the transport must know memory before it moves bytes there. Raises TierError."""
        self._pool = Membership(master, options, registers)
        self._options = options
        self._tally = Tally("refused", "failed", "staged_bytes")
        self._staging = Staging(self._pool, options.buffer_mib << 20, self._tally)

    def attach(self, memory: Sequence[memoryview]) -> None:
        for area in memory:
            self._pool.register(area)

    def _batches(self, objects: list[PoolObject]) -> Iterator[Batch]:
        def is_direct(entry: PoolObject) -> bool:
            return len(entry.spans) <= MOST_SPANS and all(self._pool.can_access(*span) for span in entry.spans)

        return batches_of(objects, is_direct, self._options.buffer_mib << 20)

    def find(self, names: Sequence[str]) -> list[bool]:
        if not names:
            return []
        with self._pool.calling() as store:
            return [code == 1 for code in known(store.batch_is_exist([PREFIX + name for name in names]))]

    def read(self, blobs: Sequence[Blob]) -> list[int | None]:
        """Ask for sizes first: the library fails with an error unless memory has exactly the object's size. Objects on
        dead hosts are absent."""
        sizes: list[int | None] = [None] * len(blobs)
        if blobs:
            with self._pool.calling() as store, self._pool.reading():
                self._get(store, self._fit(store, objects_of(blobs), sizes), sizes)
        return sizes

    def _get(self, store: MooncakeStore, objects: list[PoolObject], sizes: list[int | None]) -> None:
        """Read objects into memory of their size. Objects that fail stay absent."""
        for batch in self._batches(objects):
            with self._staging.placed(batch) as placed:
                memory = memory_of(placed)  # `transfer` answers sizes, or codes of errors
                move = partial(store.batch_get_into_multi_buffers, *memory)
                codes = self._pool.transfer(sum(map(len, memory[2])), move)
                for entry, place, code in zip(batch.objects, placed, codes, strict=True):
                    if code == entry.size:
                        if batch.stages:
                            entry.scatter(place.spans[0][0])
                        sizes[entry.index] = code
                    elif code not in (_NOT_FOUND, _NOT_READY):
                        self._tally("failed")

    @staticmethod
    def _fit(store: MooncakeStore, objects: list[PoolObject], sizes: list[int | None]) -> list[PoolObject]:
        """Objects whose buffers are large enough, with memory of exactly their size. Sets the others' answers."""
        fitting = []
        replicas = store.batch_get_replica_desc(list({entry.key for entry in objects}))
        if not replicas:  # the library answers so without a master, too
            known(store.batch_is_exist([objects[0].key]))
        for entry in objects:
            size = size_of(replicas.get(entry.key, ()))
            if size > entry.size:
                sizes[entry.index] = size
            elif size > 0:
                fitting.append(entry.cut(size))
        return fitting

    def write(self, blobs: Sequence[Blob]) -> list[bool]:
        """Existing objects are kept; an object that another host is writing is refused."""
        there = [False] * len(blobs)
        with self._pool.calling() as store:
            config: ReplicateConfig = library().ReplicateConfig()
            config.replica_num = self._options.replicas
            for batch in self._batches(objects_of(blobs)):
                self._put(store, batch, config, there)
        self._tally("refused", there.count(False))
        return there

    def _put(self, store: MooncakeStore, batch: Batch, config: ReplicateConfig, there: list[bool]) -> None:
        """Write a batch, in three steps: a plain put reports an object that another host is writing as existing."""
        keys, sizes = [entry.key for entry in batch.objects], [entry.size for entry in batch.objects]
        with self._pool.reserving():
            codes = known(store.batch_put_session_start(keys, sizes, config))
        begun = [entry for entry, code in zip(batch.objects, codes, strict=True) if code == 0]
        exist = [entry for entry, code in zip(batch.objects, codes, strict=True) if code == _EXISTS]
        try:
            with self._staging.placed(Batch(begun, batch.stages)) as placed:
                for entry, place in zip(begun, placed, strict=True) if batch.stages else ():
                    entry.gather(place.spans[0][0])
                whole = self._send(store, placed)
            if whole:
                ends = known(store.batch_put_session_end([entry.key for entry in whole]))
                for entry, code in zip(whole, ends, strict=True):
                    there[entry.index] = code == 0
        finally:
            if left := [entry.key for entry in begun if not there[entry.index]]:
                store.batch_put_session_revoke(left)
        if exist:
            for entry, code in zip(exist, known(store.batch_is_exist([e.key for e in exist])), strict=True):
                there[entry.index] = code == 1

    def _send(self, store: MooncakeStore, objects: list[PoolObject]) -> list[PoolObject]:
        """Move the bytes of reserved objects; returns the ones that arrived."""
        if not objects:
            return []
        keys, addresses, sizes = memory_of(objects)
        offsets = [[0, *accumulate(lengths[:-1])] for lengths in sizes]
        codes = self._pool.transfer(
            sum(map(len, sizes)), lambda: store.batch_put_from_multi_buffer_ranges(keys, addresses, sizes, offsets)
        )
        whole = [entry for entry, code in zip(objects, codes, strict=True) if code == entry.size]
        self._tally("failed", len(objects) - len(whole))
        return whole

    def remove(self, names: Sequence[str]) -> None:
        if names:
            with self._pool.calling() as store, self._pool.removing():
                # Forced: otherwise, objects that were read or asked for within the last ten seconds are kept.
                known(store.batch_remove([PREFIX + name for name in names], True))

    def forget(self, salt: str, space: str) -> int:
        first, second = re.escape(salt), re.escape(space)
        pattern = f"^{re.escape(PREFIX)}{first}[0-9a-f]*/{second}[0-9a-f]*/[0-9a-f]+[.][0-9a-f]+$"
        with self._pool.calling() as store, self._pool.removing():
            count = store.remove_by_regex(pattern, True)
        if count < 0:
            raise TierError(f"Mooncake Store removed nothing (code {count})")
        return count

    def usage(self) -> TierUsage:
        """Counters only: the master alone knows what the pool holds."""
        with self._pool.calling() as store:
            if (code := store.is_exist(PREFIX)) < 0:
                raise TierError(f"Mooncake Store's master does not answer (code {code})")
        return TierUsage(counters={**self._tally.counts(), "rejoined": self._pool.rejoined})

    def close(self) -> None:
        """Takes this host's segment, with its objects, out of the pool."""
        self._pool.leave()
