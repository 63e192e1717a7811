"""Stores and retrieves: reserves or holds their chunks, plans the copies, seals what arrived, and replies.

Called by core/depot.py on the deciding thread. Invariant: an operation's reservations and holds are released exactly
once, when its last copy has ended, even if its client has died.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np

from kvdepot.config import Config
from kvdepot.core.actions import Action, Reply
from kvdepot.core.admission import check_shards, check_source, check_targets
from kvdepot.core.clients import Client, Instance, Liveness
from kvdepot.core.index import matching
from kvdepot.core.index.chunk import Chunk, Namespace, is_forgotten
from kvdepot.core.index.index import Index
from kvdepot.core.index.runs import Refusal, Run
from kvdepot.core.registrations import Registrations
from kvdepot.core.sessions import Sessions
from kvdepot.errors import Busy, UnknownInstance
from kvdepot.memory.copier import Copy, CopyPiece
from kvdepot.protocol import wire
from kvdepot.protocol.counters import Counters
from kvdepot.protocol.keys import HASH_BYTES, tenant_salt

log = logging.getLogger(__name__)

_QUEUED_CHUNKS = 1 << 18
"""While a client has this many chunks in flight, its operations are refused."""
_SAMPLED = 16
"""With `verify = "sampled"`, one chunk in this many is checksummed."""
_REFUSED = {
    Refusal.NO_ROOM: "dropped_chunks",
    Refusal.OVER_CAP: "capped_chunks",
    Refusal.OTHER_SIZE: "mismatched_chunks",
}
"""The counters of chunks that were not stored."""


@dataclass(slots=True, eq=False)
class _Operation:
    """One store or retrieve in progress."""

    client: Client
    number: bytes
    instance: Instance
    is_store: bool
    chunks: list[tuple[Chunk, int]]  # reserved or held: chunk and rank, in key order
    tasks: int = 0
    results: list[bool] = field(default_factory=list)  # of a retrieve, one per key; of a store, one
    places: list[int] = field(default_factory=list)  # chunk i of `chunks` is key `places[i]`
    sums: dict[int, int] = field(default_factory=dict)  # of a store: checksums of arrived chunks, by position
    requests: list[tuple[str, str, int]] = field(default_factory=list)  # request id, model, number of keys
    unpins: bool = False


@dataclass(slots=True, eq=False)
class CopyToken:
    """The token of a Copy, which copies the chunks `[first, end)` of an operation."""

    operation: _Operation
    first: int
    end: int


class Transfers:
    """All stores and retrieves of one depot."""

    def __init__(
        self,
        config: Config,
        index: Index,
        registrations: Registrations,
        sessions: Sessions,
        counters: Counters,
    ) -> None:
        self.operations = 0  # in progress
        self.stored_bytes = self.retrieved_bytes = 0
        self._config = config
        self._index = index
        self._registrations = registrations
        self._sessions = sessions
        self._counters = counters

    def __repr__(self) -> str:
        return f"<Transfers {self.operations} operations>"

    def store(self, client: Client, number: bytes, request: wire.Store, wall: int) -> list[Action]:
        """Reserve the missing chunks and copy them; replies when the last copy ends. wall: seconds since 1970.

        Raises BadRequest, UnknownInstance or Busy, and then changes nothing.
        """
        instance = self._admit(client, request.instance)
        for part in request.shards:
            check_shards(part, instance.layout)
            check_source(part)
        operation = _Operation(client, number, instance, is_store=True, chunks=[])
        pieces: list[CopyPiece] = []
        complete = True
        namespaces = [self._namespace(instance, part) for part in request.shards]  # raises before anything is reserved
        for part, namespace in zip(request.shards, namespaces, strict=True):
            ids = np.frombuffer(part.block_ids, np.uint32).astype(np.intp)
            count = len(part.hashes) // HASH_BYTES
            blocks = len(ids) // count
            size = instance.layout.block_bytes * blocks
            salt = tenant_salt(client.tenant, part.salt)
            operation.requests.append((part.request, part.model, count))
            run = Run(part.hashes, size, part.parent, part.depth + 1, salt, part.continues)
            made = self._index.reserve(namespace, part.rank, run, wall)
            for place, chunk in zip(made.places, made.chunks, strict=True):
                operation.chunks.append((chunk, part.rank))
                extents, block_ids = chunk.shards[part.rank].extents, ids[place * blocks : (place + 1) * blocks]
                pieces.append(CopyPiece(extents, block_ids, 0, self._sums(chunk.key)))
            self._counters["known_chunks"] += made.known
            if made.refusal is not None:
                self._counters[_REFUSED[made.refusal]] += made.refused
                if made.refusal is Refusal.OVER_CAP:
                    self._index.accounts.of(client.tenant, salt).capped += made.refused
                asked = {"client": client.called, "request": part.request}
                log.debug("dropped %d chunks of a store: %s", made.refused, made.refusal.value, extra=asked)
                complete = False
        operation.results = [complete]
        if not pieces:
            _log_end("stored %d of %d new chunks", 0, operation)
            return [Reply(client.identity, number, complete)]
        return self._start(operation, pieces, client.liveness, request.ticket)

    def retrieve(self, client: Client, number: bytes, request: wire.Retrieve) -> list[Action]:
        """Copy the chunks that are present into the engine's blocks; then reply with one bool per key.

        Raises BadRequest, UnknownInstance or Busy, and then changes nothing.
        """
        instance = self._admit(client, request.instance)
        for part in request.shards:
            check_shards(part, instance.layout)
        check_targets(request.shards)
        operation = _Operation(client, number, instance, is_store=False, chunks=[], unpins=request.unpins)
        pieces = []
        for part in request.shards:
            ids = np.frombuffer(part.block_ids, np.uint32).astype(np.intp)
            count = len(part.hashes) // HASH_BYTES
            blocks = len(ids) // count
            namespace = self._namespace(instance, part)
            size = instance.layout.block_bytes * blocks
            for i, chunk in enumerate(matching.find(namespace, part.rank, part.hashes)):
                operation.results.append(False)
                if chunk is None or (shard := chunk.shards[part.rank]).size != size:
                    self._counters["retrieve_misses"] += 1
                    continue
                operation.places.append(len(operation.results) - 1)
                operation.chunks.append((chunk, part.rank))
                skip = part.skip_blocks if i == 0 else 0
                summed = shard.checksum != 0 and self._sums(chunk.key)
                pieces.append(CopyPiece(shard.extents, ids[i * blocks : (i + 1) * blocks], skip, summed))
            operation.requests.append((part.request, part.model, count))
            self._sessions.retrieving(client.tenant, part.request, part.model)
        self._index.hold([chunk for chunk, _ in operation.chunks])
        if not pieces:
            self._end_retrieve(operation)
            return [Reply(client.identity, number, operation.results)]
        return self._start(operation, pieces, None, 0)

    def _namespace(self, instance: Instance, part: wire.Shards) -> Namespace:
        """The namespace of a checked part's chunks. Raises Busy."""
        blocks = len(part.block_ids) // 4 // (len(part.hashes) // HASH_BYTES)
        known = instance.namespaces.get((part.model, part.world_size, part.rank, blocks))
        return known or self._registrations.namespace(instance, part.model, part.world_size, part.rank, blocks)

    def _admit(self, client: Client, number: int) -> Instance:
        instance = client.instances.get(number)
        if instance is None or instance.mapped is None or instance.closing:
            raise UnknownInstance(f"no KV tensors are registered under instance {number}")
        if client.queued >= self._config.max_queued or client.queued_chunks >= _QUEUED_CHUNKS:
            self._counters["operations_refused"] += 1
            raise Busy(
                f"{client.queued} stores and retrieves of {client.queued_chunks} chunks are in flight; the limits are "
                f"{self._config.max_queued} (max_queued) and {_QUEUED_CHUNKS} chunks"
            )
        return instance

    def _start(
        self, operation: _Operation, pieces: list[CopyPiece], liveness: Liveness | None, ticket: int
    ) -> list[Action]:
        client, instance = operation.client, operation.instance
        assert instance.mapped is not None and len(pieces) == len(operation.chunks)
        client.queued += 1
        client.queued_chunks += len(pieces)
        instance.copies += 1
        self.operations += 1
        size = len(pieces[0].block_ids) * instance.layout.block_bytes
        step = max(1, -(-instance.mapped.task_bytes // size))
        tasks: list[Copy] = []
        whole = cache(instance.mapped.whole)
        for first in range(0, len(pieces), step):
            token = CopyToken(operation, first, min(first + step, len(pieces)))
            fence = None if liveness is None else partial(getattr, liveness, "fence")
            tasks.append(
                Copy(token, operation.is_store, instance.mapped, pieces[first : token.end], fence, ticket, whole)
            )
        operation.tasks = len(tasks)
        tasks.sort(key=lambda task: not any(piece.summed for piece in task.pieces))  # summing takes longer than copying
        return [*tasks]

    def _sums(self, key: bytes) -> bool:
        """Whether this chunk is checksummed; depends only on its key, so that store and retrieve agree."""
        return self._config.verify == "always" or (self._config.verify == "sampled" and key[0] < 256 // _SAMPLED)

    def copied(self, token: CopyToken, sums: list[int] | None, wall: int) -> list[Action]:
        """Handle the end of a copy. sums: one per piece, or None if it failed. wall: seconds since 1970."""
        operation = token.operation
        operation.tasks -= 1
        if sums is not None:
            for i in range(token.first, token.end):
                got = sums[i - token.first]
                if operation.is_store:
                    operation.sums[i] = got
                else:
                    operation.results[operation.places[i]] = self._is_as_stored(*operation.chunks[i], got)
        if operation.tasks:
            return []
        return self._end(operation, wall)

    def _is_as_stored(self, chunk: Chunk, rank: int, got: int) -> bool:
        shard = chunk.shards[rank]
        if not shard.sealed or is_forgotten(chunk):
            return False  # marked corrupt, or forgotten, during the copy
        if got and shard.checksum and got != shard.checksum:
            self._counters["corrupt_chunks"] += 1
            self._index.mark_corrupt(chunk, rank)
            return False
        return True

    def _end(self, operation: _Operation, wall: int) -> list[Action]:
        client, instance = operation.client, operation.instance
        client.queued -= 1
        client.queued_chunks -= len(operation.chunks)
        instance.copies -= 1
        self.operations -= 1
        value: object
        actions: list[Action] = []
        if operation.is_store:
            self._end_store(operation, wall)
            value = operation.results[0]
        else:
            self._end_retrieve(operation)
            value = operation.results
        if not client.dead:
            actions.append(Reply(client.identity, operation.number, value))
        if instance.closing and not instance.copies:
            actions.append(self._registrations.unmap(client, instance))
        return actions

    def _end_store(self, operation: _Operation, wall: int) -> None:
        arrived = {} if operation.client.dead else operation.sums
        sealed = self._index.finish(operation.chunks, arrived, wall)
        self._counters["stored_chunks"] += len(sealed)
        self._counters["failed_chunks"] += len(operation.chunks) - len(sealed)
        self.stored_bytes += sum(chunk.shards[rank].size for chunk, rank in sealed)
        operation.results[0] &= len(sealed) == len(operation.chunks)
        _log_end("stored %d of %d new chunks", len(sealed), operation)

    def _end_retrieve(self, operation: _Operation) -> None:
        results = operation.results
        _log_end("retrieved %d of %d chunks", sum(results), operation)
        self._counters["retrieved_chunks"] += sum(results)
        for place, (chunk, rank) in zip(operation.places, operation.chunks, strict=True):
            self.retrieved_bytes += chunk.shards[rank].size if results[place] else 0
        self._index.release([chunk for chunk, _ in operation.chunks])  # this removes what is pending removal
        if operation.unpins:
            first = 0
            for request, model, keys in operation.requests:
                done = sum(results[first : first + keys])
                self._sessions.count_retrieved(operation.client.tenant, request, model, keys, done)
                first += keys


def _log_end(what: str, done: int, operation: _Operation) -> None:
    """Log how an operation ended, with its request ids, so that a request can be followed through the log."""
    if log.isEnabledFor(logging.DEBUG):
        count = len(operation.chunks) if operation.is_store else len(operation.results)
        requests = " ".join(dict.fromkeys(request for request, _, _ in operation.requests))
        log.debug(what, done, count, extra={"client": operation.client.called, "request": requests})
