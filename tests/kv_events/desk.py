"""A publisher of KV events on an index without a server."""

from __future__ import annotations

from typing import Any

import zmq

from kvdepot.core.index.chunk import Chunk
from kvdepot.kv_events.depot_view import DepotView
from kvdepot.kv_events.feed import Feed
from kvdepot.kv_events.publisher import Publisher
from tests.core.shelf import Shelf, keys

Believed = set[tuple[str, bytes]]


class Desk:
    """A publisher on the test's own index; the test's thread is the deciding one."""

    def __init__(self, endpoint: str, pages: int = 64, most: int = 1 << 17, before: int = 0, **limits: int) -> None:
        """before: number of chunks that exist before the feed."""
        self.feed = Feed(most)
        self.watched = not before
        self.shelf = Shelf(pages, watch=self.hear)
        self.shelf.store(keys("before", before))
        self.watched = True
        self.index = self.shelf.index
        self.context: zmq.Context[Any] = zmq.Context()
        self.endpoint = endpoint
        self.publisher = Publisher(self.feed, DepotView(), endpoint, self.context, **limits)

    def hear(self, chunk: Chunk, there: bool) -> None:
        if self.watched:
            self.feed.changed(chunk, there)

    def start(self) -> Desk:
        self.feed.tick(self.index)
        self.publisher.start()
        return self

    def there(self) -> Believed:
        return {
            (namespace.model, key)
            for namespace in self.index.namespaces.all()
            for key, chunk in namespace.chunks.items()
            if chunk.sealed == namespace.world_size
        }

    def close(self) -> None:
        if not self.context.closed:
            self.publisher.close()
            self.context.destroy(linger=0)
