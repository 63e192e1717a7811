"""Where an engine's server is, and which process starts it.

Called by start.py before a model is loaded, and by connector.py.

| `kvdepot.url`, or else `KVDEPOT_URL` | the server | started by |
|---|---|---|
| none | this user's, at the default endpoint | the first engine that finds none, unless `kvdepot.start` is `never` |
| an endpoint | the one there | somebody else |
| `embedded` (`kvdepot.url` alone) | the engine's own | the engine's first worker, whose child it is |

The engine runs without a server that is not there, and connects when it is (link.py); with `kvdepot.required`, it ends.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blake3 import blake3

from kvdepot.client.launch import Embedded, Shared
from kvdepot.config import default_url, home_url, url_in_environment
from kvdepot.errors import (
    ArenaError,
    Busy,
    DeadlineExceeded,
    Unavailable,
    UnknownClient,
    UnknownInstance,
    VersionMismatch,
)

if TYPE_CHECKING:
    from kvdepot.integrations.vllm.identity import Settings

__all__ = ["PASSING", "REQUIRED_S", "Place", "find_place"]

log = logging.getLogger(__name__)

REQUIRED_S = 8.0
"""How long an engine that must have a server waits for it."""
PASSING = (Unavailable, DeadlineExceeded, Busy, ArenaError, VersionMismatch, UnknownClient, UnknownInstance)
"""Errors of a server that is away, or that its next start may cure; all others tell what is wrong with this engine."""
_MOST_STARTS = 2
"""How often one process starts a shared server again."""


@dataclass
class Place:
    """Where the server of this engine is, and what this process does for it.

    engine: names this engine, equally in all its processes. server: the one that engines start. required: whether the
    engine must not run without one. error: why the server could not be started; empty if it could.
    """

    url: str
    key: str = ""
    required: bool = False
    engine: str = ""
    server: Shared | Embedded | None = None
    error: str = ""
    _starts_left: int = _MOST_STARTS

    def start_again(self) -> None:
        """Start the shared server once more, if it has ended before this engine was connected. Never blocks."""
        if isinstance(self.server, Shared) and self._starts_left > 0 and not self.server.is_running():
            self._starts_left -= 1
            _start(self)

    def fault(self) -> str:
        """Why the server that engines start does not run; empty if it runs, or if engines start none here."""
        if self.error or self.server is None or self.server.is_running():
            return self.error
        return self.server.failure()

    def close(self) -> None:
        """End the engine's own server, if this process has started it. Blocks 10 s at most."""
        if isinstance(self.server, Embedded):
            self.server.close()


def find_place(settings: Settings, engine_id: str, starts_own: bool = False) -> Place:
    """Where the server is, after starting it if that is this process's part. Never waits for it.

    engine_id: vLLM's, equal in all processes of an engine. starts_own: whether this process is the one of them that
    starts the engine's own server. Raises ConfigError for a `KVDEPOT_URL` that is no endpoint.
    """
    if settings.is_embedded:
        name = blake3(engine_id.encode()).hexdigest()[:16]
        folder = home_url().rpartition("/")[0]
        place = Place(f"{folder}/engine-{name}.sock", settings.key, settings.required, engine_id)
        if starts_own:
            _start_own(place, name)
        return place
    place = Place(settings.url or default_url(), settings.key, settings.required, engine_id)
    if not (settings.url or url_in_environment()) and settings.start == "auto":
        place.server = Shared(place.url)
        _start(place)
    return place


def _start(place: Place) -> None:
    assert isinstance(place.server, Shared)
    try:
        if place.server.start():
            log.info(
                "kvdepot: started `kvdepot serve` at %s for all engines of this user; its log: %s", place.url,
                place.server.log,
            )  # fmt: skip
        place.error = ""
    except Unavailable as exc:
        place.error = str(exc)


def _start_own(place: Place, name: str) -> None:
    try:
        place.server = Embedded(place.url, name)
    except Unavailable as exc:
        place.error = str(exc)
