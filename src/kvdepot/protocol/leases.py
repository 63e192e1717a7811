"""Leases, which keep or drop the chunks of a prompt: their kinds, limits and status. Plain data of messages."""

from __future__ import annotations

import msgspec

KINDS = ("retain", "prefetch", "expire")
"""retain: chunks are not evicted. prefetch: the same, for chunks that were loaded from tiers in advance. expire: chunks
are not held, and are dropped when the lease ends."""
NORMAL = 50
"""The priority of a lease without one, and the highest priority that a request may ask for by default."""
MOST_PRIORITY = 100
HINT_S = 3600
"""The most seconds, by default, for which a request's hints keep chunks: KV unused for an hour is not worth memory."""
MOST_LEASES = 1 << 14
MOST_HASHES = 1 << 22
"""The most hashes that all leases together keep, to grow or to drop their chunks: 128 MiB."""
MOST_LISTED = 1000


class LeaseStatus(msgspec.Struct, frozen=True):
    """One lease. chunks, bytes: the chunks that it holds now. ends_s: seconds until it ends; None: never."""

    name: str
    tenant: str
    kind: str
    model: str
    priority: int
    chunks: int
    bytes: int
    ends_s: float | None
