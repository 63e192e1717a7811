"""The server's settings: one frozen object, merged in one place. Later wins: defaults, the TOML file of `--config`,
environment variables `KVDEPOT_<FIELD>`, command-line flags. Nothing else reads the environment."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import msgspec
from msgspec import Meta

from kvdepot.errors import ConfigError
from kvdepot.eviction import POLICIES
from kvdepot.memory.room import allocated, default_arena, limits
from kvdepot.memory.shm import SHM
from kvdepot.protocol.addresses import MOST_PATH, MOST_PORT, fault_of_endpoint
from kvdepot.protocol.keys import salt_tag, tenant_salt
from kvdepot.protocol.leases import HINT_S, MOST_PRIORITY, NORMAL
from kvdepot.protocol.quotas import GivenQuota, Quota
from kvdepot.tiers import TierConfig, parse
from kvdepot.tiers.rules import Rules
from kvdepot.tiers.urls import shown
from kvdepot.values import explain, in_units, parse_toml, suggestion

GIB = 1 << 30
_DEFAULT_ARENA = 4 * GIB
_LONGEST_SOCKET = len("/engine-0123456789abcdef.sock")
"""Bytes of the longest name of a socket in this user's folder."""
_PREFIX = "KVDEPOT_"
MOST_SALTS = 64
"""The most tables `[salts.SALT]` in a settings file."""
_CONTRACT_TOKENS = 256
"""Tokens per chunk with `chunk_size = auto`, of clients of the LMCache contract, and with remote tiers."""
SMALLEST_BLOCK = 16
"""Tokens in the smallest block that vLLM uses by default."""


def default_url() -> str:
    """The endpoint of servers and clients that are given none: `KVDEPOT_URL`, or this user's own. Raises
    ConfigError."""
    return url_in_environment() or home_url()


def url_in_environment() -> str:
    """The endpoint in `KVDEPOT_URL`, where a user runs the server; empty if it is not set. Raises ConfigError."""
    url = os.environ.get(f"{_PREFIX}URL", "")
    if url and (fault := fault_of_endpoint(url)):
        raise ConfigError(f"{_PREFIX}URL: {fault}")
    return url


def home_url() -> str:
    """This user's own endpoint: a unix socket in a folder that only this user can open: in XDG_RUNTIME_DIR, or else in
    the first usable folder for temporary files, or else in /dev/shm. A folder whose sockets would have too long paths
    is passed over."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    temporary = [os.environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP")]
    usable = [folder for folder in (*temporary, "/tmp", "/var/tmp") if folder and os.access(folder, os.W_OK | os.X_OK)]
    for folder in (runtime, *usable, str(SHM)):
        # Not the current folder, as Python's tempfile chooses: another process would look elsewhere.
        home = Path(folder).absolute() / f"kvdepot-{os.geteuid()}"
        if folder and len(os.fsencode(home)) + _LONGEST_SOCKET <= MOST_PATH:
            break
    return f"ipc://{home / 'depot.sock'}"


def arena_folder(given: str = "") -> Path:
    """The folder of the arena and the liveness files, for a client: as given, or `KVDEPOT_ARENA_DIR`, or /dev/shm.
    Raises ConfigError."""
    found = given or os.environ.get(f"{_PREFIX}ARENA_DIR", str(SHM))
    if fault := _fault_of_folder(found):
        raise ConfigError(f"{'arena_dir' if given else f'{_PREFIX}ARENA_DIR'}: {fault}")
    return Path(found)


def _fault_of_folder(path: str) -> str:
    return "" if Path(path).is_absolute() and "\0" not in path else f"{path!r} is not the absolute path of a folder"


def default_key() -> str:
    """The key file of this process's clients; empty if none is set."""
    return os.environ.get("KVDEPOT_KEY", "")


TableT = TypeVar("TableT", bound=msgspec.Struct)

ONLY_IN_FILE = ("salts", "tenants")
"""Settings that are tables, which neither a flag nor a variable can give."""

_ADDRESS = re.compile(r"([A-Za-z0-9.\-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")
_MOST_GIB = 1 << 30


TOPICS = ("Memory", "Tiers", "Connections and security", "Start, stop, log", "Limits")
"""The topics of settings, in the order of the help."""


def _about(topic: str, description: str, metavar: str = "N", **bounds: Any) -> Meta:
    """A setting's topic, help text, the word that stands for its value in the help, and its bounds."""
    return Meta(description=description, extra={"topic": topic, "metavar": metavar}, **bounds)


