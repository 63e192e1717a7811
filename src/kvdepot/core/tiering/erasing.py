"""Erasing single chunks from tiers, after memory has dropped them; see core/dropping.py.

Invariant: each tier has one Erase in progress at a time, so that a long prompt does not keep saves waiting. If a tier
fails or its circuit breaker is open, its objects stay, and are counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvdepot.core.index.chunk import Namespace
from kvdepot.core.tiering.tier import TierState, Token, facts_of
from kvdepot.errors import KVDepotError
from kvdepot.tiers.worker import Erase, Erased

__all__ = ["DropToken", "Erasures", "Unsaved"]

_MOST_NAMES = 64
"""Objects that one Erase removes."""
_MOST_QUEUED = 1 << 20
"""Objects waiting to be erased from one tier; beyond it they stay."""


class Unsaved(NamedTuple):
    """A part of a chunk that no tier is to have, on all ranks."""

    namespace: Namespace
    key: bytes
    salt: bytes


@dataclass(slots=True, eq=False)
class DropToken(Token):
    """The token of an Erase of chunks that were dropped."""

    objects: int


class _Queue:
    """What is to be erased from one tier. Names are made when they are needed, so that adding many parts is cheap."""

    def __init__(self) -> None:
        self.objects = 0
        self._parts: deque[tuple[Unsaved, deque[int]]] = deque()  # with the ranks whose shards are left

    def add(self, part: Unsaved, ranks: Iterable[int]) -> None:
        left = deque(ranks)
        self.objects += len(left)
        self._parts.append((part, left))

    def take(self, most: int) -> list[str]:
        """Remove and return the names of up to `most` objects."""
        names: list[str] = []
        while self._parts and len(names) < most:
            (namespace, key, salt), ranks = self._parts[0]
            while ranks and len(names) < most:
                names.append(facts_of(namespace, ranks.popleft()).name(salt, key))
            if not ranks:
                self._parts.popleft()
        self.objects -= len(names)
        return names

    def clear(self) -> None:
        self._parts.clear()
        self.objects = 0


class Erasures:
    """What is to be erased from each tier."""

    def __init__(self, tiers: Sequence[TierState]) -> None:
        self._tiers = tiers
        self._queues = [_Queue() for _ in tiers]  # by number of the tier
        self._erasing: set[int] = set()  # tiers with an Erase in progress

    def __repr__(self) -> str:
        return f"<Erasures {sum(queue.objects for queue in self._queues)} queued>"

    def __bool__(self) -> bool:
        return bool(self._erasing) or any(queue.objects for queue in self._queues)

    def add(self, parts: Iterable[Unsaved]) -> None:
        """Queue the shards of these parts in every tier."""
        if not self._tiers:
            return
        for part in parts:
            ranks = sorted(part.namespace.layouts)
            for tier, queue in zip(self._tiers, self._queues, strict=True):
                if tier.breaker.usable and queue.objects + len(ranks) <= _MOST_QUEUED:
                    queue.add(part, ranks)
                else:
                    tier.counters["unreleased_chunks"] += len(ranks)

    def dispatch(self) -> list[Erase]:
        """Erases to begin now, of at most _MOST_NAMES objects in each tier."""
        erases = []
        for tier, queue in zip(self._tiers, self._queues, strict=True):
            if tier.number not in self._erasing and (names := queue.take(_MOST_NAMES)):
                self._erasing.add(tier.number)
                erases.append(Erase(DropToken(tier, len(names)), tier.number, names))
        return erases

    def ended(self, token: DropToken, outcome: Erased | KVDepotError) -> list[Erase]:
        """Handle the end of an Erase; returns the next ones."""
        self._erasing.discard(token.tier.number)
        if isinstance(outcome, KVDepotError):
            queue = self._queues[token.tier.number]
            token.tier.counters["unreleased_chunks"] += token.objects + queue.objects
            queue.clear()
        return self.dispatch()
