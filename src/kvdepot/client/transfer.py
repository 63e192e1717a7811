"""The values that go from an engine's connector to the wire: whose shards, which prompt, which chunks and blocks.

Used by the clients in this folder and by the vLLM connector, whose scheduler sends transfers to its workers. In the
client, only this module makes messages from their fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from kvdepot.errors import BadRequest, KVDepotError
from kvdepot.protocol import wire
from kvdepot.protocol.keys import HASH_BYTES, pack_ids
from kvdepot.protocol.layout import BlockFormat
from kvdepot.protocol.leases import NORMAL

_WORTH_BYTES = 256 << 10
"""Bytes of a chunk's KV on one rank that are worth an entry of the index (docs/decisions.md, "The chunk follows the
engine")."""
_MOST_TOKENS = 256
"""An engine's own chunk size is at most this, unless its blocks ask for more."""


@dataclass(frozen=True)
class Transfer:
    """Consecutive chunks of one request, and the blocks to copy them from or into. Each rank copies its own shards.

    hashes: 32 bytes a chunk. block_ids: little-endian uint32. skip_blocks: leading blocks that a load does not write.
    group: the place of the blocks' KV cache group in `ShardSpec.groups`. The other fields: as in wire.Shards.
    """

    request_id: str
    parent: bytes
    depth: int
    hashes: bytes
    block_ids: bytes
    skip_blocks: int = 0
    salt: bytes = b""
    group: int = 0
    continues: bytes = b""

    @property
    def chunks(self) -> int:
        return len(self.hashes) // HASH_BYTES

    @property
    def blocks(self) -> int:
        """Number of blocks, including skipped ones."""
        return len(self.block_ids) // 4


class Origin(NamedTuple):
    """The engine that registers tensors; the fields are those of wire.Register."""

    topic: str = ""
    writer: str = ""
    facts: Mapping[str, str] = MappingProxyType({})


class GroupSpec(NamedTuple):
    """A KV cache group of a model. reach: as in wire.Group. blocks_in_chunk: blocks of this group per chunk."""

    reach: int
    blocks_in_chunk: int


@dataclass(frozen=True)
class ShardSpec:
    """The shards that a client stores and loads: those of one rank of a model, and the length of their chunks.

    model: a name for everything that must be equal for KV bytes to be interchangeable. world_size: number of ranks.
    chunk_tokens: tokens per chunk. blocks_in_chunk: engine blocks per chunk. groups: the model's KV cache groups, if it
    has several, or one that resuming does not need whole; blocks_in_chunk is then the first group's.
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
        """With the smallest chunk of whole blocks that has at least `least_tokens`.

        Raises BadRequest for a block of more tokens than a chunk may have.
        """
        if not 1 <= block_tokens <= wire.MAX_CHUNK_TOKENS:
            raise BadRequest(f"the engine's block size {block_tokens} is not between 1 and {wire.MAX_CHUNK_TOKENS}")
        blocks = -(-least_tokens // block_tokens)
        return cls(model, world_size, rank, blocks * block_tokens, blocks)

    @property
    def block_tokens(self) -> int:
        return self.chunk_tokens // self.blocks_in_chunk

    def blocks_of(self, group: int) -> int:
        return self.groups[group].blocks_in_chunk if self.groups else self.blocks_in_chunk

    def register(
        self, instance: int, formats: Sequence[BlockFormat], origin: Origin | None = None, fault: str = ""
    ) -> list[wire.Register]:
        """The messages that name the tensors of each KV cache group, as instances numbered from `instance` on.

        formats: one per group, in order. fault: as in wire.Register. Raises BadRequest for another number of formats.
        """
        origin = origin or Origin()
        if len(formats) != max(1, len(self.groups)):
            raise BadRequest(f"{len(formats)} layouts for {max(1, len(self.groups))} KV cache groups")
        groups = [
            wire.Group(reach, blocks, blocks * each.block_bytes, each.fingerprint)
            for (reach, blocks), each in zip(self.groups, formats, strict=False)
        ]
        shape = self.model, self.world_size, self.rank
        return [
            wire.Register(
                instance + i, each, *shape, self.blocks_of(i), self.chunk_tokens, i, groups, origin.topic,
                origin.writer, dict(origin.facts), fault,
            )
            for i, each in enumerate(formats)
        ]  # fmt: skip

    def shards(self, transfers: Sequence[Transfer]) -> list[wire.Shards]:
        """This rank's shards of transfers, for a store or retrieve. Raises BadRequest for chunks of another size."""
        for each in transfers:
            if each.blocks != each.chunks * self.blocks_of(each.group):
                raise BadRequest(
                    f"{each.blocks} blocks for {each.chunks} chunks of {self.blocks_of(each.group)} blocks: the "
                    "engine's processes have chosen different chunk sizes; restart it, or set --chunk-size"
                )
        shape = self.model, self.world_size, self.rank
        return [
            wire.Shards(t.request_id, *shape, t.parent, t.depth, t.hashes, self.blocks_of(t.group), t.salt, t.continues)
            for t in transfers
        ]


