"""Answers Inspect: where the chunks of one prompt are, and what holds them. Pure; core/lists.py runs it in steps."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence

from kvdepot.core.index.chunk import Chunk, Namespace, State
from kvdepot.core.index.index import Index
from kvdepot.errors import BadRequest
from kvdepot.protocol import wire
from kvdepot.protocol.keys import HASH_BYTES
from kvdepot.protocol.prefixes import MOST_CHUNKS, ChunkStatus
from kvdepot.protocol.status import MOST_NAME

__all__ = ["MOST_SEARCHED", "inspect"]

MOST_SEARCHED = 1 << 16
"""Chunks of a namespace among which the beginning of a hash is looked for: they are listed in one step, which takes
some milliseconds for so many."""
_PER_STEP = 16
"""A chunk that is described counts as this many chunks that are only looked at."""


def inspect(
    index: Index, namespaces: Sequence[Namespace], request: wire.Inspect, tiers: Sequence[str], wall: int, step: int
) -> Generator[None, None, list[ChunkStatus]]:
    """The chunks in these namespaces that the request asks for. tiers: their names. wall: seconds since 1970.

    Pauses after `step` chunks. Raises BadRequest if `request.end` begins the hashes of several chunks, or of one among
    more than `MOST_SEARCHED`, or if more than `MOST_CHUNKS` would be listed.
    """
    if request.end:
        hashes = yield from _chain_to(namespaces, request.end, request.most, step)
    else:
        given = (request.hashes[at : at + HASH_BYTES] for at in range(0, len(request.hashes), HASH_BYTES))
        hashes = list(dict.fromkeys(given))
    found: list[ChunkStatus] = []
    looked_at = 0
    for namespace in namespaces:
        for key in hashes:
            chunk = namespace.chunks.get(key)
            looked_at += 1
            if chunk is not None:
                _check_number(len(found) + 1)
                found.append(_described(index, chunk, tiers, wall))
                looked_at += _PER_STEP
            if looked_at >= step:
                looked_at = 0
                yield
    return found


def _check_number(chunks: int) -> None:
    if chunks > MOST_CHUNKS:
        raise BadRequest(f"the answer would list more than {MOST_CHUNKS} chunks: give a model or fewer hashes")


def _chain_to(namespaces: Iterable[Namespace], end: bytes, most: int, step: int) -> Generator[None, None, list[bytes]]:
    """The hashes of the one chunk whose hash begins with `end` and of those before it; none if there is none.

    most: only so many, the last ones; 0: all.
    """
    last: Chunk | None = None
    for namespace in namespaces:
        if len(end) == HASH_BYTES:
            chunks = [namespace.chunks[end]] if end in namespace.chunks else []
        elif len(namespace.chunks) > MOST_SEARCHED:
            raise BadRequest(
                f"model {namespace.model[:MOST_NAME]} has {len(namespace.chunks)} chunks in memory, and the beginning "
                f"of a hash is not looked for among more than {MOST_SEARCHED}: give the whole hash, as `kvdepot ls "
                "--long` shows it, or another model"
            )
        else:
            chunks = list(namespace.chunks.values())
        for start in range(0, len(chunks), step):
            for chunk in chunks[start : start + step]:
                if not chunk.key.startswith(end) or chunk.gone:
                    continue
                if last is not None and last.key != chunk.key:
                    raise BadRequest(f"the hashes of several chunks begin with {end.hex()}: give more of it")
                if last is None or chunk.position:  # a bounded group's part knows nothing of its chain
                    last = chunk
            yield
    hashes: list[bytes] = []
    while last is not None and not last.gone and (not most or len(hashes) < most):
        _check_number(len(hashes) + 1)
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
