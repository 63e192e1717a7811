"""Requests that remove chunks from memory and tiers, or count them: Forget, Clear, Count and Drop. Decisions only.

Called by core/depot.py on the deciding thread, which serves other requests between steps. A removal is a generator that
examines one chunk at a time, and `Removals` advances them one after the other. Forget, Clear and Count pass the chunks
of namespaces, the newest first; a Drop passes one prompt's keys, the last first.

Invariants: once a Forget begins, no client gets a chunk that it covers, however long it takes; chunks stored later
stay. Each request is answered once, or its client has died.

Each chunk carries the number of removals that had begun when it was created (`Chunk.generation`), and a removal covers
only older chunks (`Scope`). So the index knows what is hidden without marking every chunk, and a covered chunk
that blocks a store, or is evicted for one, is removed at once (`Index.remove_forgotten`).

A Drop ends at the first chunk that is held, or that a chunk of another prompt follows. It waits for a chunk that is
only being saved to a tier, since the save would write it again. Whether another prompt shares a chunk that only a tier
has is not known here: chunks behind what memory has are removed too, except the first `keep` of the prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from kvdepot.config import Config
from kvdepot.core.actions import Action, Reply
from kvdepot.core.admission import check_names, check_prompt, check_salt
from kvdepot.core.clients import Client
from kvdepot.core.index import states
from kvdepot.core.index.chunk import Namespace, Scope, is_evictable, is_there
from kvdepot.core.index.events import Reason
from kvdepot.core.index.index import Index
from kvdepot.core.index.matching import for_lookup
from kvdepot.core.leases import Lease, Leases
from kvdepot.core.lookups.lookups import Lookups
from kvdepot.core.report import SHOWN, Report
from kvdepot.core.tiering.forgetting import MOST_FORGETTINGS, Forgetting, NotForgotten, Unsaved
from kvdepot.core.tiering.tiering import Tiering
from kvdepot.errors import BadRequest, Busy
from kvdepot.protocol import wire
from kvdepot.protocol.counters import Counters
from kvdepot.protocol.keys import HASH_BYTES, tenant_salt
from kvdepot.values import plural

STEP_CHUNKS = 256
"""The number of chunks that one step examines, which takes one or two milliseconds."""
_MOST = 16
"""The most Forgets, Clears and Counts in progress."""
_MOST_HASHES = 1 << 20
"""The most hashes of all drops in progress. Above it, new drops, and new leases that end with a drop, are refused."""
_WAIT_S = 30.0
"""The seconds that a drop waits for the saves of one chunk; after them, the drop ends at this chunk."""

Work: TypeAlias = Generator[bool, None, int]
"""Yields after each chunk, with whether it must wait for a save; returns the number of chunks removed from memory."""


class _Outcome(Enum):
    """The fate of a chunk that a drop names."""

    REMOVED = "removed from memory"
    ABSENT = "not in memory"
    STAYS = "held, or followed by a chunk of another prompt"
    BEING_SAVED = "removed once a tier has saved it"


@dataclass(slots=True, eq=False)
class _Removal:
    """A request in progress. client: None if a lease has ended. hashes: the number of a drop's hashes."""

    client: Client | None
    number: bytes
    request: wire.ForgetChunks | wire.Clear | wire.Count | wire.Drop | wire.TakeLease
    work: Generator[bool, None, object]
    forgetting: Forgetting | None = None
    hashes: int = 0

    def reply(self, value: object) -> list[Action]:
        client = self.client
        return [] if client is None or client.dead else [Reply(client.identity, self.number, value)]