class LeaseTerms(NamedTuple):
    """The terms of a lease; see wire.TakeLease."""

    kind: str = "retain"
    ttl_s: int = 0
    priority: int = NORMAL
    drops: bool = False


@dataclass(frozen=True)
class PromptChunks:
    """The chunks of one prompt, on all ranks.

    spec: its rank does not matter. hashes: 32 bytes a chunk. salt: as in wire.Shards. is_chained: whether the hashes
    are a chain from the prompt's start. tails: as in wire.Lookup.
    """

    spec: ShardSpec
    hashes: bytes
    salt: bytes = b""
    is_chained: bool = True
    tails: tuple[wire.Tail, ...] = ()

    def __len__(self) -> int:
        return len(self.hashes) // HASH_BYTES

    @property
    def _shape(self) -> tuple[str, int, int]:
        return self.spec.model, self.spec.world_size, self.spec.blocks_in_chunk

    def lookup(self, request_id: str, readers: int | None = None) -> wire.Lookup:
        """The message that looks the chunks up. readers: how many ranks will retrieve each; None: no engine asks."""
        size = self.spec.chunk_tokens
        return wire.Lookup(
            *self._shape, request_id, readers or 0, self.hashes, self.is_chained, self.salt, size, tails=self.tails
        )

    def probe(self, request_id: str, readers: int = 0, own: int = 0) -> wire.Lookup:
        """As `lookup`, without pins. readers, own: see wire.Lookup."""
        return msgspec.structs.replace(self.lookup(request_id, readers), pins=False, own=own)

    def lease(self, name: str, terms: LeaseTerms) -> wire.TakeLease:
        size, (kind, ttl_s, priority, drops) = self.spec.chunk_tokens, terms
        return wire.TakeLease(name, kind, *self._shape, self.hashes, self.salt, size, ttl_s, priority, drops)

    def drop(self, keep: int = 0) -> wire.Drop:
        """The message that removes the chunks after the first `keep`."""
        return wire.Drop(*self._shape, self.hashes, self.salt, self.spec.chunk_tokens, keep)


class Operation(NamedTuple):
    """One lookup, store or retrieve that has ended; clients pass it to their `watch`, which must not block or raise.

    kind: lookup, store or retrieve. requests: ids; several where one step stores or retrieves for several. took_s:
    seconds until the engine asked for the outcome. chunks: asked for. done: found, stored or retrieved; 0 for a store
    that was not complete. size_bytes: of the shards that are done. error: why the lookup was not answered, or nothing
    was copied.
    """

    kind: str
    requests: list[str]
    took_s: float
    chunks: int
    done: int
    size_bytes: int = 0
    error: KVDepotError | None = None


def free_chunk_tokens(token_bytes: int, longest_tokens: int) -> int:
    """The least tokens per chunk of an engine that chooses its own (`chunk_size = auto`).

    token_bytes: KV of a token on one rank; 0: not known. longest_tokens: tokens of the longest prompt, times the shards
    of a chunk, because one message names all chunks of a prompt, and one lookup in tiers names all their shards.
    """
    worth = math.ceil(_WORTH_BYTES / token_bytes) if token_bytes else _MOST_TOKENS
    return max(min(worth, _MOST_TOKENS), -(-longest_tokens // wire.MAX_CHUNKS))


def pack_block_ids(block_ids: Sequence[int]) -> bytes:
    """Block ids as little-endian uint32. Raises BadRequest for anything but a sequence of ids."""
    try:  # `array` accepts bytes and bools
        is_wrong = isinstance(block_ids, bytes | bytearray) or (len(block_ids) > 0 and isinstance(block_ids[0], bool))
    except (TypeError, LookupError):
        is_wrong = True
    if is_wrong:
        raise BadRequest(f"block ids must be a sequence of integers, not {block_ids!r:.80}")
    return pack_ids(block_ids, "block ids")
