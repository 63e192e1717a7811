"""CURVE keys decide who may use a server that other users or hosts can reach.

CURVE (https://rfc.zeromq.org/spec/26) encrypts a connection and authenticates both ends. `kvdepot keygen` writes a
folder; the server reads all of it, each client one file. Invariant: no secret appears in a message, repr or log.

    DIR/server.key      public, secret
    DIR/CLIENT.key      public, secret, server: this client's key pair, and the server's public key
    DIR/clients.toml    [CLIENT] with public and, if it is bound to one, tenant: who is admitted

`Gate` answers ZeroMQ's authentication requests (ZAP, https://rfc.zeromq.org/spec/27) for clients that have proved that
they own a key. It runs on the server's loop: a request waits in its socket like any message.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from kvdepot.errors import ConfigError
from kvdepot.protocol.addresses import split_authority
from kvdepot.values import parse_toml

CLIENTS = "clients.toml"
_SERVER = "server"
_NAME = re.compile(r"[A-Za-z0-9_\-]{1,64}")
_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
OWN_TENANT, ALL_TENANTS = b"kvdepot", b"kvdepot-all-tenants"
"""ZAP domains: of sockets that serve a client its own tenant's chunks, and of those that publish every tenant's."""
_MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class Key:
    """A key pair in ZeroMQ's printable form, and for a client the public key of its server."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes = b""

    def use(self, socket: zmq.Socket[bytes]) -> None:
        """Make a client's socket use CURVE with its server. Call it before the socket connects."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)


@dataclass(frozen=True)
class KeyOwner:
    """A client whose key the server knows. tenant: the only one whose chunks it can reach; empty: without this
    limit."""

    name: str
    tenant: str = ""


@dataclass(frozen=True)
class ServerKeys:
    """The server's own key, and the owners of the clients' keys, by public key (32 bytes)."""

    key: Key
    clients: dict[bytes, KeyOwner]

    @property
    def tenants(self) -> set[str]:
        return {client.tenant for client in self.clients.values() if client.tenant}

    def is_tenant(self, tenant: str) -> bool:
        return tenant in self.tenants

    def tenant(self, user: str) -> str:
        """The tenant whose chunks a user can reach; empty: the default tenant."""
        return next((client.tenant for client in self.clients.values() if client.name == user), "")

    def admit(self, name: str) -> Key | None:
        """Make a key, in no file, for a client without a tenant; None if clients need no keys. name: one that is not
        valid in a key file, so that no other client has it."""
        assert not _NAME.fullmatch(name), name
        if not self.key.public:
            return None
        public, secret = zmq.curve_keypair()
        self.clients[z85.decode(public)] = KeyOwner(name)
        return Key(public, secret, self.key.public)


NO_KEYS = ServerKeys(Key(b"", b""), {})
"""The keys of a server whose clients need none."""


def is_loopback(url: str) -> bool:
    """Whether only processes of this host can reach an endpoint."""
    if not url.startswith("tcp://"):
        return True
    authority = split_authority(url[len("tcp://") :])
    if authority is None or authority[0] == "localhost":
        return authority is not None
    try:
        return ipaddress.ip_address(authority[0]).is_loopback
    except ValueError:
        return False  # a host name, an interface, or all interfaces


def refuse_open(url: str) -> None:
    """Raise ConfigError for an endpoint that other hosts can reach; for servers without keys."""
    if not is_loopback(url):
        raise ConfigError(
            f"{url} can be reached from other hosts, so clients need keys: make them with `kvdepot keygen "
            "DIR CLIENT...` and give --keys DIR, or listen on 127.0.0.1 or a unix socket"
        )


# -- reading


def read_secret(path: Path, forbidden: int = 0o077) -> bytes:
    """Read a file that others can neither read nor change. Raises ConfigError, whose text quotes nothing of the file.

    forbidden: the bits that the file's mode must not have.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror}") from exc
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise ConfigError(f"{path} is not a plain file")
        if info.st_uid not in (0, os.geteuid()):
            raise ConfigError(f"{path} belongs to user {info.st_uid}, not to user {os.geteuid()}")
        if info.st_mode & forbidden:
            what = "read" if forbidden & 0o044 else "change"
            raise ConfigError(
                f"others can {what} {path} (mode {stat.S_IMODE(info.st_mode):o}); if it is the right file, chmod it to "
                "600"
            )
        return os.read(fd, _MOST_BYTES)
    finally:
        os.close(fd)


def _read_table(path: Path, forbidden: int = 0o077) -> dict[str, object]:
    try:
        return parse_toml(read_secret(path, forbidden).decode())
    except ValueError:
        raise ConfigError(f"{path} is not TOML: create keys with `kvdepot keygen`") from None


def _key_text(path: Path, table: dict[str, object], name: str) -> bytes:
    value = table.get(name)
    if not isinstance(value, str) or not _KEY.fullmatch(value):
        raise ConfigError(f"{path}: {name} is missing or not a key of 40 characters")
    return value.encode()


def read_client_key(path: str | Path) -> Key:
    """Read a client's key file. Raises ConfigError if it is missing, not a key, or readable by others."""
    path = Path(path)
    table = _read_table(path)
    if "server" not in table and "secret" in table:
        raise ConfigError(f"{path} is a server's key: give one of its clients'")
    return Key(_key_text(path, table, "public"), _key_text(path, table, "secret"), _key_text(path, table, "server"))


