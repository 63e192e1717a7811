"""The two values that go from an engine's connector to the wire: what is copied, and whose shards they are.

A `ShardSpec` names the model, world size and rank whose shards a client looks up, stores and retrieves; a `Transfer`
names chunks of one request and the blocks to copy them from or into. Used by client/scheduler.py and client/worker.py,
by client/lmcache.py, which makes them from the contract's arguments, and by the vLLM connector, whose scheduler sends
transfers to its workers. In the client, only this module makes messages from their fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvdepot.errors import BadRequest, KVDepotError
from kvdepot.protocol import wire
from kvdepot.protocol.keys import HASH_BYTES, pack_ids
from kvdepot.protocol.layout import Layout
from kvdepot.protocol.leases import NORMAL

if TYPE_CHECKING:
    from kvdepot.client.socket import Client

__all__ = ["GroupSpec", "ShardSpec", "Transfer", "learn_spec", "pack_block_ids"]


@dataclass(frozen=True)
class Transfer:
    """Consecutive chunks of one request, and the blocks to copy them from or into. Each rank copies its own shards.

    parent, depth, skip_blocks, salt: as in wire.Shards. hashes: 32 bytes a chunk. block_ids: little-endian uint32.
    trace_headers: the request's W3C trace headers, or None; they stay in the engine. group: whose blocks; the KV cache
    group's place in `ShardSpec.groups`.
    """

    request_id: str
    parent: bytes
    depth: int
    hashes: bytes
    block_ids: bytes
    skip_blocks: int = 0
    salt: bytes = b""
    trace_headers: Mapping[str, str] | None = None
    group: int = 0

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return len(self.hashes) // HASH_BYTES

    @property
    def blocks(self) -> int:
        """Number of blocks, including skipped ones."""
        return len(self.block_ids) // 4


class GroupSpec(NamedTuple):
    """A KV cache group of a model. reach: as in wire.Group. blocks_in_chunk: blocks of this group per chunk."""

    reach: int
    blocks_in_chunk: int


@dataclass(frozen=True)
class ShardSpec:
    """Whose shards: one rank's (of `world_size`) of a model; and the length of a chunk.

    model: names everything that must be equal for KV bytes to be interchangeable. chunk_tokens: tokens per chunk.
    blocks_in_chunk: engine blocks per chunk. groups: the model's KV cache groups, if it has several, or one of which
    resuming does not need all; blocks_in_chunk is then that of the first.
    """

    model: str
    world_size: int
    rank: int
    chunk_tokens: int
    blocks_in_chunk: int
    groups: tuple[GroupSpec, ...] = ()

    @classmethod
    def of_blocks(cls, model: str, world_size: int, rank: int, chunk_tokens: int, block_tokens: int) -> ShardSpec:
        """From the engine's tokens per block. Raises BadRequest if they do not divide the chunk."""
        if block_tokens < 1 or chunk_tokens % block_tokens:
            raise BadRequest(
                f"the engine's block size {block_tokens} does not divide the server's chunk size {chunk_tokens}: "
                f"start the server with a --chunk-size that is a multiple of {block_tokens}"
            )
        return cls(model, world_size, rank, chunk_tokens, chunk_tokens // block_tokens)

    @classmethod
    def fit_blocks(cls, model: str, world_size: int, rank: int, least_tokens: int, block_tokens: int) -> ShardSpec:
        """With the smallest chunk of whole blocks that has at least `least_tokens`, the server's chunk size.

        Raises BadRequest for a block of more tokens than a chunk may have.
        """
        if not 1 <= block_tokens <= wire.MAX_CHUNK_TOKENS:
            raise BadRequest(f"the engine's block size {block_tokens} is not between 1 and {wire.MAX_CHUNK_TOKENS}")
        blocks = -(-least_tokens // block_tokens)
        return cls(model, world_size, rank, blocks * block_tokens, blocks)

    @property
    def block_tokens(self) -> int:
        """Tokens per block."""
        return self.chunk_tokens // self.blocks_in_chunk

    def register(self, instance: int, layout: Layout, topic: str = "") -> wire.Register:
        """The message that shares tensors. topic: see wire.Register."""
        return wire.Register(
            instance, layout, self.model, self.world_size, self.rank, self.blocks_in_chunk, self.chunk_tokens,
            topic=topic,
        )  # fmt: skip

    def register_groups(self, instance: int, layouts: Sequence[Layout], topic: str = "") -> list[wire.Register]:
        """The messages that share the tensors of each KV cache group, as instances numbered from `instance` on.

        layouts: one per group, in order. topic: see wire.Register. Raises BadRequest for another number of layouts.
        """
        if len(layouts) != len(self.groups):
            raise BadRequest(f"{len(layouts)} layouts for {len(self.groups)} KV cache groups")
        groups = [
            wire.Group(reach, blocks, blocks * layout.block_bytes, layout.fingerprint)
            for (reach, blocks), layout in zip(self.groups, layouts, strict=True)
        ]
        return [
            wire.Register(
                instance + number, layout, self.model, self.world_size, self.rank, group.blocks_in_chunk,
                self.chunk_tokens, number, groups, topic,
            )
            for number, (layout, group) in enumerate(zip(layouts, groups, strict=True))
        ]  # fmt: skip

    def blocks_of(self, group: int) -> int:
        """Blocks of a KV cache group per chunk."""
        return self.groups[group].blocks_in_chunk if self.groups else self.blocks_in_chunk

    def lookup(
        self, request_id: str, readers: int, hashes: bytes, chained: bool, salt: bytes, reports: bool = False
    ) -> wire.Lookup:
        """The message that looks chunks up, on all ranks. See wire.Lookup."""
        return wire.Lookup(
            self.model, self.world_size, self.blocks_in_chunk, request_id, readers, hashes, chained, salt,
            self.chunk_tokens, reports,
        )  # fmt: skip

    def lease(
        self,
        name: str,
        hashes: bytes,
        salt: bytes,
        kind: str = "retain",
        ttl_s: int = 0,
        priority: int = NORMAL,
        drops: bool = False,
    ) -> wire.Lease:
        """The message that begins a lease of chunks. See wire.Lease."""
        return wire.Lease(
            name, kind, self.model, self.world_size, self.blocks_in_chunk, hashes, salt, self.chunk_tokens, ttl_s,
            priority, drops,
        )  # fmt: skip

    def drop(self, hashes: bytes, salt: bytes, keep: int = 0) -> wire.Drop:
        """The message that removes a prompt's chunks. See wire.Drop."""
        return wire.Drop(self.model, self.world_size, self.blocks_in_chunk, hashes, salt, self.chunk_tokens, keep)

    def shards(self, transfers: Iterable[Transfer]) -> list[wire.Shards]:
        """This rank's shards of transfers, for a store or retrieve."""
        return [
            wire.Shards(
                t.request_id, self.model, self.world_size, self.rank,
                t.parent, t.depth, t.hashes, t.block_ids, t.skip_blocks, t.salt,
            )
            for t in transfers
        ]  # fmt: skip


def pack_block_ids(block_ids: Sequence[int]) -> bytes:
    """Block ids as little-endian uint32. Raises BadRequest for anything but a sequence of ids."""
    try:  # `array` accepts bytes and bools
        is_wrong = isinstance(block_ids, bytes | bytearray) or (len(block_ids) > 0 and isinstance(block_ids[0], bool))
    except (TypeError, LookupError):
        is_wrong = True
    if is_wrong:
        raise BadRequest(f"block ids must be a sequence of integers, not {block_ids!r:.80}")
    return pack_ids(block_ids, "block ids")


def learn_spec(
    client: Client, model: str, world_size: int, rank: int, block_tokens: int, timeout_s: float
) -> ShardSpec:
    """A spec made from the chunk size of the client's server. Blocks until the first welcome, `timeout_s` at most.

    Raises Unavailable without a server, BadRequest for a block that does not divide the chunk; the client is closed
    then.
    """
    try:
        return ShardSpec.of_blocks(model, world_size, rank, client.learn_chunk_size(timeout_s), block_tokens)
    except KVDepotError:
        client.close()
        raise
