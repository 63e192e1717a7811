"""The status of a server: the schema that command line, HTTP, page and metrics read. Plain data.

core/depot.py makes it as the answer to a request, and each part of the core fills in its fields; clients decode it with
`read`. Sizes are in bytes, times in seconds, and counters begin with the server. The annotation of a field says whether
it is a metric (protocol/figures.py). Invariant: names here do not change; new fields have a default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec.structs import replace

from kvdepot.errors import ProtocolError
from kvdepot.protocol.figures import counter, gauge, line
from kvdepot.protocol.metrics import Event, Latency
from kvdepot.protocol.quotas import Quota

__all__ = [
    "MOST_NAME",
    "OTHERS",
    "AnswersStatus",
    "Engine",
    "GroupStatus",
    "Histogram",
    "Loss",
    "Mismatch",
    "NamespaceStatus",
    "Saved",
    "Status",
    "TenantStatus",
    "TierStatus",
    "TokenCounts",
    "Usage",
    "read",
]

OTHERS = "others"
"""The name of the entries that sum the tenants and models which `usage`, `model_usage` and `namespaces` do not list."""
MOST_NAME = 256
"""Maximum length of a model name in `namespaces`; longer names are cut."""
COMPARED = "Shards compared with what an engine computed, because it had just started or by `--verify-hits`."
DIFFERING = "Compared shards that differ from what an engine computed."
_ASKED = counter("Tokens of prompts that engines looked up and did not have in their own caches.", "asked_tokens")
_FOUND = counter("Of the tokens asked for, those in the depot.", "found_tokens")
_REUSED = counter("Tokens that engines loaded instead of computing them.", "reused_tokens")


class TokenCounts(msgspec.Struct, frozen=True):
    """Prompt tokens since the start. They only increase, so those of several servers can be added up.

    asked, found: without what engines have in their own caches, if they report that (`reports` of a lookup).
    """

    asked: Annotated[int, _ASKED] = 0
    found: Annotated[int, _FOUND] = 0
    reused: Annotated[int, _REUSED] = 0


class AnswersStatus(msgspec.Struct, frozen=True):
    """Whether a model's answers (decoded tokens) are stored, as one of its engines reported last. mode: the engine's
    `kvdepot.save_decode`. share: the share of decoded chunks that later prompts used lately; None: the engine does not
    measure it, or has not judged enough requests."""

    mode: str
    stored: bool
    share: float | None = None


class Usage(msgspec.Struct):
    """Prompt tokens since the start, as in `TokenCounts`, of one tenant, or of one model of a tenant.

    model: empty: all models of the tenant. `OTHERS` as tenant and model: tenants and models that were first seen when
    there was no room for more, and models without stored chunks. An entry is kept until the server ends, so that no
    number ever falls.
    """

    tenant: str
    asked_tokens: Annotated[int, _ASKED] = 0
    found_tokens: Annotated[int, _FOUND] = 0
    reused_tokens: Annotated[int, _REUSED] = 0
    model: str = ""
    answers: AnswersStatus | None = None
    compared_shards: Annotated[int, counter(COMPARED)] = 0
    differing_shards: Annotated[int, counter(DIFFERING)] = 0


class Histogram(msgspec.Struct, frozen=True):
    """Counts of values by range, since the start. name: one of DISTRIBUTIONS, or of TIER_DISTRIBUTIONS.

    unit: the unit of the values and of `sum`, their sum. bounds: upper bounds of the buckets, inclusive, increasing.
    counts: the number of values in each bucket alone; one more bucket has the values above the last bound.
    """

    name: str
    unit: str
    bounds: list[float]
    counts: list[int]
    sum: float = 0.0


DISTRIBUTIONS = {
    "hit_tokens": "Tokens that a lookup found, if any.",
    "eviction_age_seconds": "Age of evicted chunks: time since they were computed. One eviction in 16 is counted.",
    "eviction_idle_seconds": "Idle time of evicted chunks: since they were last used. One eviction in 16 is counted.",
    "reuse_after_seconds": "Time from one use of a prompt's last chunk to the next.",
    "saved_seconds": "Prefill time that a request saved, if any.",
}
"""Meanings of the server's histograms, by name."""
TIER_DISTRIBUTIONS = {
    "load_seconds": "Duration of a call that loads up to 16 shards from a tier.",
    "save_seconds": "Duration of a call that saves up to 16 shards in a tier.",
    "load_bytes_per_second": "Throughput of a call that loads from a tier.",
    "save_bytes_per_second": "Throughput of a call that saves in a tier.",
}
"""Meanings of each tier's histograms, by name: with compression and checksums, without the wait for a thread."""


