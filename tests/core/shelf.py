"""An index with one namespace, and made-up prompts whose chunks stand in it."""

from __future__ import annotations

import hashlib
from typing import Any

from kvdepot.core.index.chunk import Chunk, Namespace
from kvdepot.core.index.index import Index
from kvdepot.core.index.outcomes import Found, NoRoom, Replaced, Reserved
from kvdepot.eviction import POLICIES
from kvdepot.memory.allocator import PAGE, Allocator

Path = tuple[int, ...]
"""A chunk's place in a tree of prompts; its parent's is one shorter."""


def key_of(path: Path) -> bytes:
    return hashlib.sha256(repr(path).encode()).digest()


def prompt(path: Path) -> list[bytes]:
    return [key_of(path[: i + 1]) for i in range(len(path))]


def keys(name: str, count: int) -> list[bytes]:
    return prompt(tuple(f"{name}{i}" for i in range(count)))  # type: ignore[arg-type]


def reserve(
    index: Index,
    namespace: Namespace,
    rank: int,
    key: bytes,
    parent: bytes,
    position: int,
    size: int,
    salt: bytes = b"",
) -> Chunk | None:
    """Reserve one shard, which must be missing; None where there is no room."""
    (outcome,) = index.reserve_missing(namespace, rank, key, parent, position, size, salt)
    assert isinstance(outcome, Reserved | Replaced | NoRoom), outcome
    return None if isinstance(outcome, NoRoom) else outcome.chunk


def sealed(index: Index, namespace: Namespace, rank: int, key: bytes) -> Chunk | None:
    """The chunk of a sealed shard that may be given out."""
    (found,) = index.find(namespace, rank, key)
    return found.chunk if isinstance(found, Found) else None


class Shelf:
    """An index of `pages` pages with one namespace, whose chunks take one page a shard."""

    def __init__(self, pages: int, world_size: int = 1, policy: str = "lru", watch: Any = None) -> None:
        self.policy = POLICIES[policy]()
        self.index = Index(Allocator(0, pages * PAGE), lambda: self.policy, watch=watch, chunk_tokens=256)
        self.world_size = world_size
        for rank in range(world_size):
            self.namespace = self.index.namespaces.find("m", world_size, rank, bytes(32), 4)
        self.namespace.live = 1

    def reserve(self, chain: list[bytes], number: int, rank: int = 0, loose: bool = False) -> Chunk | None:
        """Reserve chunk `number`, counted from 1, of a chain."""
        parent = b"" if loose else chain[number - 2] if number > 1 else b"root"
        return reserve(self.index, self.namespace, rank, chain[number - 1], parent, 0 if loose else number, PAGE)

    def store(self, chain: list[bytes], loose: bool = False) -> None:
        for number in range(1, len(chain) + 1):
            for rank in range(self.world_size):
                chunk = self.reserve(chain, number, rank, loose)
                assert chunk is not None
                self.index.seal(chunk, rank)

    def matched(self, chain: list[bytes]) -> int:
        return self.index.match(self.namespace, b"".join(chain)).matched

    def pin(self, chain: list[bytes]) -> list[Chunk]:
        found = self.index.match(self.namespace, b"".join(chain)).chunks
        self.index.hold(found)
        return found

    def there(self, chain: list[bytes]) -> list[bool]:
        return [key in self.namespace.chunks for key in chain]
