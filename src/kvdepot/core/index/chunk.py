"""Chunks, shards, namespaces and accounts, and the table of their state transitions.

Plain data; only core/index/ changes it. Invariant: a state changes by the table alone. What happens to a shard or
chunk is an `Event`; an event that its state does not allow is a bug, and ends the server before anything is changed.

    of a shard    RESERVED, LOADING -> SEALED -> CORRUPT -> RESERVED, LOADING
    of a chunk    FILLING -> WHOLE -> CHAINED, and back to FILLING; PENDING_REMOVAL -> FILLING

A slow load from a tier must not block an engine that has computed the same shard: then the load is given up, which
takes its shard out of the chunk. Every shard ends as FREED, every chunk as GONE.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf
from typing import Final

import msgspec

from kvdepot.eviction import Policy, Victim
from kvdepot.eviction.shares import FairShare
from kvdepot.memory.allocator import Extents
from kvdepot.protocol.keys import tenant_salt
from kvdepot.protocol.quotas import Quota, name_of
from kvdepot.tiers.format import Facts


class State(IntEnum):
    """State of a shard or a chunk. (An IntEnum, because each step looks into the table and hashing an Enum is slow.)"""

    # of a shard
    RESERVED = 0
    """Its bytes are being written."""
    LOADING = 1
    """Its bytes are being read from a tier."""
    SEALED = 2
    """Its bytes are what was stored."""
    CORRUPT = 3
    """It was sealed, but its bytes must not be used: they are not what was stored, or were forgotten."""
    FREED = 4
    """It is in no chunk; the allocator has its extents, or gets them when a load that was given up has ended."""
    # of a chunk
    FILLING = 5
    """Not sealed on every rank."""
    WHOLE = 6
    """Sealed on every rank, but not known to have a complete chain before it."""
    CHAINED = 7
    """Sealed on every rank, and so were all before it in its chain."""
    PENDING_REMOVAL = 8
    """No lookup finds it. It is removed when nothing holds it and nothing is behind it, unless it is stored again."""
    GONE = 9


class Event(IntEnum):
    """An event in the life of a shard, of a chunk, or of both at once."""

    RESERVE = 0
    """A shard (of the chunk) is going to be written."""
    LOAD = 1
    """A shard is going to be read from a tier."""
    SEAL = 2
    """All bytes of a shard have arrived."""
    COMPLETE = 3
    """All shards of the chunk are sealed."""
    CHAIN = 4
    """All chunks before this one are chained."""
    CORRUPT = 5
    """Bytes of a sealed shard are not what was stored, or must not be used."""
    HIDE = 6
    """The chunk was forgotten, or is too old, and cannot be removed yet."""
    RENEW = 7
    """A chunk that was pending removal is stored again."""
    REMOVE = 8


class IllegalTransition(AssertionError):
    """The state does not allow the event: a bug."""


class _Row(dict[Event, State]):
    """The events that one state allows, and the state after each. Other events raise IllegalTransition."""

    state: State

    def __missing__(self, event: Event) -> State:
        raise IllegalTransition(f"{event.name} cannot happen in the state {self.state.name}")


def _table(rows: dict[State, dict[Event, State]]) -> dict[State, _Row]:
    table = {state: _Row(row) for state, row in rows.items()}
    for state, row in table.items():
        row.state = state
    return table


TRANSITIONS: Final = _table(
    {
        State.RESERVED: {Event.SEAL: State.SEALED, Event.REMOVE: State.FREED},
        State.LOADING: {Event.SEAL: State.SEALED, Event.REMOVE: State.FREED},
        State.SEALED: {Event.CORRUPT: State.CORRUPT, Event.REMOVE: State.FREED},
        State.CORRUPT: {Event.RESERVE: State.RESERVED, Event.LOAD: State.LOADING, Event.REMOVE: State.FREED},
        State.FREED: {},
        State.FILLING: {
            Event.RESERVE: State.FILLING,
            Event.SEAL: State.FILLING,
            Event.COMPLETE: State.WHOLE,
            Event.CORRUPT: State.FILLING,
            Event.HIDE: State.PENDING_REMOVAL,
            Event.REMOVE: State.GONE,
        },
        State.WHOLE: {
            Event.CHAIN: State.CHAINED,
            Event.CORRUPT: State.FILLING,
            Event.HIDE: State.PENDING_REMOVAL,
            Event.REMOVE: State.GONE,
        },
        State.CHAINED: {Event.CORRUPT: State.FILLING, Event.HIDE: State.PENDING_REMOVAL, Event.REMOVE: State.GONE},
        State.PENDING_REMOVAL: {
            Event.RESERVE: State.PENDING_REMOVAL,
            Event.CORRUPT: State.PENDING_REMOVAL,
            Event.HIDE: State.PENDING_REMOVAL,
            Event.RENEW: State.FILLING,
            Event.REMOVE: State.GONE,
        },
        State.GONE: {},
    }
)
"""The state after an event, by the state before it. A shard begins as RESERVED or LOADING, a chunk as FILLING."""

_RESERVED, _LOADING, _SEALED = State.RESERVED, State.LOADING, State.SEALED  # attributes of an enum are slow to get
_FILLING, _WHOLE, _CHAINED, _PENDING_REMOVAL = State.FILLING, State.WHOLE, State.CHAINED, State.PENDING_REMOVAL


class Shard(msgspec.Struct, gc=False):
    """One rank's bytes of a chunk."""

    extents: Extents
    size: int
    """Bytes of KV in the extents."""
    state: State = _RESERVED
    checksum: int = 0
    """The checksum of the KV; 0 if none was computed."""
    tiers: int = 0
    """Bit t: tier t probably has it."""
    slot: int | None = None
    """First slot of its record; None if it has none."""
    writer: str = ""
    """The writer (wire.Register) that has stored it; empty: none is known, as of what earlier versions have stored."""

    @property
    def sealed(self) -> bool:
        return self.state is _SEALED

    @property
    def is_open(self) -> bool:
        """Whether its bytes are being written, which holds its chunk."""
        return self.state is _RESERVED or self.state is _LOADING


