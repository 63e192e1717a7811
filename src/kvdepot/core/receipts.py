"""What leases cost: one tally per lease, and one per tenant and kind. Plain data on the deciding thread.

Used by core/leases.py. A cost is bytes held, times seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Tally"]


@dataclass(slots=True)
class Tally:
    """Costs so far."""

    since: float
    """Until when `byte_seconds` is complete."""
    bytes: int = 0
    """Held now."""
    byte_seconds: float = 0.0

    def hold(self, size: int, now: float) -> None:
        """Hold `size` bytes more from now on, or less if negative."""
        self.byte_seconds = self.cost(now)
        self.since = now
        self.bytes += size

    def cost(self, now: float) -> float:
        """Bytes held, times seconds, until now."""
        return self.byte_seconds + self.bytes * max(0.0, now - self.since)
