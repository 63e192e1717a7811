"""Prompt tokens that engines asked for, found and reused: of all, by tenant, and by tenant and model.

Called by core/depot.py and core/sessions.py on the deciding thread, once or twice per request. Invariants: no number
ever falls, and the entries of each list add up to the total. So whoever has an entry keeps it until the server ends;
once there are as many as are listed, all further ones share the entry `OTHERS`.

An engine knows only after a lookup how much of the prompt it has itself. vLLM's connector therefore reports what it
asked for and found beyond that when the prompt is complete (`wire.Asked`), and its lookups are not counted here. The
lookups of clients that report nothing count in full.

Rejected: counting whole prompts, which no engine's own figures can be compared with, and which makes the share small
where engines have large caches; subtracting what an engine had after its lookup was counted, because counters must not
fall; a series for whichever models are the largest now, because a model that comes back would start anew.
"""

from __future__ import annotations

from kvdepot.core.histograms import SAVED_S, TOKENS, Buckets
from kvdepot.protocol.quotas import MOST_QUOTAS
from kvdepot.protocol.status import MOST_NAME, OTHERS, Usage

__all__ = ["Usages"]

_MODELS = 50
"""Most pairs of tenant and model with an entry of their own."""


class _Sum:
    """Tokens."""

    __slots__ = ("asked", "found", "reused")

    def __init__(self) -> None:
        self.asked = self.found = self.reused = 0

    def add(self, asked: int, found: int, reused: int) -> None:
        self.asked += asked
        self.found += found
        self.reused += reused


class Usages:
    """The tokens of one depot."""

    def __init__(self, models: int = _MODELS, tenants: int = MOST_QUOTAS) -> None:
        """models, tenants: most entries of their own."""
        self.total = _Sum()
        self.hit_tokens = Buckets("hit_tokens", "tokens", TOKENS)  # of lookups that found any
        self.saved_s = Buckets("saved_seconds", "s", SAVED_S)  # of requests that saved any
        self._most_models, self._most_tenants = models, tenants
        self._by_tenant: dict[str, _Sum] = {}
        self._by_model: dict[tuple[str, str], _Sum] = {}

    def __repr__(self) -> str:
        return f"<Usages of {len(self._by_tenant)} tenants, {len(self._by_model)} models>"

    def count(self, tenant: str, model: str, asked: int = 0, found: int = 0, reused: int = 0) -> None:
        """Add tokens of one request of a tenant and model; with 0 of all, the series of both begin at 0."""
        self.total.add(asked, found, reused)
        of_tenant = self._by_tenant.get(tenant)
        if of_tenant is None:
            name = tenant if len(self._by_tenant) < self._most_tenants else OTHERS
            of_tenant = self._by_tenant.setdefault(name, _Sum())
        of_tenant.add(asked, found, reused)
        pair = tenant, model[:MOST_NAME]
        of_model = self._by_model.get(pair)
        if of_model is None:
            is_room = len(self._by_model) < self._most_models
            of_model = self._by_model.setdefault(pair if is_room else (OTHERS, OTHERS), _Sum())
        of_model.add(asked, found, reused)

    def by_tenant(self, tenant: str = "") -> list[Usage]:
        """One entry per tenant, in the order of their first requests. tenant: only its own; empty: all."""
        return [
            Usage(name, each.asked, each.found, each.reused)
            for name, each in self._by_tenant.items()
            if tenant in ("", name)
        ]

    def by_model(self, tenant: str = "") -> list[Usage]:
        """One entry per tenant and model, in the order of their first requests. tenant: see `by_tenant`."""
        return [
            Usage(name, each.asked, each.found, each.reused, model)
            for (name, model), each in self._by_model.items()
            if tenant in ("", name)
        ]
