"""A reader of the index's events, with which tests compare them with the index."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvdepot.core.index.chunk import Namespace, is_there
from kvdepot.core.index.events import Hidden, IndexEvent, Removed, Stored
from kvdepot.core.index.index import Index
from kvdepot.core.index.states import ChunkState
from kvdepot.protocol.status import Status


def take_events(index: Index) -> list[IndexEvent]:
    """Remove and return what has happened, as `Depot._conclude` does after each request."""
    events, index.events = index.events, []
    return events


class Heard:
    """A reader that believes the events, to compare them with the index: which chunks it could find.

    The order of events is what readers rely on, and this is what it comes to, after each request:

    - a chunk that can be found was said to be stored after all that was said against it;
    - of a chunk that has gone, or that is not whole, the last word was `Hidden` or `Removed`. (A removal in progress
      hides chunks without a word; what was whole before it may count as found until its turn comes.)
    """

    def __init__(self, namespaces: Iterable[Namespace] = ()) -> None:
        """namespaces: those that exist already."""
        chunks = (chunk for namespace in namespaces for chunk in namespace.chunks.values())
        self.found = {id(chunk): chunk for chunk in chunks if is_there(chunk)}

    def read(self, events: Sequence[IndexEvent], wall: int) -> None:
        """Take note of events; raises AssertionError if their order is wrong."""
        for event in events:
            match event:
                case Stored(chunk):
                    if is_there(chunk):
                        self.found[id(chunk)] = chunk
                case Hidden(chunk=chunk) | Removed(chunk=chunk):
                    self.found.pop(id(chunk), None)

    def fill(self, status: Status) -> None:
        """It has no figures."""

    def check(self, namespaces: Iterable[Namespace]) -> None:
        """Raise AssertionError unless what was said is so; O(n)."""
        there = {id(chunk) for namespace in namespaces for chunk in namespace.chunks.values() if is_there(chunk)}
        assert there <= self.found.keys(), "a chunk can be found, and no event has said so"
        for chunk in self.found.values():
            assert not chunk.gone and chunk.state in (ChunkState.WHOLE, ChunkState.CHAINED), (
                f"{chunk.key.hex()} cannot be found"
            )
