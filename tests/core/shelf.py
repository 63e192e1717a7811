"""An index with one namespace, and made-up prompts whose chunks stand in it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from kvdepot.core.forgetting import Work, clear, forget
from kvdepot.core.index import matching
from kvdepot.core.index.chunk import Chunk, Namespace, Scope
from kvdepot.core.index.events import IndexEvent, Reader
from kvdepot.core.index.index import Index
from kvdepot.core.index.runs import Reservation, Run
from kvdepot.eviction import POLICIES
from kvdepot.memory.allocator import PAGE, Allocator
from kvdepot.protocol.wire import Group

Path = tuple[int, ...]
"""A chunk's place in a tree of prompts; its parent's is one shorter."""


def key_of(path: Path) -> bytes:
    return hashlib.sha256(repr(path).encode()).digest()


def prompt(path: Path) -> list[bytes]:
    return [key_of(path[: i + 1]) for i in range(len(path))]


def keys(name: str, count: int) -> list[bytes]:
    return prompt(tuple(f"{name}{i}" for i in range(count)))  # type: ignore[arg-type]


def reserve_one(
    index: Index,
    namespace: Namespace,
    rank: int,
    key: bytes,
    parent: bytes = b"root",
    position: int = 1,
    size: int = PAGE,
    salt: bytes = b"",
    wall: int | None = 0,
    continues: bytes = b"",
) -> Reservation:
    """Reserve one shard. wall: None if it is to be loaded."""
    return index.reserve(namespace, rank, Run(key, size, parent, position, salt, continues), wall)


def reserve(index: Index, namespace: Namespace, rank: int, *chunk: Any, **more: Any) -> Chunk | None:
    """Reserve one shard, as `reserve_one` does, which must be missing; None where there is no room."""
    made = reserve_one(index, namespace, rank, *chunk, **more)
    assert made.chunks or made.refusal is not None, made
    return made.chunks[0] if made.chunks else None


def sealed(index: Index, namespace: Namespace, rank: int, key: bytes) -> Chunk | None:
    """The chunk of a sealed shard that may be given out."""
    return matching.find(namespace, rank, key)[0]


class Told(list[IndexEvent]):
    """Events that a reader gets one by one, as they happen."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self._reader = reader

    def append(self, event: IndexEvent) -> None:
        self._reader.read([event], 0)


class Steps:
    """Removals from an index without a server, one after the other, of some chunks a step."""

    def __init__(self, index: Index, chunks: int) -> None:
        self.index = index
        self.under_way: list[tuple[Scope, Work]] = []
        self._chunks = chunks

    def __len__(self) -> int:
        return len(self.under_way)

    def forget(self, namespaces: Iterable[Namespace], salt: bytes | None = None) -> Scope:
        scope = self.index.namespaces.begin_removal(namespaces, salt, hides=True)
        self.under_way.append((scope, forget(self.index, scope)))
        return scope

    def clear(self, namespaces: Iterable[Namespace]) -> Scope:
        scope = self.index.namespaces.begin_removal(namespaces, None, hides=False)
        self.under_way.append((scope, clear(self.index, scope)))
        return scope

    def step(self) -> None:
        for _ in range(self._chunks):
            if self.under_way and next(self.under_way[0][1], None) is None:
                del self.under_way[0]

    def finish(self) -> None:
        while self.under_way:
            self.step()


class Shelf:
    """An index of `pages` pages with one namespace, whose chunks take one page a shard."""

    def __init__(self, pages: int, world_size: int = 1, policy: str = "lru", listener: Any = None) -> None:
        self.index = Index(Allocator(0, pages * PAGE), POLICIES[policy], chunk_tokens=256)
        if listener is not None:
            self.index.events = Told(listener)
        self.world_size = world_size
        for rank in range(world_size):
            (self.namespace,) = self.index.namespaces.find_groups("m", world_size, rank, [Group(0, 4, 0, bytes(32))])
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
