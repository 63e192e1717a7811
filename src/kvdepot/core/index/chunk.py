"""What the index is made of: chunks, their shards, their namespaces; and their states, in one table of transitions.

Plain data: core/index/index.py alone changes it. The one law: a state changes by the table. What happens to a shard or
a chunk is an `Event`; an event that its state does not allow is a bug of ours and raises `IllegalTransition` before
anything is changed. That is an AssertionError and takes the server down: to go on in an unforeseen state could serve
wrong bytes.

    of a shard    RESERVED, LOADING -> SEALED -> CORRUPT -> RESERVED, LOADING
    of a chunk    FILLING -> WHOLE -> CHAINED, and back to FILLING; PENDING_REMOVAL -> FILLING

Whoever loads a shard from a tier must not keep out who has computed it meanwhile: a shard that is LOADING can be
REPLACED by another. All ends in FREED, or GONE.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import msgspec

from kvdepot.eviction import Victim
from kvdepot.memory.allocator import Extents
from kvdepot.tiers.format import Facts

__all__ = ["TRANSITIONS", "Chunk", "Event", "IllegalTransition", "Namespace", "Pin", "Shard", "State", "is_evictable"]


class State(IntEnum):
    """Of a shard, or of a chunk. (An IntEnum, because the table is asked at every step and hashing an Enum is slow.)"""

    # of a shard
    RESERVED = 0
    """Its bytes are being written."""
    LOADING = 1
    """Its bytes are being read from a tier."""
    REPLACED = 2
    """Its bytes are still being read from a tier, and another shard has its place in the chunk."""
    SEALED = 3
    """Its bytes are what was stored."""
    CORRUPT = 4
    """It was sealed, but nobody is to have its bytes: they are not what was stored, or were forgotten."""
    FREED = 5
    """Its bytes belong to others."""
    # of a chunk
    FILLING = 6
    """Not sealed on every rank."""
    WHOLE = 7
    """Sealed on every rank, but not known to have a whole chain before it."""
    CHAINED = 8
    """Sealed on every rank, and so was all before it in its chain."""
    PENDING_REMOVAL = 9
    """No lookup finds it. It goes when nothing holds it and nothing is behind it, unless it is stored anew before."""
    GONE = 10


class Event(IntEnum):
    """What happens to a shard, to a chunk, or to both at once."""

    RESERVE = 0
    """A shard, or one of the chunk's, is to be written."""
    LOAD = 1
    """A shard is to be read from a tier."""
    REPLACE = 2
    """Somebody else is to write the shard that is being loaded."""
    SEAL = 3
    """All bytes of a shard have arrived."""
    COMPLETE = 4
    """All shards of the chunk are sealed."""
    CHAIN = 5
    """All before the chunk is chained."""
    CORRUPT = 6
    """Bytes of a sealed shard are not what was stored, or nobody is to have them."""
    HIDE = 7
    """The chunk was forgotten, or is too old, and cannot go yet."""
    RENEW = 8
    """What was to be removed is stored anew."""
    REMOVE = 9


class IllegalTransition(AssertionError):
    """An event that a state does not allow: a bug."""


class _Row(dict[Event, State]):
    """What may happen in one state, and the state after it. Asked for another event it raises IllegalTransition."""

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
        State.LOADING: {Event.SEAL: State.SEALED, Event.REPLACE: State.REPLACED, Event.REMOVE: State.FREED},
        State.REPLACED: {Event.REMOVE: State.FREED},
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
        State.CHAINED: {
            Event.CORRUPT: State.FILLING,
            Event.HIDE: State.PENDING_REMOVAL,
            Event.REMOVE: State.GONE,
        },
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

_RESERVED, _LOADING, _SEALED = State.RESERVED, State.LOADING, State.SEALED  # an enum's attributes are slow to get
_FILLING, _CHAINED = State.FILLING, State.CHAINED


class Shard(msgspec.Struct, gc=False):
    """One rank's bytes of a chunk."""

    extents: Extents
    size: int
    """Bytes of KV in the extents."""
    state: State = _RESERVED
    checksum: int = 0
    """Of the KV; 0 where none was made."""
    tiers: int = 0
    """Bit t: tier t is believed to have it."""
    slot: int | None = None
    """Where it is recorded, if it is."""

    @property
    def sealed(self) -> bool:
        return self.state is _SEALED

    @property
    def is_open(self) -> bool:
        """Whether its bytes are on their way: it has a hold on its chunk."""
        return self.state is _RESERVED or self.state is _LOADING


class Chunk(Victim, gc=False, kw_only=True):
    """A chunk of KV: its shards by rank, and its place in a chain. No reference cycles: parents only."""

    namespace: Namespace
    parent: Chunk | None = None
    salt: bytes = b""
    """What `forget` may name it by: 16 bytes that stand for its prompt's cache salt; empty: it has none."""
    born: int = 0
    """When it was computed, seconds since 1970."""
    used: int = 0
    """When it was last used, as a running number; of one from before a restart, when it was stored."""
    generation: int = 0
    """How many removals had begun when it was stored."""
    state: State = _FILLING
    shards: dict[int, Shard] = msgspec.field(default_factory=dict)
    sealed: int = 0
    """Shards that are sealed."""
    position: int = 0
    """Chunks from the prompt's start to the end of this one; 0 where the parent is unknown: it is loose."""
    children: int = 0
    """Chunks that name this one as parent."""
    holds: int = 0
    """Pins of requests, and copies under way."""
    bytes: int = 0
    broken: bool = False
    """It was chained and is not any more, with chunks behind it that are."""

    @property
    def depth(self) -> int:
        """Chunks from the prompt's start to the end of this one, all sealed; 0: not that many are."""
        return self.position if self.state is _CHAINED else 0


def is_evictable(chunk: Victim) -> bool:
    """Whether a chunk is there, nothing holds it and nothing is behind it."""
    assert isinstance(chunk, Chunk)
    return not chunk.holds and not chunk.children and not chunk.gone


class Namespace:
    """Chunks whose bytes mean the same: one model, parallel shape, blocks a chunk, and layout on every rank; and, where
    clients are bound to tenants, of one tenant, so that no other can tell whether they are there."""

    __slots__ = (
        "blocks_in_chunk", "bytes", "chunks", "facts", "gone", "hit_chunks", "layouts", "live", "lookup_chunks",
        "model", "number", "recorded", "sizes", "slot", "tenant", "world_size",
    )  # fmt: skip

    def __init__(self, number: int, tenant: str, model: str, world_size: int, blocks_in_chunk: int) -> None:
        self.number = number  # what records call it
        self.tenant = tenant
        self.model = model
        self.world_size = world_size
        self.blocks_in_chunk = blocks_in_chunk
        self.layouts: dict[int, bytes] = {}  # rank -> layout fingerprint, as ranks show up
        self.sizes: dict[int, int] = {}  # rank -> bytes of a shard
        self.facts: dict[int, Facts] = {}  # rank -> what tiers call it, once they are asked
        self.chunks: dict[bytes, Chunk] = {}
        self.live = 0  # registered instances that use it
        self.lookup_chunks = self.hit_chunks = 0  # asked for, and there
        self.gone = False  # the index has dropped it
        self.bytes = 0
        self.slot: int | None = None  # where it is recorded
        self.recorded = 0  # layouts that the record names

    def __repr__(self) -> str:
        return f"<Namespace {self.model!r} world_size={self.world_size} {len(self.chunks)} chunks {self.bytes} bytes>"


class Pin(msgspec.Struct, gc=False):
    """What one lookup holds: the deepest chained chunk and the loose ones behind it."""

    chunks: list[Chunk]
    matched: int
