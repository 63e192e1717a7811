"""The settings of an engine's connector, where its server is, and which process starts it.

Called by start.py before a model is loaded, and by connector.py.

| `kvdepot.url`, or else `KVDEPOT_URL` | the server | started by |
|---|---|---|
| none | this user's, at the default endpoint | the first engine that finds none, unless `kvdepot.start` is `never` |
| an endpoint | the one there | others |
| `embedded` (`kvdepot.url` alone) | the engine's own | the engine's first worker, whose child it is |

The engine runs without a server that is not there, and connects when it is (link.py); with `kvdepot.required`, it ends.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

from blake3 import blake3

from kvdepot.client.launch import Embedded, Shared
from kvdepot.config import ONLY_IN_FILE, Config, default_url, home_url, url_in_environment
from kvdepot.errors import (
    ArenaError,
    Busy,
    ConfigError,
    DeadlineExceeded,
    Unavailable,
    UnknownClient,
    UnknownInstance,
    VersionMismatch,
)
from kvdepot.protocol.addresses import fault_of_endpoint
from kvdepot.protocol.wire import MAX_TOPIC
from kvdepot.values import suggestion

log = logging.getLogger(__name__)

_PREFIX = "kvdepot."
_EMBEDDED = "embedded"
"""The value in place of a URL with which the engine has a server of its own."""


@dataclass(frozen=True)
class ConnectorSettings:
    """Our keys of `kv_connector_extra_config`, without their prefix `kvdepot.`.

    - url, start, required: see the table above; an empty url stands for the default endpoint
    - key: this client's key file, if the server requires one; empty: the client's default (`KVDEPOT_KEY`)
    - save_decode: whether decoded chunks are stored, too: true, false, or auto, by which answers.py decides
    - weights_revision: a name for weights that their path does not identify
    - weights_run: a name for the run of a trainer whose weight versions this engine gets (weights.py); empty: none
    - boundary_chunks: how far apart prompts of models with sliding windows or states can be resumed (plan.py), in
      chunks; 0: the default
    - events_topic: the name under which routers know this engine (events.py); empty: none
    - trust: earned (other engines' chunks are loaded once some were compared with what this one computes, trust.py) or
      given
    - load_failure_policy: what vLLM does with a request whose load failed: recompute what is missing, or fail it
    """

    url: str = ""
    start: Literal["auto", "never"] = "auto"
    required: bool = False
    key: str = ""
    save_decode: Literal["auto", "on", "off"] = "auto"
    weights_revision: str = ""
    weights_run: str = ""
    boundary_chunks: int = 0
    events_topic: str = ""
    trust: Literal["earned", "given"] = "earned"
    load_failure_policy: Literal["recompute", "fail"] = "recompute"

    @property
    def is_embedded(self) -> bool:
        return self.url == _EMBEDDED


def read_settings(extra: dict[str, Any]) -> ConnectorSettings:
    """Our keys of kv_connector_extra_config. Raises ConfigError for unknown keys and values of a wrong type.

    vLLM itself reads none of a connector's keys, so all are ours except those with another connector's prefix, which
    may be left from it.
    """
    known = get_type_hints(ConnectorSettings)
    given: dict[str, Any] = {}
    for key, value in extra.items():
        prefix, dot, name = key.partition(".")
        if dot and prefix.lower() != "kvdepot":
            continue
        if prefix + dot != _PREFIX or name not in known:
            raise ConfigError(f"{key} is not a kvdepot setting; {_meant(key, value, list(known))}")
        if name == "save_decode" and isinstance(value, bool):
            value = "on" if value else "off"
        words = get_args(known[name])
        if words and value not in words:
            raise ConfigError(f"{key} is {value!r}, not one of {', '.join(words)}")
        if not words and type(value) is not known[name]:  # True is an int
            raise ConfigError(f"{key} is {value!r}, not of type {known[name].__name__}")
        given[name] = value
    if given.get("boundary_chunks", 0) < 0:
        raise ConfigError(f"{_PREFIX}boundary_chunks is {given['boundary_chunks']}: a number of chunks, or 0")
    settings = ConnectorSettings(**given)
    if len(settings.events_topic.encode()) > MAX_TOPIC:
        raise ConfigError(f"{_PREFIX}events_topic is longer than {MAX_TOPIC} bytes")
    if settings.url not in ("", _EMBEDDED) and (fault := fault_of_endpoint(settings.url)):
        raise ConfigError(f"{_PREFIX}url: {fault}, or {_EMBEDDED}")
    return settings


def foreign_settings(extra: Iterable[str]) -> list[str]:
    """The keys of kv_connector_extra_config that are another connector's, which `read_settings` ignores."""
    return [key for key in extra if "." in key and not key.lower().startswith(_PREFIX)]


def _meant(key: str, value: object, known: list[str]) -> str:
    """A hint for an error: the setting that an unknown key may mean, or the connector whose key it is."""
    name = re.sub(r"^kvdepot\W?_?", "", key.lower()).replace("-", "_")
    if name in Config.__struct_fields__ and name not in known:
        place = "its settings file" if name in ONLY_IN_FILE else f"KVDEPOT_{name.upper()}, where the server starts"
        return f"it is the server's: set it in {place}"
    if isinstance(value, dict):
        return f'write each setting with its prefix, such as "{_PREFIX}save_decode": "on"'
    close = suggestion(name, known)
    meant = f"did you mean {_PREFIX}{close}? " if close else ""
    return f"{meant}valid settings: {', '.join(_PREFIX + each for each in known)}"


# -- the server

REQUIRED_S = 8.0
"""An engine that must have a server waits this long for it."""
PASSING = (Unavailable, DeadlineExceeded, Busy, ArenaError, VersionMismatch, UnknownClient, UnknownInstance)
"""Errors of a server that is away, or that its next start may cure; all others say what is wrong with this engine."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""Seconds between starts of a server that crashes: doubled each time, until one has run for twice the longest."""


@dataclass
class ServerPlace:
    """Where the server of this engine is, and what this process does for it.

    engine: names this engine, equally in all its processes. is_logged: whether this process logs that no server is
    there: one of an engine's does. server: the one that engines start. required: whether the engine must not run
    without one. error: why the server could not be started; empty if it could.
    """

    url: str
    key: str = ""
    required: bool = False
    engine: str = ""
    is_logged: bool = True
    server: Shared | Embedded | None = None
    error: str = ""
    _pause_s: float = _FIRST_PAUSE_S
    _started_at: float = float("-inf")  # when the server was last started again

    def start_own(self) -> None:
        """Start the engine's own server, as its first worker does. Never waits for it."""
        try:
            self.server = Embedded(self.url, _own_name(self.engine))
        except Unavailable as exc:
            self.error = str(exc)

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


def find_place(settings: ConnectorSettings, engine_id: str) -> ServerPlace:
    """Where the server is, after starting it if engines share it. Never waits for it.

    engine_id: vLLM's, equal in all processes of an engine. Raises ConfigError for a `KVDEPOT_URL` that is no endpoint.
    """
    if settings.is_embedded:
        folder = home_url().rpartition("/")[0]
        url = f"{folder}/engine-{_own_name(engine_id)}.sock"
        return ServerPlace(url, settings.key, settings.required, engine_id)
    place = ServerPlace(settings.url or default_url(), settings.key, settings.required, engine_id)
    if settings.url or url_in_environment() or settings.start == "never":
        return place
    place.server = server = Shared(place.url)
    try:
        if not server.has_failed_for(engine_id) and server.start(engine_id):  # `ServerPlace.fault` says why it has
            told = "kvdepot: started `kvdepot serve` at %s for all engines of this user; its log: %s"
            log.info(told, place.url, server.log)
    except Unavailable as exc:
        place.error = str(exc)
    return place


def _own_name(engine_id: str) -> str:
    return blake3(engine_id.encode()).hexdigest()[:16]
