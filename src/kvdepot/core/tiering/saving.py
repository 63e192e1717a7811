"""Saves shards in tiers after their store (`write=through`), or before their eviction (`on_evict`).

Invariant: shards in a tier's queue may be evicted before their turn, because nothing holds them, except those of a
demotion. Shards that are being saved are held.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvdepot.core.index.chunk import Account, Chunk, is_hidden, is_unwanted
from kvdepot.core.index.events import Reason
from kvdepot.core.index.index import Index
from kvdepot.core.tiering.tier import TASK_BYTES, Demotion, Queued, TierState, part_of
from kvdepot.errors import KVDepotError
from kvdepot.tiers.worker import MOST_PARTS, Part, Save, Written


@dataclass(slots=True, eq=False)
class QueuedSave(Save):
    batch: list[Queued]  # one per part


class Saves:
    """The queues of all tiers, and the saves in progress."""

    def __init__(self, tiers: Sequence[TierState], index: Index) -> None:
        self._tiers = tiers
        self._index = index
        self._low_bytes = index.allocator.capacity >> 3  # kept free if a tier has `on_evict`
        self._held: Counter[int] = Counter()  # holds of saves and demotions in progress, by id() of the chunk

    # -- what was stored

    def stored(self, shards: Sequence[tuple[Chunk, int]]) -> list[Save]:
        """Queue shards that were just sealed. A shard that was loaded from a tier is queued for nearer tiers only."""
        saves: list[Save] = []
        through = [tier for tier in self._tiers if tier.config.options.write == "through"]
        for tier in through if shards else ():
            room = tier.config.options.queue_mib << 20
            for chunk, rank in shards:
                shard = chunk.shards.get(rank)
                if shard is None:
                    tier.counters["overtaken_chunks"] += 1  # it was forgotten in the meantime
                elif shard.tiers and tier.bit >= shard.tiers & -shard.tiers:
                    continue
                elif not tier.is_writable:
                    tier.counters["unavailable_chunks"] += 1
                elif tier.queued_bytes and tier.queued_bytes + shard.size > room:
                    tier.counters["dropped_chunks"] += 1
                else:
                    tier.queue.append(Queued(chunk, rank, None))
                    tier.queued_bytes += shard.size
            saves += self.dispatch(tier)
        return saves

    # -- the queue

    def dispatch(self, tier: TierState) -> list[Save]:
        """Start saves of queued shards while the tier has threads for them."""
        saves: list[Save] = []
        while tier.queue and len(tier.saving) < tier.config.options.threads:
            batch, parts = self._next_batch(tier)
            if parts:
                self._hold([queued.chunk for queued in batch])
                saves.append(QueuedSave(tier.number, parts, batch))
                tier.saving.add(saves[-1])
        return saves

    def _next_batch(self, tier: TierState) -> tuple[list[Queued], list[Part]]:
        """Take the next shards that can be saved out of the queue: at most MOST_PARTS of them, and about TASK_BYTES."""
        batch: list[Queued] = []
        parts: list[Part] = []
        taken = 0
        while tier.queue and len(parts) < MOST_PARTS and taken < TASK_BYTES:
            queued = tier.queue.popleft()
            chunk, rank, demotion = queued
            shard = chunk.shards.get(rank)
            tier.queued_bytes -= chunk.namespace.sizes.get(rank, 0) if shard is None else shard.size
            is_leaving = chunk.gone or is_hidden(chunk)
            if is_leaving or shard is None or not shard.sealed or shard.tiers & tier.bit:
                tier.counters["overtaken_chunks"] += 1  # it was evicted, forgotten or saved in the meantime
                self._part_demoted(demotion)
                continue
            parts.append(part_of(chunk, rank, shard))
            batch.append(queued)
            taken += shard.size
        return batch, parts

    def saved(self, save: QueuedSave, outcome: Written | KVDepotError) -> None:
        tier = self._tiers[save.tier]
        tier.saving.discard(save)
        outcomes = outcome.kept if isinstance(outcome, Written) else [False] * len(save.batch)
        if isinstance(outcome, Written):
            size = sum(
                chunk.shards[rank].size for (chunk, rank, _), kept in zip(save.batch, outcomes, strict=True) if kept
            )
            tier.save_times.record(size, outcome.took_s)
        unsaved = "refused_chunks" if isinstance(outcome, Written) else "unavailable_chunks"
        for (chunk, rank, demotion), kept in zip(save.batch, outcomes, strict=True):
            if kept:
                chunk.shards[rank].tiers |= tier.bit
            tier.counters["saved_chunks" if kept else unsaved] += 1
            self._release(chunk)
            self._part_demoted(demotion)

    def _hold(self, chunks: list[Chunk]) -> None:
        self._index.hold(chunks)
        self._held.update(map(id, chunks))

    def _release(self, chunk: Chunk) -> None:
        self._held[id(chunk)] -= 1
        if not self._held[id(chunk)]:
            del self._held[id(chunk)]
        self._index.release([chunk])

    def holds_of(self, chunk: Chunk) -> int:
        """The number of saves and demotions in progress that hold a chunk. All of these end without a request."""
        return self._held.get(id(chunk), 0)

    def drop_queue(self, tier: TierState) -> None:
        """Empty the queue of a tier whose circuit breaker, or that of its writes, has opened."""
        queue, tier.queue = tier.queue, deque()
        tier.queued_bytes = 0
        tier.counters["unavailable_chunks"] += len(queue)
        for queued in queue:
            self._part_demoted(queued.demotion)

    # -- demotion

    def make_room(self, by: Account | None) -> list[Save]:
        """Save the next victims in tiers with `on_evict`, before their space is needed.

        by: the account that has just stored or loaded chunks, and may soon need more; None: no particular one.
        """
        tiers = [tier for tier in self._tiers if tier.config.options.write == "on_evict" and tier.is_writable]
        saves: list[Save] = []
        while tiers and (chunk := self._victim_ahead(by)) is not None:
            missing = [tier for tier in tiers if not all(shard.tiers & tier.bit for shard in chunk.shards.values())]
            if not missing:
                self._index.remove(chunk, Reason.EVICTED)
                continue
            demotion = Demotion(chunk, chunk.bytes, chunk.used, chunk.account, by)
            self._hold([chunk])
            demotion.account.mark_leaving(demotion.bytes)
            for tier in missing:
                for rank, shard in chunk.shards.items():
                    tier.queue.append(Queued(chunk, rank, demotion))
                    tier.queued_bytes += shard.size
                    demotion.saves += 1
            for tier in missing:
                saves += self.dispatch(tier)
        return saves

    def _victim_ahead(self, by: Account | None) -> Chunk | None:
        """The chunk to evict so that an account has room before it asks; None: it has room, or no chunk can be evicted.

        It has room while an eighth of the arena and of its cap are free; chunks that are leaving count as free.
        """
        if by is not None and by.is_nearly_full():
            return by.victim()
        accounts = self._index.accounts
        leaving = sum(each.leaving for each in accounts.all())
        is_short = self._index.allocator.free_bytes + leaving < self._low_bytes
        return accounts.victim(by, 0) if is_short else None

    def _part_demoted(self, demotion: Demotion | None) -> None:
        """Note the end of one save of a demotion; after the last one, the chunk is evicted if space is still short."""
        if demotion is None:
            return
        demotion.saves -= 1
        if not demotion.saves:
            chunk = demotion.chunk
            demotion.account.mark_leaving(-demotion.bytes)
            self._release(chunk)
            if self._is_needed(demotion) and chunk.used == demotion.used and is_unwanted(chunk):
                self._index.remove(chunk, Reason.EVICTED)

    def _is_needed(self, demotion: Demotion) -> bool:
        """Whether space is still short, and the chunk's account may still give it up."""
        account = demotion.chunk.account
        if account is demotion.by and account.is_nearly_full():
            return True
        is_short = self._index.allocator.free_bytes < self._low_bytes
        return is_short and (account is demotion.by or account.spare >= demotion.chunk.bytes)

    def undemoted(self, tier: TierState) -> int:
        """Chunks that were evicted before a tier with `on_evict` had all their shards."""
        if tier.config.options.write != "on_evict":
            return 0
        return sum(count for tiers, count in self._index.evicted_from.items() if not tiers & tier.bit)
