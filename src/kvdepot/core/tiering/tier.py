"""The state of a tier on the deciding thread: circuit breakers, queue, counters, probes, rules and status.

Shared by the files of this folder; a field of `TierState` that another file changes names that file.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from kvdepot.core.histograms import RATES, Buckets
from kvdepot.core.index.chunk import Account, Chunk, Namespace, Shard
from kvdepot.core.tiering.speed import TierSpeed
from kvdepot.errors import KVDepotError
from kvdepot.protocol.metrics import BOUNDS_S
from kvdepot.protocol.model_names import key_of_model
from kvdepot.protocol.quotas import shortest
from kvdepot.protocol.status import TierStatus
from kvdepot.tiers import TierConfig, TierUsage
from kvdepot.tiers.breaker import Breaker
from kvdepot.tiers.format import ShardFacts
from kvdepot.tiers.rules import NO_RULES, Rules
from kvdepot.tiers.worker import LOOKUPS, READS, REMOVALS, WRITES, Enforce, Enforced, Part, Probe, Save

log = logging.getLogger(__name__)

TASK_BYTES = 8 << 20
"""Approximate size of a load or save, so that several threads share the work of one lookup."""
_MOST_ERROR = 300
"""The most characters of a tier's error in log and status."""
_PROBE_EVERY_S = 10.0
_PROBE_S = 5.0
"""Seconds after which a tier that has not answered a probe counts as failed."""
_NO_USAGE = TierUsage()
_ENFORCE_EVERY_S = 10.0
"""Seconds between two removals of expired objects in a local tier."""


@dataclass(slots=True, eq=False)
class Demotion:
    """A chunk that is evicted once tiers have saved it.

    account: it counts the chunk as leaving. by: the account that needs the space; None: no particular one.
    """

    chunk: Chunk
    bytes: int
    used: int
    account: Account
    by: Account | None
    saves: int = 0


class Queued(NamedTuple):
    """A shard that is to be saved. Its chunk is held only by its demotion, if there is one."""

    chunk: Chunk
    rank: int
    demotion: Demotion | None


class CallTimes:
    """Durations and rates of one kind of call; each call of up to MOST_PARTS shards adds one value."""

    __slots__ = ("rates", "seconds")

    def __init__(self, kind: str) -> None:
        self.seconds = Buckets(f"{kind}_seconds", "s", BOUNDS_S)
        self.rates = Buckets(f"{kind}_bytes_per_second", "bytes/s", RATES)

    def record(self, size: int, took_s: float) -> None:
        """Count a call that has moved `size` bytes of KV."""
        self.seconds.count(took_s)
        if size and took_s:
            self.rates.count(size / took_s)


