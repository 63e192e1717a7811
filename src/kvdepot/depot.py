"""The deciding part of the server: messages and outcomes in, replies and copy tasks out.

Called by server.py on its one thread. No sockets, threads or clocks here, and no I/O: what takes time is
returned as an action. The one law: every request is answered exactly once, and what a request
holds (reservations, pins, mappings) is given up exactly once, whatever comes first: its end, an error, or
its client's death.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvdepot import wire
from kvdepot.config import Config
from kvdepot.errors import BadRequest, Busy, InternalError, KVDepotError, UnknownClient, UnknownInstance
from kvdepot.index import Chunk, Index, Namespace, Pin
from kvdepot.keys import HASH_BYTES
from kvdepot.layout import Layout
from kvdepot.mover import Call, Copy, CopyPiece, Mapped
from kvdepot.tiering import Search, Tiering, Token
from kvdepot.tiers import TierConfig
from kvdepot.tiers.carrier import Errand
from kvdepot.tiers.format import SALT_BYTES

__all__ = ["Action", "Depot", "Reply"]

_TASK_BYTES = 4 << 20
"""A copy task is at least this long, so that handing it over costs little of it."""


_QUEUED_CHUNKS = 1 << 18
"""A client with so many chunks in flight waits until some have been copied."""
_FILES_A_MAPPING = 2
"""A mapping keeps its file open, and Python's mmap once more."""
_STATUS_NAMESPACES = 100
"""The largest namespaces that a status lists, so that it stays small."""
_KEPT_SHARE = 2
"""What is pinned by name takes at most 1 / so much of the arena: the rest must go on."""
_NEVER = 1 << 40
"""So many readers a chunk has that is pinned by name: no retrieve ends that."""
_SAMPLED = 16
"""With `verify = "sampled"`, one chunk in so many is summed up."""


class _NoCard:
    fence = 0


class Card(Protocol):
    """What the depot needs of a client's card (shm.CardView)."""

    @property
    def fence(self) -> int: ...


@dataclass(slots=True)
class Reply:
    """Answer request `number` of `client`; an error in `value` is told as one."""

    client: bytes
    number: bytes
    value: Any


Action: TypeAlias = Reply | Copy | Call | Errand


@dataclass(slots=True, eq=False)
class _Session:
    """What one request of one client pins."""

    client: _Client
    request: str
    model: str
    chunks: list[Chunk]
    matched: int  # chunks that are pinned by holding these
    remaining: int  # retrieved keys until the pins go by themselves


@dataclass(slots=True, eq=False)
class _Instance:
    """One worker's registered tensors."""

    number: int
    layout: Layout
    tenant: str = ""
    mapped: Mapped | None = None
    namespaces: dict[tuple[str, int, int, int], Namespace] = field(default_factory=dict)
    copies: int = 0  # operations that touch the tensors
    closing: bool = False  # unregistered or replaced: unmapped once copies == 0


@dataclass(slots=True, eq=False)
class _Client:
    identity: bytes
    card: Card
    tenant: str = ""
    pins: int = 0  # chunks that the sessions matched
    sessions: dict[str, _Session] = field(default_factory=dict)
    asking: dict[str, _Asking] = field(default_factory=dict)  # lookups that await tiers, by request
    instances: dict[int, _Instance] = field(default_factory=dict)
    closing: dict[int, list[_Instance]] = field(default_factory=dict)  # by number: no more, but still mapped
    waiting: dict[int, list[bytes]] = field(default_factory=dict)  # requests to answer when these are unmapped
    queued: int = 0
    queued_chunks: int = 0
    dead: bool = False


@dataclass(slots=True, eq=False)
class _Asking:
    """A lookup that looks behind memory."""

    asker: _Client
    number: bytes
    owner: _Client  # whose session it becomes: the asker, or the depot itself for what is pinned by name
    lookup: wire.Lookup
    first: int  # chunks that memory had
    ttl_s: int = 0  # of a pin by name
    search: Search | None = None
    given_up: bool = False  # nobody wants the pins any more


