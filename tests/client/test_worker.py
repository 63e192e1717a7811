"""The worker's client: messages and outcomes of stores and retrieves, without a server. With one: test_contract.py and
test_groups.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvdepot.client.transfer import GroupSpec, Operation, ShardSpec, Transfer, pack_block_ids
from kvdepot.client.worker import Ended, WorkerClient
from kvdepot.errors import BadRequest, Unavailable
from kvdepot.protocol import wire
from kvdepot.protocol.keys import HASH_BYTES
from kvdepot.protocol.layout import Layout, Mapping, Segment
from tests.client.answers import Answering

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
    (third,) = peer.asked[2:]
    assert isinstance(third, wire.Store) and third.ticket > first.ticket, "nothing is sent for a group without blocks"


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
    peer.answer([True, 1])
    assert worker.poll(set()) == Ended(set(), {"a"})
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
    worker.submit_store(["a", "b"], [transfer("a", [1, 2]), transfer("b", [3, 4])], None)
    assert worker.poll({"a", "never stored"}) == Ended({"never stored"}, set())
    peer.answer(True)
    assert worker.poll({"b"}) == Ended({"a", "b"}, set())
    assert worker.poll({"a"}) == Ended(set(), set()), "told twice"
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
    assert not worker.stores


def test_stores_that_are_given_up_are_fenced_off_with_all_before_them(worker: WorkerClient, peer: Answering) -> None:
    for request_id in ("a", "b"):
        worker.submit_store([request_id], [transfer(request_id, [1, 2])], None)
    worker.give_up_stores({"unknown"}, 0.0)
    assert peer.liveness.fence == 0
    worker.give_up_stores({"a"}, 0.0)
    last = peer.asked[-1]
    assert isinstance(last, wire.Store) and peer.liveness.fence == last.ticket
    assert worker.counters["stores_given_up"] == 1
