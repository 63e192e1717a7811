"""The status of a server: the schema that command line, HTTP, page and metrics read. Plain data.

Made as the answer to `wire.GetStatus` by core/depot.py, of which each part fills in its fields; clients decode it with
`read`. Sizes in bytes, times in seconds, counters since the server's start.
Invariant: names here do not change; new fields have a default.
"""

from __future__ import annotations

import msgspec

from kvdepot.errors import ProtocolError
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
"""The name under which `usage`, `model_usage` and `other_namespaces` have the sum of those that they do not list."""
MOST_NAME = 256
"""Maximum length of a model name in `namespaces`; longer names are cut."""


class TokenCounts(msgspec.Struct, frozen=True):
    """Prompt tokens since the start. They only increase, so those of several servers can be added up.

    asked: in prompts that engines looked up. found: of those, in the depot. Both without what engines have in their own
    caches, if they report that (wire.Lookup.reports). reused: that engines loaded instead of computing them.
    """

    asked: int = 0
    found: int = 0
    reused: int = 0


class AnswersStatus(msgspec.Struct, frozen=True):
    """Whether a model's answers (decoded tokens) are stored, as one of its engines said last. mode: the engine's
    `kvdepot.save_decode`. share: of decoded chunks, those that later prompts continued with lately; None if the engine
    does not learn it, or has not judged enough requests."""

    mode: str
    stored: bool
    share: float | None = None


class Usage(msgspec.Struct, frozen=True):
    """Prompt tokens since the start, as in `TokenCounts`, of one tenant, or of one model of a tenant.

    compared_shards, differing_shards: compared with what engines computed, and those of them that differ.
    model: empty: all of the tenant's. `OTHERS` as tenant and model: those that were first seen when there was no room
    for more, and models that nothing is stored for. Who has an entry keeps it, so that no number ever falls.
    """

    tenant: str
    asked_tokens: int = 0
    found_tokens: int = 0
    reused_tokens: int = 0
    model: str = ""
    answers: AnswersStatus | None = None
    compared_shards: int = 0
    differing_shards: int = 0


class Histogram(msgspec.Struct, frozen=True):
    """Counts of values by range, since the start.

    unit: of the values and of `sum`, their sum. bounds: upper bounds of the buckets, inclusive, increasing. counts: of
    each bucket alone; one more than bounds, for values above the last.
    """

    name: str
    unit: str
    bounds: list[float]
    counts: list[int]
    sum: float = 0.0


class Saved(msgspec.Struct, frozen=True):
    """What engines did not have to compute: tokens that they loaded on all ranks, and the prefill time of these tokens.

    prefill_s: at each engine's own measured speed; tokens of engines that report no speed count as no time.
    """

    tokens: int = 0
    prefill_s: float = 0.0


class Engine(msgspec.Struct, frozen=True):
    """One client that looks up or has registered tensors: an engine's scheduler, or one of its workers.

    since_s, idle_s: seconds since it connected, and since its last message. queued: stores and retrieves in progress.
    engine: the engine's name, as events have it; the same for all its processes. host, pid: of the process, as it sees
    them itself: in a container, the container's. fault: why this worker neither stores nor loads, such as a self-test
    that failed; empty if it does.
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
    """One KV cache group of a model. reach: chunks before a boundary that resuming there needs of it; 0: all."""

    reach: int
    chunks: int
    bytes: int


class NamespaceStatus(msgspec.Struct, frozen=True):
    """Chunks of one model, parallel shape and layout, whose bytes are interchangeable.

    chunk_tokens: tokens per chunk. chunks: of the KV cache group that has most of them. groups: all of them.
    asked_tokens, found_tokens, reused_tokens: of all lookups of this tenant and model, see `TokenCounts`. Of several
    namespaces of one model the largest has them and the others have 0, so that they can be added up.
    """

    tenant: str
    model: str
    world_size: int
    blocks_in_chunk: int
    chunks: int
    bytes: int
    engines: int
    lookup_chunks: int = 0
    hit_chunks: int = 0
    chunk_tokens: int = 0
    groups: list[GroupStatus] = []
    asked_tokens: int = 0
    found_tokens: int = 0
    reused_tokens: int = 0
    answers: AnswersStatus | None = None


class TenantStatus(msgspec.Struct, frozen=True):
    """What one tenant or cache salt with a quota has. tenant: empty for all clients whose tenant has no quota, or that
    have none. salt: which salt of the tenant (quotas.shown_tag); empty: those that have no quota.

    used_bytes: what the arena holds for it, including what is being stored or loaded. cap_bytes, ttl_s: 0: none of its
    own. evicted_chunks: of its chunks, for stores of any tenant. capped_chunks: shards not stored because of its cap.
    disk_bytes: in local tiers, as of their last probe; None: there is no such tier, or it has no quota.
    """

    tenant: str
    used_bytes: int
    chunks: int
    floor_bytes: int
    cap_bytes: int
    weight: float
    ttl_s: int
    evicted_chunks: int
    capped_chunks: int
    disk_bytes: int | None = None
    disk_floor_bytes: int = 0
    disk_cap_bytes: int = 0
    salt: str = ""

    @property
    def quota(self) -> Quota:
        memory = self.floor_bytes, self.cap_bytes
        return Quota(*memory, self.weight, self.ttl_s, self.disk_floor_bytes, self.disk_cap_bytes)


class TierStatus(msgspec.Struct, frozen=True):
    """Storage behind memory. objects, bytes, capacity_bytes: None if the tier has not reported them. free_bytes: of its
    file system; None if it has none or has not reported it.

    state: `up`, `circuit breaker open`, or which calls fail while others succeed, such as `reads fail`.
    error: the last error, empty if there was none; error_s: seconds since then.
    saves, loads: calls in progress, each of which moves up to 16 shards.
    histograms: of such calls `load_seconds`, `save_seconds`, `load_bytes_per_second` and `save_bytes_per_second`, with
    compression and checksums, without the wait for a thread.
    """

    name: str
    write: str
    state: str
    objects: int | None
    bytes: int | None
    capacity_bytes: int | None
    queued_bytes: int
    saves: int
    counters: dict[str, int]
    error: str = ""
    error_s: float | None = None
    loads: int = 0
    histograms: list[Histogram] = []
    free_bytes: int | None = None


class Loss(msgspec.Struct, frozen=True):
    """A counter of evictions, failures or refusals: where, what happened, how often, and the counter's name."""

    where: str
    what: str
    count: int
    counter: str