class Saved(msgspec.Struct, frozen=True):
    """Tokens that engines loaded on all ranks instead of computing them, and the prefill time of these tokens.

    prefill_s: seconds at each engine's own measured speed; tokens of engines that report no speed count as 0 s.
    """

    tokens: int = 0
    prefill_s: Annotated[float, counter("Prefill time that engines saved.", "saved_prefill_seconds")] = 0.0


class Engine(msgspec.Struct, frozen=True):
    """One client that looks up or has registered tensors: an engine's scheduler, or one of its workers.

    since_s, idle_s: seconds since it connected, and since its last message. queued: stores and retrieves in progress.
    engine: the engine's name, as in events; all its processes have the same. host, pid: the process's own view of its
    host and id; in a container, those of the container. fault: why this worker neither stores nor loads, such as a
    failed self-test; empty: it does.
    """

    id: str
    since_s: float
    idle_s: float
    models: list[str]
    ranks: list[int]
    tenant: str
    sessions: int
    pinned_chunks: int
    queued: int
    engine: str = ""
    host: str = ""
    pid: int = 0
    fault: str = ""


class GroupStatus(msgspec.Struct, frozen=True):
    """One KV cache group of a model. reach: its chunks before a boundary that resuming there needs; 0: all."""

    reach: int
    chunks: int
    bytes: int


class NamespaceStatus(msgspec.Struct, frozen=True):
    """Chunks of one model, parallel shape and layout, whose bytes are interchangeable.

    chunk_tokens: tokens per chunk. chunks: the number in the KV cache group with the most chunks. groups: all KV cache
    groups. asked_tokens, found_tokens, reused_tokens: tokens of all lookups of this tenant and model, see
    `TokenCounts`. If a model has several namespaces, the largest has these tokens and the others have 0, so that
    entries can be added up.
    """

    tenant: str
    model: str
    world_size: int
    blocks_in_chunk: int
    chunks: Annotated[int, gauge("Chunks in memory of a tenant, model and shape.")]
    bytes: Annotated[int, gauge("Bytes in memory of a tenant, model and shape.")]
    engines: Annotated[
        int, gauge("Connected workers of a tenant, model and shape: one per rank of each engine.", "workers")
    ]
    lookup_chunks: int = 0
    hit_chunks: int = 0
    chunk_tokens: int = 0
    groups: list[GroupStatus] = []
    asked_tokens: int = 0
    found_tokens: int = 0
    reused_tokens: int = 0
    answers: AnswersStatus | None = None


def added_up(parts: Sequence[NamespaceStatus], **facts: Any) -> NamespaceStatus:
    """The first of these namespaces with the sums of all, and with these facts in place of its own."""
    numbers = ("chunks", "bytes", "engines", "lookup_chunks", "hit_chunks", "asked_tokens", "found_tokens")
    sums = {name: sum(getattr(each, name) for each in parts) for name in (*numbers, "reused_tokens")}
    return replace(parts[0], **sums, **facts)


class TenantStatus(msgspec.Struct, frozen=True):
    """The memory of one tenant or cache salt with a quota. tenant: empty: all tenants without a quota, and clients
    without a tenant. salt: the name of a salt of the tenant (quotas.shown_tag); empty: all its salts without a quota.

    used_bytes: its bytes of the arena, also those being stored or loaded. evicted_chunks: evicted for stores of any
    tenant. disk_bytes: its bytes in local tiers; None: there is no local tier, or it has no quota.
    """

    tenant: str
    used_bytes: Annotated[int, gauge("Memory of a tenant.")]
    chunks: int
    quota: Quota
    evicted_chunks: Annotated[int, counter("Chunks of a tenant evicted from memory.")]
    capped_chunks: Annotated[int, counter("Shards not stored because of a tenant's cap.", "capped_shards")]
    disk_bytes: Annotated[int | None, gauge("Bytes of a tenant in tiers disk://, as of their last probes.")] = None
    salt: str = ""


