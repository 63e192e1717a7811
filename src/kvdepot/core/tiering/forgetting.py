"""Removes chunks from tiers: all of a model or salt (`Forgettings`), and single dropped chunks (`Erasures`).

Invariants: a tier gets a Forget once its saves that were in progress have ended. Until all tiers have answered, no
chunk that is being forgotten is loaded (`is_under_way`). Each tier has one Erase in progress at a time, so that a long
prompt does not keep saves waiting. If a tier fails or its circuit breaker is open, its objects stay, and are
counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from kvdepot.core.index.chunk import Namespace
from kvdepot.core.tiering.tier import TierState, facts_of
from kvdepot.errors import KVDepotError
from kvdepot.protocol.model_names import key_of_model
from kvdepot.tiers.format import model_prefix, tenant_prefix
from kvdepot.tiers.stamps import space_of
from kvdepot.tiers.worker import Erase, Erased, ForgetSpaces, Forgotten, Save

MOST_FORGETTINGS = 16
"""The most forgettings in progress."""
FORGET_S = 25.0
"""Seconds after which a Forget is answered even if a tier has not; clients wait longer."""
_SHOWN = 100
"""Most characters of a name in an answer."""
_MOST_NAMES = 64
"""The most objects that one Erase removes."""
_MOST_QUEUED = 1 << 20
"""The most objects that wait to be erased from one tier; further ones stay in the tier."""


@dataclass(frozen=True, slots=True)
class NotForgotten:
    """The outcome of a tier that failed: it may still have all objects that it should have forgotten."""

    reason: str


@dataclass(slots=True, eq=False)
class Forgetting:
    """One forgetting, from the request until memory and all tiers are done; no chunk that it covers is loaded.

    `model` is a prefix of model names, but tiers store objects by whole names. They get `model` itself and all names
    with this prefix that are known here; a model that only a tier knows may stay, and `trouble` then says so.
    """

    tenant: str | None  # None: all tenants
    model: str  # a prefix of model names; empty: any
    known: Collection[str]  # the names with this prefix that are known here
    salt: bytes | None  # None: any
    writer: str = ""  # empty: any
    chunks: int | None = None  # chunks removed from memory; None: the removal there has not ended
    objects: dict[str, int | NotForgotten] = field(default_factory=dict)  # by tier name: number of objects removed
    deadline: float = inf  # when it is answered even if a tier has not
    owing: set[int] = field(default_factory=set)  # tiers that have not answered
    saves: dict[int, set[Save]] = field(default_factory=dict)  # by tier: saves that it waits for
    ended: bool = False  # answered, or about to be

    def covers(self, namespace: Namespace, salt: bytes) -> bool:
        is_named = self.tenant in (None, namespace.tenant) and namespace.model.startswith(self.model)
        return is_named and self.salt in (None, salt)

    def is_whole_name(self) -> bool:
        """Whether `model` is known to be a whole name, because memory or a tier had objects under exactly this name."""
        there = any(isinstance(count, int) and count > 0 for count in (self.chunks, *self.objects.values()))
        return not self.model or self.model in self.known or (there and not self.known)

    def trouble(self) -> str:
        """Why chunks may remain that no tier has reported; empty: none remain."""
        if self.chunks is None:
            return f"the removal from memory has not ended within {FORGET_S:g} s; what is left there is not served"
        if self.owing:
            return f"not all tiers have answered within {FORGET_S:g} s"
        if not self.objects or self.is_whole_name():
            return ""
        return (
            f"tiers store models by whole names: they were given the {len(self.known)} names starting with "
            f"{self.model[:_SHOWN]!r} that this server knows, but may hold others; name those in full, or forget all"
        )

    def tier_task(self, tier: TierState) -> TierForget:
        if self.writer:
            names = sorted({self.model, *self.known} - {""})
            return TierForget(
                tier.number, "", [], [space_of(self.tenant or "", name, self.writer) for name in names], self
            )
        namespaces = {"" if self.tenant is None else tenant_prefix(self.tenant)}
        if self.model:
            namespaces = {model_prefix(self.tenant or "", key_of_model(name)) for name in (self.model, *self.known)}
        salt = "" if self.salt is None else self.salt.hex()
        return TierForget(tier.number, salt, sorted(namespaces), [], self)


@dataclass(slots=True, eq=False)
class TierForget(ForgetSpaces):
    forgetting: Forgetting


class Forgettings:
    def __init__(self, tiers: Sequence[TierState]) -> None:
        self._tiers = tiers
        self._under_way: dict[Forgetting, None] = {}  # in the order in which they began

    def __len__(self) -> int:
        return len(self._under_way)

    def is_under_way(self, namespace: Namespace, salt: bytes) -> bool:
        return any(forgetting.covers(namespace, salt) for forgetting in self._under_way)

    def begin(self, forgetting: Forgetting, now: float) -> list[ForgetSpaces]:
        """Begin to forget in each tier, at once or after the tier's saves in progress; shards that are being loaded are
        dropped when they arrive. The caller removes the chunks from memory and then calls `memory_ended`. The
        forgetting is returned once as a decision: when tiers and memory are done, or at its deadline."""
        forgetting.deadline = now + FORGET_S
        forgetting.owing = {tier.number for tier in self._tiers}
        forgetting.objects = {tier.name: 0 for tier in self._tiers}
        forgetting.saves = {tier.number: set(tier.saving) for tier in self._tiers}
        self._under_way[forgetting] = None
        return [forgetting.tier_task(tier) for tier in self._tiers if not tier.saving]

    def save_ended(self, save: Save) -> list[ForgetSpaces]:
        """Begin the forgettings in a save's tier that waited for this save alone."""
        waiting = [forgetting for forgetting in self._under_way if save in forgetting.saves[save.tier]]
        for forgetting in waiting:
            forgetting.saves[save.tier].discard(save)
        tier = self._tiers[save.tier]
        return [forgetting.tier_task(tier) for forgetting in waiting if not forgetting.saves[save.tier]]

    def tier_ended(self, task: TierForget, outcome: Forgotten | KVDepotError) -> bool:
        """Note a tier's outcome; returns whether the forgetting is to be answered now."""
        objects = outcome.objects if isinstance(outcome, Forgotten) else NotForgotten(str(outcome))
        task.forgetting.objects[self._tiers[task.tier].name] = objects
        task.forgetting.owing.discard(task.tier)
        return self._is_through(task.forgetting)

    def memory_ended(self, forgetting: Forgetting, chunks: int) -> bool:
        """Note the end of the removal from memory; returns whether the forgetting is to be answered now."""
        forgetting.chunks = chunks
        return self._is_through(forgetting)

    def _is_through(self, forgetting: Forgetting) -> bool:
        if forgetting.chunks is None or forgetting.owing:
            return False
        self._under_way.pop(forgetting, None)
        return self.end(forgetting)

    def next_deadline(self) -> float:
        """When `expire` must be called next (the depot's clock, seconds); infinity: never."""
        return min((each.deadline for each in self._under_way if not each.ended), default=inf)

    def expire(self, now: float) -> list[Forgetting]:
        """Mark the forgettings at their deadline as answered, and return them."""
        return [each for each in self._under_way if each.deadline <= now and self.end(each)]

    def end(self, forgetting: Forgetting) -> bool:
        """Mark a forgetting as answered; False: it already was. It continues until all tiers have answered."""
        is_first = not forgetting.ended
        forgetting.ended = True
        return is_first

    def end_all(self) -> list[Forgetting]:
        """Mark all forgettings as answered before shutdown; returns those that were not."""
        return [forgetting for forgetting in self._under_way if self.end(forgetting)]


