"""Pages of SGLang's host pools in the depot: which exist, and their bytes. No SGLang is imported here.

Used by storage.py on SGLang's own threads, several at once; the client is thread-safe. A page is a chunk of one block,
named by SGLang's key; its bytes are where the pool's `get_page_buffer_meta` says, and the calling thread copies them to
or from the arena. Invariants: every wait has a deadline, and no page is read or written after its call, in which
SGLang keeps it. Without a server, everything is a miss.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import secrets
import time
from binascii import unhexlify
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from kvdepot.client import admin
from kvdepot.client.calls import ANSWER_S, ask
from kvdepot.client.link import Link, copy_all
from kvdepot.client.scheduler import LOOKUP_S
from kvdepot.client.socket import CONNECT_S, Client, MessagingFuture
from kvdepot.client.transfer import PromptChunks, ShardSpec
from kvdepot.devices.blocks import CopyPiece
from kvdepot.devices.host import HostBlocks
from kvdepot.devices.self_test import test_blocks
from kvdepot.errors import (
    BadRequest,
    ConfigError,
    DeadlineExceeded,
    DeviceError,
    KVDepotError,
    LayoutError,
    Unavailable,
)
from kvdepot.memory.arena_view import ArenaView
from kvdepot.memory.extents import Ids
from kvdepot.protocol import wire
from kvdepot.protocol.keys import HASH_BYTES, ROOT, engine_hash
from kvdepot.protocol.layout import TensorView, build_layout

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

KV = "kv"
"""SGLang's name of the pool that each request needs; other pools are a hybrid model's."""
T = TypeVar("T")
_RETURN_S = 0.2
"""Longest wait of a call, in seconds, for a server that is lost or has just come back."""
_REGISTER_S = 1.0
_GET_S = 1.0
"""Longest wait, in seconds, for each of the two answers to a read of pages."""
_SET_S = 5.0
"""Longest wait, in seconds, for each of the two answers to a write: the kernel may have to allocate memory first."""
_CLEAR_S = 10.0


class HostPool(Protocol):
    """The part of SGLang's HostKVCache that is used."""

    page_size: int
    size: int

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]] | None: ...

    def clear(self) -> None: ...


