"""A worker's client of a model with several KV cache groups: messages, outcomes, and real tensors on a server."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvdepot.client.transfer import GroupSpec, Operation, ShardSpec, Transfer, pack_block_ids
from kvdepot.client.worker import Ended, WorkerClient
from kvdepot.errors import BadRequest, Unavailable
from kvdepot.memory.allocator import PAGE
from kvdepot.protocol import wire
from kvdepot.protocol.keys import HASH_BYTES, ChunkChain, derive_root
from kvdepot.protocol.layout import Layout, Mapping, Segment
from tests.client.answers import Answering
from tests.client.engine import NativeEngine
from tests.conftest import Depot, StartDepot, eventually
from tests.server.process import kill

CHUNK = 256
SPEC = ShardSpec("model", 2, 1, CHUNK, 2, (GroupSpec(0, 2), GroupSpec(3, 4)))
LAYOUTS = [
    Layout([Mapping(f"kv{group}", 64 * size)], [Segment(0, 0, size, size)], 64, bytes([group]) * 32)
    for group, size in enumerate((100, 30))
]


def transfer(request_id: str, blocks: list[int], group: int = 0, skip_blocks: int = 0) -> Transfer:
    """Of as many chunks as these blocks are."""
    chunks = len(blocks) // SPEC.blocks_of(group)
    hashes = b"".join(bytes([i]) * HASH_BYTES for i in range(chunks))
    return Transfer(request_id, b"p" * 32, 0, hashes, pack_block_ids(blocks), skip_blocks, group=group)


@pytest.fixture
def worker(peer: Any) -> WorkerClient:
    return WorkerClient(peer, SPEC, unpins=False)


def test_each_group_is_registered_under_its_own_number_beside_all_groups() -> None:
    groups = [wire.Group(0, 2, 200, bytes(32)), wire.Group(3, 4, 120, b"\1" * 32)]
    assert SPEC.register(7, LAYOUTS) == [
        wire.Register(7, LAYOUTS[0], "model", 2, 1, 2, CHUNK, 0, groups),
        wire.Register(8, LAYOUTS[1], "model", 2, 1, 4, CHUNK, 1, groups),
    ]
    assert [SPEC.blocks_of(group) for group in range(2)] == [2, 4]
    assert replace(SPEC, groups=()).blocks_of(0) == 2


@pytest.mark.parametrize("layouts", [[], LAYOUTS[:1], [*LAYOUTS, LAYOUTS[0]]])
def test_another_number_of_layouts_than_of_groups_is_refused(layouts: list[Layout]) -> None:
    with pytest.raises(BadRequest, match=f"{len(layouts)} layouts for 2 KV cache groups"):
        SPEC.register(7, layouts)


def test_a_store_is_one_message_a_group_all_of_one_ticket(worker: WorkerClient, peer: Answering) -> None:
    full, window = transfer("a", [1, 2, 3, 4]), transfer("a", [5, 6, 7, 8], group=1)
    other = transfer("b", [9, 10])
    worker.submit_store(["a", "b"], [window, full, other], None)
    first, second = peer.asked
    assert isinstance(first, wire.Store) and isinstance(second, wire.Store)
    assert (first.instance, second.instance) == (worker.instance_id, worker.instance_id + 1)
    assert first.shards == SPEC.shards([full, other]) and second.shards == SPEC.shards([window])
    assert first.ticket == second.ticket
    worker.submit_store(["c"], [transfer("c", [1, 2, 3, 4], group=1)], None)
    assert [type(each) for each in peer.asked[2:]] == [wire.Store], "nothing is sent for a group without blocks"


@pytest.mark.parametrize("answers", [[False, True], [True, Unavailable("gone")]])
def test_a_store_that_was_not_whole_in_one_group_is_counted_once(
    worker: WorkerClient, peer: Answering, answers: list[object]
) -> None:
    told: list[Operation] = []
    worker.watch = told.append
    worker.submit_store(["a"], [transfer("a", [1, 2]), transfer("a", [5, 6, 7, 8], group=1)], None)
    peer.answer(answers[0])
    assert worker.poll({"a"}) == Ended(set(), set()) and not told
    peer.answer(answers[1])
    assert worker.poll({"a"}).stored == {"a"} and worker.counters["stores_dropped"] == 1
    assert [each.done for each in told] == [0]


def test_one_part_that_did_not_come_fails_its_blocks_and_the_request(worker: WorkerClient, peer: Answering) -> None:
    full = transfer("a", [1, 2, 3, 4], skip_blocks=1)
    window = transfer("a", list(range(10, 18)), group=1, skip_blocks=3)
    worker.submit_retrieve(["a"], [window, full], None)
    peer.answer([True, True])
    assert worker.poll(set()) == Ended(set(), set()), "one group is still under way"
    peer.answer([True, False])
    assert worker.poll(set()) == Ended(set(), {"a"})
    assert worker.take_failed_requests() == {"a"}
    assert worker.take_failed_requests() == set() and worker.take_failed_blocks() == set(), "each failure is told once"
    assert worker.counters["chunks_failed"] == 1
    # The same, told by blocks; of each group's first chunk some are skipped.
    worker.submit_retrieve(["a"], [window, full], None)
    peer.answer([False, True])
    peer.answer([False, True])
    worker.poll(set())
    assert worker.take_failed_blocks() == {2, 13}
    assert worker.take_failed_requests() == set()


@pytest.mark.parametrize("answers", [[[True, True], Unavailable("gone")], [[True], [True, True]], [[True, True], None]])
def test_a_group_without_an_answer_fails_all_that_the_request_was_to_load(
    worker: WorkerClient, peer: Answering, answers: list[object]
) -> None:
    worker.submit_retrieve(["a"], [transfer("a", [1, 2, 3, 4]), transfer("a", list(range(10, 18)), group=1)], None)
    worker.submit_retrieve(["b"], [transfer("b", [20, 21])], None)
    for answer in [*answers, [True]]:
        peer.answer(answer)
    assert worker.poll(set()).retrieved == {"a", "b"}
    assert worker._failed_blocks == {1, 2, 3, 4, *range(10, 18)}
    assert worker.take_failed_requests() == {"a"}


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
        return [
            Transfer(
                request_id,
                chain.parent(first),
                first,
                chain.slice(first, end),
                pack_block_ids(blocks[group]),
                group=group,
            )
            for group, (first, ids) in enumerate(zip([0, max(0, end - REACH)], blocks, strict=True))
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


def test_both_groups_come_back_byte_for_byte(hybrid: Hybrid, depot: Depot) -> None:
    chain = prompt(3)
    assert hybrid.lookup(chain) == 0
    hybrid.store(hybrid.parts(chain, SOURCE, "a"))
    written, rest = hybrid.read(SOURCE), [cache[20:40].clone() for cache in hybrid.caches]
    assert hybrid.lookup(chain) == 3 * CHUNK
    assert hybrid.retrieve(hybrid.parts(chain, TARGET, "a")) == set()
    assert hybrid.read(TARGET) == hybrid.read(SOURCE) == written
    assert all(torch.equal(cache[20:40], kept) for cache, kept in zip(hybrid.caches, rest, strict=True))
    (told,) = [each for each in depot.status()["namespaces"] if each["model"] == hybrid.model]
    assert [(group["reach"], group["chunks"]) for group in told["groups"]] == [(0, 3), (REACH, 2)]
    assert told["chunk_tokens"] == CHUNK and told["bytes"] == 5 * PAGE, "a part has 2 KiB, and takes a page"


def test_a_prefix_without_its_window_is_no_hit_and_fails_to_load(hybrid: Hybrid) -> None:
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


@pytest.mark.faults
def test_a_server_that_is_killed_comes_back_with_both_groups_and_the_engine_goes_on(start_depot: StartDepot) -> None:
    first = start_depot()
    hybrid, chain, other = Hybrid(first), prompt(3), prompt(2)
    hybrid.store(hybrid.parts(chain, SOURCE, "a"))
    written = hybrid.read(SOURCE)
    kill(first)
    start_depot(url=first.url, name=first.name)
    eventually(lambda: hybrid.found(chain) == 3 * CHUNK)
    eventually(lambda: not hybrid.retrieve(hybrid.parts(chain, TARGET, uuid.uuid4().hex)))
    assert hybrid.read(TARGET) == written
    hybrid.store(hybrid.parts(other, [SOURCE[0][:8], SOURCE[1]], "b"))
    assert hybrid.lookup(other) == 2 * CHUNK
    hybrid.close()