# -- single chunks


class Unsaved(NamedTuple):
    """One group's part of a chunk, whose shards of all ranks are to leave the tiers."""

    namespace: Namespace
    key: bytes
    salt: bytes


@dataclass(slots=True, eq=False)
class DroppedErase(Erase):
    """An Erase of the objects of dropped chunks. (A plain Erase removes objects that a lookup found corrupt.)"""


class Erasures:
    """The shards of dropped chunks that each tier must still erase. Their objects' names are made when needed."""

    def __init__(self, tiers: Sequence[TierState]) -> None:
        self._tiers = tiers
        self._queues: list[deque[tuple[Unsaved, int]]] = [deque() for _ in tiers]  # by number of the tier, with rank
        self._erasing: set[int] = set()  # tiers with an Erase in progress

    def __bool__(self) -> bool:
        return bool(self._erasing) or any(self._queues)

    def add(self, parts: Iterable[Unsaved]) -> None:
        """Queue the shards of these parts in every tier."""
        for part in parts if self._tiers else ():
            shards = [(part, rank) for rank in sorted(part.namespace.layouts)]
            for tier, queue in zip(self._tiers, self._queues, strict=True):
                if tier.breaker.usable and len(queue) + len(shards) <= _MOST_QUEUED:
                    queue += shards
                else:
                    tier.counters["unreleased_chunks"] += len(shards)

    def dispatch(self) -> list[Erase]:
        """The Erases to begin now, one for each tier that has none in progress."""
        erases: list[Erase] = []
        for tier, queue in zip(self._tiers, self._queues, strict=True):
            if queue and tier.number not in self._erasing:
                taken = [queue.popleft() for _ in range(min(_MOST_NAMES, len(queue)))]
                names = [facts_of(part.namespace, rank).name(part.salt, part.key) for part, rank in taken]
                self._erasing.add(tier.number)
                erases.append(DroppedErase(tier.number, names))
        return erases

    def ended(self, erase: DroppedErase, outcome: Erased | KVDepotError) -> list[Erase]:
        """Handle the end of an Erase; returns the next ones."""
        self._erasing.discard(erase.tier)
        if isinstance(outcome, KVDepotError):
            queue = self._queues[erase.tier]
            self._tiers[erase.tier].counters["unreleased_chunks"] += len(erase.names) + len(queue)
            queue.clear()
        return self.dispatch()