class Removals:
    def __init__(
        self,
        config: Config,
        index: Index,
        tiering: Tiering,
        lookups: Lookups,
        leases: Leases,
        counters: Counters,
        report: Report,
        step_chunks: int = STEP_CHUNKS,
    ) -> None:
        """step_chunks: the number of chunks that one step examines."""
        self.step_chunks = step_chunks
        self._config = config
        self._index = index
        self._tiering = tiering
        self._lookups = lookups
        self._leases = leases
        self._counters = counters
        self._report = report
        self._ready: deque[_Removal] = deque()
        self._waiting: deque[_Removal] = deque()  # drops that wait for saves
        self._forgetting: dict[Forgetting, _Removal] = {}  # until they are answered
        self._hashes = 0  # of all drops
        self._now = 0.0
        self._is_stopping = False

    def __bool__(self) -> bool:
        return bool(self._ready)

    # -- of namespaces

    def forget(self, client: Client, number: bytes, request: wire.ForgetChunks, now: float) -> list[Action]:
        """Forget chunks in memory and tiers. Raises BadRequest or Busy, and then changes nothing."""
        namespaces, salt = self._named(client, request)
        if request.writer and request.salt:
            raise BadRequest("what a writer has stored is forgotten under every salt: name no salt")
        if len(self._tiering.forgettings) >= MOST_FORGETTINGS:
            raise Busy(f"tiers are forgetting {len(self._tiering.forgettings)} models or salts: retry later")
        # Without keys there are no tenants; with keys, a client may only forget chunks of its own tenant.
        tenant = client.tenant if self._config.keys or request.model else None
        known = {namespace.model for namespace in namespaces}
        forgetting = Forgetting(tenant, request.model, known, salt, request.writer)
        scope = self._index.namespaces.begin_removal(namespaces, salt, hides=True, writer=request.writer)
        work = self._disown(scope) if request.writer else forget(self._index, scope)
        removal = _Removal(client, number, request, work, forgetting)
        self._forgetting[forgetting] = removal
        self._ready.append(removal)
        self._leases.forget()
        actions = self._lookups.forget(now)
        return [*actions, *self._tiering.forgettings.begin(forgetting, now), *self.step(now)]

    def _disown(self, scope: Scope) -> Work:
        """Remove the chunks that one writer has stored from memory, and from the tiers once these have saved them."""
        for chunk in [each for namespace in scope.namespaces for each in namespace.chunks.values()]:
            since = self._now
            while scope.means(chunk) and self._tiering.saves.holds_of(chunk):
                if self._now - since >= _WAIT_S or self._is_stopping:
                    break
                yield True
            if scope.means(chunk):
                self._tiering.erasures.add([Unsaved(chunk.namespace, chunk.key, chunk.salt)])
            yield False
        return (yield from forget(self._index, scope))

    def count(self, client: Client, number: bytes, request: wire.Count, now: float) -> list[Action]:
        """Count what a Forget would remove from memory. Raises BadRequest or Busy."""
        self._ready.append(_Removal(client, number, request, _count(*self._named(client, request))))
        return self.step(now)

    def clear(self, client: Client, number: bytes, request: wire.Clear, now: float) -> list[Action]:
        """Remove all chunks that nothing holds from memory. Raises Busy, and then changes nothing."""
        self._refuse_many()
        namespaces = [each for each in self._owned(client) if request.model in ("", each.model)]
        scope = self._index.namespaces.begin_removal(namespaces, None, hides=False)
        self._ready.append(_Removal(client, number, request, clear(self._index, scope)))
        return self.step(now)

    def _named(self, client: Client, request: wire.ForgetChunks | wire.Count) -> tuple[list[Namespace], bytes | None]:
        """The request's namespaces and salt within the client's tenant; None: any salt. Raises BadRequest or Busy."""
        check_names("", request.model)
        check_salt(request.salt)
        self._refuse_many()
        salt = tenant_salt(client.tenant, request.salt) if request.salt else None
        return [each for each in self._owned(client) if each.model.startswith(request.model)], salt

    def _owned(self, client: Client) -> list[Namespace]:
        return [each for each in self._index.namespaces.all() if each.tenant == client.tenant]

    def _refuse_many(self) -> None:
        if sum(not isinstance(each.request, wire.Drop | wire.TakeLease) for each in self._ready) >= _MOST:
            raise Busy(f"{_MOST} requests to forget, clear or count are in progress: retry later")

    # -- of prompts

    def drop(self, client: Client, number: bytes, request: wire.Drop, now: float) -> list[Action]:
        """Drop a prompt's chunks; replies with the number of those removed from memory. Raises BadRequest or Busy."""
        check_prompt("", request)
        if request.keep < 0:
            raise BadRequest(f"keep is {request.keep}")
        self.refuse_drops()
        work = self._drop(client.tenant, request, request.hashes, request.keep)
        self._begin(_Removal(client, number, request, work, hashes=len(request.hashes) // HASH_BYTES))
        return self.step(now)

    def drop_leased(self, lease: Lease) -> None:
        if lease.hashes:
            work = self._drop(lease.tenant, lease.request, lease.hashes, 0)
            self._begin(_Removal(None, b"", lease.request, work, hashes=len(lease.hashes) // HASH_BYTES))

    def refuse_drops(self) -> None:
        """Raise Busy if too many chunks are being dropped."""
        if self._hashes > _MOST_HASHES:
            raise Busy(f"prompts of {self._hashes} chunks are being dropped; the limit is {_MOST_HASHES}")

    def _begin(self, drop: _Removal) -> None:
        self._hashes += drop.hashes
        self._ready.append(drop)

    def _drop(self, tenant: str, prompt: wire.Drop | wire.TakeLease, hashes: bytes, keep: int) -> Work:
        removed = 0
        for place in reversed(range(keep, len(hashes) // HASH_BYTES)):
            if self._is_stopping:
                break
            key = hashes[place * HASH_BYTES : (place + 1) * HASH_BYTES]
            since = self._now
            while (outcome := self._drop_chunk(tenant, prompt, key)) is _Outcome.BEING_SAVED:
                if self._now - since >= _WAIT_S or self._is_stopping:
                    return removed
                yield True
            if outcome is _Outcome.STAYS:
                break
            removed += outcome is _Outcome.REMOVED
            yield False
        return removed

    def _drop_chunk(self, tenant: str, prompt: wire.Drop | wire.TakeLease, key: bytes) -> _Outcome:
        """Remove a chunk, the last one of its prompt, on all ranks, in memory and tiers."""
        index = self._index
        namespaces = for_lookup(
            index.namespaces, (tenant, prompt.model, prompt.world_size), prompt.blocks_in_chunk, prompt.chunk_tokens
        )
        groups = [group for namespace in namespaces for group in namespace.groups]
        parts = [part for group in groups if (part := group.chunks.get(key)) is not None]
        for part in parts:
            if part.children > sum(other.parent is part for other in parts):
                return _Outcome.STAYS
        busy = [part for part in parts if part.holds]
        if any(part.holds > self._tiering.saves.holds_of(part) for part in busy):
            return _Outcome.STAYS
        if busy:
            return _Outcome.BEING_SAVED
        salt = tenant_salt(tenant, prompt.salt)
        stored = {part.namespace: part.salt for part in parts}  # others: the prompt's salt
        self._tiering.erasures.add([Unsaved(group, key, stored.get(group, salt)) for group in groups])
        for part in sorted(parts, key=lambda part: part.children):  # parts of bounded groups first
            if not part.gone and not index.remove_forgotten(part):  # gone: removed with one behind
                index.remove(part, Reason.DROPPED)
        return _Outcome.REMOVED if parts else _Outcome.ABSENT

    # -- progress

    def tick(self) -> None:
        """Called once a second, so that waiting drops check again whether their saves have ended."""
        self._ready += self._waiting
        self._waiting.clear()

    def step(self, now: float) -> list[Action]:
        """Examine up to `step_chunks` chunks, and answer the requests that are then finished."""
        self._now = now
        actions: list[Action] = []
        left = self.step_chunks
        while self._ready and left:
            removal = self._ready[0]
            try:
                while left:
                    left -= 1
                    if next(removal.work):
                        self._waiting.append(self._ready.popleft())
                        break
            except StopIteration as end:
                self._ready.popleft()
                actions += self._end(removal, end.value)
        return [*actions, *self._tiering.erasures.dispatch()]

    def stop(self) -> list[Action]:
        """Finish all removals before shutdown, but end drops where they are."""
        self._is_stopping = True
        self.tick()
        actions: list[Action] = []
        while self._ready:
            actions += self.step(self._now)
        return actions

    def _end(self, removal: _Removal, result: int | list[int]) -> list[Action]:
        match removal.request, result:
            case wire.Clear(), int(chunks):
                self._counters["cleared_chunks"] += chunks
                return removal.reply(None)
            case wire.ForgetChunks(model, salt), int(chunks):
                self._counters["forgotten_chunks"] += chunks
                what = f"{model[:SHOWN] or 'every model'}{', one salt' if salt else ''}"
                what += f", stored by {removal.request.writer}" if removal.request.writer else ""
                self._report.note("forget", f"forgot {plural(chunks, 'chunk')} of {what}")
                assert removal.forgetting is not None
                is_last = self._tiering.forgettings.memory_ended(removal.forgetting, chunks)
                return self.answer(removal.forgetting) if is_last else []
            case wire.Drop() | wire.TakeLease(), int(chunks):
                self._counters["released_chunks"] += chunks
                self._hashes -= removal.hashes
        return removal.reply(result)

    def answer(self, forgetting: Forgetting) -> list[Action]:
        """Answer a Forget, because memory and tiers are done or its time is up."""
        return self._forgetting.pop(forgetting).reply(_answer(forgetting))


def forget(index: Index, scope: Scope) -> Work:
    """Remove the chunks of a scope that hides them; held chunks are removed once they are released."""
    left = [chunk for namespace in scope.namespaces for chunk in namespace.chunks.values()]
    while left:
        chunk = left.pop()  # the newest first: the chunks behind a chunk are newer than it
        if not chunk.gone:
            index.remove_forgotten(chunk)
        yield False
    index.namespaces.end_removal(scope)
    return scope.removed


def clear(index: Index, scope: Scope) -> Work:
    """Remove the chunks of a scope, except held chunks and those before them in their chains."""
    left = [chunk for namespace in scope.namespaces for chunk in namespace.chunks.values()]
    while left:
        chunk = left.pop()
        if not chunk.gone and not index.remove_forgotten(chunk) and scope.means(chunk) and is_evictable(chunk):
            before = chunk.parent
            while before is not None and before.state is states.PENDING_REMOVAL:
                before = before.parent  # `remove` also removes the ones in between
            scope.removed += 1
            index.remove(chunk, Reason.DROPPED)
            if before is not None and scope.means(before):
                left.append(before)  # only this chunk may have kept it
        yield False
    index.namespaces.end_removal(scope)
    return scope.removed


def _count(namespaces: list[Namespace], salt: bytes | None) -> Generator[bool, None, wire.ChunkTotal]:
    """The number and the bytes of the chunks of a salt (None: any) that lookups can find."""
    chunks = size = 0
    for chunk in [chunk for namespace in namespaces for chunk in namespace.chunks.values()]:
        if not chunk.gone and is_there(chunk) and salt in (None, chunk.salt):
            chunks += 1
            size += chunk.bytes
        yield False
    return wire.ChunkTotal(chunks, size)


def _answer(forgetting: Forgetting) -> wire.ForgetAnswer:
    failed = {tier: what for tier, what in forgetting.objects.items() if isinstance(what, NotForgotten)}
    removed = {tier: what for tier, what in forgetting.objects.items() if isinstance(what, int)}
    left = {tier: f"not forgotten: {what.reason}" for tier, what in failed.items()}
    if trouble := forgetting.trouble():
        left["error"] = trouble
    return wire.ForgetAnswer({"memory": forgetting.chunks or 0, **removed}, left)
