"""A model with several KV cache groups: real tensors on a server. Without one: test_worker.py."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kvdepot.client.transfer import GroupSpec, ShardSpec, Transfer, pack_block_ids
from kvdepot.memory.allocator import PAGE
from kvdepot.protocol.keys import ChunkChain, derive_root
from tests.client.engine import NativeEngine
from tests.conftest import Depot, eventually

CHUNK = 256
BLOCK = {0: 64, 1: 32}  # tokens, by group
REACH = 2
PARTS = (GroupSpec(0, CHUNK // BLOCK[0]), GroupSpec(REACH, CHUNK // BLOCK[1]))


class Hybrid(NativeEngine):
    """A scheduler and a worker of a model with full attention and a window."""

    def __init__(self, depot: Depot) -> None:
        self.model = f"hybrid-{uuid.uuid4().hex[:8]}"
        spec = ShardSpec(self.model, 1, 0, CHUNK, PARTS[0].blocks_in_chunk, PARTS)
        super().__init__(depot, spec, [torch.randint(0, 256, (64, 8 * BLOCK[i]), dtype=torch.uint8) for i in range(2)])

    def parts(self, chain: ChunkChain, blocks: list[list[int]], request_id: str) -> list[Transfer]:
        """Full attention of all chunks, and the window at the end; blocks: of each group."""
        end = len(chain)
        firsts = enumerate([0, max(0, end - REACH)])
        ids = [pack_block_ids(each) for each in blocks]
        return [
            Transfer(request_id, chain.parent(first), first, chain.slice(first, end), ids[group], group=group)
            for group, first in firsts
        ]

    def lookup(self, chain: ChunkChain) -> int:
        """The same, once there is a server."""
        found: int = eventually(lambda: (known := self.found(chain)) is not None and (known,))[0]
        return found

    def read(self, blocks: list[list[int]]) -> list[bytes]:
        return [cache[ids].numpy().tobytes() for cache, ids in zip(self.caches, blocks, strict=True)]


@pytest.fixture
def hybrid(depot: Depot) -> Iterator[Hybrid]:
    engine = Hybrid(depot)
    yield engine
    engine.close()


def prompt(chunks: int) -> ChunkChain:
    """One that no other test uses."""
    chain = ChunkChain(CHUNK, derive_root(("test", os.urandom(8).hex())))
    chain.extend(range(chunks * CHUNK))
    return chain


SOURCE = [list(range(12)), list(range(16))]  # three chunks, and a window of two
TARGET = [list(range(40, 52)), list(range(63, 47, -1))]


def test_a_prefix_without_its_window_is_no_hit_and_with_it_comes_back_whole(hybrid: Hybrid, depot: Depot) -> None:
    chain = prompt(3)
    full, window = hybrid.parts(chain, SOURCE, "a")
    hybrid.store([full])
    assert hybrid.lookup(chain) == 0
    last = replace(
        window, depth=2, parent=chain.parent(2), hashes=chain.slice(2, 3), block_ids=pack_block_ids(SOURCE[1][8:])
    )
    hybrid.store([last])
    assert hybrid.lookup(chain) == 0
    kept = hybrid.read(TARGET)
    assert hybrid.retrieve(hybrid.parts(chain, TARGET, "b")) == {"b"}
    assert hybrid.worker.counters["chunks_failed"] == 1
    assert hybrid.read([TARGET[0], TARGET[1][8:]]) == hybrid.read([SOURCE[0], SOURCE[1][8:]])
    assert hybrid.read([[], TARGET[1][:8]])[1] == kept[1][: len(kept[1]) // 2], "what did not come was not touched"
    hybrid.store([window])
    assert hybrid.lookup(chain) == 3 * CHUNK
    assert hybrid.retrieve(hybrid.parts(chain, TARGET, "c")) == set()
    assert hybrid.read(TARGET) == hybrid.read(SOURCE)
    (told,) = [each for each in depot.status()["namespaces"] if each["model"] == hybrid.model]
    assert [(group["reach"], group["chunks"]) for group in told["groups"]] == [(0, 3), (REACH, 2)]
    assert told["chunk_tokens"] == CHUNK and told["bytes"] == 5 * PAGE, "a part has 2 KiB, and takes a page"
