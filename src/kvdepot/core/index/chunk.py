"""Chunks, shards, namespaces and accounts. Plain data, which only core/index/ changes; states.py says how."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import msgspec

from kvdepot.core.index import states
from kvdepot.core.index.states import ChunkState
from kvdepot.eviction import Policy, Victim
from kvdepot.eviction.shares import FairShare
from kvdepot.memory.allocator import Extents
from kvdepot.protocol.keys import tenant_salt
from kvdepot.protocol.quotas import Quota, name_of
from kvdepot.tiers.format import ShardFacts


class Shard(msgspec.Struct, gc=False):
    """One rank's bytes of a chunk."""

    extents: Extents
    size: int  # bytes of KV in the extents
    state: ChunkState = states.RESERVED
    checksum: int = 0  # the checksum of the KV; 0 if none was computed
    tiers: int = 0  # bit t: tier t probably has it
    slot: int | None = None  # first slot of its record; None if it has none
    writer: str = ""
    """The writer (wire.Register) that has stored the shard; empty: not known, as an earlier version stored it."""

    @property
    def sealed(self) -> bool:
        return self.state is states.SEALED

    @property
    def is_open(self) -> bool:
        """Whether the shard's bytes are being written; meanwhile its chunk is held."""
        return self.state is states.RESERVED or self.state is states.LOADING


class Chunk(Victim, gc=False, kw_only=True):
    """One KV cache group's part of a chunk: its shards by rank, and its place in a chain.

    A part of a bounded group has position 0. Its parent is the part of the first unbounded group with the same key, if
    that exists, and is evicted after it. A chunk refers to its parent only, so there are no cycles.
    """

    namespace: Namespace
    account: Account  # the account (of its tenant or its salt) that is charged for this chunk and may evict it
    parent: Chunk | None = None
    salt: bytes = b""  # 16 bytes that identify its prompt's cache salt, for `forget`; empty: none
    run: int = 0
    """The number of consecutive chunks, up to this one, with the same writers after `run_as_of` withdrawals."""
    run_as_of: int = -1
    born: int = 0  # when it was computed, seconds since 1970
    used: int = 0  # running number of its last use; after a restart, of its store
    used_s: int = 0  # time of its last use or store, seconds since 1970; 0: not known. See lifetimes.py.
    generation: int = 0  # number of removals that had begun when it was stored
    state: ChunkState = states.FILLING
    shards: dict[int, Shard] = msgspec.field(default_factory=dict)
    sealed: int = 0  # shards that are sealed
    position: int = 0  # chunks from the prompt's start to the end of this one; 0 if the parent is unknown: it is loose
    children: int = 0  # chunks that name this one as parent
    holds: int = 0  # pins of requests and leases, and copies in progress
    leases: int = 0  # leases that keep it: those that hold it or a chunk behind it
    wants: int = 0  # requests in queues that will read it and the chunks before it; see wants.py
    bytes: int = 0
    broken: bool = False  # the chunk is no longer chained, although chunks behind it are

    @property
    def depth(self) -> int:
        """Chunks from the prompt's start to the end of this one, if all are sealed; otherwise 0."""
        return self.position if self.state is states.CHAINED else 0

    @property
    def is_being_stored(self) -> bool:
        return any(shard.state is states.RESERVED for shard in self.shards.values())


def is_evictable(chunk: Victim) -> bool:
    """Whether a chunk exists, nothing holds it and nothing is behind it."""
    assert isinstance(chunk, Chunk)
    return not chunk.holds and not chunk.children and not chunk.gone


def is_unwanted(chunk: Victim) -> bool:
    """Whether a chunk is evictable, and no request in a queue is going to read it."""
    assert isinstance(chunk, Chunk)
    return not chunk.holds and not chunk.children and not chunk.wants and not chunk.gone


_MOST_OUTGROWN, _OUTGROWN_TRIES = 1 << 14, 8
"""The number of outgrown tails that an account remembers (the latest ones), and how many of them one eviction tries.
Other outgrown tails are evicted when the policy chooses them."""


class Account(FairShare):
    """The share of the arena of one tenant with a quota, of one cache salt with a quota, or of all others.

    tenant, tag (keys.salt_tag): its owner; both are empty for the rest. salt: the salt that its chunks are stored
    under. wanted: finds the next victim among the account's chunks that are wanted behind a depth (`Wants.victim`).
    """

    __slots__ = ("capped", "chunks", "evicted", "outgrown", "quota", "salt", "tag", "tenant", "wanted")

    def __init__(
        self,
        owner: tuple[str, bytes],
        quota: Quota,
        policy: Policy,
        capacity: int,
        wanted: Callable[[Account, float], Chunk | None],
    ) -> None:
        super().__init__(policy, is_unwanted, capacity)
        self.wanted = wanted
        self.tenant, self.tag = owner
        self.salt = tenant_salt(*owner)
        self.set(quota)
        self.chunks = 0
        self.evicted = 0  # chunks
        self.capped = 0  # shards not stored because of the cap
        self.outgrown: deque[Chunk] = deque(maxlen=_MOST_OUTGROWN)  # tails that longer chunks have replaced

    @property
    def name(self) -> str:
        """The tenant or salt as people read it; empty for the rest."""
        return name_of(self.tenant, self.tag)

    def set(self, quota: Quota) -> None:
        """Change the quota. If chunks then expire sooner than before, the caller must record their ages."""
        self.quota = quota
        self.set_bounds(quota.floor_bytes, quota.cap_bytes, quota.weight)

    def is_nearly_full(self) -> bool:
        """Whether less than an eighth of its cap is left; bytes that are being removed count as free."""
        return self.is_capped and self.used - self.leaving > self.cap - (self.cap >> 3)

    def victim(self, depth: float = inf) -> Chunk | None:
        for _ in range(min(_OUTGROWN_TRIES, len(self.outgrown))):
            tail = self.outgrown.popleft()
            if is_unwanted(tail):
                return tail
            if not tail.gone:
                self.outgrown.append(tail)  # parts of other groups are behind it, or requests hold or want it
        victim = super().victim()
        assert victim is None or isinstance(victim, Chunk)
        return self.wanted(self, depth) if victim is None and depth < inf else victim


