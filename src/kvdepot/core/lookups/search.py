"""One lookup, from its request to its answer. Plain data on the deciding thread.

A search and its search of the tiers (core/tiering/loading.py) are two objects, because they end at different times. A
search ends with its answer, and a tier search when its last load has arrived, which may be later. The chunks that both
hold are in one place, `Search.held`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from kvdepot.core.clients import Client, PinShare
from kvdepot.core.index.chunk import Chunk, Namespace
from kvdepot.core.index.wants import Want
from kvdepot.core.leases import Lease
from kvdepot.core.lookups.phases import NEVER, SearchPhase
from kvdepot.core.tiering.loading import TierSearch
from kvdepot.protocol import wire


@dataclass(slots=True, eq=False)
class Search:
    """A lookup until its answer.

    number: the number of the message to answer. name: the client and the request, or the tenant and the lease; unique
    among searches in progress. by_hand: the lookup warms or leases a prompt, and counts neither as hit nor as miss.
    """

    client: Client
    number: bytes
    request: wire.Lookup
    name: Hashable
    lease: Lease | None = None  # the lease that will hold what is found; None: a session will
    by_hand: bool = False
    phase: SearchPhase = SearchPhase.ASKED
    deadline: float = NEVER  # the end of its wait in this phase, in seconds of the depot's clock
    turn: tuple[int, int] = (0, -1)  # place in its engine's queue, and order among equal places; -1: none yet
    first: int = 0  # chunks that memory had when it was searched last
    is_hurry: bool = False  # it hurries a lookup that was counted, and is not counted itself
    counted: int = 0  # hits that were counted with the answer to the lookup that it hurries
    held: dict[tuple[int, bytes], Chunk] = field(default_factory=dict)  # by number of the namespace and key
    share: PinShare | None = None  # its share of the pin budget
    size: int = 0  # bytes of its share, taken or not, if it is queued
    want: Want | None = None  # its place in the queue of its engine, and what it wants
    passed: dict[bytes, Namespace] = field(default_factory=dict)  # by key: chunks that later searches may still want
    part: Chunk | None = None  # the chunk that it waits for in the phase STORES
    tiers: TierSearch | None = None  # its search of the tiers; None before the phase TIERS
    is_shortened: bool = False  # the answer is what fits the pin budget
