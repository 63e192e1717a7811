"""What every block must contain: KV bytes as a function of the tokens before them, known without the depot.

The oracle of the simulation. It shares the layout's description with what it checks, but no code that moves bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from kvdepot.keys import ROOT, ChunkChain, derive_root, engine_hash
from kvdepot.protocol import wire
from kvdepot.protocol.layout import Layout, TensorView, build_layout

CHUNK_TOKENS = 12
MAX_TOKENS = 120
SPLIT = 24  # where the branches of a family part


@dataclass(frozen=True)
class Model:
    """An engine's kind: its name, paging unit and tensors; one KV cache group of a model (groups.py)."""

    name: str
    block_tokens: int
    world_size: int
    layers: int
    kv_apart: bool  # [2, num_blocks, tokens, content], not [num_blocks, 2, tokens, content]
    content: int  # bytes a token in K, and in V
    group: int = field(default=0, repr=False)  # the bytes of each group are different
    reach: int = field(default=0, repr=False, compare=False)  # chunks that resuming needs; 0: all from the start
    chunk_tokens: int = field(default=CHUNK_TOKENS, repr=False)

    @property
    def blocks_in_chunk(self) -> int:
        return self.chunk_tokens // self.block_tokens

    @property
    def block_bytes(self) -> int:
        return self.layers * 2 * self.block_tokens * self.content


@dataclass(frozen=True)
class Stream:
    """Where a request's tokens come from. Branches of a family share their first `SPLIT` tokens."""

    family: int
    branch: int
    salt: str = ""


@cache
def tokens_of(stream: Stream) -> list[int]:
    """The stream's tokens from the start; never to be changed."""
    own = 100_000 * (1 + stream.branch)
    return [(0 if position < SPLIT else own) + 1000 * stream.family + position for position in range(MAX_TOKENS)]


@cache
def seeds_of(model: Model, stream: Stream) -> list[bytes]:
    """One seed a block: the hash of all that decides its bytes."""
    tokens = tokens_of(stream)
    seed = _origin(model, stream)
    seeds = []
    for start in range(0, MAX_TOKENS, model.block_tokens):
        seed = blake3(seed + repr(tokens[start : start + model.block_tokens]).encode()).digest()
        seeds.append(seed)
    return seeds


def _origin(model: Model, stream: Stream) -> bytes:
    whose = repr((model, stream.salt)) + (f" group {model.group}" if model.group else "")
    return blake3(whose.encode()).digest()


@cache
def end_seed(model: Model, stream: Stream, end: int) -> bytes:
    """The seed of the block that a stream's first `end` tokens leave in part empty."""
    number = end // model.block_tokens
    before = seeds_of(model, stream)[number - 1] if number else _origin(model, stream)
    return blake3(before + repr(tokens_of(stream)[number * model.block_tokens : end]).encode()).digest()


@cache
def keys_of(model: Model, stream: Stream, by_hash: bool) -> list[bytes]:
    """The keys of the stream's chunks, as its engine names them: by tokens, or by hashes of its own."""
    if by_hash:
        size = model.blocks_in_chunk
        return [engine_hash(seed) for seed in seeds_of(model, stream)[size - 1 :: size]]
    chain = chain_of(stream, model.chunk_tokens)
    return [chain.slice(i, i + 1) for i in range(len(chain))]


@cache
def chain_of(stream: Stream, chunk_tokens: int = CHUNK_TOKENS) -> ChunkChain:
    chain = ChunkChain(chunk_tokens, derive_root(("salt", stream.salt)) if stream.salt else ROOT)
    chain.extend(tokens_of(stream))
    return chain


@cache
def tail_of(stream: Stream, end: int, chunk_tokens: int) -> wire.Tail:
    """The tail with which a stream's first `end` tokens end."""
    return wire.Tail(end // chunk_tokens, chain_of(stream, chunk_tokens).tail(tokens_of(stream), end))


@lru_cache(maxsize=16384)
def block_content(seed: bytes, rank: int, size: int) -> bytes:
    """The bytes of a block whose history is `seed`, on one rank."""
    return blake3(seed + bytes([rank])).digest(length=size)


class Memory:
    """One worker's paged KV tensors, in a file that other processes may map."""

    def __init__(self, model: Model, rank: int, num_blocks: int, name: str) -> None:
        self.model = model
        self.rank = rank
        self.name = name
        self.dead = False  # its engine is: nobody cares for its blocks any more
        header = 64
        outer = (2, num_blocks) if model.kv_apart else (num_blocks, 2)
        shape = (*outer, model.block_tokens, model.content)
        size = int(np.prod(shape))
        self.bytes: npt.NDArray[np.uint8] = np.zeros(header + model.layers * size, np.uint8)
        self.axis = 1 if model.kv_apart else 0
        self._layers = []
        views = []
        group = f"group{model.group}." if model.group else ""
        for layer in range(model.layers):
            offset = header + layer * size
            array = self.bytes[offset : offset + size].reshape(shape)
            self._layers.append(array)
            layer_name = f"{group}layer{layer}"
            views.append(TensorView(layer_name, name, len(self.bytes), offset, shape, array.strides, 1, "uint8"))
        self.layout: Layout = build_layout(views, [self.axis] * model.layers)
        # The seed of what the engine holds each block to contain; None: it is nobody's, or not full.
        self.tags: list[bytes | None] = [None] * num_blocks
        # Blocks lent to a retrieve: the seed it must bring.
        self.lent: dict[int, bytes] = {}

    def _parts(self, block: int) -> Iterator[npt.NDArray[np.uint8]]:
        for array in self._layers:
            yield array[:, block] if self.axis else array[block]

    def write(self, block: int, seed: bytes) -> None:
        """Compute a block."""
        content = np.frombuffer(block_content(seed, self.rank, self.model.block_bytes), np.uint8)
        for part, data in zip(self._parts(block), np.split(content, self.model.layers), strict=True):
            part[:] = data.reshape(part.shape)
        self.tags[block] = seed

    def fill(self, block: int, value: int) -> None:
        """Overwrite a block with something else."""
        for part in self._parts(block):
            part[:] = value
        self.tags[block] = None

    def is_whole(self, block: int, seed: bytes) -> bool:
        """Whether a block contains what `seed` says."""
        content = b"".join(part.tobytes() for part in self._parts(block))
        return content == block_content(seed, self.rank, self.model.block_bytes)


@lru_cache(maxsize=8192)
def chunk_image(model: Model, rank: int, seeds: tuple[bytes, ...]) -> bytes:
    """A chunk's bytes in the order the arena has them: segment by segment, in each block by block."""
    memory = Memory(model, rank, len(seeds), "image")
    for block, seed in enumerate(seeds):
        memory.write(block, seed)
    data = memory.bytes.tobytes()
    return b"".join(
        data[segment.offset + block * segment.stride :][: segment.size]
        for segment in memory.layout.segments
        for block in range(len(seeds))
    )
