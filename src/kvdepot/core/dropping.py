"""Drops: remove the chunks of one prompt from memory and tiers, from its end backwards. Decisions only.

Called by core/depot.py on the deciding thread, which serves other requests between steps. A drop ends at the first
chunk that somebody holds, or that a chunk of another prompt follows. A chunk that is only being saved to a tier is
waited for, since it would be written again otherwise.

Whether another prompt shares a chunk that only a tier has is not known here: those behind what memory has are removed
too, except the first `keep` of the prompt. Invariant: each drop that a client asked for is answered once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

from kvdepot.core.actions import Action, Reply
from kvdepot.core.admission import check_chunk_tokens, check_hashes, check_names, check_salt
from kvdepot.core.clients import Client
from kvdepot.core.index.chunk import Chunk, Namespace
from kvdepot.core.index.events import Reason
from kvdepot.core.index.index import Index
from kvdepot.core.tiering.forgetting import Unsaved
from kvdepot.core.tiering.tiering import Tiering
from kvdepot.errors import BadRequest, Busy
from kvdepot.protocol import wire
from kvdepot.protocol.counters import Counters
from kvdepot.protocol.keys import HASH_BYTES, tenant_salt

__all__ = ["Drops"]

_MOST_HASHES = 1 << 20
"""Hashes of all drops in progress; with more, clients can ask for none, and begin no lease that ends with one."""
_WAIT_S = 30.0
"""The longest time that a drop waits for the saves of one chunk; then it ends there."""


class _Outcome(Enum):
    """The outcome for the last chunk of a drop."""

    REMOVED = "or it was not there"
    STAYS = "somebody holds it, or another prompt's chunk follows it"
    BEING_SAVED = "it can be removed once a tier has it"


@dataclass(slots=True, eq=False)
class _Drop:
    """One prompt's drop in progress."""

    tenant: str
    prompt: wire.Drop | wire.Lease
    hashes: bytes
    left: int  # chunks of `hashes` that have not been looked at; those before them stay or follow
    keep: int
    asker: Client | None = None  # None: a lease that has ended
    number: bytes = b""
    removed: int = 0
    waits_since: float | None = None  # for a save


class Drops:
    """The drops of one depot, one after the other."""

    def __init__(self, index: Index, tiering: Tiering, counters: Counters, step_chunks: int) -> None:
        """step_chunks: how many chunks one step looks at."""
        self._index = index
        self._tiering = tiering
        self._counters = counters
        self._step_chunks = step_chunks
        self._ready: deque[_Drop] = deque()
        self._waiting: deque[_Drop] = deque()  # for saves
        self._hashes = 0  # of all drops

    def __repr__(self) -> str:
        return f"<Drops {len(self._ready)}, {len(self._waiting)} wait for tiers>"

    def __bool__(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._ready)

    def ask(self, client: Client, number: bytes, request: wire.Drop, now: float) -> list[Action]:
        """Drop a prompt's chunks; replies with the number of those removed from memory. Raises BadRequest or Busy."""
        check_hashes(request.hashes)
        check_names("", request.model)
        check_salt(request.salt)
        check_chunk_tokens(request.chunk_tokens)
        if request.keep < 0:
            raise BadRequest(f"keep is {request.keep}")
        self.refuse_many()
        chunks = len(request.hashes) // HASH_BYTES
        self._hashes += chunks
        self._ready.append(_Drop(client.tenant, request, request.hashes, chunks, request.keep, client, number))
        return self.step(now)

    def refuse_many(self) -> None:
        """Raise Busy if so much is being dropped that nothing may be added."""
        if self._hashes > _MOST_HASHES:
            raise Busy(f"prompts of {self._hashes} chunks are being dropped; the limit is {_MOST_HASHES}")

    def begin(self, tenant: str, request: wire.Lease, hashes: bytes) -> None:
        """Drop the chunks of a lease that has ended."""
        if hashes:
            self._hashes += len(hashes) // HASH_BYTES
            self._ready.append(_Drop(tenant, request, hashes, len(hashes) // HASH_BYTES, 0))

    def retry(self) -> None:
        """Called once a second: look again whether saves have ended."""
        self._ready += self._waiting
        self._waiting.clear()

    def step(self, now: float) -> list[Action]:
        """Look at some chunks, and reply to drops that this has finished."""
        actions: list[Action] = []
        steps = self._step_chunks
        while self._ready and steps > 0:
            drop = self._ready[0]
            while drop.left > drop.keep and steps > 0:
                steps -= 1
                outcome = self._drop_last(drop)
                if outcome is _Outcome.REMOVED:
                    drop.left -= 1
                    drop.waits_since = None
                    continue
                if outcome is _Outcome.BEING_SAVED:
                    drop.waits_since = now if drop.waits_since is None else drop.waits_since
                    if now - drop.waits_since < _WAIT_S:
                        break
                drop.left = drop.keep
            if drop.left > drop.keep and steps <= 0:
                break
            self._ready.popleft()
            if drop.left > drop.keep:
                self._waiting.append(drop)
            else:
                actions += self._end(drop)
        return [*actions, *self._tiering.erase_some()]

    def stop(self) -> list[Action]:
        """Before shutdown: reply to all, with what has been removed so far."""
        drops = [*self._ready, *self._waiting]
        self._ready.clear()
        self._waiting.clear()
        return [action for drop in drops for action in self._end(drop)]

    def _end(self, drop: _Drop) -> list[Action]:
        self._counters["released_chunks"] += drop.removed
        self._hashes -= len(drop.hashes) // HASH_BYTES
        if drop.asker is None:
            return []
        return [] if drop.asker.dead else [Reply(drop.asker.identity, drop.number, drop.removed)]

    def _drop_last(self, drop: _Drop) -> _Outcome:
        """Remove the last chunk that is left, on all ranks, in memory and tiers."""
        key = drop.hashes[(drop.left - 1) * HASH_BYTES : drop.left * HASH_BYTES]
        prompt, index = drop.prompt, self._index
        namespaces = index.namespaces.for_lookup(
            prompt.model, prompt.world_size, prompt.blocks_in_chunk, drop.tenant, prompt.chunk_tokens
        )
        groups = [group for namespace in namespaces for group in namespace.groups]
        parts = [part for group in groups if (part := group.chunks.get(key)) is not None]
        for part in parts:
            if part.children > sum(other.parent is part for other in parts):
                return _Outcome.STAYS
        busy = [part for part in parts if part.holds]
        if any(part.holds > self._tiering.saves_of(part) for part in busy):
            return _Outcome.STAYS
        if busy:
            return _Outcome.BEING_SAVED
        salt = tenant_salt(drop.tenant, prompt.salt)
        unsaved = [Unsaved(group, key, _salt_of(group, key, salt)) for group in groups]
        self._tiering.erase(unsaved)
        for part in sorted(parts, key=lambda part: part.children):  # those of bounded groups first
            if part.gone:  # it was pending removal until the part behind it went
                continue
            if not index.remove_forgotten(part):
                index.remove(part, Reason.DROPPED)
        drop.removed += bool(parts)
        return _Outcome.REMOVED


def _salt_of(group: Namespace, key: bytes, salt: bytes) -> bytes:
    """Under which salt the tiers have a chunk: that of its store, if memory has it."""
    part: Chunk | None = group.chunks.get(key)
    return salt if part is None else part.salt
