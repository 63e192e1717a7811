"""Which chunks would have been evicted if no lease held them. Used by core/index/ on the deciding thread; pure.

While there are leases, a policy is also asked for chunks that only leases hold. One that it names would be evicted next
without the lease: it is taken out of the policy's queue, and the policy goes on. Without the lease, the space of a
chunk that was taken out would have served later reservations, so such a chunk counts as spared only once that many more
bytes have been evicted as were taken out before it. A chunk is taken out after all chunks behind it, and its date
passes to the chunk before it, as if it were gone; so with LRU and within one account, what is spared is exactly what is
evicted without the lease, as long as nothing is asked for again that was evicted instead. After that it is too little
rather than too much.

When a lookup hits chunks that are out, they go back to their queues; its lease has saved those that were spared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvdepot.core.index.chunk import Chunk, Namespace, is_evictable
from kvdepot.eviction import Victim

if TYPE_CHECKING:
    from kvdepot.core.index.accounts import Account

__all__ = ["Holder", "Out", "Spared"]

_MOST_OUT = 1024
"""Chunks that one request for a victim takes out; parents beyond that wait for the next one."""


class Holder(Protocol):
    """A lease, as far as the index knows it."""

    def spare(self, size: int) -> None:
        """Note that a chunk of `size` bytes would have been evicted without it."""


@dataclass(slots=True, eq=False)
class Out:
    """A chunk that was taken out of its policy's queue."""

    chunk: Chunk
    size: int
    holder: Holder
    after: int  # bytes that must have been evicted from the account before it counts as spared
    is_spared: bool = False
    is_back: bool = False  # in its queue again, or gone


class Spared:
    """The chunks of one index that leases protect from eviction."""

    def __init__(self) -> None:
        self.held = 0  # holds of leases; 0: nothing here is needed
        self._holders: dict[int, list[Holder]] = {}  # by id() of a chunk, the first lease first
        self.out: dict[int, Out] = {}  # by id() of the chunk; empty: no lookup can hit one
        self._behind: dict[int, dict[int, Out]] = {}  # by id() of a parent: its children that are out
        self._postponed: list[Chunk] = []

    def __repr__(self) -> str:
        return f"<Spared {self.held} holds of leases, {len(self.out)} chunks out>"

    def could_go(self, chunk: Victim) -> bool:
        """Whether a chunk could be evicted if there were no leases, and has not been taken out."""
        assert isinstance(chunk, Chunk)
        if chunk.gone or chunk.holds != chunk.leased or id(chunk) in self.out:
            return False
        return chunk.children == (len(self._behind.get(id(chunk), ())) if chunk.children else 0)

    # -- victims

    def victim(self, account: Account) -> Chunk | None:
        """The chunk of an account to evict next; takes out those that would go before it. See `Policy.victim`."""
        postponed, self._postponed = self._postponed, []
        for parent in postponed:
            self.offer(parent)
        left = _MOST_OUT
        while (victim := account.policy.victim(self.could_go)) is not None:
            assert isinstance(victim, Chunk)
            if is_evictable(victim):
                break
            self._take_out(account, victim, left > 0)
            left -= 1
        self.settle(account)
        return victim

    def _take_out(self, account: Account, chunk: Chunk, may_offer: bool) -> None:
        behind = self._behind.get(id(chunk))
        holders = self._holders.get(id(chunk))
        holder = holders[0] if holders else next(iter(behind.values())).holder if behind else None
        assert holder is not None, f"{chunk.key.hex()} is held by nobody"
        out = self.out[id(chunk)] = Out(chunk, chunk.bytes, holder, account.evicted_bytes + account.out_bytes)
        account.out_bytes += out.size
        account.out.append(out)
        before = chunk.parent
        if before is not None:
            self._behind.setdefault(id(before), {})[id(chunk)] = out
            before.order = max(before.order, chunk.order)
            if may_offer:
                self.offer(before)
            else:
                self._postponed.append(before)

    def offer(self, chunk: Chunk) -> None:
        """Let the policy name a chunk, if only leases keep it."""
        if self.could_go(chunk):
            chunk.account.policy.add(chunk)

    def settle(self, account: Account) -> None:
        """Count the chunks that are out and would have been evicted by now."""
        while account.out and (account.out[0].is_back or account.out[0].after < account.evicted_bytes):
            out = account.out.popleft()
            if not out.is_back:
                out.is_spared = True
                out.holder.spare(out.size)

    # -- what happens to chunks

    def join(self, chunk: Chunk, holder: Holder) -> None:
        """A lease holds a chunk."""
        chunk.leased += 1
        self.held += 1
        self._holders.setdefault(id(chunk), []).append(holder)

    def leave(self, chunk: Chunk, holder: Holder) -> None:
        """A lease is about to release a chunk."""
        chunk.leased -= 1
        self.held -= 1
        holders = self._holders[id(chunk)]
        holders.remove(holder)
        if not holders:
            del self._holders[id(chunk)]
        each: Chunk | None = chunk
        while each is not None and (out := self.out.get(id(each))) is not None:
            if out.holder is holder:
                if holders:
                    out.holder = holders[0]
                else:
                    self._put_back(out)
            each = each.parent

    def hit(self, chunks: list[Chunk], counted: Namespace) -> dict[Holder, int]:
        """A lookup hits these chunks and those before them: how many of the namespace `counted` each lease has saved.

        They can be taken out again.
        """
        saved: dict[Holder, int] = {}
        for top in chunks:
            each: Chunk | None = top
            if id(top) in self.out:
                self.settle(top.account)
            while each is not None and (out := self.out.get(id(each))) is not None:
                if out.is_spared and each.namespace is counted:
                    saved[out.holder] = saved.get(out.holder, 0) + 1
                self._put_back(out)
                each = each.parent
        return saved

    def gone(self, chunk: Chunk, before: Chunk | None) -> None:
        """A chunk has left the index; `before` was its parent."""
        out = self.out.get(id(chunk))
        if out is not None:
            self._forget(out, before)

    def put_all_back(self) -> None:
        """Before chunks change their accounts: no chunk is out any more."""
        for out in list(self.out.values()):
            self._put_back(out)

    def _put_back(self, out: Out) -> None:
        self._forget(out, out.chunk.parent)
        self.offer(out.chunk)

    def _forget(self, out: Out, before: Chunk | None) -> None:
        del self.out[id(out.chunk)]
        out.is_back = True
        out.chunk.account.out_bytes -= out.size
        behind = self._behind.get(id(before))
        if behind is not None:
            behind.pop(id(out.chunk), None)
            if not behind:
                del self._behind[id(before)]
