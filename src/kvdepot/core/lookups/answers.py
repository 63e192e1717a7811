"""The answer to a lookup: says what was found, who has stored it, and where its last chunks are. Queries only."""

from __future__ import annotations

from kvdepot.core.index.matching import Match, find, stored_by
from kvdepot.protocol import wire
from kvdepot.protocol.keys import HASH_BYTES


def hit_of(match: Match, request: wire.Lookup, withdrawals: int, summed_below: int) -> wire.Hit:
    """The answer to a lookup that has found `match`. withdrawals: the index's count of them. summed_below: chunks whose
    keys begin with a byte below this number have a checksum."""
    if not (request.writers or request.layout):
        return wire.Hit(match.chunks, match.tail)
    keys = request.hashes[: match.chunks * HASH_BYTES] + match.tail_key(request.tails)
    writers = stored_by(match, keys, withdrawals) if request.writers else ()
    places = _places(match, request, withdrawals, summed_below) if request.layout else None
    return wire.Hit(match.chunks, match.tail, writers, places)


def _places(match: Match, request: wire.Lookup, withdrawals: int, summed_below: int) -> wire.Places | None:
    """Where the last chunks of a match are; None: an engine may not copy them itself (as in `Transfers.retrieve`)."""
    is_plain = len(match.namespaces) == 1 and match.namespaces[0].is_simple and match.tail is None
    size = match.namespaces[0].sizes.get(0, 0) if is_plain else 0
    if not (size and match.chunks and request.pins) or summed_below > 0xFF:
        return None
    namespace, most = match.namespaces[0], min(wire.MAX_PLACES, wire.MAX_PLACED_BYTES // size)
    first, ranks = max(0, match.chunks - most), []
    hashes = request.hashes[first * HASH_BYTES : match.chunks * HASH_BYTES]
    for rank in range(namespace.world_size):
        chunks = find(namespace, rank, hashes)
        shards = [chunk.shards[rank] for chunk in chunks if chunk is not None]
        is_right = all(shard.size == size for shard in shards)
        if len(shards) < len(chunks) or namespace.layouts.get(rank) != request.layout or not is_right:
            return None
        sums = (hashes[at] < summed_below for at in range(0, len(hashes), HASH_BYTES))
        both = zip(shards, sums, strict=True)
        ranks.append([wire.Place(each.extents, checksum=each.checksum * summed) for each, summed in both])
    return wire.Places(withdrawals, first, size, ranks)
