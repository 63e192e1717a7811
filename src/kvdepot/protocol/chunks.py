"""Where single chunks are, as `Inspect` is answered. Plain data of messages."""

from __future__ import annotations

import msgspec

MOST_HASHES, MOST_CHUNKS = 16, 2048
"""Hashes in one request, and parts of chunks in its answer: the deciding thread takes some 4 us for each part."""


class ChunkStatus(msgspec.Struct, frozen=True):
    """One KV cache group's part of a chunk in memory.

    group, reach: which group, and how many chunks before a boundary resuming needs of it (0: all). position: chunks
    from the prompt's start to its end; 0: not known, or a part of a bounded group.
    state: ready, storing, corrupt (no hit until it is stored again), or leaving (forgotten or expired).
    held: pins of requests and leases that end with it, and copies in progress; a pin of a deeper chunk holds the chunks
    before it, too. leased: leases that keep it. tiers: those that probably have it. age_s: seconds since it was
    computed; None: it is being stored.
    """

    tenant: str
    model: str
    world_size: int
    group: int
    reach: int
    chunk_tokens: int
    hash: str
    position: int
    state: str
    bytes: int
    held: int
    leased: int
    tiers: list[str]
    age_s: float | None
