"""Which chunks there are, who pins them, and where their bytes lie. Pure decisions: no I/O, thread or clock.

Called by core/depot.py on the deciding thread only. The one law: what is visible is sealed on every rank; what is
pinned, being copied or needed by a chunk behind it is never evicted.

A chunk belongs to a `Namespace` and has one `Shard` a rank. Shards go `reserved -> sealed`, or are discarded. Each
change that a restart must know of is written into `records` where it happens.

**Chains.** In token mode a key's parent is known, so chunks form trees and a chunk with `depth` d > 0 is
sealed together with all its d - 1 ancestors. Only leaves are evicted, hence:

- the longest prefix is found by binary search over the keys, O(log n) for any prompt length;
- pinning the deepest chunk of a match protects all of it, O(1).

Chunks without a known parent (engine hashes; a parent that was not there) are **loose**, depth 0: found one
by one behind the chained part, pinned one by one.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from kvdepot.eviction import Policy, Victim
from kvdepot.memory.allocator import Allocator, Extents
from kvdepot.memory.records import NamespaceRecord, Records, ShardRecord
from kvdepot.protocol.keys import HASH_BYTES

if TYPE_CHECKING:
    from kvdepot.core.forgetting import Removal
    from kvdepot.tiers.format import Facts

__all__ = ["Chunk", "Index", "Namespace", "Pin", "Shard"]


class Shard(msgspec.Struct, gc=False):
    """One rank's bytes of a chunk."""

    extents: Extents
    size: int
    """Bytes of KV in the extents."""
    sealed: bool = False
    spoilt: bool = False
    """It was sealed, but its bytes are not what was stored."""
    checksum: int = 0
    """Of the KV; 0 where none was made."""
    tiers: int = 0
    """Bit t: tier t is believed to have it."""
    slot: int = -1
    """Where it is recorded."""


class Chunk(Victim, gc=False):
    """A chunk of KV: its shards by rank, and its place in a chain. No reference cycles: parents only."""

    salt: bytes = b""
    """What `forget` may name it by: 16 bytes that stand for its prompt's cache salt; empty: it has none."""
    born: int = 0
    """When it was computed, seconds since 1970."""
    namespace: Any = None
    used: int = 0
    """When it was last used, as a running number; of one from before a restart, when it was stored."""
    generation: int = 0
    """How many removals had begun when it was stored."""
    shards: dict[int, Shard] = msgspec.field(default_factory=dict)
    sealed: int = 0
    """Shards that are sealed."""
    depth: int = 0
    """Chunks from the prompt's start to the end of this one, all sealed; 0 = loose or not yet sealed."""
    position: int = 0
    """What `depth` becomes when it and all before it are sealed; 0 where the parent is unknown."""
    children: int = 0
    """Chunks that name this one as parent."""
    holds: int = 0
    """Pins of requests, and copies under way."""
    bytes: int = 0
    broken: bool = False
    """It had a depth and lost it, with chunks behind it."""
    doomed: bool = False
    """To be removed as soon as it can be."""


class Namespace:
    """Chunks whose bytes mean the same: one model, parallel shape, blocks a chunk, and layout on every rank; and, where
    clients are bound to tenants, of one tenant, so that no other can tell whether they are there."""

    __slots__ = (
        "blocks_in_chunk", "bytes", "chunks", "facts", "gone", "hit_chunks", "layouts", "live", "lookup_chunks",
        "model", "number", "recorded", "sizes", "slot", "tenant", "world_size",
    )  # fmt: skip

    def __init__(self, number: int, tenant: str, model: str, world_size: int, blocks_in_chunk: int) -> None:
        self.number = number  # what records call it
        self.tenant = tenant
        self.model = model
        self.world_size = world_size
        self.blocks_in_chunk = blocks_in_chunk
        self.layouts: dict[int, bytes] = {}  # rank -> layout fingerprint, as ranks show up
        self.sizes: dict[int, int] = {}  # rank -> bytes of a shard
        self.facts: dict[int, Facts] = {}  # rank -> what tiers call it, once they are asked
        self.chunks: dict[bytes, Chunk] = {}
        self.live = 0  # registered instances that use it
        self.lookup_chunks = self.hit_chunks = 0  # asked for, and there
        self.gone = False  # the index has dropped it
        self.bytes = 0
        self.slot = -1  # where it is recorded
        self.recorded = 0  # layouts that the record names

    def __repr__(self) -> str:
        return f"<Namespace {self.model!r} world_size={self.world_size} {len(self.chunks)} chunks {self.bytes} bytes>"


