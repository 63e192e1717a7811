"""How many requests each client makes, and when the server should rather wait than take more of them.

Called by core/connections.py for every message. No sockets or clocks. The one law: what one client sends must not cost
others.

ZeroMQ gives each connection its turn, so a flood costs the others one message a turn, and the processors. Hence two
bounds. What is beyond `max_rate` in a second is refused unread, and who goes on like that is left a hundredth of it,
until it has kept to that for a second. And where only such clients have anything for us, we sleep for an instant:
their messages wait, in the end in their own process, and the processors are free for others.
"""

from __future__ import annotations

__all__ = ["Rates"]

_UNIT_BYTES = 4096
"""A message counts once, and once more for every so many bytes."""
_LEFT = 100
"""Who floods may send a part in so many."""


class Rates:
    """Requests of all clients in the current second."""

    def __init__(self, most: int) -> None:
        """most: requests a second and client."""
        self._most = most
        self._seen: dict[bytes, int] = {}
        self._flooding: set[bytes] = set()
        self._run = 0  # messages refused with none of another client in between

    def tick(self) -> None:
        """Another second begins."""
        self._flooding = {client for client, seen in self._seen.items() if seen > self._allowed(client)}
        self._seen.clear()

    def _allowed(self, client: bytes) -> int:
        return self._most // _LEFT if client in self._flooding else self._most

    def count(self, client: bytes, size: int) -> bool:
        """A message of `size` bytes has come: whether to serve it."""
        return self.charge(client, 1 + size // _UNIT_BYTES)

    def charge(self, client: bytes, requests: int) -> bool:
        """A message costs as much as so many requests (more): whether to serve it."""
        seen = self._seen[client] = self._seen.get(client, 0) + requests
        if seen > self._most or (self._flooding and seen > self._allowed(client)):
            self._flooding.add(client)
            self._run += 1
            return False
        self._run = 0
        return True

    def only_floods(self) -> bool:
        """Whether each client that floods has had a turn, and nobody else had anything to say."""
        if self._run <= len(self._flooding):
            return False
        self._run = 0
        return True
