"""The worker's client: outcomes of stores and retrieves, without a server. With one: test_contract.py."""

from __future__ import annotations

from typing import Any

import pytest

from kvdepot.client.transfer import ShardSpec, Transfer, pack_block_ids
from kvdepot.client.worker import Ended, WorkerClient
from kvdepot.errors import BadRequest, Unavailable
from kvdepot.protocol import wire
from tests.client.answers import Answering

SPEC = ShardSpec("model", 2, 1, 256, 2)


def transfer(request_id: str, blocks: list[int], skip_blocks: int = 0) -> Transfer:
    return Transfer(request_id, b"p" * 32, 0, bytes(16 * len(blocks)), pack_block_ids(blocks), skip_blocks)


@pytest.fixture
def worker(peer: Any) -> WorkerClient:
    return WorkerClient(peer, SPEC, unpins=False)


def test_stores_have_rising_tickets_and_this_ranks_shards(worker: WorkerClient, peer: Answering) -> None:
    parts = [transfer("a", [1, 2]), transfer("b", [3, 4])]
    worker.submit_store(["a", "b"], parts, None)
    worker.submit_retrieve(["c"], [transfer("c", [5, 6])], None)
    worker.submit_store(["a"], parts[:1], None)
    first, second, third = peer.asked
    assert isinstance(first, wire.Store) and first.shards == SPEC.shards(parts)
    assert isinstance(second, wire.Retrieve) and not second.unpins
    assert isinstance(third, wire.Store) and third.ticket > first.ticket


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


@pytest.mark.parametrize("value", [Unavailable("gone"), [True], [True, 1], "no list", None])
def test_a_retrieve_without_an_answer_for_each_chunk_has_failed_where_it_may_have(
    worker: WorkerClient, peer: Answering, value: object
) -> None:
    worker.submit_retrieve(["a"], [transfer("a", [1, 2, 3, 4])], None)
    peer.answer(value)
    assert worker.poll(set()).retrieved == {"a"}
    assert worker.take_failed_blocks() == ({3, 4} if value == [True, 1] else {1, 2, 3, 4})


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
