"""KV events of models with several KV cache groups, from the index to what a subscriber believes."""

from __future__ import annotations

import random

import msgspec
import pytest

from kvdepot.core.index.chunk import Chunk
from kvdepot.kv_events.depot_view import AllBlocksCleared, BlockRemoved, BlockStored, DepotView, Event
from kvdepot.kv_events.feed import Feed
from tests.conftest import clear
from tests.core.groups import CHUNK_TOKENS, SHAPES, Rack, Reaches
from tests.core.shelf import keys

Believed = set[tuple[str | None, int | None, bytes]]
"""Owner, KV cache group and key."""


def applied(view: DepotView, feed: Feed) -> list[Event]:
    """The events of all changes in a feed."""
    return [event for _, events in view.apply(feed.take(1 << 20)) for event in events]


class Reader:
    """A rack whose changes are read as a publisher does, and what a subscriber makes of the events."""

    def __init__(self, reaches: Reaches, **options: int) -> None:
        self.feed = Feed()
        self.rack = Rack(reaches, watch=self.hear, **options)
        self.view = DepotView()
        self.believed: Believed = set()
        self.read()

    def hear(self, chunk: Chunk, there: bool) -> None:
        self.feed.changed(chunk, there)

    def read(self) -> list[Event]:
        """The events since the last call."""
        events = applied(self.view, self.feed)
        for event in events:
            match event:
                case BlockStored():
                    self.believed |= {(event.ownership, event.group_idx, key) for key in event.block_hashes}
                case BlockRemoved():
                    self.believed -= {(event.ownership, event.group_idx, key) for key in event.block_hashes}
                case AllBlocksCleared():
                    self.believed = set()
        return events

    def there(self) -> Believed:
        namespaces = self.rack.namespaces
        return {
            (namespace.model, namespace.group if len(namespaces) > 1 else None, key)
            for namespace in namespaces
            for key, chunk in namespace.chunks.items()
            if chunk.sealed == namespace.world_size
        }


def test_each_group_is_told_of_by_its_number_and_only_chains_have_parents() -> None:
    reader, chain = Reader((0, 2)), keys("c", 4)
    reader.rack.store_needed(chain)
    full, *window = reader.read()
    assert isinstance(full, BlockStored)
    assert (full.block_hashes, full.parent_block_hash, full.group_idx) == (chain, None, 0)
    assert (full.block_size, full.ownership) == (CHUNK_TOKENS, "m")
    assert [
        (event.block_hashes, event.parent_block_hash, event.group_idx)
        for event in window
        if isinstance(event, BlockStored)
    ] == [([key], None, 1) for key in chain[2:]]
    longer = [*chain, *keys("d", 1)]
    reader.rack.store(0, longer)
    (event,) = reader.read()
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.parent_block_hash, event.group_idx) == (longer[4:], chain[3], 0)


def test_parts_of_two_groups_with_one_key_go_one_by_one() -> None:
    reader, chain = Reader((0, 1)), keys("c", 2)
    reader.rack.store_all(chain)
    reader.read()
    reader.rack.lose(1, chain[1])
    (event,) = reader.read()
    assert isinstance(event, BlockRemoved) and (event.block_hashes, event.group_idx) == ([chain[1]], 1)
    reader.rack.lose(0, chain[1])
    reader.rack.lose(1, chain[0])
    assert [(event.block_hashes, event.group_idx) for event in reader.read() if isinstance(event, BlockRemoved)] == [
        ([chain[1]], 0), ([chain[0]], 1),
    ]  # fmt: skip
    assert reader.believed == {("m", 0, chain[0])}


def test_a_model_with_one_group_has_no_group_in_its_events() -> None:
    for reaches in ((0,), (1,)):
        reader = Reader(reaches)
        reader.rack.store_all(keys("c", 1))
        (event,) = reader.read()
        assert isinstance(event, BlockStored) and event.group_idx is None
        assert b"group_idx" not in msgspec.msgpack.encode(event)


def test_a_part_is_told_of_once_all_ranks_have_it() -> None:
    reader, chain = Reader((0, 1), world_size=2), keys("c", 1)
    for rank in range(2):
        assert reader.read() == []
        chunk = reader.rack.reserve(1, chain, 0, rank)
        assert chunk is not None
        reader.rack.index.seal(chunk, rank)
    (event,) = reader.read()
    assert isinstance(event, BlockStored) and event.group_idx == 1


@pytest.mark.parametrize("seed", range(10))
def test_a_subscriber_believes_in_the_parts_that_exist_however_they_came_and_went(seed: int) -> None:
    rng = random.Random(seed)
    reaches = rng.choice(SHAPES)
    reader = Reader(reaches, pages=24)
    rack, prompts = reader.rack, [keys(name, 5) for name in "ab"]
    for _ in range(40):
        chain = rng.choice(prompts)[: rng.randint(1, 5)]
        parts = [chunk for namespace in rack.namespaces for chunk in namespace.chunks.values()]
        match rng.randrange(6):
            case 0 if parts:
                rack.index.hide(rng.choice(parts))
            case 1 if parts and (chunk := rng.choice(parts)).sealed:
                rack.index.mark_corrupt(chunk, 0)
            case 2 if rng.random() < 0.2:
                clear(rack.index)
            case _:
                rack.store_needed(chain)
        if rng.random() < 0.5:
            reader.read()
            assert reader.believed == reader.there()
    # A subscriber that comes now is told the same.
    reader.read()
    late = DepotView()
    listed = Feed()
    listed.tick(rack.index)
    told = applied(late, listed)
    assert {
        (event.ownership, event.group_idx, key)
        for event in told if isinstance(event, BlockStored) for key in event.block_hashes
    } == reader.there()  # fmt: skip
    again = [event for _, batch in reader.view.listing() for event in batch]
    assert {
        (event.ownership, event.group_idx, key)
        for event in again if isinstance(event, BlockStored) for key in event.block_hashes
    } == reader.there()  # fmt: skip
    listed.close()
    reader.feed.close()
