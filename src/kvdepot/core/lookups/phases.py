"""The phases of a lookup: what it waits for, and what it holds meanwhile.

    ASKED ─┬─> ROOM ───┐
           ├─> WANTED ─┼─> STORES ─> TIERS ─> ANSWERED       (each may be left out; STORES may follow STORES)
           └───────────┘

A lookup is one search of memory, and most are answered by it at once. Others wait, always for one thing, and memory is
searched again before they wait for the next. What they may wait for, in this order:

1. A place in the pin budget, because what is found is pinned, and pins of requests that their engines only queue must
   leave room for stores. Until then, a search holds nothing. Some callers wait for the answer themselves: their
   searches are in ROOM for half a second, and are then answered with what fits. Requests in an engine's queue are
   WANTED instead: they wait without a deadline, in the order of their engine's queue, and what they would find is
   marked as wanted, so that it is evicted last. This is why a queue longer than the budget does not lose its chunks.
2. STORES: the next chunk is being written by somebody else, and will be there in milliseconds. Half a second is enough
   for all such chunks together: computing them is faster than waiting for more.
3. TIERS: slower storage may have what follows. A tier gets `lookup_s`. A request in a queue needs no answer yet, so it
   waits on while its tiers answer something.

What a search holds cannot be evicted; what it wants is only evicted last. Both count from its entering the phase to its
leaving it. After the answer, a session (core/pins.py) or a lease holds what was found.

Doubts: ROOM and STORES share one deadline and one limit although they wait for different things, because to a caller
both are the same half second. A search never goes back from TIERS to STORES, so a store that begins while a tier loads
is found only by the last search of memory.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

STORE_S = 0.5
"""Seconds that a lookup waits for stores and for room together. A store takes milliseconds, and computing its chunks
again takes longer. A client waits twice this time plus the deadline of tiers for an answer (client/scheduler.py)."""
NEVER = float("inf")


class SearchPhase(Enum):
    """Names what a search waits for."""

    ASKED = auto()  # nothing yet: it has just come
    ROOM = auto()
    WANTED = auto()
    STORES = auto()
    TIERS = auto()
    ANSWERED = auto()


class Row(NamedTuple):
    """The rules of one phase.

    next: the phases that may follow. within_s: seconds that a search may stay; NEVER: without a deadline. most: the
    number of searches in the phase (in both, if it is one of `PATIENT`); more are answered at once. holds: whether a
    search holds the chunks that memory has of its prompt, and in TIERS those that arrive. wants: whether the search of
    a queued request wants these chunks, at its place in the queue.
    """

    next: frozenset[SearchPhase]
    within_s: float = NEVER
    most: int = 0
    holds: bool = False
    wants: bool = False


def table(lookup_s: float) -> dict[SearchPhase, Row]:
    """The row of each phase. lookup_s: the seconds that tiers may take (`Config.lookup_s`)."""
    asked, room, wanted, stores, tiers, answered = SearchPhase
    return {
        asked: Row(frozenset({room, wanted, stores, tiers, answered})),
        room: Row(frozenset({room, stores, tiers, answered}), STORE_S, 1024),
        wanted: Row(frozenset({wanted, stores, tiers, answered}), NEVER, 4096, wants=True),
        stores: Row(frozenset({stores, tiers, answered}), STORE_S, 1024, holds=True, wants=True),
        tiers: Row(frozenset({answered}), lookup_s, 1024, holds=True, wants=True),
        answered: Row(frozenset()),
    }


PATIENT = SearchPhase.ROOM, SearchPhase.STORES
"""The phases that share one deadline and one limit."""
MOST_QUEUED_HASHES = 1 << 21
"""The most hashes of all searches in WANTED (64 MiB); further searches are answered at once with what fits."""
