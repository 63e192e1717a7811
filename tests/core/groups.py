"""An index of a model with several KV cache groups, and made-up prompts whose parts stand in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvdepot.core.index import matching
from kvdepot.core.index.chunk import Chunk, Namespace, Pin
from kvdepot.core.index.index import Index
from kvdepot.eviction import POLICIES
from kvdepot.memory.allocator import PAGE, Allocator
from kvdepot.protocol.wire import Group
from tests.core.shelf import Told, reserve_one

CHUNK_TOKENS = 16
BLOCKS = 2  # a chunk

Reaches = tuple[int, ...]
"""The reach of each group: 0 unbounded, 1 a state, n a window."""

SHAPES: list[Reaches] = [(0, 3), (0, 1), (0, 0, 2), (2, 3), (1,), (3, 0), (0, 2, 1)]
"""Full attention and a window; and a state; two unbounded groups; only windows; only a state; the window first; all."""


def fingerprint(group: int, rank: int) -> bytes:
    return bytes([group, rank]) * 16


def wire_groups(reaches: Reaches, rank: int = 0, size: int = PAGE) -> list[Group]:
    """What one rank says about its groups."""
    return [Group(reach, BLOCKS, size, fingerprint(group, rank)) for group, reach in enumerate(reaches)]


def register(
    index: Index, reaches: Reaches, world_size: int = 1, model: str = "m", chunk_tokens: int = CHUNK_TOKENS
) -> list[Namespace]:
    """The namespaces of a model's groups, with every rank's layout known and an engine registered."""
    for rank in range(world_size):
        found = index.namespaces.find_groups(
            model, world_size, rank, wire_groups(reaches, rank), chunk_tokens=chunk_tokens
        )
    for namespace in found:
        namespace.live = 1
    return found


def needed(reaches: Reaches, chain: Sequence[bytes], boundary: int) -> list[tuple[int, bytes]]:
    """The parts (group, key) without which an engine cannot resume at a boundary."""
    return [
        (group, key)
        for group, reach in enumerate(reaches)
        for key in (chain[:boundary][-reach:] if reach else chain[:boundary])
    ]


def deepest(reaches: Reaches, chain: Sequence[bytes], is_usable: Callable[[int, bytes], bool]) -> int:
    """The deepest boundary that can be resumed: tries all of them."""
    return max(
        boundary
        for boundary in range(len(chain) + 1)
        if all(is_usable(*part) for part in needed(reaches, chain, boundary))
    )


class Rack:
    """An index of `pages` pages with one model, whose parts take one page a rank."""

    def __init__(
        self,
        reaches: Reaches,
        pages: int = 64,
        world_size: int = 1,
        policy: str = "lru",
        model: str = "m",
        index: Index | None = None,
        listener: Any = None,
        **options: Any,
    ) -> None:
        """index: one that exists already."""
        self.index = index or Index(Allocator(0, pages * PAGE), POLICIES[policy], chunk_tokens=CHUNK_TOKENS, **options)
        if listener is not None:
            self.index.events = Told(listener)
        self.reaches = reaches
        self.world_size = world_size
        self.namespaces = register(self.index, reaches, world_size, model)

    def reserve(self, group: int, chain: Sequence[bytes], number: int, rank: int = 0, **more: Any) -> Chunk | None:
        """Reserve one rank's shard of the part of chunk `number`, counted from 0; None if it is not missing."""
        parent = chain[number - 1] if number else b"root"
        made = reserve_one(self.index, self.namespaces[group], rank, chain[number], parent, number + 1, **more)
        assert made.refusal is None
        return made.chunks[0] if made.chunks else None

    def store(self, group: int, chain: Sequence[bytes], numbers: Iterable[int] | None = None, born: int = 0) -> None:
        """Store a group's parts of these chunks on every rank; of all if none are named."""
        for number in range(len(chain)) if numbers is None else numbers:
            for rank in range(self.world_size):
                chunk = self.reserve(group, chain, number, rank, wall=born)
                if chunk is not None:
                    self.index.seal(chunk, rank, born=born)

    def store_all(self, chain: Sequence[bytes]) -> None:
        for group, _ in self._unbounded_first():
            self.store(group, chain)

    def store_needed(self, chain: Sequence[bytes]) -> None:
        """Store what an engine must keep of a prompt to resume at its end."""
        for group, reach in self._unbounded_first():
            self.store(group, chain, range(max(0, len(chain) - reach) if reach else 0, len(chain)))

    def _unbounded_first(self) -> list[tuple[int, int]]:
        """Groups with their reaches, so that bounded parts are stored behind what they are evicted before."""
        return sorted(enumerate(self.reaches), key=lambda each: each[1] > 0)

    def part(self, group: int, key: bytes) -> Chunk:
        return self.namespaces[group].chunks[key]

    def match(self, chain: Sequence[bytes]) -> Pin:
        return matching.match(self.namespaces[0], b"".join(chain))

    def boundary(self, chain: Sequence[bytes]) -> int:
        return self.match(chain).matched

    def pin(self, chain: Sequence[bytes]) -> list[Chunk]:
        found = self.match(chain).chunks
        self.index.hold(found)
        self.index.use(found)
        return found

    def there(self, chain: Sequence[bytes]) -> list[list[int]]:
        """By group, the numbers of the chunks whose parts exist."""
        return [[i for i, key in enumerate(chain) if key in each.chunks] for each in self.namespaces]
