"""What changes in an index, as vLLM's KV events: fed by the deciding thread, read by another.

core/index/index.py tells a `Feed` of each chunk that comes or goes; the publisher's thread takes changes from it and
makes events of them, by what its subscribers believe so far (`Belief`). The one law: the deciding thread appends to a
bounded queue and does nothing else. Where that is full it says that nothing is there, and then anew, a little each
second, what is.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from typing import TypeAlias

import msgspec

from kvdepot.core.index.chunk import Chunk, Namespace
from kvdepot.core.index.index import Index

__all__ = ["AllBlocksCleared", "Belief", "BlockRemoved", "BlockStored", "Event", "Feed"]

MEDIUM = "CPU"
BATCH = 512
"""Chunks that one message tells of at most."""
_MOST_QUEUED = 1 << 17
_LISTED_A_TICK = 1 << 13
"""Chunks that the deciding thread tells of in one go, when all must be told anew: some milliseconds."""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Chunks are there, each behind the one before it. Field by field as vLLM has it."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    locality: str | None = None
    ownership: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Chunks are there no more."""

    block_hashes: list[bytes]
    medium: str | None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """Nothing is there."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
_Change: TypeAlias = "tuple[bool, Namespace, bytes, bytes | None] | None"
"""Whether a chunk is there, its namespace, key and parent; None: forget all that was said."""


class Feed:
    """What changes in an index, queued: its `watch` is to be `changed`.

    `changed` and `tick` are for the deciding thread, the rest for the reader's.
    """

    def __init__(self, most: int = _MOST_QUEUED) -> None:
        self.overflows = 0  # how often the queue was full
        self._most = most
        self._queue: deque[_Change] = deque([None])
        self._full = False  # or closed: nothing more is queued
        self._unlisted = True  # what is there is to be told from the start
        self._listing: Iterator[Chunk] | None = None
        self._asleep = False  # set by the reader before it waits, cleared by whoever wakes it
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __repr__(self) -> str:
        return f"<Feed of {len(self._queue)} changes{', full' * self._full}>"

    # -- the deciding thread

    def changed(self, chunk: Chunk, there: bool) -> None:
        """A chunk is visible now, or not any more. Saying so twice does no harm."""
        if self._full:
            return
        queue = self._queue
        if len(queue) >= self._most:
            # From here on nothing is known: whoever reads this believes in nothing, and hears it all anew later.
            self._full, self._unlisted, self._listing = True, True, None
            self.overflows += 1
            queue.append(None)
        else:
            before = chunk.parent
            queue.append((there, chunk.namespace, chunk.key, None if before is None else before.key))
        if self._asleep:
            self.rouse()

    def rouse(self) -> None:
        """Wake the reader."""
        self._asleep = False
        os.eventfd_write(self.wake, 1)

    def tick(self, index: Index) -> None:
        """Once a second: go on telling what was there before the feed was, or before its queue was full."""
        if len(self._queue) > self._most // 2:
            return
        if self._unlisted:
            self._full, self._unlisted, self._listing = False, False, _all(index)
        room = min(_LISTED_A_TICK, self._most // 2)
        while self._listing is not None and room:
            chunk = next(self._listing, None)
            if chunk is None:
                self._listing = None
                return
            room -= 1
            if index.is_there(chunk):
                self.changed(chunk, True)

    # -- the reader's

    def take(self, most: int) -> list[_Change]:
        """The oldest changes."""
        taken: list[_Change] = []
        queue = self._queue
        while queue and len(taken) < most:
            taken.append(queue.popleft())
        return taken

    def may_sleep(self) -> bool:
        """Whether nothing is there to take; after that, `wake` becomes readable when something is."""
        self._asleep = True
        if self._queue:
            self._asleep = False
        return self._asleep

    def close(self) -> None:
        """When the reader is done with it."""
        self._full, self._unlisted, self._listing = True, False, None
        os.close(self.wake)


def _all(index: Index) -> Iterator[Chunk]:
    for namespace in index.namespaces.all():
        yield from list(namespace.chunks.values())


class Belief:
    """What a subscriber that has read everything believes to be there: parents by key, by namespace."""

    def __init__(self) -> None:
        self.there: dict[Namespace, dict[bytes, bytes | None]] = {}
        self.count = 0

    def apply(self, changes: list[_Change], chunk_tokens: int) -> list[Event]:
        """Take changes in; the events that tell of them."""
        events: list[Event] = []
        removed = False
        for change in changes:
            if change is None:
                self.there.clear()
                self.count = 0
                events = [AllBlocksCleared()]
                continue
            is_there, namespace, key, parent = change
            keys = self.there.get(namespace)
            if is_there == (keys is not None and key in keys):
                continue
            if is_there:
                self.there.setdefault(namespace, {})[key] = parent
                self.count += 1
                _add_stored(events, namespace, key, parent, chunk_tokens)
            else:
                assert keys is not None
                del keys[key]
                self.count -= 1
                removed = True
                if not keys:
                    del self.there[namespace]
                _add_removed(events, namespace, key)
        # What was removed last, of all there was: one word for it, however it was told.
        return [AllBlocksCleared()] if removed and not self.count else events

    def listing(self, chunk_tokens: int) -> Iterator[list[Event]]:
        """All of it as of now, a message's events at a time; `messages` of them."""
        known = [(namespace, key, parent) for namespace, keys in self.there.items() for key, parent in keys.items()]

        def batches() -> Iterator[list[Event]]:
            for first in range(0, max(1, len(known)), BATCH):
                events: list[Event] = [] if first else [AllBlocksCleared()]
                for namespace, key, parent in known[first : first + BATCH]:
                    _add_stored(events, namespace, key, parent, chunk_tokens)
                yield events

        return batches()

    @property
    def messages(self) -> int:
        """How many messages tell of all of it."""
        return max(1, -(-self.count // BATCH))


def _add_stored(events: list[Event], namespace: Namespace, key: bytes, parent: bytes | None, chunk_tokens: int) -> None:
    last = events[-1] if events else None
    owner = _owner(namespace)
    if isinstance(last, BlockStored) and last.ownership == owner and parent == last.block_hashes[-1]:
        last.block_hashes.append(key)
    else:
        events.append(BlockStored([key], parent, [], chunk_tokens, None, MEDIUM, None, "LOCAL", owner))


def _add_removed(events: list[Event], namespace: Namespace, key: bytes) -> None:
    last = events[-1] if events else None
    owner = _owner(namespace)
    if isinstance(last, BlockRemoved) and last.ownership == owner:
        last.block_hashes.append(key)
    else:
        events.append(BlockRemoved([key], MEDIUM, "LOCAL", owner))


def _owner(namespace: Namespace) -> str:
    return f"{namespace.tenant}/{namespace.model}" if namespace.tenant else namespace.model
