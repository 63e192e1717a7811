"""Which store in progress a lookup may wait for. Queries only; used by core/sessions.py on the deciding thread."""

from __future__ import annotations

from kvdepot.core.index.boundary import deepest_boundary, needed_parts
from kvdepot.core.index.chunk import Chunk, Namespace
from kvdepot.core.index.index import Index
from kvdepot.protocol.keys import HASH_BYTES

__all__ = ["coming_part"]


def coming_part(index: Index, namespace: Namespace, hashes: bytes, matched: int) -> Chunk | None:
    """A part being stored without which the prefix of `hashes` ends at chunk `matched`, as `Index.match` has found.

    None if no store in progress can make the prefix longer. namespace: the model's first group.
    """
    end = len(hashes) // HASH_BYTES
    if not index.reserved or matched >= end:
        return None
    if namespace.is_simple:
        chunk = namespace.chunks.get(hashes[matched * HASH_BYTES : (matched + 1) * HASH_BYTES])
        return chunk if chunk is not None and _is_coming(index, chunk) else None
    groups = namespace.groups

    def part(group: Namespace, i: int) -> Chunk | None:
        return group.chunks.get(hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES])

    def can_be_had(group: Namespace, i: int) -> bool:
        chunk = part(group, i)
        return chunk is not None and (index.is_there(chunk) or _is_coming(index, chunk))

    boundary = matched
    unbounded = [group for group in groups if not group.reach]
    while boundary < end and all(can_be_had(group, boundary) for group in unbounded):
        boundary += 1
    bounded = [(group, group.reach) for group in groups if group.reach]
    boundary = deepest_boundary(bounded, boundary, can_be_had)
    if boundary <= matched:
        return None
    for group in groups:
        for i in needed_parts(group.reach, boundary) if group.reach else range(matched, boundary):
            chunk = part(group, i)
            if chunk is not None and not index.is_there(chunk):
                return chunk
    return None


def _is_coming(index: Index, chunk: Chunk) -> bool:
    """Whether a store is writing a shard of it, and a lookup may find it after that."""
    return chunk.is_being_stored and not index.is_hidden(chunk)