class Pin(msgspec.Struct, gc=False):
    """What one lookup holds: the deepest chained chunk and the loose ones behind it."""

    chunks: list[Chunk]
    matched: int


class Index:
    """All chunks of the depot, in `space`."""

    def __init__(self, allocator: Allocator, policy: Policy, records: Records | None = None, ttl_s: int = 0) -> None:
        """records: what a restart will know; without it, nothing survives. ttl_s: see `expire`; 0 = never."""
        self.allocator = allocator
        self.records = records or Records(memoryview(b""))
        self.unrecorded = 0  # shards sealed since the start that found no room there
        self._policy = policy
        self._namespaces: dict[tuple[str, str, int], list[Namespace]] = {}  # by tenant, model, ranks
        self._numbers = itertools.count(1)  # of namespaces
        self._serial = 0  # shards sealed so far
        self._uses = 0  # of chunks
        self.chunks = 0
        self.reserved = 0  # shards
        self.held = 0  # holds on all chunks
        self.evicted = 0
        self.evicting: Callable[[Chunk], None] | None = None
        """Told of each chunk that goes to make room, before it does."""
        self.watch: Callable[[Chunk, bool], None] | None = None
        """Told of each chunk that can be had now, or (False) not any more; the latter may come twice."""
        self.generation = 0  # removals that have begun
        self.hiding: list[Removal] = []
        """Those under way that hide what they have not come to yet."""
        self._broken = 0  # chunks without a depth in the middle of a chain
        self._detached_bytes = 0  # of shards that were replaced
        self._ttl_s = ttl_s
        self._ages: list[tuple[int, int, Chunk]] = []  # when chunks expire, where they do
        self._aged = itertools.count()

    def __repr__(self) -> str:
        return f"<Index {self.chunks} chunks, {self.reserved} shards reserved, {self.held} holds, {self.allocator}>"

    # -- namespaces

    def namespace(
        self,
        model: str,
        world_size: int,
        rank: int,
        fingerprint: bytes,
        blocks_in_chunk: int,
        tenant: str = "",
        size: int = 0,
    ) -> Namespace:
        """The namespace of one rank's layout; a new one unless all that is known of an old one agrees.

        size: bytes of this rank's shards; 0: not known. A fingerprint is a client's word, a size is what is copied.
        """
        namespaces = self._namespaces.setdefault((tenant, model, world_size), [])
        for namespace in reversed(namespaces):
            same = (
                namespace.blocks_in_chunk == blocks_in_chunk and namespace.layouts.get(rank, fingerprint) == fingerprint
            )
            if same and (not size or namespace.sizes.get(rank, size) == size):
                break
        else:
            namespace = Namespace(next(self._numbers), tenant, model, world_size, blocks_in_chunk)
            namespaces.append(namespace)
        if rank not in namespace.layouts:
            namespace.layouts[rank] = fingerprint
        if size:
            namespace.sizes[rank] = size
        return namespace

    def _record_namespace(self, namespace: Namespace) -> None:
        """Record it as it is now. The new record stands before the old one goes, and without room the old one stays."""
        slot = self.records.write(
            NamespaceRecord(
                namespace.number,
                namespace.tenant,
                namespace.model,
                namespace.world_size,
                namespace.blocks_in_chunk,
                namespace.layouts,
            )
        )
        if slot >= 0:
            self.records.erase(namespace.slot)
            namespace.slot, namespace.recorded = slot, len(namespace.layouts)

    def lookup_namespaces(self, model: str, world_size: int, blocks_in_chunk: int, tenant: str = "") -> list[Namespace]:
        """Where a lookup that names no layout must look: those of registered engines, else the newest."""
        namespaces = [
            namespace
            for namespace in self._namespaces.get((tenant, model, world_size), ())
            if not blocks_in_chunk or namespace.blocks_in_chunk == blocks_in_chunk
        ]
        return [namespace for namespace in namespaces if namespace.live] or namespaces[-1:]

    def forget_namespace(self, namespace: Namespace) -> None:
        """Drop a namespace that has no chunks and no registered instance."""
        if not namespace.chunks and not namespace.live:
            namespaces = self._namespaces.get((namespace.tenant, namespace.model, namespace.world_size), [])
            if namespace in namespaces:
                namespaces.remove(namespace)
                namespace.gone = True
                if not namespaces:
                    del self._namespaces[namespace.tenant, namespace.model, namespace.world_size]
                self.records.erase(namespace.slot)
                namespace.slot, namespace.recorded = -1, 0

    def namespaces(self) -> list[Namespace]:
        return [namespace for namespaces in self._namespaces.values() for namespace in namespaces]

    # -- lookup and pins

    def match(self, namespace: Namespace, hashes: bytes) -> Pin:
        """The longest cached prefix of `hashes` (32 bytes a chunk). Nothing is held yet."""
        chunks = namespace.chunks
        low, high = 0, len(hashes) // HASH_BYTES
        total = high
        deepest: Chunk | None = None
        probe = high  # all hit is the common case: ask for the last first
        while low < high:
            chunk = chunks.get(hashes[(probe - 1) * HASH_BYTES : probe * HASH_BYTES])
            if chunk is not None and chunk.depth == probe:
                low, deepest = probe, chunk
            else:
                high = probe - 1
            probe = (low + high + 1) // 2
        if deepest is not None and (self._broken or any(namespace in removal.namespaces for removal in self.hiding)):
            low, deepest = self._unbroken(deepest)
        loose: list[Chunk] = []
        while low < total:
            chunk = chunks.get(hashes[low * HASH_BYTES : (low + 1) * HASH_BYTES])
            if chunk is None or chunk.sealed < namespace.world_size or self.is_hidden(chunk):
                break
            low += 1
            if not loose and chunk.position == low and (low == 1 or chunk.parent is deepest is not None):
                chunk.depth = low  # it was sealed before its parent was: now it is chained
                self._mend(chunk)
                deepest = chunk
            else:
                loose.append(chunk)
        return Pin(loose if deepest is None else [deepest, *loose], low)

    def _unbroken(self, deepest: Chunk) -> tuple[int, Chunk | None]:
        """How far a chain is whole from its start, and its last chunk that is. O(depth)."""
        found: Chunk | None = deepest
        chunk: Chunk | None = deepest
        while chunk is not None:
            if not chunk.depth or self.removal_of(chunk) is not None:
                found = chunk.parent
            chunk = chunk.parent
        return (0, None) if found is None else (found.depth, found)

    def touch(self, chunks: list[Chunk]) -> None:
        """Date these anew, the head last: of what nothing else orders, the tail goes first. It counts as no use."""
        for chunk in reversed(chunks):
            self._policy.touch(chunk)

    def hold(self, chunks: list[Chunk], use: bool = True) -> None:
        """Keep these from eviction until `release`. use: count it as a use, which is once a request.

        What else a request does with the same chunks (a retrieve a rank, a lookup again) follows from the same use;
        counted, it would look like chunks that many requests want.
        """
        for chunk in chunks:
            chunk.holds += 1
        self.held += len(chunks)
        if use:
            for chunk in reversed(chunks):
                self._uses += 1
                chunk.used = self._uses
                self._policy.use(chunk)

    def release(self, chunks: list[Chunk]) -> None:
        """Undo one `hold`."""
        for chunk in chunks:
            assert chunk.holds > 0, chunk.key.hex()
            chunk.holds -= 1
            if _evictable(chunk):
                self._free_to_go(chunk)
        self.held -= len(chunks)

    def _free_to_go(self, chunk: Chunk) -> None:
        """Nothing holds it and nothing is behind it (any more)."""
        if chunk.doomed:
            self.remove(chunk)
        else:
            self._policy.add(chunk)

    def sealed_shard(self, namespace: Namespace, rank: int, key: bytes) -> Chunk | None:
        """The chunk under `key` if this rank's shard of it is sealed, and nothing that is to be removed."""
        chunk = namespace.chunks.get(key)
        if chunk is None or self.removal_of(chunk) is not None:
            return None
        shard = chunk.shards.get(rank)
        return chunk if shard is not None and shard.sealed else None

    # -- storing

    def missing(self, namespace: Namespace, rank: int, key: bytes) -> bool:
        """Whether this rank's shard can be reserved: it is not there, or spoilt and nobody holds its bytes.

        What a removal under way hides goes now, if it can.
        """
        chunk = namespace.chunks.get(key)
        if chunk is not None and self.hiding:
            namespace.live += 1  # it may have been the last, and is wanted again
            self.forestall(chunk)
            namespace.live -= 1
            chunk = namespace.chunks.get(key)
        if chunk is None or (shard := chunk.shards.get(rank)) is None:
            return True
        # Of a chunk that is to be removed, no reservation from before may end in one that is stored anew.
        return shard.spoilt and (not chunk.holds if chunk.doomed else _only_reserved(chunk))

    def reserve(
        self, namespace: Namespace, rank: int, key: bytes, parent: bytes, position: int, size: int, salt: bytes = b""
    ) -> Chunk | None:
        """Reserve this rank's shard of a chunk: `size` bytes, evicting what is needed. The chunk is held.

        parent, position: hash of the chunk before it (empty = unknown) and its number, counted from 1.
        None when space cannot be made. The shard must not exist yet.
        """
        chunk = namespace.chunks.get(key)
        if chunk is None:
            before = namespace.chunks.get(parent) if position > 1 else None
            known = bool(parent) and (position == 1 or (before is not None and before.position == position - 1))
            chunk = Chunk(
                key=key,
                salt=salt,
                namespace=namespace,
                parent=before if known else None,
                position=position if known else 0,
                generation=self.generation,
            )
        spoilt = chunk.shards.get(rank)
        if spoilt is not None:
            assert spoilt.spoilt and _only_reserved(chunk), (rank, key.hex())
            if spoilt.size != size:
                return None  # its place is not this one's
            spoilt.spoilt = False  # its extents are written anew
            spoilt.checksum = spoilt.tiers = 0
            chunk.doomed = False
            chunk.generation = self.generation
            chunk.holds += 1
            self.held += 1
            self.reserved += 1
            return chunk
        before = chunk.parent
        chunk.holds += 1  # neither it nor its ancestors may make room for it
        if before is not None:
            before.holds += 1
        namespace.live += 1  # nor may it go with the last of its chunks
        extents = self._make_room(size)
        namespace.live -= 1
        if before is not None:
            before.holds -= 1
        if extents is None:
            chunk.holds -= 1
            self._requeue(before)
            self._requeue(chunk)
            self.forget_namespace(namespace)
            return None
        self.held += 1
        self.reserved += 1
        if not chunk.shards:  # a new chunk: it was in no dict until now
            namespace.chunks[key] = chunk
            self.chunks += 1
            if before is not None:
                before.children += 1
            self._policy.insert(chunk)
        chunk.shards[rank] = Shard(extents, size)
        bytes_taken = self.allocator.rounded(size)
        chunk.bytes += bytes_taken
        namespace.bytes += bytes_taken
        return chunk

    def replace(self, chunk: Chunk, rank: int) -> Shard | None:
        """Reserve a shard anew that is reserved, and still being written; the old one, for `give_back` after that.

        None where there is no room for another, or the chunk is to be removed and has others under way. Its hold is the
        new one's.
        """
        old = chunk.shards[rank]
        assert not old.sealed and not old.spoilt
        if chunk.doomed and any(s is not old and not (s.sealed or s.spoilt) for s in chunk.shards.values()):
            return None
        extents = self._make_room(old.size)
        if extents is None:
            return None
        chunk.shards[rank] = Shard(extents, old.size)
        chunk.doomed = False
        chunk.generation = self.generation
        self._detached_bytes += self.allocator.rounded(old.size)
        return old

    def give_back(self, shard: Shard) -> None:
        """Nothing writes any more to a shard that was replaced."""
        self._detached_bytes -= self.allocator.rounded(shard.size)
        self.allocator.free(shard.extents)

    def _requeue(self, chunk: Chunk | None) -> None:
        if chunk is not None and chunk.shards and _evictable(chunk):
            self._policy.add(chunk)

    def renew(self, namespace: Namespace, rank: int, key: bytes, born: int) -> None:
        """A chunk that is there was computed again: were it too old, it is new.

        Its bytes stay where they are: who pinned what is behind it holds only that, and may still read them.
        """
        chunk = self.sealed_shard(namespace, rank, key)
        if chunk is not None and chunk.doomed:
            chunk.doomed = False
            chunk.born = born
            self._watch_age(chunk)
            self._chain(chunk)
            if self.watch is not None and self.is_there(chunk):
                self.watch(chunk, True)

    def _make_room(self, size: int) -> Extents | None:
        allocator = self.allocator
        if allocator.rounded(size) > allocator.capacity:
            return None
        while True:
            extents = allocator.allocate(size)
            if extents is not None:
                return extents
            victim = self.victim()
            if victim is None:
                return None
            self.evict(victim)

    def victim(self) -> Chunk | None:
        """The chunk to evict next. It goes now (`evict`), or it is held and comes back when it is released."""
        victim = self._policy.victim(_evictable)
        assert victim is None or isinstance(victim, Chunk)
        return victim

    def evict(self, chunk: Chunk) -> None:
        """Remove a chunk that nothing holds and nothing is behind of, to make room."""
        if self.forestall(chunk):
            return
        if self.evicting is not None:
            self.evicting(chunk)
        self.evicted += 1
        self.remove(chunk, evicted=True)

    def is_evictable(self, chunk: Chunk) -> bool:
        """Whether it is there, nothing holds it and nothing is behind it."""
        return _evictable(chunk)

    def is_there(self, chunk: Chunk) -> bool:
        """Whether a lookup may find it: whole on every rank, and not to be removed."""
        whole = chunk.sealed == chunk.namespace.world_size
        return bool(whole and not chunk.gone and not self.is_hidden(chunk))

    def is_hidden(self, chunk: Chunk) -> bool:
        """Whether it is to be removed: no lookup finds it."""
        return chunk.doomed or self.removal_of(chunk) is not None

    def removal_of(self, chunk: Chunk) -> Removal | None:
        """The removal under way that hides it: nobody gets it any more, not even who has it pinned."""
        for removal in self.hiding:
            if removal.means(chunk):
                return removal
        return None

    def forestall(self, chunk: Chunk) -> bool:
        """Do at once what the removal that hides a chunk is to do with it; False where none hides it."""
        removal = self.removal_of(chunk)
        if removal is None:
            return False
        removal.removed += chunk.sealed > 0
        self.doom(chunk)
        return True

    def seal(self, chunk: Chunk, rank: int, checksum: int = 0, born: int = 0) -> None:
        """Make a reserved shard visible and release the hold of `reserve`.

        born: when it was computed, seconds since 1970; a chunk is as old as its oldest shard.
        """
        shard = chunk.shards[rank]
        assert not shard.sealed
        shard.sealed = True
        shard.checksum = checksum
        if not chunk.sealed or born < chunk.born:
            chunk.born = born
            self._watch_age(chunk)
        self.reserved -= 1
        chunk.sealed += 1
        self._serial += 1
        self._record(chunk, rank, shard)
        self._chain(chunk)
        if self.watch is not None and self.is_there(chunk):
            self.watch(chunk, True)
        self.release([chunk])

    def _chain(self, chunk: Chunk) -> None:
        """Give it its depth, if it is there on all ranks and chained to the start."""
        if chunk.sealed == chunk.namespace.world_size and chunk.position and not chunk.doomed:
            before = chunk.parent
            if chunk.position == 1 or (before is not None and before.depth == chunk.position - 1):
                chunk.depth = chunk.position
                self._mend(chunk)

    def _mend(self, chunk: Chunk) -> None:
        self._broken -= chunk.broken
        chunk.broken = False

    def _record(self, chunk: Chunk, rank: int, shard: Shard) -> None:
        if not self.records.capacity:
            self.unrecorded += 1
            return
        namespace: Namespace = chunk.namespace
        if namespace.recorded < len(namespace.layouts):
            self._record_namespace(namespace)
        if namespace.recorded == len(namespace.layouts):
            before: Chunk | None = chunk.parent
            parent = b"" if before is None else before.key
            shard.slot = self.records.write(
                ShardRecord(
                    namespace.number, rank, chunk.key, parent, chunk.position, shard.extents, shard.size, self._serial,
                    shard.checksum, chunk.salt, chunk.born,
                )
            )  # fmt: skip
        self.unrecorded += shard.slot < 0

    def condemn(self, chunk: Chunk, rank: int) -> None:
        """A sealed shard's bytes are not what was stored: nobody gets them any more.

        The chunks behind it are no prefix until it is stored again.
        """
        shard = chunk.shards.get(rank)
        if shard is None or not shard.sealed:
            return
        shard.sealed, shard.spoilt = False, True
        chunk.sealed -= 1
        self.records.erase(shard.slot)
        shard.slot = -1
        self._unchain(chunk)
        if self.watch is not None:
            self.watch(chunk, False)

    def _unchain(self, chunk: Chunk) -> None:
        if chunk.depth:
            chunk.depth = 0
            if chunk.children:
                chunk.broken = True
                self._broken += 1

    def doom(self, chunk: Chunk, at_once: bool = True) -> None:
        """Remove a chunk, or, while it is held or others are behind it, hide it and them and remove it after that.

        at_once: those who hold it get it no more, either. A reservation after that (its key is stored anew) saves it;
        one that is under way should be discarded.
        """
        if _evictable(chunk):
            self.remove(chunk)
        else:
            chunk.doomed = True
            self._unchain(chunk)
            if self.watch is not None and chunk.sealed:
                self.watch(chunk, False)
            if at_once:
                for rank in list(chunk.shards):
                    self.condemn(chunk, rank)

    def discard(self, chunk: Chunk, rank: int) -> None:
        """Drop a reserved shard (its copy failed) and release the hold of `reserve`."""
        shard = chunk.shards.pop(rank)
        assert not shard.sealed
        self.reserved -= 1
        self._free(chunk, shard)
        if not chunk.shards:
            chunk.holds -= 1
            self.held -= 1
            before = self._unlink(chunk)
            if before is not None:
                self.remove(before)
        else:
            self.release([chunk])

    # -- after a restart

    def adopt(self, namespaces: list[Namespace], serial: int) -> None:
        """Take in namespaces with their chunks, sealed, linked and dated, that recovery.py read from the records.

        The index must be empty and their extents taken. serial: the last that was given to a shard.
        """
        assert not self._namespaces
        self._numbers = itertools.count(max((namespace.number for namespace in namespaces), default=0) + 1)
        self._serial = self._uses = serial
        found: list[Chunk] = []
        for namespace in namespaces:
            self._namespaces.setdefault((namespace.tenant, namespace.model, namespace.world_size), []).append(namespace)
            found += namespace.chunks.values()
        self.chunks = len(found)
        found.sort(key=lambda chunk: chunk.used)  # as they were stored; the policy dates them by its own clock
        for chunk in found:
            self._policy.insert(chunk)
            self._watch_age(chunk)
        for chunk in found:
            if not chunk.children:
                self._policy.add(chunk)

    # -- age

    def _watch_age(self, chunk: Chunk) -> None:
        if self._ttl_s:
            if len(self._ages) > 2 * self.chunks + 64:  # most are of chunks that are gone, or have another age now
                self._ages = [
                    entry for entry in self._ages if not entry[2].gone and entry[0] == entry[2].born + self._ttl_s
                ]
                heapq.heapify(self._ages)
            heapq.heappush(self._ages, (chunk.born + self._ttl_s, next(self._aged), chunk))

    def expire(self, wall: int) -> int:
        """Remove what was computed more than `ttl_s` before `wall` (seconds since 1970); how many chunks.

        Those who have such a chunk pinned may have it to the end; nobody else finds it any more.
        """
        expired = 0
        while self._ages and self._ages[0][0] <= wall:
            chunk = heapq.heappop(self._ages)[2]
            if not (chunk.gone or chunk.doomed) and chunk.born + self._ttl_s <= wall:
                expired += 1
                self.doom(chunk, at_once=False)
        return expired

    # -- removal

    def remove(self, chunk: Chunk, evicted: bool = False) -> None:
        """Remove a chunk that nothing holds and nothing is behind of."""
        while True:
            assert _evictable(chunk), chunk.key.hex()
            for shard in chunk.shards.values():
                self._free(chunk, shard)
            chunk.shards.clear()
            before = self._unlink(chunk, evicted)
            if before is None:
                return
            chunk, evicted = before, False  # doomed, and now nothing is behind it

    def _free(self, chunk: Chunk, shard: Shard) -> None:
        self.records.erase(shard.slot)  # before anything else can be written there
        self.allocator.free(shard.extents)
        size = self.allocator.rounded(shard.size)
        chunk.bytes -= size
        chunk.namespace.bytes -= size

    def _unlink(self, chunk: Chunk, evicted: bool = False) -> Chunk | None:
        """Take a chunk without shards out of its namespace and chain; its parent, if that is to go too.

        Children of a reservation that failed stay behind: their parent object never gets a depth, so
        they are loose from then on.
        """
        namespace: Namespace = chunk.namespace
        del namespace.chunks[chunk.key]
        self.chunks -= 1
        chunk.gone = True
        chunk.depth = 0
        if self.watch is not None and chunk.sealed:
            self.watch(chunk, False)
        self._policy.remove(chunk, evicted)
        before: Chunk | None = chunk.parent
        chunk.parent = None
        if not chunk.children:
            self._mend(chunk)  # else those behind it have lost it for good
        doomed = None
        if before is not None:
            before.children -= 1
            if before.gone and not before.children:
                self._mend(before)
            if _evictable(before):
                if before.doomed:
                    doomed = before
                else:
                    self._policy.add(before)
        self.forget_namespace(namespace)
        return doomed

    def validate(self) -> None:
        """Raise AssertionError unless every count and link agrees; O(n), for tests and `kvdepot check`."""
        self.allocator.validate()
        used = chunks = reserved = held = 0
        children: dict[int, int] = {}
        for namespace in self.namespaces():
            total = 0
            for key, chunk in namespace.chunks.items():
                assert key == chunk.key and chunk.namespace is namespace and not chunk.gone and chunk.shards
                assert chunk.sealed == sum(shard.sealed for shard in chunk.shards.values())
                assert chunk.bytes == sum(n for s in chunk.shards.values() for _, n in s.extents)
                open_shards = len(chunk.shards) - chunk.sealed - sum(s.spoilt for s in chunk.shards.values())
                assert not any(s.sealed and s.spoilt for s in chunk.shards.values())
                assert all(s.sealed for s in chunk.shards.values() if s.slot >= 0), "only what is sealed is recorded"
                assert namespace.slot >= 0 or not any(s.slot >= 0 for s in chunk.shards.values())
                assert chunk.holds >= open_shards
                if chunk.depth:
                    assert chunk.sealed == namespace.world_size and chunk.depth == chunk.position
                    broken = chunk.parent is not None and (chunk.parent.broken or not chunk.parent.depth)
                    assert chunk.depth == 1 or (
                        chunk.parent is not None
                        and (chunk.parent.depth == chunk.depth - 1 or (broken and self._broken))
                    )
                if chunk.parent is not None:
                    children[id(chunk.parent)] = children.get(id(chunk.parent), 0) + 1
                assert not (chunk.doomed and _evictable(chunk))
                if _evictable(chunk):
                    assert chunk.queued, f"{key.hex()} can be evicted but no policy knows it"
                total += chunk.bytes
                reserved += open_shards
                held += chunk.holds
            assert total == namespace.bytes
            used += total
            chunks += len(namespace.chunks)
        for namespace in self.namespaces():
            for chunk in namespace.chunks.values():
                assert chunk.children == children.get(id(chunk), 0)
        assert used + self._detached_bytes == self.allocator.capacity - self.allocator.free_bytes, (
            used,
            self.allocator,
        )
        assert (chunks, reserved, held) == (self.chunks, self.reserved, self.held)


def _evictable(chunk: Victim) -> bool:
    assert isinstance(chunk, Chunk)
    return not chunk.holds and not chunk.children and not chunk.gone


def _only_reserved(chunk: Chunk) -> bool:
    """Whether nobody holds it but reservations of its shards: nobody reads the bytes of the others."""
    return chunk.holds == sum(not (shard.sealed or shard.spoilt) for shard in chunk.shards.values())
