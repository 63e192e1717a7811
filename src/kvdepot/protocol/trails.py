"""The trail of a request: what was looked up, loaded and stored for it, and why its prefix ended. Plain data."""

from __future__ import annotations

import msgspec

MOST_TRAILS = 512
"""The number of latest requests whose trails a server keeps."""
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

    at: time of the answer, seconds since 1970. salted: the request has a cache salt. asked: chunks of the prompt. own:
    chunks of these in the engine's own cache, if it reports them. in_memory: chunks found before tiers were asked.
    found: chunks in the answer. tiers: by tier: bytes of the loads that were begun. late: tiers that were too slow.
    end: one of ENDS. next: the hash of the first chunk that was not found, in hex. gone_s: seconds since that chunk was
    removed. branches: number of chunks that follow the last found one. None: unknown.
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
    """The facts that are kept about one request.

    lookups, errors: the last ones. shards: numbers of shards that were to be loaded, compared or stored, by what became
    of them; a chunk has one for each rank and KV cache group. engine: numbers of tokens, as its engine reports them:
    needed beyond its own cache, found here, loaded, and computed to compare them. others: similar models with chunks,
    which the last lookup did not search, with their differences.
    """

    tenant: str
    request: str
    lookups: list[TrailLookup] = []
    shards: dict[str, int] = {}
    engine: dict[str, int] = {}
    errors: list[str] = []
    others: list[str] = []
