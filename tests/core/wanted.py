"""An index that checks each eviction: who may be evicted for whom, by walking all chunks and all wants."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import Any

from kvdepot.core.index.chunk import Account, Chunk, Namespace, is_evictable
from kvdepot.core.index.events import Reason
from kvdepot.core.index.index import Index
from kvdepot.core.index.runs import Refusal, Reservation, Run
from kvdepot.core.index.wants import Want
from kvdepot.memory.allocator import Allocator
from kvdepot.protocol.keys import HASH_BYTES


class WatchedIndex(Index):
    """Of each want it knows the whole prefix that was said, and of each reservation who waits for it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prefixes: dict[Want, dict[int, Chunk]] = {}
        self.lacks: dict[Want, tuple[Namespace, bytes] | None] = {}
        self._room: tuple[Account, int, float] | None = None  # who asks for it, bytes of a shard, depth
        self._want, self._unwant = self.wants.want, self.wants.unwant
        self.wants.want, self.wants.unwant = self._said, self._ended  # type: ignore[method-assign]

    def _said(self, want: Want, tops: Iterable[Chunk], missing: tuple[Namespace, bytes] | None) -> None:
        tops = list(tops)
        self.prefixes[want] = {id(chunk): chunk for top in tops for chunk in _up(top)}
        self.lacks[want] = missing
        self._want(want, tops, missing)

    def _ended(self, want: Want) -> None:
        del self.prefixes[want], self.lacks[want]
        self._unwant(want)

    def meet(self, what: str) -> None:
        """Note an eviction of a wanted chunk, or a refusal."""

    def depth_of(self, want: Want) -> int:
        """The bytes before a want in its owner's queue."""
        return sum(each.size for each in self.prefixes if each.owner == want.owner and each.order < want.order)

    def wanted(self, chunk: Chunk) -> float:
        """The depth of the earliest want of a chunk; infinity: nobody wants it."""
        return min((self.depth_of(want) for want, those in self.prefixes.items() if id(chunk) in those), default=inf)

    def reserve(self, namespace: Namespace, rank: int, run: Run, wall: int | None) -> Reservation:
        keys = {run.hashes[at : at + HASH_BYTES] for at in range(0, len(run.hashes), HASH_BYTES)}
        waits = [
            self.depth_of(want)
            for want, missing in self.lacks.items()
            if missing is not None and missing[0].groups[0] is namespace.groups[0] and missing[1] in keys
        ]
        account = self.accounts.of(namespace.tenant, run.salt)
        room = self._room = account, Allocator.rounded(run.size), min([run.depth, *waits])
        try:
            made = super().reserve(namespace, rank, run, wall)
        finally:
            self._room = None
        if made.refusal in (Refusal.WANTED, Refusal.NO_ROOM, Refusal.OVER_CAP):
            spared = {id(each) for key in keys if key in namespace.chunks for each in _up(namespace.chunks[key])}
            trunk = namespace.trunk
            before = [namespace.chunks.get(run.parent), *(trunk.chunks.get(key) for key in keys if trunk is not None)]
            spared |= {id(each) for chunk in before if chunk is not None for each in _up(chunk)}
            self._check_refusal(made.refusal, *room, spared)
        return made

    def _check_refusal(self, why: Refusal, account: Account, size: int, depth: float, spared: set[int]) -> None:
        """Nothing of an account could have been evicted for it."""
        self.meet("store_yielded" if why is Refusal.WANTED else "store_refused")
        own = [chunk for chunk in self._evictable(account) if id(chunk) not in spared]
        is_capped = account.used > account.cap
        if not is_capped and size <= account.cap:
            assert not [chunk for chunk in own if self.wanted(chunk) == inf], "an unwanted chunk could have gone"
            assert not [chunk for chunk in own if inf > self.wanted(chunk) > depth], "one wanted later could have gone"
        evictable = [chunk for chunk in self._evictable(account) if chunk.wants]
        assert (why is Refusal.WANTED) == (bool(evictable) and not is_capped), "a refusal has another reason"

    def _evictable(self, account: Account) -> Iterator[Chunk]:
        for namespace in self.namespaces.all():
            for chunk in namespace.chunks.values():
                if chunk.account is account and is_evictable(chunk):
                    yield chunk

    def remove(self, chunk: Chunk, reason: Reason) -> None:
        if reason is Reason.EVICTED and (depth := self.wanted(chunk)) < inf:
            self._check_eviction(chunk, depth)
        super().remove(chunk, reason)

    def _unlink(self, chunk: Chunk, reason: Reason) -> Chunk | None:
        for want, prefix in self.prefixes.items():
            if id(chunk) in prefix:  # nothing is behind it any more: it is the first that the want lacks
                self.lacks[want] = chunk.namespace, chunk.key
        return super()._unlink(chunk, reason)

    def _check_eviction(self, chunk: Chunk, depth: float) -> None:
        account = chunk.account
        others = [self.wanted(each) for each in self._evictable(account)]
        assert inf not in others, "a wanted chunk went before an unwanted one of its account"
        assert depth == max(others), "a wanted chunk went before one that is wanted later"
        if self._room is None:
            assert account.used > account.cap, "a wanted chunk went although nobody needed its space"
            self.meet("wanted_trimmed")
            return
        by, size, needed = self._room
        if account is by:
            assert depth > needed, f"a chunk wanted at {depth} went for a reservation at {needed}"
            self.meet("wanted_evicted_for_sooner")
        else:
            level = max(0, by.spare + size) / by.weight
            assert account.spare / account.weight > level, "a wanted chunk went for an account above its own"
            self.meet("wanted_evicted_for_another_account")

    def validate(self) -> None:
        super().validate()
        wanted = {id(chunk) for namespace in self.namespaces.all() for chunk in namespace.chunks.values()}
        for want, prefix in self.prefixes.items():
            kept = {id(chunk) for top in want.tops.values() for chunk in _up(top)}
            assert kept & wanted == prefix.keys() & wanted, "a want has lost what is still there of its prefix"


def _up(chunk: Chunk) -> Iterator[Chunk]:
    """A chunk, and those that are evicted after it."""
    step: Chunk | None = chunk
    while step is not None:
        yield step
        step = step.parent


def said(index: Index, owner: object, tops: Sequence[Chunk], place: int = 0, size: int = 1) -> Want:
    """A want of these chunks that lacks none."""
    want = index.wants.join(owner, place, size)
    index.wants.want(want, tops, None)
    return want
