"""The interface of eviction policies. No I/O; see __init__.py for the callers.

The index calls a policy when chunks are inserted (`insert`), and when one is used (`use`), becomes evictable (`add`)
and is removed (`remove`), and asks it for a victim. A policy never names a chunk that `evictable` refuses: one that is
pinned, being copied, or has a chunk behind it. So a chain always loses its tail first, whatever the policy.

**Chains.** A request that hits a chain uses its deepest chunk only, although it needs the whole chain. To make up for
that, a chunk's date and uses pass to its parent when the chunk is removed, which is also when the parent may become
evictable. A tier without chains leaves `parent` None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec


class Victim(msgspec.Struct, gc=False):
    """A policy's view of a chunk, with the fields that this folder changes. core/index/chunk.py extends it."""

    key: bytes = b""
    parent: Victim | None = None
    """The chunk before this one in its chain, if known. It exists at least as long as this chunk."""
    order: float = 0
    """The chunk's date, as a number of the policy; chunks with the lowest are evicted first."""
    number: int = 0
    """The number of chunks before this one in the part of its chain that the policy knows."""
    place: int = 0
    """The run (runs.py) that the chunk belongs to in the policy `learned`; 0: none."""
    queued: bool = False
    """Whether the chunk is in the policy's queue, so that `victim` may return it."""
    gone: bool = False
    expires: float = 0.0
    """When the queue of ages (ages.py) looks at the chunk, seconds since 1970; 0: it is not in that queue."""


class Policy(Protocol):
    """The interface of an eviction policy. A policy must not change a chunk's key or parent."""

    def insert(self, chunks: Sequence[Victim]) -> None:
        """Note that `chunks`, each behind the one before it, are new, or are stored again after their removal. They are
        not evictable before `add`; of loose chunks, the last is evicted first."""

    def use(self, chunk: Victim) -> None:
        """Note that a request hit `chunk`. Called once per request."""

    def add(self, chunk: Victim) -> None:
        """Note that `chunk` may have become evictable, because a hold or a child is gone. It may be queued already."""

    def victim(self, evictable: Callable[[Victim], bool]) -> Victim | None:
        """Take the chunk to evict next out of the queue; None: no chunk is evictable.

        The caller then calls `remove`, or, if it keeps the chunk, `add`, which restores the chunk's old place.
        """

    def remove(self, chunk: Victim, evicted: bool) -> None:
        """Note that `chunk`, queued or not, is removed; its `gone` is set, and its parent is still known.

        evicted: the removal makes room, so requests may miss the chunk; otherwise it was dropped, or its copy
        failed.
        """
