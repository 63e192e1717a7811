"""Changes of the index as vLLM's KV events: queued by the deciding thread, read by the publisher's.

core/index/index.py reports each chunk that becomes visible or invisible to a `Feed`. The publisher's thread takes these
changes and turns them into events, given what its subscribers know so far (`Belief`). Invariant: the deciding thread
only appends to a bounded queue. When the queue is full, it reports that everything is gone, and then lists the existing
chunks again, some each second.
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
"""Maximum number of chunks in one message."""
_MOST_QUEUED = 1 << 17
_LISTED_A_TICK = 1 << 13
"""Chunks that the deciding thread lists per tick during a full resync; takes some milliseconds."""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Chunks were stored, each behind the one before it. The fields are vLLM's."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    locality: str | None = None
    ownership: str | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Chunks were removed."""

    block_hashes: list[bytes]
    medium: str | None
    locality: str | None = None
    ownership: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """All chunks were removed."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
_Change: TypeAlias = "tuple[bool, Namespace, bytes, bytes | None] | None"
"""Whether a chunk exists, its namespace, key and parent; None: all chunks are gone."""


class Feed:
    """A queue of an index's changes; `changed` is the index's `watch`.

    The deciding thread calls `changed` and `tick`, the reader's thread the rest.
    """

    def __init__(self, most: int = _MOST_QUEUED) -> None:
        self.overflows = 0  # how often the queue was full
        self._most = most
        self._queue: deque[_Change] = deque([None])
        self._full = False  # or closed: nothing more is queued
        self._unlisted = True  # whether the existing chunks must be listed (again)
        self._listing: Iterator[Chunk] | None = None
        self._asleep = False  # set by the reader before it waits, cleared by the thread that wakes it
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __repr__(self) -> str:
        return f"<Feed of {len(self._queue)} changes{', full' * self._full}>"

    # -- the deciding thread

    def changed(self, chunk: Chunk, there: bool) -> None:
        """A chunk became visible, or invisible. Reporting the same change twice is harmless."""
        if self._full:
            return
        queue = self._queue
        if len(queue) >= self._most:
            # Changes are lost from here on: subscribers discard everything, and get a new listing later.
            self._full, self._unlisted, self._listing = True, True, None
            self.overflows += 1
            queue.append(None)
        else:
            before = chunk.parent if chunk.position else None
            queue.append((there, chunk.namespace, chunk.key, None if before is None else before.key))
        if self._asleep:
            self.rouse()

    def rouse(self) -> None:
        """Wake the reader."""
        self._asleep = False
        os.eventfd_write(self.wake, 1)

    def tick(self, index: Index) -> None:
        """Called once a second: continue listing the chunks that existed before the feed, or before the overflow."""
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
        """Remove and return the oldest changes, at most this many."""
        taken: list[_Change] = []
        queue = self._queue
        while queue and len(taken) < most:
            taken.append(queue.popleft())
        return taken

    def may_sleep(self) -> bool:
        """Whether the queue is empty; if so, `wake` becomes readable when a change arrives."""
        self._asleep = True
        if self._queue:
            self._asleep = False
        return self._asleep

    def close(self) -> None:
        """Stop queueing, and close `wake`; called when the reader has ended."""
        self._full, self._unlisted, self._listing = True, False, None
        os.close(self.wake)


def _all(index: Index) -> Iterator[Chunk]:
    for namespace in index.namespaces.all():
        yield from list(namespace.chunks.values())


class Belief:
    """What a subscriber that has read every message believes to exist: parents by key, by namespace."""

    def __init__(self) -> None:
        self.chunks: dict[Namespace, dict[bytes, bytes | None]] = {}
        self.count = 0

    def apply(self, changes: list[_Change]) -> list[Event]:
        """Apply changes; returns the events that report them."""
        events: list[Event] = []
        removed = False
        for change in changes:
            if change is None:
                self.chunks.clear()
                self.count = 0
                events = [AllBlocksCleared()]
                continue
            is_there, namespace, key, parent = change
            keys = self.chunks.get(namespace)
            if is_there == (keys is not None and key in keys):
                continue
            if is_there:
                self.chunks.setdefault(namespace, {})[key] = parent
                self.count += 1
                _add_stored(events, namespace, key, parent)
            else:
                assert keys is not None
                del keys[key]
                self.count -= 1
                removed = True
                if not keys:
                    del self.chunks[namespace]
                _add_removed(events, namespace, key)
        # If this removed the last chunk, one event is enough.
        return [AllBlocksCleared()] if removed and not self.count else events

    def listing(self) -> Iterator[list[Event]]:
        """Events that list everything as of now, in batches of one message; `messages` of them."""
        known = [(namespace, key, parent) for namespace, keys in self.chunks.items() for key, parent in keys.items()]

        def batches() -> Iterator[list[Event]]:
            for first in range(0, max(1, len(known)), BATCH):
                events: list[Event] = [] if first else [AllBlocksCleared()]
                for namespace, key, parent in known[first : first + BATCH]:
                    _add_stored(events, namespace, key, parent)
                yield events

        return batches()

    @property
    def messages(self) -> int:
        """The number of messages in a listing."""
        return max(1, -(-self.count // BATCH))


def _add_stored(events: list[Event], namespace: Namespace, key: bytes, parent: bytes | None) -> None:
    last = events[-1] if events else None
    owner, group = _owner(namespace), _group(namespace)
    is_same = isinstance(last, BlockStored) and (last.ownership, last.group_idx) == (owner, group)
    if isinstance(last, BlockStored) and is_same and parent == last.block_hashes[-1]:
        last.block_hashes.append(key)
    else:
        tokens = namespace.chunk_tokens
        events.append(BlockStored([key], parent, [], tokens, None, MEDIUM, None, "LOCAL", owner, group))


def _add_removed(events: list[Event], namespace: Namespace, key: bytes) -> None:
    last = events[-1] if events else None
    owner, group = _owner(namespace), _group(namespace)
    if isinstance(last, BlockRemoved) and (last.ownership, last.group_idx) == (owner, group):
        last.block_hashes.append(key)
    else:
        events.append(BlockRemoved([key], MEDIUM, "LOCAL", owner, group))


def _owner(namespace: Namespace) -> str:
    return f"{namespace.tenant}/{namespace.model}" if namespace.tenant else namespace.model


def _group(namespace: Namespace) -> int | None:
    """The KV cache group, for models that have several."""
    return namespace.group if len(namespace.groups) > 1 else None