class Chunk(Victim, gc=False, kw_only=True):
    """One KV cache group's part of a chunk: its shards by rank, and its place in a chain.

    A part of a bounded group has position 0. Its parent is the part of the first unbounded group with the same key, if
    that exists, so it is evicted before that one. A chunk refers to its parent only: no cycles.
    """

    namespace: Namespace
    account: Account
    """The account (of its tenant or its salt) that is charged for this chunk and may evict it."""
    parent: Chunk | None = None
    salt: bytes = b""
    """16 bytes that identify its prompt's cache salt, for `forget`; empty: none."""
    run: int = 0
    """Chunks in a row, up to this one, that the same writers had stored when there had been `run_as_of` withdrawals."""
    run_as_of: int = -1
    born: int = 0
    """When it was computed, seconds since 1970."""
    used: int = 0
    """Running number of its last use; after a restart, of its store."""
    used_s: int = 0
    """When that was, seconds since 1970, counting its store as a use; 0: not known. See lifetimes.py."""
    generation: int = 0
    """Number of removals that had begun when it was stored."""
    state: State = _FILLING
    shards: dict[int, Shard] = msgspec.field(default_factory=dict)
    sealed: int = 0
    """Shards that are sealed."""
    position: int = 0
    """Chunks from the prompt's start to the end of this one; 0 if the parent is unknown: it is loose."""
    children: int = 0
    """Chunks that name this one as parent."""
    holds: int = 0
    """Pins of requests and leases, and copies in progress."""
    leases: int = 0
    """Leases that keep it: those that hold it or a chunk behind it."""
    wants: int = 0
    """Requests in queues that are going to read it and all before it; see wants.py."""
    bytes: int = 0
    broken: bool = False
    """It is no longer chained, although chunks behind it are."""

    @property
    def depth(self) -> int:
        """Chunks from the prompt's start to the end of this one, if all are sealed; otherwise 0."""
        return self.position if self.state is _CHAINED else 0

    @property
    def is_being_stored(self) -> bool:
        """Whether a store is writing a shard of it."""
        return any(shard.state is _RESERVED for shard in self.shards.values())


def is_evictable(chunk: Victim) -> bool:
    """Whether a chunk exists, nothing holds it and nothing is behind it."""
    assert isinstance(chunk, Chunk)
    return not chunk.holds and not chunk.children and not chunk.gone


def is_unwanted(chunk: Victim) -> bool:
    """Whether a chunk is evictable, and no request in a queue is going to read it."""
    assert isinstance(chunk, Chunk)
    return not chunk.holds and not chunk.children and not chunk.wants and not chunk.gone


_MOST_OUTGROWN, _OUTGROWN_TRIES = 1 << 14, 8
"""Tails that an account remembers to evict first, the latest, and how many are tried for one eviction; others go when
their turn comes."""


