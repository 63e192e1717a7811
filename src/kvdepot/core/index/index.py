"""Which chunks there are, who pins them, and where their bytes lie. Pure decisions: no I/O, thread or clock.

Called by core/depot.py and the other files of core on the deciding thread only. The one law: what is visible is sealed
on every rank; what is pinned, being copied or needed by a chunk behind it is never evicted.

A chunk belongs to a `Namespace` and has one `Shard` a rank; chunk.py has their states, and the table by which they
change. Five verbs change them: `reserve_missing`, `seal`, `mark_corrupt`, `hide` and `remove`. Queries change nothing.
Each change that a restart must know of is written into `records` where it happens.

**Chains.** In token mode a key's parent is known, so chunks form trees, and a chunk that is `CHAINED` is sealed
together with all its ancestors. Only leaves are evicted, hence:

- the longest prefix is found by binary search over the keys, O(log n) for any prompt length;
- pinning the deepest chunk of a match protects all of it, O(1).

Chunks without a known parent (engine hashes; a parent that was not there) are **loose**, position 0: found one
by one behind the chained part, pinned one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from kvdepot.core.index.ages import Ages
from kvdepot.core.index.chains import Chains
from kvdepot.core.index.check import Totals, check
from kvdepot.core.index.chunk import TRANSITIONS, Chunk, Event, Namespace, Pin, Shard, State, is_evictable
from kvdepot.core.index.namespaces import Namespaces
from kvdepot.core.index.outcomes import Absent, Found, NoRoom, Present, Reason, Replaced, Reservation, Reserved
from kvdepot.core.index.scope import Scope
from kvdepot.eviction import Policy
from kvdepot.memory.allocator import Allocator, Extents
from kvdepot.memory.records import Records
from kvdepot.protocol.keys import HASH_BYTES

__all__ = ["Index"]

# An enum's attributes are slow to get, and these are asked for at each step.
_RESERVED, _LOADING, _SEALED, _CORRUPT = State.RESERVED, State.LOADING, State.SEALED, State.CORRUPT
_WHOLE, _CHAINED, _PENDING_REMOVAL = State.WHOLE, State.CHAINED, State.PENDING_REMOVAL
_RESERVE, _SEAL, _COMPLETE, _REMOVE = Event.RESERVE, Event.SEAL, Event.COMPLETE, Event.REMOVE
_ABSENT, _PRESENT, _NO_ROOM = Absent(), Present(), NoRoom()


class Index:
    """All chunks of the depot, in `allocator`."""

    def __init__(
        self,
        allocator: Allocator,
        policy: Policy,
        records: Records | None = None,
        ttl_s: int = 0,
        watch: Callable[[Chunk, bool], None] | None = None,
    ) -> None:
        """records: what a restart will know; without it, nothing survives. ttl_s: see `expire`; 0 = never.

        watch: told of each chunk that can be had now, or (False) not any more; the latter may come twice.
        """
        self.allocator = allocator
        self.records = records or Records(memoryview(b""))
        self.namespaces = Namespaces(self.records)
        self.unrecorded = 0  # shards sealed since the start that found no room there
        self.chunks = 0
        self.reserved = 0  # shards
        self.held = 0  # holds on all chunks
        self.evicted = 0
        self.evicted_saved: Counter[int] = Counter()  # of those, by the tiers that had all of the chunk: Shard.tiers
        self.generation = 0  # removals that have begun
        self.hiding: list[Scope] = []  # of those under way that hide what they have not come to yet
        self._policy = policy
        self._watch = watch
        self._serial = 0  # shards sealed so far
        self._uses = 0  # of chunks
        self._chains = Chains()
        self._detached_bytes = 0  # of shards that were replaced
        self._ages = Ages(ttl_s)

    def __repr__(self) -> str:
        return f"<Index {self.chunks} chunks, {self.reserved} shards reserved, {self.held} holds, {self.allocator}>"

    # -- queries

    def match(self, namespace: Namespace, hashes: bytes) -> Pin:
        """The longest cached prefix of `hashes` (32 bytes a chunk). Nothing is held yet."""
        chunks = namespace.chunks
        low, high = 0, len(hashes) // HASH_BYTES
        total = high
        deepest: Chunk | None = None
        probe = high  # all hit is the common case: ask for the last first
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
        return Pin(loose if deepest is None else [deepest, *loose], low)

    def _unbroken(self, deepest: Chunk) -> tuple[int, Chunk | None]:
        """How far a chain is whole from its start, and its last chunk that is. O(depth)."""
        found: Chunk | None = deepest
        chunk: Chunk | None = deepest
        while chunk is not None:
            if chunk.state is not _CHAINED or self.is_forgotten(chunk):
                found = chunk.parent
            chunk = chunk.parent
        return (0, None) if found is None else (found.depth, found)

    def find(self, namespace: Namespace, rank: int, hashes: bytes) -> list[Found | Absent]:
        """For each of `hashes` (32 bytes a chunk) this rank's shard, where it may be given out. Nothing is held yet."""
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
        """Whether this rank's shard can be reserved: it is not there, or corrupt and nobody holds its bytes.

        What a removal under way hides is taken for gone: to reserve it begins with that.
        """
        chunk = namespace.chunks.get(key)
        shard = chunk.shards.get(rank) if chunk is not None else None
        if chunk is None or shard is None:
            return True
        if self.is_forgotten(chunk):
            return not shard.is_open and not chunk.holds
        return shard.state is _CORRUPT and _is_free_to_write(chunk)

    def is_there(self, chunk: Chunk) -> bool:
        """Whether a lookup may find it: whole on every rank, and not to be removed."""
        return (chunk.state is _CHAINED or chunk.state is _WHOLE) and not self.is_forgotten(chunk)

    def is_hidden(self, chunk: Chunk) -> bool:
        """Whether it is to be removed: no lookup finds it."""
        return chunk.state is _PENDING_REMOVAL or self.is_forgotten(chunk)

    def is_forgotten(self, chunk: Chunk) -> bool:
        """Whether a removal under way hides it: nobody gets it any more, not even who has it pinned."""
        return bool(self.hiding) and any(scope.means(chunk) for scope in self.hiding)

    # -- holds and uses

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
            if not chunk.holds and not chunk.children and not chunk.gone:
                if chunk.state is _PENDING_REMOVAL:
                    self.remove(chunk, Reason.DROPPED)
                else:
                    self._policy.add(chunk)
        self.held -= len(chunks)

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
        """Reserve this rank's shards of a run of chunks, where they are missing: `size` bytes each, evicting for them.

        hashes: 32 bytes a chunk, each behind the one before. parent, position: hash of the chunk before the first
        (empty = unknown, and then they are all loose) and the first one's number, counted from 1.
        wall: when they were computed anew (seconds since 1970), which makes those present that are too old new again.
        is_load: their bytes come from a tier; whoever comes meanwhile with the bytes at hand may replace them.

        The outcomes are in the order of `hashes`, one each, but that the first NoRoom is the last. What is reserved is
        held until `seal` or `remove`.
        """
        outcomes: list[Reservation] = []
        is_chained = bool(parent)
        for start in range(0, len(hashes), HASH_BYTES):
            key = hashes[start : start + HASH_BYTES]
            chunk = namespace.chunks.get(key)
            if chunk is not None and self.hiding:
                namespace.live += 1  # it may have been the last, and is wanted again
                self.remove_forgotten(chunk)
                namespace.live -= 1
                chunk = namespace.chunks.get(key)
            if chunk is None:
                before = namespace.chunks.get(parent) if position > 1 else None
                is_known = is_chained and (position == 1 or (before is not None and before.position == position - 1))
                chunk = Chunk(
                    key=key,
                    salt=salt,
                    namespace=namespace,
                    parent=before if is_known else None,
                    position=position if is_known else 0,
                    generation=self.generation,
                )
                outcome = self._reserve(chunk, rank, size, is_load)
            elif rank in chunk.shards:
                outcome = self._reserve_again(chunk, rank, size, wall, is_load)
            else:
                chunk.state = TRANSITIONS[chunk.state][_RESERVE]
                outcome = self._reserve(chunk, rank, size, is_load)
            outcomes.append(outcome)
            if outcome is _NO_ROOM:
                break
            if is_chained:
                parent = key
                position += 1
        return outcomes

    def _reserve(self, chunk: Chunk, rank: int, size: int, is_load: bool) -> Reservation:
        """Reserve a shard that is not there. A chunk without any is new: it is in no dict until now."""
        namespace, before = chunk.namespace, chunk.parent
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
            for each in (before, chunk):
                if each is not None and each.shards and is_evictable(each):
                    self._policy.add(each)
            self.namespaces.forget(namespace)
            return _NO_ROOM
        self.held += 1
        self.reserved += 1
        if not chunk.shards:
            namespace.chunks[chunk.key] = chunk
            self.chunks += 1
            if before is not None:
                before.children += 1
            self._policy.insert(chunk)
        chunk.shards[rank] = Shard(extents, size, _LOADING if is_load else _RESERVED)
        taken = self.allocator.rounded(size)
        chunk.bytes += taken
        namespace.bytes += taken
        return Reserved(chunk)

    def _reserve_again(self, chunk: Chunk, rank: int, size: int, wall: int | None, is_load: bool) -> Reservation:
        """Reserve a shard that is there already, if it is corrupt or another is being loaded in its place."""
        shard = chunk.shards[rank]
        if shard.state is _SEALED:
            if chunk.state is _PENDING_REMOVAL and wall is not None:
                self._renew(chunk, wall)
        elif shard.state is _LOADING:
            return self._replace(chunk, rank, is_load)
        elif shard.state is _CORRUPT and (_is_only_written(chunk) if is_load else _is_free_to_write(chunk)):
            if shard.size != size:
                return _NO_ROOM  # its place is not this one's
            shard.state = TRANSITIONS[shard.state][Event.LOAD if is_load else _RESERVE]
            shard.checksum = shard.tiers = 0  # its extents are written anew
            self._is_stored_anew(chunk)
            chunk.holds += 1
            self.held += 1
            self.reserved += 1
            return Reserved(chunk)
        return _PRESENT

    def _replace(self, chunk: Chunk, rank: int, is_load: bool) -> Reservation:
        """Put another shard in the place of one that is being loaded. Its hold is the new one's.

        Not where there is no room for another, or where the chunk is to be removed and has others under way: of those,
        none may end in a chunk that is stored anew.
        """
        old = chunk.shards[rank]
        is_alone = not any(shard.is_open for shard in chunk.shards.values() if shard is not old)
        if chunk.state is _PENDING_REMOVAL and not is_alone:
            return _PRESENT
        extents = self._make_room(old.size)
        if extents is None:
            return _PRESENT
        old.state = TRANSITIONS[old.state][Event.REPLACE]
        chunk.shards[rank] = Shard(extents, old.size, _LOADING if is_load else _RESERVED)
        self._is_stored_anew(chunk)
        self._detached_bytes += self.allocator.rounded(old.size)
        return Replaced(chunk)

    def _is_stored_anew(self, chunk: Chunk) -> None:
        if chunk.state is _PENDING_REMOVAL:
            chunk.state = TRANSITIONS[chunk.state][Event.RENEW]
        chunk.generation = self.generation

    def give_back(self, shard: Shard) -> None:
        """Nothing writes any more to a shard that was replaced."""
        self._free(shard)
        self._detached_bytes -= self.allocator.rounded(shard.size)

    def _renew(self, chunk: Chunk, wall: int) -> None:
        """A chunk that is there was computed again: were it too old, it is new.

        Its bytes stay where they are: who pinned what is behind it holds only that, and may still read them.
        """
        chunk.state = TRANSITIONS[chunk.state][Event.RENEW]
        chunk.born = wall
        self._ages.note(chunk, self.chunks)
        if chunk.sealed == chunk.namespace.world_size:
            chunk.state = TRANSITIONS[chunk.state][_COMPLETE]
            self._is_whole(chunk)

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
            self.remove(victim, Reason.EVICTED)

    def victim(self) -> Chunk | None:
        """The chunk to evict next. It goes now (`remove`), or it is held and comes back when it is released."""
        victim = self._policy.victim(is_evictable)
        assert victim is None or isinstance(victim, Chunk)
        return victim

    # -- seal

    def seal(self, chunk: Chunk, rank: int, checksum: int = 0, born: int = 0) -> None:
        """Make a reserved shard visible and release the hold of its reservation.

        born: when it was computed, seconds since 1970; a chunk is as old as its oldest shard.
        """
        shard = chunk.shards[rank]
        is_last = chunk.sealed + 1 == chunk.namespace.world_size
        after = TRANSITIONS[shard.state][_SEAL]
        chunk.state = TRANSITIONS[chunk.state][_COMPLETE if is_last else _SEAL]
        shard.state = after
        shard.checksum = checksum
        if not chunk.sealed or born < chunk.born:
            chunk.born = born
            if self._ages.ttl_s:
                self._ages.note(chunk, self.chunks)
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
        """A chunk is sealed on every rank now."""
        if self._watch is not None and not self.is_forgotten(chunk):
            self._watch(chunk, True)
        self._chains.join(chunk)

    # -- mark corrupt, hide

    def mark_corrupt(self, chunk: Chunk, rank: int) -> None:
        """A sealed shard's bytes are not what was stored, or forgotten: nobody gets them any more.

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
        """Remove a chunk, or, while it is held or others are behind it, hide it and them and remove it after that.

        at_once: those who hold it get it no more, either. A reservation after that (its key is stored anew) saves it;
        one that is under way is to be removed.
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
        """Remove a chunk that nothing holds and nothing is behind of; or, where it FAILED, one reserved shard of it.

        rank: of that shard; the hold of its reservation goes, and with the last shard the chunk, which nothing else
        may hold then.
        """
        if reason is Reason.FAILED:
            assert rank is not None
            self._remove_shard(chunk, rank)
            return
        assert is_evictable(chunk), chunk.key.hex()
        is_evicted = reason is Reason.EVICTED
        if is_evicted:
            if self.hiding and self.remove_forgotten(chunk):
                return
            self.evicted += 1
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
            last.bytes = 0
            last = self._unlink(last, is_evicted)
            is_evicted = False  # what goes now was pending, and nothing is behind it any more

    def _remove_shard(self, chunk: Chunk, rank: int) -> None:
        shard = chunk.shards[rank]
        assert shard.is_open, shard.state
        self._free(shard)
        del chunk.shards[rank]
        taken = self.allocator.rounded(shard.size)
        chunk.bytes -= taken
        chunk.namespace.bytes -= taken
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
            self.records.erase(shard.slot)  # before anything else can be written there
        self.allocator.free(shard.extents)

    def _unlink(self, chunk: Chunk, is_evicted: bool) -> Chunk | None:
        """Take a chunk without shards out of its namespace and chain; its parent, if that is to go too.

        Children of a reservation that failed stay behind: their parent object is never chained, so
        they are loose from then on.
        """
        chunk.state = TRANSITIONS[chunk.state][_REMOVE]
        chunk.gone = True
        namespace, before = chunk.namespace, chunk.parent
        del namespace.chunks[chunk.key]
        self.chunks -= 1
        if self._watch is not None and chunk.sealed:
            self._watch(chunk, False)
        self._policy.remove(chunk, is_evicted)
        chunk.parent = None
        pending = None
        if before is not None:
            before.children -= 1
            if is_evictable(before):
                if before.state is _PENDING_REMOVAL:
                    pending = before
                else:
                    self._policy.add(before)
        self._chains.leave(chunk, before)
        self.namespaces.forget(namespace)
        return pending

    # -- removals of many, in steps: core/forgetting.py

    def begin_removal(self, namespaces: Iterable[Namespace], salt: bytes | None, hides: bool) -> Scope:
        """What is there now of these namespaces and this salt (None: any). hides: it is nobody's from now on."""
        self.generation += 1
        scope = Scope(self.generation, dict.fromkeys(namespaces), salt, hides)
        if hides:
            self.hiding.append(scope)
        return scope

    def end_removal(self, scope: Scope) -> None:
        """All that it means has gone or is pending removal."""
        if scope.hides:
            self.hiding.remove(scope)
        for namespace in scope.namespaces:
            self.namespaces.forget(namespace)

    def remove_forgotten(self, chunk: Chunk) -> bool:
        """Do at once what the removal that hides a chunk is to do with it; False where none hides it."""
        scope = next((scope for scope in self.hiding if scope.means(chunk)), None)
        if scope is None:
            return False
        scope.removed += chunk.sealed > 0
        self.hide(chunk)
        return True

    def expire(self, wall: int) -> int:
        """Remove what was computed more than `ttl_s` before `wall` (seconds since 1970); how many chunks.

        Those who have such a chunk pinned may have it to the end; nobody else finds it any more.
        """
        expired = 0
        for chunk in self._ages.due(wall):
            if chunk.state is not _PENDING_REMOVAL:
                expired += 1
                self.hide(chunk, at_once=False)
        return expired

    # -- all of it

    def adopt(self, namespaces: list[Namespace], serial: int) -> None:
        """Take in namespaces with their chunks, sealed, linked and dated, that recovery.py read from the records.

        The index must be empty and their extents taken. serial: the last that was given to a shard.
        """
        self.namespaces.adopt(namespaces)
        self._serial = self._uses = serial
        found = [chunk for namespace in namespaces for chunk in namespace.chunks.values()]
        self.chunks = len(found)
        found.sort(key=lambda chunk: chunk.used)  # as they were stored; the policy dates them by its own clock
        for chunk in found:
            self._policy.insert(chunk)
            self._ages.note(chunk, self.chunks)
            if chunk.state is _WHOLE and chunk.parent is not None:
                self._chains.wait(chunk, chunk.parent)
        for chunk in found:
            if not chunk.children:
                self._policy.add(chunk)

    def validate(self) -> None:
        """Raise AssertionError unless every count, link and state agrees; O(n), for tests and `kvdepot check`."""
        totals = Totals(self.chunks, self.reserved, self.held, self._chains.broken, self._detached_bytes)
        check(self.namespaces.all(), self.allocator, totals)


def _is_only_written(chunk: Chunk) -> bool:
    """Whether nobody holds it but reservations of its shards: nobody reads the bytes of the others."""
    return chunk.holds == sum(shard.is_open for shard in chunk.shards.values())


def _is_free_to_write(chunk: Chunk) -> bool:
    """Whether a corrupt shard of it can be written anew.

    Of a chunk that is to be removed, no reservation from before may end in one that is stored anew.
    """
    return not chunk.holds if chunk.state is _PENDING_REMOVAL else _is_only_written(chunk)
