"""Pages of SGLang's host pools in the depot: which exist, and their bytes. No SGLang is imported here.

Used by storage.py on SGLang's own threads, several at once; the client is thread-safe. A page is a chunk of one block,
named by SGLang's key; its bytes are where the pool's `get_page_buffer_meta` says, in a memory file that the server maps
(zero copy on this side). Invariants: every wait has a deadline, but for one: pages that the server may still write are
not given back, so a retrieve that it has begun ends with its answer or its death. A store whose answer is late is
voided by the fence. Without a server, everything is a miss.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import time
from binascii import unhexlify
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from kvdepot.client import admin
from kvdepot.client.calls import ANSWER_S, ask
from kvdepot.client.scheduler import LOOKUP_S
from kvdepot.client.socket import CONNECT_S, Client, MessagingFuture
from kvdepot.client.transfer import PromptChunks, ShardSpec, Transfer, pack_block_ids
from kvdepot.devices.cpu import view_memory_file
from kvdepot.errors import BadRequest, ConfigError, DeadlineExceeded, KVDepotError, LayoutError, Unavailable
from kvdepot.protocol import wire
from kvdepot.protocol.keys import HASH_BYTES, ROOT, engine_hash
from kvdepot.protocol.layout import Layout, build_layout

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

KV = "kv"
"""SGLang's name of the pool that each request needs; other pools are a hybrid model's."""
_PING_S = 1.0
"""A server that does not answer within this time is not asked to write into pages."""
_RETURN_S = 0.2
"""Waiting for a server that is lost or has just come back; each call waits that long at most."""
_STORE_S = 10.0
_CLEAR_S = 10.0
_HUNG_S = 30.0
"""Between two log lines about a server that hangs while it writes."""


class HostPool(Protocol):
    """The part of SGLang's HostKVCache that is used."""

    page_size: int
    size: int

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]] | None: ...

    def clear(self) -> None: ...


