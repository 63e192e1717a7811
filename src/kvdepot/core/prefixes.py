"""Handles Prefixes: which prompts are in memory, from the counts that the index keeps for each prefix family.

Called by core/depot.py on the deciding thread, which serves other requests between steps. No I/O or clock. Changes
nothing; an answer mixes what was there in its steps. Invariant: each request is answered once, or its client has died.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from kvdepot.core.actions import Action, Reply
from kvdepot.core.admission import check_names
from kvdepot.core.clients import Client
from kvdepot.core.index.chunk import Chunk, Namespace
from kvdepot.core.index.families import Family, followers, shared_by
from kvdepot.core.index.index import Index
from kvdepot.errors import BadRequest, Busy
from kvdepot.protocol import wire
from kvdepot.protocol.prefixes import MOST_PREFIXES, SORTS, Prefix
from kvdepot.protocol.status import MOST_NAME

__all__ = ["PrefixRequests"]

_STEP = 2048
"""Families, or chunks, that one step examines, in less than a millisecond."""
_MOST = 8  # requests at a time
_FAMILIES_OF_ONE = 128
"""Families that count as one more request against `max_rate`."""


@dataclass(slots=True, eq=False)
class _Asked:
    """A request that is being answered. `answer` yields None after each step, and the answer last."""

    client: Client
    number: bytes
    answer: Iterator[list[Prefix] | None]


class PrefixRequests:
    """The requests of one depot, one after the other."""

    def __init__(self, index: Index, step: int = _STEP) -> None:
        """step: how many families or chunks one step examines."""
        self._index = index
        self._step = step
        self._asked: deque[_Asked] = deque()

    def __repr__(self) -> str:
        return f"<PrefixRequests {len(self._asked)}>"

    def __bool__(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._asked)

    @property
    def cost(self) -> int:
        """What one request counts as against `max_rate`."""
        families = sum(len(each.families) for each in self._index.namespaces.all() if each.is_lead)
        return 4 + families // _FAMILIES_OF_ONE

    def ask(self, client: Client, number: bytes, request: wire.Prefixes, wall: int) -> list[Action]:
        """Answer with the families that the client may see. wall: seconds since 1970. Raises BadRequest or Busy."""
        check_names("", request.model)
        if request.sort not in SORTS:
            raise BadRequest(f"sort is {request.sort[:80]!r}, not one of {', '.join(SORTS)}")
        if not 1 <= request.most <= MOST_PREFIXES:
            raise BadRequest(f"most is {request.most}, not between 1 and {MOST_PREFIXES}")
        if len(self._asked) >= _MOST:
            raise Busy(f"{len(self._asked)} requests for prefixes are in progress: retry later")
        namespaces = [
            each
            for each in self._index.namespaces.all()
            if each.is_lead and client.tenant in ("", each.tenant) and each.model.startswith(request.model)
        ]
        self._asked.append(_Asked(client, number, self._answer(namespaces, request, wall)))
        return self.step()

    def step(self) -> list[Action]:
        """Continue with the first request; its reply, if it is complete."""
        while self._asked and self._asked[0].client.dead:
            self._asked.popleft()
        if not self._asked:
            return []
        first = self._asked[0]
        found = next(first.answer)
        if found is None:
            return []
        self._asked.popleft()
        return [Reply(first.client.identity, first.number, found)]

    def stop(self) -> list[Action]:
        """Before shutdown: answer all."""
        actions: list[Action] = []
        while self._asked:
            actions += self.step()
        return actions

    def _answer(self, namespaces: list[Namespace], request: wire.Prefixes, wall: int) -> Iterator[list[Prefix] | None]:
        best: list[tuple[int, int, Namespace, Family]] = []  # a heap; the second number orders equals
        serial = 0
        for namespace in namespaces:
            families = list(namespace.families.values())  # some ten milliseconds for a million
            for start in range(0, len(families), self._step):
                for family in families[start : start + self._step]:
                    serial -= 1
                    item = _rank(namespace, family, request.sort), serial, namespace, family
                    if len(best) < request.most:
                        heapq.heappush(best, item)
                    elif item > best[0]:
                        heapq.heapreplace(best, item)
                yield None
        best.sort(reverse=True)
        shared: dict[int, Chunk] = {}  # by id() of a family
        for _, _, namespace, family in best:
            yield from self._share(family, namespace.chunks.get(family.last), shared)
        yield from self._search([item[2:] for item in best if id(item[3]) not in shared], shared)
        answer = []
        for _, _, namespace, family in best:
            prefix = self._prefix(namespace, family, shared.get(id(family)), wall)
            if prefix is not None:
                answer.append(prefix)
        yield answer

    def _share(self, family: Family, begin: Chunk | None, shared: dict[int, Chunk]) -> Iterator[None]:
        """Note the last chunk that all of a family share, if it can be found from the chunk `begin`."""
        found = yield from shared_by(begin)
        yield None
        if found is not None and found.family is family:
            shared[id(family)] = found

    def _search(self, lost: list[tuple[Namespace, Family]], shared: dict[int, Chunk]) -> Iterator[None]:
        """The same for families whose newest chunk has gone: look for an end of their chains among all chunks."""
        wanted = {id(family): namespace for namespace, family in lost}
        for namespace in dict.fromkeys(wanted.values()):
            chunks = list(namespace.chunks.values())
            for start in range(0, len(chunks), self._step):
                for chunk in chunks[start : start + self._step]:
                    family = chunk.family
                    if family is None or id(family) not in wanted or id(family) in shared or followers(chunk):
                        continue
                    yield from self._share(family, chunk, shared)
                    if id(family) in shared:
                        family.last = chunk.key
                yield None
                if all(each in shared for each in wanted):
                    return

    def _prefix(self, namespace: Namespace, family: Family, shared: Chunk | None, wall: int) -> Prefix | None:
        """None if no lookup can find any of the family any more."""
        first = namespace.chunks.get(family.key)
        if first is None or shared is None or self._index.is_hidden(first):
            return None
        tokens = namespace.chunk_tokens
        return Prefix(
            tenant=namespace.tenant,
            model=namespace.model[:MOST_NAME],
            hash=shared.key.hex(),
            shared_tokens=shared.position * tokens,
            tokens=family.chunks * tokens,
            prompts=family.ends,
            bytes=family.bytes,
            hits=family.hits,
            hit_tokens=family.hit_chunks * tokens,
            age_s=float(max(0, wall - first.born)) if first.born else 0.0,
            idle_s=float(max(0, wall - (family.used or first.born or wall))),
        )


def _rank(namespace: Namespace, family: Family, sort: str) -> int:
    """What a family is sorted by, the highest first."""
    match sort:
        case "bytes":
            return family.bytes
        case "tokens":
            return family.chunks * namespace.chunk_tokens
        case "idle":
            return -family.used
    return family.hits
