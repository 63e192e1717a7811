"""Requests that list what is in memory: answered in steps, of one client after the other.

Called by core/depot.py on the deciding thread, which serves other requests between steps. No I/O or clock. Changes
nothing; an answer mixes what was there in its steps. Invariant: each request is answered once, or its client has died.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass

from kvdepot.core.actions import Action, Reply
from kvdepot.core.admission import check_names
from kvdepot.core.clients import Client
from kvdepot.core.index.chunk import Namespace
from kvdepot.core.index.index import Index
from kvdepot.core.inspecting import inspect
from kvdepot.core.prefixes import prefixes
from kvdepot.core.tiering.tiering import Tiering
from kvdepot.errors import BadRequest, Busy, KVDepotError
from kvdepot.protocol import wire
from kvdepot.protocol.keys import HASH_BYTES
from kvdepot.protocol.prefixes import LEAST_HASH, MOST_CHUNKS, MOST_PREFIXES, SORTS

__all__ = ["MOST_LISTS", "MOST_OF_CLIENT", "Lists"]

_STEP = 2048
"""Families, or chunks, that one step examines, in less than a millisecond."""
MOST_LISTS = 16
"""Requests at a time."""
MOST_OF_CLIENT = 2
"""Of those, of one client."""
_ITEMS_OF_ONE = 128
"""Families, or chunks, that count as one more request against `max_rate`."""


@dataclass(slots=True, eq=False)
class _Asked:
    """A request that is being answered. `answer` pauses after each step, and returns the value of the reply."""

    number: bytes
    answer: Generator[None, None, object]


class Lists:
    """The lists that one depot is making."""

    def __init__(self, index: Index, tiering: Tiering, step: int = _STEP) -> None:
        """step: how many families or chunks one step examines."""
        self._index = index
        self._tiering = tiering
        self._step = step
        self._asked: dict[Client, deque[_Asked]] = {}  # the client whose turn it is first

    def __repr__(self) -> str:
        return f"<Lists of {len(self._asked)} clients>"

    def __bool__(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._asked)

    def cost(self, request: wire.Prefixes | wire.Inspect, tenant: str = "") -> int:
        """What a request of a tenant's client counts as against `max_rate`. Empty: it sees what all tenants have."""
        namespaces = self._visible(tenant, request.model)
        match request:
            case wire.Prefixes():
                items = sum(len(each.families) for each in namespaces if each.is_lead)
            case wire.Inspect():
                stored = sum(len(each.chunks) for each in namespaces)
                most = max(0, request.most) or MOST_CHUNKS
                hashes = min(stored, most) if request.end else len(request.hashes) // HASH_BYTES
                searched = stored if len(request.end) < HASH_BYTES and request.end else 0
                items = hashes * len(namespaces) + searched
        return 4 + items // _ITEMS_OF_ONE

    def prefixes(self, client: Client, number: bytes, request: wire.Prefixes, wall: int) -> list[Action]:
        """Answer with the families that the client may see. wall: seconds since 1970. Raises BadRequest or Busy."""
        namespaces = [each for each in self._named(client, request.model) if each.is_lead]
        if request.sort not in SORTS:
            raise BadRequest(f"sort is {request.sort[:80]!r}, not one of {', '.join(SORTS)}")
        if not 1 <= request.most <= MOST_PREFIXES:
            raise BadRequest(f"most is {request.most}, not between 1 and {MOST_PREFIXES}")
        return self._begin(client, number, prefixes(self._index, namespaces, request, wall, self._step))

    def inspect(self, client: Client, number: bytes, request: wire.Inspect, wall: int) -> list[Action]:
        """Answer with the chunks that the client may see. wall: seconds since 1970. Raises BadRequest or Busy."""
        namespaces = self._named(client, request.model)
        hashes, end = request.hashes, request.end
        if bool(hashes) == bool(end) or len(hashes) % HASH_BYTES:
            raise BadRequest(f"give either `end`, or `hashes` of {HASH_BYTES} bytes each")
        if request.most < 0 or (request.most and not end):
            raise BadRequest("`most` is a number of chunks up to `end`, or 0")
        if end and not LEAST_HASH <= len(end) <= HASH_BYTES:
            raise BadRequest(f"{len(end)} bytes of a hash were given; {LEAST_HASH} to {HASH_BYTES} are needed")
        answer = inspect(self._index, namespaces, request, self._tiering.names, wall, self._step)
        return self._begin(client, number, answer)

    def _named(self, client: Client, model: str) -> list[Namespace]:
        """The namespaces that a client may see, of models whose name has this prefix. Raises BadRequest or Busy."""
        check_names("", model)
        self._drop_dead()
        if len(self._asked.get(client, ())) >= MOST_OF_CLIENT:
            raise Busy(f"{MOST_OF_CLIENT} lists are being made for this client: retry later")
        if sum(map(len, self._asked.values())) >= MOST_LISTS:
            raise Busy(f"{MOST_LISTS} lists are being made: retry later")
        return self._visible(client.tenant, model)

    def _visible(self, tenant: str, model: str) -> list[Namespace]:
        return [
            each
            for each in self._index.namespaces.all()
            if tenant in ("", each.tenant) and each.model.startswith(model)
        ]

    def _begin(self, client: Client, number: bytes, answer: Generator[None, None, object]) -> list[Action]:
        self._asked.setdefault(client, deque()).append(_Asked(number, answer))
        return self.step()

    def _drop_dead(self) -> None:
        for client in [client for client in self._asked if client.dead]:
            del self._asked[client]

    def step(self) -> list[Action]:
        """Continue with the first request of the client whose turn it is; its reply, if it is complete."""
        self._drop_dead()
        if not self._asked:
            return []
        client = next(iter(self._asked))
        asked = self._asked.pop(client)
        actions = self._continue(client, asked)
        if asked:
            self._asked[client] = asked  # behind the others
        return actions

    @staticmethod
    def _continue(client: Client, asked: deque[_Asked]) -> list[Action]:
        first = asked[0]
        try:
            next(first.answer)
        except StopIteration as done:
            value = done.value
        except KVDepotError as exc:
            value = exc
        else:
            return []
        asked.popleft()
        return [Reply(client.identity, first.number, value)]

    def stop(self) -> list[Action]:
        """Before shutdown: answer all."""
        actions: list[Action] = []
        while self._asked:
            actions += self.step()
        return actions
