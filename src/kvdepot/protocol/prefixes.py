"""Prefix families: all prompts in memory that begin with the same chunk. Plain data of messages and the core."""

from __future__ import annotations

import msgspec

__all__ = ["MOST_PREFIXES", "SORTS", "Prefix"]

SORTS = ("hits", "bytes", "tokens", "idle")
"""What families can be sorted by, the highest first; idle: those that were not found for longest."""
MOST_PREFIXES = 1000
"""Families in one answer."""


class Prefix(msgspec.Struct, frozen=True):
    """One family, as far as it is in memory.

    hash: of the last chunk that all of its prompts share, in hex; shared_tokens: tokens up to the end of that chunk.
    tokens, bytes: of all its chunks, each counted once; bytes are those of all KV cache groups and ranks.
    prompts: ends of chains, so a prompt that is the beginning of another is not counted.
    hits, hit_tokens: lookups of engines that found some of it since it is in memory, and the tokens that they found.
    age_s: seconds since its first chunk was computed. idle_s: seconds since a lookup found some of it, or since it came
    into memory; after a restart of the server, since its first chunk was computed.
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
