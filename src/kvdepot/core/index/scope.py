"""The chunks that a removal in progress covers; see core/forgetting.py. Plain data, created by core/index/index.py."""

from __future__ import annotations

from dataclasses import dataclass

from kvdepot.core.index.chunk import Chunk, Namespace

__all__ = ["Scope"]


@dataclass(slots=True, eq=False)
class Scope:
    """The chunks of these namespaces and this salt that existed when removal `number` began."""

    number: int
    namespaces: dict[Namespace, None]  # ordered, so that two runs remove in the same order
    salt: bytes | None  # None: any
    hides: bool  # its chunks are unavailable from the moment the removal begins
    removed: int = 0  # or counted

    def means(self, chunk: Chunk) -> bool:
        return chunk.generation < self.number and chunk.namespace in self.namespaces and self.salt in (None, chunk.salt)
