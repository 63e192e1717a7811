"""Prompt tokens that engines asked for, found and reused: of all, by tenant, and by tenant and model.

Called by core/depot.py and core/sessions.py on the deciding thread, once or twice per request, and by core/report.py.
Invariants: no number ever falls, and the entries of each list add up to the total. So an entry is kept until the server
ends; all others share the entry `OTHERS`, which is shown only to those who may see every tenant's.

Clients choose the names of models, so a model gets an entry only if the depot has a namespace of it, and a tenant gets
another entry only while it has fewer than are left: alone it can take half of them, and some are left for the next.

An engine knows only after a lookup how much of the prompt it has itself. vLLM's connector therefore reports what it
asked for and found beyond that when the prompt is complete (`wire.Asked`), and only then do its lookups count, also for
the upper bound. The lookups of clients that report nothing count at once, in full. What an engine reports as saved is
believed: it may come from a lookup that another run of the server answered. A false report makes the figures of its own
tenant and model and the totals wrong; it changes nothing about which chunks are kept or found.

Rejected: counting whole prompts, which no engine's own figures can be compared with, and which makes the share small
where engines have large caches; subtracting what an engine had after its lookup was counted, because counters must not
fall, and all readings in between are wrong; a series for whichever models are the largest now, because a model that
comes back would start anew.
"""

from __future__ import annotations

from collections import Counter
from typing import TypedDict

from kvdepot.core.clients import Client
from kvdepot.core.histograms import SAVED_S, TOKENS, Buckets
from kvdepot.core.infinite_cache import InfiniteCache, words
from kvdepot.protocol import wire
from kvdepot.protocol.keys import HASH_BYTES
from kvdepot.protocol.quotas import MOST_QUOTAS
from kvdepot.protocol.status import MOST_NAME, OTHERS, Saved, TokenCounts, Usage

__all__ = ["Usages"]

_MODELS = 100
"""Most pairs of tenant and model with an entry of their own; a tenant alone gets half of them."""


class _Sum:
    """Tokens."""

    __slots__ = ("asked", "found", "reused")

    def __init__(self) -> None:
        self.asked = self.found = self.reused = 0

    def add(self, asked: int, found: int, reused: int) -> None:
        self.asked += asked
        self.found += found
        self.reused += reused


class _Sums:
    """Tokens by tenant and model; the model is empty for all of a tenant."""

    def __init__(self, rest: tuple[str, str]) -> None:
        """rest: the name of the entry of all others."""
        self._rest = rest
        self._sums: dict[tuple[str, str] | None, _Sum] = {}  # None: those without an entry; no name is reserved
        self.entries: Counter[str] = Counter()  # by tenant

    def __contains__(self, name: tuple[str, str]) -> bool:
        return name in self._sums

    def add(self, name: tuple[str, str] | None, asked: int, found: int, reused: int) -> None:
        """name: None for those without an entry."""
        known = self._sums.get(name)
        if known is None:
            known = self._sums[name] = _Sum()
            if name is not None:
                self.entries[name[0]] += 1
        known.add(asked, found, reused)

    def listed(self, tenant: str) -> list[Usage]:
        """tenant: only its own; empty: all, and the rest."""
        shown: dict[tuple[str, str], _Sum] = {}
        for name, each in sorted(self._sums.items(), key=lambda item: item[0] is None):  # the rest last
            if not tenant or (name is not None and name[0] == tenant):
                # One entry per name, even if a tenant is called like the rest.
                shown.setdefault(name or self._rest, _Sum()).add(each.asked, each.found, each.reused)
        return [Usage(whose, each.asked, each.found, each.reused, model) for (whose, model), each in shown.items()]


class TokenFigures(TypedDict):
    """Fields of `status.Status`."""

    saved: Saved
    tokens: TokenCounts
    usage: list[Usage]
    model_usage: list[Usage]


