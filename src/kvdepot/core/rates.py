"""The rate limit: counts each client's requests, and tells the loop when to pause.

Called by core/connections.py for every message, on the deciding thread. No sockets or clocks. Invariant: a client that
floods the server does not delay others.

ZeroMQ receives from connections in turn, so a flood delays each other client by one message at most, but it uses CPU
time. Hence two limits. Requests beyond `max_rate` in a second are refused without being decoded; a client that exceeds
it is limited to a hundredth, until it has kept to that for a second. And if only such clients have sent anything, the
loop pauses briefly: their messages queue up, eventually in their own process, and the CPU is free for others.
"""

from __future__ import annotations

__all__ = ["Rates"]

_UNIT_BYTES = 4096
"""A message counts as one request, plus one for every this many bytes."""
_LEFT = 100
"""A flooding client's limit is `max_rate` divided by this."""


class Rates:
    """Counts of all clients' requests in the current second."""

    def __init__(self, most: int) -> None:
        """most: requests per second and client."""
        self._most = most
        self._seen: dict[bytes, int] = {}
        self._flooding: set[bytes] = set()
        self._run = 0  # messages refused in a row, of any client

    def tick(self) -> None:
        """Begin a new second."""
        self._flooding = {client for client, seen in self._seen.items() if seen > self._allowed(client)}
        self._seen.clear()

    def _allowed(self, client: bytes) -> int:
        return self._most // _LEFT if client in self._flooding else self._most

    def count(self, client: bytes, size: int) -> bool:
        """Count a message of `size` bytes; returns whether to serve it."""
        return self.charge(client, 1 + size // _UNIT_BYTES)

    def charge(self, client: bytes, requests: int) -> bool:
        """Count this many requests for a client; returns whether to serve its message."""
        seen = self._seen[client] = self._seen.get(client, 0) + requests
        if seen > self._most or (self._flooding and seen > self._allowed(client)):
            self._flooding.add(client)
            self._run += 1
            return False
        self._run = 0
        return True

    def only_floods(self) -> bool:
        """Whether more messages in a row were refused than there are flooding clients: nobody else is sending."""
        if self._run <= len(self._flooding):
            return False
        self._run = 0
        return True
