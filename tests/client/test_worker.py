"""The worker's client: messages and outcomes of stores and retrieves, without a server. With one: test_lane.py,
test_contract.py and test_groups.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvdepot.client.lane import Lane
from kvdepot.client.transfer import GroupSpec, Operation, ShardSpec, Transfer, pack_block_ids
from kvdepot.client.worker import CompareTerms, Ended, WorkerClient
from kvdepot.devices.host import HostBlocks
from kvdepot.errors import BadRequest, DeadlineExceeded, Unavailable
from kvdepot.protocol import wire
from kvdepot.protocol.keys import HASH_BYTES
from kvdepot.protocol.layout import Layout, Mapping, Segment
from tests.client.answers import Answering
from tests.client.engine import Later

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


class Worker(WorkerClient):
    """Its lane has no thread: it takes its turns when outcomes are asked for."""

    def __init__(self, peer: Any) -> None:
        super().__init__(peer, SPEC, unpins=False)
        self._lane = Lane(peer, "")
        for group, layout in enumerate(LAYOUTS):
            memory = np.zeros(layout.mappings[0].size, np.uint8)
            self._lane.add(self.instance_id + group, HostBlocks(layout, {layout.mappings[0].name: memory}))

    def poll(self, ended: set[str]) -> Ended:
        self.lane.turn()
        return super().poll(ended)


@pytest.fixture
def worker(peer: Any) -> WorkerClient:
    return Worker(peer)


def test_each_group_is_registered_under_its_own_number_beside_all_groups() -> None:
    groups = [wire.Group(0, 2, 200, bytes(32)), wire.Group(3, 4, 120, b"\1" * 32)]
    formats = [layout.format for layout in LAYOUTS]
    assert SPEC.register(7, formats) == [
        wire.Register(7, formats[0], "model", 2, 1, 2, CHUNK, 0, groups),
        wire.Register(8, formats[1], "model", 2, 1, 4, CHUNK, 1, groups),
    ]
    assert [each.fault for each in SPEC.register(7, formats, fault="a broken GPU")] == ["a broken GPU"] * 2
    assert [SPEC.blocks_of(group) for group in range(2)] == [2, 4]
    assert replace(SPEC, groups=()).blocks_of(0) == 2


@pytest.mark.parametrize("layouts", [[], LAYOUTS[:1], [*LAYOUTS, LAYOUTS[0]]])
def test_another_number_of_layouts_than_of_groups_is_refused(layouts: list[Layout]) -> None:
    with pytest.raises(BadRequest, match=f"{len(layouts)} layouts for 2 KV cache groups"):
        SPEC.register(7, [layout.format for layout in layouts])


def test_a_store_is_one_message_a_group_with_blocks(worker: WorkerClient, peer: Answering) -> None:
    full, window = transfer("a", [1, 2, 3, 4]), transfer("a", [5, 6, 7, 8], group=1)
    other = transfer("b", [9, 10])
    worker.submit_store(["a", "b"], [window, full, other], None)
    first, second = peer.asked
    assert isinstance(first, wire.Store) and isinstance(second, wire.Store)
    assert (first.instance, second.instance) == (worker.instance_id, worker.instance_id + 1)
    assert first.shards == SPEC.shards([full, other]) and second.shards == SPEC.shards([window])
    worker.submit_store(["c"], [transfer("c", [1, 2, 3, 4], group=1)], None)
    (third,) = peer.asked[2:]
    assert isinstance(third, wire.Store) and third.instance == second.instance


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
    told: list[Operation] = []
    worker.watch, worker.layouts = told.append, LAYOUTS
    worker.submit_retrieve(["a"], [window, full], None)
    peer.answer([True, True])
    assert worker.poll(set()) == Ended(set(), set()), "one group is still under way"
    peer.answer([True, 1])
    assert worker.poll(set()) == Ended(set(), {"a"})
    assert [(each.kind, each.chunks, each.done, each.size_bytes) for each in told] == [("retrieve", 4, 3, 330)]
    assert not any(each.unpins for each in peer.asked if isinstance(each, wire.Retrieve))
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


@pytest.mark.parametrize(
    "answers", [[[True, True], Unavailable("gone")], [[True], [True, True]], [[True, True], "no list"]]
)
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


def test_requests_of_one_store_end_together_and_each_once(worker: WorkerClient, peer: Answering) -> None:
    told: list[Operation] = []
    worker.watch, worker.layouts = told.append, LAYOUTS
    worker.submit_store(["a", "b"], [transfer("a", [1, 2]), transfer("b", [3, 4])], None)
    assert worker.poll({"a", "never stored"}) == Ended({"never stored"}, set())
    peer.answer(True)
    assert worker.poll({"b"}) == Ended({"a", "b"}, set())
    assert worker.poll({"a"}) == Ended(set(), set()), "told twice"
    assert [(each.kind, each.chunks, each.done, each.size_bytes) for each in told] == [("store", 2, 2, 400)]
    assert worker.counters["stores_dropped"] == 0


def test_chunks_of_another_size_are_never_sent_and_have_failed_whole(worker: WorkerClient, peer: Answering) -> None:
    larger = Transfer("a", b"p" * 32, 0, bytes(32 * 2), pack_block_ids(range(1, 9)))  # four blocks a chunk
    worker.submit_store(["a"], [larger], None)
    worker.submit_retrieve(["b"], [larger], None)
    assert peer.asked == []
    assert worker.poll({"a"}) == Ended({"a"}, {"b"})
    assert worker.take_failed_blocks() == set(range(1, 9))
    assert worker.counters["stores_dropped"] == 1


def test_nothing_to_copy_ends_at_once_and_asks_nobody(worker: WorkerClient, peer: Answering) -> None:
    worker.submit_store(["a"], [], None)
    worker.submit_retrieve(["b"], [], None)
    assert worker.poll({"a"}) == Ended({"a"}, {"b"}) and not peer.asked


def test_what_is_no_event_is_refused_and_leaves_nothing_under_way(worker: WorkerClient) -> None:
    with pytest.raises(BadRequest, match="not an event"):
        worker.submit_store(["a"], [transfer("a", [1, 2])], "soon")
    assert not worker.store_futures


def test_stores_and_comparisons_of_requests_are_given_up_and_others_go_on(
    worker: WorkerClient, peer: Answering
) -> None:
    event = Later()
    for request_id in ("a", "b"):
        worker.submit_store([request_id], [transfer(request_id, [1, 2])], event)
    compared = worker.submit_compare([transfer("a", [3, 4])], None, CompareTerms(0.5))
    worker.give_up_stores({"unknown"}, 0.0)
    assert worker.counters["stores_given_up"] == 0
    worker.give_up_stores({"a"}, 0.0)
    assert worker.counters["stores_given_up"] == 2
    assert compared.done() and "given up" in str(compared.outcome())
    assert worker.poll({"a", "b"}) == Ended({"a"}, set())
    event.there = True
    peer.answer([1, 0.0, 0, []])  # of the comparison
    worker.poll(set())
    assert [type(each) for each in peer.asked] == [wire.Compare, wire.Store]
    peer.answer(True)
    assert worker.poll(set()).stored == {"b"}


def test_a_worker_that_withdraws_its_tensors_ends_what_is_under_way(worker: WorkerClient, peer: Answering) -> None:
    worker.layouts = LAYOUTS
    before, event = worker.instance_id, Later()
    worker.submit_store(["a"], [transfer("a", [1, 2])], event)
    worker.submit_retrieve(["b"], [transfer("b", [3, 4])], event)
    with pytest.raises(DeadlineExceeded):  # nobody answers
        worker.unregister(0.0)
    assert peer.asked == [wire.Unregister(before), wire.Unregister(before + 1)]
    worker.submit_store(["c"], [transfer("c", [1, 2])], None)
    event.there = True
    assert worker.poll({"a", "c"}) == Ended({"a", "c"}, {"b"})
    assert worker.take_failed_blocks() == {3, 4} and len(peer.asked) == 2
