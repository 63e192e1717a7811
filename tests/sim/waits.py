"""What must hold of lookups that wait for stores: in runs without tiers, they wait for nothing else.

Looks at the chunks alone: which part a lookup waits for, and since when, is the server's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdepot.core.index.chunk import Namespace, State, is_hidden, is_there
from kvdepot.core.waiting import STORE_S
from kvdepot.protocol import wire
from tests.sim.groups import deepest

if TYPE_CHECKING:
    from tests.sim.server import Server

_SLACK_S = 1e-6


class Waits:
    """The lookups of one server that wait for stores."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._late: set[tuple[int, bytes]] = set()  # parts whose store has let a lookup wait until its deadline

    def check(self) -> None:
        """Each lookup that is not answered has a store to wait for, although what that brings may have become useless:
        other parts that it would have needed were evicted.
        """
        server = self._server
        if server.host.stores or server.depot.removals:
            return
        for _, request, _ in server._lookups.values():
            groups, keys = server._asked_groups(request), _keys(request)
            written = any(self._is_written(group, key) for group in groups for key in keys)
            assert written, f"the lookup of {request.request} waits for nothing"

    def answered(self, request: wire.Lookup, waited_s: float, value: int) -> None:
        """A lookup is answered that nobody gave up."""
        server = self._server
        if server.host.stores:
            return
        coming = self._coming(request)
        if waited_s >= STORE_S - _SLACK_S:
            self._late |= coming  # also while a removal goes on, for the lookups after it
        if server.depot.removals:
            return
        server.world.counters["lookup_awaited_store"] += waited_s > 0 and value > 0
        server.world.counters["awaited_store_failed"] += waited_s > 0 and not coming and not value
        assert not coming or coming & self._late, (
            f"a lookup was answered with {value} chunks after {waited_s:.3f} s, while more was being stored"
        )

    def died(self, identity: bytes) -> None:
        """A client is found dead."""
        server, counters = self._server, self._server.world.counters
        if server.host.stores:
            return
        waits = [asked for asked in server._lookups if asked[0] == identity]
        counters["asker_died_while_waiting"] += bool(waits)
        storing = {
            (chunk.namespace.number, chunk.key)
            for running in server._running
            for operation in [getattr(running.task.token, "operation", None)]
            if operation is not None and operation.is_store and operation.client.identity == identity
            for chunk, _ in operation.chunks
        }
        others = [request for asked, (_, request, _) in server._lookups.items() if asked not in waits]
        counters["storer_died_while_awaited"] += any(storing & self._coming(request) for request in others)

    def _coming(self, request: wire.Lookup) -> set[tuple[int, bytes]]:
        """Parts being written that would make a lookup's answer larger."""
        groups = self._server._asked_groups(request)
        if len({id(group.groups) for group in groups}) != 1:
            return set()
        keys = _keys(request)

        def there(group: Namespace, i: int) -> bool:
            chunk = group.chunks.get(keys[i])
            return chunk is not None and is_there(chunk)

        def coming(group: Namespace, i: int) -> bool:
            return there(group, i) or self._is_written(group, keys[i])

        if deepest(groups, len(keys), coming) <= deepest(groups, len(keys), there):
            return set()
        return {(group.number, key) for group in groups for key in keys if self._is_written(group, key)}

    def _is_written(self, group: Namespace, key: bytes) -> bool:
        chunk = group.chunks.get(key)
        return (
            chunk is not None
            and not is_hidden(chunk)
            and any(shard.state is State.RESERVED for shard in chunk.shards.values())
        )


def _keys(request: wire.Lookup) -> list[bytes]:
    return [request.hashes[i : i + 32] for i in range(0, len(request.hashes), 32)]
