"""The bearer token, which HTTP requests need if they change something or come from other hosts (see guard.py).

The server creates it in a file when it starts; who can read the file has the token. Invariant: the token appears in no
argument, environment variable, log or message.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from kvdepot.config import Config, home_url
from kvdepot.errors import ConfigError
from kvdepot.protocol.addresses import socket_path
from kvdepot.protocol.curve import read_secret

_TOKEN = re.compile(r"[A-Za-z0-9_\-.~+/=]{16,512}")


def token_path(config: Config) -> Path:
    """The file that holds the token: `http_token_file`, or one beside the unix socket. For TCP and abstract sockets it
    is in the folder of the default socket, named after the arena."""
    if config.http_token_file:
        return Path(config.http_token_file)
    if path := socket_path(config.url):
        return path.with_name(path.name + ".token")
    return Path(home_url()[len("ipc://") :]).with_name(config.arena + ".token")


def read_token(config: Config) -> str:
    """The token of the server with these settings. Raises ConfigError if there is none, or others can read it."""
    path = token_path(config)
    token = read_secret(path).decode(errors="replace").strip()
    if not _TOKEN.fullmatch(token):
        raise ConfigError(f"{path} does not contain a token (16 to 512 letters, digits and - _ . ~ + / =)")
    return token


def obtain_token(config: Config) -> str:
    """The existing token, or else a new one, which outlives the server; but `http_token_file` is never created. Raises
    ConfigError."""
    path = token_path(config)
    if config.http_token_file or (path.exists() and not path.is_symlink() and path.stat().st_size):
        return read_token(config)
    token = secrets.token_urlsafe(32)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.unlink(missing_ok=True)  # a link, or an empty file of a server that was killed
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror}") from exc
    with open(fd, "w", encoding="utf-8") as file:  # noqa: PTH123 - a descriptor
        file.write(token + "\n")
    return token