class PagePool:
    """A host pool whose pages the depot keeps."""

    def __init__(self, pool: HostPool, name: str, ranks: tuple[int, int]) -> None:
        """name: as SGLang calls it. ranks: how many share its KV, and which of them this is.

        Raises LayoutError for a pool whose memory the server cannot map, or that does not say where its pages are.
        """
        self.name, self.page_size = name, pool.page_size
        self.world_size, self.rank = ranks
        self.layout = _lay_out(pool, name)
        of_pool = [getattr(pool, fact, "") for fact in ("layout", "dtype", "page_size", "storage_format_tag")]
        self.facts = "|".join(map(str, (type(pool).__name__, self.world_size, *of_pool)))  # equal on all ranks
        self.instance = 0
        self.spec = ShardSpec("", self.world_size, self.rank, self.page_size, 1)

    def blocks(self, indices: torch.Tensor, count: int) -> list[int]:
        """The pages of `count` keys from the indices of their slots. Raises BadRequest if they are no whole pages."""
        first = indices[:: self.page_size].tolist()
        if len(indices) != count * self.page_size or any(index % self.page_size for index in first):
            raise BadRequest(f"{len(indices)} slots of pool {self.name} are not {count} pages of {self.page_size}")
        return [index // self.page_size for index in first]


def _lay_out(pool: HostPool, name: str) -> Layout:
    """Where the bytes of each page are: in each part of a page, one stride from page to page."""
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
    views = []
    for number, (start, end, at, part) in enumerate(zip(starts, ends, last, sizes, strict=True)):
        stride = end - start or part
        if at != start + (count - 1) * stride:
            raise LayoutError(f"pool {name}: its pages are not equally apart")
        views.append(view_memory_file(f"{name} {number}", start, (count, part, stride)))
    return build_layout(views, [0] * len(views))


def hash_keys(keys: Sequence[str]) -> bytes:
    """The 32-byte hashes of SGLang's keys: those that are SHA-256 in hexadecimal are hashes of that size already."""
    if set(map(len, keys)) <= {2 * HASH_BYTES}:
        with contextlib.suppress(ValueError):  # twice as fast as bytes.fromhex, and no spaces are legal
            return unhexlify("".join(keys))
    return b"".join(hash_keys([key]) if len(keys) > 1 else engine_hash(key.encode()) for key in keys)


class PageStore:
    """The pools of one rank, and the connection to the server."""

    def __init__(self, client: Client, namer: Callable[[PagePool, int], str], revive: Callable[[], None]) -> None:
        """namer: names a pool's KV, given how often weights have changed. revive: called while there is no server."""
        self._client = client
        self._namer = namer
        self._revive = revive
        self._pools: dict[str, PagePool] = {}
        self._session = secrets.token_hex(8)
        self._numbers = itertools.count(1)  # of sessions, and tickets
        self._epoch = 0
        self._is_suspended = False
        self._warned: set[type[Exception]] = set()

    def __contains__(self, pool: str) -> bool:
        return pool in self._pools

    # -- pools

    def add(self, pool: PagePool) -> None:
        """Keep a pool's pages from now on; the first one is the KV pool. Blocks 30 s at most; without a server, 5 s.

        Raises the server's error. After Unavailable or DeadlineExceeded, the next server maps the pool.
        """
        self._pools[pool.name] = pool
        try:
            self._enter(pool)
            self._client.learn_chunk_size(CONNECT_S)
            if not self._client.has_free_chunks and self._client.chunk_size > self._page_tokens:
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
        first = next(iter(self._pools.values()))
        return first.page_size

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of the KV pool."""
        return self._pools[KV].layout.block_bytes

    def _enter(self, pool: PagePool) -> None:
        """Give a pool the name under which its KV is kept from now on."""
        pool.instance, model = secrets.randbits(62), self._namer(pool, self._epoch)
        pool.spec = ShardSpec(model, pool.world_size, pool.rank, self._page_tokens, 1)

    def _register(self, pool: PagePool) -> list[MessagingFuture[None]]:
        """Have the server map a pool. Never blocks."""
        return [self._client.ask(message) for message in pool.spec.register(pool.instance, [pool.layout])]

    def suspend(self) -> None:
        """Weights are about to change: keep and find nothing until SGLang has flushed what the old ones computed."""
        self._is_suspended = True

    def flushed(self) -> None:
        """SGLang has flushed its caches. If weights have changed before, KV is kept under another name from now on."""
        if not self._is_suspended:
            return
        self._epoch += 1
        for pool in self._pools.values():
            self._client.ask(wire.Unregister(pool.instance))
            if self._epoch > 1:  # no engine will ever ask for it
                self._client.ask(wire.Clear(pool.spec.model))
            self._enter(pool)
            with contextlib.suppress(Unavailable, DeadlineExceeded):  # the next server has it from the client
                for answer in self._register(pool):
                    answer.result(_PING_S)
        self._is_suspended = False

    # -- pages

    def _served(self, name: str, keys: Sequence[str]) -> PagePool | None:
        """The pool, if a server can be asked for these keys of it now; None: all are misses. Blocks 0.2 s at most."""
        pool = self._pools.get(name)
        if pool is None or not keys or self._is_suspended:
            return None
        if not self._client.is_welcomed:
            self._revive()
            if not self._answers(_RETURN_S):
                return None
        return pool

    def _answers(self, timeout_s: float) -> bool:
        try:
            self._client.ask(wire.Noop(), deadline_s=timeout_s).result(timeout_s)
        except KVDepotError:
            return False
        return True

    def exists(self, name: str, keys: Sequence[str], prefix: Sequence[str] | None = None) -> int:
        """Count the keys, from the first on, that are there on all ranks. Blocks a second, and as long as tiers take.

        prefix: the keys before them, from the prompt's start; None: not known, so each key is looked for.
        What is found is in memory afterwards, and the last to be evicted; nothing is pinned. Raises KVDepotError.
        """
        pool = self._served(name, keys)
        if pool is None:
            return 0
        request, before = f"sglang-{self._session}-{next(self._numbers)}", prefix or ()
        readers = int(pool.rank == 0 and name == KV)  # else the server would count each rank's lookup
        prompt = PromptChunks(pool.spec, hash_keys([*before, *keys]), is_chained=prefix is not None)
        answer = ask(self._client, prompt.probe(request, readers, len(before)), int, LOOKUP_S)
        return min(max(answer.result(LOOKUP_S + self._client.lookup_s) - len(before), 0), len(keys))

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
        """Copy pages into a pool; which were copied. Blocks a second, and as long as copying takes.

        Raises KVDepotError if nothing was copied.
        """
        pool, missed = self._served(name, keys), [False] * len(keys)
        if pool is None:
            return missed
        shards = self._shards(pool, keys, indices)
        if not self._answers(_PING_S):
            return missed
        answer = ask(self._client, wire.Retrieve(pool.instance, shards, unpins=False), list[bool])
        while not self._client.wait(answer.query, _HUNG_S):
            log.error(
                "kvdepot: the server at %s hangs while it writes into this engine's pages; they can be used again when "
                "it goes on or is killed", self._client.server_url,
            )  # fmt: skip
        done = answer.result(0.0)
        if len(done) != len(keys):
            raise BadRequest(f"the server answered {len(done)} values for {len(keys)} pages")
        if self._is_suspended:
            return missed  # weights have begun to change meanwhile
        if name == KV and pool.rank == 0:
            saved = self._page_tokens * sum(done)
            self._client.ask(wire.EndSession(shards[0].request, saved, model=pool.spec.model), deadline_s=None)
        return done

    def set(
        self, name: str, keys: Sequence[str], indices: torch.Tensor, prefix: Sequence[str] | None = None
    ) -> list[bool]:
        """Copy pages of a pool into the depot; whether all are there, per key. Blocks 10 s at most.

        prefix: as in `exists`; pages whose prefix is known and there are a chain, which is found and evicted as one.
        Raises KVDepotError if nothing was kept.
        """
        pool = self._served(name, keys)
        if pool is None:
            return [False] * len(keys)
        ticket = next(self._numbers)
        store = wire.Store(pool.instance, ticket, self._shards(pool, keys, indices, prefix))
        try:
            is_whole = ask(self._client, store, bool).result(_STORE_S)
        except DeadlineExceeded:
            self._client.liveness.raise_fence(ticket)  # SGLang may overwrite the pages now
            raise
        return [is_whole] * len(keys)

    def _shards(
        self, pool: PagePool, keys: Sequence[str], indices: torch.Tensor, prefix: Sequence[str] | None = None
    ) -> list[wire.Shards]:
        blocks = pack_block_ids(pool.blocks(indices, len(keys)))
        request = f"sglang-{self._session}-{next(self._numbers)}"
        parent = b"" if prefix is None else hash_keys(prefix[-1:]) or ROOT
        return pool.spec.shards([Transfer(request, parent, len(prefix or ()), hash_keys(keys), blocks)])

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
        """Have the server unmap the pools, and close the connection. Blocks some seconds at most."""
        answers = [
            self._client.ask(wire.Unregister(pool.instance), deadline_s=_PING_S) for pool in self._pools.values()
        ]
        self._client.wait(lambda: all(answer.query() for answer in answers), _PING_S)
        self._client.close()