@dataclass(slots=True, eq=False)
class _Operation:
    """One STORE or RETRIEVE under way."""

    client: _Client
    number: bytes
    instance: _Instance
    is_store: bool
    chunks: list[tuple[Chunk, int]]  # what is held: chunk and rank, in key order
    tasks: int = 0
    results: list[bool] = field(default_factory=list)  # one a key
    places: list[int] = field(default_factory=list)  # chunk i of `chunks` is key `places[i]`
    sums: dict[int, int] = field(default_factory=dict)  # of a store, by place in `chunks`: what has arrived
    requests: list[tuple[str, str, int]] = field(default_factory=list)  # request id, model, number of keys


@dataclass(slots=True, eq=False)
class _Part:
    """A task's token: which chunks `[first, end)` of an operation it copies."""

    operation: _Operation
    first: int
    end: int


@dataclass(slots=True, eq=False)
class _Mapping:
    """The token of mapping (or unmapping) an instance's tensors."""

    client: _Client
    instance: _Instance
    register: bytes | None = None  # the request to answer; None: it is being unmapped


class Depot:
    """Index, pins, sessions and registrations of one server."""

    def __init__(
        self,
        config: Config,
        index: Index,
        map_layout: Callable[[Layout], Mapped] = Mapped.open,
        tiers: Sequence[TierConfig] = (),
    ) -> None:
        self.index = index
        self.tiering = Tiering(tiers, index, config.chunk_size, config.lookup_s)
        self.counters: Counter[str] = Counter()
        self._config = config
        self._verify = config.verify
        self._map_layout = map_layout
        self._clients: dict[bytes, _Client] = {}
        self._by_request: dict[tuple[str, str, str], list[_Session]] = {}  # by tenant, request, model
        self.operations = 0
        self.max_clients = config.max_clients  # less where there are not descriptors enough
        self.max_files = 1 << 30  # descriptors for mappings of KV tensors
        self._files = 0  # those in use
        self._keepers: dict[str, _Client] = {}  # by tenant: whose sessions are the pins by name
        self._kept: dict[tuple[str, str], tuple[int, float]] = {}  # tenant, name -> bytes, when it ends
        self._now = 0.0
        self._wall = 0  # seconds since 1970, as of the last tick
        self._ages: list[tuple[int, int, Chunk]] = []  # when chunks expire, where they do
        self._aged = 0
        if config.ttl_s:
            for space in index.namespaces():
                for chunk in space.chunks.values():
                    self._watch_age(chunk)

    def __repr__(self) -> str:
        return f"<Depot {len(self._clients)} clients, {self.operations} operations, {self.index}>"

    # -- events

    def hello(self, identity: bytes, card: Card, tenant: str = "") -> None:
        """A client introduced itself; it reaches only this tenant's chunks. Raises Busy when there are too many."""
        if identity in self._clients:
            return
        if len(self._clients) >= self.max_clients:
            self.counters["clients_refused"] += 1
            raise Busy(f"{len(self._clients)} clients are connected, the most that max_clients or open files allow")
        self._clients[identity] = _Client(identity, card, tenant)

    def knows(self, identity: bytes) -> bool:
        return identity in self._clients

    def handle(self, identity: bytes, number: bytes, request: wire.Request, now: float = 0.0) -> list[Action]:
        """Decide one request. Never raises a KVDepotError: it becomes the reply."""
        self._now = now
        try:
            client = self._clients.get(identity)
            if client is None:
                raise UnknownClient("say hello first: this server has not met you")
            self._check_size(request)
            return self._decide(client, number, request)
        except KVDepotError as exc:
            self.counters["errors"] += 1
            return [Reply(identity, number, exc)]

    def _check_size(self, request: wire.Request) -> None:
        """Raise Busy for a request whose answer, or whose work, would be too large."""
        if isinstance(request, wire.Lookup):
            chunks = len(request.hashes) // HASH_BYTES
        elif isinstance(request, wire.Store | wire.Retrieve):
            chunks = sum(len(part.hashes) // HASH_BYTES or 1 for part in request.shards)
        else:
            return
        if chunks > wire.MAX_CHUNKS:
            self.counters["large_requests_refused"] += 1
            raise Busy(f"a request that names {chunks} chunks, more than {wire.MAX_CHUNKS}")

    def _decide(self, client: _Client, number: bytes, request: wire.Request) -> list[Action]:
        value: Any = None
        match request:
            case wire.Lookup():
                return self._lookup(_Asking(client, number, client, request, 0))
            case wire.Store():
                return self._store(client, number, request)
            case wire.Retrieve():
                return self._retrieve(client, number, request)
            case wire.EndSession():
                actions = self._give_up(client, request.request)
                self._end_session(client, request.request)
                return [*actions, Reply(client.identity, number, None)]
            case wire.Register():
                return self._register(client, number, request)
            case wire.Unregister():
                return self._unregister(client, request.instance, [number])
            case wire.ChunkSize():
                value = self._config.chunk_size
            case wire.Noop():
                value = "ok"
            case wire.Clear():
                self.counters["cleared_chunks"] += self.index.clear(request.model, client.tenant)
            case wire.Pin():
                return self._pin_by_name(client, number, request)
            case wire.Unpin():
                value = self._unpin(client.tenant, request.name)
            case wire.Forget():
                return self._forget(client, number, request)
            case wire.Status():
                value = self.status(client.tenant)
            case wire.Hello():
                raise InternalError("hello is the server's to answer")
        return [Reply(client.identity, number, value)]

    def finished(self, token: Any, outcome: Any, now: float = 0.0) -> list[Action]:
        """A task or an errand has ended; `outcome` as in mover.Mover and carrier.Carrier."""
        self._now = now
        if isinstance(token, Token):
            return [*self.tiering.finished(token, outcome, now), *self.tiering.make_room()]
        if isinstance(token, _Part):
            return self._copied(token, outcome)
        assert isinstance(token, _Mapping), token
        return self._mapped(token, outcome)

    def next_deadline(self) -> float:
        """When `expire` must be called next."""
        return self.tiering.next_deadline()

    def expire(self, now: float) -> list[Action]:
        """Answer what has waited for tiers long enough."""
        self._now = now
        return self.tiering.expire(now)

    def tick(self, now: float, wall: float) -> list[Action]:
        """Once a second. wall: seconds since 1970."""
        self._now, self._wall = now, int(wall)
        for name, (_, ends) in list(self._kept.items()):
            if ends <= now:
                self._unpin(*name)
        while self._ages and self._ages[0][0] <= wall:
            chunk = heapq.heappop(self._ages)[2]
            if chunk.gone or chunk.born + self._config.ttl_s > wall:
                continue
            self.counters["expired_chunks"] += 1
            self.index.doom(chunk, at_once=False)  # whoever has it pinned may have it to the end
        return self.tiering.tick(now)

    def _watch_age(self, chunk: Chunk) -> None:
        self._aged += 1
        heapq.heappush(self._ages, (chunk.born + self._config.ttl_s, self._aged, chunk))

    def stop_searching(self) -> list[Action]:
        """Answer every lookup that awaits tiers with what memory has: the server is about to end."""
        asking = [
            asking for client in (*self._clients.values(), *self._keepers.values()) for asking in client.asking.values()
        ]
        return [action for each in asking if each.search for action in self.tiering.end(each.search)]

    def died(self, identity: bytes) -> list[Action]:
        """A client is gone: give up all it holds. What is being copied for it ends first, by itself."""
        client = self._clients.pop(identity, None)
        if client is None:
            return []
        self.counters["clients_died"] += 1
        client.dead = True
        actions = [action for request in list(client.asking) for action in self._give_up(client, request)]
        for request in list(client.sessions):
            self._end_session(client, request)
        for number in list(client.instances):
            actions += self._unregister(client, number, [])
        return actions

    # -- lookups and pins

    def _lookup(self, asking: _Asking) -> list[Action]:
        """Answer from memory, or once tiers have had their say on what memory misses."""
        client, request = asking.owner, asking.lookup
        _check_hashes(request.hashes)
        _check_names(request.request, request.model)
        _check_salt(request.salt)
        actions = self._give_up(client, request.request)  # a lookup anew: whoever asked before has stopped listening
        if request.request not in client.sessions and len(client.sessions) >= self._config.max_sessions:
            self.counters["lookups_refused"] += 1
            raise Busy(f"{len(client.sessions)} requests hold pins, the most that max_sessions allows")
        self.counters["lookups"] += 1
        self.counters["lookup_chunks"] += len(request.hashes) // HASH_BYTES
        spaces, pins, asking.first = self._match(client, request)
        if self.tiering and len(spaces) == 1 and asking.first < len(request.hashes) // HASH_BYTES:
            salt = _tenant_salt(client.tenant, request.salt)
            found = self.tiering.search(
                spaces[0], request.hashes, asking.first, request.chained, salt, pins[0].chunks, self._now,
                partial(self._searched, asking),
            )  # fmt: skip
            if found is not None:
                search, errands = found
                if not search.ended:
                    asking.search = search
                    client.asking[request.request] = asking
                return [*actions, *errands]
        return [*actions, self._answer(asking, pins, asking.first)]

    def _match(self, client: _Client, request: wire.Lookup) -> tuple[list[Namespace], list[Pin], int]:
        """Where to look, what is there of the prefix, and how many chunks of it are everywhere."""
        hashes = request.hashes
        spaces = self.index.lookup_namespaces(request.model, request.world_size, request.blocks_in_chunk, client.tenant)
        pins = [self.index.match(space, hashes) for space in spaces]
        matched = min((pin.matched for pin in pins), default=0)
        if any(pin.matched != matched for pin in pins):
            # Engines of one name and two layouts: only what both have is sure to be there for the asker.
            pins = [self.index.match(space, hashes[: matched * HASH_BYTES]) for space in spaces]
        return spaces, pins, matched

    def _searched(self, asking: _Asking) -> list[Action]:
        """The tiers have had their say, or their time."""
        owner, request = asking.owner, asking.lookup.request
        if owner.asking.get(request) is asking:
            del owner.asking[request]
        if asking.given_up or asking.asker.dead:
            return [] if asking.asker.dead else [Reply(asking.asker.identity, asking.number, 0)]
        _, pins, matched = self._match(owner, asking.lookup)
        self.counters["tier_hit_chunks"] += max(0, matched - asking.first)
        try:
            return [self._answer(asking, pins, matched)]
        except KVDepotError as exc:
            self.counters["errors"] += 1
            return [Reply(asking.asker.identity, asking.number, exc)]

    def _give_up(self, client: _Client, request: str) -> list[Action]:
        """End a lookup that awaits tiers: nobody wants its pins any more."""
        asking = client.asking.get(request)
        if asking is None or asking.search is None:
            return []
        asking.given_up = True
        return self.tiering.end(asking.search)

    def _answer(self, asking: _Asking, pins: list[Pin], matched: int) -> Reply:
        """Pin what was matched, and say how much it is. Raises Busy where that is too much."""
        client, request = asking.owner, asking.lookup
        old = client.sessions.get(request.request)
        if client.pins - (old.matched if old is not None else 0) + matched > self._config.max_pins:
            self.counters["pins_refused"] += 1
            raise Busy(f"{client.pins} chunks are pinned, and {matched} more than max_pins allows")
        if client is not asking.asker:
            self._keep(asking, pins)
        chunks = [chunk for pin in pins for chunk in pin.chunks] if matched else []
        self.index.hold(chunks)  # before the old pin goes, or what both hold could be evicted in between
        if old is not None:
            self._end_session(client, request.request)
        if chunks:
            readers = max(1, request.readers)
            session = _Session(client, request.request, request.model, chunks, matched, matched * readers)
            client.pins += matched
            client.sessions[request.request] = session
            self._by_request.setdefault((client.tenant, request.request, request.model), []).append(session)
        self.counters["hit_chunks"] += matched
        return Reply(asking.asker.identity, asking.number, matched)

    def _end_session(self, client: _Client, request: str) -> None:
        session = client.sessions.pop(request, None)
        if session is None:
            return
        client.pins -= session.matched
        sessions = self._by_request[client.tenant, request, session.model]
        sessions.remove(session)
        if not sessions:
            del self._by_request[client.tenant, request, session.model]
        self.index.release(session.chunks)

    def _count_retrieved(self, tenant: str, request: str, model: str, keys: int) -> None:
        """`keys` of a request were retrieved: after as many as its lookup matched, its pins are gone."""
        for session in list(self._by_request.get((tenant, request, model), ())):
            session.remaining -= keys
            if session.remaining <= 0:
                self._end_session(session.client, request)

    # -- what is kept and what is forgotten

    def _pin_by_name(self, client: _Client, number: bytes, request: wire.Pin) -> list[Action]:
        keeper = self._keepers.setdefault(client.tenant, _Client(b"", _NoCard(), client.tenant))
        lookup = wire.Lookup(
            request.model, request.world_size, request.blocks_in_chunk, request.name, _NEVER, request.hashes, True,
            request.salt,
        )  # fmt: skip
        return self._lookup(_Asking(client, number, keeper, lookup, 0, request.ttl_s))

    def _keep(self, asking: _Asking, pins: list[Pin]) -> None:
        """Note a pin by name. Raises Busy where all of them would take too much of the arena."""
        name = asking.owner.tenant, asking.lookup.request
        size = 0
        for pin in pins:
            for chunk in pin.chunks:
                while chunk is not None:
                    size += chunk.bytes
                    chunk = chunk.parent
        others = sum(kept for key, (kept, _) in self._kept.items() if key != name)
        if others + size > self.index.space.capacity // _KEPT_SHARE:
            self.counters["pins_refused"] += 1
            raise Busy(f"{others + size} bytes would be pinned by name, more than half of the arena")
        self._kept.pop(name, None)
        if size:
            self._kept[name] = size, self._now + asking.ttl_s if asking.ttl_s else float("inf")

    def _unpin(self, tenant: str, name: str) -> bool:
        there = self._kept.pop((tenant, name), None) is not None
        if tenant in self._keepers:
            self._end_session(self._keepers[tenant], name)
        return there

    def _forget(self, client: _Client, number: bytes, request: wire.Forget) -> list[Action]:
        _check_names("", request.model)
        _check_salt(request.salt)
        salt = _tenant_salt(client.tenant, request.salt) if request.salt else None
        chunks = self.index.select(request.model, client.tenant, salt)
        for chunk in chunks:
            if not chunk.gone:
                self.index.doom(chunk)
        self.counters["forgotten_chunks"] += len(chunks)

        def done(said: dict[str, Any]) -> list[Action]:
            return [] if client.dead else [Reply(client.identity, number, {"memory": len(chunks), **said})]

        models = [request.model]
        if not request.model and self._config.keys:  # a client may forget its own tenant's alone
            models = sorted({space.model for space in self.index.namespaces() if space.tenant == client.tenant})
        return self.tiering.forget(client.tenant, models, salt, self._now, done)

    # -- store and retrieve

    def _store(self, client: _Client, number: bytes, request: wire.Store) -> list[Action]:
        instance = self._admit(client, request.instance)
        for part in request.shards:
            _check_shards(part, instance.layout)
        operation = _Operation(client, number, instance, is_store=True, chunks=[])
        pieces: list[CopyPiece] = []
        complete = True
        for part in request.shards:
            ids = np.frombuffer(part.block_ids, np.uint32).astype(np.intp)
            count = len(part.hashes) // HASH_BYTES
            blocks = len(ids) // count
            space = self._namespace(instance, part.model, part.world_size, part.rank, blocks)
            size = instance.layout.block_bytes * blocks
            parent = part.parent
            salt = _tenant_salt(client.tenant, part.salt)
            for i in range(count):
                key = part.hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]
                if self.index.missing(space, part.rank, key):
                    position = part.depth + i + 1 if parent else 0
                    chunk = self.index.reserve(space, part.rank, key, parent, position, size, salt)
                    if chunk is None:
                        # Without this chunk those behind it are useless: drop them too.
                        self.counters["dropped_chunks"] += count - i
                        complete = False
                        break
                    shard = chunk.shards[part.rank]
                    operation.chunks.append((chunk, part.rank))
                    pieces.append(CopyPiece(shard.extents, ids[i * blocks : (i + 1) * blocks], 0, self._sums(key)))
                else:
                    self.counters["known_chunks"] += 1
                parent = key if part.parent else b""
        operation.results = [complete]
        if not pieces:
            return [Reply(client.identity, number, complete)]
        return self._start(operation, pieces, client.card, request.ticket)

    def _retrieve(self, client: _Client, number: bytes, request: wire.Retrieve) -> list[Action]:
        instance = self._admit(client, request.instance)
        for part in request.shards:
            _check_shards(part, instance.layout)
        _check_targets(request.shards)
        operation = _Operation(client, number, instance, is_store=False, chunks=[])
        pieces = []
        for part in request.shards:
            ids = np.frombuffer(part.block_ids, np.uint32).astype(np.intp)
            count = len(part.hashes) // HASH_BYTES
            blocks = len(ids) // count
            space = self._namespace(instance, part.model, part.world_size, part.rank, blocks)
            for i in range(count):
                key = part.hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]
                chunk = self.index.sealed_shard(space, part.rank, key)
                operation.results.append(False)
                if chunk is None:
                    self.counters["retrieve_misses"] += 1
                    continue
                operation.places.append(len(operation.results) - 1)
                operation.chunks.append((chunk, part.rank))
                skip = part.skip_blocks if i == 0 else 0
                shard = chunk.shards[part.rank]
                summed = shard.checksum != 0 and self._sums(key)
                pieces.append(CopyPiece(shard.extents, ids[i * blocks : (i + 1) * blocks], skip, summed))
            operation.requests.append((part.request, part.model, count))
        self.index.hold([chunk for chunk, _ in operation.chunks])
        if not pieces:
            self._end_retrieve(operation)
            return [Reply(client.identity, number, operation.results)]
        return self._start(operation, pieces, None, 0)

    def _admit(self, client: _Client, number: int) -> _Instance:
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

    def _namespace(
        self, instance: _Instance, model: str, world_size: int, rank: int, blocks_in_chunk: int
    ) -> Namespace:
        known = instance.namespaces.get((model, world_size, rank, blocks_in_chunk))
        if known is None:
            known = self.index.namespace(
                model, world_size, rank, instance.layout.fingerprint, blocks_in_chunk, instance.tenant
            )
            is_new = not known.live and not known.chunks
            most = self._config.max_namespaces
            if (is_new and len(self.index.namespaces()) > most) or len(instance.namespaces) >= most:
                self.index.forget_namespace(known)
                self.counters["namespaces_refused"] += 1
                raise Busy(f"{most} models, shapes and layouts are known, the most that max_namespaces allows")
            known.live += 1
            known.sizes[rank] = instance.layout.block_bytes * blocks_in_chunk
            instance.namespaces[model, world_size, rank, blocks_in_chunk] = known
        return known

    def _start(self, operation: _Operation, pieces: list[CopyPiece], card: Card | None, ticket: int) -> list[Action]:
        client, instance = operation.client, operation.instance
        assert instance.mapped is not None and len(pieces) == len(operation.chunks)
        client.queued += 1
        client.queued_chunks += len(pieces)
        instance.copies += 1
        self.operations += 1
        size = len(pieces[0].block_ids) * instance.layout.block_bytes
        step = max(1, -(-_TASK_BYTES // size))
        tasks: list[Action] = []
        whole = cache(instance.mapped.whole)
        for first in range(0, len(pieces), step):
            part = _Part(operation, first, min(first + step, len(pieces)))
            fence = None if card is None else partial(getattr, card, "fence")
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
        if shard.spoilt or (got and shard.checksum and got != shard.checksum):
            if not shard.spoilt:
                self.counters["corrupt_chunks"] += 1
                self.index.condemn(chunk, rank)
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
            actions.append(self._unmap(client, instance))
        return actions

    def _end_store(self, operation: _Operation) -> list[Action]:
        arrived = {} if operation.client.dead else operation.sums
        sealed = []
        for i, (chunk, rank) in enumerate(operation.chunks):
            if i in arrived:
                self.index.seal(chunk, rank, arrived[i], self._wall)
                self.counters["stored_chunks"] += 1
                sealed.append((chunk, rank))
                if self._config.ttl_s:
                    self._watch_age(chunk)
            else:
                self.index.discard(chunk, rank)
                self.counters["failed_chunks"] += 1
        operation.results[0] &= len(sealed) == len(operation.chunks)
        self.index.touch([chunk for chunk, _ in sealed])
        return [*self.tiering.stored(sealed), *self.tiering.make_room()] if self.tiering else []

    def _end_retrieve(self, operation: _Operation) -> None:
        self.index.release([chunk for chunk, _ in operation.chunks])
        self.counters["retrieved_chunks"] += sum(operation.results)
        for request, model, keys in operation.requests:
            self._count_retrieved(operation.client.tenant, request, model, keys)

    # -- registrations

    def _register(self, client: _Client, number: bytes, request: wire.Register) -> list[Action]:
        request.layout.check()
        _check_names("", request.model)
        if request.model:
            _check_shape(request.world_size, request.rank)
            if request.blocks_in_chunk < 1:
                raise BadRequest(f"blocks_in_chunk is {request.blocks_in_chunk}")
        self._check_registrations(client, request)
        instance = _Instance(request.instance, request.layout, client.tenant)
        if request.model:
            self._namespace(instance, request.model, request.world_size, request.rank, request.blocks_in_chunk)
        actions = self._unregister(client, request.instance, []) if request.instance in client.instances else []
        client.instances[request.instance] = instance
        self._files += _files(instance)
        token = _Mapping(client, instance, number)
        return [*actions, Call(token, partial(self._map_layout, request.layout))]

    def _check_registrations(self, client: _Client, request: wire.Register) -> None:
        """Raise Busy when a client has too many, those counted that are being unmapped, or descriptors run out."""
        there = len(client.instances.keys() - {request.instance}) + sum(map(len, client.closing.values()))
        if there >= self._config.max_instances:
            self.counters["registrations_refused"] += 1
            raise Busy(f"{there} registrations of KV tensors, the most that max_instances allows")
        if self._files + _FILES_A_MAPPING * len(request.layout.mappings) > self.max_files:
            self.counters["registrations_refused"] += 1
            raise Busy(f"{len(request.layout.mappings)} files of KV tensors, more than this server may have open")

    def _unregister(self, client: _Client, number: int, tell: list[bytes]) -> list[Action]:
        """Let go of an instance; whom to `tell` hears of it when no copy touches its tensors any more."""
        instance = client.instances.pop(number, None)
        if instance is not None:
            self._leave_namespaces(instance)
            instance.closing = True
            client.closing.setdefault(number, []).append(instance)
        if number not in client.closing:
            return [Reply(client.identity, asked, None) for asked in tell]
        waiting = client.waiting.setdefault(number, [])
        if len(waiting) + len(tell) > self._config.max_queued:
            raise Busy(f"{len(waiting)} requests wait for the end of instance {number}")
        waiting.extend(tell)
        if instance is None or instance.copies or instance.mapped is None:
            return []  # the last copy, or the mapping that is under way, goes on from here
        return [self._unmap(client, instance)]

    def _leave_namespaces(self, instance: _Instance) -> None:
        for space in instance.namespaces.values():
            space.live -= 1
            self.index.forget_namespace(space)
        instance.namespaces.clear()

    def _unmap(self, client: _Client, instance: _Instance) -> Call:
        assert instance.mapped is not None and instance.closing
        mapped, instance.mapped = instance.mapped, None
        return Call(_Mapping(client, instance), mapped.close)

    def _mapped(self, token: _Mapping, outcome: Any) -> list[Action]:
        client, instance = token.client, token.instance
        if token.register is None:
            return self._closed(client, instance)
        value: Any = None
        actions: list[Action] = []
        if isinstance(outcome, Mapped):
            instance.mapped = outcome
            if instance.closing:  # unregistered, replaced or dead meanwhile
                actions.append(self._unmap(client, instance))
        else:
            value = outcome if isinstance(outcome, KVDepotError) else InternalError("mapping failed")
            if instance.closing:
                actions += self._closed(client, instance)
            else:
                del client.instances[instance.number]
                self._files -= _files(instance)
                self._leave_namespaces(instance)
        if not client.dead:
            actions.append(Reply(client.identity, token.register, value))
        return actions

    def _closed(self, client: _Client, instance: _Instance) -> list[Action]:
        """Nothing touches these tensors any more; who waits hears it once that is so of all under their number."""
        self._files -= _files(instance)
        closing = client.closing[instance.number]
        closing.remove(instance)
        if closing:
            return []
        del client.closing[instance.number]
        waiting = client.waiting.pop(instance.number, [])
        return [] if client.dead else [Reply(client.identity, asked, None) for asked in waiting]

    # -- what people see

    def status(self, tenant: str = "") -> dict[str, Any]:
        """Counts of what there is and what has happened. Sizes in bytes.

        tenant: whose namespaces are listed, the largest first; empty: everybody's.
        """
        index = self.index
        spaces = [space for space in index.namespaces() if not tenant or space.tenant == tenant]
        return {
            "chunk_size_tokens": self._config.chunk_size,
            "capacity_bytes": index.space.capacity,
            "used_bytes": index.space.capacity - index.space.free_bytes,
            "chunks": index.chunks,
            "reserved_shards": index.reserved,
            "holds": index.held,
            "evicted_chunks": index.evicted,
            "record_slots": index.records.capacity,
            "record_slots_used": index.records.used,
            "unrecorded_shards": index.unrecorded,
            "operations": self.operations,
            "clients": len(self._clients),
            "sessions": sum(len(client.sessions) for client in self._clients.values()),
            "instances": sum(len(client.instances) for client in self._clients.values()),
            "namespaces": [
                {
                    "tenant": space.tenant,
                    "model": space.model[:256],
                    "world_size": space.world_size,
                    "blocks_in_chunk": space.blocks_in_chunk,
                    "chunks": len(space.chunks),
                    "bytes": space.bytes,
                    "engines": space.live,
                }
                for space in heapq.nlargest(_STATUS_NAMESPACES, spaces, key=lambda space: space.bytes)
            ],
            "pinned": [
                {
                    "name": name[:256],
                    "bytes": size,
                    "ends_in_s": None if ends == float("inf") else round(ends - self._now),
                }
                for (owner, name), (size, ends) in itertools.islice(self._kept.items(), _STATUS_NAMESPACES)
                if not tenant or owner == tenant
            ],
            "tiers": self.tiering.status(),
            "counters": dict(self.counters),
        }


def _files(instance: _Instance) -> int:
    """Descriptors that an instance's mappings take."""
    return _FILES_A_MAPPING * len(instance.layout.mappings)


def _check_hashes(hashes: bytes) -> None:
    if not hashes or len(hashes) % HASH_BYTES:
        raise BadRequest(f"{len(hashes)} bytes are not a list of {HASH_BYTES}-byte hashes")


def _check_names(request: str, model: str) -> None:
    for what, name in (("request id", request), ("model name", model)):
        if len(name) > wire.MAX_REQUEST_ID:
            raise BadRequest(f"a {what} of {len(name)} characters is longer than {wire.MAX_REQUEST_ID}")


def _check_salt(salt: bytes) -> None:
    if len(salt) not in (0, SALT_BYTES):
        raise BadRequest(f"a salt's tag of {len(salt)} bytes, not {SALT_BYTES}")


def _tenant_salt(tenant: str, salt: bytes) -> bytes:
    """What chunks of a salt are filed under: one tenant's salt is not another's."""
    if not tenant or not salt:
        return salt
    return bytes(
        blake3(b"kvdepot tenant salt" + len(tenant).to_bytes(4, "little") + tenant.encode() + salt).digest()[:16]
    )


def _check_shape(world_size: int, rank: int) -> None:
    if not 1 <= world_size <= 1 << 16 or not 0 <= rank < world_size:
        raise BadRequest(f"rank {rank} of world size {world_size}")


def _check_shards(part: wire.Shards, layout: Layout) -> None:
    """Raise BadRequest unless a part names whole chunks, in blocks that exist, each once."""
    _check_hashes(part.hashes)
    _check_names(part.request, part.model)
    _check_shape(part.world_size, part.rank)
    chunks = len(part.hashes) // HASH_BYTES
    ids: npt.NDArray[np.uint32] = np.frombuffer(part.block_ids[: len(part.block_ids) & ~3], np.uint32)
    if len(part.block_ids) % 4 or not len(ids) or len(ids) % chunks:
        raise BadRequest(f"{len(part.block_ids) / 4:g} block ids for {chunks} chunks")
    if int(ids.max()) >= layout.num_blocks:
        raise BadRequest(f"block id {int(ids.max())} is outside the {layout.num_blocks} registered blocks")
    if len(np.unique(ids)) != len(ids):
        raise BadRequest(f"block ids of request {part.request[:64]!r} repeat")
    if part.parent and (len(part.parent) != HASH_BYTES or part.depth < 0):
        raise BadRequest("parent is no hash, or the depth is negative")
    _check_salt(part.salt)
    if not 0 <= part.skip_blocks < len(ids) // chunks:
        raise BadRequest(f"skip_blocks {part.skip_blocks} of {len(ids) // chunks} blocks a chunk")


def _check_targets(parts: list[wire.Shards]) -> None:
    """Raise BadRequest when two requests of one retrieve would write the same block."""
    if len(parts) > 1:
        ids = np.frombuffer(b"".join(part.block_ids for part in parts), np.uint32)
        if len(np.unique(ids)) != len(ids):
            raise BadRequest("two requests retrieve into the same block")
