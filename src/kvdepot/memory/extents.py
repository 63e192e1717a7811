"""Bytes of chunks in an arena: where they lie, and their checksum. Used by clients, which copy them, and by tiers.

A chunk is stored in the arena segment by segment, and its extents are filled in order:

    logical bytes of a chunk     [seg 0: block 0..n-1][seg 1: block 0..n-1] ...
    segment s                    [n * before(s), n * before(s) + n * size(s))      before = sizes of earlier segments
    extents                      [0, len 0)[len 0, len 0 + len 1) ...              cut at any multiple of a page
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvdepot.memory.allocator import Extents

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.intp]


class Memory(Protocol):
    """The part of `arena.Arena` that copies to and from tiers use."""

    bytes: Bytes

    def ensure(self, offset: int, size: int) -> bool: ...


def checksum(memory: Bytes, extents: Extents, size: int) -> int:
    """XXH3 (64 bits, https://xxhash.com) of the first `size` bytes in these extents; never 0."""
    import xxhash  # not needed with verify = off and no tiers

    digest = xxhash.xxh3_64()
    for part in views(memory, extents, 0, size):
        digest.update(part.data)
    return digest.intdigest() or 1


def views(memory: Bytes, extents: Extents, start: int, size: int) -> list[Bytes]:
    """The arena's bytes for a chunk's logical bytes `[start, start + size)`, in order."""
    if len(extents) == 1:
        offset = extents[0][0] + start
        return [memory[offset : offset + size]]
    found = []
    for offset, length in extents:
        if start < length and size:
            take = min(size, length - start)
            found.append(memory[offset + start : offset + start + take])
            size -= take
            start = 0
        else:
            start -= length
    return found