class TierStatus(msgspec.Struct, frozen=True):
    """Storage behind memory. objects, bytes, capacity_bytes, free_bytes: None if the tier has not reported them, or has
    no file system.

    state: `up`, `circuit breaker open`, or the calls that fail while others succeed, such as `reads fail`. error: the
    last error, empty if there was none; error_s: seconds since then.
    """

    name: str
    write: str
    state: str
    objects: Annotated[int | None, gauge("Objects in a tier.")]
    bytes: Annotated[int | None, gauge("Bytes in a tier.")]
    capacity_bytes: Annotated[int | None, gauge("Capacity of a tier.")]
    queued_bytes: Annotated[int, gauge("Bytes waiting to be saved.")]
    saves: Annotated[int, gauge("Calls in progress that save up to 16 shards each.")]
    counters: dict[str, int]
    error: str = ""
    error_s: float | None = None
    loads: Annotated[int, gauge("Calls in progress that load up to 16 shards each.")] = 0
    histograms: list[Histogram] = []
    free_bytes: Annotated[int | None, gauge("Bytes that a tier's file system has free.")] = None


class Loss(msgspec.Struct, frozen=True):
    """A counter of evictions, failures or refusals: its group, what happened, how often, and the counter's name."""

    where: str
    what: str
    count: int
    counter: str


class Mismatch(msgspec.Struct):
    """A comparison of an engine's KV with stored chunks that has shown a difference.

    engine: the engine that computed the KV. writer: the engine that had stored the chunk, or why it is not known.
    facts: the facts in which these engines differ, each as `name: value of engine | value of writer`. chunk: the hash
    of the chunk with the largest difference, `worst`; `chunks` chunks differ by more than `limit`. parts: the
    difference of each part of this chunk, in the order of its bytes, at most 1,024; None: unknown data type. A part is
    the bytes in a block of a tensor, of its keys or values alone, or of tensors that are adjacent in memory. is_sample:
    whether the mismatch put the model into quarantine.
    """

    wall_s: float
    engine: str
    writer: str
    facts: list[str]
    tenant: str = ""
    model: str = ""
    chunk: str = ""
    rank: int = 0
    chunks: int = 0
    worst: float = 0.0
    limit: float = 0.0
    is_sample: bool = False
    parts: list[float | None] = []


