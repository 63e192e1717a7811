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
    """A policy's view of a chunk, and the fields of this folder on it. core/index/chunk.py extends it."""

    key: bytes = b""
    parent: Victim | None = None
    """The chunk before it in its chain, if known. It exists at least as long as this one."""
    order: float = 0
    """Its date, in the policy's own measure; the lowest is evicted first."""
    number: int = 0
    """Chunks before it in its chain, as far as the policy knows it."""
    place: int = 0
    """The part of the policy that it belongs to; 0 = none."""
    queued: bool = False
    """Whether the policy may name it."""
    gone: bool = False
    expires: float = 0.0
    """When the queue of ages comes to it (ages.py), seconds since 1970; 0: it is not in the queue."""


class Policy(Protocol):
    """The interface of an eviction policy. A policy must not change a chunk's key or parent."""

    def insert(self, chunks: Sequence[Victim]) -> None:
        """`chunks`, each behind the one before it, are new, or back after they were removed. The first call for them;
        they are not evictable before `add`, and of loose ones the last goes first."""

    def use(self, chunk: Victim) -> None:
        """A request hit `chunk`. Called once per request."""

    def add(self, chunk: Victim) -> None:
        """`chunk` may have become evictable, because a hold or child was removed. It may be queued already."""

    def victim(self, evictable: Callable[[Victim], bool]) -> Victim | None:
        """Take the chunk to evict next out of its queue; None if there is none.

        The caller then calls `remove`, or, if it keeps the chunk, `add`, which restores its old place.
        """

    def remove(self, chunk: Victim, evicted: bool) -> None:
        """`chunk` is removed, queued or not; `gone` is set and the parent is still known.

        evicted: to make room, so it may be missed; otherwise it was dropped, or its copy failed.
        """
