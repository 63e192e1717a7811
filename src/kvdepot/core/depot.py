"""The deciding part of the server: messages and outcomes in, replies and copy tasks out.

Called with messages by core/connections.py and with outcomes by server/loop.py, on one thread. No sockets, threads or
clocks here, and no I/O: what takes time is returned as an action. The one law: every request is answered exactly once,
and what a request holds (reservations, pins, mappings) is given up exactly once, whatever comes first: its end, an
error, or its client's death.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np

from kvdepot.config import Config
from kvdepot.core.actions import Action, Reply
from kvdepot.core.admission import check_shards, check_targets, chunks_named, tenant_salt
from kvdepot.core.clients import Client, Instance, Lease, PendingLookup
from kvdepot.core.forgetting import STEP_CHUNKS, RemovalRequests, Removals
from kvdepot.core.index.chunk import Chunk, Namespace
from kvdepot.core.index.index import Index
from kvdepot.core.index.outcomes import Absent, NoRoom, Present, Reason, Replaced, Reserved
from kvdepot.core.infinite_cache import InfiniteCache
from kvdepot.core.registrations import Registrations, Remapping
from kvdepot.core.report import SHOWN, Report
from kvdepot.core.reuse import Windows
from kvdepot.core.sessions import Sessions
from kvdepot.core.tiering.forgetting import Forgetting
from kvdepot.core.tiering.lookup import Arrived, TierLookup
from kvdepot.core.tiering.tier import Token
from kvdepot.core.tiering.tiering import Decision, Tiering
from kvdepot.devices.cpu import HostTensors
from kvdepot.errors import BadRequest, Busy, InternalError, KVDepotError, UnknownClient, UnknownInstance
from kvdepot.memory.copier import Copy, CopyPiece, Mapped
from kvdepot.protocol import wire
from kvdepot.protocol.counters import Counters
from kvdepot.protocol.handshake import Seal
from kvdepot.protocol.keys import HASH_BYTES
from kvdepot.protocol.layout import Layout
from kvdepot.protocol.status import Device, Status
from kvdepot.tiers import TierConfig

__all__ = ["Depot"]

log = logging.getLogger(__name__)

_QUEUED_CHUNKS = 1 << 18
"""A client with so many chunks in flight waits until some have been copied."""
_SAMPLED = 16
"""With `verify = "sampled"`, one chunk in so many is summed up."""
_MOST_SAVED = 1 << 32
"""Tokens, or seconds, that one request can have saved."""


@dataclass(slots=True, eq=False)
class _Operation:
    """One STORE or RETRIEVE under way."""

    client: Client
    number: bytes
    instance: Instance
    is_store: bool
    chunks: list[tuple[Chunk, int]]  # what is held: chunk and rank, in key order
    tasks: int = 0
    results: list[bool] = field(default_factory=list)  # one a key
    places: list[int] = field(default_factory=list)  # chunk i of `chunks` is key `places[i]`
    sums: dict[int, int] = field(default_factory=dict)  # of a store, by place in `chunks`: what has arrived
    requests: list[tuple[str, str, int]] = field(default_factory=list)  # request id, model, number of keys
    unpins: bool = False


@dataclass(slots=True, eq=False)
class _Part:
    """A task's token: which chunks `[first, end)` of an operation it copies."""

    operation: _Operation
    first: int
    end: int


