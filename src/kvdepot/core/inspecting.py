"""Answers Inspect: where the chunks of one prompt are, and what holds them. Pure; core/lists.py runs it in steps."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence

from kvdepot.core.index.chunk import Chunk, Namespace, State
from kvdepot.core.index.index import Index
from kvdepot.errors import BadRequest
from kvdepot.protocol import wire
from kvdepot.protocol.keys import HASH_BYTES
from kvdepot.protocol.prefixes import ChunkStatus
from kvdepot.protocol.status import MOST_NAME

__all__ = ["inspect"]

_PER_STEP = 16
"""A chunk that is described counts as this many chunks that are only looked at."""


def inspect(
    index: Index, namespaces: Sequence[Namespace], request: wire.Inspect, tiers: Sequence[str], wall: int, step: int
) -> Generator[None, None, list[ChunkStatus]]:
    """The chunks in these namespaces that the request asks for. tiers: their names. wall: seconds since 1970.

    Pauses after `step` chunks. Raises BadRequest if `request.end` begins the hashes of several chunks.
    """
    hashes = [request.hashes[at : at + HASH_BYTES] for at in range(0, len(request.hashes), HASH_BYTES)]
    if request.end:
        hashes = yield from _chain_to(namespaces, request.end, step)
    found = []
    some = max(1, step // _PER_STEP)
    for namespace in namespaces:
        for start in range(0, len(hashes), some):
            chunks = (namespace.chunks.get(key) for key in hashes[start : start + some])
            found += [_described(index, chunk, tiers, wall) for chunk in chunks if chunk is not None]
            yield
    return found


def _chain_to(namespaces: Iterable[Namespace], end: bytes, step: int) -> Generator[None, None, list[bytes]]:
    """The hashes of the one chunk whose hash begins with `end` and of those before it; none if there is none."""
    last: Chunk | None = None
    for namespace in namespaces:
        chunks = list(namespace.chunks.values())  # some ten milliseconds for a million
        for start in range(0, len(chunks), step):
            for chunk in chunks[start : start + step]:
                if not chunk.key.startswith(end) or chunk.gone:
                    continue
                if last is not None and last.key != chunk.key:
                    raise BadRequest(f"the hashes of several chunks begin with {end.hex()}: give more of it")
                if last is None or chunk.position:  # a bounded group's part knows nothing of its chain
                    last = chunk
            yield
    hashes = []
    while last is not None and not last.gone:
        hashes.append(last.key)
        before = last.parent
        last = before.parent if before is not None and before.key == last.key else before
        if not len(hashes) % step:
            yield
    return hashes[::-1]


def _described(index: Index, chunk: Chunk, tiers: Sequence[str], wall: int) -> ChunkStatus:
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
        state=_state(index, chunk),
        bytes=chunk.bytes,
        held=chunk.holds - chunk.leased,
        leased=chunk.leased,
        tiers=[name for number, name in enumerate(tiers) if saved >> number & 1],
        age_s=float(max(0, wall - chunk.born)) if chunk.born else None,
    )


def _state(index: Index, chunk: Chunk) -> str:
    if index.is_hidden(chunk):
        return "leaving"
    if index.is_there(chunk):
        return "ready"
    is_corrupt = any(shard.state is State.CORRUPT for shard in chunk.shards.values())
    return "corrupt" if is_corrupt else "storing"
