"""The connected engines: notes in log and journal when one comes or goes, and fills the status.

An engine has a client per process: its scheduler and its workers. Clients that name the same engine in their `Hello`
are one engine; a client that names none is an engine by itself. It connects with the first registration or lookup of a
client, so commands, probes and web pages are no engines. Called by core/depot.py on the deciding thread.
"""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from kvdepot.core.clients import Client
from kvdepot.protocol.status import Engine, Status

log = logging.getLogger(__name__)

_SHOWN = 80
"""Most characters of a model's name in log and journal."""
_LISTED = 64
"""The most engines in a status: those with the latest requests."""
_MODELS = 4
"""Most models listed for one engine."""
_FAULT = 200
"""The most characters of the reason why an engine cannot copy, in its entry."""
_SHORT = 100
"""Most characters of a model's name in an engine's entry."""


class Engines:
    def __init__(self, note: Callable[[str, str], None]) -> None:
        self._note = note
        self._clients: Counter[tuple[str, str | bytes]] = Counter()  # by engine
        self._died: set[tuple[str, str | bytes]] = set()  # engines with a client that did not close its connection

    def joined(self, client: Client) -> None:
        """Note a client's first registration or lookup, which shows that it belongs to an engine."""
        client.is_seen = True
        key = _key(client)
        self._clients[key] += 1
        if self._clients[key] == 1:
            self._announce(client, f"connected: {client.model[:_SHOWN] or 'a model'}")

    def left(self, client: Client, has_left: bool) -> None:
        """Note that a client is gone, of an engine or not. has_left: it closed its connection."""
        if not client.is_seen:
            return
        key = _key(client)
        self._clients[key] -= 1
        if not has_left:
            self._died.add(key)
        if not self._clients[key]:
            del self._clients[key]
            self._announce(client, "died" if key in self._died else "is gone")
            self._died.discard(key)

    def _announce(self, client: Client, what: str) -> None:
        name = client.engine_called
        log.info("engine %s %s", name, what)
        self._note("engine", f"engine {name} {what}")


def _key(client: Client) -> tuple[str, str | bytes]:
    return client.user, client.engine or client.identity


def fill_engines(status: Status, clients: Collection[Client], tenant: str, now: float) -> None:
    """Fill in the engines that a tenant may see; empty: all."""
    engines = [each for each in clients if (each.instances or each.model) and tenant in ("", each.tenant)]
    status.engine_count = len(engines)
    status.divided_engines = _divided(engines)
    faulty = [each for each in engines if any(part.fault for part in each.instances.values())]
    status.faulty_engines = len({_key(each) for each in faulty})
    status.kv_event_topics = len({part.topic for each in engines for part in each.instances.values()} - {""})
    latest = heapq.nlargest(_LISTED, engines, key=lambda client: client.heard)
    status.engines = [_status(each, now) for each in latest]


def _divided(clients: Iterable[Client]) -> int:
    """The number of engines whose processes name different models, so that one never finds what another stores."""
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
        tenant=client.tenant,
        sessions=len(client.sessions),
        pinned_chunks=client.pins,
        queued=len(client.operations),
        engine=client.engine_called,
        host=client.host[:_SHORT],
        pid=client.pid,
        fault=next((each.fault for each in client.instances.values() if each.fault), "")[:_FAULT],
    )