class Depot:
    """Index, pins, sessions and registrations of one server."""

    def __init__(
        self,
        config: Config,
        index: Index,
        map_layout: Callable[[Layout], Mapped] = HostTensors.open,
        tiers: Sequence[TierConfig] = (),
        device_status: Callable[[], list[Device]] = list,
        boot: bytes = b"",
        step_chunks: int = STEP_CHUNKS,
    ) -> None:
        """step_chunks: so many are removed in one go where many are."""
        self.index = index
        self.removals = Removals(index, step_chunks)
        self.counters = Counters()
        self.tiering = Tiering(tiers, index, config.chunk_size, config.lookup_s)
        self.ceiling = InfiniteCache(0.0)
        self.reuse = Windows(0.0)
        self.sessions = Sessions(config, index, self.tiering, self.counters, self.ceiling)
        self.registrations = Registrations(config, index, self.counters, map_layout)
        self.operations = 0
        self.max_clients = config.max_clients  # less where there are not descriptors enough
        self._config = config
        self._verify = config.verify
        self._clients: dict[bytes, Client] = {}
        self.stored_bytes = self.retrieved_bytes = 0
        self.saved_tokens, self.saved_s = 0, 0.0  # as engines said
        self.now = 0.0
        self.wall = 0  # seconds since 1970, as of the last tick
        self.report = Report(self, device_status, boot)
        self.forgetting = RemovalRequests(
            config, index, self.removals, self.tiering, self.sessions, self.counters, self.report
        )

    def __repr__(self) -> str:
        return f"<Depot {len(self._clients)} clients, {self.operations} operations, {self.index}>"

    @property
    def asked_tokens(self) -> int:
        """Of prompts that engines looked up, as far as chunks are whole."""
        return self.counters["lookup_chunks"] * self._config.chunk_size

    @property
    def reused_tokens(self) -> int:
        """That engines loaded instead of computing them: what they said, and what requests that named none got."""
        return self.saved_tokens + self.sessions.retrieved_chunks * self._config.chunk_size

    # -- events

    def welcome(
        self, identity: bytes, lease: Lease, user: str = "", tenant: str = "", seal: Seal | None = None
    ) -> None:
        """Take in a client that has proved itself; it reaches only this tenant's chunks. Raises Busy: too many."""
        assert identity not in self._clients
        if len(self._clients) >= self.max_clients:
            self.counters["clients_refused"] += 1
            raise Busy(f"{len(self._clients)} clients are connected, the most that max_clients or open files allow")
        self._clients[identity] = Client(identity, lease, tenant, user, seal, self.now, self.now)

    def client(self, identity: bytes) -> Client | None:
        """The client of this identity, if it has said hello and lives."""
        return self._clients.get(identity)

    def handle(self, identity: bytes, number: bytes, request: wire.Request, now: float = 0.0) -> list[Action]:
        """Decide one request. Never raises a KVDepotError: it becomes the reply."""
        self.now = now
        try:
            client = self._clients.get(identity)
            if client is None:
                raise UnknownClient("say hello first: this server has not met you")
            client.heard = now
            chunks = chunks_named(request)
            if chunks > wire.MAX_CHUNKS:
                self.counters["large_requests_refused"] += 1
                raise Busy(f"a request that names {chunks} chunks, more than {wire.MAX_CHUNKS}")
            return self._decide(client, number, request)
        except KVDepotError as exc:
            self.counters["errors"] += 1
            asked = {"client": identity.hex()[:8], "request": getattr(request, "request", "")}
            log.debug("%s failed: %s", type(request).__name__, exc, extra=asked)
            return [Reply(identity, number, exc)]

    def _decide(self, client: Client, number: bytes, request: wire.Request) -> list[Action]:
        value: Any = None
        match request:
            case wire.Lookup():
                return self.sessions.lookup(PendingLookup(client, number, client, request, 0), self.now)
            case wire.Store():
                return self._store(client, number, request)
            case wire.Retrieve():
                return self._retrieve(client, number, request)
            case wire.EndSession():
                actions = self.sessions.give_up(client, request.request)
                self.sessions.end(client, request.request)  # whatever it says that it saved
                return [*actions, Reply(client.identity, number, self._count_saved(request))]
            case wire.Register():
                self.report.note(
                    "engine", f"client {client.called} registers KV tensors of {request.model[:SHOWN] or 'a model'}"
                )
                return self.registrations.register(client, number, request)
            case wire.Unregister():
                return self.registrations.unregister(client, request.instance, [number])
            case wire.ChunkSize():
                value = self._config.chunk_size
            case wire.Noop():
                value = "ok"
            case wire.Clear():
                return self.forgetting.clear(client, number, request)
            case wire.Pin():
                return self.sessions.pin(client, number, request, self.now)
            case wire.Unpin():
                return self.sessions.unpin(client, number, request.name)
            case wire.Forget():
                return self.forgetting.forget(client, number, request, self.now)
            case wire.Count():
                return self.forgetting.count(client, number, request)
            case wire.Status():
                value = self.status(client.tenant)
            case wire.Hello() | wire.Prove():
                raise InternalError("hello is for core/connections.py to answer")
        return [Reply(client.identity, number, value)]

    def finished(self, token: Any, outcome: Any, now: float = 0.0) -> list[Action]:
        """A task or a tier task has ended; `outcome` as in copier.Copier and worker.TierWorker."""
        self.now = now
        if isinstance(token, Token):
            return [*self._go_on(self.tiering.finished(token, outcome, now)), *self.tiering.make_room()]
        if isinstance(token, _Part):
            return self._copied(token, outcome)
        assert isinstance(token, Remapping), token
        return self.registrations.mapped(token, outcome)

    def next_deadline(self) -> float:
        """When `expire` must be called next; 0: as soon as what has arrived is served."""
        return 0.0 if self.removals else self.tiering.next_deadline()

    def expire(self, now: float) -> list[Action]:
        """Go on with what is being removed, and answer what has waited for tiers long enough."""
        self.now = now
        actions = self.forgetting.step()
        while self.tiering.next_deadline() <= now:
            actions += self._go_on(self.tiering.expire(now))
        return actions

    def _go_on(self, decisions: list[Decision]) -> list[Action]:
        """Do what has to follow what was decided of tiers, in its order: each must find what the one before left."""
        actions: list[Action] = []
        for decision in decisions:
            match decision:
                case TierLookup():
                    actions += self.sessions.answer(decision)
                case Arrived():
                    actions += self.tiering.keep_nearer(decision)
                case Forgetting():
                    actions += self.forgetting.answer(decision)
                case _:
                    actions.append(decision)
        return actions

    def tick(self, now: float, wall: float) -> list[Action]:
        """Once a second. wall: seconds since 1970."""
        self.now, self.wall = now, int(wall)
        self.sessions.tick(now)
        self.ceiling.tick(now, self.counters["hit_chunks"])
        self.reuse.tick(now, self.asked_tokens, self.reused_tokens)
        self.counters["expired_chunks"] += self.index.expire(self.wall)
        self.report.tick(now)
        return [*self.tiering.tick(now)]

    def stop_waiting(self) -> list[Action]:
        """Remove what is to be removed, and answer every request that awaits tiers: the server is about to end."""
        actions: list[Action] = []
        while self.removals:
            actions += self.forgetting.step()
        actions += self.sessions.stop(list(self._clients.values()))
        for forgetting in self.tiering.stop():
            actions += self.forgetting.answer(forgetting)
        return actions

    def died(self, identity: bytes, has_left: bool = False) -> list[Action]:
        """A client is gone: give up all it holds. What is being copied for it ends first, by itself.

        has_left: it closed its connection, and that is no death.
        """
        client = self._clients.pop(identity, None)
        if client is None:
            return []
        if not has_left:
            self.counters["clients_died"] += 1
        if client.is_engine:
            self.report.note("engine", f"client {client.called} {'is gone' if has_left else 'died'}")
        client.dead = True
        actions = self.sessions.leave(client)
        for number in list(client.instances):
            actions += self.registrations.unregister(client, number, [])
        return actions

    def _count_saved(self, request: wire.EndSession) -> BadRequest | None:
        if not (0 <= request.saved_tokens <= _MOST_SAVED and 0.0 <= request.saved_s <= _MOST_SAVED):
            self.counters["errors"] += 1
            return BadRequest(f"{request.saved_tokens} tokens and {request.saved_s} s are no saving")
        self.saved_tokens += request.saved_tokens
        self.saved_s += request.saved_s
        return None

    # -- store and retrieve

    def _store(self, client: Client, number: bytes, request: wire.Store) -> list[Action]:
        instance = self._admit(client, request.instance)
        for part in request.shards:
            check_shards(part, instance.layout)
        operation = _Operation(client, number, instance, is_store=True, chunks=[])
        pieces: list[CopyPiece] = []
        complete = True
        namespaces = [self._namespace(instance, part) for part in request.shards]  # or it is refused with none reserved
        for part, namespace in zip(request.shards, namespaces, strict=True):
            ids = np.frombuffer(part.block_ids, np.uint32).astype(np.intp)
            count = len(part.hashes) // HASH_BYTES
            blocks = len(ids) // count
            size = instance.layout.block_bytes * blocks
            salt = tenant_salt(client.tenant, part.salt)
            operation.requests.append((part.request, part.model, count))
            outcomes = self.index.reserve_missing(
                namespace, part.rank, part.hashes, part.parent, part.depth + 1, size, salt, self.wall
            )
            for i, outcome in enumerate(outcomes):
                match outcome:
                    case Reserved(chunk) | Replaced(chunk):
                        if isinstance(outcome, Replaced):
                            self.tiering.replaced(chunk, part.rank)
                        operation.chunks.append((chunk, part.rank))
                        extents, block_ids = chunk.shards[part.rank].extents, ids[i * blocks : (i + 1) * blocks]
                        pieces.append(CopyPiece(extents, block_ids, 0, self._sums(chunk.key)))
                    case Present():
                        self.counters["known_chunks"] += 1
                    case NoRoom():
                        # Without this chunk those behind it are useless: drop them too.
                        self.counters["dropped_chunks"] += count - i
                        asked = {"client": client.called, "request": part.request}
                        log.debug("%d chunks of a store dropped: no room for them", count - i, extra=asked)
                        complete = False
        operation.results = [complete]
        if not pieces:
            _tell("stored %d of %d new chunks", 0, operation)
            return [Reply(client.identity, number, complete)]
        return self._start(operation, pieces, client.lease, request.ticket)

    def _retrieve(self, client: Client, number: bytes, request: wire.Retrieve) -> list[Action]:
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
            for i, found in enumerate(self.index.find(namespace, part.rank, part.hashes)):
                operation.results.append(False)
                if isinstance(found, Absent) or found.shard.size != size:
                    self.counters["retrieve_misses"] += 1
                    continue
                chunk, shard = found.chunk, found.shard
                operation.places.append(len(operation.results) - 1)
                operation.chunks.append((chunk, part.rank))
                skip = part.skip_blocks if i == 0 else 0
                summed = shard.checksum != 0 and self._sums(chunk.key)
                pieces.append(CopyPiece(shard.extents, ids[i * blocks : (i + 1) * blocks], skip, summed))
            operation.requests.append((part.request, part.model, count))
        self.index.hold([chunk for chunk, _ in operation.chunks], use=False)  # the lookup was the use
        if not pieces:
            self._end_retrieve(operation)
            return [Reply(client.identity, number, operation.results)]
        return self._start(operation, pieces, None, 0)

    def _namespace(self, instance: Instance, part: wire.Shards) -> Namespace:
        """Where the chunks of a part that has been checked belong. Raises Busy."""
        blocks = len(part.block_ids) // 4 // (len(part.hashes) // HASH_BYTES)
        return self.registrations.namespace(instance, part.model, part.world_size, part.rank, blocks)

    def _admit(self, client: Client, number: int) -> Instance:
        instance = client.instances.get(number)
        if instance is None or instance.mapped is None or instance.closing:
            raise UnknownInstance(f"no KV tensors are registered under instance {number}")
        if client.queued >= self._config.max_queued or client.queued_chunks >= _QUEUED_CHUNKS:
            self.counters["operations_refused"] += 1
            raise Busy(
                f"{client.queued} stores and retrieves of {client.queued_chunks} chunks are in flight, the most that "
                "max_queued and memory allow"
            )
        return instance

    def _start(self, operation: _Operation, pieces: list[CopyPiece], lease: Lease | None, ticket: int) -> list[Action]:
        client, instance = operation.client, operation.instance
        assert instance.mapped is not None and len(pieces) == len(operation.chunks)
        client.queued += 1
        client.queued_chunks += len(pieces)
        instance.copies += 1
        self.operations += 1
        size = len(pieces[0].block_ids) * instance.layout.block_bytes
        step = max(1, -(-instance.mapped.task_bytes // size))
        tasks: list[Action] = []
        whole = cache(instance.mapped.whole)
        for first in range(0, len(pieces), step):
            part = _Part(operation, first, min(first + step, len(pieces)))
            fence = None if lease is None else partial(getattr, lease, "fence")
            tasks.append(
                Copy(part, operation.is_store, instance.mapped, pieces[first : part.end], fence, ticket, whole)
            )
        operation.tasks = len(tasks)
        return tasks

    def _sums(self, key: bytes) -> bool:
        """Whether the bytes of this chunk are summed up. The same chunks whenever they are asked for."""
        return self._verify == "always" or (self._verify == "sampled" and key[0] < 256 // _SAMPLED)

    def _copied(self, part: _Part, sums: list[int] | None) -> list[Action]:
        operation = part.operation
        operation.tasks -= 1
        if sums is not None:
            for i in range(part.first, part.end):
                got = sums[i - part.first]
                if operation.is_store:
                    operation.sums[i] = got
                else:
                    operation.results[operation.places[i]] = self._is_as_stored(*operation.chunks[i], got)
        if operation.tasks:
            return []
        return self._end(operation)

    def _is_as_stored(self, chunk: Chunk, rank: int, got: int) -> bool:
        shard = chunk.shards[rank]
        if not shard.sealed or self.index.is_forgotten(chunk):
            return False  # found to be corrupt, or forgotten, while it was copied
        if got and shard.checksum and got != shard.checksum:
            self.counters["corrupt_chunks"] += 1
            self.index.mark_corrupt(chunk, rank)
            return False
        return True

    def _end(self, operation: _Operation) -> list[Action]:
        client, instance = operation.client, operation.instance
        client.queued -= 1
        client.queued_chunks -= len(operation.chunks)
        instance.copies -= 1
        self.operations -= 1
        value: Any
        actions: list[Action] = []
        if operation.is_store:
            actions += self._end_store(operation)
            value = operation.results[0]
        else:
            self._end_retrieve(operation)
            value = operation.results
        if not client.dead:
            actions.append(Reply(client.identity, operation.number, value))
        if instance.closing and not instance.copies:
            actions.append(self.registrations.unmap(client, instance))
        return actions

    def _end_store(self, operation: _Operation) -> list[Action]:
        arrived = {} if operation.client.dead else operation.sums
        sealed = []
        for i, (chunk, rank) in enumerate(operation.chunks):
            if i in arrived and not self.index.is_hidden(chunk):
                self.index.seal(chunk, rank, arrived[i], self.wall)
                self.counters["stored_chunks"] += 1
                self.stored_bytes += chunk.shards[rank].size
                sealed.append((chunk, rank))
            else:
                self.index.remove(chunk, Reason.FAILED, rank)
                self.counters["failed_chunks"] += 1
        operation.results[0] &= len(sealed) == len(operation.chunks)
        _tell("stored %d of %d new chunks", len(sealed), operation)
        self.index.touch([chunk for chunk, _ in sealed])
        return [*self.tiering.stored(sealed), *self.tiering.make_room()] if self.tiering else []

    def _end_retrieve(self, operation: _Operation) -> None:
        results = operation.results
        _tell("retrieved %d of %d chunks", sum(results), operation)
        self.counters["retrieved_chunks"] += sum(results)
        for place, (chunk, rank) in zip(operation.places, operation.chunks, strict=True):
            self.retrieved_bytes += chunk.shards[rank].size if results[place] else 0
        self.index.release([chunk for chunk, _ in operation.chunks])  # what nobody is to have any more goes with this
        if operation.unpins:
            first = 0
            for request, model, keys in operation.requests:
                done = sum(results[first : first + keys])
                self.sessions.count_retrieved(operation.client.tenant, request, model, keys, done)
                first += keys

    # -- what people see

    @property
    def clients(self) -> Collection[Client]:
        """All that have said hello and live."""
        return self._clients.values()

    @property
    def chunk_size(self) -> int:
        """Tokens a chunk."""
        return self._config.chunk_size

    def status(self, tenant: str = "") -> Status:
        """What there is and what has happened; see core/report.py."""
        return self.report.status(tenant)


def _tell(what: str, done: int, operation: _Operation) -> None:
    """How an operation ended, for who follows a request through the log."""
    if log.isEnabledFor(logging.DEBUG):
        count = len(operation.chunks) if operation.is_store else len(operation.results)
        requests = " ".join(dict.fromkeys(request for request, _, _ in operation.requests))
        log.debug(what, done, count, extra={"client": operation.client.called, "request": requests})
