"""Leases: which chunks to keep, or to drop, and until when; and receipts, which say what a lease cost and saved.

Plain data, used in messages, status and the core.
"""

from __future__ import annotations

import msgspec

__all__ = ["HINT_S", "KINDS", "MOST_LEASES", "MOST_PRIORITY", "NORMAL", "Receipt", "Sum"]

KINDS = ("retain", "prefetch", "expire")
"""retain: the chunks are not evicted. prefetch: the same, for chunks that were loaded from tiers in advance. expire: no
chunk is held, and all are dropped when the lease ends."""
NORMAL = 50
"""The priority of a lease that says none, and the highest that a request may ask for by default."""
MOST_PRIORITY = 100
HINT_S = 3600
"""How long a request may have its chunks kept, by default: KV that nobody has used for an hour is not worth memory."""
MOST_LEASES = 1 << 14
"""Leases of one server."""


class Receipt(msgspec.Struct, frozen=True):
    """One lease and what it has cost and saved so far.

    ends_s: seconds until it ends; None: it has no end, or has ended. ended: why it ended; empty: it has not.
    byte_seconds: bytes held, times seconds. spared_bytes: of chunks that would have been evicted without it.
    saved_tokens, saved_s: what engines loaded of those afterwards, and the prefill time that this saved (estimated from
    what engines report; 0 if none does).
    """

    name: str
    tenant: str
    kind: str
    model: str
    priority: int
    chunks: int
    bytes: int
    age_s: float
    ends_s: float | None
    byte_seconds: float
    spared_bytes: int
    saved_tokens: int
    saved_s: float
    ended: str = ""


class Sum(msgspec.Struct, frozen=True):
    """All leases of one tenant and kind since the server's start; leases and bytes: now."""

    tenant: str
    kind: str
    leases: int
    bytes: int
    begun: int
    byte_seconds: float
    spared_bytes: int
    saved_tokens: int
    saved_s: float