class Status(msgspec.Struct, kw_only=True):
    """The current state of one server. namespaces and engines are limited; their counts cover all.

    tenants: tenants and salts with a quota, and an entry for all others; empty while there is no quota.
    chunk_size_tokens: the chunk size of engines that do not choose their own. chunks: a chunk of a model with several
    KV cache groups counts once for each group that has it. cached_tokens: the sum, over models, of the tokens of the
    group with the most chunks.

    http: HOST:PORT where this server itself serves HTTP; empty if it does not.
    http_failure: why it does not serve HTTP although it should, with advice; empty if it does, or need not.
    unreachable: why no new client can connect although the server works; empty if they can.
    kv_event_topics: the number of topics that engines name for their KV events.
    tokens: the tokens of all lookups; usage: the same by tenant, model_usage: by tenant and model, with equal sums.
    other_namespaces: the sum of the namespaces that `namespaces` does not list; None: it lists all.
    holds_s: the median idle time of evicted chunks, over the last 4,096 evictions; None: nothing was evicted yet.
    mismatches: the latest first. quarantined: models whose chunks are misses, because a sampled hit differed.
    settings: by name, as text, without secrets (config.reported); empty for clients with a tenant.
    host: the name of the server's host.
    wall_s: whole seconds since 1970 at the last tick; use uptime_s for the time between two statuses.
    """

    version: str = ""
    boot: str = ""
    pid: int = 0
    wall_s: float = 0.0
    uptime_s: Annotated[float, gauge("Time since the server started serving.")] = 0.0
    http: str = ""
    http_failure: str = ""
    unreachable: str = ""
    chunk_size_tokens: int
    capacity_bytes: Annotated[int, gauge("Size of the arena.", "memory_capacity_bytes")]
    used_bytes: Annotated[int, line("Bytes of the arena that hold chunks.", "memory_used_bytes")]
    chunks: Annotated[int, gauge("Chunks in memory, counted in each KV cache group.")]
    reserved_shards: Annotated[int, gauge("Shards being stored or loaded.")]
    holds: Annotated[
        int, gauge("Pins of requests, leases and copies in progress; each keeps a chunk and those before it.", "pins")
    ]
    evicted_chunks: int
    record_slots: Annotated[int, gauge("Slots for records of shards in the arena.")]
    record_slots_used: Annotated[int, gauge("Record slots in use.")]
    unrecorded_shards: Annotated[int, gauge("Shards without a record, which do not survive a restart.")]
    operations: Annotated[int, gauge("Stores and retrieves in progress.")]
    clients: Annotated[
        int, gauge("Connected clients: processes of engines, this web process, and commands while they run.")
    ]
    sessions: Annotated[int, gauge("Requests that hold pins.")]
    instances: Annotated[int, gauge("Registrations of KV tensors.")]
    namespace_count: Annotated[int, gauge("Distinct models, shapes and layouts.", "namespaces")] = 0
    engine_count: Annotated[
        int, gauge("Connected processes of engines: schedulers and workers.", "engine_processes")
    ] = 0
    divided_engines: Annotated[
        int, gauge("Engines whose scheduler and workers disagree on the identity of their KV.")
    ] = 0
    faulty_engines: Annotated[int, gauge("Engines with a worker that can neither store nor load KV.")] = 0
    kv_event_topics: int = 0
    lease_count: Annotated[int, gauge("Leases.", "leases")] = 0
    leased_bytes: Annotated[int, gauge("Bytes held by leases.")] = 0
    waiting_bytes: Annotated[int, gauge("Bytes pinned for requests that wait in engines' queues.")] = 0
    stored_bytes: Annotated[int, counter("Bytes stored.")] = 0
    retrieved_bytes: Annotated[int, counter("Bytes retrieved.")] = 0
    cached_tokens: Annotated[int, gauge("Tokens of prompts in memory.")] = 0
    saved: Saved = Saved()
    latencies: list[Latency] = []
    namespaces: list[NamespaceStatus] = []
    engines: list[Engine] = []
    tenants: list[TenantStatus] = []
    tiers: list[TierStatus] = []
    counters: dict[str, int] = {}
    events: list[Event] = []
    settings: dict[str, str] = {}
    host: str = ""
    tokens: TokenCounts = TokenCounts()
    usage: list[Usage] = []
    model_usage: list[Usage] = []
    other_namespaces: NamespaceStatus | None = None
    histograms: list[Histogram] = []
    holds_s: Annotated[float | None, gauge("Median idle time of recently evicted chunks.", "memory_holds_seconds")] = (
        None
    )
    mismatches: list[Mismatch] = []
    quarantined: list[str] = []


class Family(NamedTuple):
    """Metrics of the rows of one kind. prefix: of the metrics' names. labels: the fields of their values, by name."""

    prefix: str
    rows: type[msgspec.Struct]
    labels: dict[str, str]


def _by(*fields: str) -> dict[str, str]:
    return {field: field for field in fields}


FAMILIES = (
    Family("", Status, {}),
    Family("namespace_", NamespaceStatus, _by("tenant", "model", "world_size", "blocks_in_chunk")),
    Family("model_", Usage, _by("tenant", "model")),
    Family("tenant_", Usage, _by("tenant")),
    Family("tenant_", TenantStatus, _by("tenant", "salt")),
    Family("tier_", TierStatus, {"tier": "name"}),
)
"""Everything in a status that is a metric, except counters (protocol/counters.py), latencies and histograms."""


def read(value: object) -> Status:
    """A server's answer to `wire.GetStatus`; fields added by newer servers are ignored. Raises ProtocolError."""
    try:
        return msgspec.convert(value, Status)
    except msgspec.ValidationError as exc:
        raise ProtocolError(f"not a status of this version: {exc}") from exc