@dataclass(slots=True, eq=False)
class TierState:
    number: int
    config: TierConfig
    breaker: Breaker = field(default_factory=Breaker)
    breakers: dict[str, Breaker] = field(  # by kind of call
        default_factory=lambda: {kind: Breaker() for kind in (LOOKUPS, READS, WRITES, REMOVALS)}
    )
    counters: Counter[str] = field(default_factory=Counter)
    finding: int = 0  # Finds in progress; changed by loading.py
    loading: int = 0  # Loads in progress; changed by loading.py
    load_times: CallTimes = field(default_factory=lambda: CallTimes("load"))
    speed: TierSpeed = field(default_factory=TierSpeed)  # as lookups measure it; changed by loading.py
    queue: deque[Queued] = field(default_factory=deque)  # shards to be saved; saving.py changes it and the next two
    queued_bytes: int = 0
    saving: set[Save] = field(default_factory=set)  # Saves in progress
    save_times: CallTimes = field(default_factory=lambda: CallTimes("save"))
    usage: TierUsage = _NO_USAGE  # as of the last probe
    error: str = ""  # the last error
    failed_at: float = 0.0
    probing: float | None = None  # when the probe in progress began
    probe_after: float = 0.0
    enforced: Rules = NO_RULES  # the last rules that a local tier has followed
    enforcing: bool = False  # an Enforce is in progress
    enforce_after: float = 0.0

    @property
    def bit(self) -> int:
        """The tier's bit in `Shard.tiers`."""
        return 1 << self.number

    @property
    def name(self) -> str:
        return self.config.name

    # -- circuit breakers and probes

    @property
    def is_searchable(self) -> bool:
        return self.breaker.usable and self.breakers[LOOKUPS].usable and self.breakers[READS].usable

    @property
    def is_writable(self) -> bool:
        return self.breaker.usable and self.breakers[WRITES].usable

    def succeeded(self, now: float, kind: str = "") -> None:
        """Note an answer; may close the circuit breakers. kind: the kind of the call; empty: a probe."""
        if self.breaker.succeeded(now):
            for breaker in self.breakers.values():
                breaker.forgive()  # their calls failed because the tier did
            log.info("tier %s recovered", self.name, extra={"tier": self.name})
        if kind and self.breakers[kind].succeeded(now):
            log.info("tier %s: %s succeed again", self.name, kind, extra={"tier": self.name})

    def call_failed(self, now: float, why: str, kind: str) -> bool:
        """Note a call that failed; returns whether this opens the circuit breaker of the tier or of its writes.

        Further failures of a kind that is known to fail tell nothing about the tier; its probes do.
        """
        breaker, why = self.breakers[kind], why[:_MOST_ERROR]
        is_known, was_usable = breaker.is_failing, breaker.usable
        begins = breaker.failed(now, why)
        opens = False
        if is_known:
            self.error, self.failed_at = why, now
        else:
            opens = self.failed(now, why)
        if begins and self.breaker.usable:
            log.warning(
                "tier %s: %s fail while other calls succeed, retrying with backoff; check what its user may do: %s",
                self.name, kind, why, extra={"tier": self.name},
            )  # fmt: skip
        return opens or (kind == WRITES and was_usable and not breaker.usable)

    def failed(self, now: float, why: str, is_probe: bool = False) -> bool:
        """Note a failure or a missed deadline; returns whether this opens the circuit breaker."""
        self.error, self.failed_at = why[:_MOST_ERROR], now
        opens = self.breaker.failed(now, self.error, is_probe)
        if opens:
            self.counters["breaker_openings"] += 1
            message = "tier %s: circuit breaker open, retrying with backoff: %s"
            log.warning(message, self.name, self.error, extra={"tier": self.name})
        return opens

    def probe(self, now: float) -> Probe | None:
        """Start a probe if one is due: at regular intervals, or when the open circuit breaker allows it."""
        for breaker in self.breakers.values():
            breaker.tick(now)
        if self.probing is not None or now < (self.probe_after if self.breaker.usable else self.breaker.retry_at):
            return None
        self.probing, self.probe_after = now, now + _PROBE_EVERY_S
        return Probe(self.number)

    def time_out_probe(self, now: float) -> bool:
        """Whether the probe has missed its deadline; the probe then gets the same time again."""
        if self.probing is None or now - self.probing <= _PROBE_S:
            return False
        self.probing = now
        return True

    def probed(self, outcome: TierUsage | KVDepotError) -> None:
        self.probing = None
        if isinstance(outcome, TierUsage):
            self.usage = outcome
            if outcome.objects is None and self.config.is_local:
                self.probe_after = 0.0  # the tier still counts its objects

    # -- rules

    def enforce(self, now: float, rules: Rules) -> Enforce | None:
        """Start to enforce rules if they are new, or if objects may have expired since they were enforced last."""
        own = msgspec.structs.replace(rules, ttl_s=shortest(rules.ttl_s, self.config.options.ttl_s))
        is_due = own != self.enforced or (own != NO_RULES and now >= self.enforce_after)
        if self.enforcing or not (self.config.is_local and self.breaker.usable and is_due):
            return None
        self.enforcing = True
        return Enforce(self.number, own)

    def rules_enforced(self, rules: Rules, outcome: Enforced | KVDepotError, now: float) -> None:
        """Handle the end of an Enforce. After a failure, or if it is behind, the next tick starts another one."""
        self.enforcing = False
        if isinstance(outcome, Enforced):
            self.enforced = rules
            self.enforce_after = now if outcome.is_behind else now + _ENFORCE_EVERY_S

    # -- status

    def status(self, now: float, undemoted: int) -> TierStatus:
        """The tier's status. undemoted: a counter from saving.py."""
        usage = self.usage
        failing = [kind for kind, breaker in self.breakers.items() if breaker.is_failing]
        state, error = "up", self.error
        if not self.breaker.usable:
            state = "circuit breaker open"
        elif failing:
            state, error = f"{' and '.join(failing)} fail", self.breakers[failing[0]].error
        times = (self.load_times, self.save_times)
        counters = {**usage.counters, **self.counters, **({"undemoted_chunks": undemoted} if undemoted else {})}
        return TierStatus(
            name=self.name,
            write=self.config.options.write,
            state=state,
            objects=usage.objects,
            bytes=usage.bytes,
            capacity_bytes=usage.capacity_bytes,
            free_bytes=usage.free_bytes,
            queued_bytes=self.queued_bytes,
            saves=len(self.saving),
            loads=self.loading,
            histograms=[buckets.figure() for each in times for buckets in (each.seconds, each.rates)],
            counters=counters,
            error=error,
            error_s=now - self.failed_at if self.error else None,
        )


def facts_of(namespace: Namespace, rank: int) -> ShardFacts:
    """The facts that name the shards of one rank of a namespace in tiers; created once."""
    known = namespace.facts.get(rank)
    if known is None:
        known = namespace.facts[rank] = ShardFacts(
            namespace.tenant,
            key_of_model(namespace.model),
            namespace.world_size,
            rank,
            namespace.blocks_in_chunk,
            namespace.chunk_tokens,
            namespace.layouts[rank],
        )
    return known


def part_of(chunk: Chunk, rank: int, shard: Shard) -> Part:
    """A shard as a tier loads or saves it."""
    facts = facts_of(chunk.namespace, rank)
    return Part(facts, chunk.salt, chunk.key, shard.extents, shard.size, shard.checksum, chunk.born, shard.writer)
