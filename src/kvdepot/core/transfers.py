"""Stores, retrieves and comparisons: reserves or holds their chunks, tells their clients where the bytes are or belong,
and seals, checks and releases them once the clients have copied. No byte of KV is touched here.

Called by core/depot.py on the deciding thread. Invariant: an operation's reservations and holds are released exactly
once, when its client completes it or is gone.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence

from kvdepot.config import Config
from kvdepot.core.actions import Action, Prepare, Prepared, Reply
from kvdepot.core.admission import check_completion, summed_below
from kvdepot.core.clients import Client, CopyOperation, Instance
from kvdepot.core.index import matching
from kvdepot.core.index.chunk import Chunk, Namespace, Shard, is_forgotten
from kvdepot.core.index.index import Index
from kvdepot.core.index.runs import Refusal, Run
from kvdepot.core.pins import Pins
from kvdepot.core.registrations import Registrations
from kvdepot.core.trails import Recorders
from kvdepot.errors import BadRequest, Busy, UnknownInstance, UnknownRequest
from kvdepot.protocol import wire
from kvdepot.protocol.keys import HASH_BYTES, tenant_salt

log = logging.getLogger(__name__)

LINGER_S = 2.0
"""Seconds for which nobody gets the memory that a dead client was storing to: a device may still write there."""
_QUEUED_CHUNKS = 1 << 18
"""The chunks in flight of one client at which its further operations are refused."""
_REFUSED = {
    Refusal.NO_ROOM: "dropped_chunks",
    Refusal.OVER_CAP: "capped_chunks",
    Refusal.WANTED: "yielded_chunks",
    Refusal.OTHER_SIZE: "mismatched_chunks",
}
"""The counter of chunks that were not stored, by the reason."""


class Transfers:
    """All stores, retrieves and comparisons of one depot."""

    def __init__(
        self, config: Config, index: Index, registrations: Registrations, pins: Pins, recorders: Recorders, boot: bytes
    ) -> None:
        self.operations = 0  # in progress
        self.stored_bytes = self.retrieved_bytes = 0
        self._config = config
        self._owner = config.arena, boot  # the server's part of a wire.Placement
        self._summed_below = summed_below(config.verify)
        self._index = index
        self._registrations = registrations
        self._pins = pins
        self._lingering: deque[tuple[float, list[Shard]]] = deque()  # end of the wait, and shards of dead clients
        self._counters, self._trails = recorders.counters, recorders.trails
        self._verification = recorders.verification

    def store(self, client: Client, number: bytes, request: wire.Store, wall: int) -> list[Action]:
        """Reserve the missing chunks and have their memory allocated; the reply then says where the client must write.
        wall: seconds since 1970.

        Raises BadRequest, UnknownInstance or Busy, and then changes nothing.
        """
        operation = self._begin(client, number, request)
        if operation is None:
            return self._answer_again(client, number)
        complete, first, instance = True, 0, operation.instance
        namespaces = [self._namespace(instance, part) for part in request.shards]  # raises before anything is reserved
        for part, namespace in zip(request.shards, namespaces, strict=True):
            salt = tenant_salt(client.tenant, part.salt)
            size = instance.layout.block_bytes * part.blocks
            run = Run(part.hashes, size, part.parent, part.depth + 1, salt, part.continues)
            made = self._index.reserve(namespace, part.rank, run, wall)
            for chunk in made.chunks:
                operation.chunks.append((chunk, part.rank))
                operation.summed.append(chunk.key[0] < self._summed_below)
                chunk.shards[part.rank].writer = instance.writer
            operation.positions += [first + place for place in made.places]
            first += _count(part)
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
        if not operation.chunks:
            _log_end("stored %d of %d new chunks", 0, operation)
            return [Reply(client.identity, number, complete)]
        self._start(operation)
        return [Prepare(operation, [chunk.shards[rank].extents for chunk, rank in operation.chunks])]

    def prepared(self, operation: CopyOperation, outcome: Prepared, wall: int) -> list[Action]:
        """Answer a store whose memory is allocated; without memory, nothing is stored. wall: seconds since 1970."""
        client, number = operation.client, operation.number
        if client.operations.get(_id(number)) is not operation:
            return []  # the operation has ended with its client
        if outcome.is_allocated:
            return self._place(operation)
        return [Reply(client.identity, number, self._end_store(operation, (), wall))]

    def retrieve(self, client: Client, number: bytes, request: wire.Retrieve) -> list[Action]:
        """Hold the chunks that are present, and reply where they are.

        Raises BadRequest, UnknownInstance or Busy, and then changes nothing.
        """
        operation = self._begin(client, number, request)
        if operation is None:
            return self._answer_again(client, number)
        instance = operation.instance
        for part in request.shards:
            size, namespace = instance.layout.block_bytes * part.blocks, self._namespace(instance, part)
            for chunk in matching.find(namespace, part.rank, part.hashes):
                shard = chunk.shards[part.rank] if chunk is not None and not namespace.is_quarantined else None
                is_right = shard is not None and shard.writer in (request.writers or [shard.writer])
                operation.results.append(False)
                if chunk is None or shard is None or shard.size != size or not is_right:
                    self._counters["retrieve_misses"] += 1
                    continue
                operation.positions.append(len(operation.results) - 1)
                operation.chunks.append((chunk, part.rank))
                operation.summed.append(shard.checksum != 0 and chunk.key[0] < self._summed_below)
            self._pins.retrieving(client.tenant, part.request, part.model)
        self._index.hold([chunk for chunk, _ in operation.chunks])
        self._start(operation)
        if operation.chunks:
            return self._place(operation)
        return [Reply(client.identity, number, self._end_retrieve(operation, request, ()))]

    def compare(self, client: Client, number: bytes, request: wire.Compare) -> list[Action]:
        """Hold the chunks that are present, and reply where they are. Unless it compares a sample, an engine does not
        get the chunks that it has stored itself.

        Raises BadRequest, UnknownInstance or Busy, and then changes nothing.
        """
        operation = self._begin(client, number, request)
        if operation is None:
            return self._answer_again(client, number)
        if not request.limit > 0.0:
            raise BadRequest(f"a limit of {request.limit} for the difference of equal KV")
        if request.is_sample and not self._config.verify_hits:
            raise BadRequest("this server samples no hits (verify_hits is 0)")
        instance, first = operation.instance, 0
        own = "" if request.is_sample else instance.writer
        for part in request.shards:
            size, namespace = instance.layout.block_bytes * part.blocks, self._namespace(instance, part)
            for i, chunk in enumerate(matching.find(namespace, part.rank, part.hashes)):
                if chunk is None or (shard := chunk.shards[part.rank]).size != size or (own and shard.writer == own):
                    continue
                operation.positions.append(first + i)
                operation.chunks.append((chunk, part.rank))
                operation.summed.append(shard.checksum != 0)
            first += _count(part)
        if not operation.chunks:
            return [Reply(client.identity, number, wire.Comparison())]
        self._index.hold([chunk for chunk, _ in operation.chunks])
        self._start(operation)
        return self._place(operation)

    def _begin(self, client: Client, number: bytes, request: wire.Copying) -> CopyOperation | None:
        """A new operation without chunks; None if the client repeats a request whose operation is in progress."""
        if _id(number) in client.operations:
            return None
        instance = client.instances.get(request.instance)
        if instance is None:
            raise UnknownInstance(f"no KV tensors are registered under instance {request.instance}")
        if instance.fault:  # UnknownInstance would make the client register and ask again
            raise BadRequest(f"instance {request.instance} has registered that it cannot copy: {instance.fault}")
        if len(client.operations) >= self._config.max_queued or client.queued_chunks >= _QUEUED_CHUNKS:
            self._counters["operations_refused"] += 1
            raise Busy(
                f"{len(client.operations)} stores and retrieves of {client.queued_chunks} chunks are in flight; the "
                f"limits are {self._config.max_queued} (max_queued) and {_QUEUED_CHUNKS} chunks"
            )
        return CopyOperation(client, number, instance, request)

    def _namespace(self, instance: Instance, part: wire.Shards) -> Namespace:
        """The namespace of a part's chunks. Raises Busy or BadRequest."""
        known = instance.namespaces.get((part.model, part.world_size, part.rank, part.blocks))
        return known or self._registrations.namespace(instance, part.model, part.world_size, part.rank, part.blocks)

    def _start(self, operation: CopyOperation) -> None:
        client = operation.client
        client.operations[_id(operation.number)] = operation
        client.queued_chunks += len(operation.chunks)
        self.operations += 1

    def _place(self, operation: CopyOperation) -> list[Action]:
        """Tell a client where the bytes are (retrieve) or belong (store)."""
        places = [
            wire.Place(chunk.shards[rank].extents, is_summed)
            for (chunk, rank), is_summed in zip(operation.chunks, operation.summed, strict=True)
        ]
        number = _id(operation.number)
        operation.placement = wire.Placement(number, *self._owner, operation.positions, places)
        return self._answer_again(operation.client, operation.number)

    def _answer_again(self, client: Client, number: bytes) -> list[Action]:
        """Send the placement, also again to a client whose connection broke; without one, there is no answer yet."""
        placement = client.operations[_id(number)].placement
        return [Reply(client.identity, number, placement)] if placement is not None else []

    # -- the end

    def complete(self, client: Client, number: bytes, request: wire.Complete, wall: int) -> list[Action]:
        """End an operation whose client has copied. wall: seconds since 1970.

        Raises UnknownRequest, and then changes nothing, or BadRequest, and then nothing is stored, loaded or compared.
        """
        operation = client.operations.get(request.operation)
        placement = operation.placement if operation is not None else None
        if operation is None or placement is None or placement.boot != request.boot:
            raise UnknownRequest(f"no operation {request.operation} waits for its bytes")
        if not request.copied:
            return [Reply(client.identity, number, self._end(operation, None, wall))]
        try:
            check_completion(request, placement, operation.request)
        except BadRequest:
            self._end(operation, None, wall)
            raise
        return [Reply(client.identity, number, self._end(operation, request, wall))]

    def leave(self, client: Client, has_left: bool, now: float, wall: int) -> None:
        """End the operations of a client that is gone. has_left: the client closed its connection and copies no more;
        otherwise a device may still write to the shards it was storing. wall: seconds since 1970."""
        lent: list[Shard] = []
        for operation in list(client.operations.values()):
            if isinstance(operation.request, wire.Store) and operation.placement is not None and not has_left:
                lent += [self._index.abandon(chunk, rank) for chunk, rank in operation.chunks]
                self._settle_store(operation, [])
            else:
                self._end(operation, None, wall)
        if lent:
            self._lingering.append((now + LINGER_S, lent))

    def next_deadline(self) -> float:
        """The time of the next `expire`, in seconds of the depot's clock."""
        return self._lingering[0][0] if self._lingering else float("inf")

    def expire(self, now: float) -> None:
        """Free the memory that dead clients were storing to, once `LINGER_S` is over."""
        while self._lingering and self._lingering[0][0] <= now:
            for shard in self._lingering.popleft()[1]:
                self._index.give_back(shard)

    def _end(self, operation: CopyOperation, completed: wire.Complete | None, wall: int) -> object:
        """End an operation; returns its answer. completed: the client's report of all places; None: it has not
        copied."""
        sums: Sequence[int] = completed.sums if completed is not None else ()
        match operation.request:
            case wire.Store():
                return self._end_store(operation, sums, wall)
            case wire.Retrieve():
                return self._end_retrieve(operation, operation.request, sums)
            case wire.Compare():
                differences = completed.differences if completed is not None else ()
                return self._end_comparison(operation, operation.request, sums, differences)

    def _remove(self, operation: CopyOperation) -> None:
        client = operation.client
        del client.operations[_id(operation.number)]
        client.queued_chunks -= len(operation.chunks)
        self.operations -= 1

    def _end_store(self, operation: CopyOperation, sums: Sequence[int], wall: int) -> bool:
        """Seal the shards with a checksum in `sums`; returns the answer."""
        return self._settle_store(operation, self._index.finish(operation.chunks, dict(enumerate(sums)), wall))

    def _settle_store(self, operation: CopyOperation, sealed: Sequence[tuple[Chunk, int]]) -> bool:
        """Count a store that the index has ended; returns the answer. sealed: its stored chunks, with their ranks."""
        self._remove(operation)
        self._counters["stored_chunks"] += len(sealed)
        self._counters["failed_chunks"] += len(operation.chunks) - len(sealed)
        self.stored_bytes += sum(chunk.shards[rank].size for chunk, rank in sealed)
        operation.results[0] &= len(sealed) == len(operation.chunks)
        ids = {id(shard) for shard in sealed}
        for part, first, end in _parts(operation):
            place = slice(*(bisect_left(operation.positions, each) for each in (first, end)))
            shards = operation.chunks[place]
            done = sum(id(shard) in ids for shard in shards)
            self._trails.copied(operation.client, part.request, stored=done, not_stored=len(shards) - done)
        _log_end("stored %d of %d new chunks", len(sealed), operation)
        return operation.results[0]

    def _end_retrieve(self, operation: CopyOperation, request: wire.Retrieve, sums: Sequence[int]) -> list[bool]:
        self._remove(operation)
        results = operation.results
        for place, (chunk, rank), found in zip(operation.positions, operation.chunks, sums, strict=False):
            if self._is_as_stored(chunk, rank, found):
                results[place] = True
                self.retrieved_bytes += chunk.shards[rank].size
        _log_end("retrieved %d of %d chunks", sum(results), operation)
        self._counters["retrieved_chunks"] += sum(results)
        self._index.release([chunk for chunk, _ in operation.chunks])  # this removes what is pending removal
        for part, first, end in _parts(operation):
            done = sum(results[first:end])
            self._trails.copied(operation.client, part.request, loaded=done, not_loaded=end - first - done)
            ended = end - first if request.unpins else 0
            self._pins.count_retrieved(operation.client.tenant, part.request, part.model, ended, done)
        return results

    def _end_comparison(
        self, operation: CopyOperation, request: wire.Compare, sums: Sequence[int], differences: Sequence[list[float]]
    ) -> wire.Comparison:
        self._remove(operation)
        both = enumerate(zip(sums, differences, strict=True))
        found = {i: each for i, (got, each) in both if self._is_as_stored(*operation.chunks[i], got)}
        value = self._verification.record(operation, request, found)
        outcome = "differing" if value.worst > request.limit else "equal"
        self._trails.copied(operation.client, request.shards[0].request, **{outcome: value.chunks})
        self._index.release([chunk for chunk, _ in operation.chunks])
        return value

    def _is_as_stored(self, chunk: Chunk, rank: int, got: int) -> bool:
        """Whether a client may use a shard that it has copied; marks the shard corrupt if its checksum has changed.
        got: the checksum of the bytes read; 0: none was computed."""
        shard = chunk.shards[rank]
        if not shard.sealed or is_forgotten(chunk):
            return False  # marked corrupt, or forgotten, during the copy
        if got and got != shard.checksum:
            self._counters["corrupt_chunks"] += 1
            self._index.mark_corrupt(chunk, rank)
            return False
        return True


def _id(number: bytes) -> int:
    """The number of a request and of the operation that it begins."""
    return int.from_bytes(number, "little")


def _count(part: wire.Shards) -> int:
    return len(part.hashes) // HASH_BYTES


def _parts(operation: CopyOperation) -> Iterator[tuple[wire.Shards, int, int]]:
    """The parts of a request, each with the positions of its first chunk and of the first chunk behind it."""
    first = 0
    for part in operation.request.shards:
        yield part, first, first + _count(part)
        first += _count(part)


def _log_end(what: str, done: int, operation: CopyOperation) -> None:
    """Log how an operation ended, with its request ids, so that a request can be followed through the log."""
    if log.isEnabledFor(logging.DEBUG):
        count = len(operation.chunks) if isinstance(operation.request, wire.Store) else len(operation.results)
        requests = " ".join(dict.fromkeys(part.request for part in operation.request.shards))
        log.debug(what, done, count, extra={"client": operation.client.called, "request": requests})
