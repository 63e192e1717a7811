"""What a removal that is under way means; see core/forgetting.py. Plain data, made by core/index/index.py."""

from __future__ import annotations

from dataclasses import dataclass

from kvdepot.core.index.chunk import Chunk, Namespace

__all__ = ["Scope"]


@dataclass(slots=True, eq=False)
class Scope:
    """The chunks of these namespaces and this salt that were there when removal `number` began."""

    number: int
    namespaces: dict[Namespace, None]  # in the order they were named in, so that two runs remove in one order
    salt: bytes | None  # None: any
    hides: bool  # what is meant is nobody's from the moment on that the removal begins
    removed: int = 0  # or counted

    def means(self, chunk: Chunk) -> bool:
        return chunk.generation < self.number and chunk.namespace in self.namespaces and self.salt in (None, chunk.salt)