class PagePool:
    """A host pool whose pages the depot keeps."""

    def __init__(self, pool: HostPool, name: str, ranks: tuple[int, int]) -> None:
        """name: SGLang's name of the pool. ranks: the number of ranks that share its KV, and the number of this rank.

        Tests copies of some pages, whose bytes are as before afterwards; pages that cannot be copied are a `fault`.
        Raises LayoutError for a pool that does not say where its pages are.
        """
        self.name, self.page_size = name, pool.page_size
        self.world_size, self.rank = ranks
        self.blocks = _map(pool, name)
        of_pool = [getattr(pool, fact, "") for fact in ("layout", "dtype", "page_size", "storage_format_tag")]
        self.facts = "|".join(map(str, (type(pool).__name__, self.world_size, *of_pool)))  # equal on all ranks
        self.instance = 0
        self.spec = ShardSpec("", self.world_size, self.rank, self.page_size, 1)
        self.fault = ""
        self._pool = pool  # keeps the pool's memory alive
        try:
            test_blocks([self.blocks])
        except DeviceError as exc:
            self.fault = f"pool {name}: {exc}"
            log.error("kvdepot: nothing of pool %s is kept, because copies of its pages are wrong: %s", name, exc)

    @property
    def page_bytes(self) -> int:
        return self.blocks.layout.block_bytes

    def pages(self, indices: torch.Tensor, count: int) -> Ids:
        """The pages of `count` keys from the indices of their slots. Raises BadRequest unless they are whole pages of
        the pool, each once."""
        first, size = indices[:: self.page_size].tolist(), self.page_size
        if len(indices) != count * size or any(index % size for index in first):
            raise BadRequest(f"{len(indices)} slots of pool {self.name} are not {count} pages of {size}")
        pages = [index // size for index in first]
        if len(set(pages)) < count or not all(0 <= page < self.blocks.layout.num_blocks for page in pages):
            raise BadRequest(f"pages {pages[:8]} are not {count} of the {self.blocks.layout.num_blocks} of {self.name}")
        return np.array(pages, np.intp)

    def copy(self, view: ArenaView, placement: wire.Placement, request: wire.Store | wire.Retrieve, pages: Ids) -> None:
        """Copy pages to or from their places in the arena. request: the placed request. pages: the pages of all its
        keys."""
        is_store = isinstance(request, wire.Store)
        placed = zip(placement.chunks, placement.places, strict=True)
        pieces = [CopyPiece(place.extents, pages[chunk : chunk + 1]) for chunk, place in placed]
        step = max(1, self.blocks.task_bytes // self.page_bytes)
        parts = [pieces[at : at + step] for at in range(0, len(pieces), step)]
        copy_all(lambda part: self.blocks.move(view, part, is_store), parts, len(pieces) * self.page_bytes)


def _map(pool: HostPool, name: str) -> HostBlocks:
    """The pages of a pool as blocks: in each part of a page, there is one stride from page to page."""
    import torch

    if not hasattr(pool, "get_page_buffer_meta"):
        raise LayoutError(f"pool {name} ({type(pool).__name__}) does not say where its pages are: not supported")
    if getattr(pool, "shared_allocation_domain", None) is not None or getattr(pool, "stores_page_envelope", False):
        raise LayoutError(f"pool {name} shares its memory with other pools, and its pages move: not supported")
    size, count = pool.page_size, pool.size // pool.page_size
    if not 1 <= size <= wire.MAX_CHUNK_TOKENS:
        raise LayoutError(f"pool {name}: a page of {size} tokens is not between 1 and {wire.MAX_CHUNK_TOKENS}")

    def parts(page: int) -> tuple[list[int], list[int]]:
        try:
            found = pool.get_page_buffer_meta(torch.arange(page * size, (page + 1) * size))
        except (AttributeError, NotImplementedError, ValueError) as exc:
            raise LayoutError(f"pool {name}: {exc}. Try another --hicache-mem-layout, such as page_first") from exc
        if not found or not found[0]:
            raise LayoutError(f"pool {name} ({type(pool).__name__}) holds no bytes itself: not supported")
        return found

    (starts, sizes), ends, last = parts(0), parts(min(1, count - 1))[0], parts(count - 1)[0]
    expected = size * getattr(pool, "size_per_token", sum(sizes) // size)
    if sum(sizes) != expected:
        raise LayoutError(f"pool {name}: its pages have {sum(sizes)} bytes, but its tokens {expected}")
    rows = []
    for start, end, at, part in zip(starts, ends, last, sizes, strict=True):
        stride = end - start or part
        if stride < part or at != start + (count - 1) * stride:
            raise LayoutError(f"pool {name}: its pages are not equally apart")
        rows.append((start, stride, part, at + part))
    spans = _join((start, end) for start, _, _, end in rows)
    views = []
    for number, (start, stride, part, _) in enumerate(rows):
        first, end = next(span for span in spans if span[0] <= start < span[1])
        shape, strides = (count, part), (stride, 1)
        views.append(TensorView(f"{name} {number}", hex(first), end - first, start - first, shape, strides, 1, "uint8"))
    memories = {
        hex(first): np.ctypeslib.as_array((ctypes.c_uint8 * (end - first)).from_address(first)) for first, end in spans
    }
    return HostBlocks(build_layout(views, [0] * len(views)), memories)


def _join(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The `[start, end)` spans of memory; spans that overlap or touch are joined."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def hash_keys(keys: Sequence[str]) -> bytes:
    """The 32-byte hashes of SGLang's keys: keys that are SHA-256 in hexadecimal are such hashes already."""
    if set(map(len, keys)) <= {2 * HASH_BYTES}:
        with contextlib.suppress(ValueError):  # twice as fast as bytes.fromhex, and refuses spaces
            return unhexlify("".join(keys))
    return b"".join(hash_keys([key]) if len(keys) > 1 else engine_hash(key.encode()) for key in keys)


class PageStore:
    """The pools of one rank, and the connection to the server."""

    def __init__(self, client: Client, namer: Callable[[PagePool, int], str], revive: Callable[[], None]) -> None:
        """namer: names a pool's KV, given how often weights have changed. revive: called while there is no server."""
        self._client = client
        self._link = Link(client)
        self._namer = namer
        self._revive = revive
        self._pools: dict[str, PagePool] = {}
        self._session = secrets.token_hex(8)
        self._numbers = itertools.count(1)  # of sessions
        self._epoch = 0
        self._is_suspended = False
        self._warned: set[type[Exception]] = set()

    def __contains__(self, pool: str) -> bool:
        return pool in self._pools

    # -- pools

    def add(self, pool: PagePool) -> None:
        """Keep a pool's pages from now on; the first one is the KV pool. Blocks 30 s at most; without a server, 5 s.

        Raises the server's error. After Unavailable or DeadlineExceeded, the next server knows the pool.
        """
        self._pools[pool.name] = pool
        try:
            self._enter(pool)
            self._client.learn_chunk_size(CONNECT_S)
            if not self._client.welcome.has_free_chunks and self._client.chunk_size > self._page_tokens:
                raise ConfigError(
                    f"SGLang's pages of {self._page_tokens} tokens are shorter than the server's chunks of "
                    f"{self._client.chunk_size}: start the server with --chunk-size auto, or SGLang with a --page-size "
                    f"of {self._client.chunk_size}"
                )
            for answer in self._register(pool):
                answer.result(ANSWER_S)
        except (Unavailable, DeadlineExceeded):
            self._register(pool)
            raise

    @property
    def _page_tokens(self) -> int:
        return next(iter(self._pools.values())).page_size

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of the KV pool."""
        return self._pools[KV].page_bytes

    def _enter(self, pool: PagePool) -> None:
        """Give a pool the name under which its KV is kept from now on."""
        pool.instance, model = secrets.randbits(62), self._namer(pool, self._epoch)
        pool.spec = ShardSpec(model, pool.world_size, pool.rank, self._page_tokens, 1)

    def _register(self, pool: PagePool) -> list[MessagingFuture[None]]:
        """Register a pool with the server. Never blocks."""
        formats = [pool.blocks.layout.format]
        messages = pool.spec.register(pool.instance, formats, fault=pool.fault)
        return [self._client.ask(message) for message in messages]

    def suspend(self) -> None:
        """Weights are about to change: keep and find nothing until SGLang has flushed the KV of the old weights."""
        self._is_suspended = True

    def flushed(self) -> None:
        """SGLang has flushed its caches. If weights have changed before, KV is kept under another name from now on."""
        if not self._is_suspended:
            return
        self._epoch += 1
        for pool in self._pools.values():
            self._client.ask(wire.Unregister(pool.instance))
            if self._epoch > 1:  # no engine will ever ask for KV of this name
                self._client.ask(wire.Clear(pool.spec.model))
            self._enter(pool)
            with contextlib.suppress(Unavailable, DeadlineExceeded):  # the next server has it from the client
                for answer in self._register(pool):
                    answer.result(_REGISTER_S)
        self._is_suspended = False

    # -- pages

    def _served(self, name: str, keys: Sequence[str]) -> PagePool | None:
        """The pool, if a server can be asked for these keys now; None: all are misses. Blocks 0.2 s at most."""
        pool = self._pools.get(name)
        if pool is None or not keys or self._is_suspended or pool.fault:
            return None
        if not self._client.is_welcomed:
            self._revive()
            try:
                self._client.ask(wire.Noop(), deadline_s=_RETURN_S).result(_RETURN_S)
            except KVDepotError:
                return None
        return pool

    def exists(self, name: str, keys: Sequence[str], prefix: Sequence[str] | None = None) -> int:
        """Count the keys, from the first on, whose pages are stored for all ranks. Blocks a second, and as long as
        tiers take.

        prefix: the keys before them, from the prompt's start; None: not known, so each key is looked for. Pages that
        are found are in memory afterwards, and the last to be evicted; nothing is pinned. Raises KVDepotError.
        """
        pool = self._served(name, keys)
        if pool is None:
            return 0
        request, before = f"sglang-{self._session}-{next(self._numbers)}", prefix or ()
        readers = int(pool.rank == 0 and name == KV)  # else the server would count each rank's lookup
        prompt = PromptChunks(pool.spec, hash_keys([*before, *keys]), is_chained=prefix is not None)
        answer = ask(self._client, prompt.probe(request, readers, len(before)), wire.Hit, LOOKUP_S)
        found = answer.result(LOOKUP_S + self._client.welcome.lookup_s).chunks
        return min(max(found - len(before), 0), len(keys))

    def present(self, name: str, keys: Sequence[str]) -> list[bool]:
        """Which of `keys` are in memory on all ranks. Blocks a second. Raises KVDepotError."""
        pool = self._served(name, keys)
        if pool is None:
            return [False] * len(keys)
        hashes = hash_keys(keys)
        found = admin.inspect(self._client, pool.spec.model, hashes, LOOKUP_S)
        ready = {bytes.fromhex(each.hash) for each in found if each.state == "ready"}
        return [hashes[at : at + HASH_BYTES] in ready for at in range(0, len(hashes), HASH_BYTES)]

    def get(self, name: str, keys: Sequence[str], indices: torch.Tensor) -> list[bool]:
        """Copy pages into a pool. Returns, per key, whether its page was copied. Blocks two seconds and for the copy.

        Raises KVDepotError if nothing was copied, or that is not known.
        """
        pool, missed = self._served(name, keys), [False] * len(keys)
        if pool is None:
            return missed
        pages, shards = pool.pages(indices, len(keys)), self._shards(pool, keys)
        done = self._move(pool, wire.Retrieve(pool.instance, [shards], unpins=False), pages, list[bool])
        if len(done) != len(keys):
            raise BadRequest(f"the server answered {len(done)} values for {len(keys)} pages")
        if self._is_suspended:
            return missed  # weights have begun to change meanwhile
        if name == KV and pool.rank == 0:
            saved = self._page_tokens * sum(done)
            self._client.ask(wire.EndSession(shards.request, saved, model=pool.spec.model), deadline_s=None)
        return done

    def set(
        self, name: str, keys: Sequence[str], indices: torch.Tensor, prefix: Sequence[str] | None = None
    ) -> list[bool]:
        """Copy pages of a pool into the depot. Returns, per key, whether the depot has its page. Blocks 10 s and for
        the copy.

        prefix: as in `exists`; pages whose prefix is known and stored form a chain with it, which is found and evicted
        as one. Raises KVDepotError if nothing was kept, or that is not known.
        """
        pool = self._served(name, keys)
        if pool is None:
            return [False] * len(keys)
        pages, shards = pool.pages(indices, len(keys)), self._shards(pool, keys, prefix)
        return [self._move(pool, wire.Store(pool.instance, [shards]), pages, bool)] * len(keys)

    def _shards(self, pool: PagePool, keys: Sequence[str], prefix: Sequence[str] | None = None) -> wire.Shards:
        request = f"sglang-{self._session}-{next(self._numbers)}"
        parent = b"" if prefix is None else hash_keys(prefix[-1:]) or ROOT
        spec = pool.spec.model, pool.world_size, pool.rank
        return wire.Shards(request, *spec, parent, len(prefix or ()), hash_keys(keys), blocks=1)

    def _move(self, pool: PagePool, request: wire.Store | wire.Retrieve, pages: Ids, kind: type[T]) -> T:
        """The answer to a store or retrieve, whose pages are copied here. Raises KVDepotError."""

        def copy(view: ArenaView, placement: wire.Placement) -> None:
            pool.copy(view, placement, request, pages)

        with self._link.call():
            timeout_s = _SET_S if isinstance(request, wire.Store) else _GET_S
            return self._link.move(request, pool.page_bytes, copy, kind, timeout_s)

    def clear(self) -> bool:
        """Remove the pages of all pools, from tiers too; whether that is certain. Blocks 10 s at most."""
        until, models = time.monotonic() + _CLEAR_S, {pool.spec.model for pool in self._pools.values()}
        cleared = [admin.reset(self._client, model, max(0.0, until - time.monotonic())) for model in models]
        return all(cleared)

    def failed(self, exc: Exception) -> None:
        """Log a call that has failed, the first of each kind as a warning."""
        if type(exc) in self._warned:
            log.debug("kvdepot: %s", exc)
            return
        self._warned.add(type(exc))
        if isinstance(exc, KVDepotError):
            log.warning("kvdepot: counts as a miss: %s (further %s are not logged)", exc, type(exc).__name__)
        else:
            log.error("kvdepot: internal error, counts as a miss", exc_info=exc)

    def close(self) -> None:
        """Close the connection, and with it all registrations, once no page is being copied. Blocks some seconds at
        most."""
        self._link.close()
