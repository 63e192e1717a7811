"""The pin budget: the bytes that lookups may hold for requests that their engines have not begun.

Used by core/lookups/lookups.py and core/pins.py; plain data on the deciding thread. Invariant: without the largest
share of each client, all shares together are at most three quarters of the arena.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from kvdepot.core.clients import Client, PinShare
from kvdepot.core.index.chunk import Namespace
from kvdepot.protocol import wire
from kvdepot.protocol.keys import HASH_BYTES

_MARKS: list[int] = [8**power * number for power in range(1, 6) for number in range(1, 8)]
"""The numbers of chunks at which prompts are compared: to compare each chunk would double the cost of a lookup."""


class PinBudget:
    """The bytes that lookups hold, or may come to hold, for requests that wait.

    A request waits from its lookup to its first retrieve, or to its session's end: engines limit what they run, but not
    their queues. Chunks that requests share count once, up to the last mark (`_MARKS`) before they differ.
    """

    def __init__(self, capacity: int) -> None:
        """capacity: bytes of the arena."""
        self.bytes = 0
        self.has_freed = False  # shares have ended since the searches that wait for room were last tried
        # A quarter is left for stores, whatever clients do. The queue of one engine alone gets three eighths (`fits`),
        # usually more than copies can move in one step of the engine, so no request is delayed by a step.
        self.most_bytes = capacity - capacity // 4
        self._marks: dict[bytes, list[int]] = {}  # by mark: the shares that have it, and its bytes
        self._clients: dict[Client, list[int]] = {}  # by client: its shares, and the bytes that these added
        self._tenants: dict[str, dict[Client, list[int]]] = {}  # the entries of `_clients`, by tenant

    @staticmethod
    def weigh(
        client: Client, namespaces: Sequence[Namespace], request: wire.Lookup, chunks: int, tail: bytes = b""
    ) -> PinShare:
        """The share of the first `chunks` of a prompt, and of the tail with this key (empty: none). namespaces: the
        first group of each model that the request may mean."""
        hashes, model, chunks = request.hashes[: chunks * HASH_BYTES] + tail, b"", chunks + bool(tail)
        if not chunks:
            return PinShare(client, request.queued, 0, 0, {})
        chunk_bytes = windows = 0
        for first in namespaces:
            model += b"%d." % first.number  # models may share hashes
            for group in first.groups:
                part = sum(group.sizes.values())
                if group.reach:
                    windows += min(group.reach, chunks) * part
                else:
                    chunk_bytes += part
        marks, before = {}, 0
        for at in _MARKS[: bisect_left(_MARKS, chunks)]:
            marks[model + hashes[(at - 1) * HASH_BYTES : at * HASH_BYTES]] = (at - before) * chunk_bytes
            before = at
        last = model + hashes[(chunks - 1) * HASH_BYTES : chunks * HASH_BYTES] + (b"+" if windows else b"")
        marks[last] = (chunks - before) * chunk_bytes + windows
        return PinShare(client, request.queued, chunks, chunk_bytes, marks)

    def claim(
        self, client: Client, namespaces: Sequence[Namespace], request: wire.Lookup, chunks: int, tail: bytes = b""
    ) -> PinShare:
        share = self.weigh(client, namespaces, request, chunks, tail)
        return self.take(share) if self.fits(share) else share

    def fits(self, share: PinShare) -> bool:
        """Whether a share may be taken: always the first one of its client.

        With the share of a queued request, its tenant may hold at most as much as all tenants together leave free.
        Ports of a switch share its buffer so (Choudhury and Hahne, "Dynamic queue length thresholds", 1998): each queue
        leaves room for others. The tenant's clients have equal parts. A client without a tenant counts as one.
        """
        client = self._clients.get(share.client)
        if client is None or not share.marks:
            return True
        fresh = sum(size for mark, size in share.marks.items() if mark not in self._marks)
        free = self.most_bytes - self.bytes - fresh
        if not (share.is_queued and fresh):
            return free >= 0
        mates = self._tenants.get(share.client.tenant, {share.client: client})
        return free >= max(sum(brought for _, brought in mates.values()) + fresh, len(mates) * (client[1] + fresh))

    def affordable(self, share: PinShare) -> int:
        """The number of chunks of a share, from the prompt's start, for which the budget has room."""
        room, chunks = self.most_bytes - self.bytes, 0
        for (mark, size), end in zip(share.marks.items(), (*_MARKS[: len(share.marks) - 1], share.chunks), strict=True):
            if mark not in self._marks:
                if size > room:
                    windows = size - (end - chunks) * share.chunk_bytes
                    return chunks + max(0, room - windows) // max(1, share.chunk_bytes)
                room -= size
            chunks = end
        return chunks

    def take(self, share: PinShare) -> PinShare:
        """Count a share; the caller calls `end` for it once."""
        known, brought = self._marks, 0
        for mark, size in share.marks.items():
            counted = known.get(mark)
            if counted is None:
                known[mark] = [1, size]
                brought += size
            else:
                counted[0] += 1
        share.brought, share.is_taken = brought, True
        self.bytes += brought
        client = self._clients.setdefault(share.client, [0, 0])
        client[0] += 1
        client[1] += brought
        if share.client.tenant:
            self._tenants.setdefault(share.client.tenant, {})[share.client] = client
        return share

    def end(self, share: PinShare | None) -> None:
        """Stop counting a share. None: the request has no share, and nothing happens."""
        if share is None:
            return
        self.has_freed = True
        known = self._marks
        for mark in share.marks:
            counted = known[mark]
            counted[0] -= 1
            if not counted[0]:
                self.bytes -= counted[1]
                del known[mark]
        client = self._clients[share.client]
        client[0] -= 1
        client[1] -= share.brought
        if not client[0]:
            del self._clients[share.client]
            mates = self._tenants.get(share.client.tenant, {})
            mates.pop(share.client, None)
            if not mates:
                self._tenants.pop(share.client.tenant, None)

    def validate(self, shares: Sequence[PinShare]) -> None:
        """Raise AssertionError unless exactly these shares are counted, and they are within the budget; for tests."""
        assert {mark: count for mark, (count, _) in self._marks.items()} == Counter(m for s in shares for m in s.marks)
        assert {each: count for each, (count, _) in self._clients.items()} == Counter(share.client for share in shares)
        assert self.bytes == sum(size for _, size in self._marks.values())
        by_tenant = {each: count for mates in self._tenants.values() for each, count in mates.items()}
        assert by_tenant == {each: count for each, count in self._clients.items() if each.tenant}
        largest: dict[Client, int] = {}
        for share in shares:
            largest[share.client] = max(sum(share.marks.values()), largest.get(share.client, 0))
        assert self.bytes <= self.most_bytes + sum(largest.values())
