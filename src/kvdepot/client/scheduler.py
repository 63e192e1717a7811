"""An engine's scheduler as a client: lookups (how much of a prompt is cached) and sessions, no bytes.

It takes hashes of chunks, never tokens. Invariants: a failed lookup is `Unanswered`, never a miss; no method waits for
the server, but `wait_lookup`, which has a timeout.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from kvdepot.client.calls import read_hit
from kvdepot.client.socket import Client, MessagingFuture
from kvdepot.client.transfer import Operation, PromptChunks, ShardSpec
from kvdepot.errors import DeadlineExceeded, KVDepotError, Unavailable, UnknownRequest
from kvdepot.protocol import wire
from kvdepot.protocol.keys import HASH_BYTES
from kvdepot.protocol.status import AnswersStatus

log = logging.getLogger(__name__)

LOOKUP_S = 1.0
"""A lookup without an answer after this time, plus the deadline of the server's tiers, counts as a miss for now; a
queued lookup has no deadline."""


class Pending(msgspec.Struct, frozen=True):
    """The lookup is under way."""


class Cached(msgspec.Struct, frozen=True):
    """tokens: tokens from the prompt's start that the server has, in whole chunks; 0: a miss. tail: number of the
    longest tail that it has. writers: who has stored these chunks. held: places of the last chunks in the arena of the
    server's run `incarnation`, valid as long as the request has its session."""

    tokens: int
    tail: int | None = None
    writers: tuple[wire.WriterRun, ...] = ()
    held: wire.Places | None = None
    incarnation: bytes = b""


class Unanswered(msgspec.Struct, frozen=True):
    """The lookup failed, so it is not known what the server has; engines treat it as a miss."""

    error: KVDepotError


LookupOutcome: TypeAlias = Pending | Cached | Unanswered
_PENDING = Pending()


@dataclass(slots=True, eq=False)
class SubmittedLookup:
    """One request's lookup, and its answer as far as it is known."""

    message: wire.Lookup
    began_s: float
    heard: int  # `Client.heard` when it was sent
    is_second: bool = False  # it replaced a lookup whose caller was held back
    future: MessagingFuture[int] = field(init=False)
    incarnation: bytes = b""  # of the server that has answered
    hit: wire.Hit = wire.MISS  # the answer
    outcome: Cached | Unanswered | None = None  # None: pending, or the caller has not asked since it ended
    was_held: bool = False  # its caller was held back


