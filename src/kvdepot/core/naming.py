"""Gives each model one name if engines use several: the name that an engine has used first.

Called by core/depot.py before it decides a request whose model's name is not the client's last one, so that no other
part sees a second name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from kvdepot.core.index.chunk import Namespace
from kvdepot.protocol import wire
from kvdepot.protocol.model_names import key_of_model

_MOST = 1 << 12
"""The most names of a tenant that are kept. Engines that name further models differently share no KV of them."""


class Naming:
    """The names of the models of one depot, by tenant: no tenant sees another's names."""

    def __init__(self, namespaces: Callable[[], Iterable[Namespace]]) -> None:
        """namespaces: returns all namespaces, also those that a restart has recovered."""
        self._namespaces = namespaces
        self._names: dict[str, dict[str, str]] = {}  # by tenant, and by the name in a request

    def rename(self, request: wire.Request, tenant: str) -> wire.Request:
        """The same request with the server's name of each model."""
        keeps = isinstance(request, wire.Register | wire.Lookup)  # other requests may come from people, not engines
        match request:
            case wire.Store(shards=shards) | wire.Retrieve(shards=shards) | wire.Compare(shards=shards):
                names = [self._name(tenant, each.model, keeps) for each in shards]
                if all(each.model == name for each, name in zip(shards, names, strict=True)):
                    return request
                renamed = [msgspec.structs.replace(each, model=name) for each, name in zip(shards, names, strict=True)]
                return msgspec.structs.replace(request, shards=renamed)
        model = getattr(request, "model", "")
        name = self._name(tenant, model, keeps)
        return request if name == model else msgspec.structs.replace(request, model=name)

    def _name(self, tenant: str, model: str, keeps: bool) -> str:
        names = self._names.get(tenant, {})
        known = names.get(model)
        if known is not None:
            return known
        key = key_of_model(model)
        if key == model or len(model) > wire.MAX_REQUEST_ID:
            return model
        first = names.get(key) or next(
            (each.model for each in self._namespaces() if each.tenant == tenant and key_of_model(each.model) == key),
            model,
        )
        if keeps and len(names) < _MOST:
            names = self._names.setdefault(tenant, {})
            names[key] = names[model] = first
        return first
