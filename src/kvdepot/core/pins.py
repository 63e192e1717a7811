"""Pins: the chunks that requests hold between the answer to their lookup and their end.

Used by core/lookups/lookups.py, core/transfers.py and core/depot.py on the deciding thread. Invariant: a pin belongs to
one request of one client (its session), and is released exactly once: after its retrieves, at the end of its session,
or with its client.
"""

from __future__ import annotations

from kvdepot.config import Config
from kvdepot.core.clients import Client, PinShare, Session
from kvdepot.core.index.index import Index
from kvdepot.core.index.matching import Match
from kvdepot.core.lookups.budget import PinBudget
from kvdepot.core.usage import Usages
from kvdepot.errors import Busy
from kvdepot.protocol import wire
from kvdepot.protocol.counters import Counters


class Pins:
    """All pins of one depot. budget: limits the bytes that requests pin before their engines begin them."""

    def __init__(self, config: Config, index: Index, counters: Counters, usages: Usages) -> None:
        self.budget = PinBudget(index.allocator.capacity)
        self._most, self._chunk_tokens = config.max_pins, config.chunk_tokens
        self._index = index
        self._counters = counters
        self._usages = usages
        self._by_request: dict[tuple[str, str, str], list[Session]] = {}  # by tenant, request, model

    def pin(self, client: Client, request: wire.Lookup, match: Match, share: PinShare | None) -> Session | None:
        """Hold the chunks of a match in place of those that the request holds; returns its session, None without a
        match.

        share: the lookup's share of the budget; the session takes it over, or it ends. Raises Busy if max_pins would be
        exceeded, and then changes nothing.
        """
        old = client.sessions.get(request.request)
        chunks = [chunk for pin in match.pins for chunk in pin.chunks]
        parts = max([pin.parts for pin in match.pins], default=0)
        if client.pins - (old.parts if old is not None else 0) + parts > self._most:
            self._counters["pins_refused"] += 1
            raise Busy(f"{client.pins} chunks are pinned; {parts} more would exceed max_pins")
        if not chunks:
            self.budget.end(share)
            self.end(client, request.request)
            return None
        self._index.hold(chunks)  # before the old pin ends, so that shared chunks stay held
        if old is None:
            self._index.use(chunks)
        else:
            self.end(client, request.request)
        if share is None or share.chunks != match.chunks + (match.tail is not None) or match.tail:
            self.budget.end(share)
            tail = match.tail_key(request.tails)
            share = self.budget.take(self.budget.weigh(client, match.namespaces, request, match.chunks, tail))
        readers = request.readers or 1
        tokens = match.chunks * (request.chunk_tokens or self._chunk_tokens)
        session = Session(
            client, request.request, request.model, chunks, parts, tokens, parts * readers, readers,
            share=share, reports=request.reports,
        )  # fmt: skip
        client.pins += parts
        client.sessions[request.request] = session
        self._by_request.setdefault((client.tenant, request.request, request.model), []).append(session)
        return session

    def retrieving(self, tenant: str, request: str, model: str) -> None:
        """Note that a request's first retrieve has begun, so that it waits no more."""
        for session in self._by_request.get((tenant, request, model), ()):
            self.count_no_more(session)

    def count_no_more(self, session: Session) -> None:
        """Take a session's bytes out of the budget, because its request waits no more."""
        share, session.share = session.share, None
        self.budget.end(share)

    def count_retrieved(self, tenant: str, request: str, model: str, keys: int, done: int) -> None:
        """Count `done` loaded keys of a request, and `keys` keys that it needs no more; after the last one, its pins
        end."""
        for session in list(self._by_request.get((tenant, request, model), ())):
            session.remaining -= keys
            session.retrieved += done
            if session.remaining <= 0:
                self.end(session.client, request)

    def end(self, client: Client, request: str) -> None:
        session = client.sessions.pop(request, None)
        if session is None:
            return
        client.pins -= session.parts
        self.count_no_more(session)
        # Retrieves that do not name their request are not counted.
        retrieved = min(session.retrieved // session.readers, session.parts)
        if retrieved and not session.reports:
            tokens = session.tokens * retrieved // session.parts
            self._usages.count(client.tenant, session.model, reused=tokens)
        sessions = self._by_request[client.tenant, request, session.model]
        sessions.remove(session)
        if not sessions:
            del self._by_request[client.tenant, request, session.model]
        self._index.release(session.chunks)

    def leave(self, client: Client) -> None:
        for request in list(client.sessions):
            self.end(client, request)
