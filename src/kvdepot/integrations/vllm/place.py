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
import time
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
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""Between two starts of a server that crashes: doubled each time, until it has run for twice the longest."""


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
    _pause_s: float = _FIRST_PAUSE_S
    _started_at: float = float("-inf")  # when it was last started again

    def start_again(self) -> bool:
        """Start the server that engines start again if it has crashed; whether it was started. Never waits for it.

        Called several times a second, while it runs, too.
        """
        if self.server is None or not self.server.has_crashed():
            return False
        age_s = time.monotonic() - self._started_at
        if age_s < self._pause_s:
            return False
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S) if age_s < 2 * _LONGEST_PAUSE_S else _FIRST_PAUSE_S
        self._started_at = time.monotonic()
        try:
            return self.server.start()
        except Unavailable as exc:
            self.error = str(exc)
            return False

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
        if not place.server.has_failed_for(engine_id):  # otherwise `Place.fault` says why
            _start(place)
    return place


def _start(place: Place) -> None:
    assert isinstance(place.server, Shared)
    try:
        if place.server.start(place.engine):
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
