"""The queue between the deciding thread and the publisher's. Invariant: the deciding thread only appends to a bounded
queue. When that is full, it reports that everything is gone, and then lists the existing chunks again, some each
second."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from kvdepot.core.index.chunk import Chunk, Namespace, is_there
from kvdepot.core.index.events import Hidden, IndexEvent, Removed, Stored
from kvdepot.protocol.status import Status
from kvdepot.protocol.wire import Describe

_MOST_QUEUED = 1 << 17
_MOST_DESCRIBED_BYTES = 64 << 20
"""Token ids in the queue; further ones are dropped."""
_LISTED_A_TICK = 1 << 13
"""Chunks that the deciding thread lists per tick during a full resync; takes some milliseconds."""


Topics: TypeAlias = "frozenset[tuple[str, Namespace]]"
"""The topics of registered engines, each with the namespace of the chunks that they can load."""
Change: TypeAlias = "tuple[bool, Namespace, bytes, bytes | None] | Topics | Describe | None"
"""Whether a chunk exists, its namespace, its key, and its parent's (None: it is a prompt's first, empty: unknown); the
topics that have replaced the former ones; chunks described by an engine; or None: all chunks are gone."""


class Feed:
    """A queue of changes. The deciding thread calls `read`, `described` and `tick`, the reader's thread the rest."""

    def __init__(self, most: int = _MOST_QUEUED) -> None:
        self.overflows = 0  # how often the queue was full
        self._most = most
        self._queue: deque[Change] = deque([None])
        self._topics: Topics = frozenset()  # as last queued
        self._described = self._taken = 0  # bytes of token ids, queued by one thread and taken by the other
        self._full = False  # or closed: nothing more is queued
        self._unlisted = True  # whether the existing chunks must be listed (again)
        self._listing: Iterator[Chunk] | None = None
        self._asleep = False  # set by the reader before it waits, cleared by the thread that wakes it
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __repr__(self) -> str:
        return f"<Feed of {len(self._queue)} changes{', full' * self._full}>"

    def read(self, events: Sequence[IndexEvent], wall: int) -> None:
        for event in events:
            match event:
                case Stored(chunk):
                    if is_there(chunk):
                        self.changed(chunk, True)
                case Hidden(chunk) | Removed(chunk):
                    self.changed(chunk, False)

    def fill(self, status: Status) -> None:
        status.counters["kv_event_overflows"] = self.overflows

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
            before = chunk.parent
            parent = b"" if not chunk.position else before.key if before is not None else None
            queue.append((there, chunk.namespace, chunk.key, parent))
        self._wake_reader()

    def described(self, chunks: Describe) -> None:
        """An engine has described chunks; dropped while there is no room for it."""
        waiting = self._described - self._taken
        if not self._full and len(self._queue) < self._most and waiting < _MOST_DESCRIBED_BYTES:
            self._described += len(chunks.tokens)
            self._queue.append(chunks)
            self._wake_reader()

    def _wake_reader(self) -> None:
        if self._asleep:
            self.rouse()

    def rouse(self) -> None:
        """Wake the reader, also without a change."""
        self._asleep = False
        os.eventfd_write(self.wake, 1)

    def tick(self, namespaces: Sequence[Namespace], topics: Topics = frozenset()) -> None:
        """Called once a second: continue listing the chunks that existed before the feed, or before the overflow.
        namespaces: all. topics: those of the engines that are registered now."""
        if len(self._queue) > self._most // 2:
            return
        if topics != self._topics:
            self._topics = topics
            self._queue.append(topics)
            self._wake_reader()
        if self._unlisted:
            chunks = (list(namespace.chunks.values()) for namespace in namespaces)
            self._full, self._unlisted, self._listing = False, False, itertools.chain.from_iterable(chunks)
        room = min(_LISTED_A_TICK, self._most // 2)
        while self._listing is not None and room:
            chunk = next(self._listing, None)
            if chunk is None:
                self._listing = None
                return
            room -= 1
            if is_there(chunk):
                self.changed(chunk, True)

    def take(self, most: int) -> list[Change]:
        taken: list[Change] = []
        queue = self._queue
        while queue and len(taken) < most:
            change = queue.popleft()
            if isinstance(change, Describe):
                self._taken += len(change.tokens)
            taken.append(change)
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