class Usages:
    """The tokens of one depot."""

    def __init__(self, models: int = _MODELS, tenants: int = MOST_QUOTAS) -> None:
        """models, tenants: most entries of their own."""
        self.total = _Sum()
        self.hit_tokens = Buckets("hit_tokens", "tokens", TOKENS)  # of lookups that found any
        self.saved_s = Buckets("saved_seconds", "s", SAVED_S)  # of requests that saved any
        self._infinite_cache = InfiniteCache(0.0)
        self._most_models, self._most_tenants = models, tenants
        self._by_tenant = _Sums((OTHERS, ""))
        self._by_model = _Sums((OTHERS, OTHERS))

    def __repr__(self) -> str:
        tenants, models = self._by_tenant.entries.total(), self._by_model.entries.total()
        return f"<Usages of {tenants} tenants, {models} models>"

    @property
    def tokens(self) -> TokenCounts:
        """The tokens of all requests since the start, with the upper bound of what could have been found."""
        total, missed = self.total, self._infinite_cache.missed
        bound = None if missed is None else total.found + missed
        return TokenCounts(total.asked, total.found, total.reused, bound)

    def figures(self, tenant: str) -> TokenFigures:
        """The figures that a tenant's client may see; empty: all."""
        return TokenFigures(
            saved=Saved(self.total.reused, self.saved_s.sum),
            tokens=self.tokens,
            usage=self.by_tenant(tenant),
            model_usage=self.by_model(tenant),
        )

    def look_up(self, client: Client, lookup: wire.Lookup, found: int, chunk_tokens: int, is_known: bool) -> None:
        """Count a lookup together with what it found, in chunks, so that both fall into the same window.

        is_known: the depot has a namespace of its model.
        """
        asked, found = len(lookup.hashes) // HASH_BYTES * chunk_tokens, found * chunk_tokens
        if found:
            self.hit_tokens.count(found)
        chunks = words(lookup.hashes)
        if lookup.reports:
            client.unreported.add(lookup.request, chunks, chunk_tokens)
            asked = found = 0  # `report` counts them
        else:
            self._infinite_cache.count(chunks, chunk_tokens, found)
        self.count(client.tenant, lookup.model, asked, found, is_known=is_known)

    def report(self, client: Client, request: wire.EndSession) -> None:
        """Count what an engine reports about a request; the caller has checked its bounds."""
        asked = request.asked
        lookup = client.unreported.pop(request.request)
        if lookup is not None and asked.tokens:  # else it was never scheduled
            self._infinite_cache.count(*lookup, asked.own + asked.found)
        if asked.tokens or request.saved_tokens:
            model = request.model or client.model
            self.count(client.tenant, model, asked.tokens, asked.found, request.saved_tokens)
        if request.saved_s:
            self.saved_s.count(request.saved_s)

    def tick(self, now: float) -> None:
        """Called once a second."""
        self._infinite_cache.tick(now)

    def count(
        self, tenant: str, model: str, asked: int = 0, found: int = 0, reused: int = 0, is_known: bool = False
    ) -> None:
        """Add tokens of one request of a tenant and model; with 0 of all, the series of both begin at 0.

        is_known: the depot has a namespace of the model, so it may have an entry of its own from now on.
        """
        self.total.add(asked, found, reused)
        whole, pair = (tenant, ""), (tenant, model[:MOST_NAME])
        has_entry = whole in self._by_tenant or self._by_tenant.entries.total() < self._most_tenants
        self._by_tenant.add(whole if has_entry else None, asked, found, reused)
        has_entry = pair in self._by_model or (is_known and self._may_open(tenant))
        self._by_model.add(pair if has_entry else None, asked, found, reused)

    def _may_open(self, tenant: str) -> bool:
        """Whether another model of this tenant may have an entry."""
        entries = self._by_model.entries
        return entries[tenant] < self._most_models - entries.total()

    def by_tenant(self, tenant: str = "") -> list[Usage]:
        """One entry per tenant, in the order of first requests; the rest last. tenant: only its own; empty: all."""
        return self._by_tenant.listed(tenant)

    def by_model(self, tenant: str = "") -> list[Usage]:
        """One entry per tenant and model, in the order of first requests; the rest last. tenant: see `by_tenant`."""
        return self._by_model.listed(tenant)
