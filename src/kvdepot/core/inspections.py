"""The answer to `Inspect`: where the chunks of one prompt are.

Called by core/depot.py on the deciding thread. Clients ask for long prompts in pieces, each of which takes less than a
millisecond unless hundreds of models match. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvdepot.core.admission import check_hashes, check_names
from kvdepot.core.index.chunk import Chunk, Namespace, state_of
from kvdepot.errors import BadRequest
from kvdepot.protocol import wire
from kvdepot.protocol.chunks import MOST_CHUNKS, MOST_HASHES, ChunkStatus
from kvdepot.protocol.keys import HASH_BYTES
from kvdepot.protocol.status import MOST_NAME


def inspect(
    request: wire.Inspect, tenant: str, namespaces: Sequence[Namespace], tiers: Sequence[str], wall: int
) -> list[ChunkStatus]:
    """The chunks that a client asks for. tenant: the one it may see; empty: all. tiers: names of all tiers. wall:
    seconds since 1970. Raises BadRequest if a value is out of range, or for more than `MOST_CHUNKS`."""
    check_names("", request.model)
    check_hashes(request.hashes)
    if len(request.hashes) > MOST_HASHES * HASH_BYTES:
        raise BadRequest(f"{len(request.hashes) // HASH_BYTES} hashes; ask for at most {MOST_HASHES} at a time")
    keys = dict.fromkeys(request.hashes[at : at + HASH_BYTES] for at in range(0, len(request.hashes), HASH_BYTES))
    visible = (each for each in namespaces if tenant in ("", each.tenant) and each.model.startswith(request.model))
    found = [each.chunks[key] for each in visible for key in keys if key in each.chunks]
    if len(found) > MOST_CHUNKS:
        raise BadRequest(f"the answer would list more than {MOST_CHUNKS} chunks: give a model or fewer hashes")
    return [_describe(chunk, tiers, wall) for chunk in found]


def _describe(chunk: Chunk, tiers: Sequence[str], wall: int) -> ChunkStatus:
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
        tiers=[name for number, name in enumerate(tiers) if saved >> number & 1],
        age_s=float(max(0, wall - chunk.born)) if chunk.born else None,
    )
