"""A core without a server, and requests for it: no socket, no thread, no byte moved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvdepot.config import Config
from kvdepot.core.actions import Prepare, Prepared, Reply
from kvdepot.core.admission import stored_salts
from kvdepot.core.index.index import Index
from kvdepot.core.transfers import LINGER_S
from kvdepot.eviction import POLICIES
from kvdepot.keys import ChunkChain, derive_root
from kvdepot.memory.allocator import PAGE, Allocator, Extents
from kvdepot.protocol import wire
from kvdepot.protocol.keys import HASH_BYTES
from kvdepot.protocol.layout import BlockFormat
from kvdepot.tiers import TierConfig
from tests.conftest import clear
from tests.core.groups import BLOCKS as PER_CHUNK
from tests.core.groups import Reaches, fingerprint, wire_groups
from tests.harness import Harness

BLOCK = PAGE // PER_CHUNK  # so a chunk takes one page


def layout(fingerprint: bytes = b"f" * 32, block: int = BLOCK) -> BlockFormat:
    return BlockFormat(fingerprint, block)


def prompt(name: str, chunks: int) -> ChunkChain:
    chain = ChunkChain(1, derive_root(("salt", name)))
    chain.extend(range(chunks))
    return chain


Transfer: TypeAlias = wire.Store | wire.Retrieve | wire.Compare


@dataclass(eq=False)
class Copying:
    """What a client is to copy. asked: the request, as `Desk.send` returns it."""

    asked: tuple[bytes, bytes]
    request: Transfer
    placement: wire.Placement

    @property
    def client(self) -> bytes:
        return self.asked[0]

    def keys(self) -> list[bytes]:
        """Of the placed chunks, in the order of their places."""
        hashes = b"".join(part.hashes for part in self.request.shards)
        return [hashes[i * HASH_BYTES :][:HASH_BYTES] for i in self.placement.chunks]


class Desk(Harness):
    """A core whose clients copy when the test lets them; no byte is moved.

    `answers` has the last answer to a request: of one that was placed, the answer to its completion.
    """

    def __init__(
        self,
        pages: int = 64,
        settings: dict[str, Any] | None = None,
        tiers: Sequence[TierConfig] = (),
        policy: str = "lru",
        is_populated: bool = True,
    ) -> None:
        """is_populated: whether the arena has its memory; otherwise `prepares` wait until the test lets them end."""
        config = Config(url="ipc:///nowhere", chunk_size=1, **(settings or {}))
        index = Index(
            Allocator(0, pages * PAGE), POLICIES[policy], ttl_s=config.ttl_s, chunk_tokens=config.chunk_tokens,
            salt_ttls=stored_salts(config.salt_ttls, ["blue", "red"]),
        )  # fmt: skip
        super().__init__(config, index, tiers, tenant=lambda user: user)
        self.is_populated = is_populated
        self.copies: list[Copying] = []
        self.transfers: dict[tuple[bytes, bytes], Transfer] = {}  # without an answer, by client and number

    def submitted(self, task: Prepare) -> None:
        super().submitted(task)
        if self.is_populated:
            self.prepare(task)

    def prepare(self, task: Prepare, is_allocated: bool = True) -> None:
        """Let the allocation of memory end."""
        self.prepares = [other for other in self.prepares if other is not task]
        self.finished(task.token, Prepared(is_allocated))

    def replied(self, reply: Reply, frame: bytes) -> None:
        asked = reply.client, reply.number
        if not isinstance(reply.value, wire.Placement):
            self.transfers.pop(asked, None)
            super().replied(reply, frame)
        elif (known := next((each for each in self.copies if each.asked == asked), None)) is not None:
            assert known.placement == reply.value, "a repeated request is placed elsewhere"
        else:
            self.copies.append(Copying(asked, self.transfers[asked], reply.value))

    def send(self, identity: bytes, request: wire.Request) -> tuple[bytes, bytes]:
        if isinstance(request, Transfer):
            self.transfers[identity, self.next_number.to_bytes(wire.ID_BYTES, "little")] = request
        return super().send(identity, request)

    def finish(
        self,
        copying: Copying,
        copied: bool = True,
        sums: list[int] | None = None,
        differences: list[list[float]] | None = None,
    ) -> None:
        """Let a client complete what it copies; with equal bytes and right sums, unless told otherwise."""
        self.copies = [other for other in self.copies if other is not copying]
        placed = copying.placement
        if sums is None:
            is_summing = not isinstance(copying.request, wire.Compare)  # which sums what differs only
            sums = [self.sum_of(place) if place.is_summed and is_summing else 0 for place in placed.places]
        if differences is None:
            differences = [[0.0]] * len(placed.places) if isinstance(copying.request, wire.Compare) else []
        completed = self.send(copying.client, wire.Complete(placed.operation, placed.boot, copied, sums, differences))
        self.transfers.pop(copying.asked, None)
        self.answers[copying.asked] = self.answers.pop(completed)

    def sum_of(self, place: wire.Place) -> int:
        """The checksum of the bytes in a place."""
        return 1

    def settle(self) -> None:
        while self.prepares or self.copies or self.depot.removals:
            if self.prepares:
                self.prepare(self.prepares[0])
            elif self.copies:
                self.finish(self.copies[0])
            else:
                self.expire()

    def check_places(self) -> None:
        """No two clients write to the same memory, and none writes where another reads."""
        written: list[Extents] = []
        read: set[Extents] = set()
        for each in self.copies:
            places = [place.extents for place in each.placement.places]
            if isinstance(each.request, wire.Store):
                written += places
            else:
                read.update(places)
        assert len(set(written)) == len(written) and not read & set(written)

    def die(self, identity: bytes) -> None:
        super().die(identity)
        self.copies = [each for each in self.copies if each.client != identity]

    def linger(self) -> None:
        """Let so much time pass that dead clients write no more."""
        self.now += LINGER_S
        self.expire()

    def ask(self, client: bytes, request: wire.Request) -> Any:
        """Send, let everything end, and give the answer."""
        asked = self.send(client, request)
        self.settle()
        return self.answers[asked]

    def ask_only(self, client: bytes, request: wire.Request) -> Any:
        """Send, and give the answer that comes at once."""
        return self.answers[self.send(client, request)]

    def register(self, client: bytes, instance: int = 1, **options: Any) -> None:
        assert self.ask(client, wire.Register(instance, layout(**options))) is None

    def register_groups(self, reaches: Reaches, world_size: int = 1, client: bytes = b"one", **options: Any) -> None:
        """Register each group of each rank under the instance number that `instance_of` tells."""
        for rank in range(world_size):
            for request in group_requests(reaches, world_size, rank, **options):
                assert self.ask(client, request) is None

    def assert_empty(self) -> None:
        clear(self.index)
        self.index.validate()
        counts = (self.index.chunks, self.index.reserved, self.index.held, self.depot.operations)
        assert counts == (0, 0, 0, 0)
        assert self.index.allocator.free_bytes == self.index.allocator.capacity


def hit(answer: Any) -> wire.Hit:
    """The answer to a lookup, which reads as a number if only whole chunks are said to be found."""
    return answer if isinstance(answer, wire.Hit) else wire.Hit(answer)


def instance_of(reaches: Reaches, group: int, rank: int = 0) -> int:
    """The number under which `register_groups` registers a group of a rank."""
    return 1 + rank * len(reaches) + group


def group_requests(
    reaches: Reaches, world_size: int = 1, rank: int = 0, model: str = "m", chunk_tokens: int = 0
) -> list[wire.Register]:
    """One rank's registrations of its KV cache groups."""
    groups = wire_groups(reaches, rank)
    return [
        wire.Register(
            instance_of(reaches, number, rank), layout(fingerprint(number, rank)), model, world_size, rank, PER_CHUNK,
            chunk_tokens, number, groups,
        )
        for number in range(len(reaches))
    ]  # fmt: skip


