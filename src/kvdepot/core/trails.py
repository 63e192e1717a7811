"""The trails of the last requests, for `kvdepot why`: how each was decided, and why its lookup ended where it did.

core/lookups/, core/transfers.py and core/depot.py record what they have decided, on the deciding thread. Decides
nothing. Invariant: the numbers of requests and of their entries are bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvdepot.core.clients import Client
from kvdepot.core.departures import Departures
from kvdepot.core.index.chunk import state_of
from kvdepot.core.index.matching import Match
from kvdepot.core.index.namespaces import Namespaces
from kvdepot.core.lookups.search import Search
from kvdepot.core.usage import Usages
from kvdepot.core.verification import Verification
from kvdepot.errors import BadRequest, KVDepotError, UnknownRequest
from kvdepot.protocol import wire
from kvdepot.protocol.counters import Counters
from kvdepot.protocol.keys import HASH_BYTES
from kvdepot.protocol.model_names import key_of_model
from kvdepot.protocol.status import MOST_NAME
from kvdepot.protocol.trails import MOST_TRAILS, Trail, TrailLookup
from kvdepot.values import plural

_MOST_ENTRIES = 8
"""The most lookups, errors and other models of a trail, and the most ids in an error message."""
_MOST_ERROR = 200


class Trails:
    """The trails of one depot. tier_names: the names of the tiers, the nearest first."""

    def __init__(self, namespaces: Namespaces, tier_names: Sequence[str], departures: Departures) -> None:
        self.wall = 0  # seconds since 1970, set once a second
        self._namespaces = namespaces
        self._tier_names = tier_names
        self._trails: OrderedDict[tuple[str, str], Trail] = OrderedDict()  # by tenant and request
        self._departures = departures

    def _of(self, client: Client, request: str) -> Trail:
        key = client.tenant, request
        if key not in self._trails and len(self._trails) >= MOST_TRAILS:
            self._trails.popitem(last=False)
        return self._trails.setdefault(key, Trail(*key))

    def looked_up(self, search: Search, match: Match, chunk_tokens: int) -> None:
        client, lookup, tiers, names = search.client, search.request, search.tiers, self._tier_names
        end, key, gone_s = self._end(match, search)
        tops = match.pins[0].chunks if match.pins and match.namespaces[0].is_simple else []
        last = tops[0] if tops and tops[0].position else None  # the last chained chunk
        lookups = self._of(client, lookup.request).lookups
        lookups.append(
            TrailLookup(
                self.wall, client.engine_called, lookup.model, lookup.world_size, chunk_tokens, bool(lookup.salt),
                len(lookup.hashes) // HASH_BYTES, lookup.own, search.first, match.chunks,
                {names[number]: size for number, size in tiers.sizes.items()} if tiers is not None else {},
                [names[number] for number in tiers.owing | tiers.loading_tiers()] if tiers is not None else [],
                end, key.hex(), gone_s, None if last is None else last.children,
            )
        )  # fmt: skip
        if len(lookups) > _MOST_ENTRIES:
            del lookups[0]

    def _end(self, match: Match, search: Search) -> tuple[str, bytes, int | None]:
        """Why a match ended, the key of the first chunk behind it, and the seconds since this chunk left memory."""
        lookup = search.request
        key = lookup.hashes[match.chunks * HASH_BYTES : (match.chunks + 1) * HASH_BYTES]
        if not match.namespaces:
            known = self._namespaces.known.get((search.client.tenant, lookup.model, lookup.world_size), ())
            return "quarantine" if any(each.is_quarantined for each in known) else "model", key, None
        if match.chunks < search.first:
            return "room" if search.is_shortened else "leaving", key, None
        if not key:
            return "whole", b"", None
        for group in (each for first in match.namespaces for each in first.groups if not each.reach):
            if key not in group.chunks:
                why, left = self._departures.of(group, key)
                return why, key, None if left is None else max(0, self.wall - left)
            if (state := state_of(group.chunks[key])) != "ready":
                return state, key, None
        return "boundary", key, None

    def copied(self, client: Client, request: str, **shards: int) -> None:
        """Add numbers of a request's shards, by what became of them."""
        _add(self._of(client, request).shards, shards)

    def ended(self, client: Client, request: wire.EndSession) -> None:
        asked, trail = request.asked, self._trails.get((client.tenant, request.request))
        if trail is not None:
            found = {"needed": asked.tokens, "in its own cache": asked.own, "found here": asked.found}
            computed = {"computed as that was sooner": asked.computed, "compared": asked.compared}
            _add(trail.engine, {**found, "loaded": request.saved_tokens, **computed})
            _add(trail.shards, {"loaded": request.copied})

    def failed(self, client: Client, request: wire.Request, error: KVDepotError) -> None:
        """Record the error that answers a lookup, store, retrieve or end of requests."""
        if not isinstance(request, wire.Lookup | wire.Store | wire.Retrieve | wire.EndSession):
            return
        for part in request.shards[:_MOST_ENTRIES] if isinstance(request, wire.Store | wire.Retrieve) else [request]:
            if len(part.request) <= wire.MAX_REQUEST_ID:
                errors = self._of(client, part.request).errors
                errors.append(f"{type(request).__name__}: {error}"[:_MOST_ERROR])
                del errors[:-_MOST_ENTRIES]

    def find(self, tenant: str, request: str) -> Trail:
        """The trail of a request. request: its id or a unique prefix of it; empty: the last request whose lookup found
        nothing. tenant: whose requests are searched; empty: all. Raises UnknownRequest or BadRequest."""
        seen = [each for (owner, _), each in self._trails.items() if tenant in ("", owner)]
        found = [each for each in seen if each.request == request][-1:]
        found = found or [each for each in seen if each.request.startswith(request)]
        if not request:
            found = [each for each in seen if each.lookups and not each.lookups[-1].found][-1:]
        if not found:
            what = f"whose id begins with {request[:80]!r}" if request else "whose lookup found nothing"
            raise UnknownRequest(f"no request {what} among the {len(seen)} latest ones; {MOST_TRAILS} are kept")
        if len(found) > 1:
            names = ", ".join(each.request[:80] for each in found[:_MOST_ENTRIES])
            raise BadRequest(f"{len(found)} requests have ids that begin with {request[:80]!r}: {names}")
        return msgspec.structs.replace(found[0], others=self._others(found[0]) if found[0].lookups else [])

    def _others(self, trail: Trail) -> list[str]:
        """The tenant's models with chunks that have the last lookup's name, but another identity, ranks or chunk
        size."""
        asked, others = trail.lookups[-1], list[str]()
        own = key_of_model(asked.model)
        for first in self._namespaces.all():
            key = key_of_model(first.model)
            is_namesake = key == own or asked.model.removesuffix(own) == first.model.removesuffix(key) != ""
            differs = ["another identity"] * (key != own)
            differs += [plural(first.world_size, "rank")] * (first.world_size != asked.ranks)
            differs += [f"chunks of {first.chunk_tokens} tokens"] * (first.chunk_tokens != asked.chunk_tokens)
            if first.groups[0] is first and first.tenant == trail.tenant and is_namesake and first.chunks and differs:
                has = f"{first.model[:MOST_NAME]} has {plural(len(first.chunks), 'chunk')}"
                others.append(f"{has}: {', '.join(differs)}")
        return others[:_MOST_ENTRIES]


@dataclass(frozen=True, slots=True)
class Recorders:
    """The parts of the depot that only record what others decide."""

    counters: Counters
    usages: Usages
    trails: Trails
    verification: Verification


def _add(sums: dict[str, int], numbers: Mapping[str, int]) -> None:
    for name, number in numbers.items():
        if number:
            sums[name] = sums.get(name, 0) + number
