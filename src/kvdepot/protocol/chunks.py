"""The answer to `Inspect`: where single chunks are. Plain data of messages."""

from __future__ import annotations

import msgspec

MOST_HASHES, MOST_CHUNKS = 16, 2048
"""The most hashes in a request, and the most parts of chunks in its answer: each part takes the deciding thread 4
us."""


class ChunkStatus(msgspec.Struct, frozen=True):
    """One KV cache group's part of a chunk in memory.

    group, reach: the group's number, and the number of its chunks before a boundary that resuming needs (0: all).
    position: the number of chunks from the prompt's start to this one; 0: not known, or a part of a bounded group.
    state: ready, storing, corrupt (no hit until it is stored again), or leaving (forgotten or expired). held: the
    number of pins of requests and leases that end with it, and of its copies in progress; a pin of a later chunk also
    holds the chunks before. leased: the number of leases that keep it. tiers: the tiers that probably have it. age_s:
    seconds since it was computed; None: it is being stored.
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
