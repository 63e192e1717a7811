"""The server's settings: one frozen object, merged in one place.

Read by cli/ before anything else starts. Later wins: defaults, the TOML file of `--config`,
environment variables `KVDEPOT_<FIELD>`, command-line flags. Nothing else reads the environment.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote

import msgspec
from msgspec import Meta

from kvdepot.addresses import MOST_PORT, fault_of_endpoint
from kvdepot.errors import ConfigError
from kvdepot.evict import POLICIES
from kvdepot.tiers import TierConfig, parse

__all__ = ["Config", "default_key", "default_url", "load", "load_with_sources", "masked", "words_of"]

GIB = 1 << 30


def default_url() -> str:
    """Where a server of this user listens, and where a client looks: a unix socket no other user can open."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if not base:
        import tempfile  # which takes as long to import as all settings

        base = tempfile.gettempdir()
    return f"ipc://{Path(base) / f'kvdepot-{os.geteuid()}' / 'depot.sock'}"


def default_key() -> str:
    """The key file of this process's clients; empty where they need none."""
    return os.environ.get("KVDEPOT_KEY", "")


_WORDS = {
    "log_format": ("human", "json"),
    "log_level": ("debug", "info", "warning", "error"),
    "on_stop": ("remove", "keep"),
    "verify": ("off", "sampled", "always"),
}


