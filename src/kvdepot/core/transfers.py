"""Stores and retrieves: reserves or holds their chunks, plans the copies, seals what arrived, and replies.

Called by core/depot.py on the deciding thread. Invariant: an operation's reservations and holds are released exactly
once, when its last copy has ended, even if its client has died.
"""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import numpy.typing as npt

from kvdepot.config import Config
from kvdepot.core.actions import Action, Reply
from kvdepot.core.admission import check_shards, check_source, check_targets, summed_below
from kvdepot.core.clients import Client, CopyOperation, Instance
from kvdepot.core.index import matching
from kvdepot.core.index.chunk import Chunk, Namespace, is_forgotten
from kvdepot.core.index.index import Index
from kvdepot.core.index.runs import Refusal, Run
from kvdepot.core.registrations import Registrations
from kvdepot.core.sessions import Sessions
from kvdepot.core.trails import Recorders
from kvdepot.devices.by_client import CopiedByClient
from kvdepot.errors import BadRequest, Busy, UnknownInstance, UnknownRequest
from kvdepot.memory.comparison import CORRUPT, compare, compare_with_experts
from kvdepot.memory.copier import Copy, CopyPiece
from kvdepot.protocol import wire
from kvdepot.protocol.keys import HASH_BYTES, tenant_salt

log = logging.getLogger(__name__)

_QUEUED_CHUNKS = 1 << 18
"""While a client has this many chunks in flight, its operations are refused."""
_REFUSED = {
    Refusal.NO_ROOM: "dropped_chunks",
    Refusal.OVER_CAP: "capped_chunks",
    Refusal.OTHER_SIZE: "mismatched_chunks",
}
"""The counters of chunks that were not stored."""


@dataclass(slots=True, eq=False)
class CopyToken:
    """The token of a Copy, which copies the chunks `[first, end)` of an operation."""

    operation: CopyOperation
    first: int
    end: int


