"""Stores that wait for their step, and blocks that vLLM's own pool keeps until stores have ended."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.block_pool import BlockPool

from kvdepot.client.transfer import Transfer
from kvdepot.integrations.vllm.stores import Holds, WaitingStore, WaitingStores


def pool(blocks: int = 21) -> Any:
    return BlockPool(num_gpu_blocks=blocks, enable_caching=True, hash_block_size=16)


def ids(blocks: Any) -> list[int]:
    return [block.block_id for block in blocks]


def test_a_held_block_is_given_to_nobody_until_every_rank_has_stored_it() -> None:
    blocks = pool()
    holds = Holds(ranks=2)
    holds.bind(blocks)
    mine = blocks.get_new_blocks(3)
    assert holds.hold(ids(mine))
    blocks.free_blocks(mine)  # they leave the window
    others = blocks.get_new_blocks(17)
    assert blocks.get_num_free_blocks() == 0 and not set(ids(others)) & set(ids(mine))
    holds.send(7, ids(mine))
    holds.ended({7: {0}})
    holds.ended({6: {0, 1}})
    assert blocks.get_num_free_blocks() == 0
    holds.ended({7: {1}})
    assert blocks.get_num_free_blocks() == 3 and not holds.will_end_soon()
    holds.ended({7: {0, 1}})  # told twice
    assert blocks.get_num_free_blocks() == 3


def test_holds_take_at_most_half_of_the_blocks_and_none_where_there_are_none() -> None:
    holds = Holds(ranks=1)
    assert holds.hold([]) and not holds.hold([1])
    blocks = pool()
    holds.bind(blocks)
    mine = ids(blocks.get_new_blocks(12))
    assert not holds.hold(mine[:11])
    assert holds.hold(mine[:10]) and not holds.hold(mine[10:11])
    holds.release(mine[:10])
    assert holds.hold(mine[10:])


def test_dropped_stores_release_their_holds_and_sent_ones_do_not() -> None:
    blocks = pool()
    holds = Holds(ranks=1)
    holds.bind(blocks)
    stores = WaitingStores(holds)
    of = {name: ids(blocks.get_new_blocks(2)) for name in "abcd"}
    for step, (name, mine) in enumerate(of.items(), 1):
        assert holds.hold(mine)
        blocks.free_blocks([blocks.blocks[block] for block in mine])
        transfers = [Transfer(name, b"", 0, b"", b"", group=group) for group in (0, 1)]
        stores.add(WaitingStore(step, transfers, [], mine, held=mine))
    free = 20 - 8
    assert blocks.get_num_free_blocks() == free
    stores.drop("a")
    assert blocks.get_num_free_blocks() == free + 2
    stores.ended(3)
    stores.drop("b")  # it is ready, but not sent
    assert blocks.get_num_free_blocks() == free + 4
    taken = [store for each in stores.take(step=9) for store in each.stores]
    assert [(store.request_id, store.group) for store in taken] == [("c", 0), ("c", 1)]
    stores.drop("c")  # a worker may be reading its blocks
    assert blocks.get_num_free_blocks() == free + 4
    stores.drop()
    assert blocks.get_num_free_blocks() == free + 6
    holds.ended({9: {0}})
    assert blocks.get_num_free_blocks() == 20


def waiting(*requests: tuple[str, int, list[int], int]) -> Any:
    stores = WaitingStores(Holds(1))
    for request_id, step, block_ids, read in requests:
        transfers = [Transfer(request_id, bytes(32), 0, b"", b"")]
        stores.add(WaitingStore(step, transfers, block_ids[:read], block_ids[read:]))
    return stores


def sent(stores: Any) -> list[str]:
    return [store.request_id for store in stores.take(step=1)]


def test_requests_that_read_or_share_a_failed_block_store_nothing() -> None:
    stores = waiting(("a", 1, [1, 2, 3], 2), ("b", 2, [1, 2, 4], 2), ("c", 1, [5, 6], 1), ("d", 2, [3, 7], 1))
    assert stores.failed({2}) == {"a", "b", "d"}
    stores.ended(2)
    assert sent(stores) == ["c"]
    assert not stores.check([1, 2, 8], 2)
    assert not stores.check([1, 8, 9], 2)
    assert stores.check([1, 5, 6], 3)


def test_a_block_that_is_given_to_be_computed_anew_is_trusted_again() -> None:
    stores = waiting(("a", 1, [1, 2], 1))
    stores.failed({1})
    assert not stores.check([1, 2, 3], 3)
    stores.overwritten([3])
    assert stores.check([3], 1), "a load of ours lies there now"
    assert stores.check([9, 1], 1)  # another request got it
    assert stores.check([1], 1)
    assert not stores.check([2], 1)
    assert stores.has_suspects
    assert stores.check([1, 2, 3], 0)
    assert not stores.has_suspects
