"""A publisher of KV events on an index without a server."""

from __future__ import annotations

from collections import Counter
from typing import Any

import zmq

from kvdepot.kv_events.feed import Feed
from kvdepot.kv_events.publisher import Publisher
from tests.core.shelf import Shelf

Believed = set[tuple[str, bytes]]


class Desk:
    """A publisher on an index of the test's own; the test's thread is the deciding one."""

    def __init__(
        self, endpoint: str, pages: int = 64, most: int = 1 << 17, shelf: Shelf | None = None, **limits: int
    ) -> None:
        self.shelf = shelf or Shelf(pages)
        self.index = self.shelf.index
        self.counters: Counter[str] = Counter()
        self.feed = Feed(self.index, self.counters, most)
        self.context: zmq.Context[Any] = zmq.Context()
        self.endpoint = endpoint
        self.publisher = Publisher(self.feed, endpoint, 256, self.context, **limits)

    def start(self) -> Desk:
        self.feed.tick()
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
