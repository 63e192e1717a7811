"""The trail of one request: what was looked up, loaded and stored for it, and why its prefix ended. Plain data."""

from __future__ import annotations

import msgspec

MOST_TRAILS = 512
"""Requests whose trails a server keeps, the latest ones."""
ENDS = {
    "whole": "all of it was found",
    "quarantine": "the model is in quarantine: see `kvdepot inspect --compare`",
    "model": "no model with this name, number of ranks and chunk size was known",
    "absent": "the next chunk is unknown: never stored here, or removed long ago",
    "evicted": "the next chunk had been evicted to make room",
    "removed": "the next chunk had been forgotten or cleared, or had expired",
    "storing": "the next chunk was still being stored",
    "corrupt": "the next chunk had failed its checksum",
    "leaving": "the next chunk was being forgotten, or had expired",
    "boundary": "a sliding window or state of the model was not stored at a later boundary",
    "room": "requests that wait may not pin more of the memory",
}
"""Why the prefix of a lookup ended, by its name in `TrailLookup.end`."""


class TrailLookup(msgspec.Struct, frozen=True):
    """One lookup; numbers are of whole chunks from the prompt's start.

    at: seconds since 1970 of the answer. salted: the request has a cache salt. own: of `asked`, in the engine's own
    cache, if it says so. in_memory: found before tiers were asked. tiers: bytes that were to be loaded, by tier. late:
    tiers that were too slow. end: one of ENDS. next: the hash of the first chunk that was not found, in hex. gone_s:
    seconds since that one was removed. branches: chunks that follow the last one found. None: unknown.
    """

    at: int
    engine: str
    model: str
    ranks: int
    chunk_tokens: int
    salted: bool
    asked: int
    own: int
    in_memory: int
    found: int
    tiers: dict[str, int]
    late: list[str]
    end: str
    next: str = ""
    gone_s: int | None = None
    branches: int | None = None


class Trail(msgspec.Struct):
    """All that is kept about one request.

    lookups, errors: the last ones. shards: what became of those to load, to compare and to store; a chunk has one for
    each rank and KV cache group. engine: tokens that its engine says it needed beyond its own cache, that of these were
    here, and how many it loaded, or computed to compare them.
    others: models with chunks that the last lookup did not search, and what differs.
    """

    tenant: str
    request: str
    lookups: list[TrailLookup] = []
    shards: dict[str, int] = {}
    engine: dict[str, int] = {}
    errors: list[str] = []
    others: list[str] = []
