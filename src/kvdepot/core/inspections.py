"""Answers of `Inspect`: where the chunks of one prompt are, made on request.

Called by core/depot.py on the deciding thread, which serves other requests between steps. An inspection is a generator
that yields the number of chunks it has passed. `Inspections` makes one at a time, some thousand chunks a step. Changes
nothing; an answer mixes what was there in its steps. Invariant: each request is answered once, or its client has died.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeAlias

from kvdepot.core.actions import Action, Reply
from kvdepot.core.admission import check_names
from kvdepot.core.clients import Client
from kvdepot.core.index.chunk import Chunk, Namespace, state_of
from kvdepot.core.index.index import Index
from kvdepot.core.tiering.tiering import Tiering
from kvdepot.errors import BadRequest, Busy, KVDepotError
from kvdepot.protocol import wire
from kvdepot.protocol.chunks import MOST_CHUNKS, ChunkStatus
from kvdepot.protocol.keys import HASH_BYTES
from kvdepot.protocol.status import MOST_NAME

_STEP = 1024
"""Chunks that one step passes, in one or two milliseconds."""
MOST_INSPECTIONS = 16
"""Requests at a time."""
MOST_OF_CLIENT = 2
"""Requests of one client at a time."""
_CHUNKS_OF_ONE = 128
"""Chunks that count as one more request against `max_rate`."""
_DESCRIBED = 16
"""A chunk that is described takes as long as this many that are only passed."""

_Walk: TypeAlias = Generator[int, None, list[ChunkStatus]]
"""Yields the number of chunks passed since it last did, and returns the answer."""


@dataclass(slots=True, eq=False)
class _Inspection:
    """A request whose answer is being made."""

    client: Client
    number: bytes
    answer: _Walk


class Inspections:
    """The inspections that one depot is making."""

    def __init__(self, index: Index, tiering: Tiering, step: int = _STEP) -> None:
        """step: how many chunks one step passes."""
        self._index = index
        self._tiering = tiering
        self._step = step
        self._queue: deque[_Inspection] = deque()

    def __repr__(self) -> str:
        return f"<Inspections {len(self._queue)} to make>"

    def __bool__(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._queue)

    def cost(self, request: wire.Inspect, tenant: str = "") -> int:
        """As how many requests this one counts against `max_rate`, for a tenant's client; empty: it sees all."""
        passed = len(self._visible(tenant, request.model)) * (len(request.hashes) // HASH_BYTES)
        return 4 + passed // _CHUNKS_OF_ONE

    def begin(self, client: Client, number: bytes, request: wire.Inspect, wall: int) -> list[Action]:
        """Answer with the chunks that the client may see. wall: seconds since 1970. Raises BadRequest or Busy."""
        check_names("", request.model)
        self._drop_dead()
        if sum(each.client is client for each in self._queue) >= MOST_OF_CLIENT:
            raise Busy(f"{MOST_OF_CLIENT} inspections are being made for this client: retry later")
        if len(self._queue) >= MOST_INSPECTIONS:
            raise Busy(f"{MOST_INSPECTIONS} inspections are being made: retry later")
        if not request.hashes or len(request.hashes) % HASH_BYTES:
            raise BadRequest(f"give `hashes` of {HASH_BYTES} bytes each")
        namespaces = self._visible(client.tenant, request.model)
        self._queue.append(_Inspection(client, number, self._inspect(namespaces, request.hashes, wall)))
        return self.step()

    def _visible(self, tenant: str, model: str) -> list[Namespace]:
        """The namespaces that a tenant's client may see, of models whose name has this prefix."""
        return [
            each
            for each in self._index.namespaces.all()
            if tenant in ("", each.tenant) and each.model.startswith(model)
        ]

    def _drop_dead(self) -> None:
        self._queue = deque(each for each in self._queue if not each.client.dead)

    def step(self) -> list[Action]:
        """Continue with the first inspection; its reply, if it is complete."""
        self._drop_dead()
        if not self._queue:
            return []
        made = self._queue[0]
        answer = self._advance(made.answer)
        if answer is None:
            return []
        self._queue.popleft()
        return [Reply(made.client.identity, made.number, answer)]

    def _advance(self, walk: _Walk) -> object | None:
        """Continue one inspection by a step; its answer, if it is complete."""
        passed = 0
        try:
            while passed < self._step:
                passed += next(walk)
        except StopIteration as end:
            answer: object = end.value
            return answer
        except KVDepotError as exc:
            return exc
        return None

    def stop(self) -> list[Action]:
        """Before shutdown: refuse all, which would delay it."""
        made, self._queue = self._queue, deque()
        busy = Busy("the server is stopping: retry later")
        return [Reply(each.client.identity, each.number, busy) for each in made if not each.client.dead]

    def _inspect(self, namespaces: list[Namespace], hashes: bytes, wall: int) -> _Walk:
        """The chunks in these namespaces with these hashes. Raises BadRequest if they are more than `MOST_CHUNKS`."""
        keys = dict.fromkeys(hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES))
        found: list[ChunkStatus] = []
        for namespace in namespaces:
            for key in keys:
                chunk = namespace.chunks.get(key)
                if chunk is not None:
                    if len(found) == MOST_CHUNKS:
                        raise BadRequest(f"the answer would list more than {MOST_CHUNKS} chunks: give a model or fewer")
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
