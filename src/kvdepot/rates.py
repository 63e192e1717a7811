"""How many requests each client makes, and when the server should rather wait than take more of them.

Called by server.py for every message. No sockets or clocks. The one law: what one client sends must not cost others.

ZeroMQ gives each connection its turn, so a flood costs the others one message a turn, and the processors. Hence two
bounds: what is beyond `max_rate` in a second is refused unread; and where only clients that send at more than twice
that rate have anything for us, we sleep for an instant. Their messages wait meanwhile, in the end in their own process,
and the processors are free for others.
"""

from __future__ import annotations

__all__ = ["Rates"]

_UNIT_BYTES = 4096
"""A message counts once, and once more for every so many bytes."""
_BURST = 64
"""So many requests at once are never too many."""


class Rates:
    """Requests of all clients in the current second."""

    def __init__(self, most: int) -> None:
        """most: requests a second and client."""
        self._most = most
        self._seen: dict[bytes, int] = {}
        self._fast: set[bytes] = set()  # clients that are ahead of twice their rate
        self._run = 0  # messages of such clients, with none of another in between
        self._begun = 0.0

    def start(self, now: float) -> None:
        """Another second begins."""
        self._begun = now
        self._seen.clear()
        self._fast.clear()

    def count(self, client: bytes, size: int, now: float) -> bool:
        """A message of `size` bytes has come: whether to serve it."""
        seen = self._seen[client] = self._seen.get(client, 0) + 1 + size // _UNIT_BYTES
        if seen > _BURST + 2 * self._most * (now - self._begun) or seen > self._most:
            self._fast.add(client)
            self._run += 1
        else:
            self._run = 0
        return seen <= self._most

    def only_fast(self) -> bool:
        """Whether each of the fast clients has had a turn, and nobody else had anything to say."""
        if self._run <= len(self._fast):
            return False
        self._run = 0
        return True