def is_there(chunk: Chunk) -> bool:
    """Whether a lookup may find a chunk: it is sealed on every rank, and not pending removal."""
    return (chunk.state is states.CHAINED or chunk.state is states.WHOLE) and not is_forgotten(chunk)


def is_hidden(chunk: Chunk) -> bool:
    """Whether a chunk is pending removal, so that no lookup finds it."""
    return chunk.state is states.PENDING_REMOVAL or is_forgotten(chunk)


def is_forgotten(chunk: Chunk) -> bool:
    """Whether a removal in progress hides a chunk: nobody gets it any more, not even requests that have it pinned."""
    hiding = chunk.namespace.hiding
    return bool(hiding) and any(scope.means(chunk) for scope in hiding)


def state_of(chunk: Chunk) -> str:
    """The state of a chunk for people: ready, storing (not sealed on every rank), corrupt or leaving."""
    if is_hidden(chunk):
        return "leaving"
    if is_there(chunk):
        return "ready"
    return "corrupt" if any(shard.state is states.CORRUPT for shard in chunk.shards.values()) else "storing"


@dataclass(slots=True, eq=False, repr=False)
class Namespace:
    """Chunks of one tenant and KV cache group whose bytes are interchangeable: one model, parallel shape, blocks per
    chunk, and layout on every rank. `groups`: the namespaces of all groups of its model.
    """

    number: int  # its name in records
    tenant: str
    model: str
    world_size: int
    blocks_in_chunk: int
    chunk_tokens: int = 0  # 0: not known
    reach: int = 0  # chunks before a boundary that resuming there needs; 0: all
    group: int = 0  # its place in `groups`
    groups: list[Namespace] = field(default_factory=list)
    trunk: Namespace | None = None  # the model's first unbounded group
    is_simple: bool = True  # the model has one group, and resuming needs all of it: its chunks form chains
    layouts: dict[int, bytes] = field(default_factory=dict)  # rank -> layout fingerprint, as ranks register
    sizes: dict[int, int] = field(default_factory=dict)  # rank -> bytes of a shard
    facts: dict[int, ShardFacts] = field(default_factory=dict)  # rank -> identity in tiers, once tiers are asked
    chunks: dict[bytes, Chunk] = field(default_factory=dict)
    live: int = 0  # registered instances of KV tensors that use it
    lookup_chunks: int = 0  # asked for
    hit_chunks: int = 0  # and found
    gone: bool = False  # the index has dropped it
    is_quarantined: bool = False  # no lookup finds its chunks: a sampled hit differed (core/verification.py)
    hiding: list[Scope] = field(default_factory=list)  # removals in progress that hide chunks of it
    broken: int = 0  # chunks that are not chained although chunks behind them are
    slot: int | None = None  # first slot of its record
    recorded: int = 0  # layouts in the record
    bytes: int = 0

    def __post_init__(self) -> None:
        join_groups([self])


def join_groups(groups: list[Namespace]) -> None:
    trunk = next((each for each in groups if not each.reach), None)
    for number, each in enumerate(groups):
        each.group, each.groups = number, groups
        each.trunk = trunk
        each.is_simple = len(groups) == 1 and not each.reach


@dataclass(slots=True, eq=False)
class Scope:
    """The chunks that one removal means: those of these namespaces, this salt and this writer that existed when it
    began. number: of the removal. See core/forgetting.py."""

    number: int
    namespaces: dict[Namespace, None]  # ordered, so that two runs remove in the same order
    salt: bytes | None  # None: any
    hides: bool  # its chunks are unavailable from the moment the removal begins
    writer: str = ""  # empty: any
    removed: int = 0  # chunks removed or hidden so far

    def means(self, chunk: Chunk) -> bool:
        if chunk.generation >= self.number or chunk.namespace not in self.namespaces:
            return False
        # The writer of a shard that is being loaded is not known yet.
        is_written = not self.writer or any(
            shard.writer == self.writer or shard.state is states.LOADING for shard in chunk.shards.values()
        )
        return is_written and self.salt in (None, chunk.salt)


class Pin(msgspec.Struct, gc=False):
    """The chunks that one lookup holds: the deepest chained chunk of each unbounded group with the loose chunks behind
    it, and the last parts of each bounded group."""

    chunks: list[Chunk]
    matched: int  # chunks in the prefix
    parts: int  # parts that holding `chunks` protects
