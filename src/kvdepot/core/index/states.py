"""The states of shards and chunks, and the one table of their transitions. Plain data, used by core/index/.

    of a shard    RESERVED, LOADING -> SEALED -> CORRUPT -> RESERVED, LOADING; FREED at the end
    of a chunk    FILLING -> WHOLE -> CHAINED, and back to FILLING; PENDING_REMOVAL -> FILLING; GONE at the end

Invariant: a state changes by the table alone. A transition that the state does not allow is a bug, and ends the server
before anything is changed: KV that is wrong is worse than a restart, after which records say what is there.

A chunk has one state, and not one for each fact that decides it (sealed ranks, a chain before it, a removal). The
reason is speed: each lookup asks whether chunks are CHAINED, and one comparison answers that. A slow load from a tier
must not block an engine that has computed the same shard. So LOADING differs from RESERVED: a load may be given up,
which takes its shard out of the chunk.

Doubts: CORRUPT says "must not be used", whatever the reason, so a forgotten shard looks like a damaged one. Whether a
removal in progress hides a chunk (`chunk.is_forgotten`) is no state, because a removal covers more chunks than one step
of the server could mark.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class ChunkState(IntEnum):
    """The state of a shard or a chunk: an IntEnum, because each step looks it up, and hashing an Enum is slow."""

    # of a shard
    RESERVED = 0  # its bytes are being written
    LOADING = 1  # its bytes are being read from a tier
    SEALED = 2  # its bytes are what was stored
    CORRUPT = 3  # it was sealed, but its bytes must not be used: they are not what was stored, or were forgotten
    FREED = 4  # it is in no chunk; its extents are free, or will be when a load that was given up has ended
    # of a chunk
    FILLING = 5  # not sealed on every rank
    WHOLE = 6  # sealed on every rank, but not known to have a complete chain before it
    CHAINED = 7  # sealed on every rank, and so were all before it in its chain
    PENDING_REMOVAL = 8
    """No lookup finds it. It is removed once nothing holds it and no chunk is behind it, unless it is stored again."""
    GONE = 9


class Transition(IntEnum):
    """A change of the state of a shard, of a chunk, or of both at once."""

    RESERVE = 0  # a shard of the chunk is going to be written
    LOAD = 1  # a shard is going to be read from a tier
    SEAL = 2  # all bytes of a shard have arrived
    COMPLETE = 3  # all shards of the chunk are sealed
    CHAIN = 4  # all chunks before this one are chained
    SPOIL = 5  # bytes of a sealed shard are not what was stored, or must not be used
    HIDE = 6  # the chunk was forgotten, or is too old, and cannot be removed yet
    RENEW = 7  # a chunk that was pending removal is stored again
    REMOVE = 8


class IllegalTransition(AssertionError):
    """The state does not allow the transition: a bug."""


class _Row(dict[Transition, ChunkState]):
    """The transitions that one state allows, with the state after each. All others raise IllegalTransition."""

    def __init__(self, state: ChunkState, allowed: dict[Transition, ChunkState]) -> None:
        super().__init__(allowed)
        self._state = state

    def __missing__(self, transition: Transition) -> ChunkState:
        raise IllegalTransition(f"{transition.name} cannot happen in the state {self._state.name}")


# Module names, because attributes of an enum are slow to get and every step needs these states.
RESERVED, LOADING, SEALED, CORRUPT, FREED, FILLING, WHOLE, CHAINED, PENDING_REMOVAL, GONE = ChunkState
RESERVE, LOAD, SEAL, COMPLETE, CHAIN, SPOIL, HIDE, RENEW, REMOVE = Transition

_ALLOWED = {
    RESERVED: {SEAL: SEALED, REMOVE: FREED},
    LOADING: {SEAL: SEALED, REMOVE: FREED},
    SEALED: {SPOIL: CORRUPT, REMOVE: FREED},
    CORRUPT: {RESERVE: RESERVED, LOAD: LOADING, REMOVE: FREED},
    FREED: {},
    FILLING: {RESERVE: FILLING, SEAL: FILLING, COMPLETE: WHOLE, SPOIL: FILLING, HIDE: PENDING_REMOVAL, REMOVE: GONE},
    WHOLE: {CHAIN: CHAINED, SPOIL: FILLING, HIDE: PENDING_REMOVAL, REMOVE: GONE},
    CHAINED: {SPOIL: FILLING, HIDE: PENDING_REMOVAL, REMOVE: GONE},
    PENDING_REMOVAL: {
        RESERVE: PENDING_REMOVAL,
        SPOIL: PENDING_REMOVAL,
        HIDE: PENDING_REMOVAL,
        RENEW: FILLING,
        REMOVE: GONE,
    },
    GONE: {},
}
TRANSITIONS: Final = {state: _Row(state, allowed) for state, allowed in _ALLOWED.items()}
"""The state after a transition, by the state before. A shard begins as RESERVED or LOADING, a chunk as FILLING."""