class Transfers:
    """All stores and retrieves of one depot."""

    def __init__(
        self, config: Config, index: Index, registrations: Registrations, sessions: Sessions, recorders: Recorders
    ) -> None:
        self.operations = 0  # in progress
        self._numbers = itertools.count(1)
        self.stored_bytes = self.retrieved_bytes = 0
        self._config = config
        self._summed_below = summed_below(config.verify)
        self._index = index
        self._registrations = registrations
        self._sessions = sessions
        self._counters, _, self._trails, self._verification = recorders

    def __repr__(self) -> str:
        return f"<Transfers {self.operations} operations>"

    def store(self, client: Client, number: bytes, request: wire.Store, wall: int) -> list[Action]:
        """Reserve the missing chunks and copy them; replies when the last copy ends. wall: seconds since 1970.

        Raises BadRequest, UnknownInstance or Busy, and then changes nothing.
        """
        if repeated := self._repeated(client, number):
            return self._answer_again(repeated)
        instance = self._admit(client, request)
        for part in request.shards:
            check_source(part)
        operation = CopyOperation(client, number, instance, is_store=True, chunks=[])
        pieces: list[CopyPiece] = []
        complete = True
        namespaces = [self._namespace(instance, part) for part in request.shards]  # raises before anything is reserved
        first = 0
        for part, namespace in zip(request.shards, namespaces, strict=True):
            ids, blocks, size = _blocks(instance, part)
            count = len(ids) // blocks
            salt = tenant_salt(client.tenant, part.salt)
            operation.requests.append((part.request, part.model, count))
            run = Run(part.hashes, size, part.parent, part.depth + 1, salt, part.continues)
            made = self._index.reserve(namespace, part.rank, run, wall)
            for place, chunk in zip(made.places, made.chunks, strict=True):
                operation.chunks.append((chunk, part.rank))
                shard, block_ids = chunk.shards[part.rank], ids[place * blocks : (place + 1) * blocks]
                shard.writer = instance.writer
                pieces.append(CopyPiece(shard.extents, block_ids, 0, chunk.key[0] < self._summed_below))
            operation.places += [first + place for place in made.places]
            first += count
            self._counters["known_chunks"] += made.known
            if made.known:
                self._trails.copied(client, part.request, known=made.known)
            if made.refusal is not None:
                self._counters[_REFUSED[made.refusal]] += made.refused
                if made.refusal is Refusal.OVER_CAP:
                    self._index.accounts.of(client.tenant, salt).capped += made.refused
                asked = {"client": client.called, "request": part.request}
                log.debug("dropped %d chunks of a store: %s", made.refused, made.refusal.value, extra=asked)
                self._trails.copied(client, part.request, **{made.refusal.name.lower(): made.refused})
                complete = False
        operation.results = [complete]
        if not pieces:
            _log_end("stored %d of %d new chunks", 0, operation)
            return [Reply(client.identity, number, complete)]
        operation.pieces = pieces
        if isinstance(instance.mapped, CopiedByClient):
            # There is nothing to sum yet. Nor does a fence matter, because the client says what it has copied.
            return self._start(operation, [CopyPiece(piece.extents, piece.block_ids) for piece in pieces])
        return self._start(operation, pieces, partial(getattr, client.liveness, "fence"), request.ticket)

    def retrieve(self, client: Client, number: bytes, request: wire.Retrieve) -> list[Action]:
        """Copy the chunks that are present into the engine's blocks; then reply with one bool per key.

        Raises BadRequest, UnknownInstance or Busy, and then changes nothing.
        """
        if repeated := self._repeated(client, number):
            return self._answer_again(repeated)
        instance = self._admit(client, request)
        check_targets(request.shards)
        operation = CopyOperation(client, number, instance, is_store=False, chunks=[], unpins=request.unpins)
        pieces = []
        for part in request.shards:
            ids, blocks, size = _blocks(instance, part)
            count, namespace = len(ids) // blocks, self._namespace(instance, part)
            for i, chunk in enumerate(matching.find(namespace, part.rank, part.hashes)):
                operation.results.append(False)
                shard = chunk.shards[part.rank] if chunk is not None and not namespace.is_quarantined else None
                is_right = shard is not None and shard.writer in (request.writers or [shard.writer])
                if chunk is None or shard is None or shard.size != size or not is_right:
                    self._counters["retrieve_misses"] += 1
                    continue
                operation.places.append(len(operation.results) - 1)
                operation.chunks.append((chunk, part.rank))
                skip = part.skip_blocks if i == 0 else 0
                summed = shard.checksum != 0 and chunk.key[0] < self._summed_below
                pieces.append(CopyPiece(shard.extents, ids[i * blocks : (i + 1) * blocks], skip, summed))
            operation.requests.append((part.request, part.model, count))
            self._sessions.retrieving(client.tenant, part.request, part.model)
        self._index.hold([chunk for chunk, _ in operation.chunks])
        if not pieces:
            self._end_retrieve(operation)
            return [Reply(client.identity, number, operation.results)]
        operation.pieces = pieces
        return self._start(operation, pieces)

    def compare(self, client: Client, number: bytes, request: wire.Compare) -> list[Action]:
        """Compare blocks with the chunks that are there; replies when the last comparison ends.

        An engine that earns trust is not compared with itself. Raises BadRequest, UnknownInstance or Busy, and then
        changes nothing.
        """
        instance = self._admit(client, request)
        for part in request.shards:
            check_source(part)
        if not request.limit > 0.0:
            raise BadRequest(f"a limit of {request.limit} for the difference of equal KV")
        if request.is_sample and not self._config.verify_hits:
            raise BadRequest("this server samples no hits (verify_hits is 0)")
        operation = CopyOperation(client, number, instance, is_store=False, chunks=[], comparison=request)
        own = "" if request.is_sample else instance.writer
        can_compare = bool(instance.layout.numbers) and not isinstance(instance.mapped, CopiedByClient)
        for part in request.shards if can_compare else ():
            ids, blocks, size = _blocks(instance, part)
            namespace = self._namespace(instance, part)
            for i, chunk in enumerate(matching.find(namespace, part.rank, part.hashes)):
                if chunk is None or (shard := chunk.shards[part.rank]).size != size or (own and shard.writer == own):
                    continue
                operation.chunks.append((chunk, part.rank))
                operation.places.append(part.depth + i + 1)  # in its prompt
                block_ids = ids[i * blocks : (i + 1) * blocks]
                operation.pieces.append(CopyPiece(shard.extents, block_ids, checksum=shard.checksum))
        if not operation.pieces:
            return [Reply(client.identity, number, wire.Comparison())]
        self._index.hold([chunk for chunk, _ in operation.chunks])
        return self._start(operation, operation.pieces, partial(getattr, client.liveness, "fence"), request.ticket)

    def _namespace(self, instance: Instance, part: wire.Shards) -> Namespace:
        """The namespace of a checked part's chunks. Raises Busy."""
        blocks = len(part.block_ids) // 4 // (len(part.hashes) // HASH_BYTES)
        known = instance.namespaces.get((part.model, part.world_size, part.rank, blocks))
        return known or self._registrations.namespace(instance, part.model, part.world_size, part.rank, blocks)

    def _admit(self, client: Client, request: wire.Store | wire.Retrieve | wire.Compare) -> Instance:
        instance = client.instances.get(request.instance)
        if instance is None or instance.mapped is None or instance.closing:
            raise UnknownInstance(f"no KV tensors are registered under instance {request.instance}")
        if client.queued >= self._config.max_queued or client.queued_chunks >= _QUEUED_CHUNKS:
            self._counters["operations_refused"] += 1
            raise Busy(
                f"{client.queued} stores and retrieves of {client.queued_chunks} chunks are in flight; the limits are "
                f"{self._config.max_queued} (max_queued) and {_QUEUED_CHUNKS} chunks"
            )
        for part in request.shards:
            check_shards(part, instance.layout)
        return instance

    def _start(
        self, operation: CopyOperation, pieces: list[CopyPiece], fence: Callable[[], int] | None = None, ticket: int = 0
    ) -> list[Action]:
        if isinstance(operation.instance.mapped, CopiedByClient):
            operation.client.own_copies.append(operation)
        operation.client.queued += 1
        operation.client.queued_chunks += len(operation.pieces)
        operation.instance.copies += 1
        self.operations += 1
        return self._copy(operation, pieces, fence, ticket)

    def _copy(
        self, operation: CopyOperation, pieces: list[CopyPiece], fence: Callable[[], int] | None = None, ticket: int = 0
    ) -> list[Action]:
        """The tasks that copy an operation's bytes; if its client does, those that make memory ready or sum it."""
        instance = operation.instance
        assert instance.mapped is not None and len(pieces) == len(operation.chunks)
        size = len(pieces[0].block_ids) * instance.layout.block_bytes
        step = max(1, -(-instance.mapped.task_bytes // size))
        tasks: list[Copy] = []
        whole = cache(instance.mapped.whole)
        asked = operation.comparison
        compares = None if asked is None else compare_with_experts if asked.has_experts else compare
        for first in range(0, len(pieces), step):
            token = CopyToken(operation, first, min(first + step, len(pieces)))
            is_store = operation.is_store or compares is not None  # the direction in which it moves bytes
            tasks.append(
                Copy(token, is_store, instance.mapped, pieces[first : token.end], fence, ticket, compares, whole)
            )
        operation.tasks = len(tasks)
        tasks.sort(key=lambda task: not any(piece.summed for piece in task.pieces))  # summing takes longer than copying
        return [*tasks]

    def copied(self, token: CopyToken, sums: list[int] | list[list[float]] | None, wall: int) -> list[Action]:
        """Handle the end of a copy. sums: one per piece, of a comparison the differences, or None if it failed. wall:
        seconds since 1970."""
        operation = token.operation
        operation.tasks -= 1
        for i in range(token.first, token.end):
            found = None if sums is None else sums[i - token.first]
            if found is None:
                operation.sums.pop(i, None)
            elif found == CORRUPT:
                self._note_corrupt(*operation.chunks[i])
            elif isinstance(found, list):
                operation.differences[i] = found
            elif not operation.is_store:
                operation.results[operation.places[i]] = self._is_as_stored(*operation.chunks[i], found)
            elif operation.placement is None or i in operation.sums:
                operation.sums[i] = found
        if operation.tasks:
            return []
        mapped = operation.instance.mapped
        if isinstance(mapped, CopiedByClient) and operation.placement is None and not operation.client.dead:
            return self._place(operation, mapped)
        return self._end(operation, wall)

    # -- copies by the client

    def _place(self, operation: CopyOperation, mapped: CopiedByClient) -> list[Action]:
        """Tell a client that copies itself where the bytes are, or belong. It may withdraw its registration meanwhile:
        a connection that recovers does, and sends nothing else before that is answered."""
        client = operation.client
        places = [
            wire.Place(place, chunk.shards[rank].extents)
            for i, (place, (chunk, rank)) in enumerate(zip(operation.places, operation.chunks, strict=True))
            if (i in operation.sums if operation.is_store else operation.results[place])
        ]
        operation.instance.copies -= 1
        operation.placement = wire.Placement(next(self._numbers), *mapped.owner, places)
        return [*self._answer_again(operation), *self._unmap_unused(client, operation.instance)]

    def _repeated(self, client: Client, number: bytes) -> CopyOperation | None:
        """The operation that a client asks for again, because its connection broke before the answer arrived. Its
        chunks are not stored yet, and its client must learn where they are."""
        return next((each for each in client.own_copies if each.number == number), None)

    def _answer_again(self, operation: CopyOperation) -> list[Action]:
        if operation.placement is None:
            return []  # the answer is still to come
        return [Reply(operation.client.identity, operation.number, operation.placement)]

    def complete(self, client: Client, number: bytes, request: wire.Complete, wall: int) -> list[Action]:
        """End an operation whose bytes the client has copied. Raises UnknownRequest, and then changes nothing."""
        operation = next((each for each in client.own_copies if _is_placed_as(each, request)), None)
        if operation is None:
            raise UnknownRequest(f"no store or retrieve {request.operation} waits for its bytes")
        client.own_copies.remove(operation)
        operation.number = number
        operation.instance.copies += 1
        if not operation.is_store:
            for place, (chunk, rank) in zip(operation.places, operation.chunks, strict=True):
                operation.results[place] &= self._is_as_stored(chunk, rank, 0)
        elif not request.copied or operation.instance.mapped is None:
            operation.sums.clear()
        elif any(piece.summed for piece in operation.pieces):
            return self._copy(operation, operation.pieces)
        return self._end(operation, wall)

    def leave(self, client: Client, wall: int) -> list[Action]:
        """End the operations whose bytes a client was to copy: its process is gone, or it has closed its connection,
        after which it copies no more."""
        placed = [each for each in client.own_copies if each.placement is not None]
        client.own_copies.clear()
        actions: list[Action] = []
        for operation in placed:
            operation.instance.copies += 1
            actions += self._end(operation, wall)
        return actions

    def _is_as_stored(self, chunk: Chunk, rank: int, got: int) -> bool:
        shard = chunk.shards[rank]
        if not shard.sealed or is_forgotten(chunk):
            return False  # marked corrupt, or forgotten, during the copy
        if got and shard.checksum and got != shard.checksum:
            self._note_corrupt(chunk, rank)
            return False
        return True

    def _note_corrupt(self, chunk: Chunk, rank: int) -> None:
        """Mark a shard whose bytes do not have its checksum, unless it is on its way out."""
        if chunk.shards[rank].sealed and not is_forgotten(chunk):
            self._counters["corrupt_chunks"] += 1
            self._index.mark_corrupt(chunk, rank)

    def _end(self, operation: CopyOperation, wall: int) -> list[Action]:
        client, instance = operation.client, operation.instance
        client.queued -= 1
        client.queued_chunks -= len(operation.chunks)
        instance.copies -= 1
        self.operations -= 1
        value: object
        actions: list[Action] = []
        if operation.comparison is not None:
            value = self._verification.record(operation)
            outcome = "differing" if value.worst > operation.comparison.limit else "equal"
            self._trails.copied(client, operation.comparison.shards[0].request, **{outcome: value.chunks})
            self._index.release([chunk for chunk, _ in operation.chunks])
        elif operation.is_store:
            self._end_store(operation, wall)
            value = operation.results[0]
        else:
            self._end_retrieve(operation)
            value = operation.results
        if not client.dead:
            actions.append(Reply(client.identity, operation.number, value))
        return [*actions, *self._unmap_unused(client, instance)]

    def _unmap_unused(self, client: Client, instance: Instance) -> list[Action]:
        is_unused = instance.closing and not instance.copies and instance.mapped is not None
        return [self._registrations.unmap(client, instance)] if is_unused else []

    def _end_store(self, operation: CopyOperation, wall: int) -> None:
        arrived = {} if operation.client.dead else operation.sums
        sealed = self._index.finish(operation.chunks, arrived, wall)
        self._counters["stored_chunks"] += len(sealed)
        self._counters["failed_chunks"] += len(operation.chunks) - len(sealed)
        self.stored_bytes += sum(chunk.shards[rank].size for chunk, rank in sealed)
        operation.results[0] &= len(sealed) == len(operation.chunks)
        ids, first = {id(shard) for shard in sealed}, 0
        for request, _, count in operation.requests:
            place = slice(*(bisect_left(operation.places, each) for each in (first, first + count)))
            shards, first = operation.chunks[place], first + count
            done = sum(id(shard) in ids for shard in shards)
            self._trails.copied(operation.client, request, stored=done, not_stored=len(shards) - done)
        _log_end("stored %d of %d new chunks", len(sealed), operation)

    def _end_retrieve(self, operation: CopyOperation) -> None:
        results = operation.results
        _log_end("retrieved %d of %d chunks", sum(results), operation)
        self._counters["retrieved_chunks"] += sum(results)
        for place, (chunk, rank) in zip(operation.places, operation.chunks, strict=True):
            self.retrieved_bytes += chunk.shards[rank].size if results[place] else 0
        self._index.release([chunk for chunk, _ in operation.chunks])  # this removes what is pending removal
        first = 0
        for request, model, keys in operation.requests:
            done = sum(results[first : first + keys])
            self._trails.copied(operation.client, request, loaded=done, not_loaded=keys - done)
            ended = keys if operation.unpins else 0
            self._sessions.count_retrieved(operation.client.tenant, request, model, ended, done)
            first += keys


def _blocks(instance: Instance, part: wire.Shards) -> tuple[npt.NDArray[np.intp], int, int]:
    """The block ids of a checked part; how many blocks, and bytes, each of its chunks has."""
    blocks = len(part.block_ids) // 4 // (len(part.hashes) // HASH_BYTES)
    return np.frombuffer(part.block_ids, np.uint32).astype(np.intp), blocks, instance.layout.block_bytes * blocks


def _is_placed_as(operation: CopyOperation, request: wire.Complete) -> bool:
    placed = operation.placement
    return placed is not None and (placed.operation, placed.boot) == (request.operation, request.boot)


def _log_end(what: str, done: int, operation: CopyOperation) -> None:
    """Log how an operation ended, with its request ids, so that a request can be followed through the log."""
    if log.isEnabledFor(logging.DEBUG):
        count = len(operation.chunks) if operation.is_store else len(operation.results)
        requests = " ".join(dict.fromkeys(request for request, _, _ in operation.requests))
        log.debug(what, done, count, extra={"client": operation.client.called, "request": requests})
