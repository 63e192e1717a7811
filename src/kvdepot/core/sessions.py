"""Lookups and the pins that they create, including lookups that wait, and those of leases. Decisions only.

Called by core/depot.py on the deciding thread. Invariant: a pin belongs to one request of one client, and is released
exactly once: after its retrieves, at the end of its session, or with its client. A lookup holds nothing before it has
its share of the pin budget (waiting.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvdepot.config import Config
from kvdepot.core.actions import Action, Reply
from kvdepot.core.admission import check_lookup, summed_below
from kvdepot.core.clients import Client, PendingLookup, PinShare, Session
from kvdepot.core.index.chunk import Chunk, is_hidden
from kvdepot.core.index.events import Failed, IndexEvent, Stored
from kvdepot.core.index.index import Index
from kvdepot.core.index.matching import Match, coming_part, coming_tail, find, match_prompt, stored_by
from kvdepot.core.leases import Leases
from kvdepot.core.tiering.lookup import TierLookup
from kvdepot.core.tiering.tiering import Tiering
from kvdepot.core.trails import Recorders
from kvdepot.core.waiting import PinBudget, WaitingLookups
from kvdepot.errors import Busy, KVDepotError
from kvdepot.protocol import wire
from kvdepot.protocol.keys import HASH_BYTES, tenant_salt

log = logging.getLogger(__name__)


class Sessions:
    """All pins of one depot."""

    def __init__(self, config: Config, index: Index, tiering: Tiering, leases: Leases, recorders: Recorders) -> None:
        self._config = config
        self._summed_below = summed_below(config.verify)
        self._chunk_tokens = config.chunk_tokens
        self._index = index
        self._tiering = tiering
        self._leases = leases
        self._counters, self._usages, self._trails, _ = recorders
        self._by_request: dict[tuple[str, str, str], list[Session]] = {}  # by tenant, request, model
        self.budget = PinBudget(index.allocator.capacity)
        self._waiting = WaitingLookups()  # for stores, or for room
        self._awaiting: dict[TierLookup, PendingLookup] = {}  # the lookup that each tier lookup serves
        self._leasing: dict[str, dict[str, PendingLookup]] = {}  # by tenant and name: leases that have not begun

    def __repr__(self) -> str:
        return f"<Sessions of {len(self._by_request)} requests>"

    def lookup(self, client: Client, number: bytes, request: wire.Lookup, now: float) -> list[Action]:
        """Reply from memory at once, or wait: while its prefix is being stored, then for what tiers have of it.

        Raises BadRequest or Busy.
        """
        return self._begin(PendingLookup(client, number, request, not request.readers), now)

    def _begin(self, pending: PendingLookup, now: float) -> list[Action]:
        client, request = pending.asker, pending.lookup
        check_lookup(request)
        # A client that suspects that an answer is lost sends the same again: it keeps its place, or its pins.
        before = self._table(pending).get(request.request)
        if before is not None and (before.asker, before.number) == (client, pending.number):
            return []
        session = client.sessions.get(request.request) if pending.lease is None else None
        as_of = pending.number, self._index.namespaces.withdrawals  # what was withdrawn is promised no more
        if session is not None and (session.number, session.withdrawals) == as_of:
            return [Reply(client.identity, session.number, session.answer)]
        is_new = pending.lease is None and session is None
        if is_new and request.pins and len(client.sessions) >= self._config.max_sessions:
            self._counters["lookups_refused"] += 1
            raise Busy(f"{len(client.sessions)} requests hold pins, the limit set by max_sessions")
        if request.hurries and before is not None and before.tier_lookup is not None:
            self._tiering.lookups.late_tiers(before.tier_lookup, now)
        actions = self._give_up(before)  # a later lookup replaces it
        if session is not None:
            self._count_no_more(session)
        match = self._match(client, request)
        pending.first = match.chunks
        if not pending.by_hand:
            client.model, client.is_engine = request.model, True
        if not (pending.by_hand or request.hurries):
            self._counters["lookups"] += 1
            self._counters["lookup_chunks"] += len(request.hashes) // HASH_BYTES
            for namespace in match.namespaces:
                namespace.lookup_chunks += len(request.hashes) // HASH_BYTES
        return [*actions, *self._reply_or_wait(pending, match, now)]

    def _reply_or_wait(self, pending: PendingLookup, match: Match, now: float) -> list[Action]:
        """match: what memory has."""
        client, request, chunks = pending.asker, pending.lookup, len(pending.lookup.hashes) // HASH_BYTES
        namespaces, pins, *_ = match
        may_wait = not request.hurries and len(namespaces) == 1
        may_grow = may_wait and pending.first < chunks
        part = None
        if may_wait and self._index.reserved:
            part = coming_part(namespaces[0], request.hashes, pending.first) if may_grow else None
            part = part or coming_tail(namespaces[0], request.tails, match)
        awaits = part is not None and self._waiting.may_wait(pending, part, now)
        has_end = match.tail is not None or not request.tails or request.tails[0].chunks < pending.first
        searches = may_wait and (may_grow or not has_end) and self._tiering.is_searchable
        if pending.lease is None and pending.share is None and (request.pins or awaits or searches):
            most, tail = pending.first, match.tail_key(request.tails)
            if awaits or searches:
                most, tail = chunks, request.tails[0].key if request.tails else b""
            if most or tail:
                share = self.budget.weigh(client, namespaces, request, most, tail)
                # Queued ones begin in their order, so that tiers bring in what is needed soonest.
                is_early = share.is_queued and (
                    self._waiting.is_behind(pending) or (searches and self._tiering.lookups.is_full)
                )
                if not is_early and self.budget.fits(share):
                    pending.share = self.budget.take(share)
                elif request.pins:
                    return self._wait_for_room(pending, share, now)
                else:
                    may_wait = False  # what memory has needs no room
        if may_wait:
            if part is not None and awaits:
                self._waiting.wait(pending, part, now)
                self._hold_prefix(pending, pins[0].chunks)
                self._table(pending)[request.request] = pending
                return []
            if searches:
                salt = tenant_salt(client.tenant, request.salt)
                found = self._tiering.look_up(namespaces[0], request, salt, pending.first, pins[0].chunks, now)
                if found is not None:
                    tier_lookup, tier_tasks = found
                    self._stop_waiting(pending)  # after the tier lookup holds the prefix
                    self._awaiting[tier_lookup] = pending
                    if tier_lookup.ended:
                        return [*tier_tasks, *self.answer(tier_lookup)]
                    pending.tier_lookup = tier_lookup
                    self._table(pending)[request.request] = pending
                    return [*tier_tasks]
        reply = self._reply(pending, match)
        self._stop_waiting(pending)  # after the pin, or the match could be evicted in between
        return [reply]

    def _table(self, pending: PendingLookup) -> dict[str, PendingLookup]:
        """The pending lookups beside it: those of its client by request, or of its tenant's leases by name."""
        asker = pending.asker
        return asker.pending if pending.lease is None else self._leasing.setdefault(asker.tenant, {})

    def _tokens(self, request: wire.Lookup) -> int:
        """Tokens per chunk of a lookup."""
        return request.chunk_tokens or self._chunk_tokens

    def _match(self, client: Client, request: wire.Lookup) -> Match:
        return match_prompt(self._index.namespaces, client.tenant, request, request.hashes, request.tails)

    # -- lookups that wait for room

    def _wait_for_room(self, pending: PendingLookup, share: PinShare, now: float) -> list[Action]:
        """Wait, or reply with what fits."""
        client, request = pending.asker, pending.lookup
        if not request.hurries and self._waiting.wait_for_room(pending, now):
            self.end(client, request.request)  # of a lookup that this one replaces
            self._table(pending)[request.request] = pending
            return []
        self._counters["shortened_lookups"] += 1
        pending.is_shortened = True
        most = min(pending.first, self.budget.affordable(share))
        found = match_prompt(self._index.namespaces, client.tenant, request, request.hashes[: most * HASH_BYTES])
        reply = self._reply(pending, found)
        self._stop_waiting(pending)
        return [reply]

    def _fill_room(self, now: float) -> list[Action]:
        """Go on with lookups for which shares that have ended leave room."""
        self.budget.has_freed = False
        actions: list[Action] = []
        blocked: set[Client] = set()
        for pending in self._waiting.for_room():
            if pending.asker not in blocked:
                match = self._match(pending.asker, pending.lookup)
                pending.first = match.chunks
                actions += self._reply_or_wait(pending, match, now)
                if pending.share is None and pending.lookup.request in pending.asker.pending:
                    blocked.add(pending.asker)
        return actions

    def retrieving(self, tenant: str, request: str, model: str) -> None:
        """A request is being retrieved, so it does not wait any more."""
        for session in self._by_request.get((tenant, request, model), ()):
            self._count_no_more(session)

    def _count_no_more(self, holder: Session | PendingLookup) -> None:
        share, holder.share = holder.share, None
        self.budget.end(share)

    # -- lookups that wait for stores

    def notice(self, events: Sequence[IndexEvent], now: float) -> list[Action]:
        """Go on with the lookups that waited for parts whose stores have ended, whether well or not."""
        parts = (event.chunk for event in events if isinstance(event, Stored | Failed))
        return [action for pending in self._waiting.stored(parts) for action in self._go_on(pending, now)]

    def next_deadline(self) -> float:
        """When `expire` must be called next."""
        if self.budget.has_freed and len(self._waiting):
            return 0.0
        return self._waiting.next_deadline()

    def expire(self, now: float) -> list[Action]:
        """Go on without what lookups have waited for long enough, and with those that have room now."""
        overdue = self._waiting.overdue(now)
        self._counters["late_lookups"] += sum(is_store for _, is_store in overdue)
        actions = [action for pending, _ in overdue for action in self._go_on(pending, now)]
        return [*actions, *self._fill_room(now)] if self.budget.has_freed else actions

    def _go_on(self, pending: PendingLookup, now: float) -> list[Action]:
        """Reply, or wait for the next store, or for tiers."""
        if pending.given_up or pending.asker.dead:
            return self._forgo(pending)
        match = self._match(pending.asker, pending.lookup)
        if not pending.by_hand:
            self._counters["awaited_chunks"] += max(0, match.chunks - pending.first)
        pending.first = match.chunks
        return self._reply_or_wait(pending, match, now)

    def _hold_prefix(self, pending: PendingLookup, chunks: list[Chunk]) -> None:
        self._index.hold(chunks)  # first, so that chunks of both stay held
        self._index.release(pending.held)
        pending.held = list(chunks)

    def _stop_waiting(self, pending: PendingLookup) -> None:
        """It waits for no store any more, if it did."""
        if self._waiting.remove(pending):
            self._hold_prefix(pending, [])
            self._forget_pending(pending)

    def _forget_pending(self, pending: PendingLookup) -> None:
        table, request = self._table(pending), pending.lookup.request
        if table.get(request) is pending:
            del table[request]

    def _forgo(self, pending: PendingLookup) -> list[Action]:
        """Reply 0 without a match: the answer is not wanted any more."""
        self._stop_waiting(pending)
        self._count_no_more(pending)
        return [] if pending.asker.dead else [Reply(pending.asker.identity, pending.number, 0)]

    # -- lookups that wait for tiers

    def answer(self, tier_lookup: TierLookup) -> list[Action]:
        """Reply from memory after a tier lookup has ended, then release what the tier lookup held."""
        pending = self._awaiting.pop(tier_lookup)
        pending.tier_lookup = tier_lookup  # also if it has ended at once
        self.budget.has_freed = True  # another tier lookup may begin, although a lease's had no share
        self._forget_pending(pending)
        actions: list[Action] = []
        if pending.given_up or pending.asker.dead:
            actions += self._forgo(pending)
        else:
            match = self._match(pending.asker, pending.lookup)
            if not pending.by_hand:
                self._counters["tier_hit_chunks"] += max(0, match.chunks - pending.first)
            actions.append(self._reply(pending, match))
        self._tiering.lookups.release(tier_lookup)  # after the pin, or the match could be evicted in between
        return actions

    def _reply(self, pending: PendingLookup, match: Match) -> Reply:
        value: object
        lookup, found, (namespaces, _, matched, _) = pending.lookup, 0, match
        try:
            value = self._answer(pending, match)
            found = matched
            if (lookup.writers or lookup.layout) and pending.lease is None:
                places = [self._places(match, lookup)] if lookup.layout else []
                value = [value, self._writers(match, lookup) if lookup.writers else [], *places]
            session = pending.asker.sessions.get(lookup.request) if pending.lease is None else None
            if session is not None:
                session.number, session.answer = pending.number, value
                session.withdrawals = self._index.namespaces.withdrawals
            if not pending.by_hand:
                self._counters["hit_chunks"] += matched
                self._trails.looked_up(pending, match, self._tokens(lookup))
                if namespaces and self._leases.bytes:
                    self._leases.count_found(namespaces[0], lookup.hashes, matched, self._tokens(lookup))
                for namespace in namespaces:
                    namespace.hit_chunks += matched
        except KVDepotError as exc:
            self._counters["errors"] += 1
            log.debug("Lookup failed: %s", exc, extra=_about(pending))
            value = exc
            self._trails.failed(pending.asker, lookup, exc)
        else:
            if log.isEnabledFor(logging.DEBUG):
                chunks = len(pending.lookup.hashes) // HASH_BYTES
                log.debug("found %d of %d chunks", matched, chunks, extra=_about(pending))
        self._count_no_more(pending)  # what its session holds counts by itself
        if not pending.by_hand:
            self._usages.look_up(pending.asker, lookup, found, self._tokens(lookup), bool(namespaces))
        return Reply(pending.asker.identity, pending.number, value)

    def give_up(self, client: Client, request: str) -> list[Action]:
        """End a pending lookup without pinning anything."""
        return self._give_up(client.pending.get(request))

    def _give_up(self, pending: PendingLookup | None) -> list[Action]:
        if pending is None:
            return []
        pending.given_up = True
        return self._end_wait(pending)

    def _end_wait(self, pending: PendingLookup) -> list[Action]:
        """Reply with what memory has, or 0 if the lookup was given up."""
        if pending.tier_lookup is not None:
            return self._end_tier_lookup(pending.tier_lookup)
        if pending.given_up or pending.asker.dead:
            return self._forgo(pending)
        reply = self._reply(pending, self._match(pending.asker, pending.lookup))
        self._stop_waiting(pending)
        return [reply]

    def _end_tier_lookup(self, tier_lookup: TierLookup) -> list[Action]:
        self._tiering.lookups.end(tier_lookup)
        return self.answer(tier_lookup)

    def _answer(self, pending: PendingLookup, match: Match) -> int:
        """Hold the matched chunks for the lookup's request or lease, and return the answer. Raises Busy."""
        if pending.lease is not None:
            return self._leases.begin(pending.lease, match.pins, match.chunks)
        self._pin(pending, match)
        return match.answer

    def _writers(self, match: Match, lookup: wire.Lookup) -> list[wire.WriterRun]:
        keys = lookup.hashes[: match.chunks * HASH_BYTES] + match.tail_key(lookup.tails)
        return stored_by(match, keys, self._index.namespaces.withdrawals)

    def _places(self, match: Match, lookup: wire.Lookup) -> wire.Places | None:
        """Where the last chunks of a match are, if an engine may copy them itself; the same as `Transfers.retrieve`
        allows."""
        is_plain = len(match.namespaces) == 1 and match.namespaces[0].is_simple and match.tail is None
        size = match.namespaces[0].sizes.get(0, 0) if is_plain else 0
        if not (size and match.chunks and lookup.pins) or self._config.verify == "always":
            return None
        namespace, most = match.namespaces[0], min(wire.MAX_PLACES, wire.MAX_PLACED_BYTES // size)
        first, ranks = max(0, match.chunks - most), []
        hashes = lookup.hashes[first * HASH_BYTES : match.chunks * HASH_BYTES]
        for rank in range(namespace.world_size):
            chunks = find(namespace, rank, hashes)
            shards = [chunk.shards[rank] for chunk in chunks if chunk is not None]
            is_right = all(shard.size == size for shard in shards)
            if len(shards) < len(chunks) or namespace.layouts.get(rank) != lookup.layout or not is_right:
                return None
            sums = (hashes[at] < self._summed_below for at in range(0, len(hashes), HASH_BYTES))
            both = zip(shards, sums, strict=True)
            ranks.append([wire.Place(each.extents, checksum=each.checksum * summed) for each, summed in both])
        return wire.Places(self._index.namespaces.withdrawals, first, size, ranks)

    def _pin(self, pending: PendingLookup, match: Match) -> None:
        """Pin the matched chunks, if the lookup wants that. Raises Busy if max_pins would be exceeded."""
        client, request, pins = pending.asker, pending.lookup, match.pins if match.answer else []
        if not request.pins:
            self._index.use([chunk for pin in pins for chunk in pin.chunks])
            self.end(client, request.request)  # of a lookup that this one replaces
            return
        old = client.sessions.get(request.request)
        parts = max((pin.parts for pin in pins), default=0)
        if client.pins - (old.parts if old is not None else 0) + parts > self._config.max_pins:
            self._counters["pins_refused"] += 1
            raise Busy(f"{client.pins} chunks are pinned; {parts} more would exceed max_pins")
        chunks = [chunk for pin in pins for chunk in pin.chunks]
        self._index.hold(chunks)  # before the old pin ends, so that shared chunks stay held
        if old is None:
            self._index.use(chunks)
        if old is not None:
            self.end(client, request.request)
        if chunks:
            readers = max(1, request.readers)
            tokens = match.chunks * self._tokens(request)
            session = Session(client, request.request, request.model, chunks, parts, tokens, parts * readers, readers)
            share, pending.share = pending.share, None
            if share is None or share.chunks != match.chunks + (match.tail is not None) or match.tail:
                self.budget.end(share)
                tail = match.tail_key(request.tails)
                share = self.budget.take(self.budget.weigh(client, match.namespaces, request, match.chunks, tail))
            session.share, session.reports = share, request.reports
            client.pins += parts
            client.sessions[request.request] = session
            self._by_request.setdefault((client.tenant, request.request, request.model), []).append(session)

    def end(self, client: Client, request: str) -> None:
        """Release a request's pins; does nothing if it has none."""
        session = client.sessions.pop(request, None)
        if session is None:
            return
        client.pins -= session.parts
        self._count_no_more(session)
        # Only retrieves that name their request count here.
        retrieved = min(session.retrieved // session.readers, session.parts)
        if retrieved and not session.reports:
            tokens = session.tokens * retrieved // session.parts
            self._usages.count(client.tenant, session.model, reused=tokens)
        sessions = self._by_request[client.tenant, request, session.model]
        sessions.remove(session)
        if not sessions:
            del self._by_request[client.tenant, request, session.model]
        self._index.release(session.chunks)

    def count_retrieved(self, tenant: str, request: str, model: str, keys: int, done: int) -> None:
        """Count `done` loaded keys of a request, and `keys` keys that it needs no more; the last of these ends its
        pins."""
        for session in list(self._by_request.get((tenant, request, model), ())):
            session.remaining -= keys
            session.retrieved += done
            if session.remaining <= 0:
                self.end(session.client, request)

    def leave(self, client: Client) -> list[Action]:
        """Release all pins and pending lookups of a client that is gone."""
        actions = [action for request in list(client.pending) for action in self.give_up(client, request)]
        for request in list(client.sessions):
            self.end(client, request)
        return actions

    def stop(self, clients: list[Client]) -> list[Action]:
        """Reply to every pending lookup with what memory has."""
        tables = [*(client.pending for client in clients), *self._leasing.values()]
        waiting = [pending for table in tables for pending in table.values()]
        return [action for each in waiting for action in self._end_wait(each)]

    # -- leases

    def lease(self, client: Client, number: bytes, request: wire.Lease, now: float) -> list[Action]:
        """Begin a lease with what a lookup finds. Raises BadRequest or Busy."""
        lease = self._leases.admit(client.tenant, request, now)
        if not lease.holds:  # so it needs nothing from tiers
            found = match_prompt(self._index.namespaces, client.tenant, request, request.hashes)
            matched = self._leases.begin(lease, found.pins, found.chunks)
            return [*self.give_up_lease(client, request.name), Reply(client.identity, number, matched)]
        lookup = wire.Lookup(
            request.model, request.world_size, request.blocks_in_chunk, request.name, 1, request.hashes, True,
            request.salt, request.chunk_tokens,
        )  # fmt: skip
        return self._begin(PendingLookup(client, number, lookup, True, lease), now)

    def give_up_lease(self, client: Client, name: str) -> list[Action]:
        """End the lookup of a lease that has not begun, if there is one; its reply is 0."""
        return self._give_up(self._leasing.get(client.tenant, {}).get(name))

    def forget(self, now: float) -> list[Action]:
        """Go on with lookups that wait for the store of a forgotten chunk: no other store may begin before."""
        vain = [pending for pending, part in self._waiting.all() if is_hidden(part)]
        return [action for pending in vain for action in self._go_on(pending, now)]


def _about(pending: PendingLookup) -> dict[str, str]:
    """Log fields of a lookup."""
    return {"client": pending.asker.called, "request": pending.lookup.request}