class Mismatch(msgspec.Struct):
    """A comparison of an engine's KV with stored chunks that has shown a difference.

    engine: that computed it. writer: the engine that had stored the chunk, or why it is not known. facts: `name: value
    of the first | value of the second`, of those in which they differ. chunk: the hash of the chunk that differs most,
    by `worst`; `chunks` differ by more than `limit`. parts: the difference of each part of that chunk, in the order of
    its bytes, at most 1,024; None if its data type is not known. A part: what a tensor, its keys or values alone, or
    tensors that are adjacent in memory have of a block. is_sample: whether it put the model into quarantine.
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

    tenants: those with a quota, also salts, and the others together; empty while there is no quota.

    chunk_size_tokens: of engines that do not choose their own. chunks: a chunk of a model with several KV cache groups
    counts once for each group that has it. cached_tokens: of prompts in memory; of each model, the tokens of the group
    that has most chunks.

    http: HOST:PORT where this server itself serves HTTP; empty if it does not.
    http_failure: why it does not although it should, with what to do; empty if it does, or need not.
    unreachable: why no new client can connect although the server works; empty if they can.
    divided_engines: whose scheduler and workers name different models. faulty_engines: of which a worker has a `fault`.
    kv_event_topics: distinct topics that engines name for their KV events.
    tokens: of all lookups; usage: the same by tenant, model_usage: by tenant and model; each of them adds up to it.
    other_namespaces: the sum of those that `namespaces` does not list; None if it lists all.
    histograms: `hit_tokens` (tokens that a lookup found, if any), `eviction_age_seconds` and `eviction_idle_seconds`
    (of evicted chunks, since they were computed and since they were last used), `reuse_after_seconds` (since a chunk's
    last use, when it is used again), `saved_seconds` (prefill time that a request saved, if any).
    Those of evictions sample one in sixteen. holds_s: how long unused chunks stayed in memory, the median of the last
    4,096 evictions; None if nothing was evicted since the start.
    mismatches: the latest first. quarantined: models whose chunks are misses, because a sampled hit differed.
    settings: by name, as text, without secrets (config.reported); empty for clients with a tenant.
    host: name of the server's host.
    wall_s: seconds since 1970 at the last tick, whole ones; use uptime_s for the time between two statuses.
    """

    version: str = ""
    boot: str = ""
    pid: int = 0
    wall_s: float = 0.0
    uptime_s: float = 0.0
    http: str = ""
    http_failure: str = ""
    unreachable: str = ""
    chunk_size_tokens: int
    capacity_bytes: int
    used_bytes: int
    chunks: int
    reserved_shards: int
    holds: int
    evicted_chunks: int
    record_slots: int
    record_slots_used: int
    unrecorded_shards: int
    operations: int
    clients: int
    sessions: int
    instances: int
    namespace_count: int = 0
    engine_count: int = 0
    divided_engines: int = 0
    faulty_engines: int = 0
    kv_event_topics: int = 0
    lease_count: int = 0
    leased_bytes: int = 0
    waiting_bytes: int = 0
    stored_bytes: int = 0
    retrieved_bytes: int = 0
    cached_tokens: int = 0
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
    holds_s: float | None = None
    mismatches: list[Mismatch] = []
    quarantined: list[str] = []


def read(value: object) -> Status:
    """A server's answer to `wire.GetStatus`; fields added by newer servers are ignored. Raises ProtocolError."""
    try:
        return msgspec.convert(value, Status)
    except msgspec.ValidationError as exc:
        raise ProtocolError(f"not a status of this version: {exc}") from exc
