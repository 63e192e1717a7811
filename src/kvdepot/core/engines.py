"""Which engines are connected: one line in the log and the journal when an engine comes, and one when it is gone.

An engine has a client per process: its scheduler and its workers. Those that name the same engine in their `Hello` are
one engine; a client that names none is one by itself. It comes with the first registration or lookup of its first
client, so commands, probes and web pages are no engines. Called by core/depot.py on the deciding thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvdepot.core.clients import Client

__all__ = ["Engines"]

log = logging.getLogger(__name__)

_SHOWN = 80
"""Most characters of a model's name in log and journal."""


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

    def see(self, client: Client) -> None:
        """An engine's client has sent a request. Called for each."""
        if client.identity in self._by_client:
            return
        key = _key(client)
        if key not in self._by_name:
            self._by_name[key] = _Engine()
            self._tell(client, f"connected: {client.model[:_SHOWN] or 'a model'}")
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
            self._tell(client, "died" if engine.has_died else "is gone")

    def _tell(self, client: Client, what: str) -> None:
        name = client.engine_called
        log.info("engine %s %s", name, what)
        self._note("engine", f"engine {name} {what}")


def _key(client: Client) -> tuple[str, str | bytes]:
    return client.user, client.engine or client.identity
