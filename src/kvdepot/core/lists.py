"""Requests that list what is in memory: answered in steps, one request after the other.

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
from kvdepot.protocol.prefixes import LEAST_HASH, MOST_PREFIXES, SORTS

__all__ = ["Lists"]

_STEP = 2048
"""Families, or chunks, that one step examines, in less than a millisecond."""
_MOST = 8  # requests at a time
_ITEMS_OF_ONE = 128
"""Families, or chunks, that count as one more request against `max_rate`."""


@dataclass(slots=True, eq=False)
class _Asked:
    """A request that is being answered. `answer` pauses after each step, and returns the value of the reply."""

    client: Client
    number: bytes
    answer: Generator[None, None, object]


class Lists:
    """The lists that one depot is making."""

    def __init__(self, index: Index, tiering: Tiering, step: int = _STEP) -> None:
        """step: how many families or chunks one step examines."""
        self._index = index
        self._tiering = tiering
        self._step = step
        self._asked: deque[_Asked] = deque()

    def __repr__(self) -> str:
        return f"<Lists {len(self._asked)}>"

    def __bool__(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._asked)

    def cost(self, request: wire.Prefixes | wire.Inspect) -> int:
        """What a request counts as against `max_rate`."""
        match request:
            case wire.Prefixes():
                items = sum(len(each.families) for each in self._index.namespaces.all() if each.is_lead)
            case wire.Inspect():
                items = self._index.chunks if request.end else len(request.hashes) // HASH_BYTES
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
        if end and not LEAST_HASH <= len(end) <= HASH_BYTES:
            raise BadRequest(f"{len(end)} bytes of a hash were given; {LEAST_HASH} to {HASH_BYTES} are needed")
        answer = inspect(self._index, namespaces, request, self._tiering.names, wall, self._step)
        return self._begin(client, number, answer)

    def _named(self, client: Client, model: str) -> list[Namespace]:
        """The namespaces that a client may see, of models whose name has this prefix. Raises BadRequest or Busy."""
        check_names("", model)
        if len(self._asked) >= _MOST:
            raise Busy(f"{len(self._asked)} lists are being made: retry later")
        return [
            each
            for each in self._index.namespaces.all()
            if client.tenant in ("", each.tenant) and each.model.startswith(model)
        ]

    def _begin(self, client: Client, number: bytes, answer: Generator[None, None, object]) -> list[Action]:
        self._asked.append(_Asked(client, number, answer))
        return self.step()

    def step(self) -> list[Action]:
        """Continue with the first request; its reply, if it is complete."""
        while self._asked and self._asked[0].client.dead:
            self._asked.popleft()
        if not self._asked:
            return []
        first = self._asked[0]
        try:
            next(first.answer)
        except StopIteration as done:
            value = done.value
        except KVDepotError as exc:
            value = exc
        else:
            return []
        self._asked.popleft()
        return [Reply(first.client.identity, first.number, value)]

    def stop(self) -> list[Action]:
        """Before shutdown: answer all."""
        actions: list[Action] = []
        while self._asked:
            actions += self.step()
        return actions
