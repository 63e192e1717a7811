"""Leases: which chunks to keep, or to drop, and until when. Plain data of messages."""

from __future__ import annotations

import msgspec

KINDS = ("retain", "prefetch", "expire")
"""retain: the chunks are not evicted. prefetch: the same, for chunks that were loaded from tiers in advance. expire: no
chunk is held, and all are dropped when the lease ends."""
NORMAL = 50
"""The priority of a lease that says none, and the highest that a request may ask for by default."""
MOST_PRIORITY = 100
HINT_S = 3600
"""Seconds for which a request's hints keep chunks, at most, by default: KV unused for an hour is not worth memory."""
MOST_LEASES = 1 << 14
MOST_HASHES = 1 << 22
"""Hashes that all leases keep, to grow or to drop their chunks: 128 MiB."""
MOST_LISTED = 1000


class LeaseStatus(msgspec.Struct, frozen=True):
    """One lease. chunks, bytes: what it holds now. ends_s: seconds until it ends; None: it has no end."""

    name: str
    tenant: str
    kind: str
    model: str
    priority: int
    chunks: int
    bytes: int
    ends_s: float | None
