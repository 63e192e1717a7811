"""Wants: the chunks that requests in their engines' queues are going to read, which are evicted last.

Used by core/ on the deciding thread; pure. A queue is the future: what a request in it needs is read as soon as its
turn comes. So each such request has a **want** of the chunks that it would find. A want holds nothing: when its account
has no unwanted chunk left, a wanted chunk is evicted, but only for a request that comes sooner. The last in the queue
loses its chunks first.

**Depth.** A want's depth is the number of bytes that earlier wants in the queue of its **owner**, an engine, ask for.
So each queue has the same number of bytes protected, whatever its length. If an engine floods the depot, the far end of
its queue is evicted first. A `place` that a client claims orders its own queue only. (The decision "Wanted, not pinned"
names the roads not taken.)

Invariants: `Chunk.wants` is the number of wants that have the chunk among their tops. A **top** is a chunk that a pin
would hold: no chunk before it is evicted sooner. When a top is evicted, its wants pass to the chunk before it.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import itemgetter

from kvdepot.core.index.chunk import Account, Chunk, Namespace, is_evictable

_MOST_TOPS = 1 << 16
"""The most tops of all wants of one owner. A model with windows has many per want; further tops are unprotected."""


@dataclass(slots=True, eq=False)
class Want:
    """The claim of one request in a queue on what it is going to read.

    order: its place in its owner's queue, and its number of arrival. size: bytes that its request asks for. tops: the
    chunks, by id(). missing: the model's number and the key of the first chunk that memory lacks.
    """

    owner: object
    order: tuple[int, int]
    size: int
    tops: dict[int, Chunk] = field(default_factory=dict)
    missing: tuple[int, bytes] | None = None


class _Queue:
    """The wants of one owner in their order, with lists of their orders to search and of their sizes to sum."""

    __slots__ = ("orders", "sizes", "tops", "wants")

    def __init__(self) -> None:
        self.wants: list[Want] = []
        self.orders: list[tuple[int, int]] = []
        self.sizes: list[int] = []
        self.tops = 0

    def from_its_end(self) -> Iterator[tuple[int, Want]]:
        """The wants with their depths, the deepest first."""
        depth = sum(self.sizes)
        for want in reversed(self.wants):
            depth -= want.size
            yield depth, want


class Wants:
    """All wants of one index. The caller limits their number, and ends each want."""

    def __init__(self) -> None:
        self._queues: dict[object, _Queue] = {}  # by owner
        self._wanters: dict[int, dict[Want, None]] = {}  # by id() of a top
        self._missing: dict[tuple[int, bytes], dict[Want, None]] = {}
        self._numbers = itertools.count()
        # Each account's wanted chunks with the depths of their earliest wants, the deepest last; empty: not arranged.
        self._orders: dict[int, list[tuple[int, Chunk]]] = {}
        self._depths: dict[int, int] = {}  # by id() of a chunk in `_orders`: the depth whose item counts
        self._given: tuple[list[tuple[int, Chunk]], int] | None = None  # the list and place of the last victim

    def __len__(self) -> int:
        return sum(len(queue.wants) for queue in self._queues.values())

    # -- queues

    def join(self, owner: object, place: int, size_bytes: int) -> Want:
        """Let a request that asks for `size_bytes` enter its owner's queue, behind requests with the same or a lower
        place. Its want has no tops yet."""
        want = Want(owner, (place, next(self._numbers)), size_bytes)
        queue = self._queues.setdefault(owner, _Queue())
        at = bisect_left(queue.orders, want.order)
        queue.wants.insert(at, want)
        queue.orders.insert(at, want.order)
        queue.sizes.insert(at, size_bytes)
        self.disarrange()
        return want

    def want(self, want: Want, tops: Iterable[Chunk], missing: tuple[Namespace, bytes] | None) -> None:
        """Replace what a request wants. tops: the chunks that a pin of its prefix would hold (`Match.pins`). missing:
        the first chunk that the prefix lacks, in any KV cache group of its model; None: it lacks none."""
        queue = self._queues[want.owner]
        new = {id(chunk): chunk for chunk in tops if not chunk.gone}
        old = want.tops
        if new.keys() != old.keys():
            self.disarrange()
        for chunk in [each for number, each in new.items() if number not in old]:
            if queue.tops < _MOST_TOPS:
                self._add(want, chunk)
        for chunk in [each for number, each in old.items() if number not in new]:
            self._drop(want, chunk)
        self._wait_for(want, None if missing is None else (missing[0].groups[0].number, missing[1]))

    def unwant(self, want: Want) -> None:
        queue = self._queues[want.owner]
        for chunk in list(want.tops.values()):
            self._drop(want, chunk)
        self._wait_for(want, None)
        self.disarrange()
        at = bisect_left(queue.orders, want.order)
        del queue.wants[at], queue.orders[at], queue.sizes[at]
        if not queue.wants:
            del self._queues[want.owner]

    def depth(self, want: Want) -> int:
        """The bytes of its owner's queue before a want."""
        queue = self._queues[want.owner]
        return sum(queue.sizes[: bisect_left(queue.orders, want.order)])

    # -- what is missing

    def depth_before(self, namespace: Namespace, keys: Sequence[bytes]) -> float:
        """The depth of the earliest want that waits for one of these chunks; infinity: none does."""
        want = self.waiting_for(namespace, *keys) if self._missing else None
        return inf if want is None else self.depth(want)

    def waiting_for(self, namespace: Namespace, *keys: bytes) -> Want | None:
        """The want with the least depth whose first missing chunk is one of these; None: there is none."""
        earliest: dict[object, Want] = {}
        for key in keys:
            for want in self._missing.get((namespace.groups[0].number, key), ()):
                known = earliest.get(want.owner)
                if known is None or want.order < known.order:
                    earliest[want.owner] = want
        return min(earliest.values(), key=self.depth, default=None)

    def _wait_for(self, want: Want, missing: tuple[int, bytes] | None) -> None:
        if want.missing == missing:
            return
        if want.missing is not None:
            wants = self._missing[want.missing]
            del wants[want]
            if not wants:
                del self._missing[want.missing]
        want.missing = missing
        if missing is not None:
            self._missing.setdefault(missing, {})[want] = None

    # -- tops

    def _add(self, want: Want, chunk: Chunk) -> None:
        want.tops[id(chunk)] = chunk
        self._wanters.setdefault(id(chunk), {})[want] = None
        self._queues[want.owner].tops += 1
        chunk.wants += 1

    def _drop(self, want: Want, chunk: Chunk) -> None:
        del want.tops[id(chunk)]
        wanters = self._wanters[id(chunk)]
        del wanters[want]
        self._queues[want.owner].tops -= 1
        chunk.wants -= 1
        if not wanters:
            del self._wanters[id(chunk)]
            if is_evictable(chunk):
                chunk.account.policy.add(chunk)

    # -- victims

    def victim(self, account: Account, depth: float) -> Chunk | None:
        """The account's chunk with the deepest want, if that is deeper than `depth` (bytes), for the caller to remove.
        The earliest want of a chunk decides its depth. O(1) if the deepest chunks can be evicted, but the first call
        after a change of the queues sorts all wants."""
        self._given = None
        if not self._wanters:
            return None
        if not self._depths:
            self._arrange()
        order = self._orders.get(id(account), [])
        while order and order[-1][1].gone:
            order.pop()
        for at in range(len(order) - 1, -1, -1):
            behind, chunk = order[at]
            if behind <= depth:
                break
            if is_evictable(chunk) and self._depths[id(chunk)] == behind:
                self._given = order, at
                return chunk
        return None

    def _arrange(self) -> None:
        found: dict[int, tuple[int, Chunk]] = {}
        for depth, want in heapq.merge(
            *map(_Queue.from_its_end, self._queues.values()), key=itemgetter(0), reverse=True
        ):
            for number, chunk in reversed(want.tops.items()):
                found.pop(number, None)  # its earliest want decides its place
                found[number] = depth, chunk
        for depth, chunk in reversed(found.values()):
            self._orders.setdefault(id(chunk.account), []).append((depth, chunk))
        self._depths = {number: depth for number, (depth, _) in found.items()}

    def disarrange(self) -> None:
        """Forget the order in which chunks are wanted, because it or an account of the chunks has changed."""
        if self._depths:
            self._orders, self._depths, self._given = {}, {}, None

    def lost(self, chunk: Chunk, before: Chunk | None) -> None:
        """Note that a wanted chunk is gone. Its wants pass to the chunk before it in its chain, if there is one, and
        the chunk becomes their first missing one."""
        before = None if before is None or before.gone else before
        for want in self._wanters.pop(id(chunk)):
            self._wait_for(want, (chunk.namespace.groups[0].number, chunk.key))
            del want.tops[id(chunk)]
            self._queues[want.owner].tops -= 1
            if before is not None and id(before) not in want.tops:
                self._add(want, before)
        chunk.wants = 0
        order, at = self._given or ([], 0)
        self._given = None
        if not order or order[at][1] is not chunk:
            self.disarrange()
        elif before is not None and self._depths.get(id(before), inf) > self._depths[id(chunk)]:
            self._depths[id(before)] = order[at][0]
            order[at] = order[at][0], before

    # -- checks

    def check(self, namespaces: Iterable[Namespace]) -> None:
        """Raise AssertionError unless each chunk's number of wants is right; O(n), for tests."""
        chunks = {id(chunk): chunk for each in namespaces for chunk in each.chunks.values()}
        wants = [want for queue in self._queues.values() for want in queue.wants]
        tops = [(number, want) for want in wants for number in want.tops]
        assert len(tops) == sum(chunk.wants for chunk in chunks.values()), "a chunk is wanted more or less often"
        assert all(want in self._wanters[number] and chunks[number].wants for number, want in tops)
        assert sum(map(len, self._wanters.values())) == len(tops) == sum(q.tops for q in self._queues.values())
        assert sum(map(len, self._missing.values())) == sum(want.missing is not None for want in wants)
        for queue in self._queues.values():
            assert queue.wants and queue.orders == sorted(each.order for each in queue.wants), "a queue is out of order"
            assert [each.order for each in queue.wants] == queue.orders
            assert [each.size for each in queue.wants] == queue.sizes