def read_server_keys(folder: str | Path) -> ServerKeys:
    """Read the server's key and its clients' from a folder of keys. Raises ConfigError."""
    folder = Path(folder)
    path = folder / f"{_SERVER}.key"
    if not path.exists():
        raise ConfigError(f"{path} does not exist: make keys with `kvdepot keygen {folder} CLIENT...`")
    table = _read_table(path)
    key = Key(_key_text(path, table, "public"), _key_text(path, table, "secret"))
    return ServerKeys(key, {z85.decode(public): client for public, client in _read_clients(folder).items()})


def _read_clients(folder: Path) -> dict[bytes, KeyOwner]:
    path = folder / CLIENTS
    if not path.exists():
        return {}
    clients: dict[bytes, KeyOwner] = {}
    for name, entry in _read_table(path, 0o022).items():
        if not _NAME.fullmatch(name) or not isinstance(entry, dict) or not entry.keys() <= {"public", "tenant"}:
            raise ConfigError(f"{path}: [{name}] must have `public` and `tenant`")
        tenant = entry.get("tenant", "")
        if not isinstance(tenant, str) or (tenant and not _NAME.fullmatch(tenant)):
            raise ConfigError(f"{path}: the tenant of [{name}] must consist of letters, digits, - and _")
        public = _key_text(path, entry, "public")
        if public in clients:
            raise ConfigError(f"{path}: [{name}] and [{clients[public].name}] have the same key")
        clients[public] = KeyOwner(name, tenant)
    return clients


# -- writing


def generate(folder: str | Path, clients: Sequence[str], tenant: str = "") -> list[Path]:
    """Add keys to a folder: the server's if it is missing, and one for each client. Returns the files written.

    Raises ConfigError, before it writes anything, if a client already has a key, there is nothing to add, or others can
    read the folder, which is created for this user alone.
    """
    folder = Path(folder)
    wrong = next((name for name in (*clients, *([tenant] if tenant else [])) if not _NAME.fullmatch(name)), None)
    if wrong is not None:
        raise ConfigError(f"{wrong!r} is not a name of at most 64 letters, digits, - and _")
    if _SERVER in clients or len(set(clients)) < len(clients):
        raise ConfigError(f"a client must not be named {_SERVER!r}, and names must be unique")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.stat()
        if info.st_uid != os.geteuid() or info.st_mode & 0o077:
            raise ConfigError(f"users other than {os.geteuid()} can read {folder}: chmod it to 700")
        path = folder / f"{_SERVER}.key"
        known = {client.name for client in _read_clients(folder).values()}
        taken = [name for name in clients if name in known or (folder / f"{name}.key").exists()]
        if taken or (not clients and path.exists()):
            raise ConfigError(
                f"{folder} already has a key of {' and '.join(taken) or 'the server'}; name clients that have none, or "
                "remove the old key first"
            )
        written = []
        if not path.exists():
            public, secret = zmq.curve_keypair()
            _write(path, {"public": public, "secret": secret})
            written.append(path)
        server = read_server_keys(folder).key.public
        for name in clients:
            public, secret = zmq.curve_keypair()
            path = folder / f"{name}.key"
            _write(path, {"public": public, "secret": secret, "server": server})
            entry = {"public": public} | ({"tenant": tenant.encode()} if tenant else {})
            try:
                _write(folder / CLIENTS, entry, f"\n[{name}]\n")
            except OSError:
                path.unlink()  # no server would know this key
                raise
            written.append(path)
    except OSError as exc:
        raise ConfigError(f"{exc.filename or folder}: {exc.strerror}") from exc
    return written


def _write(path: Path, values: dict[str, bytes], heading: str = "") -> None:
    """Create a file that only this user can read; with a heading, append to it. Undoes a partial write."""
    once = os.O_APPEND if heading else os.O_EXCL
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | once, 0o600)
    before = os.fstat(fd).st_size
    try:
        with open(fd, "w", encoding="utf-8") as file:  # noqa: PTH123 - a descriptor
            file.write(heading + "".join(f'{name} = "{value.decode()}"\n' for name, value in values.items()))
    except OSError:
        if before:
            os.truncate(path, before)
        else:
            path.unlink()
        raise


# -- asking


class Gate:
    """Admits clients by their public keys. One per ZeroMQ context, created before the guarded socket is bound."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> None:
        self._clients = keys.clients
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def guard(self, socket: zmq.Socket[bytes], key: Key, domain: bytes = OWN_TENANT) -> None:
        """Admit only clients with known keys to a socket; in the domain ALL_TENANTS, only clients that are not bound to
        a tenant. Called before the socket is bound."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, domain)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer, ZeroMQ refuses the client

    def answer(self) -> bool:
        """Answer one request; returns whether the client was admitted. Its name becomes the `User-Id` of its
        messages."""
        frames = self.socket.recv_multipart()
        client = None
        if len(frames) == 7 and frames[0] == b"1.0" and frames[5] == b"CURVE":
            known = self._clients.get(frames[6])
            if known is not None and (frames[2] == OWN_TENANT or (frames[2] == ALL_TENANTS and not known.tenant)):
                client = known
        verdict = (b"200", b"", client.name.encode(), b"") if client else (b"400", b"no such key", b"", b"")
        with contextlib.suppress(zmq.ZMQError):  # the connection is gone
            self.socket.send_multipart((b"1.0", frames[1] if len(frames) > 1 else b"", *verdict), zmq.NOBLOCK)
        return client is not None

    def close(self) -> None:
        self.socket.close()