_memory, _tier, _access, _life, _limit = (partial(_about, topic) for topic in TOPICS)


def _one_of(*words: str) -> str:
    """The pattern of a setting that takes one of these words."""
    return rf"^({'|'.join(words)})\Z"  # not $, which a final newline would pass


class SaltQuota(GivenQuota, frozen=True):
    """A table `[salts.SALT]`: a quota of the requests with one cache salt; with `ttl_s` alone, a time to live for every
    tenant. tenant: whose requests; None: those of clients without a tenant."""

    tenant: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.ttl_s or self.has_quota):
            raise ValueError("it says nothing: give ttl_s, or a quota (with tenant, a floor, a cap or another weight)")

    @property
    def has_quota(self) -> bool:
        """Whether it says more than `ttl_s`."""
        fields = [each for each in msgspec.structs.fields(self) if each.name != "ttl_s"]
        return any(getattr(self, each.name) != each.default for each in fields)


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every setting of `kvdepot serve`; each field's description is its help text."""

    url: Annotated[
        str, _access("ZeroMQ endpoint to listen on: ipc://PATH or tcp://HOST:PORT (IPv6: tcp://[::1]:PORT)", "URL")
    ] = ""
    chunk_size: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 20)] | Literal["auto"],
        _memory("tokens per chunk; auto = the fewest blocks of an engine with 256 KiB of KV, or 256 with remote tiers"),
    ] = "auto"
    arena_gib: Annotated[
        float,
        _memory("arena size, e.g. 64GiB; 0 = 4 GiB, or a quarter of free memory if less", "SIZE", ge=0, le=_MOST_GIB),
    ] = 0.0
    keys: Annotated[
        str, _access("folder of `kvdepot keygen`; clients then need a key; required for TCP beyond this host", "DIR")
    ] = ""
    arena_dir: Annotated[
        str, _memory("folder of a tmpfs for the arena; clients see the same one at KVDEPOT_ARENA_DIR", "DIR")
    ] = str(SHM)
    arena_name: Annotated[str, _memory("name of the arena's file; empty = derived from user and url", "NAME")] = ""
    policy: Annotated[
        str, _memory("eviction policy: " + ", ".join(sorted(POLICIES)), pattern=_one_of(*sorted(POLICIES)))
    ] = "learned"
    max_message_mib: Annotated[int, _limit("largest message accepted, in MiB or as 1GiB", "SIZE", ge=1, le=1024)] = 4
    max_clients: Annotated[int, _limit("clients served at once", ge=1)] = 4096
    max_queued: Annotated[int, _limit("stores and retrieves in flight per client", ge=1)] = 1024
    max_sessions: Annotated[int, _limit("requests per client that hold pins", ge=1)] = 100_000
    max_pins: Annotated[int, _limit("chunks per client that its requests pin", ge=1)] = 1 << 22
    max_instances: Annotated[int, _limit("registrations of KV tensors per client", ge=1)] = 64
    max_namespaces: Annotated[int, _limit("distinct models, parallel shapes and layouts", ge=1)] = 1024
    max_rate: Annotated[int, _limit("requests per second and client; large ones count more", ge=16)] = 20_000
    max_hint_s: Annotated[
        int, _limit("seconds for which hints keep chunks, at most; 0 = they keep and remove nothing", ge=0, le=1 << 31)
    ] = HINT_S
    max_hint_priority: Annotated[
        int, _limit("highest priority that a request's hints can give its leases", ge=0, le=MOST_PRIORITY)
    ] = NORMAL
    drain_s: Annotated[float, _life("seconds that copies in progress may take when stopped", ge=0, le=86_400)] = 5.0
    idle_exit: Annotated[
        float, _life("seconds without an engine after which the server stops; 0 = never", ge=0, le=1e9)
    ] = 0.0
    on_stop: Annotated[
        str, _memory("on stop, remove the arena or keep it for the next server", pattern=_one_of("remove", "keep"))
    ] = "remove"
    tiers: Annotated[
        tuple[str, ...],
        _tier("storage behind memory, nearest first: disk:///DIR, redis://..., s3://..., mooncake://...", "URL..."),
    ] = ()
    lookup_s: Annotated[
        float, _tier("seconds a lookup may wait for tiers; what arrives later is recomputed", gt=0, le=8)
    ] = 1.0
    ttl_s: Annotated[int, _memory("seconds after which a chunk expires; 0 = never", ge=0, le=1 << 31)] = 0
    tenants: Annotated[
        dict[str, GivenQuota],
        _memory("floors, caps, weight and expiry by tenant: tables [tenants.NAME], see SECURITY.md"),
    ] = {}
    salts: Annotated[
        dict[str, SaltQuota], _memory("the same by cache salt: tables [salts.SALT] as for tenants, and with tenant")
    ] = {}
    verify_hits: Annotated[
        float, _memory("share of hits that engines compute and compare with the depot's, such as 0.001", ge=0, le=1)
    ] = 0.0
    verify: Annotated[
        str, _memory("checksums: off, sampled (1 chunk in 16), always", pattern=_one_of("off", "sampled", "always"))
    ] = "sampled"
    http: Annotated[
        str,
        _access("page, metrics and API: HOST:PORT, a PORT of this host, or off; beyond this host a token", "ADDRESS"),
    ] = "127.0.0.1:7077"
    http_token_file: Annotated[
        str, _access("file with the HTTP token (mode 0600); empty = created beside the unix socket", "FILE")
    ] = ""
    log_level: Annotated[
        str, _life("debug, info, warning or error", pattern=_one_of("debug", "info", "warning", "error"))
    ] = "info"
    log_format: Annotated[str, _life("human, or json: one object per line", pattern=_one_of("human", "json"))] = "human"
    kv_events: Annotated[
        str, _access("vLLM's KV events for routers; replays on PATH.replay or the next port; empty = off", "URL")
    ] = ""

    def __post_init__(self) -> None:
        if self.url and (fault := fault_of_endpoint(self.url)):
            raise ValueError(f"url: {fault}")
        if self.http != "off" and not ((found := _ADDRESS.fullmatch(self.http)) and int(found["port"]) <= MOST_PORT):
            raise ValueError(f"http: {self.http!r} is neither off nor HOST:PORT with a port up to {MOST_PORT}")
        # Replays use the next port.
        if self.kv_events and fault_of_endpoint(self.kv_events, MOST_PORT - 1):
            raise ValueError(
                f"kv_events: {self.kv_events!r} is neither ipc://PATH nor tcp://HOST:PORT with a port below {MOST_PORT}"
            )
        if "" in self.salts:
            raise ValueError("salts: a salt has at least one character; ttl_s applies to requests without one")
        if len(self.salts) > MOST_SALTS:
            raise ValueError(f"salts: {len(self.salts)} tables; the limit is {MOST_SALTS}")
        names = [parse(tier).name for tier in self.tiers]
        if len(set(names)) < len(names):
            raise ValueError(f"tiers: duplicate tier among {', '.join(names)}")
        if fault := _fault_of_folder(self.arena_dir):
            raise ValueError(f"arena_dir: {fault}")
        if self.arena_name and not re.fullmatch(r"[A-Za-z0-9_\-][A-Za-z0-9_.\-]{0,199}", self.arena_name):
            raise ValueError(f"arena_name: {self.arena_name!r} is not a plain file name")

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={value!r}' for name, value in masked(self).items())})"

    @property
    def tier_configs(self) -> list[TierConfig]:
        return [parse(text) for text in self.tiers]

    @property
    def salt_ttls(self) -> dict[bytes, int]:
        """Seconds after which chunks expire, by the tag of their cache salt (`keys.salt_tag`), for every tenant."""
        return {salt_tag(salt): each.ttl_s for salt, each in self.salts.items() if not each.has_quota}

    @property
    def quotas(self) -> dict[tuple[str, bytes], Quota]:
        """Quotas by tenant and tag of a cache salt (`keys.salt_tag`; an empty tag: the tenant's own)."""
        salts = {(each.tenant or "", salt_tag(salt)): each for salt, each in self.salts.items() if each.has_quota}
        tenants = {(tenant, b""): each.quota for tenant, each in self.tenants.items()}
        return tenants | {owner: each.quota for owner, each in salts.items()}

    @property
    def rules(self) -> Rules:
        """The rules that tiers start with. Local tiers remove nothing because of age until the core says so."""
        quotas = {(tenant, tenant_salt(tenant, tag)): quota for (tenant, tag), quota in self.quotas.items()}
        return Rules.of(quotas, {}, self.ttl_s)

    @property
    def chunk_tokens(self) -> int:
        """Tokens per chunk of clients that do not choose their own: `chunk_size`, or 256 with auto."""
        return _CONTRACT_TOKENS if self.chunk_size == "auto" else self.chunk_size

    @property
    def has_free_chunks(self) -> bool:
        """Whether engines choose their own chunk size. Not with remote tiers, where a chunk is an object."""
        return self.chunk_size == "auto" and all(tier.is_local for tier in self.tier_configs)

    @property
    def wants_tokens(self) -> bool:
        """Whether engines should describe their chunks to the server, which publishes their token ids."""
        return bool(self.kv_events)

    @property
    def arena(self) -> str:
        """Name of the arena's file in `arena_dir`."""
        import hashlib  # it loads OpenSSL, which only the server needs

        made = f"kvdepot-{os.geteuid()}-{hashlib.sha256(self.url.encode()).hexdigest()[:12]}"
        return self.arena_name or made

    @property
    def arena_bytes(self) -> int:
        """Size of the arena: `arena_gib`, or 4 GiB, or `default_arena` if less. An earlier server's arena counts as
        free, so that it keeps its size."""
        if self.arena_gib:
            return int(self.arena_gib * GIB)
        folder = Path(self.arena_dir)
        return min([_DEFAULT_ARENA, default_arena(limits(folder), allocated(folder, self.arena))])


