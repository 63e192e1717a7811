"""The tiers of a depot: begins and continues tier searches, saves and forgettings. No I/O, threads or clock here.

Called by core/ on the deciding thread. Tier tasks go to the tiers' threads, and come back with their outcomes. Tier
searches and forgettings that the caller must answer are among the returned tier tasks (`Decision`), in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from kvdepot.core.index.chunk import Account
from kvdepot.core.index.events import IndexEvent, Stored
from kvdepot.core.index.index import Index
from kvdepot.core.tiering.forgetting import DroppedErase, Erasures, Forgetting, Forgettings, TierForget
from kvdepot.core.tiering.loading import ArrivalLoad, LoadDecision, Loads, SearchFind, TierSearch
from kvdepot.core.tiering.saving import QueuedSave, Saves
from kvdepot.core.tiering.tier import TierState
from kvdepot.errors import KVDepotError
from kvdepot.protocol.quotas import Quota
from kvdepot.protocol.status import TierStatus
from kvdepot.tiers import TierConfig, TierUsage
from kvdepot.tiers.rules import NO_RULES, Rules, owner_prefix
from kvdepot.tiers.worker import (
    Enforce,
    Enforced,
    Erase,
    Erased,
    Forgotten,
    Loaded,
    Located,
    Probe,
    Save,
    TierOutcome,
    TierTask,
    Unwanted,
    Written,
)

Decision: TypeAlias = LoadDecision | Forgetting
"""A tier task, or a tier search or forgetting whose reply is due."""


class Tiering:
    """All tiers of one depot, nearest first."""

    def __init__(self, configs: Sequence[TierConfig], index: Index) -> None:
        self._tiers = [TierState(number, config) for number, config in enumerate(configs)]
        self._local = [tier for tier in self._tiers if tier.config.is_local]
        self.forgettings = Forgettings(self._tiers)
        self.loads = Loads(self._tiers, index, self.forgettings)
        self.saves = Saves(self._tiers, index)
        self.erasures = Erasures(self._tiers)
        self._accounts = index.accounts
        self._rules = NO_RULES
        self.set_rules()

    @property
    def is_searchable(self) -> bool:
        return any(tier.is_searchable for tier in self._tiers)

    # -- time

    def too_late(self, tier_search: TierSearch, now: float) -> None:
        """Count a failure of each tier that has answered nothing since this tier search, now at its deadline, began."""
        for tier in self.loads.late_tiers(tier_search, now):
            self._failed(tier, now, "does not answer")

    def tick(self, now: float) -> list[TierTask]:
        """Called once a second: starts probes that are due, notes tiers with late probes, and has rules enforced."""
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
        return [tier.name for tier in self._tiers]

    def set_rules(self) -> None:
        """Take over changed quotas; local tiers follow them from the next tick on."""
        accounts = self._accounts
        quotas = {(each.tenant, each.salt): each.quota for each in accounts.all() if each is not accounts.rest}
        self._rules = Rules.of(quotas, accounts.salt_ttls, accounts.ttl_s)

    def fault(self, tenant: str, salt: bytes, quota: Quota) -> str:
        """Why local tiers cannot give a tenant, or a salt that chunks are stored under, this quota beside the existing
        quotas; empty: they can, or are not open."""
        if quota.is_on_disk and not self._local:
            return "a quota on disk needs a tier disk://"
        rules = Rules(self._rules.quotas | {owner_prefix(tenant, salt): quota})
        for tier in self._local:
            if (capacity := tier.usage.capacity_bytes) is not None and (fault := rules.fault(capacity)):
                return f"tier {tier.name}: {fault}"
        return ""

    def bytes_of(self, account: Account) -> int | None:
        """Bytes of a tenant or salt with a quota in local tiers, as of their last probes; None: no tier is local."""
        owner = owner_prefix(account.tenant, account.salt)
        return sum(tier.usage.owners.get(owner, 0) for tier in self._local) if self._local else None

    # -- writing

    def save(self, events: Sequence[IndexEvent]) -> Sequence[Save]:
        """Save shards that were just sealed in tiers with `write=through`, and make room for more."""
        shards = [(event.chunk, event.rank) for event in events if type(event) is Stored]
        return [*self.saves.stored(shards), *self.saves.make_room(shards[0][0].account)] if shards else ()

    # -- outcomes

    def finished(self, task: TierTask, outcome: TierOutcome, now: float) -> list[Decision]:
        tier = self._tiers[task.tier]
        if isinstance(outcome, KVDepotError):
            tier.counters["failures"] += 1
            if isinstance(task, Probe):
                self._failed(tier, now, str(outcome), is_probe=True)
            elif tier.call_failed(now, str(outcome), task.kind):
                self.saves.drop_queue(tier)
        elif not isinstance(outcome, Unwanted):
            tier.succeeded(now, task.kind)
        match task, outcome:
            case SearchFind(), Located() | Unwanted() | KVDepotError():
                return [*self.loads.located(task, outcome, now)]
            case ArrivalLoad(), Loaded() | KVDepotError():
                return [*self.loads.arrived(task, outcome, now)]
            case QueuedSave(), Written() | KVDepotError():
                self.saves.saved(task, outcome)
                return [*self.forgettings.save_ended(task), *self.saves.dispatch(tier)]
            case TierForget(), Forgotten() | KVDepotError():
                return [task.forgetting] if self.forgettings.tier_ended(task, outcome) else []
            case Probe(), TierUsage() | KVDepotError():
                tier.probed(outcome)
                return []
            case Enforce(), Enforced() | KVDepotError():
                tier.rules_enforced(task.rules, outcome, now)
                return []
            case DroppedErase(), Erased() | KVDepotError():
                return [*self.erasures.ended(task, outcome)]
            case Erase(), Erased() | KVDepotError():
                return []
        raise AssertionError(f"a tier task {type(task).__name__} ended with {outcome!r}")

    def _failed(self, tier: TierState, now: float, why: str, is_probe: bool = False) -> None:
        if tier.failed(now, why, is_probe):
            self.saves.drop_queue(tier)

    # -- status

    @property
    def busy(self) -> bool:
        is_saving = any(tier.saving or tier.queue for tier in self._tiers)
        return bool(self.loads.arriving_bytes or self.forgettings or self.erasures or is_saving)

    def status(self, now: float) -> list[TierStatus]:
        return [tier.status(now, self.saves.undemoted(tier)) for tier in self._tiers]
