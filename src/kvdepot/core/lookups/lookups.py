"""All lookups in progress. Each waits for what phases.py says, and is answered with what memory then has.

Called by core/depot.py on the deciding thread, also for the lookups of leases. Invariants: a search is in one phase at
a time, which `_enter` and `_close` change. Every request is answered once, unless its client is dead. With its answer,
a search gives up its holds, its want and its share of the pin budget, unless its session takes them over.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence

from kvdepot.config import Config
from kvdepot.core.actions import Action, Reply
from kvdepot.core.admission import summed_below
from kvdepot.core.clients import Client, PinShare
from kvdepot.core.index.chunk import Chunk, Namespace, is_hidden, is_there
from kvdepot.core.index.events import Failed, IndexEvent, Stored
from kvdepot.core.index.index import Index
from kvdepot.core.index.matching import Match, coming_part, coming_tail, match_prompt
from kvdepot.core.index.wants import Want
from kvdepot.core.leases import Leases
from kvdepot.core.lookups.answers import hit_of
from kvdepot.core.lookups.phases import MOST_QUEUED_HASHES, NEVER, PATIENT, SearchPhase, table
from kvdepot.core.lookups.search import Search
from kvdepot.core.pins import Pins
from kvdepot.core.tiering.loading import TierSearch
from kvdepot.core.tiering.tiering import Tiering
from kvdepot.core.trails import Recorders
from kvdepot.errors import Busy, KVDepotError
from kvdepot.protocol import wire
from kvdepot.protocol.keys import HASH_BYTES, tenant_salt

log = logging.getLogger(__name__)

_WANTED, _STORES, _TIERS = SearchPhase.WANTED, SearchPhase.STORES, SearchPhase.TIERS


class Lookups:
    """The lookups of one depot that have no answer yet. pins: the chunks that sessions hold after the answers."""

    def __init__(self, config: Config, index: Index, tiering: Tiering, leases: Leases, recorders: Recorders) -> None:
        self._counters, self._usages, self._trails = recorders.counters, recorders.usages, recorders.trails
        self.pins = Pins(config, index, self._counters, self._usages)
        self._budget = self.pins.budget
        self._rows = table(config.lookup_s)
        self._max_sessions, self._chunk_tokens = config.max_sessions, config.chunk_tokens
        self._summed_below = summed_below(config.verify)
        self._index = index
        self._tiering = tiering
        self._leases = leases
        self._searches: dict[Hashable, Search] = {}  # by name, in the order of arrival
        self._in: dict[SearchPhase, dict[Search, None]] = {phase: {} for phase in SearchPhase}
        self._queues: dict[Client, list[tuple[int, int, Search]]] = {}  # those in WANTED: place, number, search
        self._queued_hashes = 0
        self._wanting: dict[Want, Search] = {}
        self._awaiting: dict[int, dict[Search, None]] = {}  # by id() of the chunk that they wait for
        self._late: set[int] = set()  # id() of parts whose stores have let a search wait until its deadline
        self._timers: list[tuple[float, int, Search]] = []  # a heap; stale where the search has another deadline
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._searches)

    # -- begin

    def look_up(self, client: Client, number: bytes, request: wire.Lookup, now: float) -> list[Action]:
        """Answer a lookup from memory at once, or let it wait. Raises Busy."""
        search = Search(client, number, request, (client, request.request), by_hand=not request.readers)
        before, session = self._searches.get(search.name), client.sessions.get(request.request)
        # A client that suspects that an answer is lost sends the same message again: its place or its pins are kept.
        if before is not None and before.number == number:
            return []
        as_of = number, self._index.namespaces.withdrawals  # an answer that names withdrawn chunks is not repeated
        if session is not None and (session.number, session.withdrawals) == as_of:
            return [Reply(client.identity, number, session.answer)]
        if session is None and request.pins and len(client.sessions) >= self._max_sessions:
            self._counters["lookups_refused"] += 1
            raise Busy(f"{len(client.sessions)} requests hold pins, the limit set by max_sessions")
        actions: list[Action] = []
        if before is not None:
            if request.hurries and before.phase is _TIERS and before.tiers is not None:
                self._tiering.loads.late_tiers(before.tiers, now)
            actions += self._give_up(before)
        search.is_hurry = request.hurries and (before is not None or session is not None)
        if session is not None:
            self.pins.count_no_more(session)
            search.counted = session.answer.chunks if search.is_hurry and before is None else 0
        return [*actions, *self._begin(search, now)]

    def _begin(self, search: Search, now: float) -> list[Action]:
        client, request, match = search.client, search.request, self._match(search)
        search.first = match.chunks
        if not search.by_hand:
            client.model, client.is_engine = request.model, True
            if not search.is_hurry:
                self._counters["lookups"] += 1
                self._counters["lookup_chunks"] += len(request.hashes) // HASH_BYTES
                for namespace in match.namespaces:
                    namespace.lookup_chunks += len(request.hashes) // HASH_BYTES
        return self._go_on(search, match, now)

    def _match(self, search: Search) -> Match:
        request = search.request
        return match_prompt(self._index.namespaces, search.client.tenant, request, request.hashes, request.tails)

    # -- what comes next

    def _again(self, search: Search, now: float) -> list[Action]:
        """Search memory again, because the wait of a search is over."""
        if search.client.dead:
            return self._give_up(search)
        match = self._match(search)
        if search.phase is _STORES and not search.by_hand:
            self._counters["awaited_chunks"] += max(0, match.chunks - search.first)
        search.first = match.chunks
        return self._go_on(search, match, now)

    def _go_on(self, search: Search, match: Match, now: float) -> list[Action]:
        """Let a search enter the first phase that it needs and may enter, or answer it. match: what memory has."""
        request, part, asks = search.request, None, False
        chunks = len(request.hashes) // HASH_BYTES
        if not request.hurries and len(match.namespaces) == 1:
            if self._index.reserved:
                part = self._coming(search, match, now)
            has_end = match.tail is not None or not request.tails or request.tails[0].chunks < match.chunks
            asks = (match.chunks < chunks or not has_end) and self._tiering.is_searchable
        waits = part is not None or asks
        if search.share is None and search.lease is None and (request.pins or waits):
            most, tail = chunks, request.tails[0].key if request.tails else b""
            if not waits:
                most, tail = match.chunks, match.tail_key(request.tails) if match.tail is not None else b""
            if most or tail:
                is_early = request.queued and (self._is_behind(search) or (asks and self._tiering.loads.is_full))
                claim = self._budget.weigh if is_early else self._budget.claim
                share = claim(search.client, match.namespaces, request, most, tail)
                search.size = sum(share.marks.values()) if request.queued else 0
                if share.is_taken:
                    search.share = share
                elif request.pins:
                    return self._wait_for_room(search, match, share, now)
                else:
                    part, asks = None, False  # without stores and tiers, an unpinned lookup needs no share
        if part is not None:
            self._enter(search, _STORES, match, now, part)
            return []
        if asks and self._may_enter(search, _TIERS, now):
            return self._ask_tiers(search, match, now)
        return [self._answer(search, match)]

    def _wait_for_room(self, search: Search, match: Match, share: PinShare, now: float) -> list[Action]:
        """Let a search wait for a share of the pin budget if it may; otherwise answer it with the chunks that fit."""
        request, phase = search.request, SearchPhase.WANTED if search.request.queued else SearchPhase.ROOM
        if search.phase is phase:
            may_wait = now < search.deadline
        else:
            may_wait = not request.hurries and self._may_enter(search, phase, now)
        if may_wait:
            self.pins.end(search.client, request.request)  # of a lookup that this one replaces
            self._enter(search, phase, match, now)
            return []
        self._counters["shortened_lookups"] += 1
        search.is_shortened = True
        hashes = request.hashes[: min(match.chunks, self._budget.affordable(share)) * HASH_BYTES]
        return [self._answer(search, match_prompt(self._index.namespaces, search.client.tenant, request, hashes))]

    def _coming(self, search: Search, match: Match, now: float) -> Chunk | None:
        """The chunk that is being stored and that a search may wait for; None: there is none."""
        request, namespace, part = search.request, match.namespaces[0], None
        if match.chunks < len(request.hashes) // HASH_BYTES:
            part = coming_part(namespace, request.hashes, match.chunks)
        part = part or coming_tail(namespace, request.tails, match)
        is_late = part is None or id(part) in self._late
        return None if is_late or not self._may_enter(search, _STORES, now) else part

    def _ask_tiers(self, search: Search, match: Match, now: float) -> list[Action]:
        """Let tiers load what a prompt lacks; if they cannot help, answer with what memory has."""
        client, request, namespace = search.client, search.request, match.namespaces[0]
        self._enter(search, _TIERS, match, now)  # first, because loads may evict
        tiers = TierSearch(
            namespace, search.name, request, tenant_salt(client.tenant, request.salt), match.chunks, now, search.held,
            search.want,
        )  # fmt: skip
        tier_tasks = self._tiering.loads.begin(tiers)
        if tier_tasks is None:
            return [self._answer(search, match)]
        search.tiers = tiers
        if tiers.ended:
            return [*tier_tasks, *self.loaded(tiers)]
        self._set_deadline(search, now + self._tiers_s(tiers) / 2)
        return [*tier_tasks]

    def _tiers_s(self, tiers: TierSearch) -> float:
        most_s = self._rows[_TIERS].within_s
        return min(most_s, tiers.slack_s) if tiers.is_trial else most_s

    def loaded(self, tiers: TierSearch) -> list[Action]:
        """Answer a search from memory after its tier search has ended."""
        search = self._searches[tiers.name]
        if search.client.dead:
            return self._give_up(search)
        match = self._match(search)
        if not search.by_hand:
            self._counters["tier_hit_chunks"] += max(0, match.chunks - search.first)
        return [self._answer(search, match)]

    # -- the phases

    def _may_enter(self, search: Search, phase: SearchPhase, now: float) -> bool:
        """Whether a phase has room for this search, and the search has time left for the phase."""
        row, there = self._rows[phase], len(self._in[phase])
        if phase in PATIENT:
            if search.phase in PATIENT:
                return now < search.deadline
            there = sum(len(self._in[each]) for each in PATIENT)
        hashes = self._queued_hashes + len(search.request.hashes) // HASH_BYTES if phase is _WANTED else 0
        return there < row.most and hashes <= MOST_QUEUED_HASHES

    def _enter(self, search: Search, phase: SearchPhase, match: Match, now: float, part: Chunk | None = None) -> None:
        """Move a search into a phase. match: what memory has of its prompt. part: the chunk it waits for in STORES."""
        before, row = search.phase, self._rows[phase]
        assert phase in self._rows[before].next, f"{before} -> {phase}"
        self._leave(search)
        search.phase, search.part = phase, part
        self._searches[search.name] = search
        self._in[phase][search] = None
        self._hold(search, _tops(match) if row.holds else [])
        if row.wants and search.request.queued:
            self._want(search, match)
        if phase is _WANTED:
            search.turn = search.request.place, next(self._numbers) if search.turn[1] < 0 else search.turn[1]
            insort(self._queues.setdefault(search.client, []), (*search.turn, search))
            self._queued_hashes += len(search.request.hashes) // HASH_BYTES
        elif phase is _STORES:
            self._awaiting.setdefault(id(search.part), {})[search] = None
        if phase not in PATIENT or before not in PATIENT:
            self._set_deadline(search, now + row.within_s)

    def _leave(self, search: Search) -> None:
        """Take a search out of its phase. It keeps its holds and its want until the next phase or its answer."""
        phase = search.phase
        self._in[phase].pop(search, None)
        if phase is _WANTED:
            queue = self._queues[search.client]
            del queue[bisect_left(queue, search.turn)]
            if not queue:
                del self._queues[search.client]
            self._queued_hashes -= len(search.request.hashes) // HASH_BYTES
        elif phase is _STORES:
            others = self._awaiting[id(search.part)]
            del others[search]
            if not others:
                del self._awaiting[id(search.part)]
        elif phase is _TIERS and search.tiers is not None:
            self._budget.has_freed = True  # another tier search may begin, even if this one had no share

    def _hold(self, search: Search, chunks: list[Chunk]) -> None:
        before = list(search.held.values())
        held = {(chunk.namespace.number, chunk.key): chunk for chunk in chunks}  # a prompt may name one twice
        self._index.hold(list(held.values()))  # before the release, so that chunks of both matches stay held
        self._index.release(before)
        search.held.clear()
        search.held.update(held)

    def _want(self, search: Search, match: Match) -> None:
        """Let a search want the chunks that memory has of its prompt and wait for the next, at its place in the
        queue."""
        request, wants = search.request, self._index.wants
        if search.want is None:
            search.want = wants.join(search.client, request.place, search.size)
            self._wanting[search.want] = search
        key = request.hashes[match.chunks * HASH_BYTES : (match.chunks + 1) * HASH_BYTES]
        wants.want(search.want, _tops(match), (match.namespaces[0], key) if key and match.namespaces else None)

    def _pass(self, namespace: Namespace, key: bytes) -> None:
        """A chunk has arrived: the earliest queued search that waits for it now wants it and those that follow. Others
        that wait for it would want the same chunks, so they are passed over until the earliest search ends."""
        want = self._index.wants.waiting_for(namespace, key)
        if want is not None:
            search = self._wanting[want]
            self._want(search, self._match(search))
            search.passed[key] = namespace

    def _close(self, search: Search) -> None:
        """End a search that has been answered: its session or lease holds what was found."""
        if search.phase is not SearchPhase.ASKED:
            if search.phase in (SearchPhase.ROOM, _WANTED):
                self._budget.has_freed = True  # a search behind it may fit
            self._leave(search)
            self._hold(search, [])
            del self._searches[search.name]
            search.deadline = NEVER
        if search.want is not None:
            self._index.wants.unwant(search.want)
            del self._wanting[search.want]
            search.want, passed = None, search.passed
            for key, namespace in passed.items():
                self._pass(namespace, key)
        search.phase = SearchPhase.ANSWERED
        if search.share is not None:
            self._budget.end(search.share)
            search.share = None

    def _set_deadline(self, search: Search, when: float) -> None:
        search.deadline = when
        while self._timers and self._timers[0][0] != self._timers[0][2].deadline:
            heapq.heappop(self._timers)
        if when < NEVER:
            heapq.heappush(self._timers, (when, next(self._numbers), search))

    def _is_behind(self, search: Search) -> bool:
        """Whether a queued search has others of its client before it."""
        queue = self._queues.get(search.client)
        return queue is not None and queue[0][2] is not search and queue[0][0] <= search.request.place

    # -- answers

    def _answer(self, search: Search, match: Match) -> Reply:
        """Pin what was found for the request, or lease it, and tell the client."""
        request, found, value = search.request, 0, object()
        tokens = request.chunk_tokens or self._chunk_tokens
        try:
            value = self._keep(search, match)
            found = match.chunks
            if not search.by_hand:
                more = max(0, found - search.counted)
                self._counters["hit_chunks"] += more
                self._trails.looked_up(search, match, tokens)
                if match.namespaces and self._leases.bytes:
                    self._leases.count_found(match.namespaces[0], request.hashes, found, tokens)
                for namespace in match.namespaces:
                    namespace.hit_chunks += more
        except KVDepotError as exc:
            self._counters["errors"] += 1
            log.debug("Lookup failed: %s", exc, extra=_about(search))
            value = exc
            self._trails.failed(search.client, request, exc)
        else:
            if log.isEnabledFor(logging.DEBUG):
                log.debug("found %d of %d chunks", found, len(request.hashes) // HASH_BYTES, extra=_about(search))
        self._close(search)  # after the pin, or what was found could be evicted in between
        if not search.by_hand:
            self._usages.look_up(search.client, request, found, tokens, bool(match.namespaces))
        return Reply(search.client.identity, search.number, value)

    def _keep(self, search: Search, match: Match) -> wire.Hit | int:
        """Hold what was found, and return the answer. Raises Busy."""
        client, request = search.client, search.request
        if search.lease is not None:
            return self._leases.begin(search.lease, match.pins, match.chunks)
        session, withdrawals = None, self._index.namespaces.withdrawals
        if request.pins:
            session = self.pins.pin(client, request, match, search.share)
            search.share = None
        else:
            self._index.use(_tops(match))
            self.pins.end(client, request.request)  # of a lookup that this one replaces
        hit = wire.Hit(match.chunks, match.tail)
        if request.writers or request.layout:
            hit = hit_of(match, request, withdrawals, self._summed_below)
        if session is not None:
            session.number, session.answer, session.withdrawals = search.number, hit, withdrawals
        return hit

    def give_up(self, name: Hashable) -> list[Action]:
        """End the lookup with this name (`Search.name`), if it is in progress, without holding anything."""
        search = self._searches.get(name)
        return self._give_up(search) if search is not None else []

    def _give_up(self, search: Search) -> list[Action]:
        """End a search whose answer nobody wants any more; a client that is still there gets a miss."""
        if search.tiers is not None and not search.tiers.ended:
            self._tiering.loads.end(search.tiers)
        self._close(search)
        nothing = wire.MISS if search.lease is None else 0
        return [] if search.client.dead else [Reply(search.client.identity, search.number, nothing)]

    # -- the end of a wait

    def settled(self, events: Sequence[IndexEvent], now: float) -> list[Action]:
        """Go on with the searches that waited for parts whose stores have ended, whether well or not."""
        if not (self._searches or self._late):
            return []
        actions: list[Action] = []
        ended = {id(event.chunk): event.chunk for event in events if isinstance(event, Stored | Failed)}
        self._late -= {part for part, chunk in ended.items() if not chunk.is_being_stored}
        for search in [search for part in ended for search in self._awaiting.get(part, ())]:
            actions += self._again(search, now)
        for chunk in ended.values() if self._wanting else ():
            if is_there(chunk):
                self._pass(chunk.namespace, chunk.key)
        return actions

    def next_deadline(self) -> float:
        """When `expire` must be called next, in seconds of the depot's clock; 0: at once."""
        if self._budget.has_freed and (self._in[SearchPhase.ROOM] or self._queues):
            return 0.0
        while self._timers and self._timers[0][0] != self._timers[0][2].deadline:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else NEVER

    def expire(self, now: float) -> list[Action]:
        """Go on with the searches whose deadlines are over, and with those that wait for room if some is free."""
        actions: list[Action] = []
        while self._timers and self._timers[0][0] <= now:
            when, _, search = heapq.heappop(self._timers)
            if when == search.deadline:
                actions += self._time_out(search, now)
        return [*actions, *self._fill_room(now)] if self._budget.has_freed else actions

    def _time_out(self, search: Search, now: float) -> list[Action]:
        tiers, loads = search.tiers, self._tiering.loads
        if tiers is None:
            if search.phase is _STORES:
                self._counters["late_lookups"] += 1
                self._late.add(id(search.part))
            return self._again(search, now)
        if not tiers.is_half_over:
            tiers.is_half_over = True
            self._set_deadline(search, tiers.begun + self._tiers_s(tiers))
            tier_tasks = loads.half_time(tiers, now)
            return [*tier_tasks, *self.loaded(tiers)] if tiers.ended else [*tier_tasks]
        if search.request.queued and not tiers.is_trial and loads.goes_on(tiers):
            tiers.extended = now
            self._set_deadline(search, now + self._tiers_s(tiers))
            return []
        self._tiering.too_late(tiers, now)
        return self._finish(search)

    def _fill_room(self, now: float) -> list[Action]:
        self._budget.has_freed = False
        actions: list[Action] = []
        for search in list(self._in[SearchPhase.ROOM]):
            actions += self._again(search, now)
        blocked = {search.client for search in self._in[SearchPhase.ROOM]}
        for client, queue in list(self._queues.items()):
            while queue and client not in blocked:
                search = queue[0][2]
                actions += self._again(search, now)
                if search.phase is _WANTED:
                    break
        return actions

    def leave(self, client: Client) -> list[Action]:
        """Release what a client that is gone holds, and give its lookups up."""
        searches = [search for search in self._searches.values() if search.client is client]
        actions = [action for search in searches for action in self._give_up(search)]
        self.pins.leave(client)
        return actions

    def stop(self) -> list[Action]:
        """Answer every lookup with what memory has."""
        return [action for search in list(self._searches.values()) for action in self._finish(search)]

    def _finish(self, search: Search) -> list[Action]:
        if search.phase is _TIERS and search.tiers is not None:
            self._tiering.loads.end(search.tiers)
            return self.loaded(search.tiers)
        return [self._answer(search, self._match(search))]

    def forget(self, now: float) -> list[Action]:
        """Go on with lookups that wait for the store of a forgotten chunk, because no lookup will find that chunk."""
        vain = [search for search in self._in[_STORES] if search.part is not None and is_hidden(search.part)]
        return [action for search in vain for action in self._again(search, now)]

    # -- leases

    def lease(self, client: Client, number: bytes, request: wire.TakeLease, now: float) -> list[Action]:
        """Begin a lease with what a lookup finds. Raises BadRequest or Busy."""
        lease = self._leases.admit(client.tenant, request, now)
        if not lease.holds:  # a lease that holds nothing in memory asks no tier
            found = match_prompt(self._index.namespaces, client.tenant, request, request.hashes)
            matched = self._leases.begin(lease, found.pins, found.chunks)
            return [*self.give_up((client.tenant, request.name)), Reply(client.identity, number, matched)]
        lookup = wire.Lookup(
            request.model, request.world_size, request.blocks_in_chunk, request.name, 0, request.hashes, True,
            request.salt, request.chunk_tokens,
        )  # fmt: skip
        search = Search(client, number, lookup, (client.tenant, request.name), lease, by_hand=True)
        before = self._searches.get(search.name)
        if before is not None and (before.client, before.number) == (client, number):
            return []  # the client has sent the same message again, as in `look_up`
        return [*(self._give_up(before) if before is not None else []), *self._begin(search, now)]


def _tops(match: Match) -> list[Chunk]:
    """The chunks of a match that must be held, so that no chunk of the match is evicted."""
    return [chunk for pin in match.pins for chunk in pin.chunks]


def _about(search: Search) -> dict[str, str]:
    return {"client": search.client.called, "request": search.request.request}
