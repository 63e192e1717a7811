"""Lists of what is in memory: prefix families (Prefixes) and the chunks of one prompt (Inspect), made on request.

Called by core/depot.py on the deciding thread, which serves other requests between steps. A list is a generator that
yields the number of chunks it has passed. `Lists` makes one at a time, some thousand chunks a step, because a list of
families takes memory for every chunk. Changes nothing; an answer mixes what was there in its steps. Invariant: each
request is answered once, or its client has died.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from kvdepot.core.actions import Action, Reply
from kvdepot.core.admission import check_names
from kvdepot.core.clients import Client
from kvdepot.core.index.chunk import Chunk, Namespace, is_hidden, state_of
from kvdepot.core.index.index import Index
from kvdepot.core.tiering.tiering import Tiering
from kvdepot.errors import BadRequest, Busy, KVDepotError
from kvdepot.protocol import wire
from kvdepot.protocol.keys import HASH_BYTES
from kvdepot.protocol.prefixes import MOST_CHUNKS, MOST_PREFIXES, SORTS, ChunkStatus, Prefix
from kvdepot.protocol.status import MOST_NAME

_STEP = 1024
"""Chunks that one step passes, in one or two milliseconds."""
MOST_LISTS = 16
"""Requests at a time."""
MOST_OF_CLIENT = 2
"""Requests of one client at a time."""
_CHUNKS_OF_ONE = 128
"""Chunks that count as one more request against `max_rate`."""
_DESCRIBED = 16
"""A chunk that is described takes as long as this many that are only passed."""

_T = TypeVar("_T")
_Walk: TypeAlias = Generator[int, None, _T]
"""Yields the number of chunks passed since it last did, and returns the answer."""


@dataclass(slots=True, eq=False)
class _List:
    """A request whose answer is being made."""

    client: Client
    number: bytes
    answer: _Walk[object]


class Lists:
    """The lists that one depot is making."""

    def __init__(self, index: Index, tiering: Tiering, step: int = _STEP) -> None:
        """step: how many chunks one step passes."""
        self._index = index
        self._tiering = tiering
        self._step = step
        self._queue: deque[_List] = deque()

    def __repr__(self) -> str:
        return f"<Lists {len(self._queue)} to make>"

    def __bool__(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._queue)

    def cost(self, request: wire.Prefixes | wire.Inspect, tenant: str = "") -> int:
        """As how many requests this one counts against `max_rate`, for a tenant's client; empty: it sees all."""
        namespaces = self._visible(tenant, request.model)
        match request:
            case wire.Prefixes():
                passed = sum(len(each.chunks) for each in namespaces if each.trunk is each)
            case wire.Inspect(_, hashes, end, most):
                stored = min(sum(len(each.chunks) for each in namespaces), most if most > 0 else MOST_CHUNKS)
                passed = len(namespaces) * (stored if end else len(hashes) // HASH_BYTES)
        return 4 + passed // _CHUNKS_OF_ONE

    def prefixes(self, client: Client, number: bytes, request: wire.Prefixes, wall: int) -> list[Action]:
        """Answer with the families that the client may see. wall: seconds since 1970. Raises BadRequest or Busy."""
        namespaces = [each for each in self._admit(client, request.model) if each.trunk is each]
        if request.sort not in SORTS:
            raise BadRequest(f"sort is {request.sort[:80]!r}, not one of {', '.join(SORTS)}")
        if not 1 <= request.most <= MOST_PREFIXES:
            raise BadRequest(f"most is {request.most}, not between 1 and {MOST_PREFIXES}")
        return self._begin(_List(client, number, _prefixes(namespaces, request, wall)))

    def inspect(self, client: Client, number: bytes, request: wire.Inspect, wall: int) -> list[Action]:
        """Answer with the chunks that the client may see. wall: seconds since 1970. Raises BadRequest or Busy."""
        namespaces = self._admit(client, request.model)
        hashes, end = request.hashes, request.end
        if bool(hashes) == bool(end) or len(hashes) % HASH_BYTES:
            raise BadRequest(f"give either `end`, or `hashes` of {HASH_BYTES} bytes each")
        if request.most < 0 or (request.most and not end):
            raise BadRequest("`most` is a number of chunks up to `end`, or 0")
        if end and len(end) != HASH_BYTES:
            raise BadRequest("give the whole hash, as `kvdepot ls --long` shows it")
        return self._begin(_List(client, number, self._inspect(namespaces, request, wall)))

    def _admit(self, client: Client, model: str) -> list[Namespace]:
        """The namespaces that a client may see, of models whose name has this prefix. Raises BadRequest or Busy."""
        check_names("", model)
        self._drop_dead()
        if sum(each.client is client for each in self._queue) >= MOST_OF_CLIENT:
            raise Busy(f"{MOST_OF_CLIENT} lists are being made for this client: retry later")
        if len(self._queue) >= MOST_LISTS:
            raise Busy(f"{MOST_LISTS} lists are being made: retry later")
        return self._visible(client.tenant, model)

    def _visible(self, tenant: str, model: str) -> list[Namespace]:
        return [
            each
            for each in self._index.namespaces.all()
            if tenant in ("", each.tenant) and each.model.startswith(model)
        ]

    def _begin(self, made: _List) -> list[Action]:
        self._queue.append(made)
        return self.step()

    def _drop_dead(self) -> None:
        self._queue = deque(each for each in self._queue if not each.client.dead)

    def step(self) -> list[Action]:
        """Continue with the first list; its reply, if it is complete."""
        self._drop_dead()
        if not self._queue:
            return []
        made = self._queue[0]
        answer = self._advance(made)
        if answer is None:
            return []
        self._queue.popleft()
        return [Reply(made.client.identity, made.number, answer)]

    def _advance(self, made: _List) -> object | None:
        """Continue one list by a step; its answer, if it is complete."""
        passed = 0
        try:
            while passed < self._step:
                passed += next(made.answer)
        except StopIteration as end:
            answer: object = end.value
            return answer
        except KVDepotError as exc:
            return exc
        return None

    def stop(self) -> list[Action]:
        """Before shutdown: refuse all, because the lists of a full memory would delay it for seconds."""
        made, self._queue = self._queue, deque()
        busy = Busy("the server is stopping: retry later")
        return [Reply(each.client.identity, each.number, busy) for each in made if not each.client.dead]

    def _inspect(self, namespaces: list[Namespace], request: wire.Inspect, wall: int) -> _Walk[list[ChunkStatus]]:
        """The chunks in these namespaces that the request names.

        Raises BadRequest if more than `MOST_CHUNKS` would be listed.
        """
        if request.end:
            hashes = yield from _chain_to(namespaces, request.end, request.most)
        else:
            given = (request.hashes[at : at + HASH_BYTES] for at in range(0, len(request.hashes), HASH_BYTES))
            hashes = list(dict.fromkeys(given))
        found: list[ChunkStatus] = []
        for namespace in namespaces:
            for key in hashes:
                chunk = namespace.chunks.get(key)
                if chunk is not None:
                    _check_number(len(found) + 1)
                    found.append(self._describe(chunk, wall))
                yield 1 if chunk is None else 1 + _DESCRIBED
        return found

    def _describe(self, chunk: Chunk, wall: int) -> ChunkStatus:
        namespace, saved = chunk.namespace, -1
        for shard in chunk.shards.values():
            saved &= shard.tiers
        return ChunkStatus(
            tenant=namespace.tenant,
            model=namespace.model[:MOST_NAME],
            world_size=namespace.world_size,
            group=namespace.group,
            reach=namespace.reach,
            chunk_tokens=namespace.chunk_tokens,
            hash=chunk.key.hex(),
            position=chunk.position,
            state=state_of(chunk),
            bytes=chunk.bytes,
            held=chunk.holds,
            leased=chunk.leases,
            tiers=[name for number, name in enumerate(self._tiering.names) if saved >> number & 1],
            age_s=float(max(0, wall - chunk.born)) if chunk.born else None,
        )


def _check_number(chunks: int) -> None:
    if chunks > MOST_CHUNKS:
        raise BadRequest(f"the answer would list more than {MOST_CHUNKS} chunks: give a model or fewer hashes")


def _chain_to(namespaces: Iterable[Namespace], end: bytes, most: int) -> _Walk[list[bytes]]:
    """The hashes of the chunk `end` and of those before it; none if it is not in memory.

    most: return at most this many, the latest ones; 0 returns all.
    """
    found = [namespace.chunks[end] for namespace in namespaces if end in namespace.chunks]
    # A bounded group's part has no chain of its own.
    last: Chunk | None = max(found, key=lambda chunk: chunk.position, default=None)
    hashes: list[bytes] = []
    while last is not None and not last.gone and (not most or len(hashes) < most):
        _check_number(len(hashes) + 1)
        hashes.append(last.key)
        before = last.parent
        last = before.parent if before is not None and before.key == last.key else before
        yield 1
    return hashes[::-1]


# -- prefix families


@dataclass(slots=True, eq=False)
class _Family:
    """All prompts in memory that begin with the chunk `first`. shared: the last chunk of all of them."""

    first: Chunk
    shared: Chunk | None = None
    chunks: int = 0  # in the first unbounded group
    prompts: int = 0
    bytes: int = 0
    hits: int = 0
    hit_chunks: int = 0
    used_s: int = 0

    def add(self, chunk: Chunk) -> None:
        """Add a chunk of the first unbounded group, with its parts in the other groups."""
        behind = _followers(chunk)
        self.chunks += 1
        self.prompts += not behind
        self.hits += chunk.hits
        self.hit_chunks += chunk.hits * chunk.position
        self.used_s = max(self.used_s, chunk.used_s)
        self.bytes += chunk.bytes
        if len(chunk.namespace.groups) > 1:
            others = (group.chunks.get(chunk.key) for group in chunk.namespace.groups if group is not chunk.namespace)
            self.bytes += sum(part.bytes for part in others if part is not None)
        if behind != 1 and (self.shared is None or chunk.position < self.shared.position):
            self.shared = chunk  # the first chunk of a chain that has not exactly one behind it

    def prefix(self, wall: int) -> Prefix:
        first, shared = self.first, self.shared or self.first
        namespace, tokens = first.namespace, first.namespace.chunk_tokens
        return Prefix(
            tenant=namespace.tenant,
            model=namespace.model[:MOST_NAME],
            id=first.key.hex(),
            hash=shared.key.hex(),
            shared_tokens=shared.position * tokens,
            tokens=self.chunks * tokens,
            prompts=self.prompts,
            bytes=self.bytes,
            hits=self.hits,
            hit_tokens=self.hit_chunks * tokens,
            age_s=float(max(0, wall - first.born)) if first.born else 0.0,
            idle_s=float(max(0, wall - (self.used_s or first.born or wall))),
        )


_RANKS: dict[str, Callable[[_Family], int]] = {
    "hits": lambda family: family.hits,
    "bytes": lambda family: family.bytes,
    "tokens": lambda family: family.chunks * family.first.namespace.chunk_tokens,
    "idle": lambda family: -(family.used_s or family.first.born),
}
"""The value that families are sorted by, the highest first, for each of SORTS."""


def _prefixes(namespaces: list[Namespace], request: wire.Prefixes, wall: int) -> _Walk[list[Prefix]]:
    """The families of these namespaces (first unbounded groups) that come first in the order that is asked for."""
    families: list[_Family] = []
    for namespace in namespaces:
        families += yield from _families(namespace)
    best: list[_Family] = []
    for at in range(0, len(families), MOST_PREFIXES):
        some = [each for each in families[at : at + MOST_PREFIXES] if not is_hidden(each.first)]
        best = heapq.nlargest(request.most, [*best, *some], key=_RANKS[request.sort])
        yield len(some) + len(best)
    return [each.prefix(wall) for each in best if not each.first.gone and not is_hidden(each.first)]


def _families(namespace: Namespace) -> _Walk[list[_Family]]:
    """All families of a model, given its first unbounded group, without chunks whose chain is not complete."""
    families: list[_Family] = []
    known: dict[int, _Family | None] = {}  # by id() of a chunk
    chunks = list(namespace.chunks.values())  # some ten milliseconds for a million
    for chunk in chunks:
        passed = [chunk]
        while (before := passed[-1].parent) is not None and id(before) not in known:
            passed.append(before)
        top = passed[-1]
        if before is not None:
            family = known[id(before)]
        elif id(top) in known:  # it was passed on the way from one behind it
            family = known[id(top)]
        elif top.position == 1 and not top.gone:
            family = _Family(top)
            families.append(family)
        else:
            family = None
        for each in passed:
            known[id(each)] = family
        if family is not None and not chunk.gone:
            family.add(chunk)
        yield len(passed)
    return families


def _followers(chunk: Chunk) -> int:
    """The number of chunks of the same KV cache group behind a chunk; its bounded parts count as its children, too."""
    groups = chunk.namespace.groups
    if len(groups) == 1 or not chunk.children:
        return chunk.children
    parts = (group.chunks.get(chunk.key) for group in groups if group.reach)
    return chunk.children - sum(part is not None and part.parent is chunk for part in parts)
