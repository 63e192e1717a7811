"""The index: which chunks exist, what holds them, and where their bytes are. No I/O, thread or clock.

Called by core/ on the deciding thread only. Invariants: a visible chunk is sealed on every rank; a chunk that is
pinned, being copied, or has a chunk behind it is not evicted.

A chunk belongs to a `Namespace` and has one `Shard` per rank; chunk.py defines their states and transitions. Five
methods change them: `reserve_missing`, `seal`, `mark_corrupt`, `hide` and `remove`. Queries change nothing. Each change
that a restart must know is written into `records` at once.

**Chains.** In token mode a key's parent is known, so chunks form trees, and a `CHAINED` chunk is sealed together with
all its ancestors. Only leaves are evicted, hence:

- the longest prefix is found by binary search over the keys, O(log n) for any prompt length;
- pinning the deepest chunk of a match protects all of it, O(1).

A chunk and its parent have the same salt, and so the same account and policy.

Chunks without a known parent (engine hashes, or the parent was missing) are **loose**, position 0: they are found one
by one behind the chained part, and pinned one by one.

**KV cache groups.** A hybrid model has a namespace per group. Unbounded groups have chains as above. Of a bounded group
only the last parts before a boundary are needed, so its parts are no chain: each is found, pinned and evicted by
itself, before the part of the first unbounded group with the same key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TypedDict

from kvdepot.core.index.accounts import Accounts
from kvdepot.core.index.boundary import deepest_boundary, needed_parts
from kvdepot.core.index.chains import Chains
from kvdepot.core.index.check import Totals, check
from kvdepot.core.index.chunk import TRANSITIONS, Account, Chunk, Event, Namespace, Pin, Shard, State, is_evictable
from kvdepot.core.index.lifetimes import SAMPLED, Lifetimes
from kvdepot.core.index.namespaces import Namespaces
from kvdepot.core.index.outcomes import Absent, Found, NoRoom, Present, Reason, Replaced, Reservation, Reserved
from kvdepot.core.index.quotas import queue, set_quota
from kvdepot.core.index.scope import Scope
from kvdepot.eviction import Policy
from kvdepot.memory.allocator import Allocator, Extents
from kvdepot.memory.records import Records
from kvdepot.protocol.keys import HASH_BYTES
from kvdepot.protocol.quotas import Quota

__all__ = ["Index"]

# Attributes of an enum are slow to get, and every step needs these.
_RESERVED, _LOADING, _SEALED, _CORRUPT = State.RESERVED, State.LOADING, State.SEALED, State.CORRUPT
_WHOLE, _CHAINED, _PENDING_REMOVAL = State.WHOLE, State.CHAINED, State.PENDING_REMOVAL
_RESERVE, _SEAL, _COMPLETE, _REMOVE = Event.RESERVE, Event.SEAL, Event.COMPLETE, Event.REMOVE
_ABSENT, _PRESENT, _NO_ROOM, _CAPPED = Absent(), Present(), NoRoom(), NoRoom(is_capped=True)


class MemoryFigures(TypedDict):
    """Fields of `status.Status`."""

    capacity_bytes: int
    used_bytes: int
    chunks: int
    reserved_shards: int
    holds: int
    evicted_chunks: int
    record_slots: int
    record_slots_used: int
    unrecorded_shards: int
    holds_s: float | None


class Index:
    """All chunks of the depot, in the space of `allocator`."""

    def __init__(
        self,
        allocator: Allocator,
        policy: Callable[[], Policy],
        records: Records | None = None,
        ttl_s: int = 0,
        watch: Callable[[Chunk, bool], None] | None = None,
        chunk_tokens: int = 0,
        salt_ttls: Mapping[bytes, int] | None = None,
    ) -> None:
        """policy: makes the policy of each account. records: what survives a restart; None: nothing. ttl_s: of all
        chunks, see `expire`; 0 = never. salt_ttls: of chunks with these salts, if that is sooner.

        chunk_tokens: of namespaces that do not say, such as those in records of an earlier version. watch: called with
        each chunk that has become available (True) or unavailable (False, possibly twice).
        """
        self.allocator = allocator
        self.records = records or Records(memoryview(b""))
        self.accounts = Accounts(allocator.capacity, policy, ttl_s, salt_ttls)
        self.namespaces = Namespaces(self.records, self.accounts, chunk_tokens)
        self.unrecorded = 0  # shards sealed since the start for which records had no room
        self.chunks = 0
        self.reserved = 0  # shards
        self.held = 0  # holds on all chunks
        self.evicted = 0
        self.evicted_saved: Counter[int] = Counter()  # of those, by the tiers that had the whole chunk (Shard.tiers)
        self.generation = 0  # removals that have begun
        self.hiding: list[Scope] = []  # removals in progress that hide the chunks they have not reached yet
        self._watch = watch
        self._serial = 0  # shards sealed so far
        self._uses = 0  # of chunks
        self._chains = Chains()
        self.lifetimes = Lifetimes()
        self._wall = 0  # of the last `expire`, once a second

    def __repr__(self) -> str:
        return f"<Index {self.chunks} chunks, {self.reserved} shards reserved, {self.held} holds, {self.allocator}>"

    # -- queries

    def match(self, namespace: Namespace, hashes: bytes) -> Pin:
        """Find the longest prefix of `hashes` (32 bytes per chunk) that can be resumed, without holding it.

        namespace: the model's first group. With several groups, or a bounded one, the prefix ends where every group
        has what resuming there needs.
        """
        if namespace.is_simple:
            return self._chain(namespace, hashes)
        groups, end = namespace.groups, len(hashes) // HASH_BYTES
        for group in groups:
            if not group.reach:
                end = self._chain(group, hashes[: end * HASH_BYTES]).matched
        bounded = [(group, group.reach) for group in groups if group.reach]
        end = deepest_boundary(bounded, end, lambda group, i: self._has_part(group, hashes, i))
        found: list[Chunk] = []
        parts = 0
        for group in groups:
            needed = needed_parts(group.reach, end)
            parts += len(needed)
            if group.reach:
                found += [group.chunks[hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]] for i in needed]
            else:
                found += self._chain(group, hashes[: end * HASH_BYTES]).chunks
        return Pin(found, end, parts)

    def _has_part(self, namespace: Namespace, hashes: bytes, i: int) -> bool:
        chunk = namespace.chunks.get(hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES])
        return chunk is not None and self.is_there(chunk)

    def _chain(self, namespace: Namespace, hashes: bytes) -> Pin:
        """The longest prefix of `hashes` in an unbounded group."""
        chunks = namespace.chunks
        low, high = 0, len(hashes) // HASH_BYTES
        total = high
        deepest: Chunk | None = None
        probe = high  # a hit of the whole prompt is the common case, so try the last chunk first
        while low < high:
            chunk = chunks.get(hashes[(probe - 1) * HASH_BYTES : probe * HASH_BYTES])
            if chunk is not None and chunk.state is _CHAINED and chunk.position == probe:
                low, deepest = probe, chunk
            else:
                high = probe - 1
            probe = (low + high + 1) // 2
        if deepest is not None and (self._chains.broken or any(namespace in scope.namespaces for scope in self.hiding)):
            low, deepest = self._unbroken(deepest)
        loose: list[Chunk] = []
        while low < total:
            chunk = chunks.get(hashes[low * HASH_BYTES : (low + 1) * HASH_BYTES])
            if chunk is None or not self.is_there(chunk):
                break
            low += 1
            loose.append(chunk)
        return Pin(loose if deepest is None else [deepest, *loose], low, low)

    def _unbroken(self, deepest: Chunk) -> tuple[int, Chunk | None]:
        """The complete part of a chain from its start: its length and its last chunk. O(depth)."""
        found: Chunk | None = deepest
        chunk: Chunk | None = deepest
        while chunk is not None:
            if chunk.state is not _CHAINED or self.is_forgotten(chunk):
                found = chunk.parent
            chunk = chunk.parent
        return (0, None) if found is None else (found.depth, found)

    def find(self, namespace: Namespace, rank: int, hashes: bytes) -> list[Found | Absent]:
        """Find this rank's usable shard for each of `hashes` (32 bytes per chunk), without holding it."""
        found: list[Found | Absent] = []
        for start in range(0, len(hashes), HASH_BYTES):
            chunk = namespace.chunks.get(hashes[start : start + HASH_BYTES])
            shard = chunk.shards.get(rank) if chunk is not None else None
            if chunk is None or shard is None or shard.state is not _SEALED or self.is_forgotten(chunk):
                found.append(_ABSENT)
            else:
                found.append(Found(chunk, shard))
        return found

    def is_missing(self, namespace: Namespace, rank: int, key: bytes) -> bool:
        """Whether this rank's shard can be reserved: it does not exist, or is corrupt and nothing holds its bytes.

        A chunk that a removal in progress hides counts as gone if nothing holds it: reserving it first removes it.
        """
        chunk = namespace.chunks.get(key)
        shard = chunk.shards.get(rank) if chunk is not None else None
        if chunk is None or shard is None:
            return True
        if self.is_forgotten(chunk):
            return not shard.is_open and not chunk.holds
        return shard.state is _CORRUPT and _is_free_to_write(chunk)

    def is_there(self, chunk: Chunk) -> bool:
        """Whether a lookup may find it: sealed on every rank, and not pending removal."""
        return (chunk.state is _CHAINED or chunk.state is _WHOLE) and not self.is_forgotten(chunk)

    def is_hidden(self, chunk: Chunk) -> bool:
        """Whether it is pending removal: no lookup finds it."""
        return chunk.state is _PENDING_REMOVAL or self.is_forgotten(chunk)

    def is_forgotten(self, chunk: Chunk) -> bool:
        """Whether a removal in progress hides it: it is not given out any more, even to those who have it pinned."""
        return bool(self.hiding) and any(scope.means(chunk) for scope in self.hiding)

    # -- holds and uses

    def touch(self, chunks: list[Chunk]) -> None:
        """Refresh these in the policy, the head last, so that the tail is evicted first. It does not count as a use."""
        for chunk in reversed(chunks):
            chunk.account.policy.touch(chunk)

    def hold(self, chunks: list[Chunk], use: bool = True) -> None:
        """Protect these from eviction until `release`. use: count it as a use, once per request.

        A request's further holds of the same chunks (one retrieve per rank, a repeated lookup) are not uses: they would
        make the chunks look as if many requests wanted them.
        """
        for chunk in chunks:
            chunk.holds += 1
        self.held += len(chunks)
        if use:
            if chunks:
                self.lifetimes.reused(chunks[-1], self._wall)
            for chunk in reversed(chunks):
                self._uses += 1
                chunk.used = self._uses
                chunk.used_s = self._wall
                chunk.account.policy.use(chunk)

    def release(self, chunks: list[Chunk]) -> None:
        """Undo one `hold`."""
        for chunk in chunks:
            assert chunk.holds > 0, chunk.key.hex()
            chunk.holds -= 1
            if not chunk.holds and not chunk.children and not chunk.gone:
                if chunk.state is _PENDING_REMOVAL:
                    self.remove(chunk, Reason.DROPPED)
                else:
                    chunk.account.policy.add(chunk)
        self.held -= len(chunks)

    def count_hit(self, pin: Pin) -> None:
        """Count a lookup of an engine at the last chunk of the prefix that it found, in the first unbounded group."""
        for chunk in pin.chunks:
            if chunk.position and chunk.namespace.is_lead:
                chunk.hits += 1
                return

    # -- reserve

    def reserve_missing(
        self,
        namespace: Namespace,
        rank: int,
        hashes: bytes,
        parent: bytes,
        position: int,
        size: int,
        salt: bytes = b"",
        wall: int | None = None,
        is_load: bool = False,
    ) -> list[Reservation]:
        """Reserve this rank's missing shards of a run of chunks, `size` bytes each; evicts to make room.

        hashes: 32 bytes per chunk, each behind the one before. parent, position: hash of the chunk before the first
        (empty = unknown; then they are all loose) and the number of the first, counted from 1.
        wall: when they were computed (seconds since 1970); renews existing chunks that were too old.
        is_load: their bytes come from a tier; a client that has the bytes may replace them in the meantime.

        Returns one outcome per hash, in order, up to the first NoRoom, which is the last. Reserved chunks are held
        until `seal` or `remove`.
        """
        outcomes: list[Reservation] = []
        is_chained = bool(parent)
        for start in range(0, len(hashes), HASH_BYTES):
            key = hashes[start : start + HASH_BYTES]
            chunk = namespace.chunks.get(key)
            if chunk is not None and self.hiding:
                namespace.live += 1  # keep the namespace, even if this was its last chunk
                self.remove_forgotten(chunk)
                namespace.live -= 1
                chunk = namespace.chunks.get(key)
            if chunk is None:
                chunk = self._new_chunk(namespace, key, parent, position, salt)
                outcome = self._reserve(chunk, rank, size, is_load)
            elif rank in chunk.shards:
                outcome = self._reserve_again(chunk, rank, size, wall, is_load)
            else:
                chunk.state = TRANSITIONS[chunk.state][_RESERVE]
                outcome = self._reserve(chunk, rank, size, is_load)
            outcomes.append(outcome)
            if isinstance(outcome, NoRoom):
                break
            if is_chained:
                parent = key
                position += 1
        return outcomes

    def _new_chunk(self, namespace: Namespace, key: bytes, parent: bytes, position: int, salt: bytes) -> Chunk:
        """A chunk that is not in the index yet. parent: see `reserve_missing`."""
        trunk = namespace.trunk
        if namespace.reach:
            before, is_known, position = None if trunk is None else trunk.chunks.get(key), True, 0
        else:
            before = namespace.chunks.get(parent) if position > 1 else None
            is_known = bool(parent) and (position == 1 or (before is not None and before.position == position - 1))
        if before is not None and before.salt != salt:  # a client's mistake: the chain would be in two accounts
            before, is_known = None, bool(namespace.reach)
        return Chunk(
            key=key,
            salt=salt,
            namespace=namespace,
            account=namespace.account_of(salt),
            parent=before if is_known else None,
            position=position if is_known else 0,
            generation=self.generation,
            used_s=self._wall,
        )

    def _reserve(self, chunk: Chunk, rank: int, size: int, is_load: bool) -> Reservation:
        """Reserve a missing shard. A chunk without shards is new and is added to the index here."""
        namespace, before, account = chunk.namespace, chunk.parent, chunk.account
        chunk.holds += 1  # neither it nor its ancestors may be evicted for it
        if before is not None:
            before.holds += 1
        namespace.live += 1  # nor may the namespace be dropped with its last chunk
        extents = self._make_room(account, size)
        namespace.live -= 1
        if before is not None:
            before.holds -= 1
        if extents is None:
            chunk.holds -= 1
            for each in (before, chunk):
                if each is not None and each.shards and is_evictable(each):
                    account.policy.add(each)
            self.namespaces.forget(namespace)
            return _CAPPED if account.is_over_cap_with(self.allocator.rounded(size)) else _NO_ROOM
        self.held += 1
        self.reserved += 1
        if not chunk.shards:
            namespace.chunks[chunk.key] = chunk
            self.chunks += 1
            if before is not None:
                before.children += 1
            account.chunks += 1
            account.policy.insert([chunk])
        chunk.shards[rank] = Shard(extents, size, _LOADING if is_load else _RESERVED)
        taken = self.allocator.rounded(size)
        chunk.bytes += taken
        namespace.bytes += taken
        account.used += taken  # as `Account.charge`, without the cost of a call
        account.spare += taken
        return Reserved(chunk)

    def _reserve_again(self, chunk: Chunk, rank: int, size: int, wall: int | None, is_load: bool) -> Reservation:
        """Reserve a shard that exists already, if it is corrupt or being loaded."""
        shard = chunk.shards[rank]
        if shard.state is _SEALED:
            if chunk.state is _PENDING_REMOVAL and wall is not None:
                self._renew(chunk, wall)
        elif shard.state is _LOADING:
            return self._replace(chunk, rank, is_load)
        elif shard.state is _CORRUPT and (_is_only_written(chunk) if is_load else _is_free_to_write(chunk)):
            if shard.size != size:
                return _NO_ROOM  # the new bytes do not fit its extents
            shard.state = TRANSITIONS[shard.state][Event.LOAD if is_load else _RESERVE]
            shard.checksum = shard.tiers = 0  # its extents will be rewritten
            self._is_stored_anew(chunk)
            chunk.holds += 1
            self.held += 1
            self.reserved += 1
            return Reserved(chunk)
        return _PRESENT

    def _replace(self, chunk: Chunk, rank: int, is_load: bool) -> Reservation:
        """Put a new shard in the place of one that is being loaded; the new one takes over its hold.

        Refused if there is no room, or if the chunk is pending removal and other shards of it are open: those must not
        become part of a renewed chunk.
        """
        old = chunk.shards[rank]
        is_alone = not any(shard.is_open for shard in chunk.shards.values() if shard is not old)
        if chunk.state is _PENDING_REMOVAL and not is_alone:
            return _PRESENT
        namespace = chunk.namespace
        extents = self._make_room(chunk.account, old.size)
        if extents is None:
            return _PRESENT
        old.state = TRANSITIONS[old.state][Event.REPLACE]
        chunk.shards[rank] = Shard(extents, old.size, _LOADING if is_load else _RESERVED)
        self._is_stored_anew(chunk)
        size = self.allocator.rounded(old.size)
        chunk.account.charge(size)
        namespace.detached[chunk.salt] += size
        return Replaced(chunk)

    def _is_stored_anew(self, chunk: Chunk) -> None:
        if chunk.state is _PENDING_REMOVAL:
            chunk.state = TRANSITIONS[chunk.state][Event.RENEW]
        chunk.generation = self.generation

    def give_back(self, chunk: Chunk, shard: Shard) -> None:
        """Free a replaced shard of a chunk, which may be gone, once nothing writes to the shard any more."""
        self._free(shard)
        namespace, size = chunk.namespace, self.allocator.rounded(shard.size)
        namespace.account_of(chunk.salt).charge(-size)  # a chunk that is gone does not know of new accounts
        namespace.detached[chunk.salt] -= size
        if not namespace.detached[chunk.salt]:
            del namespace.detached[chunk.salt]
        self.namespaces.forget(namespace)

    def _renew(self, chunk: Chunk, wall: int) -> None:
        """A chunk that was too old was computed again: keep it.

        Its bytes stay in place: clients that pinned a chunk behind it do not hold this one, and may still read them.
        """
        chunk.state = TRANSITIONS[chunk.state][Event.RENEW]
        chunk.born = wall
        self.accounts.ages.record(chunk)
        if chunk.sealed == chunk.namespace.world_size:
            chunk.state = TRANSITIONS[chunk.state][_COMPLETE]
            self._is_whole(chunk)

    def _make_room(self, account: Account, size: int) -> Extents | None:
        """Allocate `size` bytes for an account, which the caller charges, and evict for them; None if there is no room.

        An account above its cap gets nothing: `trim` evicts the excess in steps, and this would do it in one.
        """
        allocator = self.allocator
        taken = allocator.rounded(size)
        if taken > account.cap or account.used > account.cap:
            return None
        while True:
            if account.used + taken <= account.cap:
                extents = allocator.allocate(size)
                if extents is not None:
                    return extents
            victim = self.accounts.victim(account, taken)
            if victim is None:
                return None
            self.remove(victim, Reason.EVICTED)

    def victim_ahead(self, by: Account | None, low_bytes: int) -> Chunk | None:
        """The chunk to evict next so that an account has room before it asks; None if it has, or nothing can go.

        It has room while `low_bytes` of the arena are free, and an eighth of its cap. Chunks that are leaving count as
        gone. by: None for no account in particular. The caller removes the chunk, or holds it; `release` then returns
        it to the policy.
        """
        if by is not None and by.is_nearly_full():
            return by.victim()
        is_short = self.allocator.free_bytes + self.accounts.leaving < low_bytes
        return self.accounts.victim(by, 0) if is_short else None

    def trim(self, most: int) -> bool:
        """Evict up to `most` chunks of accounts above their caps. Returns whether it must go on.

        What is held stays; call this again once a second.
        """
        for account in self.accounts.over_cap():
            while account.used > account.cap:
                victim = account.victim()
                if victim is None:
                    break
                self.remove(victim, Reason.EVICTED)
                most -= 1
                if most <= 0:
                    return True
        return False

    # -- seal

    def seal(self, chunk: Chunk, rank: int, checksum: int = 0, born: int = 0) -> None:
        """Make a reserved shard visible and release the hold of its reservation.

        born: when it was computed, in seconds since 1970; a chunk is as old as its oldest shard.
        """
        shard = chunk.shards[rank]
        is_last = chunk.sealed + 1 == chunk.namespace.world_size
        after = TRANSITIONS[shard.state][_SEAL]
        chunk.state = TRANSITIONS[chunk.state][_COMPLETE if is_last else _SEAL]
        shard.state = after
        shard.checksum = checksum
        if not chunk.sealed or born < chunk.born:
            chunk.born = born
            self.accounts.ages.record(chunk)
        self.reserved -= 1
        chunk.sealed += 1
        self._serial += 1
        if self.records.capacity:
            self.namespaces.record(chunk, rank, self._serial)
        if shard.slot is None:
            self.unrecorded += 1
        if is_last:
            self._is_whole(chunk)
        self.release([chunk])

    def _is_whole(self, chunk: Chunk) -> None:
        """A chunk has just been sealed on every rank."""
        if self._watch is not None and not self.is_forgotten(chunk):
            self._watch(chunk, True)
        self._chains.join(chunk)

    # -- mark corrupt, hide

    def mark_corrupt(self, chunk: Chunk, rank: int) -> None:
        """Stop using a sealed shard, because its bytes are not what was stored, or were forgotten.

        The chunks behind it are no prefix until it is stored again.
        """
        shard = chunk.shards[rank]
        after = TRANSITIONS[shard.state][Event.CORRUPT]
        self._unchain(chunk, Event.CORRUPT)
        shard.state = after
        chunk.sealed -= 1
        self.records.erase(shard.slot)
        shard.slot = None
        if self._watch is not None:
            self._watch(chunk, False)

    def hide(self, chunk: Chunk, at_once: bool = True) -> None:
        """Remove a chunk; if it is held or others are behind it, hide it and them, and remove it after that.

        at_once: it is not given out any more, even to those who hold it. A later reservation of its key renews it; one
        in progress does not.
        """
        if is_evictable(chunk):
            self.remove(chunk, Reason.DROPPED)
            return
        self._unchain(chunk, Event.HIDE)
        if self._watch is not None and chunk.sealed:
            self._watch(chunk, False)
        for rank, shard in chunk.shards.items() if at_once else ():
            if shard.state is _SEALED:
                self.mark_corrupt(chunk, rank)

    def _unchain(self, chunk: Chunk, event: Event) -> None:
        was_chained = chunk.state is _CHAINED
        chunk.state = TRANSITIONS[chunk.state][event]
        if was_chained:
            self._chains.break_at(chunk)

    # -- remove

    def remove(self, chunk: Chunk, reason: Reason, rank: int | None = None) -> None:
        """Remove a chunk that nothing holds and that has nothing behind it; or, if it FAILED, one reserved shard of it.

        rank: of that shard. Its hold is released; with the last shard the chunk is removed, and nothing else may hold
        it then.
        """
        if reason is Reason.FAILED:
            assert rank is not None
            self._remove_shard(chunk, rank)
            return
        assert is_evictable(chunk), chunk.key.hex()
        is_evicted = reason is Reason.EVICTED
        account = chunk.account
        if is_evicted:
            if self.hiding and self.remove_forgotten(chunk):
                return
            self.evicted += 1
            if self.evicted % SAMPLED == 0:
                self.lifetimes.evicted(chunk, self._wall)
            account.evicted += 1
            tiers = -1
            for shard in chunk.shards.values():
                tiers &= shard.tiers
            if tiers:
                self.evicted_saved[tiers] += 1
        last: Chunk | None = chunk
        while last is not None:
            for shard in last.shards.values():
                self._free(shard)
            last.shards.clear()
            last.namespace.bytes -= last.bytes
            account.used -= last.bytes
            account.spare -= last.bytes
            last.bytes = 0
            last = self._unlink(last, is_evicted)
            is_evicted = False  # its ancestors were pending removal, and nothing is behind them any more

    def _remove_shard(self, chunk: Chunk, rank: int) -> None:
        shard = chunk.shards[rank]
        assert shard.is_open, shard.state
        self._free(shard)
        del chunk.shards[rank]
        taken = self.allocator.rounded(shard.size)
        chunk.bytes -= taken
        chunk.namespace.bytes -= taken
        chunk.account.charge(-taken)
        self.reserved -= 1
        if chunk.shards:
            self.release([chunk])
            return
        chunk.holds -= 1
        self.held -= 1
        before = self._unlink(chunk, False)
        if before is not None:
            self.remove(before, Reason.DROPPED)

    def _free(self, shard: Shard) -> None:
        shard.state = TRANSITIONS[shard.state][_REMOVE]
        if shard.slot is not None:
            self.records.erase(shard.slot)  # before its extents can be overwritten
        self.allocator.free(shard.extents)

    def _unlink(self, chunk: Chunk, is_evicted: bool) -> Chunk | None:
        """Take a chunk without shards out of its namespace and chain. Returns its parent if that must be removed too.

        The children of a failed reservation stay. They keep this chunk as parent, which is never chained, so they are
        never found as part of a chain.
        """
        chunk.state = TRANSITIONS[chunk.state][_REMOVE]
        chunk.gone = True
        namespace, before, account = chunk.namespace, chunk.parent, chunk.account
        del namespace.chunks[chunk.key]
        self.chunks -= 1
        account.chunks -= 1
        if self._watch is not None and chunk.sealed:
            self._watch(chunk, False)
        account.policy.remove(chunk, is_evicted)
        chunk.parent = None
        pending = None
        if before is not None:
            before.children -= 1
            if before.used_s < chunk.used_s:
                before.used_s = chunk.used_s
            if is_evictable(before):
                if before.state is _PENDING_REMOVAL:
                    pending = before
                else:
                    account.policy.add(before)
        self._chains.leave(chunk, before)
        self.namespaces.forget(namespace)
        return pending

    # -- removals of many chunks, in steps: core/forgetting.py

    def begin_removal(self, namespaces: Iterable[Namespace], salt: bytes | None, hides: bool) -> Scope:
        """Begin to remove the existing chunks of these namespaces and this salt (None: any). hides: hide them now."""
        self.generation += 1
        scope = Scope(self.generation, dict.fromkeys(namespaces), salt, hides)
        if hides:
            self.hiding.append(scope)
        return scope

    def end_removal(self, scope: Scope) -> None:
        """End a removal: all its chunks are gone or pending removal."""
        if scope.hides:
            self.hiding.remove(scope)
        for namespace in scope.namespaces:
            self.namespaces.forget(namespace)

    def remove_forgotten(self, chunk: Chunk) -> bool:
        """Remove a chunk on behalf of the removal that hides it; False if none does."""
        scope = next((scope for scope in self.hiding if scope.means(chunk)), None)
        if scope is None:
            return False
        scope.removed += chunk.sealed > 0
        self.hide(chunk)
        return True

    def is_too_old(self, chunk: Chunk, born: int) -> bool:
        """Whether a chunk, if it was computed then, had expired when `expire` was last called."""
        return 0 < self.accounts.ttl_of(chunk) <= self._wall - born

    def expire(self, wall: int, most: int = 1 << 62) -> int:
        """Remove up to `most` chunks that are older at `wall` (seconds since 1970) than a limit of theirs: the
        server's, their tenant's or their salt's.

        Returns how many. Clients that have such a chunk pinned can still retrieve it; no lookup finds it.
        """
        self._wall = wall
        expired = 0
        for chunk in self.accounts.ages.due(wall):
            if chunk.state is not _PENDING_REMOVAL:
                expired += 1
                self.hide(chunk, at_once=False)
                if expired >= most:
                    return expired
        return expired

    # -- quotas

    def set_quota(self, tenant: str, quota: Quota | None, tag: bytes = b"") -> None:
        """Give a tenant a quota, or another one, or one of its cache salts (tag: keys.salt_tag). None: none, so that a
        salt's chunks belong to its tenant, and a tenant's to the rest.

        Chunks beyond a lower cap stay until `trim` evicts them. With a first quota, or without one, chunks change their
        account, and policies learn anew what they know about the chunks that they get. Raises BadRequest, or Busy if
        more than quotas.MOST_MOVED chunks would have to change their account, or have their age noted,
        and then changes nothing.
        """
        set_quota(self.accounts, self.namespaces, (tenant, tag), quota)

    # -- the whole index

    def adopt(self, namespaces: list[Namespace], serial: int) -> None:
        """Take over namespaces with their chunks, sealed and linked, that recovery.py read from the records.

        The index must be empty, and their extents already occupied. serial: the highest serial of their shards.
        """
        self.namespaces.adopt(namespaces)
        self._serial = self._uses = serial
        found = [chunk for namespace in namespaces for chunk in namespace.chunks.values()]
        self.chunks = len(found)
        for chunk in found:
            chunk.account.charge(chunk.bytes)
            chunk.account.chunks += 1
            if chunk.state is _WHOLE and chunk.parent is not None and chunk.position:
                self._chains.wait(chunk, chunk.parent)
            self.accounts.ages.record(chunk)
        queue(found)

    def figures(self) -> MemoryFigures:
        """The counts of memory for a status."""
        return MemoryFigures(
            capacity_bytes=self.allocator.capacity,
            used_bytes=self.allocator.capacity - self.allocator.free_bytes,
            chunks=self.chunks,
            reserved_shards=self.reserved,
            holds=self.held,
            evicted_chunks=self.evicted,
            record_slots=self.records.capacity,
            record_slots_used=self.records.used,
            unrecorded_shards=self.unrecorded,
            holds_s=self.lifetimes.holds_s(),
        )

    def validate(self) -> None:
        """Raise AssertionError unless every count, link and state agrees; O(n), for tests and `kvdepot check`."""
        totals = Totals(self.chunks, self.reserved, self.held, self._chains.broken)
        check(self.namespaces.all(), self.allocator, self.accounts, totals)


def _is_only_written(chunk: Chunk) -> bool:
    """Whether only reservations of its shards hold it, so nobody reads the other shards' bytes."""
    return chunk.holds == sum(shard.is_open for shard in chunk.shards.values())


def _is_free_to_write(chunk: Chunk) -> bool:
    """Whether a corrupt shard of it can be rewritten.

    If the chunk is pending removal, an earlier reservation must not become part of the renewed chunk.
    """
    return not chunk.holds if chunk.state is _PENDING_REMOVAL else _is_only_written(chunk)