class Account(FairShare):
    """The share of one tenant with a quota, of one cache salt with a quota, or of all others.

    tenant, tag (keys.salt_tag): both are empty for the rest. salt: under which its chunks are stored. wanted: finds
    the chunk of an account to evict next of those that are wanted behind a depth (`Wants.victim`).
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
        self.outgrown: deque[Chunk] = deque(maxlen=_MOST_OUTGROWN)  # tails that others continue

    @property
    def name(self) -> str:
        """Its tenant or salt, for people; empty for the rest."""
        return name_of(self.tenant, self.tag)

    def set(self, quota: Quota) -> None:
        """Change the quota. If chunks expire sooner than before, the caller records their ages."""
        self.quota = quota
        self.set_bounds(quota.floor_bytes, quota.cap_bytes, quota.weight)

    def is_nearly_full(self) -> bool:
        """Whether less than an eighth of its cap is left, not counting what is leaving."""
        return self.is_capped and self.used - self.leaving > self.cap - (self.cap >> 3)

    def victim(self, depth: float = inf) -> Chunk | None:
        for _ in range(min(_OUTGROWN_TRIES, len(self.outgrown))):
            tail = self.outgrown.popleft()
            if is_unwanted(tail):
                return tail
            if not tail.gone:
                self.outgrown.append(tail)  # its parts of other groups, or requests that have it, go first
        victim = super().victim()
        assert victim is None or isinstance(victim, Chunk)
        return self.wanted(self, depth) if victim is None and depth < inf else victim


def is_there(chunk: Chunk) -> bool:
    """Whether a lookup may find a chunk: it is sealed on every rank, and not pending removal."""
    return (chunk.state is _CHAINED or chunk.state is _WHOLE) and not is_forgotten(chunk)


def is_hidden(chunk: Chunk) -> bool:
    """Whether a chunk is pending removal, so that no lookup finds it."""
    return chunk.state is _PENDING_REMOVAL or is_forgotten(chunk)


def is_forgotten(chunk: Chunk) -> bool:
    """Whether a removal in progress hides a chunk: it is not given out any more, even to those who have it pinned."""
    hiding = chunk.namespace.hiding
    return bool(hiding) and any(scope.means(chunk) for scope in hiding)


def state_of(chunk: Chunk) -> str:
    """The state of a chunk for people: ready, storing (not sealed on every rank), corrupt or leaving."""
    if is_hidden(chunk):
        return "leaving"
    if is_there(chunk):
        return "ready"
    return "corrupt" if any(shard.state is State.CORRUPT for shard in chunk.shards.values()) else "storing"


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
    reach: int = 0  # parts before a boundary that resuming there needs; 0: all from the prompt's start
    group: int = 0  # its place in `groups`
    groups: list[Namespace] = field(default_factory=list)
    trunk: Namespace | None = None  # the model's first unbounded group
    is_simple: bool = True  # the model has one group, and resuming needs all of it: its chunks form chains
    layouts: dict[int, bytes] = field(default_factory=dict)  # rank -> layout fingerprint, as ranks register
    sizes: dict[int, int] = field(default_factory=dict)  # rank -> bytes of a shard
    facts: dict[int, Facts] = field(default_factory=dict)  # rank -> its identity in tiers, once they are asked
    chunks: dict[bytes, Chunk] = field(default_factory=dict)
    live: int = 0  # registered instances that use it
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
    """Make these the KV cache groups of one model, in this order."""
    trunk = next((each for each in groups if not each.reach), None)
    for number, each in enumerate(groups):
        each.group, each.groups = number, groups
        each.trunk = trunk
        each.is_simple = len(groups) == 1 and not each.reach


@dataclass(slots=True, eq=False)
class Scope:
    """The chunks of these namespaces, this salt and this writer that existed when removal `number` began; see
    core/forgetting.py."""

    number: int
    namespaces: dict[Namespace, None]  # ordered, so that two runs remove in the same order
    salt: bytes | None  # None: any
    hides: bool  # its chunks are unavailable from the moment the removal begins
    writer: str = ""  # empty: any
    removed: int = 0  # or counted

    def means(self, chunk: Chunk) -> bool:
        if chunk.generation >= self.number or chunk.namespace not in self.namespaces:
            return False
        # The writer of what is being loaded is not known yet.
        is_written = not self.writer or any(
            shard.writer == self.writer or shard.state is _LOADING for shard in chunk.shards.values()
        )
        return is_written and self.salt in (None, chunk.salt)


class Pin(msgspec.Struct, gc=False):
    """The chunks that one lookup holds: of each unbounded group the deepest chained one and the loose ones behind it,
    and of each bounded group its last parts.
    """

    chunks: list[Chunk]
    matched: int
    """Chunks in the prefix."""
    parts: int
    """Parts that holding `chunks` protects."""
