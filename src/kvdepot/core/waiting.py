"""Lookups that wait for stores in progress: which waits for what, and until when. Plain data on the deciding thread.

Used by core/sessions.py. Invariant: a lookup waits for one part at a time, and until one deadline, however often the
part changes; no lookup waits for a store that has kept another one waiting until its deadline.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvdepot.core.clients import PendingLookup
from kvdepot.core.index.chunk import Chunk

__all__ = ["STORE_S", "WaitingLookups"]

STORE_S = 0.5
"""A lookup waits for stores this long in all. A store takes milliseconds, and computing the chunks again longer; a
client waits twice as long for an answer (client/scheduler.py), to which the deadline of tiers is added."""
_MOST = 1024
"""Lookups that wait at the same time, each of which holds its prefix; further ones are answered at once."""


class WaitingLookups:
    """All lookups of one depot that wait for a store."""

    def __init__(self) -> None:
        self._parts: dict[PendingLookup, Chunk] = {}  # what each waits for; the first has waited longest
        self._late: set[int] = set()  # id() of parts whose stores have let a lookup wait until its deadline

    def __repr__(self) -> str:
        return f"<WaitingLookups {len(self._parts)}, {len(self._late)} stores are late>"

    def __len__(self) -> int:
        return len(self._parts)

    def all(self) -> list[tuple[PendingLookup, Chunk]]:
        """Each lookup and the part that it waits for."""
        return list(self._parts.items())

    def may_wait(self, pending: PendingLookup, part: Chunk, now: float) -> bool:
        """Whether a lookup may wait for this part: as its first one, or after another."""
        if id(part) in self._late:
            return False
        return now < pending.store_deadline if pending in self._parts else len(self._parts) < _MOST

    def wait(self, pending: PendingLookup, part: Chunk, now: float) -> None:
        """Let a lookup wait for this part, and no longer for another one."""
        if pending not in self._parts:
            pending.store_deadline = now + STORE_S
        self._parts[pending] = part  # which keeps the place of one that has waited already

    def remove(self, pending: PendingLookup) -> bool:
        """Let it wait no longer; returns whether it did."""
        return self._parts.pop(pending, None) is not None

    def stored(self, parts: Iterable[Chunk]) -> list[PendingLookup]:
        """Stores of these parts have ended: the lookups that waited for them, in the order in which they came."""
        if not self._parts and not self._late:
            return []
        parts = list(parts)
        found = {id(part) for part in parts}
        self._late -= {id(part) for part in parts if not part.is_being_stored}
        return [pending for pending, part in self._parts.items() if id(part) in found]

    def next_deadline(self) -> float:
        """When `overdue` must be called next; infinity if nothing waits."""
        return next(iter(self._parts)).store_deadline if self._parts else float("inf")

    def overdue(self, now: float) -> list[PendingLookup]:
        """Lookups that have waited long enough, which the caller removes."""
        found = []
        for pending, part in self._parts.items():
            if pending.store_deadline > now:
                break
            self._late.add(id(part))
            found.append(pending)
        return found
