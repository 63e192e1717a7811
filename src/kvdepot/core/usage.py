"""Prompt tokens that engines asked for, found and reused, and shards that were compared: by tenant, and by model.

Called by core/depot.py, core/lookups/ and core/verification.py on the deciding thread, and by core/report.py.
Invariants: no number ever falls, and the entries of each list add up to the total. So an entry is kept until the server
ends. Tenants and models without an entry share the entry `OTHERS`, which only clients that may see every tenant get.

Clients choose the names of models, so a model gets an entry only if the depot has a namespace of it. A tenant gets
another entry only while it has fewer entries than are free. So one tenant can take half of them, and others still find
some. The other models of a tenant share an entry, and so do the tenants above the limit.

An engine knows only after a lookup how much of the prompt it has itself. vLLM's connector therefore reports what it
asked for and found beyond that when the prompt is complete (`wire.Asked`), and only then do its lookups count. The
lookups of clients that report nothing count at once, without the chunks that they say they have (`Lookup.own`). A
false report makes these figures wrong; it changes nothing about which chunks are kept or found.
"""

from __future__ import annotations

from kvdepot.core.clients import Client
from kvdepot.core.histograms import SAVED_S, TOKENS, Buckets
from kvdepot.protocol import wire
from kvdepot.protocol.figures import figures
from kvdepot.protocol.keys import HASH_BYTES
from kvdepot.protocol.quotas import MOST_QUOTAS
from kvdepot.protocol.status import MOST_NAME, OTHERS, Saved, Status, TokenCounts, Usage

_MODELS = 100
"""The most pairs of tenant and model with an entry of their own; one tenant gets at most half of them."""


class Usages:
    def __init__(self, models: int = _MODELS, tenants: int = MOST_QUOTAS) -> None:
        """models, tenants: the most models and tenants with an entry of their own."""
        self.total = Usage("")
        self.hit_tokens = Buckets("hit_tokens", "tokens", TOKENS)  # of lookups that found tokens
        self.saved_s = Buckets("saved_seconds", "s", SAVED_S)  # of requests that saved time
        self._most_models, self._most_tenants = models, tenants
        self._entries: dict[tuple[str | None, str | None], Usage] = {}  # by tenant and model; None: the rest

    @property
    def tokens(self) -> TokenCounts:
        return TokenCounts(self.total.asked_tokens, self.total.found_tokens, self.total.reused_tokens)

    def fill(self, status: Status, tenant: str) -> None:
        """Fill in the tokens that a tenant's client may see; empty: those of all tenants."""
        status.saved = Saved(self.total.reused_tokens, self.saved_s.sum)
        status.tokens = self.tokens
        status.usage = self.by_tenant(tenant)
        status.model_usage = self.by_model(tenant)

    def look_up(self, client: Client, lookup: wire.Lookup, found: int, chunk_tokens: int, is_known: bool) -> None:
        """Count a lookup and the `found` chunks together, so that both fall into the same window of time.

        is_known: the depot has a namespace of its model.
        """
        own, found = lookup.own * chunk_tokens, found * chunk_tokens
        asked = len(lookup.hashes) // HASH_BYTES * chunk_tokens - own
        if found:
            self.hit_tokens.count(found)
        if lookup.reports:
            asked = own = found = 0  # `report` counts them
        self.count(client.tenant, lookup.model, asked, max(0, found - own), is_known=is_known)

    def report(self, client: Client, request: wire.EndSession) -> None:
        """Count what an engine reports about a request; the caller has checked its bounds."""
        asked = request.asked
        if asked.tokens or request.saved_tokens:
            model = request.model or client.model
            self.count(client.tenant, model, asked.tokens, asked.found, request.saved_tokens)
        if request.saved_s:
            self.saved_s.count(request.saved_s)
        entry = self._entries.get((client.tenant, (request.model or client.model)[:MOST_NAME]))
        if entry is not None and request.answers is not None:
            entry.answers = request.answers

    def count(
        self, tenant: str, model: str, asked: int = 0, found: int = 0, reused: int = 0, is_known: bool = False
    ) -> Usage:
        """Add the tokens of one request, and return the entry of its tenant and model; with 0 tokens, its series begin.

        is_known: the depot has a namespace of the model, so it may have an entry of its own from now on.
        """
        key: tuple[str | None, str | None] = tenant, model[:MOST_NAME]
        entry = self._entries.get(key)
        if entry is None:
            models = sum(model is not None for _, model in self._entries)
            own = [name for _, name in filter(lambda key: key[0] == tenant, self._entries)]
            if not own and len({name for name, _ in self._entries} - {None}) >= self._most_tenants:
                key = None, None
            elif not is_known or len(own) - (None in own) >= self._most_models - models:
                key = tenant, None
            entry = self._entries.setdefault(key, Usage(""))
        for each in (self.total, entry):
            each.asked_tokens += asked
            each.found_tokens += found
            each.reused_tokens += reused
        return entry

    def compare(self, tenant: str, model: str, compared: int, differing: int) -> None:
        """Count shards of a model that were compared with KV that an engine computed."""
        entry = self.count(tenant, model, is_known=True)
        entry.compared_shards += compared
        entry.differing_shards += differing

    def by_tenant(self, tenant: str = "") -> list[Usage]:
        """One entry per tenant, in the order of first requests, the rest last. tenant: only its entry; empty: all."""
        shown = [(name, each) for (name, _), each in self._entries.items() if not tenant or name == tenant]
        shown.sort(key=lambda item: item[0] is None)
        return _summed([(OTHERS if name is None else name, "", each) for name, each in shown])

    def by_model(self, tenant: str = "") -> list[Usage]:
        """One entry per tenant and model, in the order of first requests, the rest last. tenant: see `by_tenant`."""
        named = [
            (name, model, each)
            for (name, model), each in self._entries.items()
            if name is not None and model is not None and tenant in ("", name)
        ]
        rest = [(OTHERS, OTHERS, each) for (_, model), each in self._entries.items() if model is None and not tenant]
        return _summed([*named, *rest])


def _summed(entries: list[tuple[str, str, Usage]]) -> list[Usage]:
    """One entry per tenant and model, also if a tenant's name is `OTHERS`."""
    shown: dict[tuple[str, str], Usage] = {}
    for tenant, model, each in entries:
        entry = shown.setdefault((tenant, model), Usage(tenant, model=model))
        for figure in figures(Usage):
            setattr(entry, figure.path, figure.of(entry) + figure.of(each))
        entry.answers = each.answers if model else None
    return list(shown.values())