_ADDRESS = re.compile(r"([A-Za-z0-9.\-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")
_MOST_GIB = 1 << 30


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every setting of `kvdepot serve`; each field's description is its help text."""

    url: Annotated[str, Meta(description="ZeroMQ endpoint to listen on: ipc://PATH or tcp://HOST:PORT")] = ""
    chunk_size: Annotated[int, Meta(ge=1, le=1 << 20, description="tokens a chunk")] = 256
    arena_gib: Annotated[
        float, Meta(ge=0, description="size of the arena in GiB; 0 = 4, or a quarter of free memory if less")
    ] = 0.0
    keys: Annotated[
        str, Meta(description="folder made by `kvdepot keygen`: clients need a key; a must for tcp beyond this host")
    ] = ""
    arena_name: Annotated[
        str, Meta(description="name of the arena in /dev/shm; empty = made from the user and the url")
    ] = ""
    copy_threads: Annotated[int, Meta(ge=1, le=256, description="threads that copy KV")] = 2
    gpu_staging_mib: Annotated[
        int, Meta(ge=0, le=4096, description="device memory that copies may take for themselves, in MiB a GPU in use")
    ] = 64
    policy: Annotated[str, Meta(description="eviction policy: " + ", ".join(sorted(POLICIES)))] = "lru"
    max_message_mib: Annotated[int, Meta(ge=1, le=1024, description="largest message taken, in MiB")] = 4
    max_clients: Annotated[int, Meta(ge=1, description="clients served at once")] = 4096
    max_queued: Annotated[int, Meta(ge=1, description="stores and retrieves in flight per client")] = 1024
    max_sessions: Annotated[int, Meta(ge=1, description="requests per client that hold pins")] = 100_000
    max_pins: Annotated[int, Meta(ge=1, description="chunks per client that its requests pin")] = 1 << 22
    max_instances: Annotated[int, Meta(ge=1, description="registrations of KV tensors per client")] = 64
    max_namespaces: Annotated[
        int, Meta(ge=1, description="models, shapes and layouts that are told from each other")
    ] = 1024
    max_rate: Annotated[int, Meta(ge=16, description="requests a second per client; large ones count more")] = 20_000
    drain_s: Annotated[float, Meta(ge=0, le=86_400, description="seconds to finish copies in flight when stopped")] = (
        5.0
    )
    on_stop: Annotated[
        str, Meta(description="what a stop does with the arena: remove, or keep it for the next server")
    ] = "remove"
    tiers: Annotated[
        tuple[str, ...],
        Meta(description="what lies behind memory, nearest first: disk:///DIR, redis://..., s3://..., mooncake://..."),
    ] = ()
    lookup_s: Annotated[
        float, Meta(gt=0, le=8, description="seconds a lookup may look behind memory; what comes later is recomputed")
    ] = 1.0
    ttl_s: Annotated[
        int, Meta(ge=0, le=1 << 31, description="seconds after which a chunk counts as gone; 0 = never")
    ] = 0
    verify: Annotated[
        str, Meta(description="checksums of chunks in memory: off, sampled (one chunk in 16) or always")
    ] = "sampled"
    http: Annotated[
        str,
        Meta(
            description="HOST:PORT of page, metrics and API; off = none; beyond this host, or with keys: with a token"
        ),
    ] = "127.0.0.1:7077"
    http_token_file: Annotated[
        str, Meta(description="file with the token for HTTP (mode 0600); empty = one made beside the unix socket")
    ] = ""
    log_level: Annotated[str, Meta(description="debug, info, warning or error")] = "info"
    log_format: Annotated[str, Meta(description="human, or json: one object a line")] = "human"
    kv_events: Annotated[
        str,
        Meta(
            description="where routers hear, as vLLM's KV events, which chunks come and go: ipc://PATH or "
            "tcp://HOST:PORT; replays at PATH.replay or the next port; empty = off"
        ),
    ] = ""

    def __post_init__(self) -> None:
        for name in ("arena_gib", "drain_s", "lookup_s"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}: {getattr(self, name)} is not a finite number")
        if self.arena_gib > _MOST_GIB:
            raise ValueError(f"arena_gib: {self.arena_gib:g} GiB is more than a machine has; give GiB, such as 64")
        if self.url and (fault := fault_of_endpoint(self.url)):
            raise ValueError(f"url: {fault}")
        if self.http != "off" and not ((found := _ADDRESS.fullmatch(self.http)) and int(found["port"]) <= MOST_PORT):
            raise ValueError(f"http: {self.http!r} is neither HOST:PORT nor off")
        if self.kv_events and not _is_events_endpoint(self.kv_events):
            raise ValueError(
                f"kv_events: {self.kv_events!r} is neither ipc://PATH nor tcp://HOST:PORT with a port below {MOST_PORT}"
            )
        if self.policy not in POLICIES:
            raise ValueError(f"policy: {self.policy!r} is none of {', '.join(sorted(POLICIES))}")
        for name, allowed in _WORDS.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: {getattr(self, name)!r} is none of {', '.join(allowed)}")
        names = [parse(tier).name for tier in self.tiers]
        if len(set(names)) < len(names):
            raise ValueError(f"tiers: one of {', '.join(names)} stands there twice")
        if self.arena_name and not re.fullmatch(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]{0,199}", self.arena_name):
            raise ValueError(f"arena_name: {self.arena_name!r} is not a plain file name")

    @property
    def tier_configs(self) -> list[TierConfig]:
        """The tiers as they were asked for."""
        return [parse(text) for text in self.tiers]

    @property
    def arena(self) -> str:
        """Name of the arena's file in /dev/shm."""
        import hashlib  # and OpenSSL with it, for the server alone

        made = f"kvdepot-{os.geteuid()}-{hashlib.sha256(self.url.encode()).hexdigest()[:12]}"
        return self.arena_name or made

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena: what was asked for, or the default for this machine."""
        if self.arena_gib:
            return int(self.arena_gib * GIB)
        return min(4 * GIB, _free_memory() // 4)


def words_of(setting: str) -> tuple[str, ...]:
    """What a setting can be, where that is one of a few words."""
    return tuple(sorted(POLICIES)) if setting == "policy" else _WORDS.get(setting, ())


def _is_events_endpoint(url: str) -> bool:
    return not fault_of_endpoint(url, MOST_PORT - 1)  # replays are asked for at the next port


def _free_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 4 * GIB


def load(
    file: str | None = None, flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> Config:
    """Merge file, environment and flags. Raises ConfigError that names the field and where it came from."""
    return load_with_sources(file, flags, environ)[0]


def load_with_sources(
    file: str | None = None, flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> tuple[Config, dict[str, str]]:
    """As `load`; and by field where its value came from: the file, the variable, the flag, or `default`."""
    merged: dict[str, Any] = {}
    source: dict[str, str] = {}
    if file is not None:
        from kvdepot.toml import tomllib

        try:
            table = tomllib.loads(Path(file).read_text())
        except OSError as exc:
            raise ConfigError(f"{file}: {exc.strerror}") from exc
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
            raise ConfigError(f"{file}: not TOML: {exc}") from exc
        merged |= table
        source |= dict.fromkeys(table, file)
    for name, value in (os.environ if environ is None else environ).items():
        if name.startswith("KVDEPOT_") and name[8:].lower() in Config.__struct_fields__:
            merged[name[8:].lower()] = value
            source[name[8:].lower()] = name
    for name, value in (flags or {}).items():
        if value is not None:
            merged[name] = value
            source[name] = "--" + name.replace("_", "-")
    if isinstance(merged.get("tiers"), str):  # as the environment has it: URLs hold no spaces
        merged["tiers"] = merged["tiers"].split()
    try:
        config = msgspec.convert(merged, Config, strict=False)
    except msgspec.ValidationError as exc:
        text = str(exc)
        found = re.search(r"`\$\.(\w+)`|field `(\w+)`|^(\w+):", text)
        name = next(filter(None, found.groups())) if found else ""
        where = f"{source[name]}: " if name in source else ""
        said = re.sub(r" - at `\$(\.\w+)?`$", "", text)
        if wrong := re.fullmatch(r"Expected `(int|float)`, got `str`", said):
            said = f"{merged[name]!r} is no {'whole number' if wrong[1] == 'int' else 'number'}"
        raise ConfigError(f"{where}{name}: {said}" if name and not said.startswith(name) else where + said) from exc
    if not config.url:
        config = msgspec.structs.replace(config, url=default_url())
    return config, {name: source.get(name, "default") for name in Config.__struct_fields__}


_SECRET = re.compile("secret|token|passw|passphrase|credential|access_key|signature", re.IGNORECASE)


def masked(config: Config) -> dict[str, Any]:
    """The settings by name, for people to see: what a URL holds of passwords stands there as ***."""
    shown = {}
    for name, value in msgspec.structs.asdict(config).items():
        if isinstance(value, tuple):
            value = [_masked(text) for text in value]
        shown[name] = _masked(value) if isinstance(value, str) else value
    return shown


def _masked(text: str) -> str:
    """A URL without its secrets; what is no URL as it is. What may be a password is taken for one."""
    scheme, colon, rest = text.partition("://")
    if not colon:
        return text
    place, mark, query = rest.partition("?")
    options = [option.partition("=") for option in query.split("&")] if mark else []
    if any("@" in name or ("@" in value and "://" not in value) for name, _, value in options):
        # a password with a ? or & in it
        return f"{scheme}://***"
    credentials, at, host = place.rpartition("@")
    user, divider, _ = credentials.partition(":")
    kept = (f"{user}:***@" if divider else "***@") if at else ""
    told = [f"{name}{equals}{_masked_option(name, value)}" for name, equals, value in options]
    return f"{scheme}://{kept}{host}{mark}{'&'.join(told)}"


def _masked_option(name: str, value: str) -> str:
    """Its value, which may be a URL with secrets of its own; % signs hide none."""
    if value and _SECRET.search(name) and not name.endswith("_file"):
        return "***"
    read = unquote(value)
    shown = _masked(read)
    return value if shown == read else shown
