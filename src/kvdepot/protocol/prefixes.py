"""Prefix families (all prompts in memory that begin with the same chunk), and single chunks. Plain data of messages."""

from __future__ import annotations

import msgspec

SORTS = ("hits", "bytes", "tokens", "idle")
"""Values that families can be sorted by, the highest first; `idle` puts the longest unused family first."""
MOST_PREFIXES = 1000
MOST_CHUNKS = 16384
"""Parts of chunks in one answer, which has about 200 bytes for each, and is encoded in one piece."""


class Prefix(msgspec.Struct, frozen=True):
    """One family, as far as it is in memory.

    id: the hash of its first chunk, in hex; it stays the same while prompts come and go.
    hash: of the last chunk that all of its prompts share; shared_tokens: tokens up to the end of that chunk.
    tokens, bytes: of all its chunks, each counted once; bytes are those of all KV cache groups and ranks.
    prompts: ends of chains, so a prompt that is the beginning of another is not counted.
    hits, hit_tokens: lookups of engines that ended at a chunk that is still there, and the tokens that they found.
    age_s: seconds since its first chunk was computed. idle_s: seconds since the last store or request that used some of
    it; after a restart of the server, since its first chunk was computed.
    """

    tenant: str
    model: str
    hash: str
    shared_tokens: int
    tokens: int
    prompts: int
    bytes: int
    hits: int
    hit_tokens: int
    age_s: float
    idle_s: float
    id: str = ""


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