@functools.cache
def about(setting: str) -> Meta:
    """The description of a setting, with its topic and the word that stands for its value; empty if there is none."""
    found: Meta = getattr(_hints().get(setting), "__metadata__", (Meta(),))[0]
    return found


def words_of(setting: str) -> tuple[str, ...]:
    """The allowed values of a setting that takes one of a few words; otherwise empty."""
    pattern = about(setting).pattern
    return tuple(pattern.removeprefix("^(").removesuffix(r")\Z").split("|")) if pattern else ()


@functools.cache  # they take a millisecond, and the flags of two commands are made of them
def _hints() -> dict[str, object]:
    return get_type_hints(Config, include_extras=True)


def doubts(config: Config) -> list[tuple[str, str]]:
    """Probable mistakes in usable settings, each with advice: a chunk size that no vLLM block divides, and variables of
    the environment that look like settings."""
    chunk_size, found = config.chunk_tokens, []
    if chunk_size % SMALLEST_BLOCK:
        fitting = -(-chunk_size // SMALLEST_BLOCK) * SMALLEST_BLOCK
        what = (
            f"chunk size {chunk_size} is not a multiple of {SMALLEST_BLOCK}, vLLM's smallest block. kvdepot's vLLM "
            f"connector uses whole blocks instead: {fitting} tokens with blocks of {SMALLEST_BLOCK}. A client of the "
            f"LMCache contract is refused if its block does not divide {chunk_size}"
        )
        found.append((what, f"--chunk-size {Config().chunk_size}, the default, suits vLLM"))
    strays = stray_variables(os.environ)
    return found + [(f"environment variable {name} is not a setting", advice) for name, advice in strays]


def load(
    file: str | None = None, flags: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None
) -> Config:
    """Merge file, environment and flags. Raises ConfigError, which names the setting and its source."""
    return load_with_sources(file, flags, environ)[0]


def load_with_sources(
    file: str | None = None, flags: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None
) -> tuple[Config, dict[str, str]]:
    """Like `load`, plus the source of each setting: the file, the variable, the flag, or `default`."""
    merged: dict[str, object] = {}
    source: dict[str, str] = {}
    if file is not None:
        try:
            table = parse_toml(Path(file).read_text(encoding="utf-8-sig"))
        except OSError as exc:
            raise ConfigError(f"cannot read the settings file {file}: {exc.strerror}") from exc
        except ValueError as exc:
            raise ConfigError(f"the settings file {file} is not TOML: {exc}") from exc
        merged |= table
        source |= dict.fromkeys(table, file)
    for variable, text in (os.environ if environ is None else environ).items():
        setting = variable[len(_PREFIX) :].lower() if variable.startswith(_PREFIX) else ""
        if setting in Config.__struct_fields__ and setting not in ONLY_IN_FILE:
            merged[setting] = text
            source[setting] = variable
    for name, value in (flags or {}).items():
        if value not in (None, ()):
            merged[name] = value
            source[name] = "--" + name.replace("_", "-")
    if isinstance(urls := merged.get("tiers"), str):  # from the environment; URLs contain no spaces
        merged["tiers"] = urls.split()
    _refuse_unknown(source)
    merged = in_units(merged)
    if str(merged.get("http", "")).isdecimal():
        merged["http"] = f"127.0.0.1:{merged['http']}"
    for name, kind in (("tenants", GivenQuota), ("salts", SaltQuota)):
        if name in merged:
            merged[name] = _tables(name, merged[name], kind, source[name])
    try:
        config = msgspec.convert(merged, Config, strict=False)
    except msgspec.ValidationError as exc:
        name, said = explain(exc, merged)
        if name == "chunk_size" and "out of range" not in said:
            said = f"{merged[name]!r} is neither auto nor a number of tokens"
        if file is not None and source.get(name) == file:
            name = f"{file}: {name}"  # the name of a flag or variable identifies the setting already
        raise ConfigError(f"{source.get(name, name)}: {said}" if name else said) from exc
    if not config.url:
        config = msgspec.structs.replace(config, url=home_url())
    return config, {name: source.get(name, "default") for name in Config.__struct_fields__}


def _tables(section: str, tables: object, kind: type[TableT], where: str) -> dict[str, TableT]:
    """The tables of tenants or salts. Raises ConfigError, which names the table and the setting in it."""
    if not isinstance(tables, dict):
        raise ConfigError(f"{where}: {section}: {tables!r} is not a table: write [{section}.NAME]")
    found = {}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{where}: {section}.{name}: {table!r} is not a table: write [{section}.{name}]")
        given = in_units(table)
        try:
            found[name] = msgspec.convert(given, kind, strict=False)
        except msgspec.ValidationError as exc:
            field, said = explain(exc, given)
            raise ConfigError(f"{where}: {section}.{name}{'.' if field else ''}{field}: {said}") from exc
    return found


def _refuse_unknown(source: Mapping[str, str]) -> None:
    """Raise ConfigError with all unknown settings of the first source that has any."""
    unknown = [name for name in source if name not in Config.__struct_fields__]
    if unknown:
        meant = {name: suggestion(name, Config.__struct_fields__) for name in unknown}
        names = [f"{name} (did you mean {close}?)" if close else name for name, close in meant.items()]
        raise ConfigError(
            f"{source[unknown[0]]}: unknown setting {', '.join(names)}; `kvdepot config` lists all settings"
        )


_OTHER_VARIABLES = {"KEY", "BENCH_TRACE", "TRACE"}
"""Variables, after the prefix, that we read but that are not settings of the server."""
_LINK = re.compile(r"SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)?")
"""Variables that Kubernetes and docker set for a service named kvdepot."""


def stray_variables(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Variables that look like settings but are not: their names, and what to do."""
    known = {name.upper() for name in Config.__struct_fields__ if name not in ONLY_IN_FILE} | _OTHER_VARIABLES
    found = []
    for variable in sorted(variable for variable in environ if variable.startswith(_PREFIX)):
        name = variable[len(_PREFIX) :]  # the prefix would make all names similar
        if name not in known and not _LINK.fullmatch(name):
            meant = suggestion(name, known)
            advice = f"did you mean {_PREFIX}{meant}?" if meant else "`kvdepot config` lists all settings"
            found.append((variable, advice))
    return found


def masked(config: Config) -> dict[str, object]:
    """The settings by name, for display; secrets in the URLs of tiers are shown as ***."""
    values = msgspec.structs.asdict(config)
    tenants = {name: msgspec.structs.asdict(quota) for name, quota in config.tenants.items()}
    salts = {
        salt_tag(salt).hex(): msgspec.structs.asdict(quota) if quota.has_quota else {"ttl_s": quota.ttl_s}
        for salt, quota in config.salts.items()
    }  # users may keep salts secret
    return values | {"tiers": [shown(tier) for tier in config.tiers], "tenants": tenants, "salts": salts}


_NOT_REPORTED = ("keys", "http_token_file", *ONLY_IN_FILE)
"""Settings that a status leaves out, because any client can ask for it: places of secrets, and names of tenants."""


def reported(config: Config) -> dict[str, str]:
    """The settings by name, as text, for a server's status: without secrets."""
    return {name: in_text(value) for name, value in masked(config).items() if name not in _NOT_REPORTED}


def in_text(value: object) -> str:
    """The value of a setting in one line."""
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    if value == {}:
        return ""
    return f"{value:.15g}" if isinstance(value, float) else str(value)
