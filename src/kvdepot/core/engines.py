"""Which engines are connected: in log and journal when an engine comes and when it is gone, and in the status.

An engine has a client per process: its scheduler and its workers. Those that name the same engine in their `Hello` are
one engine; a client that names none is one by itself. It comes with the first registration or lookup of its first
client, so commands, probes and web pages are no engines. Called by core/depot.py on the deciding thread.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TypedDict

from kvdepot.core.clients import Client
from kvdepot.protocol.status import Engine

log = logging.getLogger(__name__)

_SHOWN = 80
"""Most characters of a model's name in log and journal."""
_LISTED = 64
"""Most engines in a status (those with the latest requests)."""
_MODELS = 4
"""Most models listed for one engine."""
_SHORT = 100
"""Most characters of a model's name in an engine's entry."""


@dataclass(slots=True)
class _Engine:
    clients: int = 0
    has_died: bool = False  # a client of it ended without closing its connection


class Engines:
    """The engines of one depot."""

    def __init__(self, note: Callable[[str, str], None]) -> None:
        """note: adds an event to the journal."""
        self._note = note
        self._by_name: dict[tuple[str, str | bytes], _Engine] = {}
        self._by_client: dict[bytes, _Engine] = {}

    def __repr__(self) -> str:
        return f"<Engines {len(self._by_name)} with {len(self._by_client)} clients>"

    def joined(self, client: Client) -> None:
        """A client has sent its first registration or lookup: it belongs to an engine."""
        key = _key(client)
        if key not in self._by_name:
            self._by_name[key] = _Engine()
            self._announce(client, f"connected: {client.model[:_SHOWN] or 'a model'}")
        engine = self._by_client[client.identity] = self._by_name[key]
        engine.clients += 1

    def left(self, client: Client, has_left: bool) -> None:
        """A client is gone, of an engine or not. has_left: it closed its connection."""
        engine = self._by_client.pop(client.identity, None)
        if engine is None:
            return
        engine.clients -= 1
        engine.has_died |= not has_left
        if not engine.clients:
            del self._by_name[_key(client)]
            self._announce(client, "died" if engine.has_died else "is gone")

    def _announce(self, client: Client, what: str) -> None:
        name = client.engine_called
        log.info("engine %s %s", name, what)
        self._note("engine", f"engine {name} {what}")


def _key(client: Client) -> tuple[str, str | bytes]:
    return client.user, client.engine or client.identity


class ClientFigures(TypedDict):
    """Fields of `status.Status`."""

    clients: int
    sessions: int
    instances: int
    engine_count: int
    divided_engines: int
    kv_event_topics: int
    engines: list[Engine]


def client_figures(clients: Collection[Client], tenant: str, now: float) -> ClientFigures:
    """All clients counted, and the engines that a tenant may see; empty: all."""
    engines = [each for each in clients if (each.instances or each.model) and tenant in ("", each.tenant)]
    return ClientFigures(
        clients=len(clients),
        sessions=sum(len(client.sessions) for client in clients),
        instances=sum(len(client.instances) for client in clients),
        engine_count=len(engines),
        divided_engines=_divided(engines),
        kv_event_topics=len({part.topic for each in engines for part in each.instances.values()} - {""}),
        engines=[_status(each, now) for each in heapq.nlargest(_LISTED, engines, key=lambda client: client.heard)],
    )


def _divided(clients: Iterable[Client]) -> int:
    """The number of engines whose processes name different models: what one stores, another never finds."""
    models: dict[tuple[str, str], set[str]] = {}
    for client in clients:
        if client.engine and client.model:
            models.setdefault((client.user, client.engine), set()).add(client.model)
    return sum(len(each) > 1 for each in models.values())


def _status(client: Client, now: float) -> Engine:
    parts = [part for each in client.instances.values() for part in each.namespaces]
    models = {model[:_SHORT] for model, *_ in parts} | ({client.model[:_SHORT]} if client.model else set())
    return Engine(
        id=client.called,
        since_s=now - client.came,
        idle_s=now - client.heard,
        models=sorted(models)[:_MODELS],
        ranks=sorted({rank for _, _, rank, _ in parts}),
        device=next((each.layout.device for each in client.instances.values() if each.layout.device), ""),
        tenant=client.tenant,
        sessions=len(client.sessions),
        pinned_chunks=client.pins,
        queued=client.queued,
        engine=client.engine_called,
        host=client.host[:_SHORT],
        pid=client.pid,
    )
