"""The tiers of a depot: begins and continues tier lookups, saves and forgettings. No I/O, threads or clock here.

Called by core/depot.py, transfers.py, sessions.py and forgetting.py on the deciding thread. Tier tasks go to the tiers'
threads, and their outcomes come back with their tokens. What other files must continue is returned among the tier
tasks (`Decision`), to be handled in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from kvdepot.core.index.accounts import Account
from kvdepot.core.index.chunk import Chunk, Namespace
from kvdepot.core.index.index import Index
from kvdepot.core.tiering.deadlines import Deadlines, HalfTime, Overdue
from kvdepot.core.tiering.erasing import DropToken, Erasures, Unsaved
from kvdepot.core.tiering.forgetting import FORGET_S, Forgetting, Forgettings, ForgetToken
from kvdepot.core.tiering.lookup import Arrived, EraseToken, FindToken, LoadToken, LookupDecision, Lookups, TierLookup
from kvdepot.core.tiering.saving import Saves, SaveToken
from kvdepot.core.tiering.tier import EnforceToken, ProbeToken, TierState, Token
from kvdepot.errors import KVDepotError
from kvdepot.protocol import wire
from kvdepot.protocol.quotas import Quota
from kvdepot.protocol.status import TierStatus
from kvdepot.tiers import TierConfig, Usage
from kvdepot.tiers.rules import Rules, owner_prefix
from kvdepot.tiers.worker import (
    Enforced,
    Erase,
    Erased,
    Forget,
    Forgotten,
    Loaded,
    Located,
    Save,
    Saved,
    TierOutcome,
    TierTask,
    Unwanted,
)

__all__ = ["Decision", "Tiering"]

Decision: TypeAlias = LookupDecision | Forgetting
"""A tier task, a tier lookup or forgetting whose reply is due, or an `Arrived` for `keep_nearer`."""


class Tiering:
    """All tiers of one depot, nearest first."""

    def __init__(self, configs: Sequence[TierConfig], index: Index, lookup_s: float) -> None:
        self._tiers = [TierState(number, config) for number, config in enumerate(configs)]
        self._lookup_s = lookup_s
        self._forgettings = Forgettings(self._tiers)
        self._lookups = Lookups(self._tiers, index, self._forgettings)
        self._saves = Saves(self._tiers, index)
        self._erasures = Erasures(self._tiers)
        self._deadlines = Deadlines()
        self._index = index
        self._rules = Rules()
        self.set_rules()

    def __repr__(self) -> str:
        return f"<Tiering {len(self._tiers)} tiers, {self._lookups}, {self._saves}, {self._forgettings}>"

    def __bool__(self) -> bool:
        return bool(self._tiers)

    # -- time

    def next_deadline(self) -> float:
        """When `expire` must be called next."""
        return self._deadlines.next()

    def expire(self, now: float) -> list[Decision]:
        """Handle the earliest deadline. Its decisions must be carried out before the next call."""
        deadline = self._deadlines.pop()
        if isinstance(deadline, HalfTime):
            return [*self._lookups.half_time(deadline.of)]
        if isinstance(deadline.of, TierLookup):
            return self._overdue(deadline.of, now)
        return [deadline.of] if self._forgettings.end(deadline.of) else []

    def _overdue(self, tier_lookup: TierLookup, now: float) -> list[Decision]:
        if tier_lookup.ended:
            return []
        for tier in self._lookups.awaited(tier_lookup):
            if self._lookups.note_late(tier_lookup, tier):
                self._failed(tier, now, "does not answer")
        self._lookups.end(tier_lookup)
        return [tier_lookup]

    def tick(self, now: float) -> list[TierTask]:
        """Called once a second: starts probes that are due, notes failures of late ones, and has rules enforced."""
        tier_tasks: list[TierTask] = []
        for tier in self._tiers:
            if (enforce := tier.enforce(now, self._rules)) is not None:
                tier_tasks.append(enforce)
            if (probe := tier.probe(now)) is not None:
                tier_tasks.append(probe)
            elif tier.time_out_probe(now):
                self._failed(tier, now, "does not answer", is_probe=True)
        return tier_tasks

    # -- quotas

    @property
    def names(self) -> list[str]:
        """Of all tiers, nearest first."""
        return [tier.config.name for tier in self._tiers]

    def set_rules(self) -> None:
        """Quotas have changed; local tiers are told at the next tick."""
        accounts = self._index.accounts
        quotas = {(each.tenant, each.salt): each.quota for each in accounts.all() if each is not accounts.rest}
        self._rules = Rules.of(quotas, accounts.salt_ttls, accounts.ttl_s)

    def fault(self, tenant: str, salt: bytes, quota: Quota) -> str:
        """Why local tiers cannot give a tenant or a salt (as chunks are stored under) this quota beside the others';
        empty if they can, or are not open."""
        local = [tier for tier in self._tiers if tier.config.is_local]
        if quota.is_on_disk and not local:
            return "a quota on disk needs a tier disk://"
        rules = Rules(self._rules.quotas | {owner_prefix(tenant, salt): quota})
        for tier in local:
            capacity = tier.usage.capacity_bytes if tier.usage is not None else None
            if capacity is not None and (fault := rules.fault(capacity)):
                return f"tier {tier.config.name}: {fault}"
        return ""

    def bytes_of(self, account: Account) -> int | None:
        """Bytes of a tenant or salt with a quota in local tiers, as of their last probes; None if there is no such
        tier."""
        local = [tier.usage for tier in self._tiers if tier.config.is_local]
        owner = owner_prefix(account.tenant, account.salt)
        return sum(usage.owners.get(owner, 0) for usage in local if usage is not None) if local else None

    # -- lookups

    def look_up(
        self, namespace: Namespace, request: wire.Lookup, salt: bytes, first: int, held: list[Chunk], now: float
    ) -> tuple[TierLookup, list[TierTask]] | None:
        """Begin a tier lookup for the chunks of a lookup from `first` on; None if tiers cannot help.

        held: chunks of the prefix in memory; held, as are the loaded ones, until `release`. If the tier lookup has not
        ended on return, it is returned once as a decision when it ends, unless `end` is called first.
        """
        tier_lookup = self._lookups.begin(namespace, request, salt, first, held, now)
        if tier_lookup is None:
            return None
        self._deadlines.add(now + self._lookup_s / 2, HalfTime(tier_lookup))
        self._deadlines.add(now + self._lookup_s, Overdue(tier_lookup))
        return tier_lookup, self._lookups.ask(tier_lookup)

    def end(self, tier_lookup: TierLookup) -> None:
        """End a tier lookup early; the caller replies with what is in memory by now."""
        self._lookups.end(tier_lookup)

    def release(self, tier_lookup: TierLookup) -> None:
        """Release what an ended tier lookup holds; called after its reply."""
        self._lookups.release(tier_lookup)

    def replaced(self, chunk: Chunk, rank: int) -> None:
        """Note that a store has taken over a shard that was being loaded from a tier."""
        self._lookups.replaced(chunk, rank)

    @property
    def tier_lookups(self) -> int:
        """Number of tier lookups in progress."""
        return len(self._lookups)

    # -- writing

    def stored(self, shards: Iterable[tuple[Chunk, int]]) -> list[Save]:
        """Save shards (chunk, rank) that were just sealed in tiers with `write=through`."""
        return self._saves.stored(shards)

    def keep_nearer(self, arrived: Arrived) -> list[Save]:
        """Save shards that were loaded from a tier in all nearer tiers with `write=through`, and make room for more."""
        saves = self._saves.keep_nearer(arrived)
        return saves + self._saves.make_room(arrived.shards[0][0].account) if arrived.shards else saves

    def make_room(self, by: Account | None = None) -> list[Save]:
        """For tiers with `on_evict`: save the next victims before their space is needed. by: see `Saves.make_room`."""
        return self._saves.make_room(by)

    # -- forgetting

    @property
    def forgettings(self) -> int:
        """Number of forgettings in progress."""
        return len(self._forgettings)

    def forget(self, forgetting: Forgetting, now: float) -> list[Forget]:
        """Begin to forget in the tiers; returned once as a decision when tiers and memory are done, or at its deadline.

        Loads in progress are dropped when they arrive; a tier is told once its saves in progress have ended. The caller
        removes from memory, and then calls `forgotten_here`.
        """
        self._deadlines.add(now + FORGET_S, Overdue(forgetting))
        return self._forgettings.begin(forgetting)

    def forgotten_here(self, forgetting: Forgetting, chunks: int) -> bool:
        """Note that the removal from memory has ended; returns whether the forgetting is to be answered now."""
        return self._forgettings.memory_ended(forgetting, chunks)

    def stop(self) -> list[Forgetting]:
        """Before shutdown: returns the forgettings that are still to be answered."""
        return self._forgettings.end_all()

    # -- dropping

    def saves_of(self, chunk: Chunk) -> int:
        """How many saves and demotions in progress hold a chunk."""
        return self._saves.holds_of(chunk)

    def erase(self, parts: Iterable[Unsaved]) -> None:
        """Queue parts of chunks that were dropped, to be erased from every tier."""
        self._erasures.add(parts)

    def erase_some(self) -> list[Erase]:
        """Begin to erase what is queued; the rest follows by itself."""
        return self._erasures.dispatch()

    # -- outcomes

    def finished(self, token: Token, outcome: TierOutcome, now: float) -> list[Decision]:
        """Handle the outcome of a tier task."""
        tier = token.tier
        if isinstance(outcome, KVDepotError):
            tier.counters["failures"] += 1
            if isinstance(token, ProbeToken):
                self._failed(tier, now, str(outcome), is_probe=True)
            elif tier.call_failed(now, str(outcome), token.kind):
                self._saves.drop_queue(tier)
        elif not isinstance(outcome, Unwanted):
            tier.succeeded(now, token.kind)
        match token, outcome:
            case FindToken(), Located() | Unwanted() | KVDepotError():
                return [*self._lookups.located(token, outcome)]
            case LoadToken(), Loaded() | KVDepotError():
                return [*self._lookups.arrived(token, outcome)]
            case SaveToken(), Saved() | KVDepotError():
                self._saves.saved(token, outcome)
                return [*self._forgettings.save_ended(tier, token.number), *self._saves.dispatch(tier)]
            case ForgetToken(), Forgotten() | KVDepotError():
                return [token.forgetting] if self._forgettings.told(token, outcome) else []
            case ProbeToken(), Usage() | KVDepotError():
                tier.probed(outcome)
                return []
            case EnforceToken(), Enforced() | KVDepotError():
                tier.told(token, outcome, now)
                return []
            case DropToken(), Erased() | KVDepotError():
                return [*self._erasures.ended(token, outcome)]
            case EraseToken(), Erased() | KVDepotError():
                return []
        raise AssertionError(f"a tier task of {type(token).__name__} ended with {outcome!r}")

    def _failed(self, tier: TierState, now: float, why: str, is_probe: bool = False) -> None:
        if tier.failed(now, why, is_probe):
            self._saves.drop_queue(tier)

    # -- status

    @property
    def busy(self) -> bool:
        """Whether anything is being saved, loaded, forgotten or erased."""
        is_saving = any(tier.saving or tier.queue for tier in self._tiers)
        return bool(self._lookups.arriving_bytes or self._forgettings or self._erasures or is_saving)

    def status(self, now: float) -> list[TierStatus]:
        """The status of each tier."""
        return [tier.status(now, self._saves.undemoted(tier)) for tier in self._tiers]