class SchedulerClient:
    """Lookups, and the sessions that hold the matched chunks. Used by one thread."""

    def __init__(self, client: Client, spec: ShardSpec, reports: bool = False) -> None:
        """client: closed with this one. spec: its rank does not matter. reports: see wire.Lookup; then lookups
        are queued: the caller looks up when a request comes, and hurries the lookups that it cannot wait for."""
        self._reports = reports
        self.client = client
        self.spec = spec
        self.writers, self.layout = False, b""  # as in wire.Lookup, for `submit`
        self.speed = 0.0  # tokens per second that the engine computes, for `submit_lookup`; 0.0: unknown
        self.place = 0  # as in wire.Lookup, for `submit`
        self.answers: AnswersStatus | None = None  # what `end_session` tells the server of the engine's answers
        self.watch: Callable[[Operation], None] | None = None  # `check_lookup` calls it for each lookup that has ended
        self._lookups: dict[str, SubmittedLookup] = {}

    def submit_lookup(
        self, request_id: str, hashes: bytes, readers: int | None = None, chained: bool = True, salt: bytes = b""
    ) -> None:
        """Look up a prompt's chunk hashes (32 bytes each), unless the request already has a lookup. Never blocks.

        Matched chunks are pinned for the request until they are retrieved or its session ends. readers: how many ranks
        will retrieve each chunk; None: all. chained, salt: see wire.Lookup.
        """
        self.submit(request_id, PromptChunks(self.spec, hashes, salt, chained), readers)

    def submit(self, request_id: str, prompt: PromptChunks, readers: int | None = None) -> None:
        """As `submit_lookup`, for a prompt that may have tails."""
        if request_id not in self._lookups:
            message = msgspec.structs.replace(
                prompt.lookup(request_id, readers or self.spec.world_size), reports=self._reports, speed=self.speed,
                queued=self._reports, writers=self.writers, layout=self.layout, place=self.place,
            )  # fmt: skip
            self._ask(request_id, SubmittedLookup(message, time.monotonic(), self.client.heard))

    def _ask(self, request_id: str, lookup: SubmittedLookup) -> None:
        client = self.client
        self._lookups[request_id] = lookup
        if not (lookup.message.hashes or lookup.message.tails):
            lookup.future, lookup.outcome = MessagingFuture.resolved(0), Cached(0)
            return

        welcomes = client.welcomes

        def take(value: object) -> int:
            lookup.incarnation, lookup.hit = client.incarnation, read_hit(value, lookup.message)
            if welcomes != client.welcomes:
                # The connection was lost meanwhile, so the lookup was sent twice, and the second ends this session.
                lookup.hit = msgspec.structs.replace(lookup.hit, places=None)
            return lookup.hit.chunks

        lookup.future = client.ask(lookup.message, take, deadline_s=None if lookup.message.queued else LOOKUP_S)

    def check_lookup(self, request_id: str) -> LookupOutcome:
        """The outcome of the request's lookup. Never blocks. Raises UnknownRequest where there is none."""
        lookup = self._lookups.get(request_id)
        if lookup is None:
            raise UnknownRequest(f"no lookup was submitted for request {request_id[:64]!r}")
        if lookup.outcome is not None:
            return lookup.outcome
        if not lookup.future.query():
            return _PENDING
        found, error = 0, None
        try:
            found, hit = lookup.future.result(), lookup.hit
            run = lookup.incarnation if hit.places is not None else b""
            lookup.outcome = Cached(found * self.spec.chunk_tokens, hit.tail, hit.writers, hit.places, run)
        except KVDepotError as exc:
            log.info("lookup of %s counts as a miss: %s", request_id[:64], exc)
            lookup.outcome, error = Unanswered(exc), exc
        if self.watch is not None:
            took_s, chunks = time.monotonic() - lookup.began_s, len(lookup.message.hashes) // HASH_BYTES
            self.watch(Operation("lookup", [request_id], took_s, chunks, found, error=error))
        return lookup.outcome

    def wait_lookup(self, request_id: str, timeout_s: float) -> LookupOutcome:
        """Like `check_lookup`, but waits up to `timeout_s` for a pending answer, and repeats lookups. Use it if the
        caller can still use a late answer.

        A lookup is repeated if a server is heard that has not answered it, or if the server that answered it has been
        replaced; once, then it is Unanswered until the next call. A server that is gone or hangs is not heard, so its
        callers wait LOOKUP_S and the tiers' deadline once, and then not at all. But while another server starts in its
        place (`Client.is_returning`), the outcome is Pending until that server has answered the lookup again.
        """
        client, outcome = self.client, self.check_lookup(request_id)
        lookup = self._lookups[request_id]
        was_sent = lookup.message.hashes or lookup.message.tails
        if outcome is not _PENDING and was_sent and not (lookup.was_held and lookup.is_second):
            client.pump()
            is_outdated = lookup.incarnation not in (b"", client.incarnation)
            was_silent = isinstance(outcome, Unanswered) and isinstance(outcome.error, Unavailable | DeadlineExceeded)
            is_returning = was_silent and client.is_returning()
            if is_outdated or (was_silent and lookup.heard != client.heard):
                is_second = lookup.was_held and not is_returning
                lookup, outcome = SubmittedLookup(lookup.message, time.monotonic(), client.heard, is_second), _PENDING
                self._ask(request_id, lookup)
            elif is_returning:
                lookup.was_held = True
                return _PENDING
        if outcome is _PENDING:
            if client.is_welcomed:
                client.wait(lookup.future.is_done, timeout_s)
            outcome = self.check_lookup(request_id)
        lookup.was_held = outcome is _PENDING
        return outcome

    def hurry_lookup(self, request_id: str) -> None:
        """Have a pending lookup answered at once, with what the server has in memory. Never blocks."""
        lookup = self._lookups.get(request_id)
        if lookup is not None and lookup.outcome is None and not lookup.future.query():
            message = msgspec.structs.replace(lookup.message, hurries=True, queued=False)
            self._ask(request_id, SubmittedLookup(message, lookup.began_s, self.client.heard))
            self.client.pump()

    def known_tokens(self, request_id: str) -> int:
        """Tokens of the request's prompt that the current server has answered to have; 0 without a lookup. Never
        blocks."""
        lookup = self._lookups.get(request_id)
        if lookup is None:
            return 0
        outcome = self.check_lookup(request_id)
        is_current = lookup.incarnation == self.client.incarnation
        return outcome.tokens if isinstance(outcome, Cached) and is_current else 0

    def forget_lookup(self, request_id: str) -> None:
        """Forget the request's lookup on this side; unknown ids are fine."""
        self._lookups.pop(request_id, None)

    def end_session(
        self,
        request_id: str,
        saved_tokens: int = 0,
        saved_s: float = 0.0,
        asked: wire.Asked = wire.NOTHING_ASKED,
        copied: tuple[int, int] = (0, 0),
    ) -> None:
        """End the request's session, which releases the pins that it still holds. Never blocks. copied: shards, and
        their bytes. Other arguments: see wire.EndSession."""
        # No deadline: a live server must get it, however late.
        report = wire.EndSession(request_id, saved_tokens, saved_s, self.spec.model, asked, self.answers, *copied)
        self.client.ask(report, deadline_s=None)
        self.client.pump()

    def describe(self, parent: bytes, hashes: bytes, tokens: bytes) -> None:
        """Give the server the token ids of chunks, if it publishes them for routers; see wire.Describe. Never
        blocks."""
        if self.client.welcome.wants_tokens:
            self.client.ask(wire.Describe(parent, hashes, tokens, self.spec.chunk_tokens))

    def close(self) -> None:
        """Close the connection, which releases all pins of this engine. Safe twice."""
        self.client.close()
