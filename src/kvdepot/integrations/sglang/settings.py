"""The settings of SGLang's `--hicache-storage-backend-extra-config`, and the server that they mean."""

from __future__ import annotations

import time
from dataclasses import dataclass
from difflib import get_close_matches
from typing import get_type_hints

from kvdepot.client.launch import Shared
from kvdepot.config import default_url, url_in_environment
from kvdepot.errors import ConfigError, Unavailable
from kvdepot.protocol.addresses import fault_of_endpoint

_PREFIX = "kvdepot."
_OF_SGLANG = {
    "backend_name", "module_path", "class_name", "interface_v1", "allocator", "prefetch_threshold",
    "prefetch_timeout_base", "prefetch_timeout_per_ki_token", "hicache_storage_pass_prefix_keys", "tp_lcm_size",
    "file_storage_path",
}  # fmt: skip
"""Keys that SGLang itself reads or adds."""
_PAUSE_S = 10.0
"""Seconds between two starts of a server that crashes."""


@dataclass(frozen=True)
class HiCacheSettings:
    """Our keys of the extra config, without their prefix `kvdepot.`.

    - url: the server; empty: KVDEPOT_URL, or else the default endpoint
    - start: whether this engine starts a server at the default endpoint if there is none: auto or never
    - required: whether the engine must not start without a server
    - key: this client's key file, if the server requires one
    - weights_revision: a name for weights that their files do not identify
    """

    url: str = ""
    start: str = "auto"
    required: bool = False
    key: str = ""
    weights_revision: str = ""


def read_settings(extra: object) -> HiCacheSettings:
    """Our keys of the extra config. Raises ConfigError for missing or unknown keys and values of a wrong type."""
    if not isinstance(extra, dict):
        raise ConfigError(f"--hicache-storage-backend-extra-config must be a JSON object, not {extra!r:.80}")
    if not extra.get("interface_v1"):
        raise ConfigError(
            'add "interface_v1": 1 to --hicache-storage-backend-extra-config, given in the command itself and not as a '
            "file: SGLang would otherwise copy each page by itself"
        )
    known, given = get_type_hints(HiCacheSettings), {}
    for key, value in extra.items():
        name = key.removeprefix(_PREFIX)
        if key in _OF_SGLANG:
            continue
        if name not in known or not key.startswith(_PREFIX):
            close = get_close_matches(name, known, n=1)
            meant = f"did you mean {_PREFIX}{close[0]}? " if close else ""
            valid = ", ".join(_PREFIX + each for each in known)
            raise ConfigError(f"{key} is not a kvdepot setting; {meant}valid settings: {valid}")
        if type(value) is not known[name]:  # True is an int
            raise ConfigError(f"{key} is {value!r:.80}, not of type {known[name].__name__}")
        given[name] = value
    settings = HiCacheSettings(**given)
    if settings.url and (fault := fault_of_endpoint(settings.url)):
        raise ConfigError(f"{_PREFIX}url: {fault}")
    if settings.start not in ("auto", "never"):
        raise ConfigError(f"{_PREFIX}start is {settings.start!r}, not one of auto, never")
    return settings


class ServerStarter:
    """Starts the server that engines of this user share, where the settings allow it, also after a crash."""

    def __init__(self, settings: HiCacheSettings, engine: str) -> None:
        """engine: names the engine, equally in all its processes."""
        self.url = settings.url or default_url()
        may_start = settings.start == "auto" and not (settings.url or url_in_environment())
        self._server = Shared(self.url) if may_start else None
        self._engine = engine
        self._started_at = float("-inf")

    def start(self) -> None:
        """Start the server unless it runs; never waits for it. Raises Unavailable."""
        if self._server is not None and not self._server.has_failed_for(self._engine):
            self._started_at = time.monotonic()
            self._server.start(self._engine)

    def start_again(self) -> None:
        """Start the server if it has crashed. Never waits or raises."""
        if self._server is None or time.monotonic() < self._started_at + _PAUSE_S or not self._server.has_crashed():
            return
        self._started_at = time.monotonic()
        try:
            self._server.start(self._engine)
        except Unavailable:
            return  # the next call tries again