def group_stores(
    reaches: Reaches, chain: ChunkChain, parts: Sequence[Iterable[int]] | None = None, world_size: int = 1, **more: Any
) -> list[wire.Store]:
    """Stores of parts of a prompt on every rank. parts: numbers of chunks by group; by default what resuming at the
    prompt's end needs."""
    needed = [range(max(0, len(chain) - reach) if reach else 0, len(chain)) for reach in reaches]
    return [
        store(chain, instance_of(reaches, group, rank), first=i, end=i + 1, world_size=world_size, rank=rank, **more)
        for group, numbers in enumerate(needed if parts is None else parts)
        for i in numbers
        for rank in range(world_size)
    ]


def shards(
    chain: ChunkChain,
    first: int = 0,
    end: int = 0,
    model: str = "m",
    request: str = "r",
    world_size: int = 1,
    rank: int = 0,
    blocks: int = PER_CHUNK,
) -> wire.Shards:
    end = end or len(chain)
    return wire.Shards(request, model, world_size, rank, chain.parent(first), first, chain.slice(first, end), blocks)


def store(chain: ChunkChain, instance: int = 1, **options: Any) -> wire.Store:
    return wire.Store(instance, [shards(chain, **options)])


def retrieve(chain: ChunkChain, instance: int = 1, **options: Any) -> wire.Retrieve:
    return wire.Retrieve(instance, [shards(chain, **options)])


def lookup(chain: ChunkChain, request: str = "r", model: str = "m", readers: int = 1, **options: Any) -> wire.Lookup:
    return wire.Lookup(model, options.get("world_size", 1), PER_CHUNK, request, readers, bytes(chain.hashes))
