"""The index: which chunks exist, what holds them, and where their bytes are. No I/O, thread or clock.

Called by core/ on the deciding thread only. Invariants: a visible chunk is sealed on every rank. A chunk that is
pinned, being copied, or has a chunk behind it is not evicted, so pinning the deepest chunk of a match protects the
whole match. A record is erased before its bytes are free. Every mutation appends what happened to `events` (events.py),
which readers get afterwards: none runs in the middle of a mutation. Space is made before chunks are inserted. Chunks
without a known parent are **loose**, position 0. A part of a bounded KV cache group is evicted before the unbounded one
with the same key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from kvdepot.core.index import states
from kvdepot.core.index.accounts import Accounts
from kvdepot.core.index.chains import Chains, link
from kvdepot.core.index.check import check
from kvdepot.core.index.chunk import Account, Chunk, Namespace, Shard, is_evictable, is_forgotten
from kvdepot.core.index.events import Failed, Hidden, IndexEvent, Reason, Removed, Stored, Used
from kvdepot.core.index.namespaces import Namespaces
from kvdepot.core.index.runs import (
    LACKING,
    LATE,
    MISFIT,
    NEW,
    OUTDATED,
    SPOILED,
    Plan,
    Refusal,
    Reservation,
    Run,
    classify,
    needed,
)
from kvdepot.eviction import Policy
from kvdepot.memory.allocator import Allocator
from kvdepot.memory.records import Records
from kvdepot.protocol.keys import HASH_BYTES
from kvdepot.protocol.quotas import Quota

_EVICTED, _DROPPED, _FAILED = Reason.EVICTED, Reason.DROPPED, Reason.FAILED


class Index:
    """All chunks of the depot, in the space of `allocator`."""

    def __init__(
        self,
        allocator: Allocator,
        policy: Callable[[], Policy],
        records: Records | None = None,
        ttl_s: int = 0,
        chunk_tokens: int = 0,
        salt_ttls: Mapping[bytes, int] | None = None,
    ) -> None:
        """policy: makes the policy of each account. records: the table that survives a restart; None: nothing does.
        ttl_s: seconds after which chunks expire; 0: never. salt_ttls: the same for chunks with these salts, if sooner.
        chunk_tokens: tokens per chunk of namespaces that do not say it, such as those that an earlier version
        recorded."""
        self.allocator = allocator
        self.records = records or Records(memoryview(b""))
        self.accounts = Accounts(allocator.capacity, policy, ttl_s, salt_ttls)
        self.wants = self.accounts.wants
        self.namespaces = Namespaces(self.records, chunk_tokens)
        self.unrecorded = 0  # shards sealed since the start for which records had no room
        self.chunks = 0
        self.reserved = 0  # shards
        self.held = 0  # holds on all chunks
        self.evicted = 0
        self.evicted_from: Counter[int] = Counter()  # evicted chunks, by the tiers (bits) that had all their shards
        self.wall = 0  # seconds since 1970 at the last `expire`, once a second
        self.events: list[IndexEvent] = []  # that readers have not got
        self.serial = 0  # shards sealed so far
        self.uses = 0  # of chunks
        self.chains = Chains()

    # -- reserve

    def reserve(self, namespace: Namespace, rank: int, run: Run, wall: int | None) -> Reservation:
        """Reserve this rank's missing shards of a run of chunks; evicts first, to make room.

        wall: when the bytes were computed (seconds since 1970); a store renews existing chunks that were too old. None:
        the bytes come from a tier; a client that has the same bytes may store them meanwhile.
        """
        if namespace.hiding:
            for at in range(0, len(run.hashes), HASH_BYTES):
                if (chunk := namespace.chunks.get(run.hashes[at : at + HASH_BYTES])) is not None:
                    self.remove_forgotten(chunk)
        # There are seven cases of a chunk, which `runs.ChunkCase` names. Making space changes none of them, because
        # chunks that are in the plan are held until it is carried out.
        plan = classify(namespace, rank, run, wall, self.accounts.of(namespace.tenant, run.salt))
        room = min(self.allocator.free_bytes, plan.account.cap - plan.account.used) // plan.taken
        if room >= plan.count or not plan.count:
            return self._take(plan, plan.count)
        self.hold(kept := needed(plan))
        made = self._take(plan, self._make_room(plan))
        self.release(kept)  # which removes those that waited for their last child to go
        if made.refused and made.refusal is None:
            made.refusal = self.accounts.refusal(plan.account, plan.taken)
        return made

    def _make_room(self, plan: Plan) -> int:
        """Evict chunks until an account has space for a plan; returns the number of chunks that have space.

        An account above its cap gets nothing: `trim` evicts the excess in steps, and this would do it in one.
        """
        allocator, account, taken, cap = self.allocator, plan.account, plan.taken, plan.account.cap
        if account.used > cap or taken > cap:
            return 0
        depth = min(plan.run.depth, self.wants.depth_before(plan.namespace, plan.keys))
        while (fits := min(allocator.free_bytes, cap - account.used) // taken) < plan.count:
            if (victim := self.accounts.victim(account, (fits + 1) * taken, depth)) is None:
                break
            self.remove(victim, _EVICTED)
        return min(fits, plan.count)

    def _take(self, plan: Plan, room: int) -> Reservation:
        """Carry out a plan, with space for `room` of its chunks. Cannot fail."""
        namespace, rank, run, wall = plan.namespace, plan.rank, plan.run, plan.wall
        account, taken = plan.account, plan.taken
        extents = self.allocator.allocate_run(run.size, room)
        result, new, fresh, rewritten = Reservation([], []), list[Chunk](), 0, 0  # shards
        parent, position = run.parent, run.position
        for place, (key, chunk, case) in enumerate(plan.steps):
            if case is NEW or case is LACKING or (case is LATE and extents):
                if not extents:
                    result.refused = len(plan.steps) - place
                    break
                if chunk is None:
                    is_behind_last = new and new[-1].key == parent and new[-1].position == position - 1
                    found = (new[-1], position) if is_behind_last else link(namespace, key, parent, position, run.salt)
                    chunk = self._insert(namespace, account, key, run.salt, found)
                    new.append(chunk)
                else:
                    if case is LATE:
                        self._give_up(chunk, rank, wall)
                    chunk.state = states.TRANSITIONS[chunk.state][states.RESERVE]
                chunk.shards[rank] = Shard(extents.pop(), run.size, states.LOADING if wall is None else states.RESERVED)
                chunk.bytes += taken
                chunk.holds += 1
                fresh += 1
            elif case is MISFIT:
                result.refusal, result.refused = Refusal.OTHER_SIZE, len(plan.steps) - place
                break
            elif chunk is not None and case is SPOILED:
                shard = chunk.shards[rank]
                shard.state = states.TRANSITIONS[shard.state][states.LOAD if wall is None else states.RESERVE]
                shard.checksum, shard.tiers, shard.writer = 0, 0, ""
                chunk.holds += 1
                rewritten += 1
                self._renew(chunk, wall)
            else:
                if chunk is not None and case is OUTDATED:
                    self._renew(chunk, wall)
                result.known += 1
                chunk = None
            if chunk is not None:
                result.chunks.append(chunk)
                result.places.append(place)
            if run.parent:
                parent, position = key, position + 1
        self.held += fresh + rewritten
        self.reserved += fresh + rewritten
        namespace.bytes += fresh * taken
        account.used += fresh * taken  # the same as `charge`, without the cost of a call
        account.spare += fresh * taken
        for unused in extents:
            self.allocator.free(unused)
        if new:
            account.policy.insert(new)
        outgrown = namespace.chunks.get(run.continues)
        if outgrown is not None and not result.refused and run.continues not in plan.keys:
            outgrown.account.outgrown.append(outgrown)
        return result

    def _insert(
        self, namespace: Namespace, account: Account, key: bytes, salt: bytes, place: tuple[Chunk | None, int]
    ) -> Chunk:
        """Insert a chunk without shards. place: its parent and position."""
        before, position = place
        chunk = namespace.chunks[key] = Chunk(
            key=key, salt=salt, namespace=namespace, account=account, parent=before, position=position,
            generation=self.namespaces.generation, used_s=self.wall,
        )  # fmt: skip
        if before is not None:
            before.children += 1
        self.chunks += 1
        account.chunks += 1
        return chunk

    def _give_up(self, chunk: Chunk, rank: int, wall: int | None) -> None:
        """Give up the load of a shard; the caller puts another shard in its place. wall: see `Plan`."""
        self.accounts.lend(self._take_out(chunk, rank), chunk.namespace.tenant, chunk.salt)
        chunk.holds -= 1
        self.held -= 1
        self._renew(chunk, wall)

    def give_back(self, shard: Shard) -> None:
        """Free the extents of a shard that was given up, or lent, once nobody writes to them any more."""
        self.allocator.free(shard.extents)
        tenant, salt, taken = self.accounts.given_up.pop(id(shard))
        self.accounts.of(tenant, salt).charge(-taken)

    def _renew(self, chunk: Chunk, wall: int | None) -> None:
        """Note that a chunk is stored again, and keep it if it is pending removal. wall: when its bytes were computed
        again (seconds since 1970); its sealed shards are then recorded and saved in tiers anew, with that age. None:
        the bytes come from a tier and keep their age."""
        chunk.generation = self.namespaces.generation
        if chunk.state is not states.PENDING_REMOVAL:
            return
        chunk.state = states.TRANSITIONS[chunk.state][states.RENEW]
        chunk.born = chunk.born if wall is None else wall
        self.accounts.ages.record(chunk)
        if chunk.sealed == chunk.namespace.world_size:
            chunk.state = states.TRANSITIONS[chunk.state][states.COMPLETE]
            self.chains.join((chunk,))
        for rank, shard in chunk.shards.items() if wall is not None else ():
            if shard.sealed:
                shard.tiers = 0
                self.serial += 1
                self.namespaces.record(chunk, rank, self.serial)
                self.events.append(Stored(chunk, rank))

    # -- the end of a reservation

    def finish(
        self, shards: Sequence[tuple[Chunk, int]], sums: Mapping[int, int], wall: int
    ) -> list[tuple[Chunk, int]]:
        """Seal the shards (chunk, rank) whose places have checksums in `sums`; discard the others. Returns the sealed
        ones."""
        sealed = []
        for place, shard in enumerate(shards):
            chunk = shard[0]
            is_hidden = chunk.state is states.PENDING_REMOVAL or (chunk.namespace.hiding and is_forgotten(chunk))
            if place in sums and not is_hidden:
                self._seal(*shard, sums[place], wall)
                sealed.append(shard)
            else:
                self.discard(*shard)
        chunks = [chunk for chunk, _ in sealed]
        self.chains.join(chunks)
        self.release(chunks)
        return sealed

    def seal(self, chunk: Chunk, rank: int, checksum: int = 0, born: int = 0) -> None:
        """Make a reserved shard visible, record it, and release its hold. born: when the shard was computed, in seconds
        since 1970; a chunk is as old as its oldest shard."""
        self._seal(chunk, rank, checksum, born)
        self.chains.join((chunk,))
        self.release((chunk,))

    def _seal(self, chunk: Chunk, rank: int, checksum: int, born: int) -> None:
        shard = chunk.shards[rank]
        is_last = chunk.sealed + 1 == chunk.namespace.world_size
        after = states.TRANSITIONS[shard.state][states.SEAL]
        chunk.state = states.TRANSITIONS[chunk.state][states.COMPLETE if is_last else states.SEAL]
        shard.state = after
        shard.checksum = checksum
        if not chunk.sealed or born < chunk.born:
            chunk.born = born
            if self.accounts.has_ttls:
                self.accounts.ages.record(chunk)
        self.reserved -= 1
        chunk.sealed += 1
        self.serial += 1
        if self.records.capacity:
            self.namespaces.record(chunk, rank, self.serial)
        if shard.slot is None:
            self.unrecorded += 1
        self.events.append(Stored(chunk, rank))

    def discard(self, chunk: Chunk, rank: int) -> None:
        """Remove a reserved shard that did not arrive and that nobody writes to any more; see `abandon`."""
        self.give_back(self.abandon(chunk, rank))

    def abandon(self, chunk: Chunk, rank: int) -> Shard:
        """Remove a reserved shard that did not arrive, and release its hold; with the last shard, remove the chunk, and
        end all holds on it. Chunks behind it keep a parent that is never chained, so no chain has them. Returns the
        shard: its extents stay allocated until the caller gives it back."""
        assert chunk.shards[rank].is_open, chunk.shards[rank].state
        self.events.append(Failed(chunk))
        shard = self._take_out(chunk, rank)
        self.accounts.lend(shard, chunk.namespace.tenant, chunk.salt)
        if chunk.shards:
            self.release((chunk,))
            return shard
        self.held -= chunk.holds
        chunk.holds = 0
        leased = chunk.parent if chunk.leases else None
        while leased is not None:  # a lease of a chunk behind the gap keeps none of those before it
            leased.leases -= chunk.leases
            leased = leased.parent if leased.position else None
        if (before := self._unlink(chunk, _FAILED)) is not None:
            self.remove(before, _DROPPED)
        return shard

    def _take_out(self, chunk: Chunk, rank: int) -> Shard:
        """Take a reserved shard out of its chunk; its extents stay allocated."""
        shard = chunk.shards.pop(rank)
        shard.state = states.TRANSITIONS[shard.state][states.REMOVE]
        taken = Allocator.rounded(shard.size)
        chunk.bytes -= taken
        chunk.namespace.bytes -= taken
        chunk.account.charge(-taken)
        self.reserved -= 1
        return shard

    # -- holds and uses

    def hold(self, chunks: Sequence[Chunk]) -> None:
        """Protect chunks from eviction until `release` is called as often."""
        for chunk in chunks:
            chunk.holds += 1
        self.held += len(chunks)

    def use(self, chunks: list[Chunk]) -> None:
        """Count a use of chunks, once per request: the prompt's first chunk last, so that its last chunk is evicted
        first."""
        for chunk in reversed(chunks):
            self.uses += 1
            chunk.used = self.uses
            chunk.account.policy.use(chunk)
        if chunks:
            self.events.append(Used(chunks))

    def release(self, chunks: Sequence[Chunk]) -> None:
        """Undo one `hold`."""
        for chunk in chunks:
            if chunk.gone:
                continue  # `abandon` has ended the holds of this chunk
            assert chunk.holds > 0, chunk.key.hex()
            chunk.holds -= 1
            self.held -= 1
            if not chunk.holds and not chunk.children:
                if chunk.state is states.PENDING_REMOVAL:
                    self.remove(chunk, _DROPPED)
                else:
                    chunk.account.policy.add(chunk)

    # -- mark corrupt, hide, remove

    def mark_corrupt(self, chunk: Chunk, rank: int) -> None:
        """Mark a sealed shard whose bytes are wrong or forgotten; nobody uses it until it is stored again."""
        shard = chunk.shards[rank]
        after = states.TRANSITIONS[shard.state][states.SPOIL]
        self.chains.unchain(chunk, states.SPOIL)
        shard.state = after
        chunk.sealed -= 1
        self.namespaces.erase(shard)
        self.namespaces.withdrawals += 1
        self.events.append(Hidden(chunk))

    def hide(self, chunk: Chunk, at_once: bool = True) -> None:
        """Remove a chunk. If it is held or has chunks behind it, hide all of these until it can be removed. at_once:
        not even requests that hold the chunk get it any more. Only a later reservation of its key renews it."""
        if is_evictable(chunk):
            self.remove(chunk, _DROPPED)
            return
        self.chains.unchain(chunk, states.HIDE)
        if chunk.sealed:
            self.namespaces.withdrawals += 1
            self.events.append(Hidden(chunk))
        for rank, shard in chunk.shards.items() if at_once else ():
            if shard.state is states.SEALED:
                self.mark_corrupt(chunk, rank)

    def remove(self, chunk: Chunk, reason: Reason) -> None:
        """Remove an evictable chunk (`is_evictable`), and the chunks before it whose removal waited for that."""
        assert is_evictable(chunk), chunk.key.hex()
        account = chunk.account
        if reason is _EVICTED:
            if chunk.namespace.hiding and self.remove_forgotten(chunk):
                return
            self.evicted += 1
            account.evicted += 1
            tiers = -1
            for shard in chunk.shards.values():
                tiers &= shard.tiers
            self.evicted_from[tiers] += 1
        last: Chunk | None = chunk
        while last is not None:
            for shard in last.shards.values():
                shard.state = states.TRANSITIONS[shard.state][states.REMOVE]
                self.namespaces.erase(shard)  # before others can overwrite its extents
                self.allocator.free(shard.extents)
            last.shards.clear()
            last.namespace.bytes -= last.bytes
            account.charge(-last.bytes)
            last.bytes = 0
            last = self._unlink(last, reason)
            reason = _DROPPED  # the chunks before it were pending removal, and have none behind them any more

    def _unlink(self, chunk: Chunk, reason: Reason) -> Chunk | None:
        """Take a chunk without shards out of its namespace and chain; returns its parent if that must be removed
        too."""
        chunk.state = states.TRANSITIONS[chunk.state][states.REMOVE]
        chunk.gone = True
        before, account = chunk.parent, chunk.account
        if chunk.wants:
            self.wants.lost(chunk, before)
        del chunk.namespace.chunks[chunk.key]
        if not chunk.namespace.chunks:
            self.namespaces.emptied[chunk.namespace] = None
        self.chunks -= 1
        account.chunks -= 1
        account.policy.remove(chunk, reason is _EVICTED)
        chunk.parent = None
        self.events.append(Removed(chunk, before, reason))
        pending = None
        if before is not None:
            before.children -= 1
            if is_evictable(before):
                if before.state is states.PENDING_REMOVAL:
                    pending = before
                else:
                    account.policy.add(before)
        if self.chains.waiting or chunk.broken or (before is not None and before.broken):
            self.chains.leave(chunk, before)
        return pending

    def remove_forgotten(self, chunk: Chunk) -> bool:
        """Remove a chunk on behalf of the removal that hides it; False if none does."""
        scope = next((scope for scope in chunk.namespace.hiding if scope.means(chunk)), None)
        if scope is None:
            return False
        scope.removed += chunk.sealed > 0
        self.hide(chunk)
        return True

    # -- the whole index

    def set_quota(self, tenant: str, quota: Quota | None, tag: bytes = b"") -> None:
        """Set the quota of a tenant, or of its cache salt (tag: keys.salt_tag); None: remove it. See accounts.py."""
        self.accounts.set_quota(self.namespaces.all(), (tenant, tag), quota)

    def validate(self) -> None:
        """Raise AssertionError unless every count, link and state agrees; O(n), for tests and `kvdepot check`."""
        check(self.namespaces.all(), self.allocator, self.accounts, (self.chunks, self.reserved, self.held))
        self.namespaces.writers.check(self.namespaces.all())
