"""Carries out the hints of requests (hints.py): leases of their chunks, and the ends of leases, as messages.

Used by scheduler.py, on the engine's thread. The server lets a lease grow while its chunks are being stored, so leases
wait for nothing; removals wait for the request's stores. Invariant: no hint, and no answer to one, fails a request or
waits for the server.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvdepot.client.scheduler import SchedulerClient
from kvdepot.client.socket import MessagingFuture
from kvdepot.client.transfer import LeaseTerms, PromptChunks
from kvdepot.errors import KVDepotError
from kvdepot.integrations.vllm.hints import Hints, Limits, read_hints
from kvdepot.integrations.vllm.requests import Tracked
from kvdepot.integrations.vllm.stats import KVDepotStats
from kvdepot.protocol import wire
from kvdepot.protocol.keys import HASH_BYTES

if TYPE_CHECKING:
    from vllm.v1.request import Request

log = init_logger(__name__)

_MOST_LOGGED = 16
"""The most reasons that are logged: callers write parts of these texts, so their number has no other bound."""


class RequestLeases:
    """The leases of one engine's requests."""

    def __init__(self, depot: SchedulerClient, stats: KVDepotStats) -> None:
        self._depot = depot
        self._stats = stats
        self._removals: dict[str, list[wire.Request]] = {}  # by finished request whose stores have not ended
        self._asked: deque[MessagingFuture[object]] = deque()  # answers to come, in the order of their requests
        self._logged: set[str] = set()

    def read(self, request: Request) -> Hints:
        """The request's hints. Refused ones are logged and counted."""
        welcome = self._depot.client.welcome
        hints, reason = read_hints(request, Limits(welcome.max_hint_s, welcome.max_hint_priority))
        if reason:
            self._stats.add("refused_hints")
            rest = "" if hints.stores else ", but it is not stored"
            self._warn(reason, f"request {request.request_id[:64]!r}: its hints are ignored{rest}: {reason}")
        return hints

    def request_arrived(self, tracked: Tracked) -> None:
        """A request has been looked up: load what tiers have of its prompt, and keep it."""
        self._lease(tracked, ("prefetch",), self._prompt(tracked))

    def prompt_stored(self, tracked: Tracked) -> None:
        """A request's prompt is stored, and its pins are about to end: without a lease, the prompt could be evicted
        while the request decodes."""
        self._lease(tracked, ("retain",), self._prompt(tracked))

    def request_ending(self, tracked: Tracked) -> None:
        """A request has finished, and its pins are about to end."""
        self._lease(tracked, ("retain", "expire"), self._whole(tracked))

    def request_ended(self, tracked: Tracked) -> None:
        """A request's pins have ended. Its removals wait for its stores, or those would bring chunks back."""
        releases, request_id = tracked.hints.releases, tracked.request.request_id
        if not releases:
            return
        # The request's chunks first: they are behind those that the session's lease holds.
        removals: list[wire.Request] = []
        if hashes := self._whole(tracked):
            removals.append(PromptChunks(self._depot.spec, hashes, tracked.salt).drop())
        self._removals[request_id] = [*removals, *(wire.EndLease(name, drops=True) for name in releases)]
        if not tracked.stores_open:
            self.stores_ended([request_id])

    def stores_ended(self, request_ids: Iterable[str]) -> None:
        """Workers have ended all stores of these finished requests."""
        for request_id in request_ids if self._removals else ():
            for removal in self._removals.pop(request_id, ()):
                self._ask(removal)

    def check_answers(self) -> None:
        """Log and count what the server has refused. Called in every step."""
        while self._asked and self._asked[0].query():
            try:
                self._asked.popleft().result()
            except KVDepotError as exc:
                self._failed(exc)

    # -- inside

    def _prompt(self, tracked: Tracked) -> bytes:
        return self._hashes(tracked, tracked.request.num_prompt_tokens)

    def _whole(self, tracked: Tracked) -> bytes:
        """The hashes of all chunks that the request may have stored: of its prompt and, if some were stored, of its
        decoded tokens without the last, which was never computed."""
        request = tracked.request
        decoded = request.num_tokens - 1 if tracked.has_stored_output else 0
        return self._hashes(tracked, max(request.num_prompt_tokens, decoded))

    def _hashes(self, tracked: Tracked, tokens: int) -> bytes:
        """The hashes of the chunks in the request's first `tokens` tokens; empty if it has hints for none."""
        hints = tracked.hints
        if not tracked.is_cached or not (hints.leases or hints.releases):
            return b""
        try:
            chain = tracked.prompt.hash()
        except Exception as exc:  # noqa: BLE001 - tokens and items come from a caller: costs its hints, never the engine
            self._failed(exc)
            return b""
        return bytes(chain.hashes[: tokens // chain.chunk_size * HASH_BYTES])

    def _lease(self, tracked: Tracked, kinds: tuple[str, ...], hashes: bytes) -> None:
        for hint in tracked.hints.leases if hashes else ():
            if hint.kind in kinds:
                kind, name, ttl_s, priority = hint
                prompt = PromptChunks(self._depot.spec, hashes, tracked.salt)
                self._ask(prompt.lease(name, LeaseTerms(kind, ttl_s, priority)))

    def _ask(self, message: wire.Request) -> None:
        try:
            self._asked.append(self._depot.client.ask(message))
        except (KVDepotError, ValueError) as exc:  # ValueError: a name that is not valid text
            self._failed(exc)

    def _failed(self, exc: Exception) -> None:
        self._stats.add("lease_errors")
        self._warn(type(exc).__name__, f"a lease failed; more such failures are counted, not logged: {exc}")

    def _warn(self, reason: str, text: str) -> None:
        if reason not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(reason)
            log.warning("%s", text)
